"""Attention kernels that models call as functions: flash-attn, xFormers, FlashInfer and others."""
