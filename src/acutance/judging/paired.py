"""Paired differences of loss: means, errors between windows, simultaneous intervals, verdicts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import t as student
from torch import Tensor

from acutance.files import as_json, finite, write_text

if TYPE_CHECKING:
    from acutance.report.table import Table

__all__ = [
    "CONFIDENCE",
    "HELPS",
    "HURTS",
    "METHOD",
    "MIXED",
    "NONE",
    "LawComparison",
    "LossComparison",
    "Part",
    "compare_losses",
    "octaves",
]

HELPS, HURTS, NONE = "helps", "hurts", "no difference found"
#: Where there is no difference in all, and a gain at some positions against a loss at others.
MIXED = "mixed"
#: Of all intervals of a comparison at once.
CONFIDENCE = 0.95
METHOD = (
    "means of paired differences; standard errors between groups of windows; intervals by "
    "Student's t with Bonferroni's correction, half of the 5 % for the means of all laws and half "
    "for their octaves: all intervals hold together with 95 %"
)
#: Octaves of n that are distinguished; the first also has all that is shorter.
_OCTAVES = 6
#: Differences in nats that rounding in float32 can make.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Part:
    """The effect of a law on the predictions whose n lies in a range.

    n is the number of tokens that a prediction could read.

    Attributes:
        first: smallest n.
        last: largest n.
        delta: mean loss under the law minus mean loss without it, in nats a token.
        error: standard error of ``delta``.
        low: lower end of the interval of ``delta``; all intervals of a comparison hold jointly with
            a probability of 95 %.
        high: upper end.
        loss: mean loss without the law, in nats a token.
    """

    first: int
    last: int
    delta: float
    error: float
    low: float
    high: float
    loss: float

    @property
    def helps(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high < 0

    @property
    def hurts(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low > 0

    @property
    def most(self) -> float:
        """The largest magnitude of the difference that the interval allows, in nats a token."""
        return max(abs(self.low), abs(self.high))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; numbers that are not finite become None."""
        record = {"from": self.first, "to": self.last, "delta": self.delta, "error": self.error}
        found: dict[str, Any] = finite(
            record | {"low": self.low, "high": self.high, "loss": self.loss}
        )
        return found


@dataclass(frozen=True)
class LawComparison:
    """What one law does to the loss.

    Attributes:
        name: of the law.
        overall: the effect on all predictions.
        by_position: the effect by octave of n, the tokens that a prediction could read.
    """

    name: str
    overall: Part
    by_position: tuple[Part, ...]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.verdict}, {self.delta:+.4f} ± {self.error:.4f} nat>"

    @property
    def delta(self) -> float:
        """Mean difference over all predictions, in nats a token."""
        return self.overall.delta

    @property
    def error(self) -> float:
        """Standard error of :attr:`delta`."""
        return self.overall.error

    @property
    def verdict(self) -> str:
        """``helps``, ``hurts``, ``mixed`` or ``no difference found``.

        If the interval of the mean difference over all predictions excludes 0, its sign decides.
        Otherwise the octaves of n whose intervals exclude 0 decide: ``mixed`` if their signs
        differ, ``no difference found`` if there are none.
        """
        if self.overall.helps or self.overall.hurts:
            return HELPS if self.overall.helps else HURTS
        helps = any(part.helps for part in self.by_position)
        hurts = any(part.hurts for part in self.by_position)
        if helps and hurts:
            return MIXED
        return HELPS if helps else HURTS if hurts else NONE

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        whole = self.overall.to_dict()
        return {
            "name": self.name,
            "verdict": self.verdict,
            **{key: whole[key] for key in ("delta", "error", "low", "high")},
            "by_position": [part.to_dict() for part in self.by_position],
        }


