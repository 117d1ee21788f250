"""Reports of a head summary: a terminal table, findings in words, an HTML page, a picture."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acutance.diagnose.findings import Finding, findings
    from acutance.diagnose.recommendations import NOTHING, Recommendation, in_words, recommendations
    from acutance.report.figures import draw_heads
    from acutance.report.html_page.write import Report, html, write_html
    from acutance.report.terminal import console_table

__all__ = [
    "NOTHING",
    "Finding",
    "Recommendation",
    "Report",
    "console_table",
    "draw_heads",
    "findings",
    "html",
    "in_words",
    "recommendations",
    "write_html",
]

#: The names of each file. They load on first use: what shows theory
#: needs no PyTorch.
_FILES = {
    "console": ("console_table",),
    "figures": ("draw_heads",),
    "findings": (
        "Finding",
        "findings",
    ),
    "page": (
        "Report",
        "html",
        "write_html",
    ),
    "recommendations": (
        "NOTHING",
        "Recommendation",
        "in_words",
        "recommendations",
    ),
}
_HOMES = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


class _Report(ModuleType):
    """Two files bear the name of the function that they hold: here it means the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind a name, as importing one of these files does."""
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Report


def __dir__() -> list[str]:
    return sorted(__all__)
