"""The part of an applied law that attention by plain PyTorch functions asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.factors import (
    Plan,
    Plans,
    as_query,
    factor_of_call,
    scaled_scores,
    warn_of_shallow_mask,
)
from acutance.calibration.windowed_calls import masked_arguments, masked_scores
from acutance.capture.head_axis import could_be_over_keys, heads_of
from acutance.capture.module_names import class_name
from acutance.capture.module_stack import ModuleStack
from acutance.capture.readers.torch_sdpa import sdpa_call

__all__ = ["PlainCalls"]


class PlainCalls(ABC):
    """Scales and masks calls of SDPA, ``nn.MultiheadAttention`` and hand-written softmaxes.

    Attributes:
        calls: module name and how many of its calls were changed.
    """

    calls: dict[str, int]
    _model: torch.nn.Module
    _modules: ModuleStack
    _plans: Plans
    _windowed: bool
    _traces: bool
    _asking: set[str]

    @abstractmethod
    def mute(self) -> AbstractContextManager[None]:
        """Do not change this thread's calls in the context: they are part of a changed call."""

    @abstractmethod
    def skip(self, name: str) -> None:
        """Note calls of a module that were left alone."""

    @abstractmethod
    def unreachable(self, name: str, reason: str) -> Exception:
        """The error to raise when the law cannot change the attention of the module ``name``."""

    @abstractmethod
    def _count(self, name: str) -> None:
        """Count a changed call."""

    def _running_name(self) -> str | None:
        return self._modules.running() if self._modules.thread.stack else None

    def _running(self) -> Plan | None:
        name = self._running_name()
        return None if name is None else self._plans.of(name)

    def module_to_change(self) -> str | None:
        """Name of the module now running if its logits are to be scaled, else None."""
        plan = self._running()
        if plan is None or plan.laws is None or self._holds(plan.name):
            return None
        if plan.windowed and not self._windowed:
            self.skip(plan.name)
            return None
        return plan.name

    def _holds(self, name: str) -> bool:
        """Whether a submodule uses transformers' interface and the module itself does not.

        While a compiled graph runs no hook tells which module does: functions that seem to be the
        module's own are that part's.
        """
        if not self._traces:
            return False
        start = "" if name == class_name(self._model) else f"{name}."
        return any(one.startswith(start) and one != name for one in self._asking)

    def changed_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """SDPA's arguments with the query scaled and the keys hidden that its row does not read."""
        changed = {**given, "query": given["query"] * self.factor_of_arguments(name, given)}
        return self.masked_arguments(name, changed)

    def masked_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """SDPA's arguments with the masks of a layer's windows; the same if it has none."""
        plan = self._running()
        if plan is None or plan.laws is None or not plan.laws.all_windows():
            return given
        with self.mute(), torch._C.DisableTorchFunction():
            try:
                return masked_arguments(plan.laws, sdpa_call(given, name), given)
            except ValueError as error:
                raise self.unreachable(name, str(error)) from error

    def factor_of_arguments(self, name: str, given: dict[str, Any]) -> Tensor:
        """Factor of the query, for a call of SDPA with these arguments in module ``name``."""
        plan = self._running()
        assert plan is not None
        assert plan.laws is not None
        with self.mute():
            try:
                call = sdpa_call(given, name)
                factor = factor_of_call(plan.laws, call)
            except ValueError as error:
                raise self.unreachable(name, str(error)) from error
            self._count(name)
            return as_query(factor, given["query"], call.query)

    def could_be_over_keys(self, scores: Tensor, dim: int) -> bool:
        """Whether a softmax over ``dim`` in the running module could be attention's over keys."""
        name = self._running_name()
        return name is not None and could_be_over_keys(scores, dim, self._heads(name))

    def _heads(self, name: str) -> int | None:
        """How many heads a module has, or the one around it, such as that of a softmax."""
        above = self._modules.module_of(name.rpartition(".")[0])
        return heads_of(self._modules.module_of(name)) or heads_of(above)

    def changed_scores(
        self, name: str, scores: Tensor, bare: Tensor, dim: int, narrow: torch.dtype
    ) -> Tensor:
        """A softmax's scores with their products scaled."""
        running, plan = self._running_name(), self._running()
        assert running is not None
        assert plan is not None
        assert plan.laws is not None
        laws, heads, changed = plan.laws, self._heads(running), scores
        try:
            if laws.scalings():
                changed = scaled_scores(scores, bare, dim, laws, heads, narrow)
            if laws.all_windows():
                changed = masked_scores(laws, changed, dim, heads, narrow)
        except ValueError as error:
            raise self.unreachable(name, str(error)) from error
        if name not in self.calls:
            warn_of_shallow_mask(name, bare, dim, narrow)
        self._count(name)
        return changed
