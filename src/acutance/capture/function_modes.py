"""Leaving a mode of PyTorch functions out of turn."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.overrides import _get_current_function_mode_stack as _stack

__all__ = ["leave"]


def leave(mode: TorchFunctionMode) -> None:
    """Take a mode off this thread's stack, wherever it is; nothing happens where it is not.

    Modes leave the innermost first, but not where an interrupt (Ctrl-C) ends a forward pass:
    PyTorch then skips the hooks that would have left a mode entered inside the pass.

    Example:
        >>> outer, inner = TorchFunctionMode(), TorchFunctionMode()
        >>> with outer, inner:
        ...     leave(outer)
        ...     _stack() == [inner]
        ...     _push_mode(outer)
        True
    """
    above = []
    if not any(each is mode for each in _stack()):
        return
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for each in reversed(above):
        _push_mode(each)
