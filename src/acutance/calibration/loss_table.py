"""Losses of windows under changes of a model, each measured once and written as it is measured."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from acutance.calibration.law import check_positions
from acutance.calibration.losses import AnyLoss, Loss, LossError, Scored, choose_loss
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

SCHEMA = "acutance.losses/2"
#: States of earlier versions: of one table, whose values are called gradients; of a fit or a search
#: for a plan; of ``extend``; and of ``judge``.
_EARLIER = _ONE, _FIT, _SEARCH, _COMPARISON = (
    "acutance.losses/1",
    "acutance.loss_calibration/1",
    "acutance.extension_state/1",
    "acutance.judgement_state/1",
)

#: What tables hold, for messages.
FIT, SEARCH = "fit to the loss that can be resumed", "search to resume"
COMPARISON = "comparison to resume"
#: What states of earlier versions are, where their schema says it.
_WRITTEN = {_SEARCH: SEARCH, _COMPARISON: COMPARISON}


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
        values: what else was read: derivatives of the loss, or statistics; empty if nothing was.
        seconds: that it took.
    """

    loss: Tensor
    count: Tensor
    values: Tensor = _NONE
    seconds: float = 0.0

    @classmethod
    def of(cls, scored: Scored, values: Tensor = _NONE) -> Reading:
        """The reading of a batch from the loss of its predictions."""
        known = ~scored.loss.isnan()
        return cls(scored.loss[known].sum(), known.sum(), values)


#: A file of tables, its header and its columns.
State: TypeAlias = tuple[str, dict[str, str], dict[str, Tensor]]

#: The columns of a table: the numbers of its readings, one after the other.
_COLUMNS = ("loss", "count", "values")
#: What the header says of a table.
_FIELDS = ("what", "settings", "changes", "rows")


class Saving:
    """The file in which a run keeps what it measures: one table of losses, or several.

    Args:
        path: the file; None writes none.
        resume: whether to continue from what it holds.
        every: windows between two writes, at least.
        tables: what each table holds, for messages, by its name.
    """

    def __init__(
        self,
        path: str | None = None,
        resume: bool = False,
        every: int = 1,
        tables: Mapping[str, str] = MappingProxyType({"": FIT}),
    ) -> None:
        self.path, self.every, self.tables = path, every, tables
        self._resume = resume and path is not None
        self._header: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        self._earlier: State | None = None  # the table without a name of an earlier version

    @classmethod
    def to(
        cls,
        save: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        save_every: int = 1,
        tables: Mapping[str, str] = MappingProxyType({"": FIT}),
    ) -> Saving:
        """Check the arguments of a function that saves.

        Args:
            save: file, or None.
            resume: continue from what it holds.
            overwrite: replace it.
            save_every: windows between two writes, at least.
            tables: what each table holds, by its name. Earlier versions had a file for each, with
                the name at the end.

        Raises:
            FileExistsError: if a file is there, and is neither resumed nor overwritten.
            ValueError: if there is no file to resume, or ``save_every`` is below 1.
        """
        path = None if save is None else os.fspath(save)
        for name in tables:
            file = None if path is None else path + name
            refuse_replacing(file, resume=resume, overwrite=overwrite)
        return cls(path, resume, check_count("save_every", save_every, 1), tables)

    def written(self, name: str) -> State | None:
        """A table that is resumed, of this file or of an earlier version's; None if there is none.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it has no such content, or tables of another function.
        """
        if self._resume and not self._header and os.path.exists(self.path or ""):
            path, header, tensors = self._read("")
            if header["schema"] == SCHEMA:
                self._header, self._tensors = header, tensors
            else:
                self._earlier = path, header, tensors
        if self._earlier is not None and not name:
            return self._earlier
        if any(field + name in self._header for field in _FIELDS):
            state: State = (self.path or "", self._header, self._tensors)
        elif name and self._resume and os.path.exists(f"{self.path}{name}"):
            state = self._read(name)
        else:
            return None
        path, header, tensors = state
        if header["schema"] != SCHEMA:
            return state
        with _refusing(path, self.tables[name]):
            fields = {field: header[field + name] for field in _FIELDS}
            columns = {column: tensors[column + name] for column in _COLUMNS}
        return path, {"schema": SCHEMA, **fields}, columns

    def _read(self, name: str) -> State:
        """The content of the file of a table, all of whose tables must be those of this run."""
        path, what = f"{self.path}{name}", self.tables[name]
        tidy(path)
        with _refusing(path, what):
            header, tensors = read(path, (SCHEMA, *_EARLIER), "table of losses")
            found = {name: header.get("what", _WRITTEN.get(header["schema"], what))}
            if header["schema"] == SCHEMA:
                named = [key for key in header if key.startswith(_FIELDS[0])]
                found = {key.removeprefix(_FIELDS[0]): header[key] for key in named}
            for table, contains in found.items():
                if table not in self.tables:
                    raise ValueError(f"it contains a table {table!r:.40}, which this run has not")
                if contains != self.tables[table]:
                    raise ValueError(f"it contains a {contains}")
        return path, header, tensors

    def write(self, name: str, fields: Mapping[str, str], columns: Mapping[str, Tensor]) -> None:
        """Write a table, and the others as they were, whole or not at all.

        Until the table without a name is written anew, an earlier version's file keeps it.
        """
        from safetensors.torch import save

        self._header |= {"schema": SCHEMA} | {key + name: text for key, text in fields.items()}
        self._tensors |= {key + name: column for key, column in columns.items()}
        content = save(self._tensors, metadata=sealed(self._header, self._tensors))
        self._earlier = self._earlier if name else None
        write_bytes(f"{self.path}{name if self._earlier else ''}", content)


