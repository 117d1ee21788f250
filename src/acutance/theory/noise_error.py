r"""The error that noise on the logits causes in a row's output.

A row has weights p, values v and output :math:`o = \sum_j p_j v_j`. Independent noise
:math:`\varepsilon_j` on the logits turns it into

.. math::

    \tilde o = \sum_j \tilde p_j v_j, \qquad
    \tilde p_j = \frac{p_j w_j}{\sum_k p_k w_k}, \quad w_j = e^{\varepsilon_j}.

With :math:`u_j = v_j - o`, the mean square error :math:`E \|\tilde o - o\|^2` is given to the first
and second order in :math:`\nu`, the relative variance of w, and exactly. The exact form writes
:math:`1 / W^2 = \int_0^\infty t e^{-t W} dt` for :math:`W = \sum_j p_j w_j`, after which the keys
are independent:

.. math::

    E \|\tilde o - o\|^2 = \int_0^\infty \Big[ \sum_j \mathrm{Var}_t(p_j w_j) \|u_j\|^2 +
    \Big\| \sum_j E_t(p_j w_j) u_j \Big\|^2 \Big] \prod_j L(t p_j) \; t \, dt,
    \qquad L(s) = E e^{-s w},

where :math:`E_t` and :math:`\mathrm{Var}_t` weight :math:`w_j` by :math:`e^{-t p_j w_j}`. Nothing
cancels, no moment of w need exist, and with :math:`t = e^y` the integrand is analytic for
:math:`|\mathrm{Im}\, y| < \pi / 2` and bounded there by a multiple of the result: the trapezoid
rule in steps of 1/4 has a relative error below 2e-14.

Sources: Su (2023), https://kexue.fm/archives/9593 (that the output hardly changes); Trefethen &
Weideman (2014), SIAM Review 56, 385 (the trapezoid rule); the rest follows from the formulas above.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from acutance.theory.arguments import Array
from acutance.theory.noise_laws import (
    NoiseKind,
    check_scale,
    noise_central_moment,
    noise_quantiles,
    noise_variance_ratio,
    tilted_table,
)

__all__ = [
    "NoisyRow",
    "exact_noise_mse",
    "finite",
    "first_order_bias",
    "first_order_mse",
    "noisy_row",
    "one_number",
    "second_order_mse",
]

_SUM_TOLERANCE = 1e-9  # how far from 1 the weights of a row may sum


class NoisyRow(NamedTuple):
    """The keys of a row that have weight: their weights, and their values less the output."""

    p: Array  # weights, summing to 1
    u: Array  # values less the output


def noisy_row(p: ArrayLike, v: ArrayLike) -> NoisyRow:
    """Check weights (n,) and values (n, dim), drop keys without weight, and subtract the output.

    The value of the largest weight is subtracted first: the output of a nearly one-hot row differs
    from it by little, and that difference must not be lost to rounding.
    """
    weights, values = finite("p", p, 1), finite("v", v, 2)
    shapes = f"(p {weights.shape}, v {values.shape})"
    if weights.size != values.shape[0]:
        raise ValueError(
            f"p and v must have the same number of keys n: {weights.size}, {values.shape[0]} "
            f"{shapes}"
        )
    if weights.size == 0:
        raise ValueError(f"p: a row must have at least one key {shapes}")
    if (weights < 0).any():
        raise ValueError(f"p: weights must be at least 0, got {weights.min():g} {shapes}")
    total = float(weights.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(
            f"p: weights must sum to 1 within {_SUM_TOLERANCE:g}, got {total!r} {shapes}"
        )
    live = weights > 0
    weights, values = weights[live] / total, values[live]
    values = values - values[weights.argmax()]
    return NoisyRow(weights, values - weights @ values)


def one_number(value: ArrayLike, name: str = "scale") -> Array:
    """Convert to a 0-d array; ValueError unless it is one number."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim:
        raise ValueError(f"{name}: must be one number for one row, got shape {array.shape}")
    return array


def finite(name: str, x: ArrayLike, ndim: int) -> Array:
    """Convert to float64; ValueError for a wrong number of dimensions, NaN or infinity."""
    array = np.asarray(x, dtype=np.float64)
    if array.ndim != ndim:
        form = {1: "(n,)", 2: "(n, dim)"}[ndim]
        raise ValueError(f"{name} must have shape {form}, got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name}: every entry must be finite, got {name} with NaN or inf {array.shape}"
        )
    return array


_NODES_PER_UNIT = 4  # of log t


_STEPS = 4  # grid points per node


_GRID = 1 / (_NODES_PER_UNIT * _STEPS)  # spacing of the tabulated log s


_STENCIL = 16  # points of the interpolation on it


_KEY_BLOCK = 65_536  # keys interpolated at a time


_WINDOW = 4_000_000  # grid values summed at a time


_DEPTH = 45.0  # log of the smallest share of the integral that counts


