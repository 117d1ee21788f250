"""Text that every Python installation has: its standard library's source, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

#: Not code that people read, or not part of every installation.
LEFT_OUT = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip


def files(part: str) -> list[Path]:
    """Source files of a part, "training" (seven eighths) or "held out", sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    text = {
        name
        for name in names
        if not any(
            folder in LEFT_OUT or folder.startswith("config-") for folder in name.split("/")[:-1]
        )
        and not names[name].name.startswith("_sysconfigdata")
    }
    held_out = {name for name in text if hashlib.sha256(name.encode()).digest()[0] % 8 == 0}
    return [names[name] for name in sorted(held_out if part == "held out" else text - held_out)]


def read(paths: Sequence[Path]) -> Tensor:
    """The bytes of these files one after another, uint8."""
    text = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_windows(text: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Windows that start at random bytes of a text, (count, length) int64."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
