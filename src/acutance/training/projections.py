"""Locate the weights that produce the queries and keys of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acutance import scores
from acutance.nn import MultiheadAttention
from acutance.scores import QKNorm
from acutance.training.across_ranks import head_shards
from acutance.training.projection_tensors import scaled_tensors

__all__ = [
    "LAYOUTS",
    "NAMES",
    "HeadSlices",
    "Projections",
    "all_heads",
    "find_layouts",
]

#: How queries and keys lie: in two projections; in one, all queries, then keys, then values; in
#: one, by key head, each with its queries, its key and its value; or as in latent attention.
LAYOUTS = ("separate", "blocks", "interleaved", "latent")

_PAIRS = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("q", "k"),
    ("query_proj", "key_proj"),
    ("to_q", "to_k"),
    ("wq", "wk"),
    ("Wq", "Wk"),
    ("w_q", "w_k"),
    ("W_q", "W_k"),
    ("linear_q", "linear_k"),
    ("q_linear", "k_linear"),
    ("query_projection", "key_projection"),
)
_PACKED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj", "to_qkv", "W_pack", "qkv_linear")
_BY_HEAD = ("query_key_value", "wqkv")  # interleaved in GPT-NeoX, Bloom, Falcon and InternLM
#: Names of what makes queries or keys.
NAMES = frozenset(name for pair in _PAIRS for name in pair) | {
    *_PACKED,
    *_BY_HEAD,
    "q_attn",
    "q_b_proj",
    "kv_b_proj",
}
_NORMS = tuple(
    form.format(part)
    for part in ("q", "k", "qk", "query", "key")
    for form in ("{}_norm", "{}_layernorm", "{}_layer_norm", "{}_ln", "norm_{}", "ln_{}")
)


@dataclass(frozen=True)
class HeadSlices:
    """The slices of one tensor that belong to each head.

    Each has ``size`` entries and starts ``stride`` after the previous one; with groups, ``group``
    heads are adjacent. ``is_base`` marks the weights under an adapter, which its files lack.
    """

    tensor: Tensor
    dim: int
    start: int
    stride: int
    size: int
    group: int = 1
    is_base: bool = False

    def offset(self, head: int) -> int:
        """Index along ``dim`` at which a head's slice starts."""
        return self.start + head // self.group * self.stride + head % self.group * self.size

    def __getitem__(self, head: int) -> Tensor:
        return self.tensor.narrow(self.dim, self.offset(head), self.size)


@dataclass(frozen=True)
class Projections:
    """The weights that produce the queries and keys of a module's heads.

    Attributes:
        heads: number of query heads, Hq.
        group: number of query heads that share a key head.
        query: slices by query head: weight, and bias if there is one.
        key: slices by key head.
        query_alone: slices by query head of the part that meets a key shared by all heads (the
            rotary part of multi-head latent attention).
        layout: one of :data:`LAYOUTS`.
        makers: the modules whose outputs are the queries and keys; empty if parameters are used
            directly.
    """

    heads: int
    group: int
    query: tuple[HeadSlices, ...]
    key: tuple[HeadSlices, ...]
    query_alone: tuple[HeadSlices, ...] = ()
    layout: str = "separate"
    makers: tuple[nn.Module, ...] = ()

    def factors(
        self, head: int, factor: float, alpha: float = 0.5
    ) -> Iterator[tuple[HeadSlices, float]]:
        r"""Factors for a head's query and key weights that multiply only its logits.

        Queries get :math:`\gamma^\alpha` and keys the rest; if the key is shared, queries get all
        of it.
        """
        one_to_one = self.group == 1
        for part in self.query:
            yield part, factor**alpha if one_to_one else factor
        for part in self.query_alone:
            yield part, factor
        if one_to_one:
            for part in self.key:
                yield part, factor ** (1 - alpha)

    @property
    def changes_base(self) -> bool:
        """Whether weights under an adapter would be scaled."""
        return any(part.is_base for part in (*self.query, *self.query_alone, *self.key))

    @property
    def eps(self) -> float:
        """Machine epsilon of the narrowest dtype among the weights."""
        return max(torch.finfo(part.tensor.dtype).eps for part in (*self.query, *self.key))


