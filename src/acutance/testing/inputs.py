"""Random legal calls of attention, and calls whose scores are known exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class _Draw:
    """Random choices and numbers for one call of these sizes, independent of the global state."""

    choices: random.Random
    numbers: torch.Generator
    batch: int
    query_heads: int
    queries: int
    keys: int
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers, dtype=torch.float64)

    def coin(self, chance: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.numbers) < chance

    def some(self) -> tuple[int, ...]:
        """A random shape that broadcasts to (B, Hq, L, S)."""
        full = (self.batch, self.query_heads, self.queries)
        shape = [size if self.choices.random() < 0.6 else 1 for size in full] + [self.keys]
        return tuple(shape[self.choices.randrange(3) :])

    def offset(self) -> int:
        return self.choices.choice([0, self.keys - self.queries, self.choices.randint(-2, 5)])


#: How keys are hidden or scores changed.
MASKS = (
    "none", "causal", "decode", "window", "padding", "boolean", "additive", "documents", "packed",
    "bias", "alibi", "softcap", "sinks", "everything",
)  # fmt: skip


def _options(mask: str, draw: _Draw) -> dict[str, Any]:
    """Options of :func:`acutance.attention` for one of :data:`MASKS`."""
    choices, dtype = draw.choices, draw.dtype
    match mask:
        case "causal":
            return {"is_causal": True}
        case "decode":
            return {"is_causal": True, "query_offset": draw.offset()}
        case "window":
            width, causal = choices.randint(1, draw.keys + 1), choices.random() < 0.5
            return {"window": width, "is_causal": causal, "query_offset": draw.offset()}
        case "padding":
            return {"key_mask": draw.coin(0.7, draw.batch, draw.keys)}
        case "boolean":
            visible = draw.coin(0.6, *draw.some())
            visible[..., -1, :] &= choices.random() < 0.5  # half the time a row that sees nothing
            return {"attn_mask": visible}
        case "additive":
            shape = draw.some()
            low = choices.choice([-torch.inf, torch.finfo(dtype).min])
            added = draw.normal(*shape).masked_fill(draw.coin(0.3, *shape), low)
            return {"attn_mask": added.to(dtype)}
        case "packed" if draw.queries <= draw.keys:
            cuts = sorted(choices.randint(0, draw.keys) for _ in range(3))
            ends = torch.tensor([0, *cuts, draw.keys])
            offset = draw.keys - draw.queries
            return {"cu_seqlens": ends, "is_causal": True, "query_offset": offset}
        case "documents" | "packed":
            rows = torch.randint(3, (draw.batch, draw.queries), generator=draw.numbers)
            columns = torch.randint(3, (draw.batch, draw.keys), generator=draw.numbers)
            return {"document_ids": (rows, columns), "is_causal": choices.random() < 0.5}
        case "bias":
            return {"bias": draw.normal(*draw.some()).to(dtype)}
        case "alibi":
            slopes = 2.0 ** -torch.arange(1, draw.query_heads + 1, dtype=torch.float64)
            return {"alibi_slopes": slopes.to(dtype), "query_offset": draw.offset()}
        case "softcap":
            return {"softcap": choices.choice([0.5, 5.0, 50.0])}
        case "sinks":
            return {"sinks": draw.normal(draw.query_heads).to(dtype)}
    options: dict[str, Any] = {}
    if mask == "everything":
        for name in ("padding", "bias", "alibi", "window", "softcap", "sinks"):
            options |= _options(name, draw)
    return options


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
    choices = random.Random(seed)
    mask = choices.choice(MASKS) if mask is None else mask
    if mask not in MASKS:
        raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {mask!r}")
    dtype = choices.choice(DTYPES) if dtype is None else dtype
    batch, heads, group = choices.randint(1, 3), choices.randint(1, 3), choices.randint(1, 3)
    width, value_width = choices.choice([1, 4, 16]), choices.choice([1, 3, 8])
    queries = choices.choice([1, choices.randint(1, longest)]) if queries is None else queries
    keys = choices.randint(1, longest) if keys is None else keys
    numbers = torch.Generator().manual_seed(seed)
    draw = _Draw(choices, numbers, batch, heads * group, queries, keys, dtype)

    def tensor(heads: int, length: int, width: int, factor: float) -> Tensor:
        values = draw.normal(batch, length, heads, width).mul_(factor).to(dtype).transpose(1, 2)
        return values if choices.random() < 0.5 else values.contiguous()

    root = magnitude**0.5  # q · k / √E then has the standard deviation asked for
    query = tensor(heads * group, queries, width, root)
    key = tensor(heads, keys, width, root)
    value = tensor(heads, keys, value_width, 1.0)
    options = _options(mask, draw)
    if group > 1:
        options["enable_gqa"] = True
    if choices.random() < 0.3:
        options["scale"] = choices.uniform(0.1, 1.0) * width**-0.5
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
