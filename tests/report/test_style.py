"""Figures that read in colour, in grey, on white and on dark pages."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from acutance.report import plot_style


def luminance(colour: str) -> float:
    """WCAG relative luminance."""
    parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def a_figure(theme: plot_style.Theme, panels: int = 1) -> Figure:
    figure, axes = plot_style.new_figure("A title", "A note.", panels=panels, theme=theme)
    for one in axes:
        plot_style.draw_line_and_marks(
            one, [0, 1], [0, 1], [0.5], [0.4], plot_style.curves(2, theme)[0], "curve", error=[0.1]
        )
        plot_style.reference(one, theme, x=0.5, y=0.5, name="limit")
        plot_style.label(one, x="x, nat", y="y, nat", title="panel")
        plot_style.legend(one, theme)
    return figure


@pytest.mark.parametrize("theme", plot_style.THEMES.values(), ids=plot_style.THEMES)
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_curves_stand_out_from_the_page_and_differ_in_grey(
    theme: plot_style.Theme, count: int
) -> None:
    curves = plot_style.curves(count, theme)
    assert min(contrast(curve.colour, theme.page) for curve in curves) > 1.9
    shades = [luminance(curve.colour) for curve in curves]
    assert shades == sorted(shades, reverse=theme.name == "dark")
    assert len({curve.mark for curve in curves}) == len({str(c.dash) for c in curves}) == count


@pytest.mark.parametrize("theme", plot_style.THEMES.values(), ids=plot_style.THEMES)
@pytest.mark.parametrize("count", [8, 12, 35])
def test_many_curves_differ_from_their_neighbours_in_grey(
    theme: plot_style.Theme, count: int
) -> None:
    curves = plot_style.curves(count, theme)
    assert len({(curve.colour, str(curve.dash), curve.mark) for curve in curves}) == count
    assert min(contrast(a.colour, b.colour) for a, b in pairwise(curves)) > 1.6
    assert min(contrast(curve.colour, theme.page) for curve in curves) > 1.9


@pytest.mark.parametrize("theme", plot_style.THEMES.values(), ids=plot_style.THEMES)
def test_text_is_readable(theme: plot_style.Theme) -> None:
    assert contrast(theme.ink, theme.page) > 12
    assert contrast(theme.muted, theme.page) > 4.5


@pytest.mark.parametrize("theme", plot_style.THEMES.values(), ids=plot_style.THEMES)
def test_every_text_of_a_figure_has_a_colour_of_the_page(theme: plot_style.Theme) -> None:
    figure = a_figure(theme, panels=2)
    figure.canvas.draw()
    for axes in figure.axes:
        texts = [axes.xaxis.label, axes.yaxis.label, *axes.get_legend().get_texts()]
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels()]
        for title in ("left", "center", "right"):
            if axes.get_title(title):
                texts.append(axes._left_title if title == "left" else axes.title)
        for text in texts:
            assert contrast(text.get_color(), theme.page) > 4.5, text


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    for ending in ("png", "svg"):
        paths = [tmp_path / f"{name}.{ending}" for name in ("one", "two")]
        for path in paths:
            plot_style.save(a_figure(plot_style.LIGHT), path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert ET.parse(paths[0]).getroot().tag.endswith("svg")
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.size == (1280, 784)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.png", "one.svg", "two.png", "two.svg",
    ]  # fmt: skip


def test_long_titles_are_broken_before_the_edge() -> None:
    figure, _ = plot_style.new_figure("many words and more " * 6, "a note of some length " * 20)
    canvas = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [text.get_window_extent(canvas) for text in figure.texts]
    assert len(boxes) > 4
    assert max(box.x1 for box in boxes) <= figure.bbox.x1
    tops = [box.y0 for box in boxes]
    assert tops == sorted(tops, reverse=True)


def test_a_dark_page_is_dark(tmp_path: Path) -> None:
    plot_style.save(a_figure(plot_style.DARK), tmp_path / "dark.png")
    with Image.open(tmp_path / "dark.png") as picture:
        assert np.median(np.asarray(picture.convert("L"))) < 30


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg, got '.*figure\.jpg'"):
        plot_style.save(a_figure(plot_style.LIGHT), tmp_path / "figure.jpg")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'install it with: pip install "matplotlib<4'):
        plot_style.new_figure("title")
