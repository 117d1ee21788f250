"""The terminal report of a fit to the loss."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from acutance.calibration.by_loss.result import GateSlope, HeadSlope, LossCalibration
from acutance.calibration.render import OTHER_TEXT, new_table, not_fitted, of_model
from acutance.report.screen import NumberTable, Wrapped
from acutance.scaling import Window

__all__ = ["sentences", "show"]

#: Heads that the table lists: those with the largest change to first order.
MOST = 20


def show(found: LossCalibration) -> RenderableType:
    """A fit to the loss for a rich console: a table of the heads, then sentences."""
    parts: list[RenderableType] = []
    if found.gates:
        title = (
            f"Loss ({found.loss}): its derivative by a gate that lets a head read through a "
            "window, without a law, in nats a token"
        )
        parts += [Text(title, style="bold"), "", _gate_table(found), ""]
    if found.slopes:
        law = "with these windows" if any(found.reads) else "without a law"
        title = (
            f"Loss ({found.loss}): its derivative by log λ of each head {law}, in nats a "
            f"token, and the factors λ of the law ({found.family}), at n visible keys"
        )
        parts += [Text(title, style="bold"), "", _table(found), ""]
    lines = [Wrapped(line, bullet=" • ") for line in sentences(found)]
    return Group(*parts, *lines)


def _gate_table(found: LossCalibration) -> NumberTable:
    """The slope of the loss by the gates, and what heads read."""
    names = [f"slope, {_words(window)}" for window in found.choices]
    table = new_table(2, ["layer", "head", *names, "reads"])
    pairs = sorted(zip(found.gates, found.reads, strict=True), key=lambda pair: min(pair[0].slope))[
        :MOST
    ]
    for one, window in pairs:
        reads = Text("all", style="dim") if window is None else Text(_words(window), style="cyan")
        slopes = [_with_error(one, at) for at in range(len(one.slope))]
        table.add_row(str(one.layer), str(one.head), *slopes, reads)
    return table


def _words(window: Window) -> str:
    """A window's size and sinks, as the command accepts them."""
    return f"{window.size},{window.sinks}" if window.sinks else str(window.size)


def _table(found: LossCalibration) -> NumberTable:
    """The slope of the loss and the factors of the heads at each length."""
    pairs = sorted(
        zip(found.slopes, found.factors, strict=True),
        key=lambda pair: -max(map(abs, pair[0].slope)),
    )[:MOST]
    table = new_table(3, ["layer", "head", "n =", *map(str, pairs[0][0].lengths)])
    for one, factors in pairs:
        slopes = [_with_error(one, at) for at in range(len(one.lengths))]
        table.add_row(str(one.layer), str(one.head), Text("slope", style="dim"), *slopes)
        shown = [
            Text("1", style="dim") if factor == 1.0 else Text(f"{factor:.3g}", style="cyan bold")
            for factor in factors
        ]
        table.add_row("", "", Text("factor", style="dim"), *shown)
    return table


def _with_error(one: HeadSlope | GateSlope, at: int) -> str:
    """A head's slope at a length with its standard error."""
    return f"{one.slope[at]:+.4f}±{one.error[at]:.4f}"


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