class LossTable:
    """Readings by change of the model and window, each made once and written as it is made.

    As a context, it writes what is not written yet when it ends, also after an error or Ctrl-C.

    Args:
        settings: everything else that decides the numbers, in the order in which it is compared.
        saving: its file.
        rows: windows of each batch, by which the comparisons of earlier versions are read.
        name: of the table, in a file of several.

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
        rows: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self._settings, self._saving, self._name = settings, saving, name
        self._what = saving.tables[name]
        self._unsaved, self._made = 0, False
        #: readings by change and window
        self.readings: dict[tuple[str, int], Reading] = {}
        self._unnamed: list[Reading] = []  # of an earlier version, in the order of their making
        self._resume(rows)

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
        """Write the table if it has a file and anything was made."""
        if self._saving.path is None or not self._made:
            return
        changes = list(dict.fromkeys(change for change, _ in self.readings))
        numbered = {change: number for number, change in enumerate(changes)}
        rows = [
            [numbered[change], window, one.seconds, list(one.loss.shape), list(one.values.shape)]
            for (change, window), one in self.readings.items()
        ]
        columns = {
            name: torch.cat(
                [getattr(one, name).flatten().double().cpu() for one in self.readings.values()]
            )
            for name in _COLUMNS
        }
        texts = (self._what, *map(json.dumps, (self._settings, changes, rows)))
        self._saving.write(self._name, dict(zip(_FIELDS, texts, strict=True)), columns)
        self._unsaved, self._made = 0, False

    def _resume(self, rows: Sequence[int]) -> None:
        """Take the readings of the file, if it is resumed and has this table."""
        found = self._saving.written(self._name)
        if found is None:
            return
        path, header, tensors = found
        schema = header["schema"]
        with _refusing(path, self._what):
            before = parse(header, "settings")
        check_settings(path, before, self._settings)
        with _refusing(path, self._what):
            if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                raise ValueError("a reading is not a number")
            if bool((tensors["count"] < 0).any()):
                raise ValueError("a number of predictions is negative")
            if schema == _SEARCH:
                self.readings = _of_search(header, tensors)
            elif schema == _COMPARISON:
                self.readings = _of_comparison(before["laws"], tensors, rows)
            else:
                names = _COLUMNS if schema == SCHEMA else ("loss", "count", "gradient")
                columns = [tensors[name] for name in names]
                if schema == _FIT:
                    self._unnamed = [Reading(*one) for one in zip(*columns, strict=True)]
                else:
                    changes, made = (parse(header, name, list) for name in ("changes", "rows"))
                    self.readings = _of_table(changes, made, columns)


@contextmanager
def _refusing(path: str, what: str) -> Iterator[None]:
    """Context in which an error says that a file contains no such thing."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} contains no {what}: {reason}") from error


