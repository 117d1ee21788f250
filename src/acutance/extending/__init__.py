"""Extending: how a model reads texts that are longer than those it was trained on.

:func:`extend` measures the loss of many changes of a model on a few long windows, goes on with the
best on more windows, and reports the last ones on windows that no choice was made on.
"""

from __future__ import annotations

from acutance.extending.extend_model import extend, proposals
from acutance.extending.record import Extension, Final, Tried

__all__ = ["Extension", "Final", "Tried", "extend", "proposals"]
