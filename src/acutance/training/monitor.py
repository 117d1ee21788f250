"""AttentionMonitor: measure a model's attention every few steps of its training."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from acutance.capture.find_layers import Chosen
from acutance.capture.intercept import unwatched
from acutance.capture.listener import ProbeError
from acutance.corpus.ranks import all_reduce_summary
from acutance.files import as_json
from acutance.probing.probe import Probe, probe
from acutance.rowstats import METRICS, metric
from acutance.shapes import check_count, check_flag
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts.moments import Moments, edges
from acutance.training.across_ranks import ranks
from acutance.training.alarms import (
    KINDS,
    Alarm,
    AttentionWarning,
    LogitGrowth,
    Thresholds,
    layer_means,
    summed_up,
)

if TYPE_CHECKING:
    from typing_extensions import Self


PREFIX = "attention"
#: The scalar of the learning rate, from which a replay knows the warm-up.
LEARNING_RATE = f"{PREFIX}/learning_rate"
#: Of scalars of passes without gradients: generated text and its scoring.
ROLLOUT = f"rollout/{PREFIX}"
#: Metrics that are extremes themselves: their worst head is that of the most extreme row.
_EXTREMES = ("max_logit",)
#: A function of scalars by name and the step, a SummaryWriter, or the path of a JSON lines file.
Log = Callable[[dict[str, float], int], object] | str | os.PathLike[str] | Any


@dataclass(frozen=True)
class MonitorRecord:
    """The measurements of one optimiser step.

    Attributes:
        step: number of the optimiser step, from 1.
        summary: every head's statistics over the rows of the step, over all ranks.
        scalars: numbers by name, ``attention/<layer>/<metric>``, for loggers.
        alarms: every head beyond a threshold, also if it was before.
        rollout: statistics of the passes without gradients; None if there were none, or they were
            not requested.
    """

    step: int
    summary: HeadSummary
    scalars: dict[str, float]
    alarms: tuple[Alarm, ...]
    rollout: HeadSummary | None = None


def scalars(
    summary: HeadSummary,
    metrics: Sequence[str],
    alarms: Sequence[Alarm] | None = None,
    prefix: str = PREFIX,
) -> dict[str, float]:
    """Scalars of each layer by name, without metrics that have no rows.

    ``attention/<layer>/<metric>`` is the mean over rows and heads; ``<metric>_min`` and
    ``<metric>_max`` are the lowest and highest mean of a head. ``max_logit`` has only ``_max``, the
    largest logit of any row. ``attention/alarms/<kind>`` is the number of heads beyond a threshold.
    ``logit_std``, which the alarm of growing logits follows, is always there with alarms.
    In the name of a second call, ``layer#1``, the ``#`` becomes ``_``: MLflow refuses it.

    Args:
        summary: a summary that recorded the metrics.
        metrics: names of the metrics.
        alarms: the alarms of this step; None leaves their numbers out.
        prefix: beginning of all names.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> for name, value in scalars(probe.summary(), ["effective_keys"], []).items():
        ...     print(name, value)
        attention/MultiheadAttention/effective_keys 4.0
        attention/MultiheadAttention/effective_keys_min 4.0
        attention/MultiheadAttention/effective_keys_max 4.0
        attention/MultiheadAttention/logit_std 0.0
        attention/alarms/logit_growth 0.0
        attention/alarms/entropy_collapse 0.0
        attention/alarms/large_logit 0.0
        attention/alarms/not_finite 0.0
    """
    followed = alarms is not None and "logit_std" in summary.metrics
    names = {*metrics, "logit_std"} if followed else set(metrics)
    means = {name: layer_means(summary, name) for name in names}
    heads = {name: summary.grid(name) for name in names}
    highest = summary.moments.high.split([layer.heads for layer in summary.layers])
    values: dict[str, float] = {}
    for index, layer in enumerate(summary.layers):
        tag = _tag(prefix, layer.module)
        for name in metrics:
            of_heads = [mean for mean in heads[name][index] if not math.isnan(mean)]
            if not of_heads:
                continue
            values[f"{tag}/{name}"] = means[name][index]
            if name in _EXTREMES:
                values[f"{tag}/{name}_max"] = float(highest[index][:, summary.column(name)].max())
            else:
                values[f"{tag}/{name}_min"] = min(of_heads)
                values[f"{tag}/{name}_max"] = max(of_heads)
        if followed and not math.isnan(means["logit_std"][index]):
            values[f"{tag}/logit_std"] = means["logit_std"][index]
    if alarms is not None:
        for kind in KINDS:
            values[f"{prefix}/alarms/{kind}"] = float(sum(alarm.kind == kind for alarm in alarms))
    return values


def _tag(prefix: str, module: str) -> str:
    """The beginning of a module's names in logs."""
    return f"{prefix}/{module.replace('#', '_')}"