@dataclass(frozen=True)
class LossComparison:
    """What :func:`acutance.judge` measured.

    Attributes:
        laws: one comparison for each law, in the order in which they were given.
        loss: what was measured, in words.
        mean_loss: over all predictions without a law, in nats.
        windows: windows that were read, each without a law and under each law.
        tokens: tokens in them.
        lengths: of windows.
        groups: parts of the text that errors are estimated from.
        unit: what such a part is: ``window``, ``text`` or ``part of the text``.
        about: what else is known: model, texts, versions.
    """

    laws: tuple[LawComparison, ...]
    loss: str
    mean_loss: float
    windows: int
    tokens: int
    lengths: tuple[int, ...]
    groups: int
    unit: str
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        laws = ", ".join(map(repr, self.laws))
        return f"<LossComparison on {self.windows} windows, {self.tokens} tokens: {laws}>"

    def __getitem__(self, name: str) -> LawComparison:
        """The comparison of a law by its name."""
        for law in self.laws:
            if law.name == name:
                return law
        known = ", ".join(law.name for law in self.laws)
        raise KeyError(f"there is no law {name!r}, only {known}")

    def table(self, reasons: Sequence[str] = ()) -> Table:
        """The comparison as a table and sentences, which ``print`` shows.

        Args:
            reasons: why each of the laws was proposed; the sentences then say what to do.
        """
        from acutance.judging.render import table

        return table(self, reasons)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "schema": "acutance.judgement/1",
            "laws": [law.to_dict() for law in self.laws],
            "windows": self.windows,
            "tokens": self.tokens,
            "loss": self.loss,
            "mean_loss": self.mean_loss,
            "lengths": list(self.lengths),
            "groups": self.groups,
            "unit": self.unit,
            "confidence": CONFIDENCE,
            "method": METHOD,
            "about": dict(self.about),
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` as a JSON file, atomically."""
        write_text(path, as_json(self.to_dict(), indent=1) + "\n")


def octaves(longest: int) -> tuple[tuple[int, int], ...]:
    """Ranges of n up to ``longest``, both ends included: at most six, ending at powers of 2.

    Example:
        >>> octaves(2048)
        ((1, 64), (65, 128), (129, 256), (257, 512), (513, 1024), (1025, 2048))
        >>> octaves(100)
        ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 100))
    """
    top = max(1, math.ceil(math.log2(max(1, longest))))
    edges = [1 << power for power in range(max(0, top - _OCTAVES + 1), top)]
    return tuple(zip([1, *(edge + 1 for edge in edges)], [*edges, longest], strict=True))


def compare_losses(
    names: Sequence[str], sums: Tensor, counts: Tensor, groups: Tensor, ranges: Sequence[Any]
) -> tuple[LawComparison, ...]:
    r"""Compare laws by the losses of the same windows.

    The mean of a difference is :math:`\sum_g d_g / \sum_g n_g` over groups g of windows, with
    :math:`d_g` the sum of differences and :math:`n_g` the predictions of a group. Its standard
    error is that of a ratio, :math:`\sqrt{\frac{G}{G-1}\sum_g (d_g - \bar d n_g)^2} / \sum_g n_g`.

    Args:
        names: of the laws.
        sums: losses summed, (1 + laws, windows, octaves) float64; the first without a law.
        counts: predictions, (windows, octaves).
        groups: the group of each window, int64.
        ranges: first and last n of each octave; those without predictions are left out.

    Example:
        >>> counts = torch.full((8, 1), 10.0)
        >>> base = torch.full((8, 1), 20.0)
        >>> worse = base + torch.linspace(0.9, 1.1, 8)[:, None]
        >>> (found,) = compare_losses(
        ...     ["law"], torch.stack([base, worse]), counts, torch.arange(8), [(1, 10)]
        ... )
        >>> found.verdict, round(found.delta, 3)
        ('hurts', 0.1)
    """
    number = int(groups.max()) + 1
    table = torch.zeros(len(sums), number, sums.shape[2], dtype=torch.float64)
    table.index_add_(1, groups, sums.double())
    count = torch.zeros(number, counts.shape[1], dtype=torch.float64)
    count.index_add_(0, groups, counts.double())
    there = [k for k in range(counts.shape[1]) if bool(count[:, k].sum() > 0)]
    # all predictions come last
    table = torch.cat([table, table.sum(2, keepdim=True)], 2)
    count = torch.cat([count, count.sum(1, keepdim=True)], 1)
    several = len(there) > 1  # a single octave has all predictions, and says the same
    in_octaves = (1 - CONFIDENCE) / (2 * len(names) * len(there)) if several else 0.0
    in_all = (1 - CONFIDENCE) / (len(names) * (1 + several))
    found = []
    for index, name in enumerate(names, 1):
        parts = {
            k: _part(
                table[index, :, k] - table[0, :, k],
                count[:, k],
                float(table[0, :, k].sum()),
                in_octaves if several and k < len(ranges) else in_all,
                ranges[k] if k < len(ranges) else (ranges[there[0]][0], ranges[there[-1]][1]),
            )
            for k in (*there, counts.shape[1])
        }
        whole = parts.pop(counts.shape[1])
        found.append(LawComparison(name, whole, tuple(parts.values())))
    return tuple(found)


def _part(difference: Tensor, count: Tensor, loss: float, miss: float, n: tuple[int, int]) -> Part:
    """The effect on one range of n, from sums over groups of windows.

    Args:
        difference: sum over each group of the loss under the law minus that without, (groups,).
        count: number of predictions of each group.
        loss: sum of the losses without the law.
        miss: probability that the interval does not contain the true difference.
        n: smallest and largest n of the range.
    """
    has = count > 0
    difference, count = difference[has], count[has]
    total, number = float(count.sum()), int(has.sum())
    delta = float(difference.sum()) / total
    error = math.nan
    half = math.inf
    if number > 1:
        away = (difference - delta * count).square().sum()
        error = math.sqrt(float(away) * number / (number - 1)) / total
        quantile = float(student.ppf(1 - miss / 2, number - 1))
        half = max(quantile * error, _ROUNDING)
    return Part(*n, delta, error, delta - half, delta + half, loss / total)
