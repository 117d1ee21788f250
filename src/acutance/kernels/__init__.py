"""Kernels that sum attention rows without ever holding an L × S matrix."""

from __future__ import annotations

from acutance.kernels.call import Sums, accumulate_dtype
from acutance.kernels.dispatch import BACKENDS
from acutance.kernels.info import KernelInfo, info

__all__ = ["BACKENDS", "KernelInfo", "Sums", "accumulate_dtype", "info"]