def _of_table(
    changes: list[Any], rows: list[Any], columns: Sequence[Tensor]
) -> dict[tuple[str, int], Reading]:
    """The readings whose numbers stand in columns, one after the other."""
    starts = [0, 0, 0]
    readings = {}
    for number, window, seconds, shape, shape_of_values in rows:
        if type(number) is not int or not 0 <= number < len(changes) or type(window) is not int:
            raise ValueError("a row has no change and window")
        change = changes[number]
        if type(change) is not str:
            raise ValueError("a change has no text")
        numbers = []
        for index, size in enumerate((shape, shape, shape_of_values)):
            stop = starts[index] + math.prod(size)
            numbers.append(columns[index][starts[index] : stop].view(size))
            starts[index] = stop
        loss, count, values = numbers
        readings[change, window] = Reading(loss, count, values, float(seconds))
    if starts != [column.numel() for column in columns]:
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
        (numbered_change(run, words), batch): Reading(loss, count)
        for run, words in enumerate(["", *laws])
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


def measure_batch(
    model: torch.nn.Module,
    loss: Loss,
    batch: Mapping[str, Any],
    change: Any,
    ranges: Sequence[tuple[int, int]],
    before: Reading | None,
    past: int = 0,
) -> Reading:
    """Run a model on a batch under a change, and sum the losses of each window by n.

    Args:
        model: the model.
        loss: the loss.
        batch: keywords of the model.
        change: the change of the model; None is none.
        ranges: first and last n of each range, both included; 1 also has 0. n is the number of
            tokens that a prediction could read.
        before: the reading without a change.
        past: tokens before the batch, which every prediction could read too; up to them the losses
            are those of ``before``.

    Returns:
        Sums and numbers of predictions, (windows, ranges) float64 each.

    Raises:
        LossError: if a loss is infinite, or other tokens have a loss than before.
    """
    with nullcontext() if change is None else change.on(model):
        scored = loss.score(model, batch)
    known, ends = ~scored.loss.isnan(), torch.tensor([last for _, last in ranges])
    index = torch.bucketize(scored.n + past, ends)
    numbers = torch.stack([torch.where(known, scored.loss, 0.0), known.double()])
    totals = torch.zeros(2, len(index), len(ranges) + 1, dtype=torch.float64)
    sums, counts = totals.scatter_add_(2, index.expand_as(numbers), numbers)[..., :-1]
    if before is not None:
        sums = torch.where(ends <= past, before.loss, sums)
        counts = torch.where(ends <= past, before.count, counts)
    wrong = "NaN" if before is not None and not torch.equal(counts, before.count) else "infinite"
    if wrong == "NaN" or not bool(sums.isfinite().all()):
        under = "" if change is None else f" under {change.name}"
        raise LossError(
            f"the loss of some tokens is {wrong}{under}; load the model in a wider dtype, such as "
            "float32"
        )
    return Reading(sums, counts)


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
class Reader:
    """A model with a loss, and the windows that it is read on.

    Attributes:
        model: the model.
        loss: its loss.
        units: the windows, in the order of the text.
        lengths: their lengths, rising.
        settings: what a resumed run must share, as JSON values.
    """

    model: torch.nn.Module
    loss: Loss
    units: tuple[Unit, ...]
    lengths: tuple[int, ...]
    settings: Mapping[str, Any]

    @property
    def device(self) -> torch.device | None:
        """Device of the model's first parameter; None for a model without parameters."""
        return next((part.device for part in self.model.parameters()), None)

    @property
    def counts(self) -> dict[int, int]:
        """Number of windows by length."""
        counts: Counter[int] = Counter()
        for unit in self.units:
            for turn in unit.turns:
                counts[turn.length] += turn.groups.numel()
        return dict(counts)

    def split(self) -> tuple[list[Unit], list[Unit]]:
        """The windows that are fitted to, two of three, and those that decide.

        Raises:
            ValueError: if there are fewer than six.
        """
        fitting, stopping = list(self.units), self.units[_STOPS - 1 :: _STOPS]
        del fitting[_STOPS - 1 :: _STOPS]
        if len(fitting) < _LEAST[0] or len(stopping) < _LEAST[1]:
            raise ValueError(
                f"target='loss' needs at least {sum(_LEAST)} windows of {self.lengths[-1]} tokens, "
                f"{_LEAST[0]} to fit to and {_LEAST[1]} to decide when to stop, got "
                f"{len(self.units)}: give more windows, more text, or shorter lengths"
            )
        return fitting, list(stopping)

    def read(
        self,
        units: Sequence[Unit],
        table: LossTable,
        change: str,
        compute: Callable[[dict[str, Any]], Reading],
        advance: Callable[[int], object],
    ) -> list[Reading]:
        """The readings of windows under a change, from the table or computed batch by batch.

        Args:
            units: the windows.
            table: where the readings are kept.
            change: a text that identifies the change, and what is read.
            compute: the reading of a batch, given as keywords of the model.
            advance: called after each window with its tokens.
        """
        device, readings = self.device, []
        if not table:  # a resumed run has checked the loss before
            self.loss.check(self.model, self.units[0].turns[-1].inputs(device))
        for unit in units:

            def make(unit: Unit = unit) -> Reading:
                batches = [compute(turn.inputs(device)) for turn in unit.turns]
                return Reading(*[sum(getattr(one, name) for one in batches) for name in _COLUMNS])

            readings.append(table.get(change, unit.number, make))
            advance(unit.tokens)
        return readings


