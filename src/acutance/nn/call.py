"""HeadCall: one attention call of a module, with its masks and its trainable scores and weightings.

``nn.MultiheadAttention`` and :func:`~torch.nn.functional.scaled_dot_product_attention` disagree on
the meaning of True in a mask. In :class:`Masks`, as in the latter, True marks a key that takes
part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from acutance import scores
from acutance import weights as weightings
from acutance.attend import attention, row_statistics
from acutance.check_masks import MaskOptions, check_masking
from acutance.masks import hides
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling, NoScaling, visible_keys
from acutance.scores import (
    Additive,
    AdditiveScore,
    DotScore,
    General,
    GeneralScore,
    Location,
    TileScore,
    dot_tile,
)
from acutance.scores import get as find_score
from acutance.shapes import FLOATS, check_tensor
from acutance.weights import Sink, Weighting

__all__ = ["HeadCall", "HeldWeights", "Masks", "Score", "hold_score", "key_mask", "translate"]


@dataclass(frozen=True)
class HeadCall:
    """Queries (B, Hq, L, E), keys (B, H, S, E) and all else that determines their weights."""

    query: Tensor
    key: Tensor
    masks: Masks
    is_causal: bool
    query_offset: int
    alibi_slopes: Tensor | None
    score: str | Score
    weights: Weighting
    scaling: AnyScaling

    def attend(
        self, value: Tensor, *, dropout_p: float, statistics: bool
    ) -> tuple[Tensor, RowStatistics | WeightStatistics | None]:
        """Attention to ``value`` (B, H, S, Ev), with O(L + S) memory.

        Returns:
            The output (B, Hq, L, Ev), and the row statistics; None without ``statistics``.
        """
        result = attention(
            self.query,
            self.key,
            value,
            self.masks.attn_mask,
            self.is_causal,
            enable_gqa=True,
            return_stats=True,
            dropout_p=dropout_p,
            score=self.score,
            weights=self.weights,
            scaling=self.scaling,
            **self._options,
        )
        return result if statistics else (result[0], None)

    def statistics(self, *, scaled: bool = True) -> RowStatistics | WeightStatistics:
        """Row statistics without an output."""
        return row_statistics(
            self.query,
            self.key,
            None,
            self.masks.attn_mask,
            self.is_causal,
            enable_gqa=True,
            score=self.score,
            weights=self.weights,
            scaling=self.scaling if scaled else None,
            **self._options,
        )

    @property
    def _options(self) -> MaskOptions:
        """Mask options of :func:`acutance.attention` for this call."""
        return {
            "query_offset": self.query_offset,
            "key_mask": self.masks.key_mask,
            "bias": self.masks.bias,
            "alibi_slopes": self.alibi_slopes,
        }

    def dense(self) -> Tensor:
        """The weights (B, Hq, L, S), float32 at least, all in memory at once."""
        score = find_score(self.score)
        with torch.autocast(self.query.device.type, enabled=False):
            if isinstance(score, DotScore):
                s = dot_tile(score, self.query, self.key)
            else:
                s = score.tile(self.query, self.key)
            if not isinstance(self.scaling, NoScaling):
                s = s * self._factor(s.dtype)
            rows = torch.arange(s.shape[2], device=s.device)[:, None] + self.query_offset
            columns = torch.arange(s.shape[3], device=s.device)
            seen = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device)
            if self.is_causal:
                seen = columns <= rows
            if self.alibi_slopes is not None:
                distance = (rows - columns).abs().to(s.dtype)
                s = s - self.alibi_slopes.to(s.dtype)[:, None, None] * distance
            if self.masks.key_mask is not None:
                seen = seen & self.masks.key_mask[:, None, None]
            for mask in (self.masks.attn_mask, self.masks.bias):
                if mask is None:
                    continue
                if mask.dtype == torch.bool:
                    seen = seen & mask
                else:
                    s, seen = s + mask.to(s.dtype), seen & torch.logical_not(hides(mask))
            return self.weights(s, seen.expand(s.shape))

    def _factor(self, dtype: torch.dtype) -> Tensor:
        """The scaling's factor of each row, (B, Hq or 1, L, 1), as :meth:`attend` applies it."""
        masking = check_masking(
            self.query, self.key, self.masks.attn_mask, self.is_causal, **self._options
        )
        positions = entropy = None
        if not self.is_causal:
            first = self.query_offset
            positions = torch.arange(first, first + self.query.shape[2], device=self.query.device)
        if self.scaling.needs_entropy:
            with torch.no_grad():
                entropy = self.statistics(scaled=False).entropy
        n = visible_keys(masking)
        return self.scaling.factor(n, positions, entropy=entropy, dtype=dtype).unsqueeze(-1)


_RECORDS = (General, Additive, Location)

Score: TypeAlias = DotScore | TileScore | Callable[[Tensor, Tensor, int], Tensor]


