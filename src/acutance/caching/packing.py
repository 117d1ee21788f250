"""Rounding to 8, 4 or 2 bits with a scale and a zero point for each group, packed into bytes.

Keys share a scale along tokens, one for each channel; values along channels, one for each token.
Liu et al. (2024), arXiv:2402.02750, give the reason: channels of keys differ in size, and a value's
error should stay in its token. optimum-quanto packs too, but compiles an extension at first use and
requires ninja for it; what is needed here are these two functions in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packed", "pack", "quantise", "unpack"]

#: Spacing of float16 next to 1. The zero point is rounded down by it, so that no number is below.
_EPS = 2.0**-10


@dataclass(frozen=True)
class Packed:
    """Codes of whole groups of tokens with their scales.

    Attributes:
        codes: uint8 (..., G, tokens · bits / 8, D) for G groups of tokens.
        scale: float16, broadcastable to (..., G, tokens, D / c, c) for c channels that share one.
        zero: float16, the same shape.
        bits: 8, 4 or 2.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    def restore(self, dtype: torch.dtype) -> Tensor:
        """The rounded numbers, (..., G · tokens, D)."""
        codes = unpack(self.codes, self.bits)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        parts = codes.unflatten(-1, (self.scale.shape[-2], -1)).to(wide)
        numbers = torch.addcmul(self.zero.to(wide), parts, self.scale.to(wide))
        return numbers.flatten(-2).flatten(-3, -2).to(dtype)


def quantise(groups: Tensor, bits: int, channels: int | None) -> Packed:
    """Round numbers to 2^bits levels between the least and the largest of each group.

    Args:
        groups: (..., G, tokens, D), tokens a multiple of 8.
        bits: 8, 4 or 2.
        channels: channels of a token that share a scale; None shares it along tokens instead, one
            for each channel.

    Example:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(2).view(1, 8, 1)
        >>> quantise(x, 2, None).restore(torch.float32).flatten()
        tensor([0.0000, 1.0010, 2.0020, 3.0029, 0.0000, 1.0010, 2.0020, 3.0029])
    """
    width = groups.shape[-1]
    parts = groups.unflatten(-1, (width, 1) if channels is None else (-1, channels)).float()
    dim = -3 if channels is None else -1
    least, most = parts.amin(dim, keepdim=True), parts.amax(dim, keepdim=True)
    zero = (least - least.abs() * _EPS).half()
    scale = ((most - zero.float()) / (2**bits - 1) * (1 + _EPS)).half()
    steps = (parts - zero.float()) / scale.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    return Packed(pack(codes, bits), scale, zero, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., tokens, D) into bytes (..., tokens · bits / 8, D).

    Example:
        >>> pack(torch.tensor([[1], [2]], dtype=torch.uint8), 4)
        tensor([[33]], dtype=torch.uint8)
    """
    parts = codes.chunk(8 // bits, -2)
    packed = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack`.

    Example:
        >>> unpack(torch.tensor([[33]], dtype=torch.uint8), 4).flatten()
        tensor([1, 2], dtype=torch.uint8)
    """
    if bits == 8:
        return packed
    last = 2**bits - 1
    parts = [(packed >> (bits * place)) & last for place in range(8 // bits)]
    return torch.cat(parts, -2)
