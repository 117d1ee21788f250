"""Text that every Python installation has: its own standard library, as bytes.

Models are trained on one part and evaluated on the other. A file belongs to a part by its name
alone, so a file that was trained on is never evaluated on, whichever version of Python it is from.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Part = Literal["training", "held out"]

#: Left out: tests, tables of encodings, what distributions add or leave away.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
_HELD_OUT = 8  # one file in so many


def is_held_out(name: str) -> bool:
    """Whether a file of the standard library, by relative path, is excluded from training.

    Example:
        >>> [name for name in ("argparse.py", "ast.py", "json/decoder.py") if is_held_out(name)]
        []
    """
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT == 0


def files(part: Part, folder: Path | None = None) -> list[Path]:
    """The standard library's source files for training or held out from it, sorted by name.

    Args:
        part: "training" or "held out".
        folder: where the library is; None is this Python's.

    Raises:
        ValueError: if ``part`` is neither.
        FileNotFoundError: if there is no source file, as where the library is one zip file.
    """
    if part not in ("training", "held out"):
        raise ValueError(f"part must be 'training' or 'held out', got {part!r}")
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    chosen: dict[str, Path] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        left_out = any(f in _LEFT_OUT or f.startswith("config-") for f in name.parts[:-1])
        asked_for = is_held_out(name.as_posix()) == (part == "held out")
        if asked_for and not left_out and not path.name.startswith("_sysconfigdata"):
            chosen[name.as_posix()] = path
    if not chosen:
        raise FileNotFoundError(f"the standard library has no source files in {root}")
    return [chosen[name] for name in sorted(chosen)]


def digest(paths: Sequence[Path]) -> str:
    """A hash of the bytes of these files, in this order."""
    digests = (hashlib.sha256(path.read_bytes()).digest() for path in paths)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def read(paths: Sequence[Path]) -> Tensor:
    """The bytes of these files one after another, uint8."""
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def sample_windows(text: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Sample windows that start at random bytes of a text, (count, length) int64.

    Raises:
        ValueError: if the text is shorter than a window.
    """
    places = len(text) - length + 1
    if places < 1:
        raise ValueError(f"a window of {length} bytes is longer than the text, {len(text)} bytes")
    starts = torch.randint(places, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
