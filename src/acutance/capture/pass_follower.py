"""PassFollower: every module of a pass is followed, until a few places of the model are enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from acutance.capture.entry_points import Doors, is_library_code, others_listen
from acutance.capture.find_layers import may_attend
from acutance.capture.module_stack import ModuleStack

__all__ = ["PassFollower"]


class PassFollower:
    """Follows the forward passes of one model for whoever listens to it or changes it.

    At first the hooks of ``modules`` follow every module. Where a pass showed that all attention
    asks transformers' interface, and all code is that of libraries, :meth:`watch` closes the hooks
    and has later passes watched by :class:`~acutance.capture.entry_points.Doors`;
    :meth:`follow_again` goes back.

    Args:
        modules: the modules of the model.
        begun: as for the doors.
        ended: as for the doors.
        passed: as for the doors.

    Attributes:
        library: whether passes may be watched at doors; None: not yet known.
        asked: modules that asked transformers' interface.
        unseen: names of modules that may attend and did not run yet.
        lock: held while passes begin, end, or come to be followed in another way.
    """

    def __init__(
        self,
        modules: ModuleStack,
        *,
        begun: Callable[[torch.nn.Module, bool], None],
        ended: Callable[[torch.nn.Module], None],
        passed: Callable[[bool, bool], None],
    ) -> None:
        self.library: bool | None = None
        self.asked: set[torch.nn.Module] = set()
        self.unseen: set[str] = set()
        self.lock = threading.RLock()
        self._modules = modules
        self._begun, self._ended, self._passed = begun, ended, passed
        self._doors: Doors | None = None  # watched instead of following passes
        self._following, self._watching = ExitStack(), ExitStack()
        self._roots: set[torch.nn.Module] = set()
        self._running = 0

    @contextmanager
    def follow(self, library: bool | None = None) -> Iterator[None]:
        """Follow passes for the length of the context."""
        self.library, self._running = library, 0
        self.asked.clear()
        self._roots.clear()
        self.unseen = {name for name, one in self._modules.named().items() if may_attend(one)}
        with self._watching, self._following:
            self._following.enter_context(self._modules.follow())
            try:
                yield
            finally:
                self._doors = None

    def begin(self, module: torch.nn.Module) -> None:
        """A pass that is followed begins with this module."""
        with self.lock:
            self._roots.add(module)
            self._running += 1

    def end(self) -> bool:
        """Such a pass has ended; whether all modules ran by now and some asked the interface."""
        with self.lock:
            self._running -= 1
            return bool(self.asked) and not self.unseen

    def watch(
        self, inside: Callable[[], Iterable[torch.nn.Module]] | None = None, modes: int = 0
    ) -> bool:
        """Follow passes no longer, where what else they could do would be seen.

        Args:
            inside: further modules to follow in a pass; those that ask the interface are too.
            modes: function modes of this thread that are the caller's.

        Returns:
            Whether passes are watched at doors from now on.
        """
        with self.lock:
            if self.library is False or self._running or self._doors is not None:
                return False
            if self.library is None:
                self.library = is_library_code(self._modules.model)
            if not self.library or others_listen(hooks=1, modes=modes):
                return False
            self._doors = Doors(
                self._modules.model,
                self._roots,
                list(self.asked),
                begun=self._begun,
                ended=self._ended,
                passed=self._passed,
                inside=() if inside is None else {*inside(), *self.asked, *self._roots},
                enter=self._modules.enter,
                leave=self._modules.leave,
            )
            self._following.close()
            self._watching.enter_context(self._doors.watch())
            return True

    def follow_again(self) -> bool:
        """Watch doors no longer; whether they were watched."""
        with self.lock:
            if self._doors is None:
                return False
            self._doors = None
            self._watching.close()
            self._following.enter_context(self._modules.follow())
            return True
