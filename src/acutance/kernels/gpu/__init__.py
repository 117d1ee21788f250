"""Triton kernels for CUDA devices, with the results of the blocked path."""

from __future__ import annotations

from acutance.kernels.gpu.arguments import supported, why_not
from acutance.kernels.gpu.first_use import refusal_reason
from acutance.kernels.gpu.passes import backward, forward, unsupported_gradient

__all__ = [
    "backward",
    "forward",
    "refusal_reason",
    "supported",
    "unsupported_gradient",
    "why_not",
]