def read_windows(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    lengths: Sequence[int] | None,
    loss: AnyLoss | None,
) -> Reader:
    """Check a model, its loss and its batches, and cut them into windows.

    Raises:
        LossError: if there is no such loss.
        TypeError: if ``model`` is not a module.
        ValueError: if the text is too short or lengths are out of range.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = choose_loss(model, loss)
    by_length = batches_by_length(batches.split(1) if isinstance(batches, Tensor) else batches)
    all_lengths = check_lengths(lengths, by_length)
    check_positions(model, all_lengths)
    # a causal model's long windows have the short ones inside
    used = all_lengths if chosen.reads_all else all_lengths[-1:]
    if 0 in by_length:
        cuts = [cut({0: [batch]}, used) for batch in by_length[0]]
    else:
        cuts = [[] for _ in by_length[used[-1]]]
        for length in used:
            ready = by_length[length]
            for index, batch in enumerate(ready):
                cuts[index * len(cuts) // len(ready)] += cut({length: [batch]}, [length])
    turns = [tuple(of_window) for of_window in cuts if of_window]
    settings = {
        "model": model_digest(model),
        "text": digest([turn for of_window in turns for turn in of_window]),
        "loss": chosen.words,
        "lengths": list(all_lengths),
        "windows": len(turns),
        "weights": str(next((part.dtype for part in model.parameters()), None)),
    }
    units = tuple(Unit(number, of_window) for number, of_window in enumerate(turns))
    return Reader(model, chosen, units, all_lengths, settings)


# -- means over windows ----------------------------------------------------------------------------


def mean_loss(readings: Sequence[Reading]) -> float:
    """Mean loss over the predictions of several windows, in nats."""
    return float(sum(one.loss for one in readings) / sum(one.count for one in readings))


def mean_values(readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
    """The values of windows for each prediction, and their standard errors over windows."""
    values, counts = ([getattr(one, name) for one in readings] for name in ("values", "count"))
    return ratio(torch.stack(values), torch.stack(counts))


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
