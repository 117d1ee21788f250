"""Attention with its statistics by row, :func:`row_statistics`, and by key, :func:`key_mass`.

A call is validated once, its score transformed and its queries scaled, and a kernel computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.overrides import wrap_torch_function

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.compiling import by_operations
from acutance.kernels import dispatch, fast_path
from acutance.kernels.call import KernelCall, Rule, Sums, accumulate_dtype
from acutance.kernels.hidden import constant_where_not_finite
from acutance.kernels.key_mass import from_output
from acutance.kernels.key_mass import key_mass as softmax_key_mass
from acutance.kernels.ops import attend_rows
from acutance.kernels.whole_rows import ScoreTile, WeighedRows, weigh_rows, whole_weights
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
Score: TypeAlias = DotScore | TileScore | Callable[[Tensor, Tensor, int], Tensor]
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
    check_flags(return_stats=return_stats)
    call = validated(
        query, key, value, attn_mask, is_causal, scale, enable_gqa,
        weights=weights, dropout_p=dropout_p, **options,
    )  # fmt: skip
    if not return_stats and (call.inputs.noise or call.inputs.gaps):
        call = replace(call, inputs=call.inputs._replace(noise=False, gaps=False))
    out, stats = call.computed()
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
    return call.computed()[1]


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
        return call.key_mass()


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
    noise: bool = False,
    gaps: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: str | Score = "scaled_dot",
    scaling: str | AnyScaling | None = None,
    backend: str = "auto",
    **masks: Unpack[MaskOptions],
) -> Call:
    """The validated call, with its score transformed and its law applied.

    The arguments are those of :func:`attention`.
    """
    check_flags(noise=noise, gaps=gaps, is_causal=is_causal, enable_gqa=enable_gqa)
    dispatch.check_backend(backend)
    how: DotScore | TileScore = _SCALED_DOT if score == "scaled_dot" else scores.get(score)
    weighting: Weighting = _SOFTMAX if weights == "softmax" else weightings.get(weights)
    law = None if scaling is None else scalings.get(scaling)
    plain = type(how) is ScaledDot
    query, key, value = check_inputs(query, key, value, enable_gqa, same_width=plain, autocast=True)
    dtype, factor = query.dtype, 1.0
    if plain:
        factor = query.shape[3] ** -0.5
    elif isinstance(how, DotScore):
        query, key, factor = how.transform(query, constant_where_not_finite(key))
    else:
        if isinstance(how, Features | ScaleInvariant) and how.offset is None:
            how = replace(how, offset=masks.get("query_offset") or 0)
        how, query, key = how.prepare(query, constant_where_not_finite(key))
    if scale is not None:
        factor = check_number("scale", scale)
    check_number("dropout_p", dropout_p, above=0.0, below=1.0, including=True)
    if softcap is not None:
        softcap = check_softcap(softcap, query.dtype)
    masking = check_masking(query, key, attn_mask, is_causal, **masks)
    if sinks is not None:
        sinks = check_sinks(sinks, query)
    # a tensor: no graph break
    seed = torch.randint(2**62, ()) if dropout_p > 0.0 else None
    rule = Rule(factor, softcap, sinks, float(dropout_p), seed)
    inputs = KernelCall(query, key, value, masking, rule, noise, gaps)
    call = Call(inputs, how, weighting, backend, dtype).with_softmax_as_such()
    if law is not None and not isinstance(law, scalings.NoScaling):
        call = call.scaled(law)
    return call


@dataclass(frozen=True)
class Call:
    """A validated call, its score transformed, and how its scores become weights."""

    inputs: KernelCall
    score: DotScore | TileScore
    weighting: Weighting
    backend: str
    dtype: torch.dtype  #: of the output
    row_scale: Tensor | None = None

    def with_softmax_as_such(self) -> Call:
        """The same call with softmax, temperature and sinks in the form the kernels support.

        A temperature goes into the scale, sinks into the rule. Other weightings are unchanged.
        """
        weighting, rule = self.weighting, self.inputs.rule
        if weighting is _SOFTMAX:
            return self
        if rule.sinks is not None and weighting != _SOFTMAX:
            raise ValueError(
                "sinks can be used only with weights='softmax'; with other weights pass "
                f"weights.Sink(sinks), got weights={weighting.name!r}"
            )
        query = self.inputs.query
        if isinstance(weighting, SoftmaxOne):
            return self._softmax(sinks=query.new_zeros(query.shape[1]))
        if isinstance(weighting, Sink):
            return self._softmax(sinks=check_sinks(weighting.sinks, query))
        masking = self.inputs.masking
        biased = masking.additive or masking.alibi_slopes is not None
        if isinstance(weighting, Softmax) and rule.softcap is None and not biased:
            return self._softmax(scale=rule.scale / weighting.temperature)
        return self

    def _softmax(self, **changes: Tensor | float | None) -> Call:
        """A copy of the call with softmax weights, and ``changes`` to fields of its rule."""
        rule = replace(self.inputs.rule, **changes)  # type: ignore[arg-type]
        return replace(self, inputs=self.inputs._replace(rule=rule), weighting=_SOFTMAX)

    def scaled(self, law: AnyScaling) -> Call:
        """Multiply each query by the law's factor for the number of keys that its row sees.

        The law's position of a causal row without a window is n − 1, whatever is padded or packed;
        that of other rows is their index from the start.
        """
        query, masking = self.inputs.query, self.inputs.masking
        n = visible_keys(masking)
        positions = entropy = None
        if not masking.causal or masking.window is not None:
            first = masking.offset
            positions = torch.arange(first, first + masking.queries, device=query.device)
        if law.needs_entropy:
            with torch.no_grad():
                bare = replace(
                    self, inputs=self.inputs._replace(value=None, noise=False, gaps=False)
                )
                entropy = bare.computed()[1].entropy
        if isinstance(self.score, DotScore):
            query = apply_scaling(query, law, n, positions, entropy=entropy)
            return replace(self, inputs=self.inputs._replace(query=query))
        one = query.new_ones(*query.shape[:3], 1, dtype=accumulate_dtype(query.dtype))
        rows = apply_scaling(one, law, n, positions, entropy=entropy)
        return replace(self, row_scale=rows)

    def computed(self) -> tuple[Tensor, RowStatistics | WeightStatistics]:
        """Output and statistics, from a streaming kernel if one supports the call."""
        softmax = self.weighting == _SOFTMAX
        streams = softmax and isinstance(self.score, DotScore)
        if streams and not by_operations():
            sums, backend = attend_rows(self.inputs, self.backend)
            return sums.out, RowStatistics(_state(sums, self.inputs.rule.sinks), backend)
        rows = self._whole_rows(streams)
        out, sinks = rows.out, self.inputs.rule.sinks
        if out is None:
            out = self.inputs.query.new_empty(*self.inputs.query.shape[:3], 0)
        if softmax:
            state = rows.scores
            if sinks is not None:
                state = state._replace(sink=_sinks_of_rows(state.Z, sinks))
            return out, RowStatistics(state, "rows")
        return out, WeightStatistics(rows.weights, rows.scores, rows.slopes, backend="rows")

    def key_mass(self) -> Tensor:
        """Weights summed over rows, (B, Hq, S), by the same kernels as :meth:`computed`."""
        if self.weighting == _SOFTMAX and isinstance(self.score, DotScore):
            return softmax_key_mass(self.inputs, self.backend)

        def output(inputs: KernelCall) -> Tensor:
            out = replace(self, inputs=inputs)._whole_rows(False).out
            assert out is not None
            return out

        return from_output(self.inputs, output)

    def weights(self) -> Tensor:
        """The weights of every row, (B, Hq, L, S)."""
        return whole_weights(self.inputs, *self._rule_of_rows())

    def _rule_of_rows(self) -> tuple[Weighting, Tensor | None, ScoreTile | None]:
        """Weighting, factor of each row and score function of whole rows."""
        sinks = self.inputs.rule.sinks
        weighting = self.weighting if sinks is None else Sink(sinks)
        tile = None if isinstance(self.score, DotScore) else self.score.tile
        return weighting, self.row_scale, tile

    def _whole_rows(self, streams: bool) -> WeighedRows:
        """Output and statistics from blocks of whole rows.

        ``streams`` says whether the call is a softmax of dot products, which kernels support. If
        not, ValueError unless the backend is "auto" or "blocked".
        """
        if self.backend not in ("auto", "blocked") and not streams:
            raise ValueError(
                f"backend={self.backend!r} supports only softmax of dot products; other "
                "weights and scores are computed in plain PyTorch, in blocks of rows"
            )
        return weigh_rows(self.inputs, *self._rule_of_rows())


def _state(sums: Sums, sinks: Tensor | None) -> RowState:
    _, *fields = sums
    none = sums.Z.detach().unsqueeze(-1)[..., :0]
    sink = none if sinks is None else _sinks_of_rows(sums.Z, sinks)
    return RowState._make([*fields[:-4], sink, *fields[-4:]])


def _sinks_of_rows(Z: Tensor, sinks: Tensor) -> Tensor:
    return sinks.to(Z.dtype).view(1, -1, 1).expand_as(Z)
