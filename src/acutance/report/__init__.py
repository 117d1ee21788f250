"""Reports of a head summary: a terminal table, findings in words, an HTML page, a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.lazy import lazy

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

#: The names of each module. They load on first use: what shows theory needs no PyTorch.
_HOMES = {
    "acutance.diagnose.findings": ("Finding", "findings"),
    "acutance.diagnose.recommendations": (
        "NOTHING", "Recommendation", "in_words", "recommendations",
    ),
    "acutance.report.figures": ("draw_heads",),
    "acutance.report.html_page.write": ("Report", "html", "write_html"),
    "acutance.report.terminal": ("console_table",),
}  # fmt: skip
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
