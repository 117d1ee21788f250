"""Connect a monitor to transformers' Trainer, to Lightning, and to the optimiser of any loop.

Both trainers find callbacks by method names and need no base class, so neither library is imported,
and both Lightning packages work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from acutance.capture.torch_modes import unwatched

if TYPE_CHECKING:
    from typing_extensions import Self

    from acutance.training.logs import MonitorRecord

__all__ = ["TrainingEvents"]

#: Under which name the Trainer's own state keeps ours, and so its checkpoints.
STATE_KEY = "acutance.AttentionMonitor"
_FRAMES = 8


class TrainingEvents:
    """What a monitor does at the events of two trainers, and of the optimiser of any loop."""

    steps: int
    last: MonitorRecord | None
    watch: Callable[[torch.nn.Module], AbstractContextManager[None]]
    step: Callable[[], MonitorRecord | None]
    write_histograms: Callable[[Any, MonitorRecord], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    close: Callable[[], None]
    _forget: Callable[[], None]
    _begin_anew: Callable[[], None]

    if TYPE_CHECKING:

        @property
        def due(self) -> bool:
            """Whether the current step is to be measured."""
            ...

    def __init__(self) -> None:
        self._open = ExitStack()  # what is watched or wrapped now
        self._optimizers: tuple[Any, ...] = ()
        self._hooks: tuple[Any, ...] = ()  # of the optimisers
        self._trainer: Any = None  # that of transformers

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
        handler = getattr(self._trainer, "callback_handler", None)
        for callback in () if handler is None else tuple(handler.callbacks):
            if callback is self or _prints(callback):
                continue
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

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Close the monitor."""
        self.close()

    def teardown(self, *_: Any, **__: Any) -> None:
        """Close the monitor."""
        self.close()

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
            >>> from acutance.training import AttentionMonitor
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

    def _remove_hooks(self) -> None:
        """Remove the hooks from the optimisers."""
        hooks, self._hooks, self._optimizers = self._hooks, (), ()
        for hook in hooks:
            hook.remove()


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


def _prints(callback: object) -> bool:
    """Whether a Trainer callback prints logs to the terminal."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    return isinstance(callback, PrinterCallback | ProgressCallback)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside wrappers, which have no hooks of their own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or several, got {type(optimizer).__name__}"
        )
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
