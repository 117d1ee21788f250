"""AttentionMonitor: measure a model's attention every few steps of its training."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch

from acutance.capture.layer_choice import Chosen
from acutance.capture.listener import ProbeError
from acutance.corpus.ranks import all_reduce_summary
from acutance.probing.open_probe import Probe, probe
from acutance.rowstats import METRICS, metric
from acutance.shapes import check_count, check_flag
from acutance.summary.head_summary import HeadSummary
from acutance.training.across_ranks import ranks
from acutance.training.alarms import (
    Alarm,
    AttentionWarning,
    LogitGrowth,
    Thresholds,
    summed_up,
)
from acutance.training.callbacks import TrainingEvents
from acutance.training.logs import (
    LEARNING_RATE,
    ROLLOUT,
    Log,
    MonitorRecord,
    destinations,
    scalars,
    send,
    write,
)

__all__ = ["AttentionMonitor", "Histograms"]

Histograms = Literal["layer", "head", "none"]
#: Most steps between two measurements in the first steps, and how many steps these are.
EARLY, EARLY_STEPS = 10, 1000


@contextmanager
def _possibly_empty(opened: Probe) -> Iterator[None]:
    """Context of a probe that may see no attention."""
    opened.__enter__()
    try:
        yield
    finally:
        with contextlib.suppress(ProbeError):
            opened.__exit__(*sys.exc_info())


class AttentionMonitor(TrainingEvents):
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
        super().__init__()

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
        opened, rollout = self._probe, self._rollout_probe
        # who watches a pass without gradients wants it measured
        opened.read_passes(gradients=True if torch.is_grad_enabled() else None)
        with nullcontext() if rollout is None else _possibly_empty(rollout):
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
                self._problem = str(problem)

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
        if ranks(self.group)[0] == 0:
            send(values, self.steps, self._log)
            for writer in self._log:
                self.write_histograms(writer, self.last)
        self._raise_alarms(alarms)
        return self.last

    def write_histograms(self, writer: Any, record: MonitorRecord) -> None:
        """Write a record's histograms to a ``SummaryWriter``."""
        write(writer, record.summary, self.metrics, self.histograms, record.step)

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
        warnings.warn(
            f"attention at step {self.steps} was not measured: {problem}",
            AttentionWarning,
            stacklevel=3,
        )
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
        self._remove_hooks()
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
