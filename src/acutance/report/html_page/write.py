"""The HTML report: one self-contained file that makes no network requests.

``assets/page.html`` has placeholders for style, script and data; ``assets/plot.js`` is the chart
library, bundled by ``tools/plot/bundle.mjs``. The data is deflated and base64-encoded, so that it
cannot close its element; the script inserts strings as text, never as markup, and a content
security policy blocks other scripts and requests.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html as markup
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from acutance.files import write_text
from acutance.report.html_page.data import packed
from acutance.summary.head_summary import HeadSummary

#: The page's own scripts in the order in which they run, after the library.
SCRIPTS = ("base", "state", "charts", "map", "head", "table", "facts", "main")


@dataclass(frozen=True, repr=False)
class Report:
    """An HTML report, displayed inline by notebooks.

    Attributes:
        html: the page.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> Report.of(probe.summary())
        Report (0.4 MB): display it in a notebook, or write it with save(path)
    """

    html: str

    @staticmethod
    def of(summary: HeadSummary) -> Report:
        """Create the report of a summary."""
        return Report(html(summary))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, atomically."""
        write_text(path, self.html)

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, so that it cannot affect the notebook."""
        return (
            '<iframe sandbox="allow-scripts" title="Attention report" width="100%" height="900"'
            ' style="border:1px solid #8888;border-radius:8px;background:#fff"'
            f' srcdoc="{markup.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        size = len(self.html.encode()) / 1e6
        return f"Report ({size:.1f} MB): display it in a notebook, or write it with save(path)"


def write_html(
    summary: HeadSummary, path: str | os.PathLike[str], **more: Mapping[str, Any] | None
) -> None:
    """Write the report of a summary to a file, atomically; ``more`` as for :func:`html`."""
    write_text(path, html(summary, **more))


def html(
    summary: HeadSummary,
    key_norms: Mapping[str, Any] | None = None,
    judged: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> str:
    """The report of a summary as one self-contained HTML page.

    The same summary always gives the same page. Small summaries keep single precision and every
    histogram; with thousands of heads precision is reduced to keep the page under 1.5 MB for 80
    layers of 64 heads.

    Args:
        summary: any head summary.
        key_norms: effect of key norms, from :meth:`acutance.probing.QueryKeySample.key_norms`; adds
            a line.
        judged: a comparison of losses, as in the JSON of ``acutance judge``, with ``sentences``;
            adds a table.
        plan: a cache plan, from :func:`acutance.caching.frontier.plan_record`; the map
            begins with it, and the panel says what each head keeps.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> html(probe.summary())[:15]
        '<!doctype html>'
    """
    before, after = _frame()
    return before + packed(summary, key_norms, judged, plan) + after


@functools.cache
def _frame() -> tuple[str, str]:
    """The HTML page without its data: the text to put before the data, and the text after it."""
    style = _asset("page.css")
    page_scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    script = f'"use strict";\n{_asset("plot.js")}\n(() => {{\n{page_scripts}}})();\n'
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_digest(style)}; script-src {_digest(script)}"
    )
    page = _asset("page.html")
    for place, text in {"policy": policy, "style": style, "script": script}.items():
        before, marker, after = page.partition(f"{{{{{place}}}}}")
        assert marker, place
        page = before + text + after
    before, _, after = page.partition("{{data}}")
    return before, after


def _asset(name: str) -> str:
    """Text of a file in ``assets``."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The content-security-policy source for an element: a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
