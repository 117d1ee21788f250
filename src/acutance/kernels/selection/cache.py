"""Measured times of the native kernels, cached on disk.

One small file for each processor, library and torch. A file that is damaged, of another machine or
not to be read is no file; one that cannot be written is not written. Processes that measure at the
same time each replace the file whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from acutance.kernels.bindings import Library

__all__ = ["CACHE_VARIABLE", "Times", "cache_file", "read", "write"]

#: Environment variable that names the folder of measured times.
CACHE_VARIABLE = "ACUTANCE_CACHE"
SCHEMA = "acutance.kernel-times/1"
_MOST_BYTES = 65536

#: Seconds that a pass of a dtype took, by instruction set: {dtype: {pass: {name: seconds}}}.
Times = dict[str, dict[str, dict[str, float]]]


@cache
def processor_id() -> str:
    """A string that identifies the CPU model, ignoring its microcode version."""
    lines = [platform.machine(), platform.version(), os.environ.get("PROCESSOR_IDENTIFIER", "")]
    with suppress(OSError, UnicodeError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        first = stream.read(8192).partition("\n\n")[0].splitlines()
        named = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU", "Features")
        lines += [line for line in first if line.startswith(named)]
    return "\n".join(lines)


def _identity(library: Library) -> dict[str, str]:
    built = library.path.stat()
    return {
        "processor": hashlib.sha256(processor_id().encode()).hexdigest(),
        "library": f"{library.compiler}, {' '.join(library.cpus)}, {built.st_size} bytes,"
        f" {built.st_mtime_ns}",
        "torch": torch.__version__,
    }


def _folder() -> Path:
    """The user's folder of caches, or the one that :data:`CACHE_VARIABLE` names."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "acutance"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "acutance"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acutance"


def cache_file(library: Library) -> Path | None:
    """Path of the times of this machine and build; None if there is no home directory.

    Its name tells machines apart that share a home.
    """
    try:
        identity = json.dumps(_identity(library), sort_keys=True)
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return _folder() / f"kernels-{name}.json"
    except (OSError, RuntimeError):
        return None


def read(library: Library) -> Times | None:
    """The cached times for this machine and build, or None."""
    path = cache_file(library)
    if path is None:
        return None
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        record = json.loads(path.read_bytes())
        if record["schema"] != SCHEMA or record["of"] != _identity(library):
            return None
        return _checked(record["seconds"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _checked(seconds: Any) -> Times:
    """The times, if they are times.

    Raises:
        ValueError: if they are not.
    """
    times: Times = {}
    for dtype, passes in seconds.items():
        for name, kernels in passes.items():
            for kernel, number in kernels.items():
                if type(number) is not float or not 0.0 < number < math.inf:
                    raise ValueError(f"no time: {number!r}")
                times.setdefault(dtype, {}).setdefault(name, {})[kernel] = number
    return times


def write(library: Library, times: Times) -> None:
    """Cache the times; errors are ignored."""
    path = cache_file(library)
    if path is None:
        return
    text = json.dumps({"schema": SCHEMA, "of": _identity(library), "seconds": times}, indent=1)
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, path)
    except OSError:
        if part is not None:
            with suppress(OSError):
                os.unlink(part)
