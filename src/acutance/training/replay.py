"""Replay the log of a training through the alarm of growing logits."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acutance.training.growth import LogitGrowth

__all__ = ["LayerAlarm", "Replay", "read_log", "replay"]

_BEGIN, _END = "attention/", "/logit_std"
#: Under which names the loss and the gradient's norm are logged.
_LOSS = ("loss", "train/loss", "train_loss")
_NORM = ("grad_norm", "train/grad_norm", "gradient_norm")


@dataclass(frozen=True)
class LayerAlarm:
    """A layer whose logits grew by more than the limit.

    Attributes:
        layer: name of its attention module.
        step: the first step beyond the limit.
        growth: the factor by which they grew, at that step.
        logit_std: the mean standard deviation of a row's logits at that step.
        measurements: number of measurements beyond the limit.
    """

    layer: str
    step: int
    growth: float
    logit_std: float
    measurements: int


@dataclass(frozen=True)
class Replay:
    """A training's log, replayed.

    Attributes:
        limit: growth beyond which there is an alarm.
        steps: the measured steps.
        logit_std: the mean standard deviation of a row's logits at each of them, by layer; NaN
            where it was not finite.
        growth: its growth, by layer; NaN where there were too few measurements.
        loss: loss by step, if it was logged.
        grad_norm: norm of the gradient by step, if it was logged.
        alarms: the layers beyond the limit, the first alarm first.
    """

    limit: float
    steps: tuple[int, ...]
    logit_std: dict[str, tuple[float, ...]]
    growth: dict[str, tuple[float, ...]]
    loss: dict[int, float] = field(default_factory=dict)
    grad_norm: dict[int, float] = field(default_factory=dict)
    alarms: tuple[LayerAlarm, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-compatible values; numbers that are not finite are null."""
        return {
            "limit": self.limit,
            "steps": list(self.steps),
            "alarms": [vars(alarm) for alarm in self.alarms],
            "layers": {
                name: {"logit_std": _finite(values), "growth": _finite(self.growth[name])}
                for name, values in self.logit_std.items()
            },
            "loss": {"steps": list(self.loss), "values": list(self.loss.values())},
            "grad_norm": {"steps": list(self.grad_norm), "values": list(self.grad_norm.values())},
        }


def _finite(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    r"""The records of a log, one for each step, in order.

    A step that is logged again replaces what was logged from it on, as after a restart from a
    checkpoint. Several records of one step that follow each other are merged.

    Args:
        path: JSON lines, as ``AttentionMonitor(log="run.jsonl")`` writes them, or the
            ``trainer_state.json`` of transformers' Trainer.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not such a log.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> _ = path.write_text('{"step": 10, "loss": 2.0}\n{"step": 20, "loss": 1.5}\n')
        >>> [record["loss"] for record in read_log(path)]
        [2.0, 1.5]
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a log: it is not UTF-8 text") from None
    records: dict[int, dict[str, Any]] = {}
    last: int | None = None
    for where, record in _records(path, text):
        step = record.get("step") if isinstance(record, Mapping) else None
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"{path}, {where}: expected a JSON object with a whole number 'step'")
        if last is not None and step < last:
            records = {number: one for number, one in records.items() if number < step}
        records[step] = records.get(step, {}) | dict(record)
        last = step
    return [records[step] for step in sorted(records)]


def _records(path: Path, text: str) -> Iterable[tuple[str, Any]]:
    """The JSON objects of a log with their places."""
    if path.suffix == ".json":
        try:
            state = json.loads(text)
        except ValueError as problem:
            raise ValueError(f"{path} is not JSON: {problem}") from None
        history = state.get("log_history") if isinstance(state, Mapping) else None
        if not isinstance(history, list):
            raise ValueError(
                f"{path} has no list 'log_history': give the trainer_state.json of a Trainer, or "
                "JSON lines, in a file that does not end in .json"
            )
        yield from ((f"entry {number} of log_history", one) for number, one in enumerate(history))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError:
                raise ValueError(f"{path}, line {number}: not JSON: {line[:60]!r}") from None


def replay(records: Iterable[Mapping[str, Any]], *, false_alarms: float = 100.0) -> Replay:
    """What a monitor would have said of the logits of a training.

    Args:
        records: records by step, as from :func:`read_log`: each with ``step`` and
            ``attention/<layer>/logit_std``.
        false_alarms: alarms per million steps of healthy training, as of
            :class:`acutance.training.AttentionMonitor`.

    Raises:
        ValueError: if no record has a deviation of logits, or ``false_alarms`` is not above 0.

    Example:
        >>> logits = [2.0] * 20 + [6.0]
        >>> name = "attention/layers.0.attn/logit_std"
        >>> records = [{"step": step, name: logit} for step, logit in enumerate(logits)]
        >>> (alarm,) = replay(records).alarms
        >>> alarm.step, alarm.layer, round(alarm.growth, 6)
        (20, 'layers.0.attn', 3.0)
    """
    follow = LogitGrowth(false_alarms)
    steps: list[int] = []
    rows: list[tuple[dict[str, float], dict[str, float]]] = []
    loss: dict[int, float] = {}
    norm: dict[int, float] = {}
    for record in records:
        step = record["step"]
        _note(loss, step, record, _LOSS)
        _note(norm, step, record, _NORM)
        deviations = {
            name[len(_BEGIN) : -len(_END)]: _number(value)
            for name, value in record.items()
            if name.startswith(_BEGIN) and name.endswith(_END)
        }
        if deviations:
            steps.append(step)
            rows.append((deviations, follow.update(deviations)))
    if not rows:
        raise ValueError(
            f"the log has no standard deviations of logits ({_BEGIN}<layer>{_END}): write it with "
            "AttentionMonitor(log=...) of this version"
        )
    layers = list(dict.fromkeys(name for deviations, _ in rows for name in deviations))
    logits = {name: tuple(row.get(name, math.nan) for row, _ in rows) for name in layers}
    growth = {name: tuple(grown.get(name, math.nan) for _, grown in rows) for name in layers}
    alarms = []
    for name in layers:
        beyond = [index for index, value in enumerate(growth[name]) if value > follow.limit]
        if beyond:
            first = beyond[0]
            alarms.append(
                LayerAlarm(name, steps[first], growth[name][first], logits[name][first],
                           len(beyond))
            )  # fmt: skip
    alarms.sort(key=lambda alarm: alarm.step)
    return Replay(follow.limit, tuple(steps), logits, growth, loss, norm, tuple(alarms))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _note(
    noted: dict[int, float], step: int, record: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Store the first of several names that a record has."""
    value = next((record[name] for name in names if name in record), None)
    if isinstance(value, int | float) and math.isfinite(value):
        noted[step] = float(value)
