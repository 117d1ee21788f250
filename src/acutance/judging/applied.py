"""AppliedChange: RoPE settings or heads off that are in force on a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from acutance.calibration.apply_law import InForce


class AppliedChange(InForce):
    """RoPE settings or heads off, applied to a model: what :func:`acutance.apply` returns.

    Args:
        name: of the change.
        context: in which the model is changed; it is entered at once.
    """

    def __init__(self, name: str, context: AbstractContextManager[Any]) -> None:
        self._noun = name
        with ExitStack() as stack:
            stack.enter_context(context)
            self._context = stack.pop_all()

    def __repr__(self) -> str:
        return f"<{self._noun}, {'removed' if self._context is None else 'applied'}>"
