"""A verification as a table: what was compared, how far apart it was, and the findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from acutance.report.screen import Wrapped
from acutance.report.table import Cell, Column, Table
from acutance.verification.record import Check, Verification

__all__ = ["table"]

_COLUMNS = ("arguments", "output", "positions", "cache", "gradients")


def table(found: Verification) -> Table:
    """The checks, one row for each implementation and kind of input; findings; what was left out.

    A cell is the largest difference of its checks, relative to the largest entry compared; of
    arguments, whether they are those of the configuration.
    """
    names = [name for name in _COLUMNS if any(check.name == name for check in found.checks)]
    rows: dict[tuple[str, str], dict[str, Check]] = {}
    for check in found.checks:
        if check.name in _COLUMNS:
            rows.setdefault((check.implementation, check.inputs), {})[check.name] = check
    said = [Wrapped(line, bullet="   ") for line in _against(found.checks)]
    for number, finding in enumerate(found.findings, 1):
        said.append(Wrapped(str(finding), "red", bullet=f" {number}. "))
    said += [Wrapped(note, "dim", bullet=" • ") for note in found.notes]
    kinds = (Column(name, "name") for name in ("implementation", "input"))
    return Table(
        found.headline,
        [*kinds, *map(Column, ("layers", "heads", *names))],
        [
            (
                *kind,
                max(check.layers for check in checks.values()),
                max(check.heads for check in checks.values()),
                *(_cell(checks.get(name)) for name in names),
            )
            for kind, checks in rows.items()
        ],
        said,
        keys=2,
        style=f"bold {'red' if not found.ok else 'green' if found.complete else 'yellow'}",
    )


def _cell(check: Check | None) -> Cell:
    """The worst difference of a comparison; of arguments, whether there is one."""
    if check is None:
        return Cell("–", "dim")
    if check.name in ("arguments", "cache") and check.ok:
        return Cell("same")
    words = "not a number" if math.isinf(check.error) else f"{check.error:.1e}"
    return Cell(words, "" if check.ok else "bold red")


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
