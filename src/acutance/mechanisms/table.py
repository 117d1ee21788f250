"""``MECHANISMS``: every mechanism by name, with its formula, its theory and a way to run it.

``acutance compare`` and the documentation use this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from acutance.mechanisms.entry import Mechanism
from acutance.mechanisms.scored import SCORED
from acutance.mechanisms.scoreless import SCORELESS

__all__ = ["MECHANISMS", "mechanism"]

#: Every mechanism by its name, in reading order.
MECHANISMS: Mapping[str, Mechanism] = MappingProxyType(
    {entry.name: entry for entry in (*SCORED, *SCORELESS)}
)

#: What others call entries of the table.
_ALSO = {
    "softmax": "scaled_dot", "sdpa": "scaled_dot", "attention": "scaled_dot", "luong": "general",
    "bahdanau": "additive", "linear": "linear_elu1", "retnet": "retention", "alibi": "alibi_decay",
}  # fmt: skip


def mechanism(name: str | Mechanism) -> Mechanism:
    """Look up a mechanism by name; an entry is returned as it is.

    Raises:
        ValueError: if the name is unknown; the message gives the nearest.
        TypeError: if it is neither a name nor a Mechanism.

    Example:
        >>> mechanism("relu2").can_concentrate[:42]
        'Only if the mean β of the scores is below '
        >>> mechanism("softmx")
        Traceback (most recent call last):
        ValueError: there is no mechanism named 'softmx'; did you mean 'scaled_dot'?
    """
    if isinstance(name, Mechanism):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a mechanism must be a name or a Mechanism, got {type(name).__name__}")
    if name not in MECHANISMS:
        close = difflib.get_close_matches(name, [*MECHANISMS, *_ALSO], n=1, cutoff=0.7)
        hint = f"choose from {', '.join(MECHANISMS)}"
        if close:
            hint = f"did you mean {_ALSO.get(close[0], close[0])!r}?"
        raise ValueError(f"there is no mechanism named {name!r}; {hint}")
    return MECHANISMS[name]
