"""The figures: each case's ratio beside its goal, and time against length."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from acutance.report.plot_style import (
    THEMES,
    Theme,
    curves,
    draw_line_and_marks,
    draw_marks,
    label,
    legend,
    new_figure,
    reference,
    save,
)
from benchmarks.cpu.goals import goals_of, value_of
from benchmarks.cpu.records import BenchReport, CaseResult, Spread

_LINE = 0.165  # inches a case takes
_TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: Contenders whose time is drawn against length, and how the legend calls them.
_DRAWN = {
    "acutance": "acutance, output and statistics",
    "statistics": "acutance, statistics alone",
    "sdpa": "SDPA, output alone",
    "blocked": "acutance, plain PyTorch",
    "naive": "maps in memory, output and entropy",
}


def draw(report: BenchReport, path: str | os.PathLike[str]) -> list[Path]:
    """Draw both figures, each for a light and a dark page.

    Args:
        report: what was found.
        path: a .png or .svg file for the ratios on a light page; beside it go ``NAME-dark``,
            ``NAME-time`` and ``NAME-time-dark``.

    Returns:
        The files written: those figures for which the report has cases.

    Raises:
        ImportError: without matplotlib.
        ValueError: for another ending.
    """
    light = Path(path)
    written = []
    for name, theme in THEMES.items():
        end = "" if name == "light" else f"-{name}"
        for part, drawing in (("", draw_ratios), ("-time", draw_times)):
            target = light.with_name(f"{light.stem}{part}{end}{light.suffix}")
            if drawing(report, target, theme=theme):
                written.append(target)
    return written


def draw_ratios(report: BenchReport, path: str | os.PathLike[str], *, theme: Theme) -> bool:
    """Each case's time over SDPA's, a filled mark with one thread, a hollow one with more.

    A short bar across the line is the goal. Returns whether there was anything to draw.
    """
    lines = _lines(report)
    if not lines:
        return False
    names = list(dict.fromkeys(name for name, *_ in lines))
    half = -(-len(names) // 2)
    parts = [part for part in (names[:half], names[half:]) if part]
    figure, panels = new_figure(
        "Time over F.scaled_dot_product_attention's",
        "Medians, with bars over quartiles: filled for one thread, hollow for more; an upright "
        "stroke is the goal. "
        f"{report.environment.processor}, {report.environment.date[:10]}.",
        panels=len(parts),
        height=1.6 + _LINE * half,
        theme=theme,
    )
    one, more, _ = curves(3, theme)
    for axes, part in zip(panels, parts, strict=True):
        place = {name: len(part) - index for index, name in enumerate(part)}
        axes.set_xscale("log")
        reference(axes, theme, x=1.0)
        for name, threads, limit, spread in lines:
            if name not in place:
                continue
            y = place[name] + (0.14 if threads == 1 else -0.14)
            axes.plot(
                [limit, limit],
                [place[name] - 0.4, place[name] + 0.4],
                color=theme.ink,
                linewidth=1.6,
            )
            if spread is None:
                continue
            curve = one if threads == 1 else more
            axes.plot([spread.q1, spread.q3], [y, y], color=curve.colour, linewidth=1.4)
            draw_marks(axes, [spread.median], [y], curve, hollow=threads > 1)
        axes.set_yticks(list(place.values()), list(place))
        axes.tick_params(axis="y", labelsize=7.5)
        axes.set_ylim(0.3, len(part) + 0.7)
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.minorticks_off()
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, 0.25), max(high, 2.0))
        label(axes, x="× SDPA", y="")
    save(figure, path)
    return True


def _lines(report: BenchReport) -> list[tuple[str, int, float, Spread | None]]:
    """Of each goal that is a ratio: line's name, threads, limit and what was measured."""
    found = []
    for result in report.results:
        for goal in goals_of(report, result):
            if goal.unit == "ratio":
                ours = goal.contender.startswith(("acutance-avx2", "blocked"))
                name = result.case.name + f" ({goal.contender})" * ours
                spread = result.ratio(result.row(goal.contender))
                if value_of(goal, result) is None:
                    spread = None
                found.append((name, result.threads, goal.limit, spread))
    return found


def draw_times(report: BenchReport, path: str | os.PathLike[str], *, theme: Theme) -> bool:
    """Time of a head against the number of keys, full and causal, one thread where it was run.

    Returns whether there was anything to draw.
    """
    threads = min((result.threads for result in report.results), default=1)
    sides = {
        kind: _times(result for result in report.results
                     if result.threads == threads and _plain(result, causal))
        for kind, causal in (("full", False), ("causal", True))
    }  # fmt: skip
    sides = {
        kind: found for kind, found in sides.items() if any(len(e) > 1 for e in found.values())
    }
    if not sides:
        return False
    words = "one thread" if threads == 1 else f"{threads} threads"
    figure, panels = new_figure(
        "Time against length, float32, E = 64",
        f"Of one head, {words}. {report.environment.processor}, {report.environment.date[:10]}.",
        panels=len(sides),
        theme=theme,
    )
    looks = dict(zip(_DRAWN, curves(len(_DRAWN), theme), strict=True))
    for axes, (kind, found) in zip(panels, sides.items(), strict=True):
        for name, words in _DRAWN.items():
            if name in found:
                lengths, times = zip(*sorted(found[name].items()), strict=True)
                draw_line_and_marks(axes, lengths, times, lengths, times, looks[name], words)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        seen = sorted({length for times_of in found.values() for length in times_of})
        axes.set_xticks(seen, [f"{length:,}" for length in seen])
        axes.minorticks_off()
        label(axes, x="keys and queries n", y="milliseconds a head", title=kind)
        legend(axes, theme, where="lower right")
    save(figure, path)
    return True


def _plain(result: CaseResult, causal: bool) -> bool:
    case = result.case
    square = case.queries == case.keys and case.queries >= 1024 and not (case.window or case.mask)
    usual = case.width == 64 and case.dtype == "float32" and case.groups_of == 1
    return case.timing == "forward" and square and usual and case.causal == causal


def _times(results: Iterable[CaseResult]) -> dict[str, dict[int, float]]:
    """Milliseconds a head, by contender and length; the first case of a length counts."""
    found: dict[str, dict[int, float]] = {}
    for result in results:
        heads = result.case.batch * result.case.heads
        for row in result.rows:
            time = result.time(row)
            if time is not None and row.contender in _DRAWN:
                found.setdefault(row.contender, {}).setdefault(
                    result.case.keys, time.median / heads
                )
    return found
