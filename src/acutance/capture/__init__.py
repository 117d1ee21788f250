"""Capture every attention call that a PyTorch model makes."""
