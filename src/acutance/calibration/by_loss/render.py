"""A fit to the loss as tables, and in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from acutance.calibration.by_loss.result import GateSlope, HeadSlope, LossCalibration
from acutance.calibration.render import OTHER_TEXT, not_fitted, of_model
from acutance.report.table import Cell, Column, Table
from acutance.scaling import Window

__all__ = ["sentences", "table"]

#: Heads that the table lists: those with the largest change to first order.
MOST = 20


def table(found: LossCalibration) -> Table:
    """A fit to the loss: a table of the gates, one of the heads, then sentences."""
    shown = Table("", (), (), [*sentences(found)])
    if found.slopes:
        shown = replace(_slope_table(found), below=shown)
    return replace(_gate_table(found), below=shown) if found.gates else shown


def _gate_table(found: LossCalibration) -> Table:
    """The slope of the loss by the gates, and what heads read."""
    pairs = zip(found.gates, found.reads, strict=True)
    rows = []
    for gate, window in sorted(pairs, key=lambda pair: min(pair[0].slope))[:MOST]:
        reads = Cell("all", "dim") if window is None else Cell(_words(window), "cyan")
        rows.append([gate.layer, gate.head, *_slopes(gate), reads])
    return Table(
        f"Loss ({found.loss}): its derivative by a gate that lets a head read through a "
        "window, without a law, in nats a token",
        [
            *map(Column, ("layer", "head")),
            *(Column(f"slope, {_words(window)}") for window in found.choices),
            Column("reads"),
        ],
        rows,
        keys=2,
    )


def _words(window: Window) -> str:
    """A window's size and sinks, as the command accepts them."""
    return f"{window.size},{window.sinks}" if window.sinks else str(window.size)


def _slope_table(found: LossCalibration) -> Table:
    """The slope of the loss and the factors of the heads at each length."""
    pairs = zip(found.slopes, found.factors, strict=True)
    rows: list[list[Any]] = []
    for head, factors in sorted(pairs, key=lambda pair: -max(map(abs, pair[0].slope)))[:MOST]:
        cells = [
            Cell("1", "dim") if factor == 1.0 else Cell(f"{factor:.3g}", "cyan bold")
            for factor in factors
        ]
        rows.append([head.layer, head.head, Cell("slope", "dim"), *_slopes(head)])
        rows.append([None, None, Cell("factor", "dim"), *cells])
    law = "with these windows" if any(found.reads) else "without a law"
    return Table(
        f"Loss ({found.loss}): its derivative by log λ of each head {law}, in nats a "
        f"token, and the factors λ of the law ({found.family}), at n visible keys",
        [*map(Column, ("layer", "head", "n =", *map(str, found.slopes[0].lengths)))],
        rows,
        keys=3,
    )


def _slopes(head: HeadSlope | GateSlope) -> list[str]:
    """A head's slopes with their standard errors."""
    pairs = zip(head.slope, head.error, strict=True)
    return [f"{slope:+.4f}±{error:.4f}" for slope, error in pairs]


def sentences(found: LossCalibration) -> Iterator[str]:
    """What the fit changed and how it changed the loss, one sentence for each point."""
    yield from of_model(found)
    windows = f"{found.stopped} windows that were not fitted to"
    effect = f"{found.delta:+.4f} ± {found.error:.4f} nat"
    streaming = sum(window is not None for window in found.reads)
    if not found.empty:
        yield (
            f"With the law the loss of {windows} changes by {effect}, from "
            f"{found.mean_loss:.3f}. They decided what the law is: judge it on other text."
        )
    else:
        best = f" (the best changes it by {effect})" if found.delta or found.error else ""
        yield (
            f"No law was found that lowers the loss of {windows} beyond noise{best}: every head "
            "stays as it is."
        )
    if found.gates and streaming:
        rest = "; for the others no gain was found beyond noise"
        yield (
            f"{streaming} of {len(found.gates)} heads read through a window"
            f"{rest if streaming < len(found.gates) else ''}."
        )
    if found.slopes and not found.changed and not found.empty:
        yield "Every head has the factor 1: no other factor lowers the loss beyond noise."
    if found.changed:
        yield (
            f"{found.changed} of {len(found.slopes)} heads have a factor other than 1; on the "
            f"{found.fitted} fitted windows alone, the derivatives of the others are not beyond "
            f"noise. The table's derivatives are over all {found.fitted + found.stopped} windows."
        )
    if max(len(found.slopes), len(found.gates)) > MOST:
        yield f"A table has the {MOST} heads with the largest derivatives; --json has all."
    passes = f"{found.passes} pass{'' if found.passes == 1 else 'es'}"
    yield f"Fitted to {found.fitted} windows in {passes}; ± is one standard error."
    yield from not_fitted(found)
    if found.family == "table" and found.changed:
        first, last = found.slopes[0].lengths[0], found.slopes[0].lengths[-1]
        yield (
            f"Beyond n = {last} each head keeps its last factor, without measurement; rows with "
            f"fewer than {first} keys use that length's factor."
        )
    if not found.empty:
        yield OTHER_TEXT
