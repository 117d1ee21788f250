"""The HTML report as text: self-contained, safe with any string, always the same, not too large."""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import acutance
from acutance.probing import HeadSummary
from acutance.report import Report, html, write_html

Make = Callable[..., HeadSummary]
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\u2028\u2029\"'"


class Page(HTMLParser):
    """Tags, attributes and the text of each element, by a parser that is not the browser's."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in {"meta", "input", "br"}:
            self.open.append(tag)
        {"script": self.scripts, "style": self.styles}.get(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        kept = {"script": self.scripts, "style": self.styles}
        if self.open and self.open[-1] in kept:
            kept[self.open[-1]][-1] += data

    @property
    def policy(self) -> str:
        (policy,) = [
            attributes["content"]
            for tag, attributes in self.tags
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policy is not None
        return policy


def test_the_page_parses_and_every_element_ends(summary_of: Make) -> None:
    page = Page(html(summary_of()))
    assert page.open == []
    assert len(page.scripts) == 2
    assert ("html", {"lang": "en"}) in page.tags
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) >= 40


def test_the_page_names_no_address_and_loads_nothing(summary_of: Make) -> None:
    text = html(summary_of())
    page = Page(text)
    assert set(
        re.findall(r"\bhttps?://[^\"'`\s)]+", text)
    ) <= {  # names of XML and of a licence; none is asked for
        "http://www.apache.org/licenses/LICENSE-2.0",
        "http://www.w3.org/",
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/2000/xmlns/",
        "http://www.w3.org/XML/1998/namespace",
    }
    assert not re.search(
        r"@import|url\((?!#)|\bfetch\(|XMLHttp|WebSocket|sendBeacon|\bimport\(", text
    )
    for _, attributes in page.tags:
        assert not {"src", "srcset", "action", "style"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")  # type: ignore[union-attr]


def test_the_policy_lets_nothing_but_the_pages_own_style_and_script_work(summary_of: Make) -> None:
    page = Page(html(summary_of()))

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert page.policy == (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{digest(page.styles[0])}'; "
        f"script-src 'sha256-{digest(page.scripts[1])}'"
    )


def test_the_same_summary_gives_the_same_page(summary_of: Make) -> None:
    torch.manual_seed(3)
    first = html(summary_of((3, 2)))
    torch.manual_seed(3)
    assert html(summary_of((3, 2))) == first


def test_a_saved_state_gives_the_page_of_the_live_one(summary_of: Make, tmp_path: Path) -> None:
    summary = summary_of((3, 2))
    summary.save(tmp_path / "state.safetensors")
    assert html(acutance.load(tmp_path / "state.safetensors")) == html(summary)


def test_a_file_is_replaced_whole_or_not_at_all(
    summary_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    summary = summary_of()
    write_html(summary, path)
    assert path.read_text(encoding="utf-8") == html(summary)
    after = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(OSError, match="disk full"):
        write_html(summary_of((1,)), path)
    assert path.read_bytes() == after
    assert list(tmp_path.iterdir()) == [path]


def test_a_probe_returns_its_report(tmp_path: Path) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with acutance.probe(layer) as probe:
        layer(*[torch.zeros(1, 4, 8)] * 3)
    report = probe.report()
    assert isinstance(report, Report)
    assert report.html == html(probe.summary())
    assert repr(report).startswith("Report (0.4 MB)")
    written = probe.report(str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == written.html == report.html


def test_a_notebook_gets_a_frame_that_holds_the_page(summary_of: Make) -> None:
    report = Report.of(summary_of(about={"model": HOSTILE}))
    (frame,) = Page(report._repr_html_()).tags
    assert frame[0] == "iframe"
    assert frame[1]["srcdoc"] == report.html
    assert (
        frame[1]["sandbox"] == "allow-scripts"
    )  # not allow-same-origin: it cannot reach the notebook
    assert markup.unescape(markup.escape(report.html)) == report.html


def test_packed_data_is_a_zlib_stream_behind_base64(summary_of: Make) -> None:
    raw = zlib.decompress(base64.b64decode(Page(html(summary_of())).scripts[0]))
    size = int.from_bytes(raw[:4], "little")
    assert size % 4 == 0
    assert json.loads(raw[4 : 4 + size])["level"]["mean"] == 4
