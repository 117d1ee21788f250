"""Losses of windows under changes of a model, each measured once and written as it is measured."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.law import check_positions
from acutance.calibration.losses import AnyLoss, Loss, Scored, choose_loss
from acutance.calibration.measured import student_t_quantile
from acutance.calibration.windows import (
    AnyBatches,
    Turn,
    batches_by_length,
    check_lengths,
    cut,
    digest,
)
from acutance.corpus.texts import model_digest
from acutance.files import refuse_replacing, tidy, write_bytes
from acutance.shapes import check_count
from acutance.summary.files import check_settings, parse, read, sealed

SCHEMA = "acutance.losses/1"
#: States of earlier versions: of a fit or a search for a plan, of ``extend``, and of ``judge``.
_EARLIER = _FIT, _SEARCH, _COMPARISON = (
    "acutance.loss_calibration/1",
    "acutance.extension_state/1",
    "acutance.judgement_state/1",
)

#: What states of earlier versions are, where their schema says it.
_WRITTEN = {_SEARCH: "search to resume", _COMPARISON: "comparison to resume"}

#: Called after each run of the model: tokens just read, the pass from 1, and passes at most.
Advance = Callable[[int, int, int], None]

#: Every so many windows, one decides when to stop and is not fitted to.
_STOPS = 3
#: Windows that are fitted to, and that decide, at least.
_LEAST = (4, 2)
#: Level of the one-sided interval of a difference.
_LEVEL = 0.95


_NONE = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Reading:
    """What one run of a model gave.

    Attributes:
        loss: sum over predictions, in nats, float64; for a comparison (windows, ranges of n).
        count: number of predictions, the same shape.
        gradient: derivatives of the loss, or other numbers that were read; empty if there are none.
        seconds: that it took.
    """

    loss: Tensor
    count: Tensor
    gradient: Tensor = _NONE
    seconds: float = 0.0

    @classmethod
    def of(cls, scored: Scored, gradient: Tensor | None = None) -> Reading:
        """The reading of a batch from the loss of its predictions."""
        known = ~scored.loss.isnan()
        none = _NONE if gradient is None else gradient
        return cls(scored.loss[known].sum(), known.sum(), none)

    @classmethod
    def total(cls, readings: Sequence[Reading]) -> Reading:
        """The sum of several readings."""
        losses, counts, gradients = (
            torch.stack([getattr(one, name) for one in readings]).sum(0)
            for name in ("loss", "count", "gradient")
        )
        return cls(losses, counts, gradients)


@dataclass(frozen=True)
class Saving:
    """Where a run keeps what it measures.

    Attributes:
        path: file; None writes none.
        resume: whether to continue from what it holds.
        every: windows between two writes, at least.
    """

    path: str | None = None
    resume: bool = False
    every: int = 1

    @classmethod
    def to(
        cls,
        save: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        save_every: int = 1,
        endings: Iterable[str] = ("",),
    ) -> Saving:
        """Check the arguments of a function that saves.

        Args:
            save: file, or None.
            resume: continue from what it holds.
            overwrite: replace it.
            save_every: windows between two writes, at least.
            endings: of the names of all files that the run writes.

        Raises:
            FileExistsError: if a file is there, and is neither resumed nor overwritten.
            ValueError: if there is no file to resume, or ``save_every`` is below 1.
        """
        name = None if save is None else os.fspath(save)
        for ending in endings:
            refuse_replacing(
                None if name is None else name + ending, resume=resume, overwrite=overwrite
            )
        return cls(name, resume, check_count("save_every", save_every, 1))

    def beside(self, ending: str) -> Saving:
        """The same for a file whose name ends so."""
        return replace(self, path=None if self.path is None else self.path + ending)


class LossTable:
    """Readings by change of the model and window, each made once and written as it is made.

    As a context, it writes what is not written yet when it ends, also after an error or Ctrl-C.

    Args:
        settings: everything else that decides the numbers, in the order in which it is compared.
        saving: its file.
        what: what the file holds, for messages.
        rows: windows of each batch, by which the comparisons of earlier versions are read.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no such table, or has other settings, which the message names.

    Example:
        >>> table = LossTable({}, Saving())
        >>> one = Reading(torch.tensor(8.0), torch.tensor(4))
        >>> table.get("ssmax", 0, lambda: one) is table.get("ssmax", 0, lambda: 1 / 0)
        True
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        saving: Saving,
        what: str = "fit to the loss that can be resumed",
        rows: Sequence[int] = (),
    ) -> None:
        self._settings, self._saving, self._what = dict(settings), saving, what
        self._unsaved, self._made = 0, False
        #: readings by change and window
        self.readings: dict[tuple[str, int], Reading] = {}
        self._unnamed: list[Reading] = []  # of an earlier version, in the order of their making
        if saving.resume and saving.path is not None and os.path.exists(saving.path):
            self._resume(saving.path, rows)

    def __bool__(self) -> bool:
        return bool(self.readings or self._unnamed)

    def __enter__(self) -> LossTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None or issubclass(kind, Exception | KeyboardInterrupt):
            self.write()

    def get(
        self, change: str, window: int, make: Callable[[], Reading], windows: int = 1
    ) -> Reading:
        """The reading of a window under a change: what the table holds, else what ``make`` reads.

        Args:
            change: a text that identifies the change, and what is read; empty for none.
            window: number of the window, or of the batch.
            make: runs the model.
            windows: how many windows are done with it.
        """
        key = change, window
        if self._unnamed:  # an earlier version read some windows twice, and kept both readings
            self.readings[key] = self._unnamed.pop(0)
        if key not in self.readings:
            started = time.monotonic()
            self.readings[key] = replace(make(), seconds=time.monotonic() - started)
            self._made = True
            self._unsaved += windows
            if self._unsaved >= self._saving.every:
                self.write()
        return self.readings[key]

    def write(self) -> None:
        """Write what was made as one safetensors file, whole or not at all."""
        from safetensors.torch import save

        if self._saving.path is None or not self._made:
            return
        numbers: dict[str, list[Tensor]] = {"loss": [], "count": [], "gradient": []}
        rows = []
        changes = list(dict.fromkeys(change for change, _ in self.readings))
        numbered = {change: number for number, change in enumerate(changes)}
        for (change, window), reading in self.readings.items():
            for name, parts in numbers.items():
                parts.append(getattr(reading, name).flatten().double().cpu())
            shapes = list(reading.loss.shape), list(reading.gradient.shape)
            rows.append([numbered[change], window, reading.seconds, *shapes])
        tensors = {name: torch.cat(parts) for name, parts in numbers.items()}
        header = {
            "schema": SCHEMA,
            "what": self._what,
            "settings": json.dumps(self._settings),
            "changes": json.dumps(changes),
            "rows": json.dumps(rows),
        }
        write_bytes(self._saving.path, save(tensors, metadata=sealed(header, tensors)))
        self._unsaved, self._made = 0, False

    def _resume(self, path: str, rows: Sequence[int]) -> None:
        """Take the readings of a file."""
        with _refusing(path, self._what):
            header, tensors = read(path, (SCHEMA, *_EARLIER), "table of losses")
            written = header.get("what", _WRITTEN.get(header["schema"], self._what))
            if written != self._what:
                raise ValueError(f"it contains a {written}")
            before = parse(header, "settings")
        check_settings(path, before, self._settings)
        with _refusing(path, self._what):
            if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                raise ValueError("a reading is not a number")
            if bool((tensors["count"] < 0).any()):
                raise ValueError("a number of predictions is negative")
            if header["schema"] == _FIT:
                parts = (tensors[name] for name in ("loss", "count", "gradient"))
                self._unnamed = [Reading(*one) for one in zip(*parts, strict=True)]
            elif header["schema"] == _SEARCH:
                self.readings = _of_search(header, tensors)
            elif header["schema"] == _COMPARISON:
                self.readings = _of_comparison(before["laws"], tensors, rows)
            else:
                changes, found = (parse(header, name, list) for name in ("changes", "rows"))
                self.readings = _of_table(changes, found, tensors)
        tidy(path)


