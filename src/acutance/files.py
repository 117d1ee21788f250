"""Files that are written whole or not at all, and the text of those that hold JSON."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "as_json",
    "finite",
    "tidy",
    "write_bytes",
    "write_each",
    "write_text",
    "write_whole",
]


def write_whole(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Write beside the target and rename, so that a reader never sees half a file.

    What was written is on the disk before it takes the target's place: not even a machine that
    goes down leaves half of it there. A link stays, and what it points to is written. A device or
    a pipe is written to as it is.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            write(os.fspath(path))
        else:
            _replace(Path(os.path.realpath(path)), write)
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(f"{os.fspath(path)} cannot be written: {reason}") from error


def _replace(target: Path, write: Callable[[str], object]) -> None:
    handle, name = _part(target)
    held = os.name != "nt"  # where an open file has to keep its name
    if not held:
        os.close(handle)
    try:
        write(name)
        os.chmod(name, 0o666 & ~_umask())
        if held:
            os.fsync(handle)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        if held:
            os.close(handle)


def _part(target: Path) -> tuple[int, str]:
    """A new file beside the target, locked where there are locks: the handle and the name.

    Between its making and its locking :func:`tidy` of another process may take it for one that was
    left behind; then another is made.
    """
    while True:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        )
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            continue
        except OSError:  # not every file system has locks; tidy then leaves the part
            return handle, name
        if os.path.exists(name):
            return handle, name
        os.close(handle)


def tidy(path: str | os.PathLike[str]) -> None:
    """Remove what writes of this file that were killed have left beside it.

    A part that another process is writing now is locked by it, and stays.
    """
    target = Path(os.path.realpath(path))
    for part in target.parent.iterdir():
        if part.name.startswith(f".{target.name}.") and part.name.endswith(".part"):
            with suppress(OSError):
                handle = os.open(part, os.O_RDWR)
                try:
                    _lock(handle)
                    if os.name != "nt":  # while it is locked: no writer can have taken it
                        part.unlink(missing_ok=True)
                finally:
                    os.close(handle)
                part.unlink(missing_ok=True)


def _lock(handle: int) -> None:
    """Lock a file until it is closed, by whatever ends its process.

    Raises:
        OSError: if another process has it locked, or there are no locks here.
    """
    if os.name == "nt":  # an open file is not removed there anyway
        return
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes, whole or not at all."""
    write_whole(path, lambda where: Path(where).write_bytes(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text in UTF-8 as it is, line ends included, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_each(
    steps: Mapping[str, Callable[[], object]], written: Callable[[str], object] = lambda _: None
) -> None:
    """Take every step, whatever fails before it: one file that fails loses none of the others.

    Args:
        steps: what writes, by the name of its option; they are taken in order.
        written: told the name of each step that has succeeded.

    Raises:
        Exception: what a step raised, when all are taken; of several, one RuntimeError names all.

    Example:
        >>> write_each({"--json": lambda: 1 / 0, "--csv": lambda: print("written")})
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
    """
    failed: dict[str, Exception] = {}
    for name, step in steps.items():
        try:
            step()
        except Exception as error:
            failed[name] = error
        else:
            written(name)
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        reasons = (
            f"{name}: {str(error) or type(error).__name__}" for name, error in failed.items()
        )
        raise RuntimeError("; ".join(reasons)) from next(iter(failed.values()))


def finite(value: Any) -> Any:
    """The same value with None in place of every number that is not finite, as JSON has none.

    Example:
        >>> finite({"error": math.inf, "rows": (1, 2.5)})
        {'error': None, 'rows': [1, 2.5]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def as_json(value: Any, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """JSON text of plain values: numbers that are not finite are null.

    Example:
        >>> as_json([1.5, math.nan])
        '[1.5, null]'
    """
    return json.dumps(finite(value), allow_nan=False, indent=indent, ensure_ascii=ascii_only)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
