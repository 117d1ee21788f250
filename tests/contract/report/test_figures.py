"""The picture of a summary."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from acutance.probing import HeadSummary, Moments
from acutance.report import draw_heads
from acutance.rowstats import METRICS

Make = Callable[..., HeadSummary]


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", [(12,) * 6, (1,), (3, 0, 20), (32,) * 48])
def test_a_png_1600_pixels_wide_is_drawn(
    summary_of: Make, tmp_path: Path, heads: tuple[int, ...]
) -> None:
    draw_heads(summary_of(heads, rows=2), tmp_path / "heads.png")
    width, height = size(tmp_path / "heads.png")
    assert width == 1600
    assert 400 <= height <= 1800


@pytest.mark.parametrize("metric", ["effective_keys", "max_logit", "sink_mass"])
def test_any_metric_with_gaps_and_hostile_names_is_drawn(
    summary_of: Make, tmp_path: Path, metric: str
) -> None:
    values = {metric: {(0, 0): math.nan, (0, 1): 0.001, (1, 0): 900.0}}
    summary = summary_of((2, 2), about={"model": r"$\frac{$ x\ny\x1b" * 9}, **values)
    draw_heads(summary, tmp_path / "heads.png", metric)
    assert size(tmp_path / "heads.png")[0] == 1600


def test_the_same_summary_gives_the_same_file(summary_of: Make, tmp_path: Path) -> None:
    summary = summary_of()
    for name in ("one.png", "two.png"):
        draw_heads(summary, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_the_page_behind_shows_around_the_card(summary_of: Make, tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw_heads(summary_of(), tmp_path / "heads.png")
    pixels = imread(tmp_path / "heads.png")
    assert pixels[0, 0, 3] == 0.0
    assert pixels[pixels.shape[0] // 2, 60].tolist() == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("layers", [1, 3, 6, 12])
def test_the_name_of_the_bar_stays_on_the_card(
    summary_of: Make, tmp_path: Path, layers: int
) -> None:
    from matplotlib.image import imread

    path = tmp_path / "heads.png"
    draw_heads(summary_of((4,) * layers, rows=2), path)
    right = imread(path)[:, 1440:1560]  # where the bar's name stands, upright
    for strip in (right[24:48], right[-48:-24]):  # just inside the card's edges
        assert bool((strip == strip[0, 0]).all())
    assert not bool((right == right[24, 0]).all())


def test_what_cannot_be_drawn_is_said(summary_of: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'entropy'"):
        draw_heads(summary_of(), tmp_path / "x.png", "entropie")
    with pytest.raises(ValueError, match="'entropy' was not recorded"):
        draw_heads(summary_of(metrics=("lse",)), tmp_path / "x.png", "entropy")
    nothing = HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))
    with pytest.raises(ValueError, match="at least one head, got a summary of 0 layers"):
        draw_heads(nothing, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_how_to_get_it(
    summary_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = (
        r"^acutance\.report\.figures needs matplotlib; "
        r'install it with: pip install "matplotlib<4,>=3.9"$'
    )
    with pytest.raises(ImportError, match=sentence):
        draw_heads(summary_of(), tmp_path / "x.png")


@pytest.mark.parametrize("chosen", [{0: (3, 7), 1: (3, 7)}, {1: (3, 7)}])
def test_heads_that_were_chosen_are_named(
    summary_of: Make, tmp_path: Path, chosen: dict[int, tuple[int, ...]]
) -> None:
    whole = summary_of((2, 2))
    layers = (replace(layer, chosen=chosen.get(i, ())) for i, layer in enumerate(whole.layers))
    draw_heads(replace(whole, layers=tuple(layers)), tmp_path / "some.png")
    draw_heads(whole, tmp_path / "all.png")
    assert (tmp_path / "some.png").read_bytes() != (tmp_path / "all.png").read_bytes()
