"""Kernels that sum attention rows without ever holding an L × S matrix."""

from __future__ import annotations

from acutance.kernels.blocked import Sums
from acutance.kernels.dispatch import BACKENDS
from acutance.kernels.info import KernelInfo, info
from acutance.kernels.tiles import accumulate_dtype

__all__ = ["BACKENDS", "KernelInfo", "Sums", "accumulate_dtype", "info"]
