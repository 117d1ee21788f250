"""The colour scale of all reports, viridis, and the position of a metric's value on it.

Viridis (van der Walt & Smith, 2015) rises evenly in lightness, so it reads the same to colour-blind
eyes and in grey print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Colour = tuple[int, int, int]

#: A scale over the data spans at least this share of the numbers on it: noise must not get colours.
LEAST_SPREAD = 0.05

_ANCHORS = bytes.fromhex(
    "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d "
    "2f6b8e 2c728e 297a8e 26828e 23898e 21918c 1f988b 1fa088 22a785 28ae80 32b67a "
    "3fbc73 4ec36b 5ec962 70cf57 84d44b 98d83e addc30 c2df23 d8e219 ece51b fde725"
)

#: Viridis at 33 even steps; linear in between, within 3 of 255.
ANCHORS: tuple[Colour, ...] = tuple(
    (_ANCHORS[at], _ANCHORS[at + 1], _ANCHORS[at + 2]) for at in range(0, len(_ANCHORS), 3)
)


@dataclass(frozen=True)
class ColourScale:
    """Maps a metric's values to positions 0..1 on the colour scale.

    Attributes:
        low: value at 0.
        high: value at 1.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float | None:
        """Position of a value, clipped to 0..1; None for NaN.

        Example:
            >>> ColourScale(1.0, 100.0, log=True).place(10.0)
            0.5
        """
        if math.isnan(value):
            return None
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, count: int) -> list[float]:
        """Values at even distances along the scale, both ends included.

        Example:
            >>> ColourScale(0.0, 1.0).ticks(3)
            [0.0, 0.5, 1.0]
        """
        steps = [index / (count - 1) for index in range(count)]
        if self.log:
            return [self.low * (self.high / self.low) ** step for step in steps]
        return [self.low + (self.high - self.low) * step for step in steps]


def _kind(name: str) -> str:
    """The kind of a metric's scale; figures of theory need neither it nor torch."""
    from acutance.summary.readouts.moments import SCALES

    return SCALES.get(name, "unit")


def colour_scale(name: str, means: Iterable[float]) -> ColourScale:
    """Choose the colour scale for the head means of a metric.

    Shares use 0 to 1 whatever the data, so that pictures of two models are comparable. Other
    metrics use the data's range, from 0 if that is their minimum, logarithmic if it spans a decade.

    Example:
        >>> colour_scale("normalized_entropy", [0.3, 0.4])
        ColourScale(low=0.0, high=1.0, log=False)
        >>> colour_scale("entropy", [0.5, 3.0, float("nan")])
        ColourScale(low=0.0, high=3.0, log=False)
    """
    kind = _kind(name)
    finite = [value for value in means if math.isfinite(value)]
    if kind == "unit" or not finite:
        return ColourScale(0.0, 1.0)
    low, high = min(finite), max(finite)
    if kind in ("keys", "positive") and low > 0.0 and high >= 10.0 * low:
        return ColourScale(low, high, log=True)
    if kind in ("nats", "positive"):
        low = min(low, 0.0)
    least = LEAST_SPREAD * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        return ColourScale(middle - least / 2, middle + least / 2)
    return ColourScale(low, high)


def brief(value: float, name: str) -> str:
    """Format a metric's value for a table cell; a dash for NaN.

    Shares have two decimals; others fewer above 10 and two significant digits below 0.1.

    Example:
        >>> [brief(value, "effective_keys") for value in (1.5, 15.03, 126.8, 123456.0, math.nan)]
        ['1.50', '15.0', '127', '1e5', '–']
        >>> [brief(value, "noise_gain") for value in (0.0123, 2e-7, 0.0)]
        ['0.012', '2e-7', '0.00']
        >>> brief(0.0123, "top_weight")
        '0.01'
    """
    size = abs(value)
    if not math.isfinite(value):
        return "–"
    if _kind(name) == "unit":
        return f"{value:.2f}"
    if size >= 1e5 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if 0 < size < 0.1:
        return f"{value:.2g}"
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def colour(place: float) -> Colour:
    """RGB colour of viridis at a position 0..1.

    Example:
        >>> colour(0.0), colour(1.0)
        ((68, 1, 84), (253, 231, 37))
    """
    at = min(1.0, max(0.0, place)) * (len(ANCHORS) - 1)
    index = min(int(at), len(ANCHORS) - 2)
    share = at - index
    red, green, blue = (
        round(a + (b - a) * share) for a, b in zip(ANCHORS[index], ANCHORS[index + 1], strict=True)
    )
    return red, green, blue


def ink(background: Colour) -> Colour:
    """Black or white, whichever contrasts more with a background (WCAG relative luminance).

    Example:
        >>> ink(colour(0.0)), ink(colour(1.0))
        ((255, 255, 255), (0, 0, 0))
    """
    linear = [
        (part / 255 / 12.92) if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in background
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if luminance > 0.179 else (255, 255, 255)


def as_hex(colour: Colour) -> str:
    """An RGB colour as ``#rrggbb``.

    Example:
        >>> as_hex((68, 1, 84))
        '#440154'
    """
    return "#{:02x}{:02x}{:02x}".format(*colour)
