"""Locate the weights that produce the queries and keys of each head.

Whether scored queries and keys are the outputs of these projections is checked by norms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acutance import scores
from acutance.capture.intercept import follow_results
from acutance.kernels.call import accumulate_dtype
from acutance.nn import MultiheadAttention
from acutance.scores import QKNorm
from acutance.training.across_ranks import head_shards, is_sharded

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
_FAINT = 1e-4  # of the longest vector: shorter ones are left out
_MOST = 8  # outputs that are kept of a projection whose scores were not seen


class NoProjectionsError(ValueError):
    """Raised for a module that has no projections under a known name."""


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
        NoProjectionsError: if it has no projections under a known name.
        ValueError: if they are computed from other weights, or a later normalisation would undo a
            factor.
    """
    kind = type(module).__name__
    for name in _NORMS:
        norm = getattr(module, name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            raise ValueError(
                f"{kind}.{name} normalises queries or keys, which undoes any factor on the weights"
            )
    config = getattr(module, "config", None)
    limit = getattr(module, "clip_qkv", None) or getattr(config, "clip_qkv", None)
    if limit is not None:
        raise ValueError(
            f"{kind} clamps queries and keys at clip_qkv={limit!r} after the projections"
        )
    if isinstance(module, MultiheadAttention | nn.MultiheadAttention):
        return (_parameters(module),)
    if hasattr(module, "kv_b_proj"):
        return (_latent(module, heads, width),)
    # GPT-2's cross-attention has its keys and values in a projection that is else packed
    for first, second, keys in (("q_attn", "c_attn", heads), *((*pair, None) for pair in _PAIRS)):
        query, key = getattr(module, first, None), getattr(module, second, None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            query_projection = _Projection(f"{kind}'s query projection", query, local)
            key_projection = _Projection(f"{kind}'s key projection", key, local)
            return (_pair(query_projection, key_projection, heads, width, keys),)
    for name in (*_PACKED, *_BY_HEAD):
        if isinstance(packed := getattr(module, name, None), nn.Module):
            layouts = _packed(_Projection(f"{kind}.{name}", packed), heads, width)
            return layouts if name in _PACKED else layouts[::-1]
    raise NoProjectionsError(
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


@dataclass(frozen=True)
class _Projection:
    """A projection of queries or keys, with its name for messages.

    ``local`` takes this rank's part of weights that are distributed.
    """

    name: str
    module: Any
    local: bool = False

    def tensors(self) -> Iterator[tuple[Tensor, int, bool]]:
        """Tensors that multiply the outputs, as of :func:`scaled_tensors`."""
        for tensor, dim, is_base in scaled_tensors(self.name, self.module):
            part: Any = tensor
            yield part.to_local() if self.local and is_sharded(tensor) else part, dim, is_base

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        tensor, dim, _ = next(self.tensors())
        return tensor.shape[dim]

    def slices(
        self, start: int, stride: int, size: int, outputs: int, group: int = 1
    ) -> tuple[HeadSlices, ...]:
        """Slices by head of the weight and the bias, which must have this number of outputs."""
        slices = []
        for tensor, dim, is_base in self.tensors():
            if tensor.shape[dim] != outputs:
                raise ValueError(f"{self.name} has {tensor.shape[dim]} outputs, expected {outputs}")
            slices.append(HeadSlices(tensor, dim, start, stride, size, group, is_base))
        return tuple(slices)


def _pair(
    query: _Projection, key: _Projection, heads: int, width: int, keys: int | None = None
) -> Projections:
    """Which rows of separate query and key projections belong to each head.

    ``keys`` is the number of key heads; None: as many as the key projection has outputs for.
    """
    rows = key.outputs
    count = rows // width if keys is None else keys
    if rows % width or count == 0 or heads % count:
        raise ValueError(
            f"{key.name} must have {width} outputs for each key head, and as many key "
            f"heads as divide the {heads} query heads, got {rows} outputs"
        )
    return Projections(
        heads,
        heads // count,
        query.slices(0, width, width, heads * width),
        key.slices(0, width, width, rows),
        makers=(query.module, key.module),
    )


def _packed(packed: _Projection, heads: int, width: int) -> tuple[Projections, ...]:
    """Layouts of a fused projection: all queries, keys, values; or interleaved by key head."""
    rows = packed.outputs
    rest = rows - heads * width
    keys = rest // (2 * width)
    if rest <= 0 or rest % (2 * width) or heads % keys:
        raise ValueError(
            f"{packed.name} has {rows} outputs, which are not queries of {heads} heads of width "
            f"{width} followed by keys and values of as many heads or a divisor"
        )
    group, makers = heads // keys, (packed.module, packed.module)
    query = packed.slices(0, width, width, rows)
    key = packed.slices(heads * width, width, width, rows)
    blocks = Projections(heads, group, query, key, layout="blocks", makers=makers)
    if keys == 1:
        return (blocks,)  # the two are one
    stride = (group + 2) * width
    query = packed.slices(0, stride, width, rows, group)
    key = packed.slices(group * width, stride, width, rows)
    return blocks, Projections(heads, group, query, key, layout="interleaved", makers=makers)


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
    maker = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    query = _Projection(f"{kind}'s query projection", maker)
    key = _Projection(f"{kind}.kv_b_proj", module.kv_b_proj)
    stride = unrotated + value
    return Projections(
        heads,
        1,
        query.slices(0, width, unrotated, heads * width),
        key.slices(0, stride, unrotated, heads * stride),
        query.slices(unrotated, width, rotary, heads * width),
        layout="latent",
        makers=(query.module, key.module),
    )


def _parameters(module: Any) -> Projections:
    """The parameters of ``torch.nn.MultiheadAttention`` or :class:`acutance.nn.MultiheadAttention`.

    Raises:
        ValueError: if they are computed from others, or the scores are not dot products.
    """
    kind, heads, width = type(module).__name__, module.num_heads, module.head_dim
    if isinstance(module, MultiheadAttention):
        dots = isinstance(scores.get(module.score), scores.Dot | scores.ScaledDot)
        if isinstance(module.score, QKNorm) or not dots:
            raise ValueError(
                f"{kind}'s score is {module.score!r}: scaling weights scales logits only for dot "
                "and scaled dot products"
            )
    if hasattr(module, "parametrizations"):
        raise ValueError(f"{kind} is computed by a parametrization: remove it before clipping")
    keys_start = heads * width
    if module.in_proj_weight is not None:
        query = [HeadSlices(module.in_proj_weight, 0, 0, width, width)]
        key = [HeadSlices(module.in_proj_weight, 0, keys_start, width, width)]
    else:
        query = [HeadSlices(module.q_proj_weight, 0, 0, width, width)]
        key = [HeadSlices(module.k_proj_weight, 0, 0, width, width)]
    if module.in_proj_bias is not None:
        query.append(HeadSlices(module.in_proj_bias, 0, 0, width, width))
        key.append(HeadSlices(module.in_proj_bias, 0, keys_start, width, width))
    if module.bias_k is not None:
        key.append(HeadSlices(module.bias_k, 2, 0, width, width))
    group = heads // getattr(module, "num_kv_heads", heads)
    return Projections(heads, group, tuple(query), tuple(key))


def scaled_tensors(name: str, module: Any) -> Iterator[tuple[Tensor, int, bool]]:
    """Tensors whose entries along a dimension multiply a projection's outputs.

    Args:
        name: name of the projection, for messages.
        module: the projection: a linear layer, transformers' Conv1D, or one with adapters of PEFT.

    Yields:
        Each tensor with the dimension, and whether it lies under an adapter.

    Raises:
        ValueError: if the outputs are not multiplied by entries of parameters.

    Example:
        >>> linear = nn.Linear(3, 2)
        >>> [(tuple(tensor.shape), dim) for tensor, dim, _ in scaled_tensors("linear", linear)]
        [((2, 3), 0), ((2,), 0)]
    """
    if hasattr(module, "parametrizations"):
        raise ValueError(f"{name} is computed by a parametrization: remove it before clipping")
    if isinstance(module._modules.get("base_layer"), nn.Module):
        yield from _adapted(name, module)
        return
    # a weight that is no parameter is made from others at each forward (weight_norm, FSDP)
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{name} ({type(module).__name__}) has no floating-point weight matrix that could be "
            "scaled"
        )
    # transformers' Conv1D is (in, out); fully_shard makes a subclass
    is_conv = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    yield weight, int(is_conv), False
    if isinstance(bias := getattr(module, "bias", None), Tensor):
        yield bias, 0, False


def _adapted(name: str, module: Any) -> Iterator[tuple[Tensor, int, bool]]:
    """Tensors of a projection with adapters of PEFT: W + s·B·A, or m·(W + s·B·A) / norm (DoRA).

    W and B are scaled in LoRA, m in DoRA, the bias in both.
    """
    expanding = module._modules.get("lora_B")
    variants = {type(each).__name__ for each in getattr(module, "lora_variant", {}).values()}
    known = variants <= {"DoraLinearVariant", "NoneType"}
    if not isinstance(expanding, nn.ModuleDict) or not known or not len(expanding):
        kinds = ", ".join(sorted(variants - {"NoneType"})) or type(module).__name__
        raise ValueError(f"{name} has an adapter other than LoRA and DoRA ({kinds})")
    magnitudes = module._modules.get("lora_magnitude_vector") or {}
    if len(magnitudes) and (len(magnitudes) != len(expanding) or module.merged):
        raise ValueError(f"{name} has DoRA adapters that are merged, or LoRA ones beside them")
    for tensor, dim, _ in scaled_tensors(name, module.base_layer):
        if not len(magnitudes) or tensor.dim() == 1:  # DoRA divides by the weights' norm
            yield tensor, dim, True
    adapters: Any = magnitudes or expanding
    for adapter in adapters.values():
        yield adapter.weight, 0, False
        if isinstance(bias := getattr(adapter, "bias", None), Tensor):
            yield bias, 0, False


@contextmanager
def recorded_outputs(
    projections: Iterable[nn.Module],
) -> Iterator[dict[nn.Module, deque[Tensor]]]:
    """Context that records the last few outputs of projections, detached, by module."""
    recorded: dict[nn.Module, deque[Tensor]] = {}

    def record(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        if is_sharded(output):
            output = output.to_local()
        if isinstance(output, Tensor):
            recorded.setdefault(module, deque(maxlen=_MOST)).append(output.detach())

    with follow_results(projections, record):
        yield recorded


def rotary_width(module: nn.Module, width: int) -> int:
    """Number of leading entries of each head that rotary embedding rotates; 0 if it may be all."""
    config: Any = getattr(module, "config", None)
    share = getattr(config, "partial_rotary_factor", None)
    if share is None and isinstance(parameters := getattr(config, "rope_parameters", None), dict):
        share = parameters.get("partial_rotary_factor")  # transformers 5
    rotated = getattr(module, "rotary_ndims", None)
    if not isinstance(rotated, int):
        rotated = int(share * width) if isinstance(share, int | float) else 0
    return rotated if 0 < rotated < width else 0


@torch.no_grad()
def agrees(
    projections: Projections,
    query: Tensor,
    key: Tensor,
    outputs: Mapping[nn.Module, Sequence[Tensor]],
    rotary: int = 0,
) -> bool | None:
    """Whether queries and keys are the projections' outputs, only rotated and scaled.

    This is checked by norms: rotations keep them, and scales by head and position multiply them,
    while selecting other heads, normalising, clamping or adding a term changes their ratios. Only
    if norms agree does a factor on the weights multiply the scores. The rotated and the other
    entries of a head may have different scales.

    Args:
        projections: the weights of queries and keys.
        query: (B, Hq, L, E), as scored.
        key: (B, H, S, E), as scored.
        outputs: the projections' outputs in the same forward pass, by module.
        rotary: number of leading entries of a head that are rotated; 0 if unknown.

    Returns:
        None if nothing could be compared, or a projection had several outputs and no recorded one
        agrees.
    """
    if not projections.makers:
        return None
    parts = [(projections.makers[0], query, (projections.query[0], *projections.query_alone[:1]))]
    if projections.group == 1 and not projections.query_alone:
        parts.append((projections.makers[1], key, (projections.key[0],)))
    verdicts: list[bool | None] = []
    for maker, scored, slices in parts:
        if scored.shape[1] != projections.heads:
            continue
        recorded = outputs.get(maker, ())
        cut = slices[0].size if len(slices) > 1 else rotary
        of_outputs = [_proportional(scored, output, slices, cut) for output in recorded]
        if True in of_outputs:
            verdicts.append(True)
        elif len(recorded) == 1:
            verdicts.append(of_outputs[0])
    return False if False in verdicts else True if True in verdicts else None


def _proportional(
    scored: Tensor, output: Tensor, slices: Sequence[HeadSlices], cut: int
) -> bool | None:
    """Whether scored vectors are a rotation or multiple of the output; None if undecidable."""
    batch, _, rows, width = scored.shape
    if output.dim() < 2 or output.shape[:-1].numel() != batch * rows or batch * rows < 2:
        return None
    if output.shape[-1] != slices[0].tensor.shape[slices[0].dim]:
        return None
    together = _fits(scored, output, slices, 0, width)
    if together is not False or not 0 < cut < width or sum(part.size for part in slices) != width:
        return together
    rotated = _fits(scored, output, slices, 0, cut)
    rest = _fits(scored, output, slices, cut, width)
    if False in (rotated, rest):
        return False
    return None if None in (rotated, rest) else True


def _fits(
    scored: Tensor, output: Tensor, slices: Sequence[HeadSlices], first: int, last: int
) -> bool | None:
    """Whether the norms of some entries of all heads agree up to one scale."""
    entries = [
        torch.cat([output.narrow(-1, s.offset(head), s.size) for s in slices], -1)[..., first:last]
        for head in range(scored.shape[1])
    ]
    lengths = torch.stack([_norm(of_head) for of_head in entries], -1)
    expected = _norm(scored[..., first:last]).transpose(1, 2)
    eps = max(torch.finfo(part.dtype).eps for part in (scored, output))
    tolerance = max(1e-3, 4 * eps)
    worst = [
        float(left.abs().max())
        for left, residual in _centred_log_ratios(lengths, expected)
        if residual.numel() and bool(residual.abs().max() > tolerance)  # else any would agree
    ]
    return min(worst) <= tolerance if worst else None


def _norm(vectors: Tensor) -> Tensor:
    """Euclidean norm over the last dimension, float64."""
    wide = accumulate_dtype(vectors.dtype)
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide)
    return norms.double()


def _clear(lengths: Tensor) -> Tensor:
    """Which norms are finite and large enough for a meaningful ratio."""
    finite = lengths.isfinite()
    return finite & (lengths > _FAINT * torch.where(finite, lengths, 0.0).amax())


def _centred_log_ratios(lengths: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Compare norms with expected ones up to a common scale, for both possible orders of tokens.

    Args:
        lengths: vector norms, (..., H), of B·L tokens.
        expected: (B, L, H).

    Yields:
        log(expected / lengths) and log(lengths), each centred so that a common scale cancels. If
        the first is all zeros, the norms agree up to scale.
    """
    batch, rows, heads = expected.shape
    orders = [lengths.reshape(batch, rows, heads)]
    if lengths.dim() == 3 and lengths.shape[:2] == (rows, batch) and batch != 1:
        orders.append(lengths.transpose(0, 1))
    enough = _clear(expected)
    for order in orders:
        good = enough & _clear(order)
        exponents = torch.where(good, order, 1.0).log()
        ratio = torch.where(good, expected, 1.0).log() - exponents
        if batch > 1:  # a factor of each position and head
            valid = good.all(0)
            yield (ratio - ratio.mean(0))[:, valid], (exponents - exponents.mean(0))[:, valid]
        if heads > 1:  # a factor of each token times one of each head
            valid = good.all(-1)
            yield _centred(ratio[valid]), _centred(exponents[valid])
    # a factor of each head, whatever the order of the tokens: windows, or documents in a row
    first, second = (part.reshape(-1, heads).sort(0).values for part in (lengths, expected))
    valid = (_clear(first) & _clear(second)).all(-1)
    exponents = first[valid].log()
    ratio = second[valid].log() - exponents
    yield ratio - ratio.mean(0), exponents - exponents.mean(0)


def _centred(logs: Tensor) -> Tensor:
    """Subtract row and column means."""
    return logs - logs.mean(0) - logs.mean(1, keepdim=True) + logs.mean()
