"""Random legal calls of attention, and calls whose scores are known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MASKS", "AttentionCase", "attention_case", "exact_scores"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionCase:
    """Tensors and options of one call: ``acutance.attention(*case.tensors, **case.options)``.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        options: keyword arguments of :func:`acutance.attention`.
        name: what was drawn, for a test's message.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    name: str

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


class _SeededDraws:
    """Draws random sizes and numbers from its own seed, independent of the global state."""

    def __init__(self, seed: int) -> None:
        self.sizes = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers, dtype=torch.float64)

    def coin(self, chance: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.numbers) < chance


@dataclass(frozen=True)
class _Sizes:
    batch: int
    query_heads: int
    queries: int
    keys: int
    dtype: torch.dtype

    def some(self, draw: _SeededDraws) -> tuple[int, ...]:
        """A random shape that broadcasts to (B, Hq, L, S)."""
        full = (self.batch, self.query_heads, self.queries, self.keys)
        shape = [size if draw.sizes.random() < 0.6 else 1 for size in full[:3]] + [self.keys]
        return tuple(shape[draw.sizes.randrange(3) :])


def _offset(draw: _SeededDraws, size: _Sizes) -> int:
    return draw.sizes.choice([0, size.keys - size.queries, draw.sizes.randint(-2, 5)])


