"""QKClip: bound the largest logit of each head by scaling its query and key weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from acutance import scores
from acutance.capture.find_layers import Chosen, named_modules
from acutance.capture.intercept import follow_results
from acutance.capture.listener import ProbeError
from acutance.kernels.call import accumulate_dtype
from acutance.nn import MultiheadAttention
from acutance.scores import QKNorm
from acutance.shapes import check_count, check_flag, check_number
from acutance.training.across_ranks import ExactMaxima, head_shards, is_sharded, multiply, reshard
from acutance.training.watch import AttentionWatch

#: How queries and keys lie: in two projections; in one, all queries, then keys, then values; in
#: one, by key head, each with its queries, its key and its value; or as in latent attention.
LAYOUTS = ("separate", "blocks", "interleaved", "latent")

_QUERIES = (
    *("q_proj", "query", "q_lin", "q", "query_proj", "to_q", "wq", "Wq", "w_q", "W_q"),
    *("linear_q", "q_linear", "query_projection"),
)
_PAIRS = [(name, name.replace("query", "key").replace("q", "k")) for name in _QUERIES]
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


#: The last outputs of projections, by module.
Outputs: TypeAlias = Mapping[nn.Module, Sequence[Tensor]]


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

    def factors(self, factor: float, alpha: float) -> Iterator[tuple[HeadSlices, float]]:
        r"""Factors for a head's query and key weights that multiply only its logits.

        Queries get :math:`\gamma^\alpha` and keys the rest; if the key is shared, queries get all
        of it.
        """
        one_to_one = self.group == 1
        for slices in self.query:
            yield slices, factor**alpha if one_to_one else factor
        for slices in self.query_alone:
            yield slices, factor
        for slices in self.key if one_to_one else ():
            yield slices, factor ** (1 - alpha)


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
            return (_pair(kind, query, key, heads, width, keys, local),)
    for name in (*_PACKED, *_BY_HEAD):
        if isinstance(packed := getattr(module, name, None), nn.Module):
            layouts = _packed(_Projection(f"{kind}.{name}", packed), heads, width)
            return layouts if name in _PACKED else layouts[::-1]
    raise NoProjectionsError(
        f"{kind} has no known projections: it has none of {', '.join((a for a, _ in _PAIRS))}, "
        f"{', '.join((*_PACKED, *_BY_HEAD))}"
    )


class _Projection:
    """A projection of queries or keys, with its name for messages.

    ``local`` takes this rank's part of weights that are distributed.
    """

    def __init__(self, name: str, module: Any, local: bool = False) -> None:
        self.name, self.module = name, module
        self._tensors: list[tuple[Any, int, bool]] = []
        for tensor, dim, is_base in scaled_tensors(name, module):
            here: Any = tensor
            here = here.to_local() if local and is_sharded(here) else here
            self._tensors.append((here, dim, is_base))
        first, dim, _ = self._tensors[0]
        self.outputs = first.shape[dim]

    def slices(
        self, start: int, stride: int, size: int, group: int = 1, *, outputs: int
    ) -> tuple[HeadSlices, ...]:
        """Slices by head of the weight and the bias, which must have this number of outputs."""
        for tensor, dim, _ in self._tensors:
            if tensor.shape[dim] != outputs:
                raise ValueError(f"{self.name} has {tensor.shape[dim]} outputs, expected {outputs}")
        return tuple(
            HeadSlices(tensor, dim, start, stride, size, group, is_base)
            for tensor, dim, is_base in self._tensors
        )


def _pair(
    kind: str, query: Any, key: Any, heads: int, width: int, keys: int | None, local: bool
) -> Projections:
    """Which rows of separate query and key projections belong to each head.

    ``keys`` is the number of key heads; None: as many as the key projection has outputs for.
    """
    key = _Projection(f"{kind}'s key projection", key, local)
    query = _Projection(f"{kind}'s query projection", query, local)
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
        query.slices(0, width, width, outputs=heads * width),
        key.slices(0, width, width, outputs=rows),
        makers=(query.module, key.module),
    )


def _packed(packed: _Projection, heads: int, width: int) -> tuple[Projections, ...]:
    """Layouts of a fused projection: all queries, keys, values; or interleaved by key head."""
    rows = packed.outputs
    keys, rest = divmod(rows - heads * width, 2 * width)
    if rest or keys <= 0 or heads % keys:
        raise ValueError(
            f"{packed.name} has {rows} outputs, which are not queries of {heads} heads of width "
            f"{width} followed by keys and values of as many heads or a divisor"
        )
    group = heads // keys
    stride = (group + 2) * width
    starts = {
        "blocks": ((0, width, width), (heads * width, width, width)),
        "interleaved": ((0, stride, width, group), (group * width, stride, width)),
    }
    layouts = tuple(
        Projections(
            heads,
            group,
            packed.slices(*query, outputs=rows),
            packed.slices(*key, outputs=rows),
            layout=layout,
            makers=(packed.module, packed.module),
        )
        for layout, (query, key) in starts.items()
    )
    return layouts[:1] if keys == 1 else layouts  # with one key head the two are one


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
        query.slices(0, width, unrotated, outputs=heads * width),
        key.slices(0, stride, unrotated, outputs=heads * stride),
        query.slices(unrotated, width, rotary, outputs=heads * width),
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
    stacked, keys_start = module.in_proj_weight is not None, heads * width
    query_weight = module.in_proj_weight if stacked else module.q_proj_weight
    key_weight = module.in_proj_weight if stacked else module.k_proj_weight
    query = [HeadSlices(query_weight, 0, 0, width, width)]
    key = [HeadSlices(key_weight, 0, keys_start if stacked else 0, width, width)]
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
    projections: Projections, query: Tensor, key: Tensor, outputs: Outputs, rotary: int = 0
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
    verdicts = []
    for maker, scored, slices in parts:
        if scored.shape[1] != projections.heads:
            continue
        recorded = outputs.get(maker, ())
        cut = slices[0].size if len(slices) > 1 else rotary
        of_outputs = [_proportional(scored, output, slices, cut) for output in recorded]
        if True in of_outputs or len(recorded) == 1:
            verdicts.append(True if True in of_outputs else of_outputs[0])
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
    heads = [
        torch.cat([output.narrow(-1, s.offset(head), s.size) for s in slices], -1)
        for head in range(scored.shape[1])
    ]
    made, scored = torch.stack(heads, -2), scored.transpose(1, 2)
    together = _fits(scored, made)
    if together is not False or not 0 < cut < width or made.shape[-1] != width:
        return together
    rotated = _fits(scored[..., :cut], made[..., :cut])
    rest = _fits(scored[..., cut:], made[..., cut:])
    if False in (rotated, rest):
        return False
    return None if None in (rotated, rest) else True


def _fits(scored: Tensor, made: Tensor) -> bool | None:
    """Whether the norms of all heads' vectors agree up to one scale.

    Args:
        scored: queries or keys as scored, (B, L, H, entries).
        made: the same as their projection made them, (..., H, entries), its tokens in any order.
    """
    tolerance = max(1e-3, *(4 * torch.finfo(vectors.dtype).eps for vectors in (scored, made)))
    worst = [
        float(left.abs().max())
        for left, residual in _centred_log_ratios(_norms(made), _norms(scored))
        if residual.numel() and bool(residual.abs().max() > tolerance)  # else any would agree
    ]
    return min(worst) <= tolerance if worst else None


def _norms(vectors: Tensor) -> Tensor:
    """Euclidean norms over the last dimension, float64."""
    dtype = accumulate_dtype(vectors.dtype)
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype).double()
    return norms


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
            logs = ratio[valid], exponents[valid]
            first, second = (x - x.mean(0) - x.mean(1, keepdim=True) + x.mean() for x in logs)
            yield first, second
    # a factor of each head, whatever the order of the tokens: windows, or documents in a row
    first, second = (part.reshape(-1, heads).sort(0).values for part in (lengths, expected))
    valid = (_clear(first) & _clear(second)).all(-1)
    exponents = first[valid].log()
    ratio = second[valid].log() - exponents
    yield ratio - ratio.mean(0), exponents - exponents.mean(0)


_UNTOLD, _OTHERS = -1, len(LAYOUTS)  # beside the number of a layout: not known; none of them


@dataclass(frozen=True)
class LayerClip:
    """The effect of one step on one layer.

    Attributes:
        module: qualified name of the module.
        max_logit: largest logit of each head since the last step, over all ranks.
        factor: γ of each head; 1 for unchanged heads.
    """

    module: str
    max_logit: tuple[float, ...]
    factor: tuple[float, ...]


@dataclass(frozen=True)
class ClipReport:
    """The effect of one step of :class:`acutance.training.QKClip`.

    Attributes:
        layers: the layers that ran since the last step.
        not_finite: heads, as ``(module, head)``, whose largest logit was not finite. They were not
            changed.
    """

    layers: tuple[LayerClip, ...]
    not_finite: tuple[tuple[str, int], ...] = ()

    @property
    def max_logit(self) -> float:
        """The largest logit of all heads; −inf without rows."""
        return max((value for layer in self.layers for value in layer.max_logit), default=-math.inf)

    @property
    def clipped(self) -> tuple[tuple[str, int], ...]:
        """Heads that were scaled, as ``(module, head)``."""
        return tuple(
            (layer.module, head)
            for layer in self.layers
            for head, factor in enumerate(layer.factor)
            if factor != 1.0
        )


class QKClip:
    r"""After an optimiser step, scale down the heads whose largest logit exceeded a threshold.

    .. math:: \gamma_h = \min\bigl(1, \tau / S^h_{\max}\bigr), \qquad
              W_q^h \leftarrow \gamma_h^{\alpha} W_q^h, \quad
              W_k^h \leftarrow \gamma_h^{1 - \alpha} W_k^h

    :math:`S^h_{\max}` is the largest scaled product :math:`q \cdot k` of a head over rows, visible
    keys, batches and ranks since the last step, before softcap, bias and sinks. Projection biases
    are scaled too. A key that query heads share is not scaled; the head's queries get all of γ:
    with grouped queries, and for the rotary part of multi-head latent attention, whose other parts
    get √γ each. Other heads are unchanged bit for bit.

    It supports ``torch.nn.MultiheadAttention``, :class:`acutance.nn.MultiheadAttention`, and
    modules of any library that call ``F.scaled_dot_product_attention`` or transformers' attention
    interface, or use a softmax of one product of queries and keys, with projections under a usual
    name (``q_proj`` and ``k_proj``, ``query`` and ``key``, ``c_attn``, ``qkv_proj``, ...). A
    layer's first forward shows how a fused projection is laid out, and whether the scored vectors
    are the projections' outputs: a layer with something in between, such as a normalisation, is
    refused. Weights shared by modules get the smallest of their factors, once.

    Args:
        model: the model being trained.
        tau: threshold τ, above 0.
        alpha: exponent of γ for the queries, between 0 and 1.
        layers: as for :class:`AttentionWatch`.
        base_weights: under LoRA, also scale the frozen weights that the adapter is added to, as a
            bound on the logits needs. An adapter saved alone then lacks a part: save the merged
            model. DoRA needs it only for projections with a bias.
        group: process group for the maxima; None for all ranks, if ``torch.distributed`` is
            initialised.

    Attributes:
        steps: number of steps so far.
        clips: by module, how often each head was scaled, integers (Hq,).

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, or weights are not known or cannot be scaled (at the
            first :meth:`step` after it ran).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> attend = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = 9 * torch.randn(2, 10, 16)
        >>> clip = QKClip(attend, tau=5.0)
        >>> with clip:
        ...     _ = attend(x, x, x)
        >>> [f"{value:.1f}" for value in clip.step().layers[0].max_logit]
        ['224.9', '145.2', '279.8', '169.6']
        >>> with clip:
        ...     _ = attend(x, x, x)
        >>> clip.step().max_logit <= 5.0
        True

    Source:
        Kimi Team (2025), arXiv:2507.20534, algorithm 1 (MuonClip).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tau: float = 100.0,
        *,
        alpha: float = 0.5,
        layers: Chosen | None = None,
        base_weights: bool = False,
        group: Any = None,
    ) -> None:
        self._watch = AttentionWatch(
            model, layers=layers, gradients=False, products=True, noted=self._note
        )
        self._model = model
        self.tau = check_number("tau", tau, above=0.0)
        self.alpha = check_number("alpha", alpha, above=0.0, including=True)
        if alpha > 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        self.base_weights = check_flag("base_weights", base_weights)
        self.steps = 0
        self.clips: dict[str, Tensor] = {}
        self._exact = ExactMaxima(group)
        self._maxima: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, float]] = {}
        self._layouts: dict[str, int] = {}
        self._recording = ExitStack()
        # the last outputs of projections, detached, while they are recorded
        self._outputs: dict[torch.nn.Module, deque[Tensor]] | None = None
        self._makers: dict[str, tuple[torch.nn.Module, ...]] = {}  # of reported calls, in a context
        self._attending: set[torch.nn.Module] = set()  # projections of which attention was seen
        self._aside: set[torch.nn.Module] = set()  # what only has the name of a projection
        self._modules: dict[str, torch.nn.Module] = {}

    def __enter__(self) -> QKClip:
        self._watch.__enter__()
        if untold := self._with_unknown_layout():
            outputs: dict[nn.Module, deque[Tensor]] = {}
            self._outputs = outputs

            def record(module: nn.Module, _: Any, __: Any, output: Any) -> None:
                if is_sharded(output):
                    output = output.to_local()
                if isinstance(output, Tensor):
                    outputs.setdefault(module, deque(maxlen=_MOST)).append(output.detach())

            self._recording.enter_context(follow_results(untold, record))
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        try:
            self._watch.__exit__(kind, *details)
        finally:
            rows, self._watch.rows, self._modules = self._watch.rows, [], {}
            self._recording.close()
            if kind is None:  # those that ran, and no attention with them
                self._aside |= set(self._outputs or ()) - self._attending
            self._outputs = None
            self._makers, self._attending = {}, set()
        if kind is not None:
            return
        if self._watch.unread:
            raise ValueError(
                "some layers could not be read; exclude them with layers=: "
                f"{'; '.join(self._watch.unread)}"
            )
        for seen in rows:
            name, stats = seen.module.partition("#")[0], seen.statistics
            # a kernel's maximum may pass over what is not a number; the logsumexp does not
            logits = torch.where(stats.lse.isnan(), torch.nan, stats.max_logit)
            largest = torch.where(seen.kept, logits, -torch.inf).amax((0, 2)).detach().double()
            before = self._maxima.get(name, largest)
            self._maxima[name] = torch.maximum(before, largest)
            eps = torch.finfo(seen.dtype).eps if seen.dtype is not None else 0.0
            self._shapes[name] = (seen.width, eps)  # for ranks that do not see the layer

    def _note(self, name: str, query: Tensor, key: Tensor) -> None:
        """Determine the layout of a module's projections from its first calls."""
        if self._outputs is None:
            return
        if name in self._layouts:
            for maker in self._makers.get(name, ()):
                self._outputs.pop(maker, None)
            return
        try:
            ways = self._weights(name, query.shape[1], query.shape[-1], local=True)
        except ValueError:
            return  # step() says so
        holder = self._holder(name)
        rotary = 0 if holder is None else rotary_width(holder, query.shape[-1])
        agreements = [agrees(way, query, key, self._outputs, rotary) for way in ways]
        right = [way.layout for way, verdict in zip(ways, agreements, strict=True) if verdict]
        if len(right) == 1:  # where several are, other tokens may tell them apart
            self._layouts[name] = LAYOUTS.index(right[0])
        elif not right and agreements[0] is False:
            self._layouts[name] = _OTHERS
        makers = tuple(maker for way in ways for maker in way.makers)
        for maker in makers:
            self._outputs.pop(maker, None)
        self._attending.update(makers)
        if name in self._layouts:
            self._makers[name] = makers

    def _with_unknown_layout(self) -> set[torch.nn.Module]:
        """Projections, in the chosen modules, whose weight layout is unknown."""
        known = {self._holder(name) for name in self._layouts}
        chosen = {
            self._holder(name)
            for name, _ in named_modules(self._model)
            if self._watch.captures_module(name)
        }
        return {
            part
            for module in chosen - known
            if module is not None
            for name, part in module.named_children()
            if name in NAMES
        } - self._aside

    def _enclosing(self, name: str) -> Iterator[torch.nn.Module]:
        """The named module and the two around it, the innermost first."""
        self._modules = self._modules or dict(named_modules(self._model))
        if name in self._modules:
            yield self._modules[name]
            for _ in range(2 if name else 0):
                name = name.rpartition(".")[0]
                yield self._modules.get(name, self._model)

    def _holder(self, name: str) -> torch.nn.Module | None:
        """The nearest enclosing module that has an attribute with a projection's name."""
        for module in self._enclosing(name):
            if any(child in NAMES for child, _ in module.named_children()):
                return module
        return None

    def step(self) -> ClipReport:
        """Scale the heads that exceeded τ since the last step, and reset the maxima.

        Call it after ``optimizer.step()``, on every rank.

        Raises:
            ProbeError: if no rank ran any attention inside ``with clip:`` since the last step.
            ValueError: if a layer's weights cannot be determined or scaled.
        """
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        reshard(self._model)
        mine = {}
        for name, values in self._maxima.items():
            about = [*self._shapes[name], self._layouts.get(name, _UNTOLD)]
            mine[name] = torch.cat([self._of_all_heads(name, values), values.new_tensor(about)])
        layers, not_finite = [], []
        smallest: dict[tuple[int, ...], tuple[HeadSlices, float]] = {}
        for name, values in self._exact(mine, device).items():
            *largest, width, eps, layout = values.tolist()
            if width < 0:
                continue  # in the layout of the ranks, but none saw it since the last step
            factors = [1.0] * len(largest)
            weights = self._split_projections(name, len(largest), int(width), int(layout))
            for head, logit in enumerate(largest):
                if math.isnan(logit) or logit == math.inf:
                    not_finite.append((name, head))
                elif logit > self.tau:
                    # by so much rounding of weights and products can increase a logit
                    stored = [of.tensor.dtype for of in (*weights.query, *weights.key)]
                    rounding = max(eps, *(torch.finfo(dtype).eps for dtype in stored))
                    margin = 4 * rounding if rounding > 1e-5 else 64 * rounding
                    factors[head] = self.tau / logit * (1 - margin)
                    for part, factor in weights.factors(factors[head], self.alpha):
                        place = (id(part.tensor), part.dim, part.offset(head), part.size)
                        before = smallest.get(place, (part, 1.0))[1]
                        smallest[place] = (part, min(before, factor))
            counts = self.clips.setdefault(name, torch.zeros(len(largest), dtype=torch.int64))
            counts += torch.tensor([factor != 1.0 for factor in factors])
            layers.append(LayerClip(name, tuple(largest), tuple(factors)))
        if not layers:
            raise ProbeError(
                f"QKClip captured no attention of {type(self._model).__name__} since its last "
                "step: run the model inside 'with clip:' before step()"
            )
        for (_, dim, start, size), (part, factor) in smallest.items():
            multiply(part.tensor, dim, start, size, factor)
        self.steps += 1
        self._maxima, self._modules = {}, {}
        return ClipReport(tuple(layers), tuple(not_finite))

    def _of_all_heads(self, name: str, values: Tensor) -> Tensor:
        """Maxima (heads,) of a layer's heads on all tensor-parallel ranks; −∞ on other ranks.

        They are this rank's unless separate projections are split over ranks by heads.
        """
        holder, (width, _) = self._holder(name), self._shapes[name]
        for projection, _ in _PAIRS:
            weight = getattr(getattr(holder, projection, None), "weight", None)
            if isinstance(weight, Tensor):
                count, index = head_shards(weight, 0)
                if weight.shape[0] == count * len(values) * width:
                    of_ranks = values.new_full((count, len(values)), -torch.inf)
                    of_ranks[index] = values
                    return of_ranks.flatten()
        return values

    def settle(self, run: Callable[[], object], *, rounds: int = 100) -> tuple[ClipReport, ...]:
        """Run and clip repeatedly until no head exceeds τ on what ``run`` computes.

        Scaling one layer changes the inputs of the next, so a single step guarantees τ only for
        unchanged inputs. With each round one more layer is final.

        Args:
            run: runs the model, such as ``lambda: model(**batch)``.
            rounds: largest number of rounds.

        Returns:
            The report of each round; the last clipped nothing.

        Raises:
            RuntimeError: if a head still exceeds τ after the last round.
        """
        reports: list[ClipReport] = []
        for _ in range(check_count("rounds", rounds, 1)):
            with self, torch.no_grad():
                run()
            reports.append(self.step())
            if not reports[-1].clipped:
                return tuple(reports)
        raise RuntimeError(f"after {rounds} rounds {len(reports[-1].clipped)} heads exceeded tau")

    def after(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call :meth:`step` after every step of an optimiser; the result's ``remove()`` ends it.

        Example:
            >>> layer = torch.nn.MultiheadAttention(8, 2)
            >>> clip = QKClip(layer)
            >>> handle = clip.after(torch.optim.SGD(layer.parameters(), lr=0.1))
            >>> handle.remove()
        """

        def after_step(*_: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(after_step)

    def _split_projections(self, name: str, heads: int, width: int, layout: int) -> Projections:
        """The query and key weights of a module, split in the layout seen in a forward pass."""
        ways = self._weights(name, heads, width)
        if layout == _OTHERS:
            raise ValueError(
                f"{name} cannot be clipped: its queries and keys are not just rotated or scaled "
                "outputs of its projections (there is a normalisation, a clamp, an added term or "
                "an unknown order of heads in between); exclude it with layers="
            )
        split = next((w for w in ways if LAYOUTS.index(w.layout) == layout), ways[0])
        slices = (*split.query, *split.query_alone, *split.key)
        if any(of_heads.is_base for of_heads in slices) and not self.base_weights:
            raise ValueError(
                f"{name} cannot be clipped: its projections have LoRA adapters, and scaling a head "
                "must change the frozen weights too, which an adapter saved alone lacks; pass "
                "base_weights=True and save the merged model, or use DoRA"
            )
        return split

    def _weights(
        self, name: str, heads: int, width: int, local: bool = False
    ) -> tuple[Projections, ...]:
        """The weights of a module, or of the nearest enclosing module that has them."""
        reason: ValueError | None = None
        for module in self._enclosing(name):
            try:
                return find_layouts(module, heads, width, local)
            except NoProjectionsError as problem:
                reason = reason or problem
            except ValueError as problem:
                reason = problem
                break
        raise ValueError(f"{name} cannot be clipped: {reason}; exclude it with layers=")

    def state_dict(self) -> dict[str, Any]:
        """Steps, counts, the maxima since the last step, and how weights are laid out."""
        return {
            "tau": self.tau,
            "alpha": self.alpha,
            "steps": self.steps,
            "clips": {name: counts.clone() for name, counts in self.clips.items()},
            "maxima": {name: values.clone() for name, values in self._maxima.items()},
            "shapes": dict(self._shapes),
            "layouts": dict(self._layouts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, including τ and α.

        Raises:
            ValueError: if an entry is missing.
        """
        required = set(QKClip.state_dict(self))
        if set(state) != required:
            raise ValueError(
                f"the state of a QKClip must have {', '.join(sorted(required))}, got "
                f"{', '.join(sorted(state)) or 'nothing'}"
            )
        self.tau = check_number("tau", state["tau"], above=0.0)
        self.alpha = check_number("alpha", state["alpha"], above=0.0, including=True)
        self.steps = check_count("steps", state["steps"], 0)
        self.clips = {name: counts.clone() for name, counts in state["clips"].items()}
        self._maxima = {name: values.clone() for name, values in state["maxima"].items()}
        self._shapes = {name: (int(w), float(e)) for name, (w, e) in state["shapes"].items()}
        layouts = {name: int(layout) for name, layout in state["layouts"].items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout != _UNTOLD}
