"""AttentionCall: the arguments of a captured attention call, its statistics and output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.attend import attention, row_statistics
from acutance.kernels.call import accumulate_dtype
from acutance.masks import Masking, check_masking, hidden_scores, shows
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
        module: qualified name of the module that made the call.
        source: the kind of function it was captured from, such as ``"sdpa"``.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        attn_mask: boolean or additive, broadcastable to (B, Hq, L, S).
        is_causal: position-based causal mask.
        query_offset: position of query 0 among the keys.
        scale: factor of the scores; None for 1/√E.
        dropout_p: probability of dropping a weight.
        window: sliding window, in keys.
        key_mask: (B, S), True where a key takes part.
        cu_seqlens: cumulative document lengths.
        bias: added to the scores.
        softcap: bound of the scaled scores.
        sinks: (Hq,) logits in the normaliser.
        cross: whether queries and keys come from different sequences.
        real: boolean (B, L), False on padding queries; None if only the masks can tell.
        unknown: keywords of the call that were ignored.
        moved: whether rows read keys at other positions, so that only statistics are known.
        packed: whether its sequences are packed, so that masks over a batch's tokens do not fit.
        positions: the ``position_ids`` that it was given; flash attention tells documents apart by
            them, other implementations ignore them.
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
    moved: bool = False
    packed: bool = False
    positions: Tensor | None = None

    def unknown_keywords(self) -> str:
        """The end of a sentence that names the ignored keywords; empty if there are none."""
        if not self.unknown:
            return ""
        return f"; keywords that the probe does not know: {', '.join(self.unknown)}"

    def kind(self) -> tuple[object, ...]:
        """A key that is equal for calls of one module with the same kinds of arguments.

        If one of them is read correctly, all of them are.
        """
        kinds: list[object] = []
        for tensor in (self.attn_mask, self.key_mask, self.cu_seqlens, self.bias, self.sinks):
            kinds.append(None if tensor is None else (tensor.dtype, tensor.dim()))
        queries, keys = self.query.shape[2], self.key.shape[2]
        return (
            self.module,
            self.source,
            *kinds,
            self.is_causal,
            self.scale,
            self.window,
            self.softcap,
            self.query.dtype,
            queries == 1,
            queries == keys,
        )

    def statistics(self, noise: bool, gaps: bool = False) -> RowStatistics:
        """Row statistics of the call, without computing its output.

        Args:
            noise: with ``noise_gain``.
            gaps: with the gap histogram.
        """
        value = self.value if noise else None
        stats: RowStatistics
        stats = row_statistics(self.query, self.key, value, noise=noise, gaps=gaps, **self.options)
        return stats

    def rebuild(self, noise: bool, gaps: bool = False) -> tuple[Tensor, RowStatistics]:
        """Compute the output (B, Hq, L, Ev), without dropout, and the row statistics."""
        return attention(
            self.query,
            self.key,
            self.value,
            return_stats=True,
            noise=noise,
            gaps=gaps,
            **self.options,
        )

    def weight_on(self, groups: Tensor) -> Tensor:
        """Weight of each row on groups of keys, (B, Hq, L, K), in float32 or float64.

        It is the attention output if each key's value is its row of ``groups``.

        Args:
            groups: (B or 1, S, K), 1 where a key belongs to a group.
        """
        query, key, _ = cast_inputs(self.query, self.key, None)
        dtype = accumulate_dtype(query.dtype)
        value = groups.to(dtype).unsqueeze(1).expand(len(key), key.shape[1], -1, -1)
        with torch.autocast(query.device.type, enabled=False):
            weights: Tensor = attention(query.to(dtype), key.to(dtype), value, **self.options)
        return weights

    def uniform_weight_on(self, groups: Tensor) -> Tensor:
        """Weight of each row on groups of keys if all its visible keys had equal weight.

        Sinks are ignored.

        Args:
            groups: (B or 1, S, K), 1 where a key belongs to a group.

        Returns:
            (B, 1, L, K), or (B, Hq, L, K) if masks differ between heads.
        """
        masks, heads = self.masks, 1
        masks["bias"] = None
        for mask in (self.attn_mask, self.bias):
            if mask is None:
                continue
            visible = shows(mask)
            if mask is self.bias and bool(visible.all()):
                continue
            earlier = masks["attn_mask"] if mask is self.bias else None
            masks["attn_mask"] = visible if earlier is None else earlier & visible
            heads = max(heads, visible.shape[-3] if visible.dim() > 2 else 1)
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
    def options(self) -> dict[str, Any]:
        """Keyword arguments of :func:`acutance.attention` for this call."""
        return self.masks | {
            "scale": self.scale,
            "enable_gqa": self.query.shape[1] != self.key.shape[1],
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    @property
    def masks(self) -> dict[str, Any]:
        """The masks, windows, documents and biases among the keyword arguments."""
        names = (
            *("attn_mask", "is_causal", "query_offset", "window", "key_mask"),
            *("cu_seqlens", "bias"),
        )
        return {name: getattr(self, name) for name in names}

    def tolerance(self, dtype: torch.dtype, largest: Tensor) -> Tensor:
        """Largest relative error of each rebuilt output row that rounding can explain.

        A score has an absolute error of a few roundings, and its weight a relative error of the
        same size. This adds at most 0.01, since an incomplete capture causes larger errors.

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
            [0.0001, 0.00058]
        """
        dtype = torch.float32 if self._eager and dtype == torch.float64 else dtype
        wide = dtype in (torch.float32, torch.float64)
        factor = 4.0 * torch.finfo(dtype).eps if wide else 0.0
        rounded = (factor * largest.detach().double().abs().nan_to_num()).clamp(max=0.01)
        return VERIFY_TOLERANCE[dtype] + rounded

    def as_eager(self) -> Tensor | None:
        """The output (B, Hq, L, Ev) as transformers' eager functions round it in 16 bits.

        They round the scores to the narrow type, which changes the weights where scores are large.
        None for other functions and types, and where keys are hidden by position.
        """
        if not self._eager:
            return None
        hides_by_position = self.is_causal or self.window is not None or self.cu_seqlens is not None
        if hides_by_position or self.query.dtype not in (torch.float16, torch.bfloat16):
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
        """Whether a transformers function computes the weights itself."""
        return self.source.startswith("transformers") and self.source != "transformers sdpa"

    @property
    def factor(self) -> float:
        """Factor of the scores: ``scale``, or 1/√E."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def masking(self) -> Masking:
        """The call's masks, windows, documents and biases as one :class:`Masking`."""
        return check_masking(self.query, self.key, **self.masks)

    def seen_keys(self) -> Tensor | None:
        """Boolean (B, S), False on keys that masks hide from every row; None without a mask.

        Keys hidden by position (causality, window, documents) count as seen.
        """
        batch, keys = self.query.shape[0], self.key.shape[2]
        visible = None
        if (mask := self.attn_mask) is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            is_boolean = mask.dtype == torch.bool  # nothing as large as the mask is made
            visible = mask.any(2).any(1) if is_boolean else shows(mask.amax((1, 2)))
            visible = visible.expand(-1, keys)
        if self.key_mask is not None:
            visible = self.key_mask if visible is None else visible & self.key_mask
        return None if visible is None else visible.expand(batch, keys)

    def seen_by_position(self, positions: Tensor) -> Tensor | None:
        """Mask (B, 1, r, S) of the keys that causality, window and documents leave visible.

        None if these hide no key.

        Args:
            positions: of the rows, (B, r), indices along the dimension of queries.
        """
        keys = torch.arange(self.key.shape[2], device=positions.device)
        rows = (positions + self.query_offset).unsqueeze(-1)
        masks: list[Tensor] = []
        if self.is_causal:
            masks.append(keys <= rows)
        if self.window is not None:
            masks.append((rows - keys).abs() < self.window)
        if self.cu_seqlens is not None:
            edges = self.cu_seqlens.to(positions.device)[1:].contiguous()
            documents = [torch.bucketize(places, edges, right=True) for places in (rows, keys)]
            masks.append(documents[0] == documents[1])
        return functools.reduce(Tensor.logical_and, masks).unsqueeze(1) if masks else None


