"""PassFollower: follows every module of a forward pass, until watching entry points is enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from acutance.capture.entry_points import EntryPoints, has_other_observers, is_library_code
from acutance.capture.find_layers import may_compute_attention
from acutance.capture.kernel_functions.replace import replace_new
from acutance.capture.module_stack import ModuleStack
from acutance.capture.torch_modes import undoing

__all__ = ["PassFollower"]


class PassFollower:
    """Follows the forward passes of one model for a listener or an applied law.

    At first, hooks follow every module. If a pass showed that all attention uses transformers'
    interface and all code is library code, :meth:`watch` replaces the hooks by
    :class:`~acutance.capture.entry_points.EntryPoints`; :meth:`follow_again` goes back.

    Args:
        modules: the modules of the model.
        on_begin: as for :class:`~acutance.capture.entry_points.EntryPoints`.
        on_end: likewise.
        on_attention: likewise.

    Attributes:
        is_library: whether entry points may be watched instead; None if not yet known.
        interface_modules: modules that used transformers' interface.
        not_yet_run: names of modules that may compute attention and have not run yet.
        lock: held while passes begin, end, or the way of following changes.
    """

    def __init__(
        self,
        modules: ModuleStack,
        *,
        on_begin: Callable[[torch.nn.Module, bool], None],
        on_end: Callable[[torch.nn.Module], None],
        on_attention: Callable[[bool, bool], None],
    ) -> None:
        self.is_library: bool | None = None
        self.interface_modules: set[torch.nn.Module] = set()
        self.not_yet_run: set[str] = set()
        self.lock = threading.RLock()
        self._modules = modules
        self._on_begin, self._on_end, self._on_attention = on_begin, on_end, on_attention
        self._entry_points: EntryPoints | None = None  # watched instead of following passes
        self._following, self._watching = ExitStack(), ExitStack()
        self._roots: set[torch.nn.Module] = set()
        self._running = 0

    @contextmanager
    def follow(self, is_library: bool | None = None) -> Iterator[None]:
        """Context in which every module of the model's forward passes is followed by hooks.

        ``is_library`` states whether the model is only PyTorch and transformers code; None finds
        out when it matters.
        """
        self.is_library, self._running = is_library, 0
        self.interface_modules.clear()
        self._roots.clear()
        self.not_yet_run = {
            name for name, module in self._modules.named().items() if may_compute_attention(module)
        }
        with undoing(self._stop):
            self._following.enter_context(self._modules.follow())
            yield

    def _stop(self) -> None:
        """Follow and watch nothing."""
        self._entry_points = None
        self._watching.close()
        self._following.close()

    def begin(self, module: torch.nn.Module) -> None:
        """Record that a followed pass begins with this module."""
        with self.lock:
            if self._entry_points is None:
                replace_new()
            self._roots.add(module)
            self._running += 1

    def end(self) -> bool:
        """Record that a followed pass ended.

        Returns:
            Whether every module that may compute attention has run, and some used the interface.
        """
        with self.lock:
            self._running -= 1
            return bool(self.interface_modules) and not self.not_yet_run

    def watch(
        self, inside: Callable[[], Iterable[torch.nn.Module]] | None = None, modes: int = 0
    ) -> bool:
        """Replace the hooks on every module by watching attention functions, if that is enough.

        It is not if the model has code other than PyTorch's and transformers', or other hooks or
        function modes are active.

        Args:
            inside: returns further modules to follow; those that use the interface are added.
            modes: number of this thread's function modes that belong to the caller.

        Returns:
            Whether attention functions are watched from now on.
        """
        with self.lock:
            if self.is_library is False or self._running or self._entry_points is not None:
                return False
            if self.is_library is None:
                self.is_library = is_library_code(self._modules.model)
            if not self.is_library or has_other_observers(hooks=1, modes=modes):
                return False
            self._entry_points = EntryPoints(
                self._modules.model,
                self._roots,
                list(self.interface_modules),
                on_begin=self._on_begin,
                on_end=self._on_end,
                on_attention=self._on_attention,
                inside=() if inside is None else {*inside(), *self.interface_modules, *self._roots},
                enter=self._modules.enter,
                leave=self._modules.leave,
            )
            self._following.close()
            self._watching.enter_context(self._entry_points.watch())
            return True

    def follow_again(self) -> bool:
        """Put hooks on every module again; returns False if they were there already."""
        with self.lock:
            if self._entry_points is None:
                return False
            self._entry_points = None
            self._watching.close()
            self._following.enter_context(self._modules.follow())
            return True