class JsonLines:
    r"""Appends each record as one JSON object to a file.

    ``step`` comes first, then the scalars. Numbers that are not finite, which JSON does not have,
    are null.

    Args:
        path: the file. It is created with the first record.

    Raises:
        FileNotFoundError: if its folder does not exist.
        IsADirectoryError: if it is a folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "attention.jsonl"
        >>> log = JsonLines(path)
        >>> log({"attention/layer/entropy": 1.5}, 10)
        >>> path.read_text()
        '{"step": 10, "attention/layer/entropy": 1.5}\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"log must be a file, but {self.path} is a folder")
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"log is {self.path}, but there is no folder {self.path.parent}"
            )

    def __call__(self, scalars: Mapping[str, float], step: int) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(as_json({"step": step, **scalars}) + "\n")


def destinations(log: Log | Sequence[Log] | None) -> tuple[Any, ...]:
    """The functions and writers that ``log`` names; paths become :class:`JsonLines`.

    Raises:
        TypeError: if one is neither a function, a SummaryWriter nor a path.

    Example:
        >>> destinations(print)
        (<built-in function print>,)
        >>> destinations("out.jsonl")[0].path.name
        'out.jsonl'
    """
    if log is None:
        return ()
    checked: list[Any] = []
    for target in log if isinstance(log, list | tuple) else (log,):
        if isinstance(target, str | os.PathLike):
            checked.append(JsonLines(target))
        elif hasattr(target, "add_scalar") or (callable(target) and not isinstance(target, type)):
            checked.append(target)
        else:
            raise TypeError(
                "log must be a function of scalars and step such as wandb.log, a SummaryWriter, "
                f"the path of a JSON lines file, or a list of these, got {target!r}"
            )
    return tuple(checked)


def _histogram(moments: Moments, column: int, name: str) -> dict[str, Any] | None:
    """Arguments of ``add_histogram_raw`` for one head; None if it has no rows."""
    count = int(moments.count[0, column])
    if not count:
        return None
    bins = moments.histogram[0, column]
    low, high = float(moments.low[0, column]), float(moments.high[0, column])
    mean = float(moments.mean[0, column])
    filled = bins.nonzero()[:, 0]
    first, last = int(filled[0]), int(filled[-1])
    limits = torch.tensor(edges(name)[first : last + 2], dtype=torch.float64)
    limits[-1] = max(float(limits[-1]), math.nextafter(high, math.inf))  # the last bin is open
    return {
        "min": low,
        "max": high,
        "num": count,
        "sum": count * mean,
        "sum_squares": count * (float(moments.std[0, column]) ** 2 + mean * mean),
        # right edges; an empty bin before the first gives that its left edge
        "bucket_limits": limits.tolist(),
        "bucket_counts": [0, *bins[first : last + 1].tolist()],
    }


Histograms = Literal["layer", "head", "none"]
#: Most steps between two measurements in the first steps, and how many steps these are.
EARLY, EARLY_STEPS = 10, 1000
#: Under which name the state of transformers' Trainer keeps ours, and so its checkpoints.
STATE_KEY = "acutance.AttentionMonitor"
_FRAMES = 8


class AttentionMonitor:
    r"""Measures a model's attention every ``every`` optimiser steps, and warns.

    The object is a callback of ``transformers.Trainer``, of TRL's trainers and of Lightning's
    ``Trainer``; :meth:`attach` connects it to any other training loop. It measures all forward
    passes of a step that record gradients, also with gradient accumulation. The first step is
    measured too. Training is unchanged bit for bit, unless ``provide`` is requested or the model
    is compiled: compiled models run uncompiled in measured steps.

    A layer raises an alarm if its logits grew in the last quarter of the training by more than in
    healthy training, and a head if its scores are not finite. Growth is judged from the 17th
    measurement on, and not in the first 100 steps after the learning rate's warm-up. There is one
    warning for each head and kind. Under ``torch.distributed`` every rank takes part and all get
    the same record.

    Args:
        every: number of optimiser steps between two measurements; in the first 1000 steps at most
            10.
        metrics: metrics of :data:`acutance.METRICS` to log as scalars and histograms.
        layers: which layers, as for :func:`acutance.probe`; None for all.
        heads: which heads of each layer, likewise.
        max_rows: measure at most this many rows of a call, sampled at random. The largest logit is
            then that of these rows.
        provide: let acutance's kernel compute the attention of measured steps, forward and
            backward; outputs are then equal up to rounding.
        false_alarms: alarms of growing logits per million steps of healthy training, as measured on
            small decoders; fewer alarms come later. With 100 there were 0 to 390, depending on the
            text, and a model that suddenly learns to copy alarms too. None turns them off.
        collapse: also raise an alarm if a head's mean of H / log n is below this bound.
        max_logit: also raise an alarm if a head has a logit above this bound, for instance where
            a dtype becomes too coarse.
        on_alarm: called with each new :class:`Alarm` on every rank; an exception that it raises
            ends the training.
        histograms: one for each "layer", each "head", or "none".
        profile: also record each metric by octave of n in the record's summary, as a probe does.
        rollouts: also measure passes without gradients, such as text that the model generates, and
            log them as ``rollout/attention/...``.
        log: where scalars go, besides the trackers of a trainer: a function of a dict of scalars
            and the step, such as ``wandb.log``; a ``SummaryWriter``, which also gets histograms; a
            path, to which JSON lines are appended; or a list of these.
        group: the ranks that train this model; None for all.

    Attributes:
        steps: number of optimiser steps so far.
        last: the last record; None before the first.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, or a metric does not exist.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> def log(scalars, step):
        ...     print(step, f"{scalars['attention/MultiheadAttention/entropy']:.3f}")
        >>> monitor = AttentionMonitor(every=10, log=log).attach(layer, optimizer)
        >>> x = torch.randn(4, 8, 16)
        >>> for _ in range(12):
        ...     loss = layer(x, x, x)[0].square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        1 1.926
        10 1.944

    Source:
        Zhai et al. (2023), arXiv:2303.06296, for the collapse of entropy in training that
        diverges; Dehghani et al. (2023), arXiv:2302.05442, for the growth of logits; Kimi Team
        (2025), arXiv:2507.20534, for a largest logit of 100.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        metrics: Sequence[str] = ("entropy", "max_logit"),
        layers: Chosen | None = None,
        heads: Chosen | None = None,
        max_rows: int | None = None,
        provide: bool = False,
        false_alarms: float | None = 100.0,
        collapse: float | None = None,
        max_logit: float | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
        histograms: Histograms = "layer",
        profile: bool = False,
        rollouts: bool = False,
        log: Log | Sequence[Log] | None = None,
        group: Any = None,
    ) -> None:
        if isinstance(metrics, str):
            raise TypeError(f"metrics must be a sequence of names, got the string {metrics!r}")
        if on_alarm is not None and not callable(on_alarm):
            raise TypeError(f"on_alarm must be a function of an Alarm, got {on_alarm!r}")
        if histograms not in get_args(Histograms):
            allowed = ", ".join(map(repr, get_args(Histograms)))
            raise ValueError(f"histograms must be one of {allowed}, got {histograms!r}")
        self.every = check_count("every", every, 1)
        self.metrics = tuple(dict.fromkeys(metric(name).name for name in metrics))
        self.layers, self.heads = layers, heads
        self.max_rows = None if max_rows is None else check_count("max_rows", max_rows, 2)
        self.provide = check_flag("provide", provide)
        self.profile = check_flag("profile", profile)
        self.thresholds = Thresholds(collapse, max_logit)
        self.growth = LogitGrowth(false_alarms)
        self.on_alarm, self.histograms = on_alarm, histograms
        self.rollouts = check_flag("rollouts", rollouts)
        self._log, self.group = destinations(log), group  # Lightning sets an attribute log
        self.steps = 0
        self.last: MonitorRecord | None = None
        self._measured = 0  # the last step that was
        self._warned: set[tuple[str, str, int]] = set()
        self._model: torch.nn.Module | None = None
        self._probe: Probe | None = None
        self._rollout_probe: Probe | None = None
        self._problem = ""
        self._open = ExitStack()  # what is watched or wrapped now
        self._optimizers: tuple[Any, ...] = ()
        self._hooks: tuple[Any, ...] = ()  # of the optimisers
        self._trainer: Any = None  # that of transformers

    def __repr__(self) -> str:
        return (
            f"<AttentionMonitor of {', '.join(self.metrics)}: every {self.every} steps, "
            f"{self.steps} seen>"
        )

    # -- a loop of one's own ----------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the current step is to be measured.

        These are the first, each multiple of ``every``, and in the first 1000 steps each multiple
        of 10. If a loop counts several steps at once, the first step at or after each multiple.
        """
        number = self.steps + 1
        every = min(self.every, EARLY) if number <= EARLY_STEPS else self.every
        return number == 1 or number % every == 0 or number - self._measured >= every

    def watch(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Context that measures the forward passes inside it if the step is due.

        Args:
            model: the model being trained, the same throughout a step.

        Raises:
            TypeError: if it is not a module.
            ValueError: if another model was watched in this step.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        return self._watching(model) if self.due else nullcontext()

    @contextmanager
    def _watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep the probe of this step open during one forward pass."""
        if self._probe is None:
            self._model, self._probe = model, self._new_probe(model, self.provide)
            if self.rollouts:
                self._rollout_probe = self._new_probe(model, provide=False)
                self._rollout_probe.read_passes(gradients=False)
        elif self._model is not model:
            raise ValueError(
                f"a monitor can watch only one model, but {type(self._model).__name__} was "
                f"watched in this step before {type(model).__name__}: use a monitor for each"
            )
        # who watches a pass without gradients wants it measured
        self._probe.read_passes(gradients=True if torch.is_grad_enabled() else None)
        with ExitStack() as context:
            for opened in (self._rollout_probe, self._probe):
                if opened is not None:
                    context.enter_context(self._reading(opened))
            yield

    @contextmanager
    def _reading(self, opened: Probe) -> Iterator[None]:
        """Context of a probe that may see no attention."""
        opened.__enter__()
        try:
            yield
        except BaseException:
            self._forget()  # a forward pass that ended early would count in some layers only
            opened.__exit__(*sys.exc_info())
            raise
        try:
            opened.__exit__(None, None, None)
        except ProbeError as problem:
            if opened is self._probe:  # a step may have no rollouts
                self._problem = self._problem or str(problem)

    def _new_probe(self, model: torch.nn.Module, provide: bool) -> Probe:
        """A probe for this step."""
        return probe(
            model,
            metrics=[name for name in METRICS if name in (*self.metrics, *self.thresholds.metrics)],
            layers=self.layers,
            heads=self.heads,
            max_rows=self.max_rows,
            seed=self.steps,
            provide=provide,
            verify=False,
            profile=self.profile,
        )

    def step(self) -> MonitorRecord | None:
        """End an optimiser step: call it after ``optimizer.step()``, on every rank.

        Returns:
            The measurements; None if the step was not due, or nothing could be read.

        Raises:
            ProbeError: if the first measured step showed no attention. Later ones only warn.
        """
        due, self.steps = self.due, self.steps + 1
        if not due:
            return None
        summary, rollout = self._summaries()
        self._measured = self.steps
        if summary is None:
            return None
        rate = self.learning_rate
        alarms = self.thresholds.alarms(summary, self.growth, self.steps, rate)
        values = scalars(summary, self.metrics, alarms)
        if rate is not None:
            values[LEARNING_RATE] = rate
        if rollout is not None:
            values |= scalars(rollout, self.metrics, prefix=ROLLOUT)
        self.last = MonitorRecord(self.steps, summary, values, alarms, rollout)
        for target in self._log if ranks(self.group)[0] == 0 else ():
            if hasattr(target, "add_scalar"):
                for name, value in values.items():
                    target.add_scalar(name, value, self.steps)
                self.write_histograms(target, self.last)
            else:
                target(dict(values), self.steps)
        self._raise_alarms(alarms)
        return self.last

    def write_histograms(self, writer: Any, record: MonitorRecord) -> None:
        """Write a record's histograms to a ``SummaryWriter`` of torch or tensorboardX."""
        if self.histograms == "none" or not hasattr(writer, "add_histogram_raw"):
            return
        summary = record.summary
        tags = [_tag(PREFIX, layer.module) for layer in summary.layers]
        if self.histograms == "layer":
            histograms = [(tag, "", summary.layer(index)) for index, tag in enumerate(tags)]
        else:
            histograms = [
                (tags[layer], f"/head{head}", summary.moments.heads(row, row + 1))
                for row, (layer, head) in enumerate(summary.places)
            ]
        for tag, of_head, moments in histograms:
            for name in self.metrics:
                raw = _histogram(moments, summary.metrics.index(name), name)
                if raw is not None:
                    name = f"{tag}/{name}{of_head}"
                    writer.add_histogram_raw(name, **raw, global_step=record.step)

    def _summaries(self) -> tuple[HeadSummary | None, HeadSummary | None]:
        """Summaries of this step and its rollouts over all ranks; a warning if it has no rows."""
        opened, rollout, problem = self._probe, self._rollout_probe, self._problem
        self._forget()
        summary, why = self._over_ranks(opened)
        rolled = self._over_ranks(rollout)[0] if self.rollouts else None
        if summary is not None:
            return summary, rolled
        problem = problem or why or "no forward pass was watched in this step"
        if self.last is None:
            raise ProbeError(f"the monitor measured nothing: {problem}")
        text = f"attention at step {self.steps} was not measured: {problem}"
        warnings.warn(text, AttentionWarning, stacklevel=3)
        return None, None

    def _over_ranks(self, opened: Probe | None) -> tuple[HeadSummary | None, str]:
        """The summary of a probe over all ranks, or None with the reason."""
        summary = None
        if opened is not None:
            with contextlib.suppress(ProbeError):
                summary = opened.summary()
        if ranks(self.group)[1] > 1:
            try:
                summary = all_reduce_summary(summary, self.group)
            except ValueError as error:
                return None, str(error)
        return summary, ""

    def _raise_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Warn about heads that cross a threshold for the first time."""
        new = [alarm for alarm in alarms if alarm.place not in self._warned]
        self._warned |= {alarm.place for alarm in new}
        if ranks(self.group)[0] == 0:
            for kind in dict.fromkeys(alarm.kind for alarm in new):
                text = summed_up([alarm for alarm in new if alarm.kind == kind])
                warnings.warn(text, AttentionWarning, stacklevel=3)
        if self.on_alarm is not None:
            for alarm in new:
                self.on_alarm(alarm)

    # -- beginning and ending ---------------------------------------------------------------------

    def _forget(self) -> None:
        """Discard the measurements of the current step."""
        self._model, self._probe, self._rollout_probe, self._problem = None, None, None, ""

    def _begin_anew(self) -> None:
        """Reset the state, for a new run with another model."""
        self._forget()
        self.steps = self._measured = 0
        self.last = None
        self._warned.clear()
        self.growth.clear()

    def close(self) -> None:
        """Release the model, the trainer and the optimiser."""
        hooks, self._hooks, self._optimizers = self._hooks, (), ()
        for hook in hooks:
            hook.remove()
        self._release()
        self._forget()

    def __enter__(self) -> AttentionMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Steps and the heads already warned about, as JSON-compatible values."""
        return {
            "steps": self.steps,
            "measured": self._measured,
            "told": [list(place) for place in sorted(self._warned)],
            "growth": self.growth.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        States of earlier versions have no ``growth``: its measurements then begin anew.

        Raises:
            ValueError: if something is missing, or of the wrong kind.
        """
        required = set(AttentionMonitor.state_dict(self))
        if set(state_dict) | {"growth"} != required:
            raise ValueError(
                f"the state of an AttentionMonitor must have {', '.join(sorted(required))}, got "
                f"{', '.join(sorted(map(str, state_dict))) or 'nothing'}"
            )
        steps = check_count("steps", state_dict["steps"], 0)
        measured = check_count("measured", state_dict["measured"], 0)
        warned = set()
        for place in state_dict["told"]:
            if not isinstance(place, list | tuple) or len(place) != 3:
                raise ValueError(
                    f"'told' of the state must be a list of (kind, module, head), got {place!r}"
                )
            kind, module, head = place
            warned.add((str(kind), str(module), check_count("head", head, 0)))
        self.growth.load_state_dict(state_dict.get("growth", {}))
        self.steps, self._measured, self._warned = steps, measured, warned

    # -- events of both trainers -----------------------------------------------------------------
    # they find callbacks by method names and need no base class: neither library is imported

    @property
    def learning_rate(self) -> float | None:
        """The highest learning rate of the optimisers; None where they are unknown."""
        groups = chain.from_iterable(getattr(o, "param_groups", ()) for o in self._optimizers)
        return max((float(group["lr"]) for group in groups if "lr" in group), default=None)

    def _release(self) -> None:
        """Close the contexts of the current step."""
        context, self._open = self._open, ExitStack()
        context.close()

    def __getattr__(self, name: str) -> Any:
        """Ignore all other events, in any release of the trainer."""
        if name.startswith("on_") or name == "setup":
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the monitor."""
        self.close()

    on_exception = teardown = on_train_end

    # -- transformers' Trainer --------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Find the Trainer, and restore the state from a checkpoint."""
        self.close()
        self._trainer = _calling_trainer(self)
        saved = (getattr(state, "stateful_callbacks", None) or {}).get(STATE_KEY)
        if not state.global_step:
            self._begin_anew()
        elif saved is not None:
            self.load_state_dict(saved)

    def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Watch this step's forward passes, inside each call of ``training_step``."""
        self._release()
        self._forget()
        self.steps = state.global_step
        if not self.due:
            return
        trainer, model = self._trainer, options["model"]
        if trainer is None:  # a loop that is no Trainer, and calls the events of one
            self._open.enter_context(self.watch(model))
            return
        plain, overridden = trainer.training_step, "training_step" in vars(trainer)

        def training_step(*args: Any, **kwargs: Any) -> Any:
            try:
                with self.watch(model):
                    return plain(*args, **kwargs)
            except BaseException:
                self._release()
                raise

        def restore() -> None:
            if overridden:
                trainer.training_step = plain
            else:
                vars(trainer).pop("training_step", None)

        trainer.training_step = training_step
        self._open.callback(restore)

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Record the step, and log it together with the Trainer's losses."""
        self._release()
        self.steps = state.global_step - 1
        self._optimizers = (options.get("optimizer"),)
        record = self.step()
        if isinstance(getattr(state, "stateful_callbacks", None), dict):
            state.stateful_callbacks[STATE_KEY] = self.state_dict()
        if record is None:
            return
        logs: dict[str, Any] = dict(record.scalars)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        if self._trainer is None:
            return
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        for callback in tuple(self._trainer.callback_handler.callbacks):
            if callback is self or isinstance(callback, PrinterCallback | ProgressCallback):
                continue  # the others print in the terminal
            callback.on_log(args, state, control, logs=dict(logs), **options)
            writer = getattr(callback, "tb_writer", None)
            if writer is not None:
                self.write_histograms(writer, record)

    # -- Lightning's Trainer ----------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        return type(self).__qualname__

    @property
    def _legacy_state_key(self) -> type:
        return type(self)

    def on_train_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Reset, unless the run resumes a checkpoint or an earlier fit."""
        if not trainer.global_step:
            self._begin_anew()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Watch the batch if its optimiser step is due."""
        self._release()
        if trainer.global_step != self.steps:
            self._forget()
        self.steps = trainer.global_step
        if self.due:
            self._open.enter_context(self.watch(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Record and log the training step, once the optimiser has updated the weights."""
        self._release()
        if trainer.global_step == self.steps:
            return  # gradients are accumulated
        self._optimizers = tuple(trainer.optimizers)
        record = self.step()
        if record is None:
            return
        pl_module.log_dict(record.scalars, logger=False)
        for logger in trainer.loggers:
            logger.log_metrics(record.scalars, step=record.step)
            writer = getattr(logger, "experiment", None)
            if trainer.is_global_zero and hasattr(writer, "add_histogram_raw"):
                self.write_histograms(writer, record)

    # -- hooks of an optimiser --------------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    ) -> Self:
        """Measure a training loop from now on, in place of :meth:`watch` and :meth:`step`.

        Every forward pass of the model up to the optimiser's step belongs to that step, also with
        gradient accumulation, in any wrapper, and by methods other than ``forward``. Passes
        without gradients (evaluation, generated text) do not. :meth:`close` ends it, and should
        be called after an exception in the loop, or use ``with``.

        Args:
            model: the model being trained; wrapping or compiling it later is no problem.
            optimizer: its optimiser, also as Accelerate, Fabric and torchtitan wrap it. Of
                several, the last one ends the step.

        Returns:
            The monitor.

        Raises:
            TypeError: if the model is not a module, or something is not an optimiser.

        Example:
            >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            >>> optimizer = torch.optim.AdamW(layer.parameters())
            >>> with AttentionMonitor(every=2).attach(layer, optimizer) as monitor:
            ...     for _ in range(4):
            ...         layer(torch.randn(4, 8, 16)).square().mean().backward()
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            >>> monitor.steps, monitor.last.step
            (4, 4)
        """
        several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        optimizers = [_innermost(wrapped) for wrapped in several]
        if not optimizers:
            raise TypeError("optimizer must be an optimiser or several, got none")
        self.close()
        before = [inner.register_step_pre_hook(self._before_step) for inner in optimizers]
        after = optimizers[-1].register_step_post_hook(lambda *_: self._after_step(model))
        self._hooks, self._optimizers = (*before, after), tuple(optimizers)
        self._watch_next(model)
        return self

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Stop watching before the optimiser runs, unless it computes the loss itself."""
        if not any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            self._release()

    def _after_step(self, model: torch.nn.Module) -> None:
        """End the step, and watch the next one if it is due."""
        self._release()
        self.step()
        self._watch_next(model)

    def _watch_next(self, model: torch.nn.Module) -> None:
        """Watch the model until the next step ends, if that is due."""
        if self.due:
            # below the modes that are open now, which end at a time of their own
            with unwatched():
                self._open.enter_context(self.watch(model))


def _nothing(*_: Any, **__: Any) -> None:
    """Ignore an event."""


def _calling_trainer(callback: object) -> Any:
    """Find the Trainer that is calling this callback; the event does not pass it."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        theirs = getattr(handler, "callbacks", ())
        if hasattr(owner, "training_step") and any(candidate is callback for candidate in theirs):
            return owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside wrappers, which have no hooks of their own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or several, got {type(optimizer).__name__}"
        )
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