class Carrier:
    """One call of a function that computes attention, on its way through handlers.

    Args:
        function: what computes it.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Attributes:
        provided: its output (B, Hq, L, Ev) if that was computed already.
        compared: whether its output can be compared with one that is recomputed.
        unchangeable: why nothing of it can be changed; None if its queries can.
    """

    provided: Tensor | None = None
    compared = True
    unchangeable: str | None = None

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    def read(self, name: str) -> AttentionCall:
        """The call; ``name`` is that of the module that makes it.

        Raises:
            ValueError: if it cannot be read; the message is the reason.
        """
        raise NotImplementedError

    def compute(self) -> Any:
        """The result of the function, or what was computed instead."""
        return self._function(*self._args, **self._kwargs)

    def output(self, result: Any) -> Tensor:
        """The output (B, Hq, L, Ev) in a result, once the call has been read."""
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    @property
    def can_be_provided(self) -> bool:
        """Whether its output may be computed in place of the model, or a reason listed why not."""
        return False

    @property
    def sdpa(self) -> Any:
        """The call of SDPA that computes the same; None if its masks cannot be changed."""
        return None

    def result_needed_because(self) -> str | None:
        """Why its output cannot be computed in place of the model; None if it can."""
        return None

    def scale_queries(self, factor: Tensor) -> None:
        """Multiply its queries by a factor (B or 1, Hq or 1, L, 1), once the call has been read.

        Raises:
            ValueError: if they cannot be; the message is the reason.
        """
        raise NotImplementedError

    def refusal(self, reason: str) -> str:
        """Why the call cannot be changed, in words that name its function."""
        return reason


def observe_scores(scores: Tensor, gaps: bool = False) -> tuple[RowStatistics, Tensor]:
    """Row statistics of given scores, computed a few rows at a time.

    Args:
        scores: (B, H, L, S); values as low as a mask's hide their key.
        gaps: also record the gap histogram.

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
    fields = zip(*parts, strict=True)
    joined: list[Any] = [None if rows[0] is None else torch.cat(rows, 2) for rows in fields]
    return RowStatistics(RowState(*joined)), seen


def weights_on(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of given scores on groups of keys, and the same for uniform attention.

    Args:
        scores: (B, H, L, S); values as low as a mask's hide their key.
        groups: (B or 1, S, K), 1 where a key belongs to a group.

    Returns:
        Two tensors (B, H, L, K), in float32 or float64.
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
    mass, even = (torch.cat(parts_of_one, 2) for parts_of_one in zip(*parts, strict=True))
    return mass, even
