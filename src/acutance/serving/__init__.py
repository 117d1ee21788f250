"""Attention statistics of a model while it serves requests: vLLM, and text for Prometheus."""

from __future__ import annotations

from acutance.serving.cache_layout import CacheLayout
from acutance.serving.served_rows import ServedRows, prometheus_text
from acutance.serving.vllm_plugin import read_vllm, register

__all__ = ["CacheLayout", "ServedRows", "prometheus_text", "read_vllm", "register"]
