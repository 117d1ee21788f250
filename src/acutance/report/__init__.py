"""Reports of a head summary: a terminal table, findings in words, an HTML page, a picture."""

from __future__ import annotations

from acutance.report.console import console_table
from acutance.report.figures import draw_heads
from acutance.report.findings import Finding, findings
from acutance.report.page import Report, html, write_html
from acutance.report.recommendations import NOTHING, Recommendation, in_words, recommendations

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
