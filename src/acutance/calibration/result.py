"""Results of a fit: a law, with what was measured of each head or the derivatives of the loss."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from scipy.stats import false_discovery_control
from scipy.stats import t as student
from torch import Tensor

from acutance.calibration.law import HeadLaws, Law
from acutance.calibration.measured import TARGETS, unit_of
from acutance.capture.find_layers import layer_numbers
from acutance.files import as_json, finite, write_text
from acutance.report.table import Cell, Column, Table
from acutance.scaling import Window
from acutance.summary.layer import UNTRAINED, not_loaded_sentence

#: The last line of a report: what the law was not judged on.
OTHER_TEXT = (
    "A law is fitted to, and judged on, one kind of text; it can raise the loss of another. Before "
    "you use it, judge it on yours: acutance judge MODEL --law LAW --text FILE."
)
#: What a table does where nothing was measured.
BEYOND = (
    "beyond the longest calibrated length each head's factor goes on as √(a + b log n), fitted to "
    "its last two octaves, without measurement; rows shorter than the shortest length use its "
    "factor"
)
#: Heads that a table lists at most: of a fit to a metric, and of one to the loss.
_MOST_HEADS, _MOST_SLOPES = 64, 20
#: Of the derivatives beyond noise, so many are expected to be 0.
_BY_CHANCE = 0.1

#: A target is held where the value is within this share of it.
HELD = 0.05
#: What each status of a length means.
STATUSES = {
    "held": "within 5 % of the target with the law",
    "missed": "more than 5 % from the target with the law",
    "kept": "unchanged: without a law its difference from the target is insignificant or below 1 %",
    "impossible": "the target cannot be reached with this number of keys",
    "limited": "the factor is at its limit and the target is not reached",
}
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class HeadCalibration:
    """One head: numbers at each of its lengths.

    Attributes:
        layer: number among the attention layers.
        head: query head.
        module: qualified name of the layer.
        lengths: visible keys n.
        target: what was wanted.
        before: what rows of n keys have without a law.
        before_error: its standard error over parts of the text.
        after: what was measured under the law.
        after_error: its standard error.
        factors: of the law.
        factor_errors: their standard errors, by the measured slope.
        status: one of :data:`STATUSES`.
    """

    layer: int
    head: int
    module: str
    lengths: tuple[int, ...]
    target: Numbers
    before: Numbers
    before_error: Numbers
    after: Numbers
    after_error: Numbers
    factors: Numbers
    factor_errors: Numbers
    status: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Calibration(Law):
    """The result of :func:`acutance.calibrate`: a law to apply and save, with its measurements.

    :meth:`Law.save` writes the law alone, :meth:`to_json` everything.

    Attributes:
        heads: every head that was fitted, in model order.
        metric: what was held constant.
        value: the wanted value; None where it is each head's own at the reference.
        reference: length whose value is kept, or at which short rows' factors end.
        family: the law that was requested.
        passes: measurements made.
        windows: length and number of windows measured.
        skipped: module name and why it was not fitted.
    """

    heads: tuple[HeadCalibration, ...] = ()
    metric: str = "entropy"
    value: float | None = None
    reference: int = 0
    family: str = "table"
    passes: int = 0
    windows: Mapping[int, int] = field(default_factory=dict, hash=False)
    skipped: Mapping[str, str] = field(default_factory=dict, hash=False)

    def counts(self) -> dict[str, int]:
        """How many (head, length) pairs have each status.

        The reference length is left out where its own value is the target.
        """
        counts = dict.fromkeys(STATUSES, 0)
        for head in self.heads:
            for n, status in zip(head.lengths, head.status, strict=True):
                if self.value is not None or n != self.reference or len(head.lengths) == 1:
                    counts[status] += 1
        return counts

    def worst(self, *, law: bool = True) -> float:
        """Largest distance from the target, over heads and lengths that can reach it.

        The distance is divided by the target, or for targets near 0 by a size at which 5 % is of
        no interest (0.2 nats for entropy).

        Args:
            law: measure under the law; False for the model without it.
        """
        least = TARGETS[self.metric].floor / HELD
        distances = [
            abs(value - target) / max(abs(target), least)
            for head in self.heads
            for value, target, status in zip(
                head.after if law else head.before, head.target, head.status, strict=True
            )
            if status != "impossible"
        ]
        return max(distances, default=0.0)

    def table(self) -> Table:
        """The values and factors at each n of every head, or of those with the largest factors."""
        lengths = sorted({n for head in self.heads for n in head.lengths})
        largest = sorted(
            self.heads, key=lambda head: -max(abs(math.log(factor)) for factor in head.factors)
        )
        rows = []
        for head in sorted(largest[:_MOST_HEADS], key=lambda head: (head.layer, head.head)):
            names: list[int | None] = [head.layer, head.head]
            for name, values, errors, style in (
                ("before", head.before, head.before_error, ""),
                ("after", head.after, head.after_error, "bold"),
                ("factor", head.factors, head.factor_errors, "cyan"),
            ):
                texts = dict(zip(head.lengths, map(_with_error, values, errors), strict=True))
                cells = [Cell(texts.get(n, "–"), style) for n in lengths]
                rows.append([*names, Cell(name, "dim"), *cells])
                names = [None, None]
        what = f"kept at its value for n = {self.reference}"
        if self.value is not None:
            what = f"{self.value:g}{unit_of(self.metric)} at every n"
        title = (
            f"{self.metric.replace('_', ' ')}, {what}: without and with a law ({self.family}), "
            "at n visible keys"
        )
        headings = ("layer", "head", "n =", *map(str, lengths))
        return Table(title, [*map(Column, headings)], rows, [*self.sentences()], keys=3)

    def sentences(self) -> Iterator[str]:
        """What a calibration achieved and what it did not, one sentence for each point."""
        yield from self._of_model()
        yield (
            f"Largest distance from the target over heads and n: {self.worst(law=False):.0%} "
            f"without, {self.worst():.1%} with the law (held means within {HELD:.0%}, or "
            f"{TARGETS[self.metric].floor:g}{unit_of(self.metric)})."
        )
        counts = self.counts()
        several = "; ".join(
            f"{count} {name}, {STATUSES[name]}" for name, count in counts.items() if count
        )
        yield f"Of {sum(counts.values())} pairs of head and n: {several}."
        if len(self.heads) > _MOST_HEADS:
            yield f"The table has the {_MOST_HEADS} heads with the largest factors; --json has all."
        windows = ", ".join(f"{count} of {length} tokens" for length, count in self.windows.items())
        yield f"Measured {self.passes} times on windows: {windows}; ± is one standard error."
        yield from self._not_fitted()
        beyond = f"beyond n = {self.lengths[-1]} nothing was measured"
        yield f"{(BEYOND if self.family == 'table' else beyond).capitalize()}."
        yield OTHER_TEXT

    def _of_model(self) -> Iterator[str]:
        """Sentences on a model whose weights are missing or look untrained."""
        if self.weights_not_loaded is not None:
            yield not_loaded_sentence(self.weights_not_loaded)
        if self.untrained:
            yield UNTRAINED

    def _not_fitted(self) -> Iterator[str]:
        """Sentences on the layers that were left out."""
        for name, why in list(self.skipped.items())[:4]:
            yield f"Not fitted: {name}: {why}."
        if len(self.skipped) > 4:
            yield f"Not fitted: {len(self.skipped) - 4} more layers."

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; numbers that are not finite become None."""
        names = "metric", "value", "reference", "family", "passes"
        record = {
            "schema": "acutance.calibration_report/1",
            "law": self.record(),
            **{name: getattr(self, name) for name in names},
            "windows": {str(length): count for length, count in self.windows.items()},
            "skipped": self.skipped,
            "statuses": STATUSES,
            "beyond": BEYOND,
            "counts": self.counts(),
            "heads": list(map(asdict, self.heads)),
        }
        return cast(dict[str, Any], finite(record))

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict`, whole or not at all."""
        write_text(path, as_json(self.to_dict(), indent=1) + "\n")


def _with_error(value: float, error: float) -> str:
    """A number with its standard error, unless that is 0, unknown or far larger; "–" for NaN."""
    if math.isnan(value):
        return "–"
    known = 0 < error <= 10 * max(abs(value), 1e-9)
    return f"{value:.3g}" + (f"±{error:.1g}" if known else "")


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
        of_gates = [(laws.get(gate.module, HeadLaws()), gate.head) for gate in self.gates]
        return tuple(law.window or dict(law.windows).get(head) for law, head in of_gates)

    @property
    def empty(self) -> bool:
        """Whether no law was found: every head has the factor 1 and reads all its keys."""
        return not self.changed and all(window is None for window in self.reads)

    def table(self) -> Table:
        """A fit to the loss: a table of the gates, one of the heads, then sentences."""
        shown = Table("", (), (), [*self.sentences()])
        if self.slopes:
            shown = replace(_slope_table(self), below=shown)
        return replace(_gate_table(self), below=shown) if self.gates else shown

    def sentences(self) -> Iterator[str]:
        """What the fit changed and how it changed the loss, one sentence for each point."""
        yield from self._of_model()
        windows = f"{self.stopped} windows that were not fitted to"
        effect = f"{self.delta:+.4f} ± {self.error:.4f} nat"
        streaming = sum(window is not None for window in self.reads)
        if not self.empty:
            yield (
                f"With the law the loss of {windows} changes by {effect}, from "
                f"{self.mean_loss:.3f}. They decided what the law is: judge it on other text."
            )
        else:
            best = f" (the best changes it by {effect})" if self.delta or self.error else ""
            yield (
                f"No law was found that lowers the loss of {windows} beyond noise{best}: every "
                "head stays as it is."
            )
        if self.gates and streaming:
            rest = "; for the others no gain was found beyond noise"
            yield (
                f"{streaming} of {len(self.gates)} heads read through a window"
                f"{rest if streaming < len(self.gates) else ''}."
            )
        if self.slopes and not self.changed and not self.empty:
            yield "Every head has the factor 1: no other factor lowers the loss beyond noise."
        if self.changed:
            yield (
                f"{self.changed} of {len(self.slopes)} heads have a factor other than 1; on the "
                f"{self.fitted} fitted windows alone, the derivatives of the others are not beyond "
                f"noise. The table's derivatives are over all {self.fitted + self.stopped} windows."
            )
        if max(len(self.slopes), len(self.gates)) > _MOST_SLOPES:
            most = f"the {_MOST_SLOPES} heads with the largest derivatives"
            yield f"A table has {most}; --json has all."
        passes = f"{self.passes} pass{'' if self.passes == 1 else 'es'}"
        yield f"Fitted to {self.fitted} windows in {passes}; ± is one standard error."
        yield from self._not_fitted()
        if self.family == "table" and self.changed:
            first, last = self.slopes[0].lengths[0], self.slopes[0].lengths[-1]
            yield (
                f"Beyond n = {last} each head keeps its last factor, without measurement; rows "
                f"with fewer than {first} keys use that length's factor."
            )
        if not self.empty:
            yield OTHER_TEXT

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; numbers that are not finite become None."""
        names = "metric", "family", "passes", "loss", "mean_loss", "delta", "error"
        record = {
            "schema": "acutance.loss_calibration_report/1",
            "law": self.record(),
            **{name: getattr(self, name) for name in (*names, "fitted", "stopped", "changed")},
            "windows": {str(length): count for length, count in self.windows.items()},
            "skipped": self.skipped,
            "heads": [
                asdict(head) | {"factors": factors}
                for head, factors in zip(self.slopes, self.factors, strict=True)
            ],
            "choices": [window.to_dict() for window in self.choices],
            "gates": [
                asdict(gate) | {"window": None if window is None else window.to_dict()}
                for gate, window in zip(self.gates, self.reads, strict=True)
            ],
        }
        return cast(dict[str, Any], finite(record))


def beyond_noise(slope: Tensor, error: Tensor, windows: int) -> Tensor:
    """Which derivatives differ from 0, one in ten of those by chance (Benjamini and Hochberg).

    Args:
        slope: derivatives.
        error: their standard errors, the same shape.
        windows: windows that gave them; one shows no noise, and nothing is beyond it.

    Returns:
        Boolean, the same shape.

    Example:
        >>> beyond_noise(torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.1]), 8).tolist()
        [True, False]

    Source:
        Benjamini & Hochberg (1995), doi:10.1111/j.2517-6161.1995.tb02031.x.
    """
    quotient = (slope / error).abs().nan_to_num(0.0).flatten()
    p = torch.as_tensor(2 * student.sf(quotient.numpy(), windows - 1)).nan_to_num(1.0)
    return torch.as_tensor(false_discovery_control(p) <= _BY_CHANCE).view(slope.shape)


def _gate_table(found: LossCalibration) -> Table:
    """The slope of the loss by the gates, and what heads read."""
    pairs = zip(found.gates, found.reads, strict=True)
    rows = []
    for gate, window in sorted(pairs, key=lambda pair: min(pair[0].slope))[:_MOST_SLOPES]:
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
    for head, factors in sorted(pairs, key=lambda pair: -max(map(abs, pair[0].slope)))[
        :_MOST_SLOPES
    ]:
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
