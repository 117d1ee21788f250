"""What each thread is doing inside a probed model: modules, forward passes, what is muted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import torch

from acutance.capture.padding import RealRows, TokenMasks

__all__ = ["Passes", "Running", "module_of_method"]


class Running(threading.local):
    """One thread's place in a probed model.

    Attributes:
        depth: contexts open in which captures are ignored.
        stack: names of the modules running, innermost last.
        places: attention calls so far in this pass, by module.
        rows: the last self-attention: module, and which of its rows are real.
        reading: whether this forward pass is read.
        turn: its number.
        calls: attention calls in it, by module.
        masks: over tokens, of the modules running.
    """

    def __init__(self) -> None:
        self.masks = TokenMasks()
        self.reset()

    def reset(self) -> None:
        """Forget everything, of this thread."""
        self.depth = 0
        self.stack: list[str] = []
        self.places: dict[str, int] = {}
        self.rows: tuple[str, RealRows] | None = None
        self.reading, self.turn = True, 0
        self.calls: dict[str, int] = {}
        self.masks.clear()

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Ignore captures of this thread in the context: a call counts once."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def call_number(self, module: str) -> int:
        """How many calls of a module this forward pass had before."""
        count = self.calls.get(module, 0)
        self.calls[module] = count + 1
        return count


class Passes:
    """Counts forward passes, and says which of them are read.

    Attributes:
        every: the first of every so many is read.
        turn: number of the next one; None counts them.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.turn: int | None = None
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, thread: Running) -> None:
        """A pass begins from outside the model, at this module.

        Passes that begin at different modules are counted apart, as those of an encoder and of its
        decoder's steps in generation.
        """
        if rerun():
            return
        with self._lock:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
        thread.reading = count % self.every == 0
        turn = count if self.turn is None else self.turn
        if self.turn is None or turn != thread.turn:
            thread.calls.clear()
        thread.turn = turn


def module_of_method(names: Mapping[int, str]) -> str | None:
    """The module whose method is running, where no forward pass is: ``decoder.decode(x)``.

    It is the first argument of the innermost function that has a module for one.

    Args:
        names: of modules, by identity.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.nn.Module):
                return names.get(id(first))
        frame = frame.f_back
    return None


def rerun() -> bool:
    """Whether a checkpointed forward pass runs again, for the backward pass."""
    return torch._C._current_graph_task_id() != -1
