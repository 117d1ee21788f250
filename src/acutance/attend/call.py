"""What a call does: validate once, transform, scale, hand over to the kernel; :func:`key_mass`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.check_masks import MaskOptions, check_masking, check_sinks
from acutance.compiling import by_operations
from acutance.kernels import dispatch
from acutance.kernels.call import KernelCall, Rule, Sums, accumulate_dtype
from acutance.kernels.hidden import constant_where_not_finite
from acutance.kernels.key_mass import from_output
from acutance.kernels.key_mass import key_mass as softmax_key_mass
from acutance.kernels.ops import attend_rows
from acutance.kernels.whole_rows import ScoreTile, WeighedRows, weigh_rows, whole_weights
from acutance.rowstats import RowState, RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling, apply_scaling, visible_keys
from acutance.scores import DotScore, Features, ScaledDot, ScaleInvariant, TileScore
from acutance.shapes import check_flags, check_inputs, check_number, check_softcap
from acutance.weights import Sink, Softmax, SoftmaxOne, Weighting

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "AttentionOptions",
    "Backend",
    "Options",
    "Score",
    "ScoreOptions",
    "key_mass",
    "run",
    "run_key_mass",
    "weights_of",
]


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
    """Keywords that :func:`acutance.attention` and :func:`acutance.row_statistics` share."""

    noise: bool
    gaps: bool


@dataclass(frozen=True)
class Options:
    """The options of one call, as :func:`acutance.attention` documents them."""

    attn_mask: Tensor | None
    is_causal: bool
    masks: MaskOptions
    scale: float | None
    enable_gqa: bool
    noise: bool = False
    gaps: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    score: str | Score = "scaled_dot"
    weights: str | Weighting = "softmax"
    scaling: str | AnyScaling | None = None
    backend: str = "auto"
    dropout_p: float = 0.0


def run(
    query: Tensor, key: Tensor, value: Tensor | None, options: Options
) -> tuple[Tensor, RowStatistics | WeightStatistics]:
    """Validate a call and compute it.

    Returns:
        The output (no element if ``value`` is None), and the statistics.
    """
    call = _validated(query, key, value, options)
    out, stats = call.computed()
    return out.to(call.dtype), stats


def run_key_mass(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """Validate a call and sum its weights over rows, (B, Hq, S)."""
    return _validated(query, key, None, options).key_mass()


def weights_of(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    weights: str | Weighting = "softmax",
    score: str | Score = "scaled_dot",
    scaling: str | AnyScaling | None = None,
    **masks: Unpack[MaskOptions],
) -> Tensor:
    """The weights (B, Hq, L, S) of a call, float32 at least, all in memory at once.

    The arguments are those of :func:`acutance.row_statistics`.
    """
    options = Options(
        attn_mask, is_causal, masks, scale, enable_gqa, score=score, weights=weights,
        scaling=scaling,
    )  # fmt: skip
    return _validated(query, key, None, options).weights()


def _validated(query: Tensor, key: Tensor, value: Tensor | None, options: Options) -> _Call:
    """The validated call, with its score transformed and its law applied."""
    dispatch.check_backend(options.backend)
    score: DotScore | TileScore = _SCALED_DOT
    weighting: Weighting = _SOFTMAX
    if options.score != "scaled_dot":
        score = scores.get(options.score)
    if options.weights != "softmax":
        weighting = weightings.get(options.weights)
    law = None if options.scaling is None else scalings.get(options.scaling)
    plain = type(score) is ScaledDot
    query, key, value = check_inputs(
        query, key, value, options.enable_gqa, same_width=plain, autocast=True
    )
    dtype = query.dtype
    if plain:
        scale = query.shape[3] ** -0.5
    elif isinstance(score, DotScore):
        query, key, scale = score.transform(query, constant_where_not_finite(key))
    else:
        if isinstance(score, Features | ScaleInvariant) and score.offset is None:
            score = replace(score, offset=options.masks.get("query_offset") or 0)
        score, query, key = score.prepare(query, constant_where_not_finite(key))
        scale = 1.0
    if options.scale is not None:
        scale = check_number("scale", options.scale)
    check_number("dropout_p", options.dropout_p, above=0.0, below=1.0, including=True)
    softcap, sinks = options.softcap, options.sinks
    if softcap is not None:
        softcap = check_softcap(softcap, query.dtype)
    masking = check_masking(query, key, options.attn_mask, options.is_causal, **options.masks)
    if sinks is not None:
        sinks = check_sinks(sinks, query)
    # a tensor: no graph break
    seed = torch.randint(2**62, ()) if options.dropout_p > 0.0 else None
    rule = Rule(scale, softcap, sinks, float(options.dropout_p), seed)
    inputs = KernelCall(query, key, value, masking, rule, options.noise, options.gaps)
    call = _Call(inputs, score, weighting, options.backend, dtype).with_softmax_as_such()
    if law is not None and not isinstance(law, scalings.NoScaling):
        call = call.scaled(law)
    return call


@dataclass(frozen=True)
class _Call:
    """A validated call, its score transformed, and how its scores become weights."""

    inputs: KernelCall
    score: DotScore | TileScore
    weighting: Weighting
    backend: str
    dtype: torch.dtype  #: of the output
    row_scale: Tensor | None = None

    def with_softmax_as_such(self) -> _Call:
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

    def _softmax(self, **changes: Tensor | float | None) -> _Call:
        """A copy of the call with softmax weights, and ``changes`` to fields of its rule."""
        rule = replace(self.inputs.rule, **changes)  # type: ignore[arg-type]
        return replace(self, inputs=self.inputs._replace(rule=rule), weighting=_SOFTMAX)

    def scaled(self, law: AnyScaling) -> _Call:
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
    given: dict[str, Any] = {**options}
    unknown = [name for name in given if name not in ScoreOptions.__annotations__]
    if unknown:
        known = ", ".join(ScoreOptions.__annotations__)
        raise TypeError(f"key_mass has no option {unknown[0]!r}: choose from {known}")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    masks = {name: given.pop(name) for name in MaskOptions.__annotations__ if name in given}
    with torch.no_grad():
        asked = Options(
            attn_mask,
            is_causal,
            cast(MaskOptions, masks),
            scale,
            enable_gqa,
            weights=weights,
            **given,
        )
        return run_key_mass(query, key, asked)
