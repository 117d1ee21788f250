r"""Make src/acutance/rowstats/gaussian_table.npz, the spline behind ``rowstats.gaussian``.

Run it from the repository's root, after a change of the table's layout or of the quadrature:

    python tools/make_gaussian_table.py

It evaluates E H(n, std) by quadrature at the spline's sites (some 11,000 points, about two
minutes), turns it into the bounded function R of ``acutance.rowstats.gaussian``, interpolates
that with cubic B-splines on uniform knots, and writes the coefficients in float32. Then it
compares the spline, in float64, with fresh quadratures between the sites, prints the largest
difference in nats, and fails if that is above ``TOLERANCE``. Nothing is random: the same
versions of NumPy and SciPy write the same bytes.

The sites are the ends of the intervals and the middle of the first and the last one, along both
coordinates: as many as there are splines. Two edges need a limit: n = 1, where both E H
and log n vanish (taken at n = 1 + 2^-30), and std = inf, where E H · std is pi² M_n / 6.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import make_interp_spline

from acutance.rowstats import gaussian
from acutance.theory import expected_entropy_gauss, expected_max_gauss

TABLE = Path(gaussian.__file__).with_name("gaussian_table.npz")
TOLERANCE = 1e-6
Array = NDArray[np.float64]


def sites(intervals: int) -> Array:
    """Interpolation sites in [0, 1] for the ``intervals + 3`` splines of a coordinate."""
    ends = np.arange(intervals + 1)
    return np.sort(np.concatenate([ends, [0.5, intervals - 0.5]])) / intervals


def keys_at(x: float) -> float:
    """Invert ``gaussian._key_coordinate``."""
    n = math.exp(2 * math.expm1(x * math.log1p(gaussian.LOG_N_MAX / 2)))
    return max(n, 1 + 2.0**-30)


def height(n: float, y: float) -> float:
    """R at n keys and y = 1 - w, from the quadrature."""
    if y == 0:
        return 1.0
    log_n = math.log(n)
    collapse = math.sqrt(2 + 2 * log_n)
    if y == 1:
        return float(math.pi**2 / 6 * expected_max_gauss(n) / (collapse * log_n) - 1)
    entropy = expected_entropy_gauss(n, collapse * y / (1 - y))
    return float((entropy / (log_n * (1 - y)) - 1) / y)


def interpolate(values: Array, intervals: int) -> Array:
    """Coefficients, along the first axis, of the uniform cubic B-splines through ``values``."""
    knots = np.arange(-3, intervals + 4) / intervals
    spline = make_interp_spline(sites(intervals), values, k=3, t=knots)
    return np.asarray(spline.c)


def worst_difference() -> float:
    """Largest |spline - quadrature| in nats, at points that are not sites."""
    worst = 0.0
    for n in np.geomspace(2, math.exp(gaussian.LOG_N_MAX), 28).round().tolist():
        scale = math.sqrt(2 + 2 * math.log(n))
        middles = np.linspace(0.0017, 0.9983, 150)
        std = scale * middles / (1 - middles)
        exact = np.asarray(expected_entropy_gauss(n, std))
        rows = torch.tensor(n, dtype=torch.float64)
        read = gaussian.expected_entropy(rows, torch.from_numpy(std)).numpy()
        worst = max(worst, float(np.abs(read - exact).max()))
    return worst


def main() -> int:
    """Write the table and check it."""
    across = sites(gaussian.SPREAD_INTERVALS)
    values = np.array(
        [[height(keys_at(x), y) for y in across] for x in sites(gaussian.KEY_INTERVALS)]
    )
    along_keys = interpolate(values, gaussian.KEY_INTERVALS)
    coefficients = interpolate(along_keys.T, gaussian.SPREAD_INTERVALS).T
    np.savez(TABLE, coefficients=np.ascontiguousarray(coefficients, dtype=np.float32))
    worst = worst_difference()
    print(f"{TABLE.name}: {TABLE.stat().st_size} bytes, within {worst:.2e} nat of the quadrature")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
