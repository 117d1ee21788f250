"""A comparison of losses as a table, and what it means in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from acutance.judging.paired import HELPS, HURTS, MIXED, LawComparison, LossComparison, Part
from acutance.report.screen import Wrapped
from acutance.report.table import Cell, Column, Table

__all__ = ["conclusion", "sentences", "table", "verdict_sentence"]

_STYLE = {HELPS: "green", HURTS: "red", MIXED: "yellow"}


def table(comparison: LossComparison, reasons: Sequence[str] = ()) -> Table:
    """The difference of the loss for each law, overall and by range of n, then sentences.

    Args:
        comparison: of the losses.
        reasons: why each of the laws was proposed; the sentences then end with what to do.
    """
    ranges = comparison.laws[0].by_position
    if len(ranges) == 1:
        ranges = ()
    by_n = "; n: tokens that a prediction could read" if ranges else ""
    said: list[str | Wrapped] = [*sentences(comparison)]
    if reasons:
        said += [f"{law.name} {why}." for law, why in zip(comparison.laws, reasons, strict=True)]
        said += [Wrapped(""), Wrapped(conclusion(comparison), "bold")]
    return Table(
        f"Loss with each law minus loss without ({comparison.loss}), nats a token{by_n}",
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
            for law in comparison.laws
        ],
        said,
    )


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
    for law in comparison.laws:
        yield verdict_sentence(law)
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
