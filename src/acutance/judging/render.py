"""A comparison of losses in the terminal: one table, and what it means in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from acutance.judging.paired import HELPS, HURTS, MIXED, LawComparison, LossComparison, Part
from acutance.report.screen import NumberTable, Wrapped

__all__ = ["conclusion", "sentences", "show", "show_proposed", "verdict_sentence"]

_STYLE = {HELPS: "green", HURTS: "red", MIXED: "yellow"}


def show(comparison: LossComparison) -> RenderableType:
    """The comparison for a rich console: a table of the laws by range of n, then sentences."""
    by_n = "; n: tokens that a prediction could read" * (len(comparison.laws[0].by_position) > 1)
    title = Text(
        f"Loss with each law minus loss without ({comparison.loss}), nats a token{by_n}",
        style="bold",
    )
    lines = [Wrapped(line, bullet=" • ") for line in sentences(comparison)]
    return Group(title, "", _table(comparison), "", *lines)


def show_proposed(comparison: LossComparison, reasons: Sequence[str]) -> RenderableType:
    """What :func:`show` shows of changes that a probe proposed, their reasons and what to do."""
    lines = [f"{law.name} {why}." for law, why in zip(comparison.laws, reasons, strict=True)]
    bullets = [Wrapped(line, bullet=" • ") for line in lines]
    end = Wrapped(conclusion(comparison), "bold")
    return Group(show(comparison), *bullets, "", end)


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


def _table(comparison: LossComparison) -> NumberTable:
    """The difference of the loss for each law, overall and by range of n."""
    table = NumberTable(keys=1, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("law")
    table.add_column("Δ loss", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    parts = comparison.laws[0].by_position
    for part in parts if len(parts) > 1 else ():
        table.add_column(f"n = {_range(part)}", justify="right", no_wrap=True)
    for law in comparison.laws:
        shown = law.by_position if len(parts) > 1 else ()
        table.add_row(
            Wrapped(law.name),
            Text(_with_error(law.overall), style="bold"),
            Text(law.verdict, style=_STYLE.get(law.verdict, "")),
            *[Text(_with_error(part), style=_style(part)) for part in shown],
        )
    return table


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
