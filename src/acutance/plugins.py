"""What a package needs that adds a command to ``acutance``, draws figures and keeps records.

An entry point of the group ``acutance.commands`` is a command: its name, and a function that
:func:`command` made of a record of options. It is loaded when it is called or listed, so its module
should import nothing heavy before it runs; one that cannot be loaded fails alone, with a sentence.
:mod:`acutance_lab` adds ``acutance reproduce`` so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.lazy import lazy

if TYPE_CHECKING:
    from acutance.cli.options import WRITE, OutputFile, command, keywords
    from acutance.cli.outputs import check_outputs, write_and_show
    from acutance.cli.shared import INTERRUPTED, console
    from acutance.corpus.load_model import install_decoder
    from acutance.extras import install
    from acutance.files import as_json, tidy, write_text, write_whole
    from acutance.from_json import AnyFloat, checked, read_json, sealed_json
    from acutance.report import plot_style
    from acutance.report.screen import note
    from acutance.report.table import Cell, Column, Table

__all__ = [
    "AnyFloat",
    "Cell",
    "Column",
    "INTERRUPTED",
    "OutputFile",
    "Table",
    "WRITE",
    "as_json",
    "check_outputs",
    "checked",
    "command",
    "console",
    "install",
    "install_decoder",
    "keywords",
    "note",
    "plot_style",
    "read_json",
    "sealed_json",
    "tidy",
    "write_and_show",
    "write_text",
    "write_whole",
]

#: The names of each module. They load on first use: a command's help needs no torch.
_HOMES = {
    "acutance.cli.options": ("WRITE", "OutputFile", "command", "keywords"),
    "acutance.cli.outputs": ("check_outputs", "write_and_show"),
    "acutance.cli.shared": ("INTERRUPTED", "console"),
    "acutance.corpus.load_model": ("install_decoder",),
    "acutance.extras": ("install",),
    "acutance.files": ("as_json", "tidy", "write_text", "write_whole"),
    "acutance.from_json": ("AnyFloat", "checked", "read_json", "sealed_json"),
    "acutance.report": ("plot_style",),
    "acutance.report.screen": ("note",),
    "acutance.report.table": ("Cell", "Column", "Table"),
}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