@contextmanager
def _refusing(path: str, what: str) -> Iterator[None]:
    """Context in which an error says that a file contains no such thing."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} contains no {what}: {reason}") from error


def _of_table(
    changes: list[Any], rows: list[Any], tensors: Mapping[str, Tensor]
) -> dict[tuple[str, int], Reading]:
    """The readings of a file of this version."""
    numbers = [tensors[name] for name in ("loss", "count", "gradient")]
    starts = [0, 0, 0]
    readings = {}
    for number, window, seconds, shape, gradient_shape in rows:
        if type(number) is not int or not 0 <= number < len(changes) or type(window) is not int:
            raise ValueError("a row has no change and window")
        change = changes[number]
        if type(change) is not str:
            raise ValueError("a change has no text")
        parts = []
        for index, size in enumerate((shape, shape, gradient_shape)):
            stop = starts[index] + math.prod(size)
            parts.append(numbers[index][starts[index] : stop].view(size))
            starts[index] = stop
        readings[change, window] = Reading(parts[0], parts[1], parts[2], float(seconds))
    if starts != [tensor.numel() for tensor in numbers]:
        raise ValueError("its rows do not have all of its numbers")
    return readings


def _of_search(
    header: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[tuple[str, int], Reading]:
    """The readings of a state of ``extend`` of an earlier version."""
    readings = {
        (change, window): Reading(loss[None], count[None], seconds=float(seconds))
        for (change, window, seconds), loss, count in zip(
            parse(header, "runs", list), tensors["loss"], tensors["count"], strict=True
        )
    }
    names, seconds = parse(header, "slopes", list) if "slopes" in header else ([], 0.0)
    layers: Counter[str] = Counter()
    for at, (key, _) in enumerate(names):
        layers[key] += 1
        slopes = tensors[f"slopes.{at}"]
        took = float(seconds) if at == 0 else 0.0  # it is that of all layers
        readings[key, -layers[key]] = Reading(_NONE, _NONE, slopes, took)
    return readings


def _of_comparison(
    laws: Sequence[str], tensors: Mapping[str, Tensor], rows: Sequence[int]
) -> dict[tuple[str, int], Reading]:
    """The readings of a state of ``judge`` of an earlier version, whose batches have these rows."""
    counts = tensors["count"].split(list(rows))
    return {
        (numbered_change(run, change), batch): Reading(loss, count)
        for run, change in enumerate(["", *laws])
        for batch, (loss, count) in enumerate(
            zip(tensors["loss"][run].split(list(rows)), counts, strict=True)
        )
        if bool(tensors["done"][batch, run])
    }


def numbered_change(number: int, words: str) -> str:
    """The text of a compared change, the number-th: texts of two changes may be equal.

    The model without a change is number 0.
    """
    return f"{number}: {words}" if number else ""


def by_range(scored: Scored, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Sums of the losses of each window by n, the tokens that a prediction could read.

    Args:
        scored: the predictions of a batch.
        ranges: first and last n of each range, both included; 1 also has 0.

    Returns:
        The sums and the numbers of predictions, (windows, ranges) float64 each.
    """
    known = ~scored.loss.isnan()
    place = torch.bucketize(scored.n, torch.tensor([last for _, last in ranges]))
    sums, counts = (
        torch.zeros(len(scored.n), len(ranges) + 1, dtype=torch.float64).scatter_add_(1, place, one)
        for one in (torch.where(known, scored.loss, 0.0), known.double())
    )
    return sums[:, :-1], counts[:, :-1]


