"""Attention with its statistics by row, :func:`row_statistics`, and by key, :func:`key_mass`.

A call is validated once, its score transformed and its queries scaled, and a kernel computes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.overrides import wrap_torch_function

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.compiling import by_operations, transformed
from acutance.kernels import dispatch, fast_path
from acutance.kernels.call import KernelCall, ScoreTile, accumulate_dtype
from acutance.kernels.hidden import constant_where_not_finite
from acutance.kernels.key_mass import from_output
from acutance.kernels.key_mass import key_mass as softmax_key_mass
from acutance.kernels.whole_rows import weigh_rows
from acutance.masks import MaskOptions, check_masking, check_sinks
from acutance.rowstats import RowState, RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling, apply_scaling, visible_keys
from acutance.scores import DotScore, Features, ScaledDot, ScaleInvariant, TileScore
from acutance.shapes import check_flags, check_inputs, check_number, check_softcap
from acutance.weights import Sink, Softmax, SoftmaxOne, Weighting

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "key_mass", "row_statistics"]

Backend: TypeAlias = Literal["auto", "native", "blocked", "triton"]
#: A score, or a function that makes a tile of scores.
Score: TypeAlias = DotScore | TileScore | ScoreTile
_SCALED_DOT, _SOFTMAX = ScaledDot(), Softmax()


class ScoreOptions(MaskOptions, total=False):
    """Keyword arguments that define the scores and choose the kernel."""

    softcap: float | None
    sinks: Tensor | None
    score: str | Score
    scaling: str | AnyScaling | None
    backend: Backend


class AttentionOptions(ScoreOptions, total=False):
    """Keyword arguments that :func:`attention` and :func:`row_statistics` share."""

    noise: bool
    gaps: bool


DEFAULTS: dict[str, object] = {
    **dict.fromkeys(AttentionOptions.__annotations__),
    "query_offset": 0,
    "backend": "auto",
    "score": "scaled_dot",
    "noise": False,
    "gaps": False,
}
#: Options that the fast path reads: it takes no call in which others differ from their defaults.
_FAST = ("query_offset", "window", "backend")


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: Literal[False] = False,
    dropout_p: float = 0.0,
    weights: str | Weighting = "softmax",
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: Literal[True],
    dropout_p: float = 0.0,
    weights: Literal["softmax", "softmax_one"] = "softmax",
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, RowStatistics]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: Literal[True],
    dropout_p: float = 0.0,
    weights: str | Weighting,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, RowStatistics | WeightStatistics]: ...


@wrap_torch_function(lambda query, *_, **__: (query,))  # a probe sees its calls
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: bool = False,
    dropout_p: float = 0.0,
    weights: str | Weighting = "softmax",
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, RowStatistics | WeightStatistics]:
    r"""Scaled dot-product attention with statistics of each row, in O(n) memory.

    .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \mathrm{softmax}_j(s_{ij})

    Other scores, weights and length scalings are options; each has its defaults by name.

    The first arguments mean what they mean in
    :func:`torch.nn.functional.scaled_dot_product_attention`. Scores are ``scale · q·k``, then
    softcapped, then biased, then masked; *n* is always the number of keys a row can see.

    Args:
        query: (B, Hq, L, E), float64, float32, bfloat16 or float16.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        attn_mask: boolean (True takes part) or additive, broadcastable to (B, Hq, L, S). An
            additive value of −inf, or at or below −1e9 (float16: half its minimum), hides its key
            (:func:`acutance.masks.hides`).
        is_causal: row i sees keys j ≤ i + query_offset; at offset 0 aligned top-left, as in SDPA.
        scale: factor of the scores; None is the score's own, 1/√E for scaled dot products.
        enable_gqa: let Hq be a multiple of H, consecutive query heads sharing a key head.
        return_stats: also return the statistics.
        noise: also compute the sums for the metric ``noise_gain`` (a third matrix product).
        gaps: also count each row's keys by the distance of their logit below its maximum, in bins
            of 1/4, for ``keys_50`` to ``keys_99``, ``mass_of_largest`` and ``mass_below``. The
            counts take 256 bytes per row.
        dropout_p: probability of dropping a weight; statistics are of the weights before dropout.
        query_offset: position of query 0 among the keys, 0 unless given: S − L when decoding with
            a cache.
        window: a row at position i sees keys with ``abs(i - j) < window``.
        key_mask: boolean (B, S), True where a key takes part (False on padding).
        document_ids: integers (S,) or (B, S), or a pair for queries and keys; a row sees only keys
            of its own document.
        cu_seqlens: the same as cumulative lengths, from 0 to S.
        bias: added to the scores, broadcastable to (B, Hq, L, S); differentiable.
        alibi_slopes: (Hq,); adds ``-slope * abs(position - j)`` without forming the matrix.
        softcap: c bounds scaled scores as c · tanh(s / c).
        sinks: (Hq,) learned logits that share each row's normaliser without being keys.
        score: a name, ``"scaled_dot"`` unless given, or a score of :mod:`acutance.scores`, or a
            function of a block of queries, a block of keys and the first key's position.
        weights: a name or a weighting of :mod:`acutance.weights`.
        scaling: a name or a law of :mod:`acutance.scaling`; its factor for the row's number of
            visible keys multiplies the query, after ``score`` has transformed it.
        backend: the kernel: "native" (compiled, CPU), "triton" (CUDA) or "blocked" (plain PyTorch
            anywhere); "auto", the default, is the fastest that supports the call.
            The statistics' attribute ``backend`` says which was used.

    Returns:
        The output (B, Hq, L, Ev) in the query's dtype; with ``return_stats`` also the
        :class:`~acutance.rowstats.RowStatistics`, rows (B, Hq, L), accumulated in float32 at least,
        or for weights that are not softmax the :class:`~acutance.rowstats.WeightStatistics`.
        A row with no visible key has output 0, ``n_keys`` 0, ``lse`` and ``max_logit`` −inf, and
        NaN for the rest.

    Raises:
        TypeError: if a dtype or the type of an option is wrong.
        ValueError: if shapes, masks or numbers do not fit, or the backend named does not support
            the call; the message names the argument and all shapes, or the reason.

    Example:
        >>> import acutance
        >>> import torch
        >>> query = torch.zeros(1, 1, 3, 8)
        >>> out, stats = acutance.attention(query, query, query, is_causal=True, return_stats=True)
        >>> stats.effective_keys
        tensor([[[1., 2., 3.]]])

        Squared ReLU of cosines, scaled by log n:

        >>> law = acutance.scaling.LogN(train_length=2)
        >>> out = acutance.attention(
        ...     query, query, query, score="cosine", weights="relu2", scaling=law
        ... )

    Source:
        Vaswani et al. (2017), arXiv:1706.03762; Milakov & Gimelshein (2018), arXiv:1805.02867.
    """
    if value is None:
        raise TypeError("value must be a Tensor, got None; row_statistics needs no values")
    fast = _fast(query, key, value, attn_mask, is_causal, scale, enable_gqa, weights, options)
    if fast is not None and dropout_p == 0.0 and isinstance(return_stats, bool):
        return fast if return_stats else fast[0]
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    call = validated(
        query, key, value, attn_mask, is_causal, scale, enable_gqa,
        weights=weights, dropout_p=dropout_p, return_stats=return_stats, **options,
    )  # fmt: skip
    out, stats = computed(call)
    out = out.to(call.dtype)
    return (out, stats) if return_stats else out


@overload
def row_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    weights: Literal["softmax", "softmax_one"] = "softmax",
    **options: Unpack[AttentionOptions],
) -> RowStatistics: ...


@overload
def row_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    weights: str | Weighting,
    **options: Unpack[AttentionOptions],
) -> RowStatistics | WeightStatistics: ...


def row_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    weights: str | Weighting = "softmax",
    **options: Unpack[AttentionOptions],
) -> RowStatistics | WeightStatistics:
    """Statistics of each attention row, without computing the output.

    Options are those of :func:`attention`. Values are read only for ``noise_gain``, so they are
    needed only with ``noise=True``.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev), with ``noise=True``.
        attn_mask: boolean (True takes part) or additive, broadcastable to (B, Hq, L, S).
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None is the score's own.
        enable_gqa: let Hq be a multiple of H.
        noise: also compute the sums for the metric ``noise_gain``.
        gaps: also count keys by their distance below the maximum, for ``keys_50`` to ``keys_99``.
        query_offset: position of query 0 among the keys.
        window: a row at position i sees keys with ``abs(i - j) < window``.
        key_mask: boolean (B, S), True where a key takes part.
        document_ids: a row sees only keys of its own document.
        cu_seqlens: the same as cumulative lengths.
        bias: added to the scores.
        alibi_slopes: (Hq,); adds ``-slope * abs(position - j)``.
        softcap: bounds scaled scores.
        sinks: (Hq,) learned logits in the normaliser.
        score: name, score or function.
        weights: name or weighting.
        scaling: name or law.
        backend: the kernel.

    Returns:
        The statistics, rows (B, Hq, L).

    Raises:
        TypeError: as :func:`attention`.
        ValueError: as :func:`attention`, and if ``noise`` is asked for without values.

    Example:
        One key stands 2 above three others, so it holds e²/(e² + 3) of the weight:

        >>> import acutance
        >>> import torch
        >>> query = torch.tensor([1.0]).view(1, 1, 1, 1)
        >>> key = torch.tensor([2.0, 0.0, 0.0, 0.0]).view(1, 1, 4, 1)
        >>> acutance.row_statistics(query, key).top_weight
        tensor([[[0.7112]]])
    """
    if value is None:
        fast = _fast(query, key, None, attn_mask, is_causal, scale, enable_gqa, weights, options)
        if fast is not None:
            return fast[1]
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"row_statistics() got an unexpected keyword argument {name!r}")
    noise = options.get("noise", False)
    check_flags(noise=noise)
    if noise and value is None:
        raise ValueError("noise=True needs value to measure how the output changes, got None")
    if value is not None and not noise:
        same_width = options.get("score", "scaled_dot") == "scaled_dot"
        check_inputs(query, key, value, enable_gqa, same_width=same_width)
        value = None
    call = validated(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, weights=weights, **options
    )
    return computed(call)[1]


def key_mass(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    weights: str | Weighting = "softmax",
    **options: Unpack[ScoreOptions],
) -> Tensor:
    r"""The weight that each key receives, summed over the rows, in memory of O(n).

    .. math:: M_j = \sum_i p_{ij}

    It takes a second pass over the scores, with the normalisers of :func:`acutance.row_statistics`.
    The sum over the keys of a head is the number of rows that see a key, less the weight of sinks.
    To leave rows out, such as those of padding, give them a document of their own in
    ``document_ids``.

    Args:
        query: (B, Hq, L, E). For the attention of recent tokens only, pass the last rows with their
            ``query_offset``.
        key: (B, H, S, E).
        attn_mask: boolean (True takes part) or additive, broadcastable to (B, Hq, L, S).
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None is the score's own.
        enable_gqa: let Hq be a multiple of H.
        weights: name or weighting. Weights that are not softmax are summed as they are, signs
            included.
        options: ``query_offset``, ``window``, ``key_mask``, ``document_ids``, ``cu_seqlens``,
            ``bias``, ``alibi_slopes``, ``softcap``, ``sinks``, ``score``, ``scaling`` and
            ``backend``, with the meaning they have in :func:`acutance.attention`.

    Returns:
        (B, Hq, S), float64 for float64 inputs and float32 for others; 0 for a key that no row
        sees. It carries no gradient.

    Raises:
        TypeError: as :func:`acutance.attention`, and for an option of another name.
        ValueError: as :func:`acutance.attention`.

    Example:
        Three causal rows of equal scores: the first key receives 1 + 1/2 + 1/3.

        >>> import acutance
        >>> import torch
        >>> query = torch.zeros(1, 1, 3, 8)
        >>> acutance.key_mass(query, query, is_causal=True)
        tensor([[[1.8333, 0.8333, 0.3333]]])

        The last token is padding; as a document of its own it adds nothing to the others:

        >>> mask = torch.tensor([[1, 1, 0]])
        >>> acutance.key_mass(query, query, is_causal=True, document_ids=mask)
        tensor([[[1.5000, 0.5000, 1.0000]]])

    Source:
        The accumulated attention scores of Zhang et al. (2023), "H2O", arXiv:2306.14048.
    """
    for name in options:
        if name not in ScoreOptions.__annotations__:
            known = ", ".join(ScoreOptions.__annotations__)
            raise TypeError(f"key_mass has no option {name!r}: choose from {known}")
    with torch.no_grad():
        call = validated(
            query, key, None, attn_mask, is_causal, scale, enable_gqa, weights=weights, **options
        )
        if call.score is None and call.weighting == _SOFTMAX:
            return softmax_key_mass(call)
        return from_output(call, lambda call: computed(call)[0])


def _fast(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    weights: str | Weighting,
    options: AttentionOptions,
) -> tuple[Any, RowStatistics] | None:
    """Output and statistics by the fast path; None for a call that it does not take."""
    for name, given in options.items():
        if name not in _FAST and (name not in DEFAULTS or given is not DEFAULTS[name]):
            return None
    if attn_mask is not None or weights != "softmax":
        return None
    tensors = (query, key) if value is None else (query, key, value)
    for tensor in tensors:
        if type(tensor) is not Tensor or (is_grad_enabled() and tensor.requires_grad):
            return None
    offset, window = options.get("query_offset", 0), options.get("window")
    return fast_path.attend(
        query, key, value, is_causal, scale, enable_gqa, offset, window,
        options.get("backend", "auto"),
    )  # fmt: skip


def validated(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    weights: str | Weighting = "softmax",
    dropout_p: float = 0.0,
    return_stats: bool = True,
    noise: bool = False,
    gaps: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: str | Score = "scaled_dot",
    scaling: str | AnyScaling | None = None,
    backend: str = "auto",
    **masks: Unpack[MaskOptions],
) -> KernelCall:
    """The validated call, with its score transformed and its law applied.

    The arguments are those of :func:`attention`.
    """
    check_flags(
        return_stats=return_stats, noise=noise, gaps=gaps, is_causal=is_causal,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    if backend != "auto":
        dispatch.check_backend(backend)
    how: DotScore | TileScore = _SCALED_DOT if score == "scaled_dot" else scores.get(score)
    weighting: Weighting = _SOFTMAX if weights == "softmax" else weightings.get(weights)
    law = None if scaling is None else scalings.get(scaling)
    plain = type(how) is ScaledDot
    query, key, value = check_inputs(query, key, value, enable_gqa, same_width=plain, autocast=True)
    dtype, factor, tile = query.dtype, 1.0, None
    if plain:
        factor = query.shape[3] ** -0.5
    elif isinstance(how, DotScore):
        query, key, factor = how.transform(query, constant_where_not_finite(key))
    else:
        if isinstance(how, Features | ScaleInvariant) and how.offset is None:
            how = replace(how, offset=masks.get("query_offset") or 0)
        how, query, key = how.prepare(query, constant_where_not_finite(key))
        tile = how.tile
    if scale is not None:
        factor = check_number("scale", scale)
    if type(dropout_p) is not float or dropout_p != 0.0:
        check_number("dropout_p", dropout_p, above=0.0, below=1.0, including=True)
    if softcap is not None:
        softcap = check_softcap(softcap, query.dtype)
    masking = check_masking(query, key, attn_mask, is_causal, **masks)
    if sinks is not None:
        sinks = check_sinks(sinks, query)
    # a tensor: no graph break
    seed = torch.randint(2**62, ()) if dropout_p > 0.0 else None
    call = KernelCall(
        query, key, value, masking, factor, softcap, sinks, float(dropout_p), seed,
        noise and return_stats, gaps and return_stats, backend, weighting, tile, dtype=dtype,
    )  # fmt: skip
    if weighting is not _SOFTMAX:
        call = _with_softmax_as_such(call)
    if law is not None and not isinstance(law, scalings.NoScaling):
        call = _scaled(call, law)
    return call


def _with_softmax_as_such(call: KernelCall) -> KernelCall:
    """The same call with softmax, temperature and sinks in the form the kernels support.

    A temperature goes into the scale, sinks into the call's. Other weightings are unchanged.
    """
    weighting, query, masking = call.weighting, call.query, call.masking
    if call.sinks is not None and weighting != _SOFTMAX:
        raise ValueError(
            "sinks can be used only with weights='softmax'; with other weights pass "
            f"weights.Sink(sinks), got weights={weighting.name!r}"
        )
    if isinstance(weighting, SoftmaxOne):
        return call._replace(sinks=query.new_zeros(query.shape[1]), weighting=_SOFTMAX)
    if isinstance(weighting, Sink):
        return call._replace(sinks=check_sinks(weighting.sinks, query), weighting=_SOFTMAX)
    biased = masking.additive or masking.alibi_slopes is not None
    if isinstance(weighting, Softmax) and call.softcap is None and not biased:
        return call._replace(scale=call.scale / weighting.temperature, weighting=_SOFTMAX)
    return call


def _scaled(call: KernelCall, law: AnyScaling) -> KernelCall:
    """Multiply each query by the law's factor for the number of keys that its row sees.

    The law's position of a causal row without a window is n − 1, whatever is padded or packed; that
    of other rows is their index from the start.
    """
    query, masking = call.query, call.masking
    n = visible_keys(masking)
    positions = entropy = None
    if not masking.causal or masking.window is not None:
        first = masking.offset
        positions = torch.arange(first, first + masking.queries, device=query.device)
    if law.needs_entropy:
        with torch.no_grad():
            entropy = computed(call._replace(value=None, noise=False, gaps=False))[1].entropy
    if call.score is None:
        query = apply_scaling(query, law, n, positions, entropy=entropy)
        return call._replace(query=query)
    ones = query.new_ones(*query.shape[:3], 1, dtype=accumulate_dtype(query.dtype))
    return call._replace(row_scale=apply_scaling(ones, law, n, positions, entropy=entropy))


def computed(call: KernelCall) -> tuple[Tensor, RowStatistics | WeightStatistics]:
    """Output and statistics, from a streaming kernel if one supports the call."""
    softmax = call.weighting == _SOFTMAX
    streams = softmax and call.score is None
    if streams and not (transformed() and by_operations()):
        sums, backend = dispatch.attend_rows(call)
        state = RowState(*sums[1:-4], _sink_of_rows(call.sinks, sums.Z), *sums[-4:])
        return sums.out, RowStatistics(state, backend)
    if call.backend not in ("auto", "blocked") and not streams:
        raise ValueError(
            f"backend={call.backend!r} supports only softmax of dot products; other "
            "weights and scores are computed in plain PyTorch, in blocks of rows"
        )
    rows = weigh_rows(call)
    out = call.query.new_empty(*call.query.shape[:3], 0) if rows.out is None else rows.out
    if not softmax:
        return out, WeightStatistics(rows.weights, rows.scores, rows.slopes, backend="rows")
    state = rows.scores
    if call.sinks is not None:
        state = state._replace(sink=_sink_of_rows(call.sinks, state.Z))
    return out, RowStatistics(state, "rows")


def _sink_of_rows(sinks: Tensor | None, Z: Tensor) -> Tensor:
    """The sink logits of rows, (B, Hq, L); without an element if there are none."""
    if sinks is None:
        return Z.detach().unsqueeze(-1)[..., :0]
    return sinks.to(Z.dtype).view(1, -1, 1).expand_as(Z)
