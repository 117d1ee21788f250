"""AttentionCall: one captured attention, and how its rows are read and its output rebuilt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.attend import attention, row_statistics
from acutance.check_masks import check_masking
from acutance.kernels.call import accumulate_dtype
from acutance.masks import Masking, hidden_scores, hides
from acutance.rowstats import RowState, RowStatistics, observe
from acutance.shapes import cast_inputs

#: Largest relative error of a rebuilt output, by dtype: some hundred roundings of it.
VERIFY_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
_ROWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, in the shapes of :func:`acutance.attention`.

    Attributes:
        module: qualified name of the module it belongs to.
        source: what it was read from.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        attn_mask: boolean or additive, broadcastable to (B, Hq, L, S).
        is_causal: position-based causal mask.
        query_offset: position of query 0 among the keys.
        scale: factor of the scores; None is 1/√E.
        dropout_p: probability of dropping a weight.
        window: sliding window.
        key_mask: (B, S), True where a key takes part.
        cu_seqlens: cumulative document lengths.
        bias: added to the scores.
        softcap: bound of the scaled scores.
        sinks: (Hq,) logits in the normaliser.
        cross: whether the queries are of another sequence than the keys.
        real: boolean (B, L), False on queries known to be padding; None where only the masks tell.
        unknown: keywords of the call that took no part in reading it.
    """

    module: str
    source: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    query_offset: int = 0
    scale: float | None = None
    dropout_p: float = 0.0
    window: int | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    cross: bool = False
    real: Tensor | None = None
    unknown: tuple[str, ...] = ()

    def unknown_keywords(self) -> str:
        """The end of a sentence that names them, empty where there are none."""
        if not self.unknown:
            return ""
        return f"; keywords that the probe does not know: {', '.join(self.unknown)}"

    def kind(self) -> tuple[object, ...]:
        """A key shared by calls that are read in the same way: if one is right, all are."""
        tensors = (self.attn_mask, self.key_mask, self.cu_seqlens, self.bias, self.sinks)
        kinds = tuple(None if part is None else (part.dtype, part.dim()) for part in tensors)
        queries, keys = self.query.shape[2], self.key.shape[2]
        return (
            self.module,
            self.source,
            kinds,
            self.is_causal,
            self.scale,
            self.window,
            self.softcap,
            self.query.dtype,
            queries == 1,
            queries == keys,
        )

    def statistics(self, noise: bool, gaps: bool = False) -> RowStatistics:
        """Row statistics of this call, without its output.

        Args:
            noise: with ``noise_gain``.
            gaps: with the gap histogram.
        """
        value = self.value if noise else None
        stats: RowStatistics
        stats = row_statistics(self.query, self.key, value, noise=noise, gaps=gaps, **self._options)
        return stats

    def rebuilt(self, noise: bool, gaps: bool = False) -> tuple[Tensor, RowStatistics]:
        """The output, without dropout, and the row statistics."""
        return attention(
            self.query,
            self.key,
            self.value,
            return_stats=True,
            noise=noise,
            gaps=gaps,
            **self._options,
        )

    def weight_on(self, groups: Tensor) -> Tensor:
        """The weight of each row on groups of keys, (B, Hq, L, K), in float32 at least.

        It is the output that values of 1 in the group's component have.

        Args:
            groups: (B or 1, S, K), 1 where a key belongs to a group.
        """
        query, key, _ = cast_inputs(self.query, self.key, None)
        dtype = accumulate_dtype(query.dtype)
        value = groups.to(dtype).unsqueeze(1).expand(len(key), key.shape[1], -1, -1)
        with torch.autocast(query.device.type, enabled=False):
            weights: Tensor = attention(query.to(dtype), key.to(dtype), value, **self._options)
        return weights

    def even_weight_on(self, groups: Tensor) -> Tensor:
        """The same if every visible key had the same weight, (B, 1, L, K), sinks aside.

        (B, Hq, L, K) where masks differ from head to head.

        Args:
            groups: (B or 1, S, K), 1 where a key belongs to a group.
        """
        masks, heads = self._masks, 1
        masks["bias"] = None
        for mask in (self.attn_mask, self.bias):
            if mask is None:
                continue
            seen = mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
            if mask is self.bias and bool(seen.all()):
                continue
            before = masks["attn_mask"] if mask is self.bias else None
            masks["attn_mask"] = seen if before is None else before & seen
            heads = max(heads, seen.shape[-3] if seen.dim() > 2 else 1)
        dtype = accumulate_dtype(self.query.dtype)
        batch, queries, keys = len(self.query), self.query.shape[2], self.key.shape[2]
        query, key = (
            torch.zeros(batch, heads, size, 1, dtype=dtype, device=self.query.device)
            for size in (queries, keys)
        )
        value = groups.to(dtype).unsqueeze(1).expand(batch, heads, -1, -1)
        with torch.autocast(self.query.device.type, enabled=False):
            weights: Tensor = attention(query, key, value, **masks)
        return weights

    @property
    def _options(self) -> dict[str, Any]:
        return self._masks | {
            "scale": self.scale,
            "enable_gqa": self.query.shape[1] != self.key.shape[1],
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    @property
    def _masks(self) -> dict[str, Any]:
        names = (
            *("attn_mask", "is_causal", "query_offset", "window", "key_mask"),
            *("cu_seqlens", "bias"),
        )
        return {name: getattr(self, name) for name in names}

    def tolerance(self, dtype: torch.dtype, largest: Tensor) -> Tensor:
        """Largest error of each rebuilt output row that rounding can explain.

        A score has an absolute error of a few roundings, and its weight a relative error of the
        same size. This adds at most 0.01: an incomplete capture causes larger errors.

        Args:
            dtype: of the model's output. transformers' eager functions form their weights in
                float32, whatever the model is in.
            largest: of a row's scores, (B, Hq, L).

        Returns:
            (B, Hq, L), relative to the largest entry of the output.

        Example:
            >>> x, m = torch.zeros(1, 1, 2, 4), torch.tensor([0.0, 1e3])
            >>> sources = "transformers sdpa", "transformers eager"
            >>> for of in sources:
            ...     AttentionCall("layer", of, x, x, x).tolerance(torch.float64, m).tolist()
            [1.0e-09, 1.0e-09]
            [0.0001, 0.00057]
        """
        dtype = torch.float32 if self._eager and dtype == torch.float64 else dtype
        wide = dtype in (torch.float32, torch.float64)
        factor = 4.0 * torch.finfo(dtype).eps if wide else 0.0
        rounded = (factor * largest.detach().double().abs().nan_to_num()).clamp(max=0.01)
        return VERIFY_TOLERANCE[dtype] + rounded

    def as_eager(self) -> Tensor | None:
        """The output as eager functions compute it in a narrow type, to which they round scores.

        Where scores are large, that alone changes the weights. None for other functions, in a wide
        type, or where keys are hidden by position, which no eager function does.
        """
        if not self._eager:
            return None
        placed = self.is_causal or self.window is not None or self.cu_seqlens is not None
        if placed or self.query.dtype not in (torch.float16, torch.bfloat16):
            return None
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (part.repeat_interleave(group, 1) for part in (self.key, self.value))
        scores = self.query @ key.mT * self.factor
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = None if self.key_mask is None else self.key_mask[:, None, None, :]
        for mask in (self.bias, self.attn_mask, hidden):
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            elif mask is not None:
                scores = scores + mask.to(scores.dtype)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype).view(1, -1, 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
        return weights[..., : value.shape[2]] @ value

    @property
    def _eager(self) -> bool:
        """Whether transformers forms the weights itself."""
        return self.source.startswith("transformers") and self.source != "transformers sdpa"

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def masking(self) -> Masking:
        """Everything that hides a key or is added to its score."""
        return check_masking(self.query, self.key, **self._masks)

    def seen_keys(self) -> Tensor | None:
        """Boolean (B, S), False on keys that masks hide from every row; None without a mask.

        What position hides is not among it.
        """
        batch, keys = self.query.shape[0], self.key.shape[2]
        seen = None
        if self.attn_mask is not None:
            mask = self.attn_mask
            while mask.dim() < 4:
                mask = mask.unsqueeze(0)
            boolean = mask.dtype == torch.bool  # nothing as large as the mask is made
            seen = mask.any(2).any(1) if boolean else ~hides(mask.amax((1, 2)))
            seen = seen.expand(-1, keys)
        if self.key_mask is not None:
            seen = self.key_mask if seen is None else seen & self.key_mask
        return None if seen is None else seen.expand(batch, keys)

    def seen_by_position(self, positions: Tensor) -> Tensor | None:
        """Mask (B, 1, r, S) of the keys that rows see by causality, window and documents.

        None if these hide no key.

        Args:
            positions: of the rows, (B, r), indices along the dimension of queries.
        """
        keys = torch.arange(self.key.shape[2], device=positions.device)
        seen = None
        if self.is_causal or self.window is not None:
            away = (positions + self.query_offset).unsqueeze(-1) - keys
            if self.is_causal:
                seen = away >= 0
            if self.window is not None:
                near = away.abs() < self.window
                seen = near if seen is None else seen & near
        if self.cu_seqlens is not None:
            edges = self.cu_seqlens.to(positions.device)[1:].contiguous()
            own = torch.bucketize(positions + self.query_offset, edges, right=True)
            same = own.unsqueeze(-1) == torch.bucketize(keys, edges, right=True)
            seen = same if seen is None else seen & same
        return None if seen is None else seen.unsqueeze(1)


def relative_error(rebuilt: Tensor, output: Tensor, kept: Tensor) -> float:
    """The largest of :func:`row_errors`, 0 where there is no row."""
    errors = row_errors(rebuilt, output, kept)
    return float(errors.max()) if errors.numel() else 0.0


def row_errors(rebuilt: Tensor, output: Tensor, kept: Tensor) -> Tensor:
    """Largest difference of two outputs in each counted row, relative to the largest entry of all.

    Args:
        rebuilt: (B, Hq, L, Ev).
        output: the model's, same shape.
        kept: boolean (B, Hq, L).

    Returns:
        (B, Hq, L): 0 for a row that is not kept, infinity where a difference is not a number.
    """
    rows = kept.unsqueeze(-1)
    theirs = torch.where(rows, output.detach().double(), 0.0)
    ours = torch.where(rows, rebuilt.detach().double(), 0.0)
    if theirs.numel() == 0:
        return theirs.new_zeros(kept.shape)
    size = theirs.abs().max()
    difference = (ours - theirs).abs().amax(-1)
    ratio = difference / size if size > 0 else difference
    return ratio.masked_fill(difference.isnan(), math.inf)


def differences(
    call: AttentionCall, rebuilt: Tensor, largest: Tensor, theirs: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Differences of a call's recomputed rows, and the largest rounding error to expect.

    Args:
        call: of those rows.
        rebuilt: its output, (B, Hq, L, Ev).
        largest: of each row's scores, (B, Hq, L).
        theirs: the model's output, same shape as ``rebuilt``.
        kept: boolean (B, Hq, L).

    Returns:
        Both (B, Hq, L), relative to the largest entry of the output.
    """
    errors = row_errors(rebuilt, theirs, kept)
    tolerance = call.tolerance(theirs.dtype, largest)
    if bool((errors > tolerance).any()) and (eager := call.as_eager()) is not None:
        errors = errors.minimum(row_errors(eager, theirs, kept))
    return errors, tolerance


def observe_scores(scores: Tensor, gaps: bool = False) -> tuple[RowStatistics, Tensor]:
    """Row statistics of scores that exist already, a few rows at a time.

    Args:
        scores: (B, H, L, S); values a mask would hold hide their key.
        gaps: with the gap histogram.

    Returns:
        The statistics, and a boolean (B, S) that is False on keys that no row sees.
    """
    batch, heads, queries, keys = scores.shape
    rows = max(1, _ROWS_AT_ONCE // max(1, batch * heads * keys))
    parts: list[RowState] = []
    seen = torch.zeros(batch, keys, dtype=torch.bool, device=scores.device)
    for start in range(0, queries, rows):
        part = scores[:, :, start : start + rows].detach()
        visible = torch.logical_not(hidden_scores(part))
        seen |= visible.any(2).any(1)
        parts.append(observe(part, visible, gaps=gaps))
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], dim=2)
        for name in RowState._fields
        if getattr(parts[0], name) is not None
    }
    return RowStatistics(RowState(**joined)), seen


def weights_on(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of scores that exist already on groups of keys, and those of uniform attention.

    Args:
        scores: (B, H, L, S); values a mask would hold hide their key.
        groups: (B or 1, S, K), 1 where a key belongs to a group.

    Returns:
        Two tensors (B, H, L, K), in float32 at least.
    """
    dtype = accumulate_dtype(scores.dtype)
    batch, heads, _, keys = scores.shape
    rows = max(1, _ROWS_AT_ONCE // max(1, batch * heads * keys))
    groups = groups.to(dtype).unsqueeze(1)
    parts: list[tuple[Tensor, Tensor]] = []
    with torch.autocast(scores.device.type, enabled=False):
        for part in scores.detach().split(rows, dim=2):
            visible = torch.logical_not(hidden_scores(part))
            weights = part.to(dtype).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
            even = visible.to(dtype)
            even = even / even.sum(-1, keepdim=True).clamp(min=1.0)
            parts.append((weights @ groups, even @ groups))
    mass, even = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return mass, even
