"""Write files atomically, check files before reading, and encode JSON."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Files whose parts this process has tidied away already.
_TIDIED: set[Path] = set()


def write_whole(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Write a file atomically, through a temporary file that is renamed.

    The data are on disk before the file is replaced, so that a crash never leaves half a file. If
    the path is a link, its target is replaced; a device or pipe is written to directly. A new file
    gets its mode from the process's umask; a replaced one keeps its mode and, if permitted, its
    owner. Temporary files that killed writers of the same file left are removed.

    Args:
        path: of the file.
        write: function that writes the data to the path it is called with.

    Raises:
        OSError: naming the file, if it cannot be written or is read-only for this user.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            write(os.fspath(path))
        else:
            _replace(Path(os.path.realpath(path)), write)
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(f"{os.fspath(path)} cannot be written: {reason}") from error


def may_write(path: str | os.PathLike[str]) -> bool:
    """Whether this user may write to an existing file or directory."""
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _replace(target: Path, write: Callable[[str], object]) -> None:
    """Write a file through a temporary one in the same folder, which then replaces it."""
    before = os.stat(target) if os.path.exists(target) else None
    if before is not None and not may_write(target):
        raise PermissionError("it is read-only")
    if target not in _TIDIED:  # once: a state is written again and again
        tidy(target)
        _TIDIED.add(target)
    handle, name = _part(target, 0o666 if before is None else 0o600)
    held = os.name != "nt"  # where an open file has to keep its name
    if not held:
        os.close(handle)
    try:
        write(name)
        if before is not None:
            _liken(name, before)
        if held:
            os.fsync(handle)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        if held:
            os.close(handle)


def _liken(name: str, before: os.stat_result) -> None:
    """Give the file ``name`` the mode and, if permitted, the owner in ``before``."""
    if os.name != "nt":
        now = os.stat(name)
        if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
            with suppress(OSError):
                os.chown(name, before.st_uid, before.st_gid)
    os.chmod(name, stat.S_IMODE(before.st_mode))


def _part(target: Path, mode: int) -> tuple[int, str]:
    """Create a temporary file next to the target and lock it if possible; return handle and name.

    The process's umask applies to the mode. Before it is locked, :func:`tidy` of another process
    may delete it as a leftover; then another one is created.
    """
    while True:
        name = str(target.parent / f".{target.name}.{os.urandom(6).hex()}.part")
        try:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
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
    """Remove temporary files that killed writers of the file ``path`` have left.

    A temporary file that another process is writing is locked, and stays. Nothing is removed from a
    directory that cannot be listed.
    """
    target = Path(os.path.realpath(path))
    try:
        names = os.listdir(target.parent)
    except OSError:
        return
    for name in names:
        if name.startswith(f".{target.name}.") and name.endswith(".part"):
            part = target.parent / name
            with suppress(OSError):
                if not stat.S_ISREG(os.lstat(part).st_mode):
                    continue
                handle = os.open(part, os.O_RDWR)
                try:
                    _lock(handle)
                    if os.name != "nt":  # while it is locked: no writer can have taken it
                        part.unlink(missing_ok=True)
                finally:
                    os.close(handle)
                part.unlink(missing_ok=True)


def _lock(handle: int) -> None:
    """Lock a file until it is closed or the process ends.

    Raises:
        OSError: if another process has locked it, or the system has no file locks.
    """
    if os.name == "nt":  # an open file is not removed there anyway
        return
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a path is a readable file: a pipe or device may never end.

    Raises:
        OSError: in one sentence that names the file: it is not there, may not be read, or is a
            directory, a pipe or a device.

    Example:
        >>> check_regular(os.devnull)
        Traceback (most recent call last):
        OSError: /dev/null is a pipe or a device, not a file
    """
    name = os.fspath(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no file at {name}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(f"{name} cannot be read: {reason}") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{name} is a directory, not a file")
    if not stat.S_ISREG(mode):
        raise OSError(f"{name} is a pipe or a device, not a file")
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(f"{name} cannot be read: Permission denied")


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes atomically."""
    write_whole(path, lambda where: Path(where).write_bytes(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text atomically, without changing line ends.

    Raises:
        FileExistsError: if the file contains a saved state, which is never replaced by a text.
        OSError: as :func:`write_whole`.
    """
    if holds_state(path):
        raise FileExistsError(
            f"{os.fspath(path)} contains a saved state, which would be overwritten"
        )
    write_bytes(path, text.encode("utf-8"))


#: The one schema of acutance's safetensors files that is no state: a probe writes it anew.
_NO_STATE = "acutance.queries_keys/"


def holds_state(path: str | os.PathLike[str]) -> bool:
    """Whether a file contains a saved state: every safetensors file of acutance but a sample.

    False if there is no such file, or it cannot be read.
    """
    if not os.path.isfile(path):
        return False
    with suppress(OSError), open(path, "rb") as file:
        if file.read(9)[8:] != b"{":  # the length of a header comes first in safetensors
            return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            schema = str((file.metadata() or {}).get("schema"))
    except (SafetensorError, OSError, ValueError):
        return False
    return schema.startswith("acutance.") and not schema.startswith(_NO_STATE)


def refuse_replacing(path: str | os.PathLike[str] | None, *, resume: bool, overwrite: bool) -> None:
    """Raise an error before a run if its state file exists, unless replacing it is allowed.

    Args:
        path: of the state file; None for a run without one.
        resume: whether to continue from it.
        overwrite: whether to replace it.

    Raises:
        ValueError: if both are requested, or there is no file to resume.
        FileExistsError: if the file exists and is not empty, and neither is requested.

    Example:
        >>> refuse_replacing(__file__, resume=False, overwrite=False)
        Traceback (most recent call last):
        FileExistsError: ... already exists: resume=True continues it, overwrite=True replaces it
    """
    if path is None:
        if resume:
            raise ValueError("resume needs save, the file to continue from, got save=None")
        return
    if resume and overwrite:
        raise ValueError(
            "pass either resume=True to continue a run or overwrite=True to replace it, not both"
        )
    if not (resume or overwrite) and os.path.isfile(path) and os.path.getsize(path):
        raise FileExistsError(
            f"{os.fspath(path)} already exists: resume=True continues it, overwrite=True "
            "replaces it"
        )


def put_text(text: str, path: Path) -> None:
    """Write a text to a file, or to standard output where the path is "-"."""
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)


def put_json(record: Any, path: Path) -> None:
    """Write plain values as JSON to a file, or to standard output where the path is "-"."""
    put_text(as_json(record) + "\n", path)


def write_each(
    steps: Mapping[str, Callable[[], object]], written: Callable[[str], object] = lambda _: None
) -> None:
    """Write every file even if some fail, then raise the first error.

    Args:
        steps: functions that write one file each, by the name of their option; called in order.
        written: called with the name of each that succeeded.

    Raises:
        Exception: the error of a step, after all were called; if several failed, one RuntimeError
            with all their messages.

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
    """Replace every number that is not finite by None, for JSON.

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
    """Encode plain values as JSON; numbers that are not finite become null.

    Example:
        >>> as_json([1.5, math.nan])
        '[1.5, null]'
    """
    return json.dumps(finite(value), allow_nan=False, indent=indent, ensure_ascii=ascii_only)
