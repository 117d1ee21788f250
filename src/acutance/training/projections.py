"""Where a module keeps the weights that make the queries and keys of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acutance import scores
from acutance.nn import MultiheadAttention
from acutance.scores import QKNorm

__all__ = ["HeadSlices", "Projections", "find_projections"]

_PAIRS = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("q", "k"),
    ("query_proj", "key_proj"),
    ("to_q", "to_k"),
    ("wq", "wk"),
)
_PACKED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj")
_INTERLEAVED = ("GPTNeoX", "Bloom")  # query_key_value there is [head, (q, k, v), width]
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "norm_q")


@dataclass(frozen=True)
class HeadSlices:
    """The slices of one tensor that belong to each head: ``size`` entries every ``stride``."""

    tensor: Tensor
    dim: int
    start: int
    stride: int
    size: int

    def __getitem__(self, head: int) -> Tensor:
        return self.tensor.narrow(self.dim, self.start + head * self.stride, self.size)


@dataclass(frozen=True)
class Projections:
    """What makes the queries and keys of a module's heads.

    Attributes:
        heads: Hq.
        group: query heads that share a key head.
        query: slices by query head: weight, and bias where there is one.
        key: slices by key head.
        query_alone: slices by query head of what meets a key that all heads share (the rotary part
            of multi-head latent attention).
    """

    heads: int
    group: int
    query: tuple[HeadSlices, ...]
    key: tuple[HeadSlices, ...]
    query_alone: tuple[HeadSlices, ...] = ()

    def scale(self, head: int, factor: float, alpha: float = 0.5) -> None:
        r"""Multiply the logits of one head, and of no other, by a factor.

        Queries take :math:`\gamma^\alpha` and keys the rest; where a key is shared, the
        queries take all of it.
        """
        with torch.no_grad():
            own = self.group == 1
            for part in self.query:
                _multiply(part[head], factor**alpha if own else factor)
            for part in self.query_alone:
                _multiply(part[head], factor)
            if own:
                for part in self.key:
                    _multiply(part[head], factor ** (1 - alpha))

    @property
    def eps(self) -> float:
        """Rounding of the narrowest dtype of the weights."""
        return max(torch.finfo(part.tensor.dtype).eps for part in (*self.query, *self.key))


def _multiply(part: Tensor, factor: float) -> None:
    wide = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
    part.copy_(wide * factor)  # rounded once: a float16 factor would be rounded too


def find_projections(module: nn.Module, heads: int, width: int) -> Projections:
    """Locate the weights behind a module's queries and keys.

    Args:
        module: an attention module.
        heads: Hq.
        width: E, of one head's query.

    Raises:
        ValueError: if they cannot be told, are computed from others, or a normalisation between
            them and the scores would undo a factor.
    """
    kind = type(module).__name__
    for name in _NORMS:
        norm = getattr(module, name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            raise ValueError(f"{kind}.{name} normalises, which undoes any factor on the weights")
    if isinstance(module, MultiheadAttention):
        return _ours(module)
    if isinstance(module, nn.MultiheadAttention):
        return _torch(module)
    if hasattr(module, "kv_b_proj"):
        return _latent(module, heads, width)
    crossing, both = getattr(module, "q_attn", None), getattr(module, "c_attn", None)
    if isinstance(crossing, nn.Module) and isinstance(both, nn.Module):  # GPT-2's cross-attention
        return _pair(kind, crossing, both, heads, width, keys=heads)
    for first, second in _PAIRS:
        query, key = getattr(module, first, None), getattr(module, second, None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            return _pair(kind, query, key, heads, width)
    for name in _PACKED:
        if isinstance(packed := getattr(module, name, None), nn.Module):
            return _blocks(f"{kind}.{name}", packed, heads, width)
    packed = getattr(module, "query_key_value", None)
    if isinstance(packed, nn.Module) and kind.startswith(_INTERLEAVED):
        return _interleaved(f"{kind}.query_key_value", packed, heads, width)
    raise ValueError(
        f"{kind} has no projections that are known: it has none of "
        f"{', '.join(a for a, _ in _PAIRS)}, {', '.join(_PACKED)}"
    )


def _slices(
    name: str, module: Any, start: int, stride: int, size: int
) -> Iterator[tuple[HeadSlices, int]]:
    """Slices of weight and bias, each with the length of the dimension that is cut."""
    if hasattr(module, "parametrizations"):
        raise ValueError(f"{name} is computed by a parametrization: remove it before clipping")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"{name} has no floating weight matrix that could be scaled")
    _check_local(name, weight)
    dim = 1 if type(module).__name__ == "Conv1D" else 0  # transformers' Conv1D is (in, out)
    yield HeadSlices(weight, dim, start, stride, size), weight.shape[dim]
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        yield HeadSlices(bias, 0, start, stride, size), bias.shape[0]


def _check_local(name: str, weight: Tensor) -> None:
    if type(weight).__name__ == "DTensor":
        raise ValueError(f"{name} is sharded over ranks (DTensor), which cannot be scaled by head")


def _cut(
    name: str, module: Any, start: int, stride: int, size: int, whole: int
) -> tuple[HeadSlices, ...]:
    found = tuple(_slices(name, module, start, stride, size))
    for _, length in found:
        if length != whole:
            raise ValueError(f"{name} has {length} outputs where {whole} were expected")
    return tuple(part for part, _ in found)


def _pair(
    kind: str, query: nn.Module, key: nn.Module, heads: int, width: int, keys: int | None = None
) -> Projections:
    found = tuple(_slices(f"{kind}'s key projection", key, 0, width, width))
    rows = found[0][1]
    count = rows // width if keys is None else keys
    if rows % width or count == 0 or heads % count:
        raise ValueError(
            f"{kind}'s key projection has {rows} outputs: no number of heads of width {width} "
            f"that divides {heads}"
        )
    return Projections(
        heads,
        heads // count,
        _cut(f"{kind}'s query projection", query, 0, width, width, heads * width),
        tuple(part for part, _ in found),
    )


def _blocks(name: str, packed: nn.Module, heads: int, width: int) -> Projections:
    """All queries, then all keys, then all values."""
    rows = next(_slices(name, packed, 0, width, width))[1]
    rest = rows - heads * width
    keys = rest // (2 * width)
    if rest <= 0 or rest % (2 * width) or heads % keys:
        raise ValueError(
            f"{name} has {rows} outputs: not queries of {heads} heads of width {width}, then keys "
            "and values of as many or of a divisor"
        )
    return Projections(
        heads,
        heads // keys,
        _cut(name, packed, 0, width, width, rows),
        _cut(name, packed, heads * width, width, width, rows),
    )


def _interleaved(name: str, packed: nn.Module, heads: int, width: int) -> Projections:
    rows, stride = 3 * heads * width, 3 * width
    return Projections(
        heads,
        1,
        _cut(name, packed, 0, stride, width, rows),
        _cut(name, packed, width, stride, width, rows),
    )


def _latent(module: Any, heads: int, width: int) -> Projections:
    """Latent attention: a head's own query and key, and a rotary part whose key all heads share."""
    kind = type(module).__name__
    sizes = [getattr(module, f"{name}_head_dim", 0) for name in ("qk_nope", "qk_rope", "v")]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sum(sizes[:2]) != width:
        raise ValueError(
            f"{kind} has kv_b_proj but not the sizes of latent attention: qk_nope_head_dim, "
            f"qk_rope_head_dim and v_head_dim are {sizes} for queries of width {width}"
        )
    own, rotary, value = sizes
    query = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    rows = heads * width
    return Projections(
        heads,
        1,
        _cut(f"{kind}'s query projection", query, 0, width, own, rows),
        _cut(f"{kind}.kv_b_proj", module.kv_b_proj, 0, own + value, own, heads * (own + value)),
        _cut(f"{kind}'s query projection", query, own, width, rotary, rows),
    )


def _torch(module: nn.MultiheadAttention) -> Projections:
    return _packed_parameters(module, module.num_heads, module.num_heads, module.head_dim)


def _ours(module: MultiheadAttention) -> Projections:
    score = module.score
    if isinstance(score, QKNorm) or not isinstance(
        scores.get(score), scores.Dot | scores.ScaledDot
    ):
        raise ValueError(
            f"{type(module).__name__}'s score is {score!r}: a factor on the weights is one on the "
            "logits for dot and scaled dot products alone"
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
    _check_local(type(module).__name__, query[0].tensor)
    if module.in_proj_bias is not None:
        query.append(HeadSlices(module.in_proj_bias, 0, 0, width, width))
        key.append(HeadSlices(module.in_proj_bias, 0, first, width, width))
    if module.bias_k is not None:
        key.append(HeadSlices(module.bias_k, 2, 0, width, width))
    return Projections(heads, heads // keys, tuple(query), tuple(key))
