"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_bytes", "write_text", "write_whole"]


def write_whole(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Write beside the target and rename, so that a reader never sees half a file."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    try:
        write(name)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes, whole or not at all."""
    write_whole(path, lambda where: Path(where).write_bytes(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text in UTF-8 as it is, line ends included, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