def first_order_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under logit noise, to the first order in ν.

    .. math:: E \|\tilde o - o\|^2 \approx \nu \sum_j p_j^2 \|v_j - o\|^2

    Here :math:`o = \sum_j p_j v_j` is the output, :math:`\tilde o` the output with noise, and ν the
    :func:`noise_variance_ratio`. It holds for rows that spread over many keys. It is too large when
    :math:`\nu \sum p_j^2` is not small, and too small for nearly one-hot rows, whose error is
    rarely large; there, and where ν is infinite, use :func:`exact_noise_mse`.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; below 1/2 for Laplace and Gumbel noise.

    Returns:
        The approximate mean square error, in squared units of v.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, the kind is unknown, or the
            scale is negative, not finite or without a second moment.

    Example:
        >>> first_order_mse([0.75, 0.25], [[1.0], [0.0]], "gaussian", 0.1)
        0.000706652373

    Source:
        Su (2023), https://kexue.fm/archives/9593.
    """
    row = noisy_row(p, v)
    return float(_ratio(kind, scale) * _power_sum(row, 2))


def first_order_bias(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> Array:
    r"""Mean error of a row's output under logit noise, to the first order in ν.

    .. math:: E [\tilde o - o] \approx -\nu \sum_j p_j^2 (v_j - o)

    Here :math:`o = \sum_j p_j v_j` is the output, :math:`\tilde o` the output with noise, and ν the
    :func:`noise_variance_ratio`. Noise pulls the output towards the plain average of the values.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; below 1/2 for Laplace and Gumbel noise.

    Returns:
        The approximate mean error, shape (dim,), in units of v.

    Raises:
        ValueError: As :func:`first_order_mse`.

    Example:
        >>> first_order_bias([0.75, 0.25], [[1.0], [0.0]], "gaussian", 0.1)
        array([-0.0009422])

    Source:
        Su (2023), https://kexue.fm/archives/9593.
    """
    row = noisy_row(p, v)
    bias: Array = -_ratio(kind, scale) * (row.p**2 @ row.u)
    return bias


def second_order_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under logit noise, to the second order in ν.

    .. math::

        E \|\tilde o - o\|^2 \approx \nu A_2 - 2 \mu_3 A_3 +
        3 [\nu^2 (A_2 Y + 2 \|b\|^2) + (\mu_4 - 3 \nu^2) A_4]

    with the output :math:`o = \sum_j p_j v_j`, :math:`\tilde o` that with noise, :math:`u_j = v_j -
    o, A_k = \sum p_j^k \|u_j\|^2, Y = \sum p_j^2, b = \sum p_j^2 u_j`, :math:`\nu = \mu_2` and
    :math:`\mu_k` the :func:`noise_central_moment`. The series is asymptotic: it improves on the
    first order for ν up to about 0.3; beyond, it is worse and may be negative.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; below 1/4 for Laplace and Gumbel noise.

    Returns:
        The approximate mean square error, in squared units of v.

    Raises:
        ValueError: As :func:`first_order_mse`, and if the fourth moment is infinite.

    Example:
        >>> p, v = [0.75, 0.25], [[1.0], [0.0]]
        >>> first_order_mse(p, v, "gaussian", 0.1), second_order_mse(p, v, "gaussian", 0.1)
        (0.00070665, 0.000704999)
        >>> exact_noise_mse(p, v, "gaussian", 0.1)
        0.000703924

    Source:
        Expansion of 1 / W² to the fourth order of w / E w - 1.
    """
    row = noisy_row(p, v)
    ratio = _ratio(kind, scale)
    third, fourth = (float(noise_central_moment(kind, k, scale)) for k in (3, 4))
    pull = row.p**2 @ row.u
    square = _power_sum(row, 2) * float(row.p @ row.p) + 2 * float(pull @ pull)
    excess = (fourth - 3 * ratio**2) * _power_sum(row, 4)
    return float(
        ratio * _power_sum(row, 2)
        - 2 * third * _power_sum(row, 3)
        + 3 * (ratio**2 * square + excess)
    )


