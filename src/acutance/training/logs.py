"""Where a monitor's scalars go: functions of trackers, SummaryWriters, files of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["JsonLines", "Log", "destinations", "send"]

#: A function of scalars by name and the step, a SummaryWriter, or the path of a JSON lines file.
Log = Callable[[dict[str, float], int], object] | str | os.PathLike[str] | Any


class JsonLines:
    r"""Appends each record as one JSON object to a file.

    ``step`` comes first, then the scalars. Numbers that are not finite, which JSON does not have,
    are null.

    Args:
        path: the file. It is created with the first record.

    Raises:
        FileNotFoundError: if its folder does not exist.
        IsADirectoryError: if it is a folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "attention.jsonl"
        >>> log = JsonLines(path)
        >>> log({"attention/layer/entropy": 1.5}, 10)
        >>> path.read_text()
        '{"step": 10, "attention/layer/entropy": 1.5}\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"log must be a file, but {self.path} is a folder")
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"log is {self.path}, but there is no folder {self.path.parent}"
            )

    def __call__(self, scalars: Mapping[str, float], step: int) -> None:
        """Append one line."""
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")


def destinations(log: Log | Sequence[Log] | None) -> tuple[Any, ...]:
    """The functions and writers that ``log`` names; paths become :class:`JsonLines`.

    Raises:
        TypeError: if one is neither a function, a SummaryWriter nor a path.

    Example:
        >>> destinations(print)
        (<built-in function print>,)
        >>> destinations("out.jsonl")[0].path.name
        'out.jsonl'
    """
    if log is None:
        return ()
    each = log if isinstance(log, list | tuple) else (log,)
    checked: list[Any] = []
    for one in each:
        if isinstance(one, str | os.PathLike):
            checked.append(JsonLines(one))
        elif hasattr(one, "add_scalar") or (callable(one) and not isinstance(one, type)):
            checked.append(one)
        else:
            raise TypeError(
                "log must be a function of scalars and step such as wandb.log, a SummaryWriter, "
                f"the path of a JSON lines file, or a list of these, got {one!r}"
            )
    return tuple(checked)


def send(scalars: Mapping[str, float], step: int, each: Sequence[Any]) -> None:
    """Send scalars to the destinations that :func:`destinations` returned."""
    for one in each:
        if hasattr(one, "add_scalar"):
            for name, value in scalars.items():
                one.add_scalar(name, value, step)
        else:
            one(dict(scalars), step)
