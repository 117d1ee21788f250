"""The HTML report as text: self-contained, safe with any string, always the same, not too large."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.probing import HeadSummary, Layer, Moments, edges
from acutance.report import html, write_html
from acutance.report.page import _DIGITS
from acutance.rowstats import METRICS

Make = Callable[..., HeadSummary]
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\u2028\u2029\"'"


class Page(HTMLParser):
    """Tags, attributes and the text of each element, by a parser that is not the browser's."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in {"meta", "input", "br"}:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def data_of(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(text).scripts[0])
    return data


def test_the_page_parses_and_every_element_ends(summary_of: Make) -> None:
    page = Page(html(summary_of()))
    assert page.open == []
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert ("html", {"lang": "en"}) in page.tags


def test_the_page_names_no_address_and_loads_nothing(summary_of: Make) -> None:
    text = html(summary_of())
    assert not re.search(r"\b(?:https?|ftp|wss?)://|//[\w-]+\.\w", text)
    assert not re.search(r"\b(?:src|href|srcset|action)=|@import|url\(|fetch\(|XMLHttp", text)
    (policy,) = [
        attributes["content"]
        for tag, attributes in Page(text).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert len(re.findall(r"'sha256-[\w+/]{43}='", policy)) == 2
    assert "unsafe" not in policy


def test_the_script_never_makes_markup_of_text() -> None:
    template = files("acutance.report").joinpath("template.html").read_text(encoding="utf-8")
    banned = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser"
    assert not re.search(banned, template)


def test_hostile_strings_stay_inside_the_data(summary_of: Make) -> None:
    summary = summary_of(
        (1, 1),
        about={"model": HOSTILE, HOSTILE: HOSTILE, "shape": (1, 2), "nothing": None},
        layer={1: {"module": HOSTILE, "source": HOSTILE}},
        unread=[HOSTILE, "\udc80"],
    )
    text = html(summary)
    page = Page(text)
    assert page.open == []
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "alert(1)</script>" not in text
    embedded = page.scripts[0]
    assert not set("<>&\u2028\u2029") & set(embedded)
    data = data_of(text)
    assert data["about"][:2] == [["model", HOSTILE], [HOSTILE, HOSTILE]]
    assert data["about"][2:] == [["shape", "1, 2"], ["nothing", "None"]]
    assert data["layers"][1]["module"] == HOSTILE
    assert data["unread"][0] == HOSTILE
    text.encode("utf-8")


def test_placeholders_in_the_data_are_data(summary_of: Make) -> None:
    text = html(summary_of(about={"model": "{{data}} {{policy}}"}))
    assert data_of(text)["about"] == [["model", "{{data}} {{policy}}"]]


def test_the_same_summary_gives_the_same_page(summary_of: Make) -> None:
    torch.manual_seed(3)
    first = html(summary_of((3, 2)))
    torch.manual_seed(3)
    assert html(summary_of((3, 2))) == first


def test_the_numbers_are_those_of_the_summary(summary_of: Make) -> None:
    summary = summary_of((3, 2), rows=50)
    data, columns = data_of(html(summary)), summary.columns()
    assert [metric["name"] for metric in data["metrics"]] == list(METRICS)
    for column, metric in enumerate(data["metrics"]):
        name = metric["name"]
        assert metric["mean"] == pytest.approx(columns[f"{name}_mean"], rel=1e-4)
        for part in ("std", "min", "max"):
            assert metric[part] == pytest.approx(columns[f"{name}_{part}"], rel=1e-3)
        assert metric["layer"] == pytest.approx(
            [float(summary.layer(index).mean[0, column]) for index in range(2)], rel=1e-4
        )
        assert (metric["unit"], metric["meaning"]) == (METRICS[name].unit, METRICS[name].meaning)
        assert data["edges"][metric["kind"]] == pytest.approx(edges(name), rel=1e-4)


def test_a_histogram_reads_back_to_its_resolution(summary_of: Make) -> None:
    summary = summary_of((2,), rows=500, varentropy={(0, 1): math.nan})
    data = data_of(html(summary))
    for column, metric in enumerate(data["metrics"]):
        for head in range(2):
            exact = summary.moments.histogram[head, column].tolist()
            text, peak = metric["bins"][head], metric["peak"][head]
            if not text:
                assert metric["name"] == "varentropy"
                assert sum(exact) == peak == 0
                continue
            read = [0.0] * 64
            for index, digit in enumerate(text[1:], start=_DIGITS.index(text[0])):
                read[index] = _DIGITS.index(digit) * peak / 63
            assert peak == max(exact)
            assert read == pytest.approx(exact, abs=peak / 63)
            assert [value > 0 for value in read] == [value > 0 for value in exact]
            assert metric["span"][0] <= _DIGITS.index(text[0])


def test_nan_is_null_and_rows_that_did_not_count_are_told(summary_of: Make) -> None:
    metric = data_of(html(summary_of((2,), entropy={(0, 0): math.nan})))["metrics"][1]
    assert metric["name"] == "entropy"
    assert [metric[part][0] for part in ("mean", "std", "min", "max")] == [None] * 4
    assert metric["rows"] == [0, 40]
    assert metric["layer"] == [pytest.approx(metric["mean"][1])]


def test_a_summary_of_nothing_gives_a_page() -> None:
    nothing = HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))
    assert data_of(html(nothing))["findings"] == []
    headless = HeadSummary((Layer("a", 0),), ("entropy",), Moments.none(0, 1))
    assert data_of(html(headless))["metrics"][0]["layer"] == [None]


def test_the_largest_model_stays_under_six_megabytes() -> None:
    names, heads = tuple(METRICS), 80 * 64
    centre, width = torch.rand(2, len(names), heads, 1, dtype=torch.float64)
    values = centre + 0.4 * width * torch.randn(len(names), heads, 200, dtype=torch.float64)
    layers = tuple(Layer(f"model.layers.{i}.self_attn", 64, rows=200) for i in range(80))
    text = html(HeadSummary(layers, names, Moments.of(values.clamp(0, 1), names)))
    assert 1e6 < len(text.encode()) < 6e6
    data = data_of(text)
    assert len(data["metrics"][0]["mean"]) == heads
    assert len(data["edges"]["unit"]) == 33  # bins joined in pairs


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
