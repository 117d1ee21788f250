"""What a call does: validate once, transform, scale, and hand over to the kernel that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.kernels import dispatch, fast_path
from acutance.kernels.blocked import Sums
from acutance.kernels.hidden import constant_where_not_finite
from acutance.kernels.ops import attend_rows
from acutance.kernels.tiles import Rule, accumulate_dtype
from acutance.kernels.transforms import by_operations
from acutance.kernels.whole_rows import weigh_rows
from acutance.masks import Masking
from acutance.rowstats import RowState, RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling, NoScaling, apply_scaling, visible_keys
from acutance.scores import DotScore, ScaledDot, TileScore
from acutance.shapes import (
    check_flag,
    check_inputs,
    check_masking,
    check_number,
    check_sinks,
    check_softcap,
    check_tensor,
)
from acutance.weights import Sink, Softmax, SoftmaxOne, Weighting

__all__ = ["Backend", "Options", "Score", "run"]

Backend: TypeAlias = Literal["auto", "native", "blocked", "triton", "dense"]

#: A score, or a function that makes a tile of scores.
Score: TypeAlias = DotScore | TileScore | Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Options:
    """The options of one call, as :func:`acutance.attention` documents them."""

    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    noise: bool
    dropout_p: float
    query_offset: int
    window: int | None
    key_mask: Tensor | None
    document_ids: Tensor | tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    score: str | Score
    weights: str | Weighting
    scaling: str | AnyScaling | None
    backend: str = "auto"


def run(
    query: Tensor, key: Tensor, value: Tensor | None, options: Options
) -> tuple[Tensor, RowStatistics | WeightStatistics]:
    """Validate a call and compute it.

    Returns:
        The output, without elements where there are no values, and the statistics.
    """
    check_flag("is_causal", options.is_causal)
    check_flag("enable_gqa", options.enable_gqa)
    check_flag("noise", options.noise)
    dispatch.check_backend(options.backend)
    score, weighting = scores.get(options.score), weightings.get(options.weights)
    law = scalings.get(options.scaling)
    query, key = check_tensor("query", query), check_tensor("key", key)
    value = None if value is None else check_tensor("value", value)
    query, key, value = _autocast(query, key, value)
    plain = type(score) is ScaledDot
    check_inputs(query, key, value, options.enable_gqa, same_width=plain)
    dtype = query.dtype
    if plain:
        scale = query.shape[3] ** -0.5
    elif isinstance(score, DotScore):
        query, key, scale = score.transform(query, constant_where_not_finite(key))
    else:
        score, query, key = score.prepare(query, constant_where_not_finite(key))
        scale = 1.0
    if options.scale is not None:
        scale = check_number("scale", options.scale)
    if options.softcap is not None:
        options = replace(options, softcap=check_softcap(options.softcap, query.dtype))
    check_number("dropout_p", options.dropout_p, above=0.0, below=1.0, including=True)
    masking = check_masking(
        query,
        key,
        attn_mask=options.attn_mask,
        is_causal=options.is_causal,
        query_offset=options.query_offset,
        window=options.window,
        key_mask=options.key_mask,
        document_ids=options.document_ids,
        cu_seqlens=options.cu_seqlens,
        bias=options.bias,
        alibi_slopes=options.alibi_slopes,
    )
    sinks = check_sinks(options.sinks, query)
    call = _Call(query, key, value, masking, options, scale, sinks, weighting, score)
    call = call.with_softmax_as_such()
    if not isinstance(law, NoScaling):
        call = call.scaled(law)
    out, stats = call.streamed() if call.streams else call.by_rows()
    return out.to(dtype), stats


@dataclass(frozen=True)
class _Call:
    """A validated call, its score transformed."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    masking: Masking
    options: Options
    scale: float
    sinks: Tensor | None
    weighting: Weighting
    score: DotScore | TileScore
    row_scale: Tensor | None = None

    def with_softmax_as_such(self) -> _Call:
        """Softmax, its temperature and its sinks as the streaming kernel takes them."""
        weighting = self.weighting
        if self.sinks is not None and weighting != Softmax():
            raise ValueError(
                "sinks belong to weights='softmax': with other weights give them as"
                f" weights.Sink(sinks), got weights={weighting.name!r}"
            )
        if isinstance(weighting, SoftmaxOne):
            none = self.query.new_zeros(self.query.shape[1])
            return replace(self, sinks=none, weighting=Softmax())
        if isinstance(weighting, Sink):
            sinks = check_sinks(weighting.sinks, self.query)
            return replace(self, sinks=sinks, weighting=Softmax())
        if not isinstance(weighting, Softmax) or weighting.temperature == 1.0:
            return self
        if self._scale_is_all:
            scale = self.scale / weighting.temperature
            return replace(self, scale=scale, weighting=Softmax())
        return self

    @property
    def _scale_is_all(self) -> bool:
        """Whether dividing by a temperature comes to a smaller scale."""
        masking = self.masking
        biased = masking.additive or masking.alibi_slopes is not None
        return self.options.softcap is None and not biased

    @property
    def softmax(self) -> bool:
        """Whether rows have the state of a softmax."""
        return self.weighting == Softmax()

    @property
    def streams(self) -> bool:
        """Whether the kernel that never holds a row will do."""
        return self._kernel_knows and not by_operations()

    @property
    def _kernel_knows(self) -> bool:
        return self.softmax and isinstance(self.score, DotScore)

    def scaled(self, law: AnyScaling) -> _Call:
        """Multiply each row by the law's factor of the keys it sees.

        A causal row without a window stands where its n − 1 keys before it end, whatever is padded
        or packed; other rows are counted from the start.
        """
        n = visible_keys(self.masking)
        positions = None
        if not self.options.is_causal or self.options.window is not None:
            first = self.options.query_offset
            positions = torch.arange(first, first + self.query.shape[2], device=self.query.device)
        entropy = None
        if law.needs_entropy:
            with torch.no_grad():
                bare = replace(self, value=None, options=replace(self.options, noise=False))
                entropy = (bare.streamed() if bare.streams else bare.by_rows())[1].entropy
        if isinstance(self.score, DotScore):
            query = apply_scaling(self.query, law, n, positions, entropy=entropy)
            return replace(self, query=query)
        dtype = accumulate_dtype(self.query.dtype)
        one = self.query.new_ones(*self.query.shape[:3], 1, dtype=dtype)
        rows = apply_scaling(one, law, n, positions, entropy=entropy)
        return replace(self, row_scale=rows)

    def streamed(self) -> tuple[Tensor, RowStatistics]:
        """By the kernel that takes the call."""
        masking, options = self.masking, self.options
        dropout_p = float(options.dropout_p)
        backend = dispatch.choose(options.backend, self.query, self.value, dropout_p)
        rule = Rule(scale=self.scale, softcap=options.softcap, sinks=self.sinks)
        inputs = (self.query, self.key, self.value, masking, rule, options.noise)
        on_cpu = self.query.device.type == "cpu" and backend != "triton"  # in its interpreter
        if (
            on_cpu
            and dropout_p == 0.0
            and fast_path.possible(
                *(self.query, self.key, self.value, self.sinks, masking.attn_mask, masking.bias),
                *(masking.key_mask, masking.query_documents, masking.key_documents),
                masking.alibi_slopes,
            )
        ):
            with torch.autocast("cpu", enabled=False):
                sums = dispatch.forward(backend, *inputs)
            return sums.out, RowStatistics(_state(sums, self.sinks), backend)
        # a tensor: no graph break
        seed = torch.randint(2**62, ()) if options.dropout_p > 0.0 else None
        results = attend_rows(
            self.query,
            self.key,
            self.value,
            masking.attn_mask,
            masking.bias,
            masking.key_mask,
            masking.query_documents,
            masking.key_documents,
            masking.alibi_slopes,
            self.sinks,
            seed,
            options.is_causal,
            options.query_offset,
            options.window,
            self.scale,
            options.softcap,
            dropout_p,
            options.backend,
            options.noise,
        )
        sums = Sums(*results)
        ran = dispatch.ran(backend, *inputs)
        return sums.out, RowStatistics(_state(sums, self.sinks), ran)

    def by_rows(self) -> tuple[Tensor, RowStatistics | WeightStatistics]:
        """By whole rows, a block at a time."""
        if self.options.backend not in ("auto", "blocked") and not self._kernel_knows:
            raise ValueError(
                f"backend={self.options.backend!r} is for softmax of dot products; other weights"
                " and scores are taken by whole rows, in plain PyTorch"
            )
        tile = None if isinstance(self.score, DotScore) else self.score.tile
        weighting = self.weighting if self.sinks is None else Sink(self.sinks)
        out, sums, state, slopes = weigh_rows(
            self.query,
            self.key,
            self.value,
            self.masking,
            weighting,
            scale=self.scale,
            row_scale=self.row_scale,
            softcap=self.options.softcap,
            dropout_p=float(self.options.dropout_p),
            score=tile,
            noise=self.options.noise,
        )
        out = self.query.new_empty(*self.query.shape[:3], 0) if out is None else out
        if self.softmax:
            return out, RowStatistics(state._replace(sink=_sink(state.Z, self.sinks)), "rows")
        return out, WeightStatistics(sums, state, slopes, backend="rows")


def _autocast(
    query: Tensor, key: Tensor, value: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts the inputs of SDPA: to its dtype, float64 left alone."""
    kind = query.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(query), cast(key), None if value is None else cast(value)


def _state(sums: Sums, sinks: Tensor | None) -> RowState:
    fields = sums._asdict()
    del fields["out"]
    return RowState(sink=_sink(sums.Z, sinks), **fields)


def _sink(Z: Tensor, sinks: Tensor | None) -> Tensor:
    """The sinks of all rows, or the absent field."""
    if sinks is None:
        return Z.detach().unsqueeze(-1)[..., :0]
    return sinks.to(Z.dtype).view(1, -1, 1).expand_as(Z)
