r"""Heads of trained models, predicted from four numbers of their logits.

Trained heads differ from rows of independent normal logits in two ways that matter. Their first
key often is a sink, whose logit stands apart from all others and varies from row to row; and the
other logits have a skew, because the keys that a head looks for are few and stand out. The model
here has both and nothing else:

* The log-odds of the first key's weight against all others, :math:`g = s_1 - \log \sum_{j>1}
  e^{s_j}`, is normal over rows, with the head's mean and standard deviation. The first weight is
  :math:`a = 1 / (1 + e^{-g})`.
* The other n − 1 logits are independent of each other and of g, with a two-sided normal
  distribution: half normals of different widths on both sides of the median. Its standard
  deviation is the head's, its asymmetry the one at which the mean of
  :math:`\log \frac{1}{n-1} \sum_{j>1} e^{s_j} - \bar s` is the head's.

With q the weights of the other keys among themselves, every metric splits:

.. math::

    H = h(a) + (1 - a) H(q), \qquad \sum_j p_j^2 = a^2 + (1 - a)^2 \sum_j q_j^2, \qquad
    \max_j p_j = \max(a, (1 - a) \max_j q_j).

That is: the other logits are independent, one deviation holds for all rows, and their skewness is
within ±1.62. Where the measured Jensen gap is impossible for any such logits, because a few keys
beyond the first stand far above the rest, there is no prediction. Rows that break the assumptions
can also have a possible gap and a wrong prediction; the mathematics page gives examples.

The mean of :math:`H(q)` is exact at finite n: with :math:`\varphi(t) = E e^{-t e^s}` and m = n − 1
keys,

.. math::

    E \log \textstyle\sum_j e^{s_j} &= \int_0^\infty (e^{-t} - \varphi^m) \frac{dt}{t}, \\
    E \textstyle\sum_j q_j s_j &= m \int_0^\infty E[s e^s e^{-t e^s}] \, \varphi^{m-1} dt, \\
    E \frac{1}{\sum_j q_j^2} &= 1 + m(m-1) \int_0^\infty (E[e^s e^{-t e^{2s}}])^2
        (E e^{-t e^{2s}})^{m-2} dt,

and H(q) is the first less the second.

Sources: Derrida (1981), Phys. Rev. B 24, 2613, for the model without sink and skew; Xiao et al.
(2023), arXiv:2309.17453, for sinks.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, ndtri, xlogy

from acutance.theory.arguments import Array, checked, result

__all__ = ["HeadMetrics", "expected_head_metrics"]

#: The numbers of a head, as :func:`expected_head_metrics` names them.
HEAD_NUMBERS = ("first_gap", "first_gap_std", "rest_logit_std", "rest_jensen_gap")

_LARGEST_ASYMMETRY = 2.0  # the widths of both sides differ by a factor e^4 there
_REACH = 9.0  # widths of a half normal, beyond which nothing is left
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_HALF = 0.5 * _REACH * (_NODES + 1)
_HALF_MASS = 0.5 * _REACH * _WEIGHTS * math.sqrt(2 / math.pi) * np.exp(-0.5 * _HALF**2)
_STEP = 0.45  # of log t, at most
_POINTS = 112  # of log t, at least
_FROZEN = 25.0  # deviation from which log Z is the largest logit and entropy falls as 1 / deviation
_TOP_POINTS = 48
_UNIT, _UNIT_MASS = (part / 2 for part in np.polynomial.legendre.leggauss(12))
_UNIT = _UNIT + 0.5
_MOST_STEPS = 40
_TOLERANCE = 1e-4  # of the Jensen gap, in nats
_NOISE = 0.01  # nats by which a possible Jensen gap may be measured too large or too small
_AT_ONCE = 16  # heads whose quadratures fit a processor's cache
_GAUSS, _GAUSS_WEIGHTS = np.polynomial.hermite_e.hermegauss(41)
_GAUSS_MASS = _GAUSS_WEIGHTS / _GAUSS_WEIGHTS.sum()


class HeadMetrics(NamedTuple):
    """Expected metrics of heads: floats, or arrays of the arguments' shape.

    Attributes:
        entropy: Mean entropy, in nats.
        effective_keys: Mean number of effective keys.
        top_weight: Mean weight of the largest key.
        first_weight: Mean weight of the first key.
        skewness: Skewness of the logits of all keys but the first, as inferred from their Jensen
            gap and standard deviation. Where the deviation varies from row to row it is too large.
    """

    entropy: float | Array
    effective_keys: float | Array
    top_weight: float | Array
    first_weight: float | Array
    skewness: float | Array


def expected_head_metrics(
    n: ArrayLike,
    *,
    first_gap: ArrayLike,
    first_gap_std: ArrayLike,
    rest_logit_std: ArrayLike,
    rest_jensen_gap: ArrayLike,
) -> HeadMetrics:
    """Predict a trained head's weights from four means over its rows.

    The numbers are what :func:`acutance.probe` records under the same names. On 270 heads of
    SmolLM2-135M and 72 of MiniLM-L6, on text that did not choose the model, it explains 93 % or
    more of the heads' differences in mean entropy; see ``acutance reproduce real_heads``.

    Args:
        n: Number of visible keys, n >= 3; between integers the formulas are continued.
        first_gap: Mean log-odds of the first key's weight against all others.
        first_gap_std: Standard deviation of ``first_gap`` over rows, >= 0.
        rest_logit_std: Mean standard deviation of the other keys' logits, >= 0.
        rest_jensen_gap: Mean of their logsumexp − log(n − 1) − mean, >= 0, in nats.

    Returns:
        A :class:`HeadMetrics`; NaN where an argument is NaN. Where the Jensen gap is impossible for
        that standard deviation by more than 0.01 nat, which is so where one key beyond the first
        dominates, only the first weight is predicted and the rest is NaN. Entropy and first weight
        are expectations under the model, right to 1e-4. Effective keys and top weight combine the
        first weight with means over the other keys, which makes effective keys up to 10 % too
        large.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        A sink with two thirds of the weight, and logits of spread 2 with a skew:

        >>> head = expected_head_metrics(
        ...     1024, first_gap=0.8, first_gap_std=1.0, rest_logit_std=2.0, rest_jensen_gap=2.4
        ... )
        >>> head.entropy, head.first_weight
        (2.0784..., 0.6601...)

    Source:
        The module's derivation; see "Trained heads" in the documentation's mathematics.
    """
    keys = checked("n", n, "there are a first key and at least two others", 3.0)
    given = first_gap, first_gap_std, rest_logit_std, rest_jensen_gap
    values = [np.asarray(value, dtype=np.float64) for value in given]
    rule = "it must be finite, and not negative but for a gap"
    for name, value in zip(HEAD_NUMBERS, values, strict=True):
        checked(name, np.nan_to_num(value), rule, -np.inf if name == "first_gap" else 0.0)
    keys, gap, spread, std, jensen = np.broadcast_arrays(keys, *values)
    shape = keys.shape
    keys, gap, spread, std, jensen = (part.ravel() for part in (keys, gap, spread, std, jensen))
    out = np.full((5, keys.size), np.nan)
    usable = np.flatnonzero(np.isfinite(gap) & np.isfinite(spread) & (jensen >= 0) & (std >= 0))
    usable = usable[np.argsort(std[usable], kind="stable")]  # heads alike need as many points
    for begin in range(0, usable.size, _AT_ONCE):
        at = usable[begin : begin + _AT_ONCE]
        out[:, at] = _predict(keys[at], gap[at], spread[at], std[at], jensen[at])
    return HeadMetrics(*(result(part.reshape(shape)) for part in out))


def two_sided_normal(asymmetry: ArrayLike) -> tuple[Array, Array, Array]:
    r"""Nodes, masses and skewness of a two-sided normal distribution with mean 0 and variance 1.

    It is :math:`e^{\kappa} z` for z > 0 and :math:`e^{-\kappa} z` for z < 0 with z normal, then
    shifted and scaled: both sides of its median are half normals.

    Args:
        asymmetry: κ, shape (...).

    Returns:
        Nodes (..., 96), masses (..., 96), which sum to 1, and the skewness (...).

    Example:
        >>> nodes, mass, skewness = two_sided_normal(0.25)
        >>> float(skewness)
        0.5706...
        >>> bool(abs(mass @ nodes**2 - 1) < 1e-12)
        True
    """
    kappa = np.asarray(asymmetry, dtype=np.float64)[..., None]
    nodes = np.concatenate([-np.exp(-kappa) * _HALF, np.exp(kappa) * _HALF], axis=-1)
    mass = np.broadcast_to(np.tile(0.5 * _HALF_MASS, 2), nodes.shape)
    centre, width = _centre_and_width(kappa)
    scaled = (nodes - centre) / width
    return scaled, mass, np.asarray((mass * scaled**3).sum(axis=-1))


def _centre_and_width(kappa: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of :func:`two_sided_normal` before it is shifted and scaled."""
    centre = math.sqrt(2 / math.pi) * np.sinh(kappa)
    return centre, np.sqrt(np.cosh(2 * kappa) - centre**2)


