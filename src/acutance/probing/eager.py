"""Where a probe's own work happens: compiled models run uncompiled, and no mode watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["EAGER", "unwatched"]


class _Eager:
    """Runs compiled models uncompiled while any probe is open.

    A graph compiled earlier would run without ever calling what is captured here. The compiler's
    stance is one for the process, so the first probe to open sets it and the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._stance.__exit__(None, None, None)


EAGER = _Eager()


@contextmanager
def unwatched() -> Iterator[None]:
    """Take this thread's function modes away: not another probe, not a default device sees us.

    Disabling them would leave them on the stack, and calls that something might watch take the
    slow way through the dispatcher.
    """
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