def hold_score(
    score: str | Score,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Score:
    """The score for a name, trainable if it has parameters, or the given score.

    Raises:
        ValueError: if the name is unknown, or its parameters must be given explicitly.
        TypeError: if it is not a score, or a record whose parameters would not be trained.
    """
    if score == "general":
        return GeneralScore(width, num_heads=num_heads, device=device, dtype=dtype)
    if score == "additive":
        return AdditiveScore(
            width, num_heads=num_heads, num_kv_heads=num_kv_heads, device=device, dtype=dtype
        )
    for name, part in (vars(score) if isinstance(score, _RECORDS) else {}).items():
        if isinstance(part, nn.Parameter):
            kind = type(score).__name__
            raise TypeError(
                f"score={kind}(...) contains the Parameter {name}, which this module would not "
                f"train: pass the module scores.{kind}Score"
            )
    return scores.get(score)


class HeldWeights(nn.Module):
    """A weighting whose tensors are parameters or buffers of this module.

    Args:
        weights: a name or a weighting. ``"sink"`` trains a sink for each head, initially 0.
        num_heads: number of query heads, Hq.
        device, dtype: of new parameters.
    """

    def __init__(
        self,
        weights: str | Weighting,
        num_heads: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if weights == Sink.name:
            weights = Sink(nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)))
        record = weightings.get(weights)
        self.names = [name for name, part in vars(record).items() if isinstance(part, Tensor)]
        for name in self.names:
            tensor = getattr(record, name)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.record = record

    def forward(self) -> Weighting:
        """The weighting with the current tensors."""
        if not self.names:
            return self.record
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.names}
        return replace(self.record, **tensors)

    def extra_repr(self) -> str:
        """The weighting's name, for ``print``."""
        return repr(self.record.name)


class Masks(NamedTuple):
    """Masks in the sense of :func:`acutance.attention`: True for visible keys."""

    attn_mask: Tensor | None
    key_mask: Tensor | None
    bias: Tensor | None


def key_mask(key_padding_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """The inverse of a boolean padding mask: (B, S), True for visible keys.

    Raises:
        TypeError: if it is not boolean.
        ValueError: if it is not (B, S).
    """
    if key_padding_mask is None:
        return None
    if check_tensor("key_padding_mask", key_padding_mask).dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be boolean, True for hidden keys, got {key_padding_mask.dtype}"
        )
    _check_padding(key_padding_mask, batch, keys)
    return torch.logical_not(key_padding_mask)


def _check_padding(key_padding_mask: Tensor, batch: int, keys: int) -> None:
    """Raise ValueError unless a padding mask is (B, S)."""
    if tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(
            f"key_padding_mask must have shape (B, S) = ({batch}, {keys}), got "
            f"{tuple(key_padding_mask.shape)}"
        )


def translate(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    is_causal: bool,
    extra: int,
) -> Masks:
    """Convert the masks of ``nn.MultiheadAttention``, for keys preceded by ``extra`` further keys.

    Raises:
        TypeError: if a mask is neither boolean nor floating.
        ValueError: if its shape does not fit.
    """
    biases = []
    seen = None
    if key_padding_mask is not None:
        if _check_kind("key_padding_mask", key_padding_mask) == torch.bool:
            seen = key_mask(key_padding_mask, batch, keys)
            assert seen is not None
            seen = pad(seen, (extra, 0), value=True) if extra else seen
        else:
            _check_padding(key_padding_mask, batch, keys)
            biases.append(pad(key_padding_mask, (extra, 0)).view(batch, 1, 1, extra + keys))
    mask = None
    if attn_mask is not None:
        boolean = _check_kind("attn_mask", attn_mask) == torch.bool
        mask = _four_dimensional(attn_mask, batch, heads, queries, keys)
        mask = torch.logical_not(mask) if boolean else mask
        if extra:
            mask = pad(mask, (extra, 0), value=True) if boolean else pad(mask, (extra, 0))
        if is_causal:  # attention() takes one or the other; a bias goes with both
            if boolean:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
            biases.append(mask)
            mask = None
    return Masks(mask, seen, _total(biases))


def _check_kind(name: str, mask: Tensor) -> torch.dtype:
    """Dtype of a mask; raises TypeError unless it is boolean or floating."""
    dtype = check_tensor(name, mask).dtype
    if dtype != torch.bool and dtype not in FLOATS:
        raise TypeError(
            f"{name} must be boolean (True hides) or floating-point (added to the scores), got "
            f"{dtype}"
        )
    return dtype


def _four_dimensional(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Reshape a mask (L, S) or (B·Hq, L, S) to (1, 1, L, S) or (B, Hq, L, S)."""
    if tuple(mask.shape) == (queries, keys):
        return mask[None, None]
    if tuple(mask.shape) == (batch * heads, queries, keys):
        return mask.view(batch, heads, queries, keys)
    raise ValueError(
        f"attn_mask must have shape (L, S) = ({queries}, {keys}) or (B·Hq, L, S) = "
        f"({batch * heads}, {queries}, {keys}), got {tuple(mask.shape)}"
    )


def _total(biases: list[Tensor]) -> Tensor | None:
    """Sum of the biases; None if there are none."""
    if not biases:
        return None
    total = biases[0]
    for bias in biases[1:]:
        total = total + bias
    return total
