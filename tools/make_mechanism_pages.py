r"""Make docs/mechanisms: a page, an example and a figure for every entry of ``MECHANISMS``.

Run it from the repository's root after a change of the table or of what is measured:

    python tools/make_mechanism_pages.py            # pages, figures and what they show
    python tools/make_mechanism_pages.py --pages    # the pages alone, from the figures' record

The figures' record, docs/mechanisms/readings.json, holds two comparisons: against the number of
keys, and against the deviation of scaled dot products. Every number in a page is read from it or
printed by the page's own example, which the tests run.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

import acutance
from acutance.comparison import Comparison, compare
from acutance.files import write_text, write_whole
from acutance.mechanisms.table import Mechanism
from acutance.report.plot_style import DARK, LIGHT, Theme, curves, label, new_figure, reference

PAGES = Path(__file__).parents[1] / "docs" / "mechanisms"
RECORD = PAGES / "readings.json"
LENGTHS = (64, 256, 1024, 4096)
DEVIATIONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
AT = 1024  # keys of the second panel
WIDTH = 64
CALL = re.compile(r'predict\("(?:[^()]|\([^()]*\))*\)')


def number(x: float) -> float | None:
    """As JSON has it: six digits, and null for what is not known."""
    return None if math.isnan(x) else float(f"{x:.6g}")


def points(found: Comparison, name: str) -> list[dict[str, float | None]]:
    """Effective keys of one mechanism in a comparison."""
    readings = [result["effective_keys"] for result in found.of(name)]
    return [
        {"measured": number(r.measured), "error": number(r.error), "predicted": number(r.predicted)}
        for r in readings
    ]


def measure() -> dict[str, Any]:
    """Every mechanism against n, for standard normal queries and keys, and for wider queries."""
    by_n = compare("all", n=LENGTHS, d=WIDTH, costs=False)
    by_deviation = [
        compare("all", n=AT, d=WIDTH, std=(deviation, 1.0), costs=False) for deviation in DEVIATIONS
    ]
    names = list(acutance.MECHANISMS)
    return {
        "lengths": list(LENGTHS),
        "deviations": list(DEVIATIONS),
        "keys": AT,
        "width": WIDTH,
        "by_n": {name: points(by_n, name) for name in names},
        "by_deviation": {
            name: [points(found, name)[0] for found in by_deviation] for name in names
        },
    }


def values(readings: list[dict[str, float | None]], key: str) -> list[float]:
    """One number of each reading, NaN where it is not known."""
    return [math.nan if r[key] is None else float(r[key]) for r in readings]  # type: ignore[arg-type]


def draw(entry: Mechanism, record: dict[str, Any], path: Path, theme: Theme) -> None:
    """Effective keys against n, and against the deviation of the scores."""
    figure, panels = new_figure(
        entry.title,
        "Effective keys of a row, for normal queries and keys of width"
        f" {record['width']}. Line: theory. Marks: measured.",
        panels=2,
        theme=theme,
        height=3.9,
    )
    [curve] = curves(1, theme)
    sides = (
        (record["lengths"], record["by_n"][entry.name], "keys n", record["lengths"]),
        (
            record["deviations"],
            record["by_deviation"][entry.name],
            f"deviation of scaled dot products, n = {record['keys']:,}",
            [record["keys"]] * len(record["deviations"]),
        ),
    )
    for axes, (places, readings, name, limit) in zip(panels, sides, strict=True):
        marks, line = values(readings, "measured"), values(readings, "predicted")
        axes.plot(
            places, limit, color=theme.muted, linewidth=1.1, linestyle=(0, (1, 1.5)), zorder=1
        )
        axes.text(
            places[-1], limit[-1], "all keys", color=theme.muted, size=9, ha="right", va="bottom"
        )
        if not all(map(math.isnan, line)):
            axes.plot(places, line, color=curve.colour, linewidth=1.8)
        axes.errorbar(
            places, marks, yerr=[0.0 if math.isnan(e) else e for e in values(readings, "error")],
            color=curve.colour, linestyle="None", marker="o", markersize=6.0,
            markerfacecolor=theme.page, markeredgewidth=1.5, elinewidth=1.2,
        )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(places, [f"{place:,g}" for place in places])
        axes.minorticks_off()
        axes.set_ylim(0.7, 2.2 * max(limit))
        reference(axes, theme, y=1.0)
        label(axes, x=name, y="effective keys")
    settings = {"svg.hashsalt": "acutance", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        write_whole(
            path, lambda where: figure.savefig(where, format="svg", metadata={"Date": None})
        )


def example(entry: Mechanism) -> list[str]:
    """Lines of an example with what they print, run here and again by the tests."""
    code = [
        "import acutance",
        "import torch",
        "_ = torch.manual_seed(0)",
        f"query, key, value = torch.randn(3, 1, 4, 256, {WIDTH})",
        f"out = {entry.code}",
        "out.shape",
        f'_, stats = acutance.MECHANISMS["{entry.name}"].run(query, key, value)',
        "stats.effective_keys.nanmean()",
    ]
    space: dict[str, Any] = {}
    lines: list[str] = []
    for line in code:
        broken = split(line)
        lines += [f">>> {broken[0]}", *(f"... {more}" for more in broken[1:])]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), torch.no_grad():
            try:
                shown = eval(compile(line, "example", "eval"), space)
                if shown is not None:
                    print(repr(shown))
            except SyntaxError:
                exec(compile(line, "example", "exec"), space)
        # three digits, which are the same on every processor
        rounded = re.sub(
            r"^tensor\((\d+\.\d*)\)$", lambda found: f"tensor({float(found[1]):#.3g})",
            printed.getvalue(), flags=re.MULTILINE,
        )  # fmt: skip
        lines += rounded.splitlines()
    doctest.DocTestParser().parse("\n".join(lines))
    return lines


def split(line: str) -> list[str]:
    """A statement as the project formats it, in lines that fit a page."""
    if len(line) <= 92:
        return [line]
    ruff = ["ruff", "format", "--isolated", "--line-length", "92", "-"]
    done = subprocess.run(
        [sys.executable, "-m", *ruff], input=line, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def page(entry: Mechanism, record: dict[str, Any], lines: list[str]) -> str:
    """The page of one entry."""
    theory = entry.theory
    functions = ", ".join(f"{{func}}`~acutance.theory.{name}`" for name in theory.functions)
    how = CALL.sub(r"`\g<0>`", theory.how)
    measured = values(record["by_n"][entry.name], "measured")
    last = record["lengths"][-1]
    share = measured[-1]
    summary = (
        f"For standard normal queries and keys of width {record['width']}, {share:,.4g} of {last:,}"
        " keys are effective."
        if not math.isnan(share)
        else f"Its rows among {last:,} keys have no effective keys to draw."
    )
    return "\n".join(
        [
            f"# {entry.title}",
            "",
            f'`acutance.MECHANISMS["{entry.name}"]`',
            "",
            "$$",
            entry.formula,
            "$$",
            "",
            f"**Can it concentrate?** {entry.can_concentrate}",
            "",
            f"**Theory.** {how}" + (f" See {functions}." if functions else ""),
            "",
            f"**Cost.** {entry.streaming}",
            "",
            f"**Source.** {entry.source}",
            "",
            "```pycon",
            *lines,
            "```",
            "",
            summary,
            "",
            f"```{{image}} figures/{entry.name}.svg",
            ":class: only-light",
            f':alt: "{entry.title}: effective keys against the number of keys, and against the'
            ' deviation of scaled dot products, theory beside measurement."',
            "```",
            f"```{{image}} figures/{entry.name}-dark.svg",
            ":class: only-dark",
            ':alt: "The same figure on a dark page."',
            "```",
            "",
        ]
    )


def index(record: dict[str, Any]) -> str:
    """The table of all of them."""
    last = record["lengths"][-1]
    rows = [
        "# Mechanisms",
        "",
        "Every mechanism that can be run by name, with its formula, whether it can concentrate and"
        " on what condition, and the theory of its rows. `acutance compare` sets them side by side"
        " on queries and keys of your own.",
        "",
        ":::{list-table}",
        ":header-rows: 1",
        "",
        "* - mechanism",
        f"  - effective keys of {last:,}",
        "  - can it concentrate?",
    ]
    for name, entry in acutance.MECHANISMS.items():
        share = values(record["by_n"][name], "measured")[-1]
        shown = "–" if math.isnan(share) else f"{share:,.4g}"
        rows += [
            f"* - [{entry.title}]({name}.md)",
            f"  - {shown}",
            f"  - {entry.can_concentrate}",
        ]
    rows += [
        ":::",
        "",
        f"Measured on normal queries and keys of width {record['width']}, whose scaled dot products"
        " have deviation 1.",
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *acutance.MECHANISMS,
        "```",
        "",
    ]
    return "\n".join(rows)


def main() -> None:
    """Measure, unless asked not to, and write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", action="store_true", help="write the pages alone")
    only_pages = parser.parse_args().pages
    (PAGES / "figures").mkdir(parents=True, exist_ok=True)
    if not only_pages:
        write_text(RECORD, json.dumps(measure(), indent=1) + "\n")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, entry in acutance.MECHANISMS.items():
        write_text(PAGES / f"{name}.md", page(entry, record, example(entry)))
        if not only_pages:
            draw(entry, record, PAGES / "figures" / f"{name}.svg", LIGHT)
            draw(entry, record, PAGES / "figures" / f"{name}-dark.svg", DARK)
    write_text(PAGES / "index.md", index(record))


if __name__ == "__main__":
    main()