class _Rows:
    """Quadrature over rows of m independent keys, for some heads: arrays are (heads, ...)."""

    def __init__(self, m: Array, std: Array, kappa: Array) -> None:
        """Choose the points log t between which the integrands live."""
        self.m, self.std, self.kappa = m, std, kappa
        nodes, self.mass, _ = two_sided_normal(kappa)
        self.s = std[:, None] * nodes
        top = self.s.max(axis=1, keepdims=True)
        log_mean = np.log((self.mass * np.exp(self.s - top)).sum(axis=1)) + top[:, 0]
        self.low = -np.log(m) - log_mean - 16
        # beyond, every row has a key with t e^s > e^4
        most = std * _quantile(np.exp(-36 / m), kappa)
        self.high = np.maximum(-most, self.low + 20) + 4
        points = max(_POINTS, 1 + math.ceil(float((self.high - self.low).max()) / _STEP))
        self.step = (self.high - self.low) / (points - 1)
        self.x = self.low[:, None] + self.step[:, None] * np.arange(points)
        # e^-e is 0 from e = 745 on
        self.e = np.exp(np.minimum(self.x[:, :, None] + self.s[:, None, :], 7.0))
        self.decay = np.exp(-self.e)
        self.log_phi = np.log(np.maximum(self._mean(self.decay, self.mass), 1e-300))

    def _mean(self, values: Array, weights: Array) -> Array:
        """Weighted mean of values over rows."""
        return np.asarray((values @ weights[:, :, None])[:, :, 0])

    def log_sum(self) -> Array:
        """Mean of log Σ e^s over the m keys of a row, (heads,)."""
        # e^-ct instead of e^-t, with c e^high = e^4, adds log c
        shift = self.high - 4
        one = np.exp(-np.exp(self.x - shift[:, None]))
        total = (one - np.exp(self.m[:, None] * self.log_phi)).sum(axis=1)
        return np.asarray(total * self.step - shift)

    def jensen_gap(self) -> Array:
        """Mean of log (1/m Σ e^s) over rows, (heads,); scores have mean 0."""
        return self.log_sum() - np.log(self.m)

    def entropy(self) -> Array:
        """Mean entropy of the rows, in nats, (heads,)."""
        others = self.m[:, None] * np.exp((self.m - 1)[:, None] * self.log_phi)
        density = self._mean(self.e * self.decay, self.mass * self.s)
        mean = (others * density).sum(axis=1) * self.step
        return np.asarray(np.clip(self.log_sum() - mean, 0.0, np.log(self.m)))

    def effective_keys_at_half(self) -> Array:
        """Mean number of effective keys of rows whose logits are half as large, (heads,)."""
        others = np.exp((self.m - 2)[:, None] * self.log_phi)
        pairs = self._mean(np.sqrt(self.e) * self.decay, self.mass) ** 2 * others
        count = 1 + self.m * (self.m - 1) * pairs.sum(axis=1) * self.step
        return np.asarray(np.clip(count, 1.0, self.m))

    def top_weight(self) -> Array:
        """Mean of the largest weight, (heads,).

        Given the largest logit, the others are independent draws from the law cut off there.
        """
        total = np.zeros(self.m.shape)
        log_u = np.linspace(0.0, 1.0, _TOP_POINTS)
        for place, share in zip(_UNIT, _UNIT_MASS, strict=True):
            below = place ** (1 / self.m)
            largest = self.std * _quantile(below, self.kappa)
            ratio = np.exp(np.minimum(self.s - largest[:, None], 0.0))
            mass = np.where(self.s < largest[:, None], self.mass, 0.0)
            low = np.minimum(-np.log(self.m * (mass * ratio).sum(axis=1) + 1e-9) - 9, -9.0)
            v = low[:, None] + (3.7 - low)[:, None] * log_u
            u = np.exp(v)
            lost = self._mean(-np.expm1(-u[:, :, None] * ratio[:, None, :]), mass)
            whole = np.maximum(below, mass.sum(axis=1) * (1 + 1e-12))[:, None]
            rest = np.exp((self.m - 1)[:, None] * np.log1p(-lost / whole))
            step = (3.7 - low) / (_TOP_POINTS - 1)
            total += share * ((u * np.exp(-u) * rest).sum(axis=1) * step + np.exp(low))
        return np.clip(total, 1 / self.m, 1.0)


