"""One call of a module's heads: streamed, or with its weights in memory if requested."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.attend import attention, row_statistics
from acutance.check_masks import MaskOptions, check_masking
from acutance.masks import hides
from acutance.nn.masks import Masks
from acutance.nn.options import Score
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling, NoScaling, visible_keys
from acutance.scores import DotScore, dot_tile
from acutance.scores import get as find_score
from acutance.weights import Weighting

__all__ = ["HeadCall"]


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
        """Output (B, Hq, L, Ev) for values (B, H, S, Ev), in memory of O(L + S)."""
        found = attention(
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
        return found if statistics else (found[0], None)

    def statistics(self, *, scaled: bool = True) -> RowStatistics | WeightStatistics:
        """The statistics alone."""
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
        """The scaling's factor of each row, (B, Hq or 1, L, 1), as :meth:`attend` takes it."""
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
