"""The part of an applied law that attention by plain PyTorch functions asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
from acutance.capture.attention_call import AttentionCall
from acutance.capture.head_axis import could_be_over_keys, heads_of
from acutance.capture.module_names import class_name
from acutance.capture.module_stack import ModuleStack
from acutance.capture.readers.torch_sdpa import sdpa_call

__all__ = ["PlainCalls"]


class PlainCalls(ABC):
    """The part of an applied law that changes calls of plain PyTorch functions.

    These are SDPA, ``nn.MultiheadAttention`` and hand-written softmaxes.

    Attributes:
        calls: number of changed calls by module name.
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
        """Context in which this thread's calls are not changed: they are part of a changed call."""

    @abstractmethod
    def skip(self, name: str) -> None:
        """Note that calls of a module are left unchanged."""

    @abstractmethod
    def unreachable(self, name: str, reason: str) -> Exception:
        """The error to raise when the law cannot change the attention of the module ``name``."""

    @abstractmethod
    def _count(self, name: str) -> None:
        """Count a changed call."""

    def _running_name(self) -> str | None:
        """Name of the innermost module that this thread runs; None outside the model."""
        return self._modules.running() if self._modules.thread.stack else None

    def _running(self) -> Plan | None:
        """The plan of the innermost module that this thread runs; None outside the model."""
        name = self._running_name()
        return None if name is None else self._plans.of(name)

    def module_to_change(self) -> str | None:
        """Name of the running module if the law changes its attention; None if not."""
        plan = self._running()
        if plan is None or plan.laws is None or self._holds(plan.name):
            return None
        if plan.windowed and not self._windowed:
            self.skip(plan.name)
            return None
        return plan.name

    def _holds(self, name: str) -> bool:
        """Whether a submodule uses transformers' interface and the module itself does not.

        A compiled module reports no running submodules, so functions that seem to be called by the
        module itself are then the submodule's, which the interface scales already.
        """
        if not self._traces:
            return False
        start = "" if name == class_name(self._model) else f"{name}."
        return any(one.startswith(start) and one != name for one in self._asking)

    def changed_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of SDPA with the query scaled and the keys outside the windows hidden.

        Args:
            name: name of the running module.
            given: SDPA's arguments by name.

        Raises:
            ApplyError: if the law does not fit the call.
        """
        changed = {**given, "query": given["query"] * self.factor_of_arguments(name, given)}
        return self.masked_arguments(name, changed)

    def masked_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of SDPA with the keys outside the layer's windows hidden.

        Returns:
            The arguments; ``given`` itself if the layer has no windows.

        Raises:
            ApplyError: if the windows cannot be applied to the call.
        """
        plan = self._running()
        if plan is None or plan.laws is None or not plan.laws.all_windows():
            return given
        with self.mute(), torch._C.DisableTorchFunction():
            try:
                return masked_arguments(plan.laws, sdpa_call(given, name), given)
            except ValueError as error:
                raise self.unreachable(name, str(error)) from error

    def factor_of_arguments(self, name: str, given: dict[str, Any]) -> Tensor:
        """Factor to multiply the query with, in a call of SDPA with these arguments.

        Returns:
            The factor, in a shape that broadcasts with the query.

        Raises:
            ApplyError: if the law does not fit the call.
        """
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

    def factor_of_kernel(self, name: str, kernel: str, read: Callable[[], AttentionCall]) -> Tensor:
        """Factor of the queries in a call of a kernel function, (B or 1, Hq or 1, L, 1).

        Args:
            name: name of the running module.
            kernel: name of the function.
            read: reads the call's arguments.

        Raises:
            ApplyError: if the law has windows, the call is not understood or does not fit the law.
        """
        plan = self._running()
        assert plan is not None
        assert plan.laws is not None
        if plan.laws.all_windows():
            raise self.refused_kernel(name, kernel, "a law's windows cannot be passed to it")
        with self.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                factor = factor_of_call(plan.laws, read())
            except ValueError as error:
                raise self.refused_kernel(name, kernel, str(error)) from error
        self._count(name)
        return factor.unsqueeze(-1)

    def refused_kernel(self, name: str, kernel: str, reason: str) -> Exception:
        """The error to raise for a call of a kernel function that cannot be changed."""
        return self.unreachable(
            name, reason if kernel in reason else f"it calls {kernel}: {reason}"
        )

    def could_be_over_keys(self, scores: Tensor, dim: int) -> bool:
        """Whether a softmax over ``dim`` in the running module could be attention over keys."""
        name = self._running_name()
        return name is not None and could_be_over_keys(scores, dim, self._heads(name))

    def _heads(self, name: str) -> int | None:
        """Number of heads of a module, or of the module around it; None if neither states it."""
        above = self._modules.module_of(name.rpartition(".")[0])
        return heads_of(self._modules.module_of(name)) or heads_of(above)

    def changed_scores(
        self, name: str, scores: Tensor, bare: Tensor, dim: int, narrow: torch.dtype
    ) -> Tensor:
        """The scores of a hand-written softmax as the law changes them.

        Args:
            name: name of the attention module.
            scores: input of the softmax.
            bare: the scores without the products of queries and keys, same shape.
            dim: dimension of the keys.
            narrow: dtype whose most negative numbers count as hiding a key.

        Raises:
            ApplyError: if the law cannot be applied to them.
        """
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
