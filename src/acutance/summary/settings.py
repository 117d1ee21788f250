"""Settings of a saved state, compared with those of the run that resumes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: What a setting is called, if not by the option of its name.
_OPTIONS = {
    "laws": "--law",
    "plans": "--keep",
    "value": "the value of --target",
    "alternatives": "the choice of windows (--window, --streaming)",
    "chosen": "the choice of windows (--window)",
    "weights": "the type of the weights",
    "windows": "the number of windows (--windows)",
    "loss": "the loss",
    "key_heads": "key_heads",
}
#: Settings whose values say nothing to a reader.
_OTHER = {
    "model": "it was written for another MODEL, or for other weights of it",
    "text": "it was written for another text, or other windows of it; --text, --windows and --seed "
    "must be the same",
}
#: Settings that change others with them are compared before those, and others in between.
_FIRST = ("attention", "dtype", "weights", "model")
_LAST = ("lengths", "reference", "windows", "text")
#: Entries of a list that are named.
_FEW = 4


def check_settings(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a state whose settings differ: the first difference is named with values.

    Args:
        name: the file.
        before: its settings. An entry ``shown`` has texts for settings whose values say little,
            such as digests, by name.
        now: those of this run.

    Raises:
        ValueError: if a setting differs.

    Example:
        >>> check_settings("state", {"law": "table"}, {"law": "constant"})
        Traceback (most recent call last):
            ...
        ValueError: state cannot be resumed: --law was table and is now constant
    """
    now = json.loads(json.dumps(dict(now)))
    keys = [key for key in dict.fromkeys((*now, *before)) if key != "shown"]
    rest = [key for key in keys if key not in (*_FIRST, *_LAST)]
    for key in (*_FIRST, *rest, *_LAST):
        if before.get(key) == now.get(key):
            continue
        if key in _OTHER:
            raise ValueError(f"{name} cannot be resumed: {_OTHER[key]}")
        option = _OPTIONS.get(key, f"--{key.replace('_', '-')}")
        then, today = (
            _text(values["shown"][key] if key in values.get("shown", {}) else values.get(key))
            for values in (before, now)
        )
        if then == today:  # a file that has changed since
            raise ValueError(f"{name} cannot be resumed: {option} {today} is no longer the same")
        raise ValueError(f"{name} cannot be resumed: {option} was {then} and is now {today}")


def _text(value: Any) -> str:
    """A setting as a user would write it."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        more = f" and {len(value) - _FEW} others" if len(value) > _FEW else ""
        return (", ".join(map(_text, value[:_FEW])) or "none") + more
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")