def exact_noise_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under independent logit noise, exactly.

    .. math::

        E \|\tilde o - o\|^2 = \int_0^\infty t \prod_l L_l \Big[ \sum_j \frac{B_j}{L_j} \|u_j\|^2 +
        \Big\| \sum_j \frac{A_j}{L_j} u_j \Big\|^2 - \sum_j \frac{A_j^2}{L_j^2} \|u_j\|^2 \Big] dt

    with the output :math:`o = \sum_j p_j v_j`, :math:`\tilde o` that with noise, :math:`u_j = v_j -
    o` and, for the factor :math:`w = e^\varepsilon` of the noise ε, :math:`L_j = E e^{-t p_j w}`,
    :math:`A_j = E p_j w e^{-t p_j w}`, :math:`B_j = E (p_j w)^2 e^{-t p_j w}`. It is finite for
    every kind and scale of noise, also where the variance of w is infinite. As the scale tends to 0
    it tends to :func:`first_order_mse`; as the scale grows, to the error of attending to one key
    chosen at random.

    The relative accuracy is about 1e-12; results under 1e-300 underflow. The noise is integrated
    once per point of a grid of log s, s = t p_j, and every key is interpolated on that grid: the
    cost grows like n dim, with the scale from about 1 on, and with the logarithm of the smallest
    weight.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0.

    Returns:
        The mean square error, in squared units of v; 0 for a one-hot row, whose output no noise
        changes.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, the kind is unknown, or the
            scale is negative or not finite.

    Example:
        >>> exact_noise_mse([0.5, 0.5], [[1.0], [0.0]], "gaussian", 0.5)
        0.02537663200636
        >>> exact_noise_mse([0.5, 0.5], [[1.0], [0.0]], "laplace", 2.0)  # though ν is infinite
        0.146008601456

    Source:
        See the derivation at the top of this file.
    """
    row = noisy_row(p, v)
    width = float(check_scale(kind, one_number(scale)))
    size = float(np.sqrt((row.u**2).sum(axis=1).max(initial=0.0)))
    if width == 0 or size == 0:
        return 0.0
    row = NoisyRow(row.p, row.u / size)
    return size**2 * _integrate(row, kind, width)


def _power_sum(row: NoisyRow, k: int) -> float:
    """Σ p^k ‖u‖² over the keys, u their values less the output."""
    return float(row.p**k @ (row.u**2).sum(axis=1))


def _ratio(kind: NoiseKind, scale: float) -> float:
    """Relative variance of the exponential of this noise."""
    return float(noise_variance_ratio(kind, one_number(scale)))


def _integrate(row: NoisyRow, kind: NoiseKind, scale: float) -> float:
    """The integral of :func:`exact_noise_mse` for a row with max ‖u‖ = 1, by the trapezoid rule."""
    log_p = np.log(row.p)
    squares = (row.u**2).sum(axis=1)
    first_order = float(row.p**2 @ squares)
    # the mean square error is no smaller than about e^-rare, relative to the largest
    rare = -math.log(max(first_order, 1e-300))
    depth = min(_DEPTH + rare, 650.0)
    low, high = noise_quantiles(kind, scale, depth)
    start = -(max(high, 0.0) + depth / 2)  # there t W is below e^(-depth/2)
    stop = -(min(low, 0.0) + float(log_p.max())) + math.log(depth + 20)  # e^-tW is negligible
    nodes = math.ceil(_NODES_PER_UNIT * (stop - start)) + 1

    spread = math.floor((log_p.max() - log_p.min()) / _GRID) + _STENCIL
    before = _STENCIL // 2 - 1
    origin = start + float(log_p.min()) - before * _GRID
    grid = origin + _GRID * np.arange(_STEPS * (nodes - 1) + spread)
    table = tilted_table(kind, scale, grid)
    count, square, vector = _grid_coefficients(log_p, squares, row.u, spread)

    total = 0.0
    rows = max(1, _WINDOW // spread)
    for first in range(0, nodes, rows):
        # row i holds the grid around the keys at node i
        part = slice(_STEPS * first, _STEPS * (first + rows - 1) + spread)
        log_transform, mean, variance = (
            np.lib.stride_tricks.sliding_window_view(column[part], spread)[::_STEPS]
            for column in table
        )
        error = variance @ square + ((mean @ vector) ** 2).sum(axis=1)
        total += float(np.exp(log_transform @ count) @ error)
    return total / _NODES_PER_UNIT


def _grid_coefficients(
    log_p: Array, squares: Array, u: Array, size: int
) -> tuple[Array, Array, Array]:
    """Coefficients that turn sums over keys into sums over an interpolation grid.

    For each w_j = 1, ‖u_j‖² and u_j they are the c_i in Σ_j w_j f(log p_j) ≈ Σ_i c_i f_i, with f_i
    the values of f on the grid. Interpolation is linear in the f_i, so the coefficients do not
    depend on f and serve all quadrature nodes.
    """
    from scipy.sparse import csr_array  # takes its time to load

    count, square, vector = np.zeros(size), np.zeros(size), np.zeros((size, u.shape[1]))
    offsets = np.arange(_STENCIL) - (_STENCIL // 2 - 1)
    position = (log_p - log_p.min()) / _GRID
    for first in range(0, log_p.size, _KEY_BLOCK):
        block = slice(first, first + _KEY_BLOCK)
        cell = np.floor(position[block])
        weights = _lagrange(position[block] - cell, offsets)
        columns = cell.astype(np.int64)[:, None] + np.arange(_STENCIL)
        starts = np.arange(0, columns.size + 1, _STENCIL)
        shape = (columns.shape[0], size)
        onto = csr_array((weights.ravel(), columns.ravel(), starts), shape=shape).T
        count += onto @ np.ones(columns.shape[0])
        square += onto @ squares[block]
        vector += onto @ u[block]
    return count, square, vector


def _lagrange(at: Array, offsets: NDArray[np.int64]) -> Array:
    """Lagrange interpolation weights of the values at ``offsets``, (n, points)."""
    weights = np.ones((at.size, offsets.size))
    for column, offset in enumerate(offsets.tolist()):
        for other in offsets.tolist():
            if other != offset:
                weights[:, column] *= (at - other) / (offset - other)
    return weights
