"""Replay the log of a training: the alarms that a monitor would have raised."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from acutance.files import check_regular, finite
from acutance.from_json import MOST, whole_number
from acutance.report.plot_style import LIGHT, Theme, curves, label, new_figure, reference, save
from acutance.training.alarms import KINDS, Kind, LogitGrowth
from acutance.training.monitor import LEARNING_RATE

_BEGIN, _END = "attention/", "/logit_std"
#: Alarms that only the monitor could see: their number at a step is in its log.
_LOGGED = {kind: f"attention/alarms/{kind}" for kind in KINDS if kind != "logit_growth"}
#: Under which names the loss, the learning rate and the gradient's norm are logged.
_LOSS = ("loss", "train/loss", "train_loss")
_RATE = (LEARNING_RATE, "learning_rate", "train/learning_rate")
_NORM = ("grad_norm", "train/grad_norm", "gradient_norm")


@dataclass(frozen=True)
class LayerAlarm:
    """One kind of alarm of one layer.

    Attributes:
        kind: "logit_growth", or another kind of :class:`acutance.training.Alarm` that was logged.
        layer: name of its attention module; empty where the log does not say which it was.
        step: the first step with the alarm.
        growth: the factor by which the layer's logits grew, at that step; else NaN.
        logit_std: the mean standard deviation of a row's logits at that step; NaN if it was not
            finite, or the layer is unknown.
        measurements: number of measurements with the alarm.
    """

    kind: Kind
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
        alarms: the alarms of each layer, the first one first.
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

        def series(by_step: dict[int, float]) -> dict[str, Any]:
            return {"steps": list(by_step), "values": list(by_step.values())}

        record: dict[str, Any] = finite(
            {
                "limit": self.limit,
                "steps": self.steps,
                "alarms": [vars(alarm) for alarm in self.alarms],
                "layers": {
                    name: {"logit_std": values, "growth": self.growth[name]}
                    for name, values in self.logit_std.items()
                },
                "loss": series(self.loss),
                "grad_norm": series(self.grad_norm),
            }
        )
        return record


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    r"""The records of a log, one for each step, in order.

    The records of one step may stand anywhere in the log, such as losses that were appended at its
    end. A value that is logged again replaces the former one, and what was logged of the same name
    after that, as after a restart from a checkpoint.

    Args:
        path: JSON lines, as ``AttentionMonitor(log="run.jsonl")`` writes them, or the
            ``trainer_state.json`` of transformers' Trainer.

    Raises:
        OSError: if the file cannot be read, or is a pipe or a device.
        ValueError: if it is not such a log.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> _ = path.write_text('{"step": 10, "loss": 2.0}\n{"step": 20, "loss": 1.5}\n')
        >>> [record["loss"] for record in read_log(path)]
        [2.0, 1.5]
    """
    path = Path(path)
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a log: it is not UTF-8 text") from None
    columns: dict[str, dict[int, Any]] = {"step": {}}
    for where, record in _records(path, text):
        step = record.get("step") if isinstance(record, Mapping) else None
        if isinstance(step, bool) or not isinstance(step, int) or abs(step) > MOST:
            raise ValueError(
                f"{path}, {where}: expected a JSON object with a whole number 'step' of at most "
                f"{MOST}"
            )
        columns["step"][step] = step
        for name in record.keys() - {"step"}:
            column = columns.setdefault(name, {})
            while step in column:
                column.popitem()
            column[step] = record[name]
    records: dict[int, dict[str, Any]] = {step: {} for step in sorted(columns["step"])}
    for name, column in columns.items():
        for step, value in column.items():
            records[step][name] = value
    return list(records.values())


def _records(path: Path, text: str) -> Iterable[tuple[str, Any]]:
    """The JSON objects of a log with their places."""
    if path.suffix == ".json":
        state = _parsed(text, str(path))
        history = state.get("log_history") if isinstance(state, Mapping) else None
        if not isinstance(history, list):
            raise ValueError(
                f"{path} has no list 'log_history': give the trainer_state.json of a Trainer, or "
                "JSON lines, in a file that does not end in .json"
            )
        for number, entry in enumerate(history):
            yield f"entry {number} of log_history", entry
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    """Parse JSON whose whole numbers are no larger than floats."""
    try:
        return json.loads(text, parse_int=whole_number)
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply") from None
    except ValueError as problem:
        raise ValueError(f"{where}: not JSON that can be read: {problem}") from None


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
        >>> records = [{"step": 10 * at, name: logit} for at, logit in enumerate(logits)]
        >>> (alarm,) = replay(records).alarms
        >>> alarm.step, alarm.layer, round(alarm.growth, 6)
        (200, 'layers.0.attn', 3.0)
    """
    follow = LogitGrowth(false_alarms)
    steps: list[int] = []
    logits: list[dict[str, float]] = []
    growths: list[dict[str, float]] = []
    loss: dict[int, float] = {}
    norm: dict[int, float] = {}
    alarms: dict[tuple[Kind, str], LayerAlarm] = {}
    for record in records:
        step = record["step"]
        for logged_values, names in ((loss, _LOSS), (norm, _NORM)):
            value = _first(record, names)
            if value is not None:
                logged_values[step] = value
        deviations = {
            name[len(_BEGIN) : -len(_END)]: _number(value)
            for name, value in record.items()
            if name.startswith(_BEGIN) and name.endswith(_END)
        }
        logged = [kind for kind, name in _LOGGED.items() if _number(record.get(name)) > 0]
        if not (deviations or logged):
            continue
        growth = follow.update(step, deviations, _first(record, _RATE))
        steps.append(step)
        logits.append(deviations)
        growths.append(growth)
        raised: list[tuple[Kind, str]] = [
            ("logit_growth", layer) for layer, factor in growth.items() if factor > follow.limit
        ]
        wrong = [layer for layer, deviation in deviations.items() if not math.isfinite(deviation)]
        raised += [("not_finite", layer) for layer in wrong or [""] * ("not_finite" in logged)]
        raised += [(kind, "") for kind in logged if kind != "not_finite"]
        for kind, layer in raised:
            first = alarms.get((kind, layer)) or LayerAlarm(
                kind, layer, step, growth.get(layer, math.nan), deviations.get(layer, math.nan), 0
            )
            alarms[kind, layer] = replace(first, measurements=first.measurements + 1)
    if not steps:
        raise ValueError(
            f"the log has no standard deviations of logits ({_BEGIN}<layer>{_END}): write it with "
            "AttentionMonitor(log=...) of this version"
        )
    layers = list(dict.fromkeys(name for deviations in logits for name in deviations))

    def by_layer(rows: list[dict[str, float]]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(row.get(name, math.nan) for row in rows) for name in layers}

    ordered = sorted(alarms.values(), key=lambda alarm: alarm.step)
    return Replay(
        follow.limit, tuple(steps), by_layer(logits), by_layer(growths), loss, norm, tuple(ordered)
    )


