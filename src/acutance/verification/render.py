"""A verification in the terminal: what was compared, how far apart it was, and the findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from acutance.report.screen import NumberTable, Wrapped
from acutance.verification.record import Check, Verification

__all__ = ["show"]

_COLUMNS = ("arguments", "output", "positions", "cache", "gradients")


def show(found: Verification) -> RenderableType:
    """The verification for a rich console: a table of the checks, findings, and what was left out.

    A cell is the largest difference of its checks, relative to the largest entry compared; of
    arguments, whether they are those of the configuration.
    """
    style = "red" if not found.ok else "green" if found.complete else "yellow"
    title = Text(found.headline, style=f"bold {style}")
    parts: list[RenderableType] = [title, "", _table(found.checks), ""]
    parts += [Wrapped(line, bullet="   ") for line in _against(found.checks)]
    for number, finding in enumerate(found.findings, 1):
        parts.append(Wrapped(str(finding), "red", bullet=f" {number}. "))
    parts += [Wrapped(note, "dim", bullet=" • ") for note in found.notes]
    return Group(*parts)


def _table(checks: Sequence[Check]) -> NumberTable:
    """One row for each implementation and kind of input, with the worst of each comparison."""
    table = NumberTable(keys=2, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("implementation", no_wrap=True)
    table.add_column("input", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    names = [name for name in _COLUMNS if any(check.name == name for check in checks)]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows: dict[tuple[str, str], dict[str, Check]] = {}
    for check in checks:
        if check.name in _COLUMNS:
            rows.setdefault((check.implementation, check.inputs), {})[check.name] = check
    for (implementation, inputs), row in rows.items():
        layers = max(check.layers for check in row.values())
        heads = max(check.heads for check in row.values())
        cells = [_cell(row.get(name)) for name in names]
        table.add_row(implementation, inputs, str(layers), str(heads), *cells)
    return table


def _cell(check: Check | None) -> Text:
    """The worst difference of a comparison; of arguments, whether there is one."""
    if check is None:
        return Text("–", style="dim")
    if check.name in ("arguments", "cache") and check.ok:
        return Text("same")
    words = "not a number" if math.isinf(check.error) else f"{check.error:.1e}"
    return Text(words, style="" if check.ok else "bold red")


def _against(checks: Sequence[Check]) -> Iterator[str]:
    """The largest difference of the model's output between implementations, one line each."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        if check.name not in _COLUMNS:
            groups.setdefault(check.name, []).append(check)
    for name, group in groups.items():
        worst = max(group, key=lambda check: check.error)
        yield (
            f"{name}: the model's outputs differ by at most {worst.error:.1e} of their size "
            f"(tolerance {worst.tolerance:.1g}; {worst.inputs})"
        )
