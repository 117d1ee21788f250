"""Draw docs/_static/architecture.svg: the packages of acutance and which imports which.

Run it from the repository's root after a change of imports between packages:

    python tools/make_architecture_figure.py

A package stands above all that it imports. A line is drawn where no other package lies between.
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "acutance"
FIGURE = ROOT / "docs" / "_static" / "architecture.svg"
BOX, GAP, RISE, TOP = 196, 24, 124, 16  # width, space between boxes, height of a level, margin
HEIGHT, WRAP = 84, 29  # of a box, and letters a line
THEMES = {
    "": ("#1f2328", "#57606a", "#ffffff", "#8c959f"),
    "-dark": ("#e6edf3", "#9ea7b1", "#161b22", "#6e7681"),
}


@cache
def imports() -> dict[str, set[str]]:
    """Which packages each package imports, those that only gather names for users left out."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"data"}
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (PACKAGE / folder).rglob("*.py"):
            if path == PACKAGE / folder / "__init__.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("acutance"):
                    parts = (node.module or "").split(".")
                    names = parts[1:2] or [alias.name for alias in node.names]
                    found[folder] |= (folders & set(names)) - {folder}
    return found


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """How many packages stand below each, along the longest way."""
    known: dict[str, int] = {}
    while len(known) < len(graph):
        ready = {name for name in graph if name not in known and graph[name] <= known.keys()}
        known |= {
            name: max((known[below] + 1 for below in graph[name]), default=0) for name in ready
        }
    return known


def reached(graph: dict[str, set[str]], name: str) -> set[str]:
    """All that a package imports, directly or through others."""
    return graph[name].union(*(reached(graph, below) for below in graph[name]))


def purpose(name: str) -> str:
    """The first sentence of a package's docstring, without its name before it."""
    source = (PACKAGE / name / "__init__.py").read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
    plain = re.sub(r":\w+:`~?([\w.]+)`|``(.+?)``", lambda match: match[1] or match[2], first)
    short = plain.removeprefix(f"{name.capitalize()}: ").split(". ")[0].rstrip(".")
    return short[0].upper() + short[1:]


def places(graph: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """The middle of every box: a row for each level, near to what it imports."""
    rows: dict[int, list[str]] = {}
    for name, level in levels(graph).items():
        rows.setdefault(level, []).append(name)
    width = max(map(len, rows.values())) * (BOX + GAP)
    found: dict[str, tuple[float, float]] = {}
    for level in sorted(rows):
        names = rows[level]
        wanted = {
            name: sum(found[below][0] for below in graph[name]) / len(graph[name])
            if graph[name]
            else 0
            for name in names
        }
        names.sort(key=lambda name: (wanted[name], name))
        left = (width - len(names) * (BOX + GAP)) / 2
        y = TOP + (max(rows) - level) * RISE + HEIGHT / 2
        for place, name in enumerate(names):
            found[name] = left + (place + 0.5) * (BOX + GAP), y
    return found


def draw(theme: str) -> str:
    """The figure as SVG, of a light or a dark page."""
    ink, faint, paper, line = THEMES[theme]
    graph = imports()
    at = places(graph)
    width = max(x for x, _ in at.values()) + BOX / 2 + GAP / 2
    height = max(y for _, y in at.values()) + HEIGHT / 2 + TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        'font-family="system-ui, sans-serif">',
        "<title>Packages of acutance, each above what it imports</title>",
    ]
    for name in sorted(graph):
        direct = {
            below for below in graph[name]
            if not any(below in reached(graph, other) for other in graph[name])
        }  # fmt: skip
        for below in sorted(direct):
            (x, y), (u, v) = at[name], at[below]
            top, bottom = y + HEIGHT / 2, v - HEIGHT / 2
            path = f"M{x:g} {top:g}C{x:g} {top + 24:g} {u:g} {bottom - 24:g} {u:g} {bottom:g}"
            parts.append(f'<path d="{path}" fill="none" stroke="{line}" stroke-width="1.2"/>')
    for name in sorted(graph):
        x, y = at[name]
        left, top = x - BOX / 2, y - HEIGHT / 2
        parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{BOX}" height="{HEIGHT}" rx="6" '
            f'fill="{paper}" stroke="{line}"/>'
        )
        parts.append(
            f'<text x="{left + 10:g}" y="{top + 20:g}" font-size="14" font-weight="600" '
            f'fill="{ink}">{escape(name)}</text>'
        )
        for row, words in enumerate(textwrap.wrap(purpose(name), WRAP)[:4]):
            parts.append(
                f'<text x="{left + 10:g}" y="{top + 36 + 13 * row:g}" font-size="11" '
                f'fill="{faint}">{escape(words)}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Write both figures."""
    for theme in THEMES:
        FIGURE.with_stem(FIGURE.stem + theme).write_text(draw(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
