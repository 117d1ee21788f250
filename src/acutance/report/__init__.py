"""Reports of a head summary: a terminal table, findings in words, an HTML page, a picture."""

from __future__ import annotations

from acutance.report.console import console_table
from acutance.report.figures import draw_heads
from acutance.report.findings import Finding, findings
from acutance.report.page import html, write_html

__all__ = ["Finding", "console_table", "draw_heads", "findings", "html", "write_html"]
