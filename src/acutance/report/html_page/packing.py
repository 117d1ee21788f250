"""Compress the numbers of many heads for the page, and its data on parts of the input.

A small summary keeps single precision and every histogram. A large one is packed more coarsely,
level by level, until it fits :data:`BUDGET`; the page states the precision.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Characters the packed data may take: with library, script and style the page is below 1.5 MB.
BUDGET = 1_120_000
#: The same for a model of few heads, whose page is below 1.2 MB.
FEW_HEADS, SMALL_BUDGET = 512, 820_000
#: Where a metric's scale turns from even to logarithmic steps, by kind of scale.
SOFT = {"unit": 1e-3, "nats": 0.1, "keys": 1.0, "positive": 1e-6, "signed": 1.0}

Array = NDArray[Any]


def budget(heads: int) -> int:
    """The maximum size of the packed data, in characters, for a number of heads.

    Example:
        >>> budget(270), budget(5120)
        (820000, 1120000)
    """
    return SMALL_BUDGET if heads <= FEW_HEADS else BUDGET


@dataclass(frozen=True)
class Level:
    """The precision with which numbers are packed.

    Attributes:
        mean: bytes per mean: 4 is single precision, 2 and 1 are codes on the metric's scale.
        rest: bytes per standard deviation, minimum and maximum.
        join: number of neighbouring histogram bins merged into one.
        heights: number of distinct bar heights.
        distances: number of distinct shares of weight at a distance; 0 omits distances.
        extremes: metrics that keep their minimum and maximum; None for all.
        bars: metrics that keep their histograms; None for all.
        profiles: metrics that keep their means by octave of n; None for all, with errors.
    """

    mean: int
    rest: int
    join: int
    heights: int
    distances: int = 255
    extremes: tuple[str, ...] | None = None
    bars: tuple[str, ...] | None = None
    profiles: tuple[str, ...] | None = None


_FEW = ("normalized_entropy", "entropy", "gaussian_entropy")
_READ = (*_FEW, "effective_keys", "top_weight", "first_weight", "max_logit")

LEVELS = (
    Level(4, 4, join=1, heights=255),
    Level(2, 2, join=1, heights=255),
    Level(2, 1, join=2, heights=63),
    Level(2, 1, join=2, heights=63, bars=_READ, profiles=_READ),
    Level(2, 1, join=4, heights=15, distances=63, extremes=_READ, bars=_READ, profiles=_FEW),
    Level(2, 1, join=4, heights=15, distances=15, extremes=_READ, bars=_FEW, profiles=_FEW),
    Level(2, 1, join=4, heights=7, distances=0, extremes=_FEW, bars=_FEW, profiles=("entropy",)),
    Level(1, 1, join=4, heights=7, distances=0, extremes=(), bars=(), profiles=()),
)


class Packer:
    """Collects arrays and writes them as one text with a JSON record."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._places: dict[str, list[Any]] = {}

    def add(self, name: str, values: Array) -> None:
        """Append an array of ``uint8``, ``uint16`` or ``float32``."""
        data = np.ascontiguousarray(values)
        if data.dtype.itemsize > 1:
            data = data.astype(data.dtype.newbyteorder("<"))
        raw = data.tobytes()
        self._places[name] = [f"{data.dtype.kind}{data.dtype.itemsize}", self._size, data.size]
        raw += bytes(-len(raw) % 4)
        self._parts.append(raw)
        self._size += len(raw)

    def add_coded(self, name: str, values: Array, width: int, soft: float) -> list[float]:
        """Append the codes of :func:`encode`; return the ends of their scale."""
        codes, *ends = encode(values, width, soft)
        self.add(name, codes)
        return ends

    def text(self, record: Mapping[str, Any]) -> str:
        """The record (with the arrays' positions added) and the arrays, as base64 of a zlib stream.

        The stream holds the record's length (four bytes, little-endian), the record as ASCII JSON
        padded to a multiple of four, and the arrays.
        """
        whole = {**record, "arrays": self._places}
        head = json.dumps(whole, allow_nan=False, separators=(",", ":")).encode("ascii")
        head += b" " * (-len(head) % 4)
        data = len(head).to_bytes(4, "little") + head + b"".join(self._parts)
        return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def encode(values: Array, width: int, soft: float) -> tuple[Array, float, float]:
    """Quantise numbers to ``width`` bytes each; one code represents non-finite numbers.

    Steps are nearly equal for numbers below ``soft`` and nearly proportional to numbers above it.

    Returns:
        The codes (``uint8`` or ``uint16``; the largest means NaN), or ``float32`` values if
        ``width`` is 4; then the values of code 0 and of the largest numeric code, each as
        ``asinh(value / soft)``.

    Example:
        >>> codes, low, high = encode(np.array([0.0, 10.0, math.nan]), 1, 1.0)
        >>> codes.tolist(), low, round(math.sinh(high), 9)
        ([0, 254, 255], 0.0, 10.0)
    """
    finite = np.isfinite(values)
    if width == 4:
        return np.where(finite, values, np.nan).astype(np.float32), 0.0, 0.0
    kind = np.uint8 if width == 1 else np.uint16
    none = int(np.iinfo(kind).max)
    bent = np.arcsinh(np.where(finite, values, 0.0) / soft)
    low, high = (
        (float(bent[finite].min()), float(bent[finite].max())) if finite.any() else (0.0, 0.0)
    )
    step = (high - low) / (none - 1) or 1.0
    codes = np.where(finite, np.rint((bent - low) / step), none)
    return codes.astype(kind), low, high


def bars(counts: Array, level: Level) -> tuple[Array, int]:
    """Merge histogram bins, round heights up, and drop bins at both ends that no histogram uses.

    Args:
        counts: (heads, bins) of one metric.
        level: the precision level.

    Returns:
        Heights ``uint8`` (heads, kept bins), from 0 to ``level.heights`` relative to each head's
        tallest bar, at least 1 for bins with rows; and the index of the first used bin after
        merging.

    Example:
        >>> heights, first = bars(np.array([[0, 0, 100, 1, 0, 50]]), LEVELS[2])
        >>> heights.tolist(), first
        ([[63, 32]], 1)
    """
    heads, bins = counts.shape
    joined = counts.reshape(heads, bins // level.join, level.join).sum(-1)
    used = np.flatnonzero(joined.any(0))
    if not used.size:
        return np.zeros((heads, 0), dtype=np.uint8), 0
    first, last = int(used[0]), int(used[-1])
    shares = joined[:, first : last + 1].astype(np.float64)
    tallest = np.maximum(shares.max(-1, keepdims=True), 1.0)
    return np.ceil(shares * (level.heights / tallest)).clip(0, level.heights).astype(
        np.uint8
    ), first


def rounded(value: float | None, digits: int) -> float | int | None:
    """Round to significant digits; None for a number that JSON cannot represent.

    Example:
        >>> rounded(1234.5678, 5), rounded(2.0, 5), rounded(math.nan, 5)
        (1234.6, 2, None)
    """
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