def _number(value: Any) -> float:
    """A logged value as a number; NaN if it is none."""
    return float(value) if isinstance(value, int | float) else math.nan


def _first(record: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """The first of several names that a record has, if it is a finite number."""
    value: float | None = finite(next((_number(record[n]) for n in names if n in record), None))
    return value


#: Layers that are drawn: those with alarms first, then those that grew most.
_DRAWN = 6
_BEFORE = 0.5  # share of the training that is drawn before the first alarm


def draw_replay(replayed: Replay, path: str | os.PathLike[str], *, theme: Theme = LIGHT) -> None:
    """Draw loss and gradient norm, logits and their growth, from before the first alarm to the end.

    Without an alarm the whole training is drawn. Of many layers, those with alarms and those that
    grew most are drawn.

    Args:
        replayed: a replayed log.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
    """
    other = {"loss": replayed.loss, "gradient norm": replayed.grad_norm}
    other = {name: values for name, values in other.items() if values}
    figure, panels = new_figure(
        "Logits of a training",
        "Vertical lines: first alarm of each layer. Dashed: growth in the last quarter of the "
        "training beyond which there is an alarm.",
        panels=2 + len(other),
        theme=theme,
    )
    steps = np.array(replayed.steps)
    first, last = int(steps[0]), max(map(max, (replayed.steps, *other.values())))
    if replayed.alarms:
        first = max(first, int(replayed.alarms[0].step - _BEFORE * (last - first)))
    for axes, (name, by_step) in zip(panels, other.items(), strict=False):
        at = [step for step in by_step if step >= first]
        axes.plot(at, [by_step[step] for step in at], color=theme.ink, linewidth=1.4)
        label(axes, x="step", y=name, title=name)
    logits, growths = panels[-2:]
    shown = steps >= first
    # the layers with alarms, then those that grew most
    alarmed = dict.fromkeys(a.layer for a in replayed.alarms if a.layer in replayed.growth)
    most = {
        name: max((value for value in values if value == value), default=-np.inf)
        for name, values in replayed.growth.items()
    }
    rest = sorted((name for name in most if name not in alarmed), key=lambda name: -most[name])
    names = [*alarmed, *rest][:_DRAWN]
    for name, curve in zip(names, curves(len(names), theme), strict=True):
        for axes, values in ((logits, replayed.logit_std), (growths, replayed.growth)):
            axes.plot(
                steps[shown], np.array(values[name])[shown], color=curve.colour, linewidth=1.5,
                linestyle=curve.dash, label=name,
            )  # fmt: skip
    growths.axhline(replayed.limit, color=theme.ink, linewidth=1.0, linestyle="dashed")
    label(logits, x="step", y="standard deviation", title="logits of each layer")
    label(growths, x="step", y="factor", title="growth in the last quarter")
    for axes in panels:
        for alarm in replayed.alarms:
            reference(axes, theme, x=alarm.step)
        axes.set_xlim(first, max(last, first + 1))
    logits.legend(
        fontsize=8, frameon=False, labelcolor=theme.muted, loc="upper left", handlelength=2.5
    )
    save(figure, path)
