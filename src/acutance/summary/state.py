"""States: a summary with the run and windows it covers; shards of a run are merged as states."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.from_json import checked
from acutance.rowstats import METRICS
from acutance.structure import STRUCTURE
from acutance.summary.cells import MOST, Cells, Parts
from acutance.summary.files import expand, parse, read
from acutance.summary.head_summary import SCHEMA, HeadSummary
from acutance.summary.layer import COUNTS, Layer
from acutance.summary.readouts import READOUTS
from acutance.summary.readouts.head_maps import checked_maps
from acutance.summary.readouts.moments import Moments

Ranges = tuple[tuple[int, int], ...]
#: Heads of all layers of a state, many times those of any model: files may be sparse.
MOST_HEADS = 1 << 17
#: Entries of two lists that are compared one by one.
_FEW = 1000
#: How messages describe a setting that differs; other settings are described by their values.
_DIGESTS = {"model": "another model", "text": "another text"}


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``count`` parts of a corpus, counted from 1.

    Batches are assigned to shards in turn, so that each batch contains the same windows as in a
    single run.

    Example:
        >>> Shard.parse("2/3").of(8)
        [1, 4, 7]
        >>> print(Shard.parse("2/3"))
        2/3
    """

    number: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Parse a shard written as ``i/n``.

        Raises:
            ValueError: unless 1 ≤ i ≤ n.
        """
        number, slash, count = text.partition("/")
        plain = slash and all(part.isascii() and part.isdigit() for part in (number, count))
        if not plain or len(text) > 20 or not 1 <= int(number) <= int(count):
            raise ValueError(f"a shard must be i/n with 1 ≤ i ≤ n, as 2/4, got {text[:40]!r}")
        return Shard(int(number), int(count))

    def of(self, batches: int) -> list[int]:
        """Indices, from 0, of this shard's batches among ``batches`` of the whole corpus."""
        return list(range(self.number - 1, batches, self.count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Shard()


@dataclass(frozen=True)
class Run:
    """The settings of a run over a corpus, and the windows that are done.

    Attributes:
        settings: everything that determines the results: digests of model and text, length, batch
            size, metrics and so on.
        total: number of windows of the whole corpus.
        done: half-open ranges of the windows included in the state, ascending.
        tokens: number of tokens of those windows.
        shard: the requested part of the corpus.
    """

    settings: Mapping[str, Any]
    total: int
    done: Ranges = ()
    tokens: int = 0
    shard: Shard = WHOLE

    @property
    def windows(self) -> int:
        """Number of windows done."""
        return sum(stop - start for start, stop in self.done)

    @property
    def complete(self) -> bool:
        """Whether every window of the corpus is done."""
        return self.windows == self.total

    def difference(self, other: Run, mine: str, theirs: str) -> str | None:
        """The first setting in which two runs differ, as a clause; None if they agree."""
        names = dict.fromkeys((*other.settings, *self.settings))
        for name in sorted(names, key="text".__eq__):  # which other settings change too: last
            left, right = self.settings.get(name), other.settings.get(name)
            if left == right:
                continue
            if name in _DIGESTS:
                return f"{mine} is for {_DIGESTS[name]} than {theirs}"
            label = name.replace("_", " ")
            if isinstance(left, list) and isinstance(right, list) and len(left + right) < _FEW:
                sides = (mine, left, right), (theirs, right, left)
                more = [
                    f"{brief(only)} only in {where}"
                    for where, here, others in sides
                    if (only := [part for part in here if part not in others])
                ]
                return f"{label} differ: {' and '.join(more) or 'their order'}"
            return f"{label} is {brief(left)} in {mine} and {brief(right)} in {theirs}"
        if self.total != other.total:
            return f"{mine} has {self.total} windows and {theirs} has {other.total}"
        return None

    def to_json(self) -> str:
        """The record as JSON, for a file's header."""
        texts = {"settings": dict(self.settings), "shard": str(self.shard)}
        return json.dumps(vars(self) | texts)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Run:
        """Check and convert a record from a file's header.

        Raises:
            ValueError: naming the first thing that does not fit.
        """
        fields = {name: record.get(name) for name in ("settings", "total", "done", "tokens")}
        run, last = checked(Run, fields, "'run'"), 0
        if min(run.total, run.tokens) < 0:
            raise ValueError(
                f"total and tokens of 'run' must be 0 or more, got {run.total} and {run.tokens}"
            )
        for ends in map(list, run.done):
            if len(ends) != 2 or not last <= ends[0] < ends[1] <= run.total:
                raise ValueError(
                    f"'done' of 'run' must be ascending ranges [start, stop] up to {run.total}"
                )
            last = ends[1]
        shard = Shard.parse(str(record.get("shard")))
        return replace(run, done=ranges(run.done), shard=shard)


def ranges(parts: Iterable[tuple[int, int]]) -> Ranges:
    """Sort half-open ranges and join those that touch.

    Raises:
        ValueError: if two of them overlap.

    Example:
        >>> ranges([(4, 6), (0, 2), (2, 4), (9, 10)])
        ((0, 6), (9, 10))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if joined and start < joined[-1][1]:
            raise ValueError(f"windows {start} to {min(stop, joined[-1][1]) - 1} occur twice")
        if joined and start == joined[-1][1]:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


@dataclass(frozen=True)
class State:
    """A summary and the run it belongs to: the unit in which shards are saved and merged.

    Attributes:
        summary: the statistics.
        run: settings of the run, and the windows that the statistics cover.
    """

    summary: HeadSummary
    run: Run

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file atomically for :func:`load_state` and :func:`acutance.load`."""
        self.summary.save(path, {"run": self.run.to_json()})

    def join(self, other: State) -> State:
        """Merge the states of two parts of one run; their settings must be equal (not checked).

        Raises:
            ValueError: if both contain the same window.
        """
        run = replace(
            self.run,
            done=ranges((*self.run.done, *other.run.done)),
            tokens=self.run.tokens + other.run.tokens,
            shard=self.run.shard if self.run.shard == other.run.shard else WHOLE,
        )
        return State(self.summary.merge(other.summary), run).updated()

    def updated(self) -> State:
        """A copy whose summary states how much of the run is done."""
        run = self.run
        about = dict(self.summary.about) | {
            "windows": run.windows,
            "windows_in_all": run.total,
            "tokens": run.tokens,
            "complete": run.complete,
        }
        about.pop("shard", None)
        if run.shard.count > 1:
            about["shard"] = str(run.shard)
        return replace(self, summary=replace(self.summary, about=about))


def load_state(path: str | os.PathLike[str]) -> State:
    """Load a state saved by ``acutance probe --save`` or :meth:`State.save`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a saved state, is truncated or damaged, has another schema
            version, or holds a summary without its windows.
    """
    name = os.fspath(path)
    header, tensors = read(path, SCHEMA)
    if "run" not in header:
        raise ValueError(
            f"{name} does not record which windows it contains, unlike files written by 'acutance "
            "probe --save'; merge summaries saved from Python with HeadSummary.merge"
        )
    try:
        return State(from_parts(header, tensors), Run.from_record(parse(header, "run")))
    except ValueError as error:
        raise ValueError(f"{name} has a damaged header: {error}; write the file again") from error


def merge_states(paths: Sequence[str | os.PathLike[str]]) -> State:
    """Load and merge the states of all shards of one run.

    Args:
        paths: at least one state file, in any order.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: naming the file or files that do not fit.

    Example:
        >>> merge_states([])
        Traceback (most recent call last):
        ValueError: merge needs at least one state, got none
    """
    if not paths:
        raise ValueError("merge needs at least one state, got none")
    joined: State | None = None
    names: list[tuple[int, int, str]] = []
    for path in paths:
        name, state = os.fspath(path), load_state(path)
        for start, stop in state.run.done:
            for other_start, other_stop, other in names:
                first, last = max(start, other_start), min(stop, other_stop) - 1
                if first <= last:
                    which = f"window {first}" if first == last else f"windows {first} to {last}"
                    raise ValueError(
                        f"{other} and {name} both contain {which} of {state.run.total}, so "
                        "rows would count twice"
                    )
        names += [(start, stop, name) for start, stop in state.run.done]
        if joined is None:
            joined = state
            continue
        if difference := joined.run.difference(state.run, os.fspath(paths[0]), name):
            raise ValueError(f"shards of one run must have the same settings, but {difference}")
        try:
            joined = joined.join(state)
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be merged with {os.fspath(paths[0])}: {error}"
            ) from error
    assert joined is not None
    return replace(joined, run=replace(joined.run, shard=WHOLE)).updated()


def brief(value: Any) -> str:
    """A setting as text of at most 60 characters."""
    if value is None:
        return "not set"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class _Header:
    """What the header of a summary's file says beside texts and maps, as :class:`HeadSummary`."""

    metrics: tuple[Any, ...]
    layers: tuple[Any, ...]
    about: Mapping[str, Any]
    unread: tuple[str, ...]
    not_provided: tuple[str, ...] = ()


def from_parts(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> HeadSummary:
    """Rebuild a summary from its :meth:`HeadSummary.parts`, after checking them.

    Raises:
        ValueError: naming the first thing that does not fit.
    """
    record = checked(_Header, parse(header, "summary"), "'summary'")
    for name in record.metrics:
        if not isinstance(name, str) or not (name in METRICS or name in STRUCTURE):
            raise ValueError(f"{brief(repr(name))} is not a metric of this version")
    layers = tuple(_layer(f"layers[{i}]", layer) for i, layer in enumerate(record.layers))
    if (heads := sum(layer.heads for layer in layers)) > MOST_HEADS:
        raise ValueError(f"a state can hold at most {MOST_HEADS} heads, got {heads}")
    modules = [layer.module for layer in layers]
    for field, names in (("metric", record.metrics), ("layer", modules)):
        if len(set(names)) != len(names):
            shown = brief(repr(list(names)))
            raise ValueError(f"'{field}s' must name each {field} once, got {shown}")
    arrays = expand(header, tensors)
    rows = {name[5:]: arrays.pop(name) for name in list(arrays) if name.startswith("maps.")}
    maps = checked_maps(parse({"maps": "[]", **header}, "maps", list), rows)
    if not {"weight", "sampling"} & set(arrays) and {"count", "mean"} <= set(arrays):
        # states of the first schema: there every row that counts stands for itself
        arrays["weight"] = arrays["count"].to(torch.float64)
        arrays["sampling"] = torch.zeros_like(arrays["mean"])
    parts = Parts()
    kinds: dict[str, type[Cells]] = {"": Moments}
    kinds |= {name: readout.cells for name, readout in READOUTS.items()}
    for name, kind in kinds.items():
        prefix = f"{name}." if name else ""
        stored = {array: f"{prefix}{array}" for array in kind.none().tensors()}
        if name and not any(array.startswith(prefix) for array in arrays):
            continue
        if missing := [array for array in stored.values() if array not in arrays]:
            raise ValueError(f"the array {missing[0]!r} is missing")
        of_record = {array: arrays.pop(key) for array, key in stored.items()}
        field = kind.text_field
        texts = parse(header, field, kind.text_kind) if field in header else kind.text_kind()
        parts[name] = kind.checked(of_record, heads, len(record.metrics), texts)
    if arrays:
        raise ValueError(f"the array {brief(repr(min(arrays)))} does not belong to a summary")
    moments: Any = parts.pop("")
    fields = vars(record) | {"layers": layers}
    return HeadSummary(**fields, moments=moments, optional_parts=parts, maps=maps)


def _layer(place: str, record: Any) -> Layer:
    """Check and build one layer of a state file; ``place`` names it in messages."""
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be a JSON object, got {brief(repr(record))}")
    error = record.get("error")  # infinite for an output that is NaN where the model's is not
    layer = checked(Layer, {name: record[name] for name in record if name != "error"}, place)
    for name in ("heads", *COUNTS):
        if (value := getattr(layer, name)) < (name == "heads"):
            raise ValueError(f"{name} of {place} must be a whole number, got {value}")
    numbers = list(layer.chosen)
    if numbers and not (
        len(numbers) == layer.heads and numbers[0] >= 0 and sorted(set(numbers)) == numbers
    ):
        raise ValueError(
            f"chosen of {place} must be {layer.heads} ascending numbers, one for each head, got "
            f"{brief(repr(numbers))}"
        )
    known = type(error) is float or (type(error) is int and error <= MOST)
    if error is not None and not (known and error >= 0):
        raise ValueError(f"error of {place} must be a number, 0 or more, got {brief(repr(error))}")
    return replace(layer, error=error)


def load(path: str | os.PathLike[str]) -> HeadSummary:
    """Read a summary that :meth:`HeadSummary.save` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not such a file, is truncated, has another schema version, or has
            invalid contents.
    """
    header, tensors = read(path, SCHEMA)
    try:
        return from_parts(header, tensors)
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)} has a damaged header: {error}; write the file again"
        ) from error