def find_layouts(
    module: nn.Module, heads: int, width: int, local: bool = False
) -> tuple[Projections, ...]:
    """All plausible locations of the weights of a module's queries and keys.

    Args:
        module: an attention module.
        heads: number of query heads, Hq.
        width: width of one head's query, E.
        local: take this rank's part of separate projections that are split over ranks by heads.

    Returns:
        One layout; of a fused projection every possible one, the most common for its name first.

    Raises:
        ValueError: if they are unknown or computed from other weights, or a later normalisation
            would undo a factor.
    """
    kind = type(module).__name__
    for name in _NORMS:
        norm = getattr(module, name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            raise ValueError(
                f"{kind}.{name} normalises queries or keys, which undoes any factor on the weights"
            )
    limit = getattr(module, "clip_qkv", None) or getattr(
        getattr(module, "config", None), "clip_qkv", None
    )
    if limit is not None:
        raise ValueError(
            f"{kind} clamps queries and keys at clip_qkv={limit!r} after the projections"
        )
    if isinstance(module, MultiheadAttention):
        return (_ours(module),)
    if isinstance(module, nn.MultiheadAttention):
        return (_torch(module),)
    if hasattr(module, "kv_b_proj"):
        return (_latent(module, heads, width),)
    crossing, both = getattr(module, "q_attn", None), getattr(module, "c_attn", None)
    if isinstance(crossing, nn.Module) and isinstance(both, nn.Module):  # GPT-2's cross-attention
        return (_pair(kind, crossing, both, heads, width, keys=heads),)
    for first, second in _PAIRS:
        query, key = getattr(module, first, None), getattr(module, second, None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            return (_pair(kind, query, key, heads, width, local=local),)
    for name in (*_PACKED, *_BY_HEAD):
        if isinstance(packed := getattr(module, name, None), nn.Module):
            both_ways = _packed(f"{kind}.{name}", packed, heads, width)
            return both_ways if name in _PACKED else both_ways[::-1]
    raise ValueError(
        f"{kind} has no known projections: it has none of {', '.join((a for a, _ in _PAIRS))}, "
        f"{', '.join((*_PACKED, *_BY_HEAD))}"
    )


def all_heads(module: nn.Module, heads: int, width: int) -> tuple[int, int]:
    """Number of heads over all tensor-parallel ranks, and the first of this rank's.

    Args:
        module: an attention module.
        heads: number of query heads that this rank computes.
        width: width of one head's query.

    Returns:
        ``heads`` and 0 if separate projections are not split over ranks by heads.
    """
    for name, _ in _PAIRS:
        weight = getattr(getattr(module, name, None), "weight", None)
        if isinstance(weight, Tensor):
            count, index = head_shards(weight, 0)
            if weight.shape[0] == count * heads * width:
                return count * heads, index * heads
    return heads, 0


def _slices(
    name: str,
    module: Any,
    start: int,
    stride: int,
    size: int,
    group: int = 1,
    local: bool = False,
) -> Iterator[tuple[HeadSlices, int]]:
    """Slices of a weight and its bias along the output dimension, with the dimension's size."""
    for tensor, dim, is_base in scaled_tensors(name, module, local):
        yield HeadSlices(tensor, dim, start, stride, size, group, is_base), tensor.shape[dim]


def _cut(
    name: str,
    module: Any,
    start: int,
    stride: int,
    size: int,
    whole: int,
    group: int = 1,
    local: bool = False,
) -> tuple[HeadSlices, ...]:
    """Slices of a weight and its bias, checked against the number of outputs."""
    slices = tuple(_slices(name, module, start, stride, size, group, local))
    for _, length in slices:
        if length != whole:
            raise ValueError(f"{name} has {length} outputs, expected {whole}")
    return tuple(part for part, _ in slices)


def _pair(
    kind: str,
    query: nn.Module,
    key: nn.Module,
    heads: int,
    width: int,
    keys: int | None = None,
    local: bool = False,
) -> Projections:
    """Which rows of separate query and key projections belong to each head.

    Args:
        kind: class of the attention module, for messages.
        query: projection of the queries.
        key: projection of the keys.
        heads: number of query heads.
        width: components of a head.
        keys: number of key heads; None: as many as the key projection has outputs for.
        local: see :func:`find_layouts`.
    """
    slices = tuple(_slices(f"{kind}'s key projection", key, 0, width, width, local=local))
    rows = slices[0][1]
    count = rows // width if keys is None else keys
    if rows % width or count == 0 or heads % count:
        raise ValueError(
            f"{kind}'s key projection must have {width} outputs for each key head, and as many key "
            f"heads as divide the {heads} query heads, got {rows} outputs"
        )
    return Projections(
        heads,
        heads // count,
        _cut(f"{kind}'s query projection", query, 0, width, width, heads * width, local=local),
        tuple(part for part, _ in slices),
        makers=(query, key),
    )


def _packed(name: str, packed: nn.Module, heads: int, width: int) -> tuple[Projections, ...]:
    """Layouts of a fused projection: all queries, keys, values; or interleaved by key head."""
    rows = next(_slices(name, packed, 0, width, width))[1]
    rest = rows - heads * width
    keys = rest // (2 * width)
    if rest <= 0 or rest % (2 * width) or heads % keys:
        raise ValueError(
            f"{name} has {rows} outputs, which are not queries of {heads} heads of width "
            f"{width} followed by keys and values of as many heads or a divisor"
        )
    group, makers = heads // keys, (packed, packed)
    blocks = Projections(
        heads,
        group,
        _cut(name, packed, 0, width, width, rows),
        _cut(name, packed, heads * width, width, width, rows),
        layout="blocks",
        makers=makers,
    )
    if keys == 1:
        return (blocks,)  # the two are one
    stride = (group + 2) * width
    interleaved = Projections(
        heads,
        group,
        _cut(name, packed, 0, stride, width, rows, group),
        _cut(name, packed, group * width, stride, width, rows),
        layout="interleaved",
        makers=makers,
    )
    return blocks, interleaved


def _latent(module: Any, heads: int, width: int) -> Projections:
    """Latent attention: queries and keys of each head, and a rotary key shared by all heads."""
    kind = type(module).__name__
    sizes = [getattr(module, f"{name}_head_dim", 0) for name in ("qk_nope", "qk_rope", "v")]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sum(sizes[:2]) != width:
        raise ValueError(
            f"{kind} has kv_b_proj but not the sizes of multi-head latent attention: "
            f"qk_nope_head_dim, qk_rope_head_dim and v_head_dim are {sizes} for queries of "
            f"width {width}"
        )
    unrotated, rotary, value = sizes
    query: Any = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    rows = heads * width
    return Projections(
        heads,
        1,
        _cut(f"{kind}'s query projection", query, 0, width, unrotated, rows),
        _cut(
            f"{kind}.kv_b_proj",
            module.kv_b_proj,
            0,
            unrotated + value,
            unrotated,
            heads * (unrotated + value),
        ),
        _cut(f"{kind}'s query projection", query, unrotated, width, rotary, rows),
        layout="latent",
        makers=(query, module.kv_b_proj),
    )


def _torch(module: nn.MultiheadAttention) -> Projections:
    """The projections of ``torch.nn.MultiheadAttention``."""
    return _packed_parameters(module, module.num_heads, module.num_heads, module.head_dim)


def _ours(module: MultiheadAttention) -> Projections:
    """The projections of the library's own ``acutance.nn.MultiheadAttention``.

    Raises:
        ValueError: if its scores are not dot products, or are normalised.
    """
    score = module.score
    if isinstance(score, QKNorm) or not isinstance(
        scores.get(score), scores.Dot | scores.ScaledDot
    ):
        raise ValueError(
            f"{type(module).__name__}'s score is {score!r}: scaling weights scales logits only "
            "for dot and scaled dot products"
        )
    return _packed_parameters(module, module.num_heads, module.num_kv_heads, module.head_dim)


def _packed_parameters(module: Any, heads: int, keys: int, width: int) -> Projections:
    """The layout of ``nn.MultiheadAttention``."""
    if hasattr(module, "parametrizations"):
        raise ValueError(
            f"{type(module).__name__} is computed by a parametrization: remove it before clipping"
        )
    first = heads * width
    if module.in_proj_weight is not None:
        query = [HeadSlices(module.in_proj_weight, 0, 0, width, width)]
        key = [HeadSlices(module.in_proj_weight, 0, first, width, width)]
    else:
        query = [HeadSlices(module.q_proj_weight, 0, 0, width, width)]
        key = [HeadSlices(module.k_proj_weight, 0, 0, width, width)]
    if module.in_proj_bias is not None:
        query.append(HeadSlices(module.in_proj_bias, 0, 0, width, width))
        key.append(HeadSlices(module.in_proj_bias, 0, first, width, width))
    if module.bias_k is not None:
        key.append(HeadSlices(module.bias_k, 2, 0, width, width))
    return Projections(heads, heads // keys, tuple(query), tuple(key))