def _causal(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    return {"is_causal": True}


def _decode(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    return {"is_causal": True, "query_offset": _offset(draw, size)}


def _window(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    width = draw.sizes.randint(1, size.keys + 1)
    causal = draw.sizes.random() < 0.5
    return {"window": width, "is_causal": causal, "query_offset": _offset(draw, size)}


def _padding(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    return {"key_mask": draw.coin(0.7, size.batch, size.keys)}


def _boolean(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    mask = draw.coin(0.6, *size.some(draw))
    mask[..., -1, :] &= draw.sizes.random() < 0.5  # half the time a row that sees nothing
    return {"attn_mask": mask}


def _additive(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    shape = size.some(draw)
    low = draw.sizes.choice([-torch.inf, torch.finfo(size.dtype).min])
    mask = draw.normal(*shape).masked_fill(draw.coin(0.3, *shape), low)
    return {"attn_mask": mask.to(size.dtype)}


def _documents(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    rows = torch.randint(3, (size.batch, size.queries), generator=draw.numbers)
    columns = torch.randint(3, (size.batch, size.keys), generator=draw.numbers)
    return {"document_ids": (rows, columns), "is_causal": draw.sizes.random() < 0.5}


def _packed(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    if size.queries > size.keys:
        return _documents(draw, size)
    cuts = sorted(draw.sizes.randint(0, size.keys) for _ in range(3))
    lengths = torch.tensor([0, *cuts, size.keys])
    return {"cu_seqlens": lengths, "is_causal": True, "query_offset": size.keys - size.queries}


def _bias(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    return {"bias": draw.normal(*size.some(draw)).to(size.dtype)}


def _alibi(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    slopes = 2.0 ** -torch.arange(1, size.query_heads + 1, dtype=torch.float64)
    return {"alibi_slopes": slopes.to(size.dtype), "query_offset": _offset(draw, size)}


def _softcap(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    return {"softcap": draw.sizes.choice([0.5, 5.0, 50.0])}


def _sinks(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    return {"sinks": draw.normal(size.query_heads).to(size.dtype)}


def _everything(draw: _SeededDraws, size: _Sizes) -> dict[str, Any]:
    parts = (_padding, _bias, _alibi, _window, _softcap, _sinks)
    return {name: given for part in parts for name, given in part(draw, size).items()}


#: How keys are hidden or scores changed, by name; each draws the options for it.
MASKS: dict[str, Callable[[_SeededDraws, _Sizes], dict[str, Any]]] = {
    "none": lambda draw, size: {},
    "causal": _causal,
    "decode": _decode,
    "window": _window,
    "padding": _padding,
    "boolean": _boolean,
    "additive": _additive,
    "documents": _documents,
    "packed": _packed,
    "bias": _bias,
    "alibi": _alibi,
    "softcap": _softcap,
    "sinks": _sinks,
    "everything": _everything,
}


def attention_case(
    seed: int,
    *,
    mask: str | None = None,
    dtype: torch.dtype | None = None,
    magnitude: float = 1.0,
    queries: int | None = None,
    keys: int | None = None,
    longest: int = 24,
) -> AttentionCase:
    """A random legal call of attention, the same for the same arguments.

    Args:
        seed: of all random choices.
        mask: one of :data:`MASKS`; None chooses one at random.
        dtype: of the tensors; None chooses float64, float32, bfloat16 or float16.
        magnitude: typical standard deviation of the scores.
        queries: L; None chooses 1 to ``longest``.
        keys: S; None chooses 1 to ``longest``.
        longest: largest random length.

    Returns:
        A case with a batch of 1 to 3, 1 to 3 key heads, each shared by 1 to 3 query heads, and
        different widths E and Ev. Some tensors are transposed views, as projections return them.

    Raises:
        ValueError: if ``mask`` is not in :data:`MASKS`.

    Example:
        >>> import acutance
        >>> case = attention_case(7, mask="window", dtype=torch.float64)
        >>> out, stats = acutance.attention(*case.tensors, **case.options, return_stats=True)
        >>> oracle = acutance.testing.dense_statistics(*case.tensors, **case.options)
        >>> torch.allclose(stats.entropy, oracle["entropy"], equal_nan=True)
        True
    """
    draw = _SeededDraws(seed)
    sizes = draw.sizes
    mask = sizes.choice(list(MASKS)) if mask is None else mask
    if mask not in MASKS:
        raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {mask!r}")
    dtype = sizes.choice(DTYPES) if dtype is None else dtype
    batch, heads, group = sizes.randint(1, 3), sizes.randint(1, 3), sizes.randint(1, 3)
    width, value_width = sizes.choice([1, 4, 16]), sizes.choice([1, 3, 8])
    queries = sizes.choice([1, sizes.randint(1, longest)]) if queries is None else queries
    keys = sizes.randint(1, longest) if keys is None else keys
    size = _Sizes(batch, heads * group, queries, keys, dtype)

    def tensor(heads: int, length: int, width: int, factor: float) -> Tensor:
        values = draw.normal(batch, length, heads, width).mul_(factor).to(dtype).transpose(1, 2)
        return values if sizes.random() < 0.5 else values.contiguous()

    root = magnitude**0.5  # q · k / √E then has the standard deviation asked for
    query = tensor(heads * group, queries, width, root)
    key = tensor(heads, keys, width, root)
    value = tensor(heads, keys, value_width, 1.0)
    options = MASKS[mask](draw, size)
    if group > 1:
        options["enable_gqa"] = True
    if sizes.random() < 0.3:
        options["scale"] = sizes.uniform(0.1, 1.0) * width**-0.5
    name = (
        f"seed {seed}: {mask}, {dtype}, query {tuple(query.shape)}, key {tuple(key.shape)}, "
        f"value {tuple(value.shape)}"
    )
    return AttentionCase(query, key, value, options, name)


def exact_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """A query and a key whose scores, at ``scale=1``, are exactly the given row.

    Args:
        scores: (S,), any floating dtype.

    Returns:
        ``query`` (1, 1, 1, 1), which is one, and ``key`` (1, 1, S, 1).

    Example:
        >>> import acutance
        >>> query, key = exact_scores(torch.tensor([1e4, 1e4, -1e4]))
        >>> acutance.row_statistics(query, key, scale=1.0).effective_keys.item()
        2.0
    """
    key = scores.reshape(1, 1, -1, 1)
    return torch.ones_like(key[:, :, :1]), key
