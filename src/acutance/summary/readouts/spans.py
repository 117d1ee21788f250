"""Spans: the mean weight that rows of each named part of the input put on each part, by head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.summary.cells import Cells, counts, means, squares
from acutance.summary.readouts.moments import sums_by_label

#: Name of the tokens in no span, and of the rows of all tokens together.
OTHER, ALL_ROWS = "other", "all"
MOST_SPANS = 32


@dataclass(frozen=True)
class Spans(Cells):
    """Mean weight of rows on named spans of the input.

    With K spans, the last axis has K + 1 entries: the keys of each span, in the order of ``names``,
    then all other keys. The axis before has K + 2: the rows of each span, of all other tokens, and
    of all tokens together.

    Attributes:
        rows: (heads, K + 2) int64, number of rows.
        mean: (heads, K + 2, K + 1), mean weight of these rows on these keys; 0 without rows. Each
            row sums to 1 minus the weight of sinks.
        even: (heads, K + 2, K + 1), the same if all visible keys had equal weight.
        groups: (heads, K + 2) int64, number of sequences of the rows, counted again in each call.
        between: (heads, K + 2, K + 1), Σ over sequences of rows times the squared deviation of the
            sequence's mean.
        names: names of the spans.
    """

    rows: Tensor = counts("heads rows")
    mean: Tensor = means("heads rows keys", "rows", least=0, most=1 + 1e-3)
    even: Tensor = means("heads rows keys", "rows", least=0, most=1 + 1e-3)
    groups: Tensor = counts("heads rows")
    between: Tensor = squares("heads rows keys", "mean")
    names: tuple[str, ...] = ()

    what = " of spans"
    axes = ("heads", "rows", "keys")
    text_field = "spans"
    text_kind = list

    @staticmethod
    def of(
        mass: Tensor, even: Tensor, labels: Tensor | None, counted: Tensor, names: Sequence[str]
    ) -> Spans:
        """The record of one call's rows.

        Args:
            mass: (B, heads, L, K + 1), weight of each row on the keys of each span and all others.
            even: (B, heads or 1, L, K + 1), the same if every visible key had equal weight.
            labels: (B or 1, L), index of each query's span, K if in none; None in cross-attention.
            counted: boolean (B, heads, L), True on rows that count.
            names: names of the K spans.
        """
        if mass.device.type == "mps":  # it has no float64
            mass, even, counted = mass.cpu(), even.cpu(), counted.cpu()
            labels = None if labels is None else labels.cpu()
        batch, _, queries, width = mass.shape
        counted = counted & mass.isfinite().all(-1)  # a model that overflows has rows of NaN
        if labels is None:
            labels = torch.full((1, queries), width - 1, device=mass.device)
        member = torch.nn.functional.one_hot(labels.expand(batch, -1), width)
        member = torch.cat([member, torch.ones_like(member[..., :1])], -1).unsqueeze(1)
        share = (member * counted.unsqueeze(-1)).transpose(0, 1).to(torch.float64)
        weights = torch.stack([mass.detach(), even.detach().expand_as(mass)]).to(torch.float64)
        weights = weights.masked_fill_(counted.logical_not().unsqueeze(-1), 0.0)
        # (2 · keys, heads, B, L) and share (heads, B, L, rows) to (heads, rows, 2 · keys)
        values = weights.movedim(-1, 1).flatten(0, 1).transpose(1, 2)
        sums = sums_by_label(values, share, weights=True)
        arrays = {name: array.movedim(0, -1) for name, array in sums.items()}
        mean, even = arrays["mean"].tensor_split(2, -1)
        rows, groups, between = arrays["count"][..., 0], arrays["groups"][..., 0], arrays["between"]
        fields = {"mean": mean, "even": even, "between": between[..., :width]}
        return Spans.rounded(rows=rows, groups=groups, names=tuple(names), **fields)

    @property
    def error(self) -> Tensor:
        """Standard error of each mean, from differences between sequences; NaN for one sequence."""
        groups = self.groups.double().masked_fill(self.groups < 2, math.nan)
        return torch.sqrt(self.between / (self.rows * (groups - 1)).unsqueeze(-1))

    def weight(self, span: str, rows: str = ALL_ROWS) -> Tensor:
        """Mean weight on a span, (heads,); NaN without rows.

        Args:
            span: a name, or ``"other"`` for keys in no span.
            rows: whose weight: the name of a span, ``"other"``, or ``"all"``.

        Raises:
            ValueError: if there is no such span.
        """
        row, column = self._place(rows, (OTHER, ALL_ROWS)), self._place(span, (OTHER,))
        return self.mean[:, row, column].masked_fill(self.rows[:, row] == 0, math.nan)

    def _place(self, name: str, more: tuple[str, ...]) -> int:
        """Index of a span or kind of rows by name.

        Raises:
            ValueError: if there is none of that name.
        """
        known = (*self.names, *more)
        if name not in known:
            raise ValueError(f"there is no span named {name!r}: choose from {', '.join(known)}")
        return known.index(name)

    def merge(self, other: Spans) -> Spans:
        """The record of the rows of both.

        Raises:
            ValueError: if they have different spans.
        """
        if self.names != other.names:
            raise ValueError(
                "summaries can be merged only if they have the same spans, got "
                f"{', '.join(self.names)} in one and {', '.join(other.names)} in the other"
            )
        return super().merge(other)

    @classmethod
    def join(cls, parts: list[Spans]) -> Spans:
        """Concatenate records of different heads.

        Raises:
            ValueError: if they have different spans.
        """
        for part in parts[1:]:
            parts[0].heads(0, 0).merge(part.heads(0, 0))  # says which names differ
        return super().join(parts)

    def texts(self) -> list[str]:
        """The names, for a file's header."""
        return list(self.names)

    def columns(self, metrics: tuple[str, ...]) -> dict[str, list[float]]:
        """Weight of all rows on each span, ``weight_on_<span>``, its error, and even weights'."""
        none = self.rows[:, -1] == 0
        parts = {"": self.mean, "_error": self.error, "_even": self.even}
        return {
            f"weight_on_{name}{part}": values[:, -1, column].masked_fill(none, math.nan).tolist()
            for column, name in enumerate((*self.names, OTHER))
            for part, values in parts.items()
        }

    def to_dicts(self, metrics: tuple[str, ...]) -> list[dict[str, Any]]:
        """Each head's numbers as JSON values: for each kind of rows, the weight on each span.

        Kinds without rows are omitted; ``error`` is None for a single sequence.
        """
        keys, names = (*self.names, OTHER), ("mean", "error", "even")
        weights = torch.stack([getattr(self, name) for name in names], -1).tolist()
        counts = zip(self.rows.tolist(), self.groups.tolist(), strict=True)
        tables: list[dict[str, Any]] = []
        for (rows, groups), numbers in zip(counts, weights, strict=True):
            tables.append({})
            for index, kind in enumerate((*keys, ALL_ROWS)):
                values = [dict(zip(names, of_key, strict=True)) for of_key in numbers[index]]
                weight_on = dict(zip(keys, values, strict=True))
                entry = {"rows": rows[index], "sequences": groups[index], "weight_on": weight_on}
                tables[-1] |= {kind: entry} if rows[index] else {}
        return tables

    @classmethod
    def read_texts(cls, texts: Any) -> dict[str, Any]:
        """The names of a file's header.

        Raises:
            ValueError: if they are too many, no text or not different.
        """
        if not all(isinstance(name, str) for name in texts) or not 1 <= len(texts) <= MOST_SPANS:
            raise ValueError(f"spans must be 1 to {MOST_SPANS} names, got {texts!r:.60}")
        if len({*texts, OTHER, ALL_ROWS}) != len(texts) + 2:
            raise ValueError(f"spans must have different names, got {texts!r:.60}")
        return {"names": tuple(texts)}

    @classmethod
    def lengths(cls, others: Mapping[str, Any]) -> dict[str, int]:
        """Numbers of kinds of rows and keys."""
        return {"rows": len(others["names"]) + 2, "keys": len(others["names"]) + 1}
