"""The picture of a summary."""

from __future__ import annotations

from pathlib import Path

from acutance.report import draw_heads
from acutance.report.plot_style import DARK
from tests.contract.report.test_figures import Make


def test_an_ending_in_svg_gives_one_and_dark_is_dark(summary_of: Make, tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw_heads(summary_of(), tmp_path / "x.svg", theme=DARK)
    assert DARK.page in (tmp_path / "x.svg").read_text(encoding="utf-8")
    draw_heads(summary_of(), tmp_path / "x.png", theme=DARK)
    pixels = imread(tmp_path / "x.png")
    inside = pixels[pixels.shape[0] // 2, 60]
    assert inside[:3].max() < 0.15
    assert inside[3] == 1.0
