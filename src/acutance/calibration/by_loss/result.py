"""The result of a fit to the loss: a law, and the derivative of the loss by every factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from scipy.stats import t as student
from torch import Tensor

from acutance.calibration.fit.result import (
    OTHER_TEXT,
    Calibration,
    Numbers,
    not_fitted,
    of_model,
)
from acutance.calibration.head_laws import HeadLaws
from acutance.capture.find_layers import layer_numbers
from acutance.files import finite
from acutance.report.table import Cell, Column, Table
from acutance.scaling import Window

__all__ = ["GateSlope", "HeadSlope", "LossCalibration"]

#: Heads that the table lists: those with the largest change to first order.
MOST = 20

#: Of the derivatives beyond noise, so many are expected to be 0.
_BY_CHANCE = 0.1


@dataclass(frozen=True)
class HeadSlope:
    """How the loss changes with the factors of one head, to first order.

    Attributes:
        layer: number among the attention layers.
        head: query head.
        module: qualified name of the layer.
        lengths: visible keys n at which there are factors.
        slope: derivative of the mean loss by log λ at each length, without a law, in nats a token:
            0.01 means that a factor of 1.1 adds 0.00095 nat to first order.
        error: its standard error from window to window.
    """

    layer: int
    head: int
    module: str
    lengths: tuple[int, ...]
    slope: Numbers
    error: Numbers


@dataclass(frozen=True)
class GateSlope:
    """How the loss changes if a head computes another output, to first and second order.

    Attributes:
        layer: number among the attention layers.
        head: query head, or key head.
        module: qualified name of the layer.
        slope: for each alternative, derivative of the mean loss by a gate that opens to it, in
            nats a token; negative where the alternative would help.
        error: its standard error from window to window.
        curvature: second-order cost, with the empirical Fisher information as the curvature, in
            nats a token; never negative.
    """

    layer: int
    head: int
    module: str
    slope: Numbers
    error: Numbers
    curvature: Numbers


AnySlope = TypeVar("AnySlope", HeadSlope, GateSlope)


def head_records(
    kind: Callable[..., AnySlope],
    model: torch.nn.Module,
    places: Sequence[tuple[str, int]],
    *columns: Any,
) -> tuple[AnySlope, ...]:
    """One record of a kind for each head, in model order.

    Args:
        kind: of the records: :class:`HeadSlope` or :class:`GateSlope`.
        model: the model.
        places: module name and head of each record.
        columns: what the records hold after the place, a row for each of them.
    """
    names = list(dict.fromkeys(name for name, _ in places))
    numbers = layer_numbers(model, names)
    rows = zip(*([tuple(row) for row in column.tolist()] for column in columns), strict=True)
    found = [
        kind(numbers.get(name, names.index(name)), head, name, *row)
        for (name, head), row in zip(places, rows, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: (one.layer, one.head)))


@dataclass(frozen=True, repr=False)
class LossCalibration(Calibration):
    """The result of :func:`acutance.calibrate` with ``target="loss"``: a law, and what led to it.

    It holds nothing constant, so :attr:`heads` is empty.

    Attributes:
        slopes: for every head, the derivative of the loss by its factors without a law, over the
            fitted and the deciding windows. Heads are chosen by the fitted ones alone.
        factors: for every head in the same order, its factors at the lengths.
        gates: for every head, the derivative of the loss by a gate that opens to each window,
            without any law; empty if no window was to be chosen.
        fitted: windows that the steps read.
        stopped: other windows, which decided how many steps were made.
        delta: mean loss of those with the law that was best on them minus that without.
        error: its standard error.
        choices: the windows that the gates open to; none if no window was to be chosen.
        loss: what was lowered, in words.
        mean_loss: without a law, over the windows that decided, in nats.
    """

    slopes: tuple[HeadSlope, ...] = ()
    factors: tuple[Numbers, ...] = ()
    gates: tuple[GateSlope, ...] = ()
    choices: tuple[Window, ...] = ()
    fitted: int = 0
    stopped: int = 0
    delta: float = 0.0
    error: float = 0.0
    loss: str = ""
    mean_loss: float = 0.0

    @property
    def changed(self) -> int:
        """Heads with a factor other than 1."""
        return sum(any(one != 1.0 for one in row) for row in self.factors)

    @property
    def reads(self) -> tuple[Window | None, ...]:
        """For every head of :attr:`gates`, the window that it reads through; None for all keys."""
        laws = dict(self.layers)
        found: list[Window | None] = []
        for one in self.gates:
            law = laws.get(one.module, HeadLaws())
            found.append(law.window or dict(law.windows).get(one.head))
        return tuple(found)

    @property
    def empty(self) -> bool:
        """Whether no law was found: every head has the factor 1 and reads all its keys."""
        return not self.changed and all(window is None for window in self.reads)

    def table(self) -> Table:
        """A fit to the loss: a table of the gates, one of the heads, then sentences."""
        shown = Table("", (), (), [*sentences(self)])
        if self.slopes:
            shown = replace(_slope_table(self), below=shown)
        return replace(_gate_table(self), below=shown) if self.gates else shown

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; numbers that are not finite become None."""
        return {
            "schema": "acutance.loss_calibration_report/1",
            "law": self.record(),
            "metric": self.metric,
            "family": self.family,
            "passes": self.passes,
            "loss": self.loss,
            "mean_loss": self.mean_loss,
            "delta": self.delta,
            "error": finite(self.error),
            "windows": {str(length): count for length, count in self.windows.items()},
            "fitted": self.fitted,
            "stopped": self.stopped,
            "skipped": dict(self.skipped),
            "changed": self.changed,
            "heads": [
                finite(asdict(one)) | {"factors": list(row)}
                for one, row in zip(self.slopes, self.factors, strict=True)
            ],
            "choices": [window.to_dict() for window in self.choices],
            "gates": [
                finite(asdict(one)) | {"window": None if window is None else window.to_dict()}
                for one, window in zip(self.gates, self.reads, strict=True)
            ],
        }


def significant(p: Sequence[float] | Tensor, share: float) -> Tensor:
    """Which tests are significant at a false discovery rate (Benjamini and Hochberg).

    Args:
        p: two-sided p-values.
        share: expected fraction of false ones among the significant tests, at most.

    Returns:
        Boolean, shaped as ``p``.

    Example:
        >>> significant([0.001, 0.02, 0.04, 0.9], 0.05).tolist()
        [True, True, False, False]

    Source:
        Benjamini & Hochberg (1995), doi:10.1111/j.2517-6161.1995.tb02031.x.
    """
    values = torch.as_tensor(p, dtype=torch.float64).flatten()
    order = values.argsort()
    bound = share * torch.arange(1, len(values) + 1) / len(values)
    below = (values[order] <= bound).nonzero()
    chosen = torch.zeros(len(values), dtype=torch.bool)
    if len(below):
        chosen[order[: int(below.max()) + 1]] = True
    return chosen.view(torch.as_tensor(p).shape)


def beyond_noise(slope: Tensor, error: Tensor, windows: int) -> Tensor:
    """Which derivatives differ from 0, one in ten of those by chance.

    Args:
        slope: derivatives.
        error: their standard errors, the same shape.
        windows: windows that gave them.

    Returns:
        Boolean, the same shape.

    Example:
        >>> beyond_noise(torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.1]), 8).tolist()
        [True, False]
    """
    quotient = (slope / error).abs().nan_to_num(0.0)
    p = 2 * student.sf(quotient.numpy(), windows - 1)
    return significant(torch.as_tensor(p), _BY_CHANCE)


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