def _quantile(probability: Array, kappa: Array) -> Array:
    """Quantile of the two-sided normal distribution with mean 0 and variance 1."""
    centre, width = _centre_and_width(kappa)
    z = ndtri(probability)
    return np.asarray((np.exp(np.sign(z) * kappa) * z - centre) / width)


def _asymmetry(m: Array, std: Array, jensen: Array) -> Array:
    """The κ at which rows have this mean Jensen gap, by the Illinois rule; NaN if there is none."""

    def off(kappa: Array) -> Array:
        return _Rows(m, std, kappa).jensen_gap() - jensen

    low = np.full(m.shape, -_LARGEST_ASYMMETRY)
    high = -low
    below, above = off(low), off(high)
    nearest = np.where(below > 0, low, high)
    nearest = np.where(np.maximum(below, -above) <= _NOISE, nearest, np.nan)
    solvable = (below <= 0) & (above >= 0) & (std > 0)
    kappa = low
    for _ in range(_MOST_STEPS):
        slope = np.where(above > below, above - below, 1.0)
        kappa = np.clip(low - below * (high - low) / slope, low, high)
        error = off(kappa)
        if bool(np.all((np.abs(error) < _TOLERANCE) | np.logical_not(solvable))):
            break
        left = error < 0
        # an end that stays a second time counts half
        stays = np.where(left, error * below > 0, error * above > 0)
        below, above = (
            np.where(left, error, np.where(stays, below / 2, below)),
            np.where(left, np.where(stays, above / 2, above), error),
        )
        low, high = np.where(left, kappa, low), np.where(left, high, kappa)
    return np.where(solvable, kappa, np.where(std == 0, 0.0 * nearest, nearest))


