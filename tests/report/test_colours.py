"""The colour scale: it is viridis, it stays in range, and it colours no noise."""

from __future__ import annotations

import math

import pytest

from acutance.report.colours import ANCHORS, ColourScale, brief, colour, colour_scale, ink


def test_the_colours_are_viridis_within_three_of_255() -> None:
    import matplotlib

    viridis = matplotlib.colormaps["viridis"]
    steps = [index / 500 for index in range(501)]
    worst = max(
        abs(ours - 255 * theirs)
        for step in steps
        for ours, theirs in zip(colour(step), viridis(step)[:3], strict=True)
    )
    assert len(ANCHORS) == 33
    assert worst <= 4.0  # 2.5 of interpolation, one of rounding


def luminance(rgb: tuple[int, int, int]) -> float:
    linear = [
        part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in rgb
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_numbers_stand_out_on_every_colour() -> None:
    for step in range(101):
        paper = colour(step / 100)
        bright, dark = sorted((luminance(paper), luminance(ink(paper))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA for text


def test_shares_are_coloured_from_zero_to_one_whatever_the_data() -> None:
    assert colour_scale("normalized_entropy", [0.4, 0.41]) == ColourScale(0.0, 1.0)
    assert colour_scale("top_weight", []) == ColourScale(0.0, 1.0)


def test_a_decade_of_keys_is_logarithmic() -> None:
    assert colour_scale("effective_keys", [1.5, 150.0]).log
    assert not colour_scale("effective_keys", [100.0, 150.0]).log
    assert not colour_scale("max_logit", [1.5, 150.0]).log


def test_nearly_equal_values_get_nearly_one_colour() -> None:
    scale = colour_scale("n_keys", [128.0, 128.0 + 1e-9])
    assert scale.place(128.0) == pytest.approx(0.5, abs=1e-6)
    assert scale.place(128.0 + 1e-9) == pytest.approx(0.5, abs=1e-6)
    zero = colour_scale("max_logit", [0.0, 0.0])
    assert zero.low < 0.0 < zero.high


def test_what_is_beyond_an_end_is_the_end_and_nan_is_nowhere() -> None:
    scale = ColourScale(1.0, 100.0, log=True)
    assert [scale.place(value) for value in (-5.0, 1.0, 1e9)] == [0.0, 0.0, 1.0]
    assert scale.place(math.nan) is None
    assert colour_scale("entropy", [math.nan, math.inf]) == ColourScale(0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, -0.001, 12.345, -123.4, 99999.0, 1e5, -3e12, 1e-300])
def test_a_number_in_a_cell_is_short(value: float) -> None:
    text = brief(value, "max_logit")
    assert len(text) <= 7
    assert float(text) == pytest.approx(value, rel=0.5, abs=0.01)
