"""Check and write a command's output files.

An input is never overwritten, no file is written twice, and no saved state is lost.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from acutance.cli.shared import console, refuse, tell
from acutance.files import holds_state, may_write, put_json, write_each

Files = Mapping[str, "str | Path | Iterable[str | Path] | None"]
#: What may go to standard output, instead of the table.
_TEXTS = ("--json", "--csv")
#: Files of a saved model: what a model directory holds besides them is not read.
_MODEL = (
    "*.safetensors", "*.bin", "*.model", "*.py", "config.json", "*.index.json", "vocab.*",
    "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "merges.txt",
    "added_tokens.json", "preprocessor_config.json",
)  # fmt: skip


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Files | None = None,
    *,
    state: str = "",
    parts: Sequence[str] = ("",),
    resume: bool | None = None,
    overwrite: bool = False,
) -> None:
    """Before a long run, refuse outputs that cannot be written or would destroy something.

    Two names of one file (links, hard links, ``./x`` and ``x``) count as one. Devices and pipes may
    be named repeatedly.

    Args:
        outputs: output path of each option; None if not requested.
        inputs: paths that each option or argument reads: a file, several, or the directory of a
            model.
        state: the option whose file is a state that takes long to compute, "" for none.
        parts: ends of the names of the files that this state is kept in.
        resume: whether the run continues from that state; None if it cannot.
        overwrite: whether that state may be replaced.

    Raises:
        typer.BadParameter: naming the option and the file.
    """
    files = [
        (option, Path(f"{path}{part}"))
        for option, path in outputs.items()
        if path is not None
        for part in (parts if option == state else ("",))
    ]
    for option, path in files:
        if str(path) == "-":
            if option not in _TEXTS:
                refuse(option, "this file cannot be written to standard output")
        elif reason := _unwritable(path):
            refuse(option, reason)
    to_stdout = [option for option, path in files if str(path) == "-"]
    if len(to_stdout) > 1:
        refuse(", ".join(to_stdout), "only one file can be written to standard output")
    known = {_identity(path): name for name, path in _read(inputs or {})}
    for option, path in files:
        identity = _identity(path)
        if str(path) == "-" or identity is None:
            continue
        if identity in known:
            refuse(option, f"{path} is the same file as {known[identity]} and would overwrite it")
        known[identity] = f"that of {option}"
        if option == state:
            _check_state(option, path, resume, overwrite)
        elif holds_state(path):
            refuse(option, f"{path} contains a saved state, which would be overwritten")


def write_and_show(
    show: Callable[[], Any],
    *,
    json: tuple[Path | None, Callable[[], Any]] | None = None,
    **files: tuple[Path | None, Callable[[Path], object]],
) -> None:
    """Write the requested files and report them; then print a table unless a file uses stdout.

    Args:
        show: returns the table, or whatever a console prints.
        json: path of a file, and what returns its record.
        files: by what a file holds, its path, and a function that writes it. None and "-" (standard
            output) are not reported.

    Raises:
        Exception: the first error of a writer, after all have been tried.
    """
    if json is not None:
        path_of_json, record = json
        files["json"] = path_of_json, lambda path: put_json(record(), path)
    steps: dict[str, Callable[[], object]] = {
        name: partial(write, path) for name, (path, write) in files.items() if path is not None
    }

    if not any(str(path) == "-" for path, _ in files.values()):
        steps["the table"] = lambda: console(stderr=False).print(show())

    def written(name: str) -> None:
        path = files[name][0] if name in files else None
        if path is not None and str(path) != "-":
            tell((f"{name} written to", "dim"), f" {path}", whole=False)

    write_each(steps, written)


def _unwritable(path: Path) -> str:
    """Why a file cannot be written; empty if it can."""
    if os.path.isdir(path):
        return f"{path} is a directory"
    folder = Path(os.path.realpath(path)).parent
    if not os.path.isdir(folder):
        return f"directory {path.parent} does not exist or cannot be read"
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, as it is
        return "" if may_write(path) else f"{path} is not writable"
    if os.path.exists(path) and not may_write(path):
        return f"{path} is read-only"
    return "" if may_write(folder) else f"directory {path.parent} is not writable"


def _check_state(option: str, path: Path, resume: bool | None, overwrite: bool) -> None:
    """Refuse an existing state unless ``resume`` or ``overwrite`` is given."""
    if resume and overwrite:
        refuse("--resume, --overwrite", "these options exclude each other")
    if resume or overwrite or not os.path.isfile(path) or not path.stat().st_size:
        return
    instead = "" if resume is None else "--resume continues from it, "
    refuse(option, f"{path} already exists: {instead}--overwrite replaces it")


def _read(inputs: Files) -> Iterator[tuple[str, Path]]:
    """(name, path) of every existing input file, as in "that of --corpus"; of a folder, a model's.

    The name is used in messages. ``inputs`` has the paths by option.
    """
    for option, paths in inputs.items():
        if paths is None:
            continue
        for path_text in (paths,) if isinstance(paths, str | Path) else paths:
            path = Path(path_text).expanduser()
            if os.path.isdir(path):
                for pattern in _MODEL:
                    yield from ((f"{part}, of {option}", part) for part in path.glob(pattern))
            elif os.path.isfile(path):
                yield f"that of {option}", path


def _identity(path: Path) -> tuple[int, int] | str | None:
    """A key that two names of the same file share; None for anything but regular files."""
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
