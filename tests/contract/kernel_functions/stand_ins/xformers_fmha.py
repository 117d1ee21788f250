"""Stands for ``xformers.ops.fmha`` 0.0.35: ``memory_efficient_attention`` and classes of biases.

A bias is materialised, as the library documents it, and added to the scores.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.contract.kernel_functions.reference import attend, window


def memory_efficient_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Any = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Any:
    shape = (*query.shape[:-1], value.shape[-1])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if query.dim() == 3:
        query, key, value = (part.unsqueeze(2) for part in (query, key, value))
    elif query.dim() == 5:
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
    batch, rows, heads = query.shape[:3]
    whole = torch.zeros(batch, heads, rows, key.shape[1])
    if isinstance(attn_bias, Tensor):
        if attn_bias.dim() == 3:
            attn_bias = attn_bias.unsqueeze(1)
        whole = whole + (attn_bias.flatten(1, 2) if attn_bias.dim() == 5 else attn_bias)
    elif attn_bias is not None:
        whole = whole + attn_bias.materialize((rows, key.shape[1]))
    output = [
        attend(
            query[b],
            key[b],
            value[b],
            factor,
            lambda row, place, b=b: bool(whole[b, 0, row, place] > -torch.inf),  # type: ignore[misc]
            bias=lambda head, row, place, b=b: float(whole[b, head, row, place]),  # type: ignore[misc]
        )
        for b in range(batch)
    ]
    return torch.stack(output).reshape(shape)


class AttentionBias:
    at_end, causal = False, False

    def size(self) -> tuple[Any, Any]:
        """Keys to the left and right that a row sees."""
        if hasattr(self, "_window_size"):
            return self._window_size - 1, None
        return getattr(self, "window_left", None), getattr(self, "window_right", None)

    def block(self, rows: int, keys: int) -> Tensor:
        sees = window(rows, keys, self.causal, self.size(), at_end=self.at_end)
        return torch.tensor(
            [[0.0 if sees(i, j) else -torch.inf for j in range(keys)] for i in range(rows)]
        )

    def materialize(self, shape: tuple[int, int]) -> Tensor:
        return self.block(*shape)


class LowerTriangularMask(AttentionBias):
    causal = True


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(self, shape: tuple[int, int]) -> Tensor:
        return self.block(*shape) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    causal, at_end = True, True


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int
    at_end = True


@dataclass
class SeqLenInfo:
    seqstart: Tensor
    seqlen: Any = None

    def intervals(self) -> list[tuple[int, int]]:
        starts = self.seqstart.tolist()
        if self.seqlen is None:
            return list(itertools.pairwise(starts))
        return [(a, a + n) for a, n in zip(starts, self.seqlen.tolist(), strict=False)]


@dataclass
class BlockDiagonalMask(AttentionBias):
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    def materialize(self, shape: tuple[int, int]) -> Tensor:
        mask = torch.full(shape, -torch.inf)
        for (a, b), (c, d) in zip(
            self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True
        ):
            mask[a:b, c:d] = self.block(b - a, d - c)
        return mask


class BlockDiagonalCausalMask(BlockDiagonalMask):
    causal = True


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    causal, at_end = True, True


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0


class BlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    at_end = True


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    causal = True


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    window_left: int = 0
    window_right: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    _window_size: int = 0
    causal = True


class BlockDiagonalGappyKeysMask(BlockDiagonalMask):
    at_end = True


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    causal = True


class PagedBlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    """One that the adapter does not read."""


for _kind in list(globals().values()):
    if isinstance(_kind, type) and issubclass(_kind, AttentionBias):
        _kind.__module__ = "xformers.ops.fmha.attn_bias"
