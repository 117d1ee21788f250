"""Reports of a head summary: a terminal table, findings in words, an HTML page, a picture."""

from __future__ import annotations

import importlib
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

#: Where each name lives. They load on first use: what shows theory needs no PyTorch.
_HOMES = {
    "NOTHING": "acutance.diagnose.recommendations",
    "Finding": "acutance.diagnose.findings",
    "Recommendation": "acutance.diagnose.recommendations",
    "Report": "acutance.report.html_page.write",
    "console_table": "acutance.report.terminal",
    "draw_heads": "acutance.report.figures",
    "findings": "acutance.diagnose.findings",
    "html": "acutance.report.html_page.write",
    "in_words": "acutance.diagnose.recommendations",
    "recommendations": "acutance.diagnose.recommendations",
    "write_html": "acutance.report.html_page.write",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