def _predict(n: Array, gap: Array, gap_std: Array, std: Array, jensen: Array) -> Array:
    """The five fields of :class:`HeadMetrics` for some heads, (5, heads)."""
    m = n - 1
    beyond = np.maximum(std / _FROZEN, 1.0)
    std, jensen = std / beyond, np.maximum((jensen + np.log(m)) / beyond - np.log(m), 0.0)
    kappa = _asymmetry(m, std, jensen)
    entropy, keys, top = np.full((3, n.size), np.nan)
    if (at := np.isfinite(kappa)).any():
        rows = _Rows(m[at], std[at], kappa[at])
        entropy[at], top[at] = rows.entropy() / beyond[at], rows.top_weight()
        keys[at] = _Rows(rows.m, 2 * rows.std, rows.kappa).effective_keys_at_half()
    a = expit(gap[:, None] + gap_std[:, None] * _GAUSS)
    left = 1 - a

    def over_rows(values: Array) -> Array:
        return np.asarray(values @ _GAUSS_MASS)

    return np.stack(
        [
            over_rows(-xlogy(a, a) - xlogy(left, left) + left * entropy[:, None]),
            over_rows(1 / (a * a + left * left / keys[:, None])),
            over_rows(np.maximum(a, left * top[:, None])),
            over_rows(a),
            two_sided_normal(kappa)[2],
        ]
    )
