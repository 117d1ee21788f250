"""What a package needs that adds a command to ``acutance``, draws figures and keeps records.

An entry point of the group ``acutance.commands`` is a command: its name, and a function that
:func:`command` made of a record of options. It is loaded when it is called or listed, so its module
should import nothing heavy before it runs. :mod:`acutance_lab` adds ``acutance reproduce`` so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acutance.cli.options import WRITE, command
    from acutance.cli.outputs import check_outputs
    from acutance.cli.shared import INTERRUPTED, console, need, plain_errors
    from acutance.corpus.load_model import install_decoder
    from acutance.extras import install
    from acutance.files import as_json, put_text, tidy, write_text, write_whole
    from acutance.from_json import checked, read_json, sealed_json
    from acutance.report import plot_style
    from acutance.report.screen import NumberTable, note

__all__ = [
    "INTERRUPTED",
    "NumberTable",
    "WRITE",
    "as_json",
    "check_outputs",
    "checked",
    "command",
    "console",
    "install",
    "install_decoder",
    "need",
    "note",
    "plain_errors",
    "plot_style",
    "put_text",
    "read_json",
    "sealed_json",
    "tidy",
    "write_text",
    "write_whole",
]

#: Where each name lives. They load on first use: a command's help needs no torch.
_HOMES = {
    "INTERRUPTED": "acutance.cli.shared",
    "NumberTable": "acutance.report.screen",
    "WRITE": "acutance.cli.options",
    "as_json": "acutance.files",
    "check_outputs": "acutance.cli.outputs",
    "checked": "acutance.from_json",
    "command": "acutance.cli.options",
    "console": "acutance.cli.shared",
    "install": "acutance.extras",
    "install_decoder": "acutance.corpus.load_model",
    "need": "acutance.cli.shared",
    "note": "acutance.report.screen",
    "plain_errors": "acutance.cli.shared",
    "put_text": "acutance.files",
    "read_json": "acutance.from_json",
    "sealed_json": "acutance.from_json",
    "tidy": "acutance.files",
    "write_text": "acutance.files",
    "write_whole": "acutance.files",
}


def __getattr__(name: str) -> Any:
    if name == "plot_style":
        value: Any = importlib.import_module("acutance.report.plot_style")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
