"""Paired differences of loss: means, errors between windows, intervals, verdicts, in words."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from acutance.calibration.loss_table import ratio
from acutance.calibration.measured import student_t_quantile
from acutance.files import as_json, finite, write_text
from acutance.report.screen import Wrapped
from acutance.report.table import Cell, Column, Table

__all__ = ["LawComparison", "LossComparison", "Part"]

HELPS, HURTS, NONE = "helps", "hurts", "no difference found"
#: Where there is no difference in all, and a gain at some positions against a loss at others.
MIXED = "mixed"
_STYLE = {HELPS: "green", HURTS: "red", MIXED: "yellow"}
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
        numbers = asdict(self)
        record = {"from": numbers.pop("first"), "to": numbers.pop("last"), **numbers}
        return cast("dict[str, Any]", finite(record))


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
        """The difference of the loss for each law, overall and by range of n, then sentences.

        Args:
            reasons: why each of the laws was proposed; the sentences then end with what to do.
        """
        ranges = self.laws[0].by_position
        if len(ranges) == 1:
            ranges = ()
        by_n = "; n: tokens that a prediction could read" if ranges else ""
        said: list[str | Wrapped] = [*sentences(self)]
        if reasons:
            said += [f"{law.name} {why}." for law, why in zip(self.laws, reasons, strict=True)]
            said += [Wrapped(""), Wrapped(conclusion(self), "bold")]
        return Table(
            f"Loss with each law minus loss without ({self.loss}), nats a token{by_n}",
            (
                Column("law", "words"),
                Column("Δ loss", format=_with_error),
                Column("verdict", "name"),
                *(Column(f"n = {_range(part)}", format=_with_error) for part in ranges),
            ),
            [
                (
                    law.name,
                    Cell(law.overall, "bold"),
                    Cell(law.verdict, _STYLE.get(law.verdict, "")),
                    *(Cell(part, _style(part)) for part in law.by_position[: len(ranges)]),
                )
                for law in self.laws
            ],
            said,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        numbers = ("windows", "tokens", "loss", "mean_loss", "lengths", "groups", "unit")
        return {
            "schema": "acutance.judgement/1",
            "laws": [law.to_dict() for law in self.laws],
            **{name: getattr(self, name) for name in numbers},
            "lengths": list(self.lengths),
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
    places = [*ranges, (ranges[there[0]][0], ranges[there[-1]][1])]
    found = []
    for index, name in enumerate(names, 1):
        parts = []
        for k in (*there, counts.shape[1]):  # the last has all predictions
            has = count[:, k] > 0
            difference, many = (table[index, :, k] - table[0, :, k])[has], count[has, k]
            delta, error = map(float, ratio(difference, many))
            half, miss = math.inf, in_octaves if several and k < len(ranges) else in_all
            if len(many) > 1:
                quantile = student_t_quantile(len(many) - 1, 1 - miss / 2)
                half = max(quantile * error, _ROUNDING)
            loss = float(table[0, :, k].sum()) / float(many.sum())
            (first, last), error = places[k], error if len(many) > 1 else math.nan
            parts.append(Part(first, last, delta, error, delta - half, delta + half, loss))
        *by_octave, overall = parts
        found.append(LawComparison(name, overall, tuple(by_octave)))
    return tuple(found)


def conclusion(comparison: LossComparison) -> str:
    """Which of the changes to make: those that lower the loss.

    Example:
        >>> worse = LawComparison("log_n", Part(1, 128, 0.15, 0.01, 0.1, 0.2, 2.5), ())
        >>> conclusion(LossComparison((worse,), "next token", 2.5, 8, 1024, (128,), 8, "window"))
        'None of these changes lowers the loss: leave the model as it is.'
    """
    helps = [law.name for law in comparison.laws if law.verdict == HELPS]
    if not helps:
        return "None of these changes lowers the loss: leave the model as it is."
    return f"Lowers the loss, so worth using on such texts: {'; '.join(helps)}."


def _style(part: Part) -> str:
    """Colour of a cell: that of its verdict, or none if the interval contains 0."""
    return _STYLE[HELPS] if part.helps else _STYLE[HURTS] if part.hurts else "dim"


def sentences(comparison: LossComparison) -> Iterator[str]:
    """A verdict on each law, then the data that it rests on and how errors are computed."""
    yield from map(verdict_sentence, comparison.laws)
    groups, unit, longest = comparison.groups, comparison.unit, comparison.lengths[-1]
    several = len(comparison.lengths) > 1
    cut = ", the shorter ones cut from the longest" if several and unit == "window" else ""
    many = f"{groups} windows of {longest} tokens" if cut else f"{groups} of them"
    yield (
        f"Without a law the mean loss is {comparison.mean_loss:.3f} nats a token, over "
        f"{comparison.windows} windows of {_listed(comparison.lengths)} tokens{cut}."
    )
    yield (
        f"± is a standard error from {unit} to {unit} ({many}); verdicts are from "
        "simultaneous 95 % intervals (Student's t with Bonferroni's correction)."
    )
    if groups < 6:
        plural = "parts of the text" if unit == "part of the text" else f"{unit}s"
        yield (
            f"With only {groups} {plural} the intervals are wide, and small effects go unseen: "
            "read more text."
        )


def verdict_sentence(law: LawComparison) -> str:
    """The verdict of one law, with its numbers.

    Example:
        >>> parts = (Part(1, 64, 0.3, 0.02, 0.2, 0.4, 3.0), Part(65, 128, 0.0, 0.01, -0.1, 0.1, 2))
        >>> verdict_sentence(LawComparison("log_n", Part(1, 128, 0.15, 0.01, 0.1, 0.2, 2.5), parts))
        'log_n hurts: loss changes by +0.15 ± 0.01 nat in all (between +0.1 and +0.2).'
    """
    whole = law.overall
    if law.verdict in (HELPS, HURTS) and (whole.helps or whole.hurts):
        other = [p for p in law.by_position if (p.hurts if whole.helps else p.helps)]
        what = "hurts" if whole.helps else "helps"
        but = f", but {what} at n = {_places(other)}" if other else ""
        return (
            f"{law.name} {law.verdict}: loss changes by {_with_error(whole)} nat in all (between "
            f"{whole.low:+.2g} and {whole.high:+.2g}){but}."
        )
    helps = [part for part in law.by_position if part.helps]
    hurts = [part for part in law.by_position if part.hurts]
    found = [f"helps at n = {_places(helps)}"] if helps else []
    found += [f"hurts at n = {_places(hurts)}"] if hurts else []
    where = f" {' and '.join(found)}; in all" if found else ""
    if not math.isfinite(whole.most):
        return f"{law.name}{where}: no difference can be found with so little text."
    return (
        f"{law.name}{where}: no difference found (at most {whole.most:.2g} nat): loss changes by "
        f"{_with_error(whole)} nat in all (between {whole.low:+.2g} and {whole.high:+.2g})."
    )


def _places(parts: Sequence[Part]) -> str:
    """The ranges of n of some parts and their differences, as "64–127 (+0.10 ± 0.02), ..."."""
    return ", ".join(f"{_range(part)} ({_with_error(part)})" for part in parts)


def _range(part: Part) -> str:
    """A part's range of n, as "64–127", or "64" for a single n."""
    return f"{part.first}" if part.first == part.last else f"{part.first}–{part.last}"


def _listed(lengths: Sequence[int]) -> str:
    """Lengths as text: "512", "128 and 512", or "128, 256 and 512"."""
    *first, last = map(str, lengths)
    return f"{', '.join(first)} and {last}" if first else last


def _with_error(part: Part) -> str:
    """A difference with its standard error, to the error's first digits."""
    if not math.isfinite(part.error):
        return f"{part.delta:+.2g}"
    if part.error <= 0 or abs(part.delta) + part.error < 1e-5:
        return f"{part.delta:+.1g}" if abs(part.delta) >= 1e-5 else "0"
    digits = min(5, max(2, 1 - math.floor(math.log10(part.error)) - 1))
    return f"{part.delta:+.{digits}f} ± {part.error:.{digits}f}"