# -- windows of a text that a fit reads ------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """All batches of one window: the window itself, or one cut of it for each length.

    Attributes:
        number: of the window, in the order of the text.
        turns: the batches.
    """

    number: int
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all batches."""
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True)
class Windows:
    """The windows that a model with a loss is run on.

    Attributes:
        model: the model.
        loss: its loss.
        units: the windows, in the order of the text.
        lengths: their lengths, rising.
    """

    model: torch.nn.Module
    loss: Loss
    units: tuple[Unit, ...]
    lengths: tuple[int, ...]

    @property
    def device(self) -> torch.device | None:
        """Device of the model's first parameter; None for a model without parameters."""
        return next((part.device for part in self.model.parameters()), None)

    @property
    def counts(self) -> dict[int, int]:
        """Number of windows by length."""
        counts: dict[int, int] = {}
        for unit in self.units:
            for turn in unit.turns:
                counts[turn.length] = counts.get(turn.length, 0) + turn.groups.numel()
        return counts

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must share, as JSON values."""
        return {
            "model": model_digest(self.model),
            "text": digest([turn for unit in self.units for turn in unit.turns]),
            "loss": self.loss.words,
            "lengths": list(self.lengths),
            "windows": len(self.units),
            "weights": str(next((part.dtype for part in self.model.parameters()), None)),
        }


def read_windows(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    lengths: Sequence[int] | None,
    loss: AnyLoss | None,
) -> Windows:
    """Check a model, its loss and its batches, and cut them into windows.

    Raises:
        LossError: if there is no such loss.
        TypeError: if ``model`` is not a module.
        ValueError: if the text is too short or lengths are out of range.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = choose_loss(model, loss)
    found = batches_by_length(batches.split(1) if isinstance(batches, Tensor) else batches)
    places = check_lengths(lengths, found)
    check_positions(model, places)
    # a causal model's long windows have the short ones inside
    used = places if chosen.reads_all else places[-1:]
    if 0 in found:
        cuts = [cut({0: [batch]}, used) for batch in found[0]]
    else:
        cuts = [[] for _ in found[used[-1]]]
        for length in used:
            for index, batch in enumerate(found[length]):
                cuts[index * len(cuts) // len(found[length])] += cut({length: [batch]}, [length])
    turns = [tuple(one) for one in cuts if one]
    return Windows(model, chosen, tuple(map(Unit, range(len(turns)), turns)), places)


def split_units(windows: Windows) -> tuple[list[Unit], list[Unit]]:
    """The windows that are fitted to, two of three, and those that decide.

    Raises:
        ValueError: if there are fewer than six.
    """
    units = windows.units
    stopping = [unit for unit in units if unit.number % _STOPS == _STOPS - 1]
    fitting = [unit for unit in units if unit.number % _STOPS != _STOPS - 1]
    if len(fitting) < _LEAST[0] or len(stopping) < _LEAST[1]:
        raise ValueError(
            f"target='loss' needs at least {sum(_LEAST)} windows of {windows.lengths[-1]} tokens, "
            f"{_LEAST[0]} to fit to and {_LEAST[1]} to decide when to stop, got {len(units)}: "
            "give more windows, more text, or shorter lengths"
        )
    return fitting, stopping


def read_units(
    windows: Windows,
    units: Sequence[Unit],
    table: LossTable,
    change: str,
    compute: Callable[[dict[str, Any]], Reading],
    advance: Callable[[int], object],
) -> list[Reading]:
    """The readings of windows under a change, from the table or computed batch by batch.

    Args:
        windows: the windows of the text.
        units: those that are read.
        table: where the readings are kept.
        change: a text that identifies the change, and what is read.
        compute: the reading of a batch, given as keywords of the model.
        advance: called after each window with its tokens.
    """
    if not table:  # a resumed run has checked the loss before
        windows.loss.check(windows.model, windows.units[0].turns[-1].inputs(windows.device))
    readings = []
    for unit in units:

        def make(unit: Unit = unit) -> Reading:
            batches = [turn.inputs(windows.device) for turn in unit.turns]
            return Reading.total([compute(batch) for batch in batches])

        readings.append(table.get(change, unit.number, make))
        advance(unit.tokens)
    return readings


# -- means over windows ----------------------------------------------------------------------------


def mean_loss(readings: Sequence[Reading]) -> float:
    """Mean loss over the predictions of several windows, in nats."""
    return float(sum(one.loss for one in readings) / sum(one.count for one in readings))


def mean_gradient(readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
    """Derivatives of the mean loss by each parameter, and their standard errors over windows."""
    gradients = torch.stack([one.gradient for one in readings])
    return ratio(gradients, torch.stack([one.count for one in readings]))


def ratio(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over windows of ``sums`` divided by that of ``counts``, and its standard error.

    ``sums`` is (windows, ...) and ``counts`` (windows,) or of the same shape.
    """
    counts = counts.double()
    counts = counts.view(*counts.shape, *[1] * (sums.dim() - counts.dim()))
    total, number = counts.sum(0), len(counts)
    mean = sums.sum(0) / total
    away = (sums - mean * counts).square().sum(0)
    return mean, (away * number / max(1, number - 1)).sqrt() / total


def difference(before: Sequence[Reading], after: Sequence[Reading]) -> tuple[float, float]:
    """Mean loss after minus before on the same windows, with its standard error."""
    sums = torch.stack([b.loss - a.loss for a, b in zip(before, after, strict=True)])
    mean, error = ratio(sums, torch.stack([one.count for one in before]))
    return float(mean), float(error)


def margin(error: float, windows: int) -> float:
    """What a mean difference over windows must be below 0 to be so at one-sided 95 % confidence.

    Args:
        error: standard error of the difference.
        windows: number of windows.
    """
    return student_t_quantile(windows - 1, _LEVEL) * error
