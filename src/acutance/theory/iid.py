r"""Softmax rows with independent logits of any law: exact expectations at finite n.

A row of n keys has logits :math:`\gamma s_j`, the scores s_j independent with a common continuous
law, weights :math:`p = \mathrm{softmax}(\gamma s)` and normaliser
:math:`Z = \sum_j e^{\gamma s_j}`.

As for Gaussian scores (``acutance.theory.gaussian``), let :math:`G_j` be independent standard
Gumbel variables: the largest :math:`\gamma s_j + G_j` is distributed as :math:`\log Z + G`, and its
index is a draw from p. With :math:`a = e^{\gamma s - y}` and

.. math::

    F(y) = E e^{-a}, \quad f(y) = E a e^{-a}, \quad k(y) = E K(y - \gamma s), \quad
    K(g) = \int_g^\infty (x - c) e^{-x - e^{-x}} dx,

c Euler's constant,

.. math::

    E H &= n(n-1) \int F^{n-2} f k \, dy, \\
    E \sum_j p_j^\kappa &= \frac{n}{\Gamma(\kappa)} \int F^{n-1} E[a^\kappa e^{-a}] \, dy, \\
    E \sum_j p_j s_j &= n \int F^{n-1} E[s \, a e^{-a}] \, dy, \\
    E \log Z &= E H + \gamma \, E \textstyle\sum_j p_j s_j.

The first is :math:`E[G_I] - c` at the index I of the maximum, by parts: it needs no moment of the
scores, so heavy tails with an infinite :math:`E e^{\gamma s}`, or no mean at all, have their
entropy too. Integrands of entropy and powers are positive, so nothing cancels.

*How it is computed.* The expectations over s are Gauss sums on the cells of
``acutance.theory.families``; where a cell is wide for the kernels, it is cut anew around each y.
The integrals over y are Gauss sums on panels that are bisected until their Legendre coefficients
fall off. Results keep 1e-10, for every n up to 1e12.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose partition function
is Z); Maddison, Tarlow & Minka (2014), arXiv:1411.0030 (the Gumbel representation).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import digamma, gammaln

from acutance.theory.families import LEGENDRE, NODES, WEIGHTS, Family, as_family, grid
from acutance.theory.gaussian import _EIN, _gumbel_tail_mean, expected_max_gauss

__all__ = [
    "asymptotic_entropy_gauss",
    "expected_collision",
    "expected_entropy",
    "expected_logsumexp",
    "expected_power_sum",
    "expected_weighted_mean",
]

Array = NDArray[np.float64]

_TOLERANCE = 1e-13  # of the integral over y
_NEGLIGIBLE = 1e-20  # expected number of keys in a tail that is left out
_RESOLVED = 3.0  # logits across a cell, up to which its own nodes are enough
_EMPTY = 42.0  # beyond this g + log n, all keys together have a = e^-g = 0
_MOST_PANELS = 1 << 13
_MOST_PAIRS = 1 << 17  # (y, score) that are in memory at a time


def expected_logsumexp(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    *,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> float | Array:
    r"""Expected log-normaliser of a softmax row with n independent logits.

    .. math:: E \log \sum_{j=1}^n e^{\gamma s_j} = E H + \gamma E \textstyle\sum_j p_j s_j

    It is log n at gamma = 0, log n + log E exp(gamma s) while that is finite and n large, and
    tends to gamma E max s.

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of the scores s; see :func:`expected_entropy`.
        d: Dimension for ``"cosine"``.
        rho: Exponent for ``"stretched"``.
        a: Tail index for ``"pareto"``.

    Returns:
        E log Z in nats, float64 of the broadcast shape; a float for scalars. It is gamma E s for
        n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the scores have no mean.

    Example:
        >>> expected_logsumexp(256, [0.0, 1.0], "uniform")  # log 256, and log sinh(1) more
        array([5.54517744, 5.70601048])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    law = as_family(family, d=d, rho=rho, a=a)
    return _broadcast(lambda keys, scale: _expected_logsumexp(keys, scale, law), n, gamma)


def expected_entropy(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    *,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> float | Array:
    r"""Expected Shannon entropy of a softmax row with n independent logits.

    .. math:: E H = -E \sum_{j=1}^n p_j \log p_j, \qquad p = \mathrm{softmax}(\gamma s)

    ======================== ==================================================
    family                   law of a score s, at unit scale
    ======================== ==================================================
    ``"gaussian"``           standard normal
    ``"uniform"``            uniform on [-1, 1]
    ``"exponential"``        P(s > x) = exp(-x) on x >= 0
    ``"laplace"``            density exp(-abs(x)) / 2
    ``"gumbel"``             distribution function exp(-exp(-x))
    ``"logistic"``           distribution function 1 / (1 + exp(-x))
    ``"cosine"``, d          cosine of two uniform directions of R^d, d >= 2
    ``"stretched"``, rho     P(s > x) = exp(-x^rho) on x >= 0
    ``"pareto"``, a          P(s > x) = x^(-a) on x >= 1
    a SciPy distribution     its own: frozen and continuous, such as ``norm(0, 2)``
    ======================== ==================================================

    The entropy falls with gamma, from log n to 0. A distribution whose quantiles SciPy finds
    by search takes a few seconds the first time.

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of the scores s, from the table.
        d: Dimension for ``"cosine"``.
        rho: Exponent for ``"stretched"``.
        a: Tail index for ``"pareto"``.

    Returns:
        E H in nats, float64 of the broadcast shape; a float for scalars. It is 0 for n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_entropy(2, 1.0)
        0.539500061688
        >>> expected_entropy(65536, [8.0, 16.0], "cosine", d=128)
        array([10.84..., 10.1...])
        >>> from scipy.stats import norm
        >>> expected_entropy(2, 0.5, norm(3, 2))  # a shift changes nothing, a width is a scale
        0.539500061688

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    law = as_family(family, d=d, rho=rho, a=a)
    return _broadcast(lambda keys, scale: _expected_entropy(keys, scale, law), n, gamma)


def expected_power_sum(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    k: float = 2.0,
    *,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> float | Array:
    r"""Expected sum of the k-th powers of the weights of a softmax row with n independent logits.

    .. math:: E \sum_{j=1}^n p_j^k = \frac{n}{\Gamma(k)} \int F^{n-1} E[a^k e^{-a}] \, dy,
              \qquad a = e^{\gamma s - y}

    It rises with gamma from n^(1-k) to 1.

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of the scores s; see :func:`expected_entropy`.
        k: The power, 1 <= k <= 1000; not only integers.
        d: Dimension for ``"cosine"``.
        rho: Exponent for ``"stretched"``.
        a: Tail index for ``"pareto"``.

    Returns:
        E Σ p^k, float64 of the broadcast shape; a float for scalars. It is 1 for k = 1 or n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_power_sum(64, 2.0, "laplace", k=3)
        0.446...

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    law = as_family(family, d=d, rho=rho, a=a)
    if np.ndim(k) != 0 or not 1 <= k <= 1000:
        raise ValueError(f"k: the power is one number between 1 and 1000, got k={k}")
    power = float(k)
    return _broadcast(lambda keys, scale: _expected_power(keys, scale, law, power), n, gamma)


def expected_collision(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    *,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> float | Array:
    r"""Expected collision probability of a softmax row with n independent logits.

    .. math:: E Y = E \sum_{j=1}^n p_j^2

    Its inverse measures the number of keys that share the weight. It rises with gamma, from 1/n
    to 1.

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of the scores s; see :func:`expected_entropy`.
        d: Dimension for ``"cosine"``.
        rho: Exponent for ``"stretched"``.
        a: Tail index for ``"pareto"``.

    Returns:
        E Y, between 1/n and 1, float64 of the broadcast shape; a float for scalars. It is 1 for
        n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_collision(2, 1.0)
        0.636838153968
        >>> expected_collision(4096, [1.0, 2.0], "exponential")  # no e^gamma has a mean there
        array([0.064..., 0.49...])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return expected_power_sum(n, gamma, family, 2.0, d=d, rho=rho, a=a)


def expected_weighted_mean(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    *,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> float | Array:
    r"""Expected mean score under the weights of a softmax row with n independent logits.

    .. math:: E \langle s \rangle = E \sum_{j=1}^n p_j s_j = \frac{d}{d\gamma} E \log Z

    It rises with gamma, from the mean of a score to the expected maximum of n.

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of the scores s; see :func:`expected_entropy`.
        d: Dimension for ``"cosine"``.
        rho: Exponent for ``"stretched"``.
        a: Tail index for ``"pareto"``.

    Returns:
        E⟨s⟩ in the unit of the scores (gamma is not in it), float64 of the broadcast shape; a
        float for scalars. It is the mean of a score for n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the scores have no mean.

    Example:
        >>> expected_weighted_mean(2, 1.0)  # gamma (1 - E Y) for Gaussian scores
        0.363161846032
        >>> expected_weighted_mean(64, [0.0, 4.0], "exponential")
        array([1.        , 4.2...])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    law = as_family(family, d=d, rho=rho, a=a)
    return _broadcast(lambda keys, scale: _expected_mean(keys, scale, law), n, gamma)


def asymptotic_entropy_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Asymptotic entropy of a softmax row with n Gaussian logits: for orientation, not for use.

    With :math:`\gamma_c = \sqrt{2 \log n}` and :math:`M_n` the expected maximum of n scores,

    .. math::

        E H \approx \begin{cases}
            \log n - \gamma^2/2 + [(\gamma^2 - \tfrac12) e^{\gamma^2} + \tfrac12] / n
            & \gamma \le \gamma_c / 2, \\
            \log n - \gamma^2/2 & \gamma_c / 2 < \gamma < \gamma_c, \\
            \psi(1) - \psi(1 - M_n / \gamma) & \gamma \ge \gamma_c,
        \end{cases}

    the last one the entropy of the Poisson-Dirichlet law, about :math:`\pi^2 M_n / (6 \gamma)`.

    The pieces do not meet: corrections fall off only with log n. At n = 65536 and
    gamma = gamma_c the exact value is 3.4 nats, the limit from below 0 and that from above 11;
    the last piece is 10 % high at 2 M_n and 2 % at 4 M_n. :func:`expected_entropy` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form in nats, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_entropy_gauss(65536, [1.0, 4.0, 20.0])
        array([10.590..., 3.09..., 0.40...])
        >>> expected_entropy(65536, [1.0, 4.0, 20.0])
        array([10.590..., 3.7..., 0.38...])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855 (the
        Poisson-Dirichlet law).
    """
    return _broadcast(_asymptotic_entropy, n, gamma, 2.0)


def _asymptotic_entropy(n: float, gamma: float) -> float:
    log_n = math.log(n)
    if gamma * gamma >= 2 * log_n:
        return float(digamma(1.0) - digamma(1 - expected_max_gauss(n) / gamma))
    bulk = log_n - gamma * gamma / 2
    if gamma * gamma > log_n / 2:
        return bulk
    return bulk + ((gamma * gamma - 0.5) * math.exp(gamma * gamma) + 0.5) / n


@lru_cache(maxsize=1024)
def _expected_entropy(n: float, gamma: float, family: Family) -> float:
    if gamma == 0 or n == 1:
        return math.log(n)
    row = _Row.of(n, gamma, family)

    def integrand(y: Array) -> Array:
        below, above, density, tail = row.average(y, [_density, _tail_mean])
        return row.others(below, above, 2) * (n * density) * ((n - 1) * tail)

    return row.integrate(integrand)


def _expected_logsumexp(n: float, gamma: float, family: Family) -> float:
    if gamma == 0:
        return math.log(n)
    return _expected_entropy(n, gamma, family) + gamma * _expected_mean(n, gamma, family)


def _expected_mean(n: float, gamma: float, family: Family) -> float:
    cells = grid(family)
    if not cells.has_mean:
        raise ValueError(
            "family: the weighted mean and log Z need scores with a mean, which is infinite or"
            f" settled beyond float64 for {family}"
        )
    if gamma == 0 or n == 1:
        return cells.centre + float((cells.weights * cells.scores).sum())
    row = _Row.of(n, gamma, family, mean=True)

    def integrand(y: Array) -> Array:
        below, above, moment = row.average(y, [_density], moment=True)
        return row.others(below, above, 1) * (n * moment)

    return cells.centre + row.integrate(integrand)


@lru_cache(maxsize=1024)
def _expected_power(n: float, gamma: float, family: Family, k: float) -> float:
    if n == 1 or k == 1:
        return 1.0
    if gamma == 0:
        return float(n ** (1 - k))
    row = _Row.of(n, gamma, family, power=k)
    shift = float(gammaln(k))

    def density(g: Array) -> Array:
        return np.asarray(np.exp(-k * g - np.exp(-g) - shift))

    def integrand(y: Array) -> Array:
        below, above, square = row.average(y, [density])
        return row.others(below, above, 1) * (n * square)

    return row.integrate(integrand)


def _tail_mean(g: Array) -> Array:
    """K(g), with the exponential integral only where it is needed."""
    near = g < 0
    values = np.empty_like(g)
    values[near] = _gumbel_tail_mean(g[near])
    far = g[~near]
    a = np.exp(-far)
    values[~near] = np.expm1(-a) * (np.euler_gamma - far) + np.polynomial.polynomial.polyval(
        a, _EIN
    )
    return values


def _density(g: Array) -> Array:
    return np.asarray(np.exp(-g - np.exp(-g)))


@dataclass(frozen=True)
class _Row:
    """The expectations over one score, and the integral over y, at one n, gamma and family."""

    n: float
    gamma: float
    family: Family
    centre: float
    logits: Array  # nodes of the cells that are narrow for the kernels, ascending
    weights: Array
    wide: Array  # (cells, 2): lower and upper logit of the others
    panels: Array  # g between which a kernel is a polynomial
    edges: Array  # y from which to start
    sharpness: float  # width of the kernels in y

    @classmethod
    def of(
        cls, n: float, gamma: float, family: Family, power: float = 1.0, mean: bool = False
    ) -> "_Row":
        cells = grid(family)
        sharp = math.sqrt(max(1.0, power / 4))  # kernels are that much narrower
        part = n * cells.mass
        if mean:
            part = part * (1 + np.abs(cells.scores).max(axis=1) / cells.unit)
        live = np.flatnonzero(part > _NEGLIGIBLE)
        keep = slice(live[0], live[-1] + 1)
        low, high = gamma * cells.low[keep], gamma * cells.high[keep]
        narrow = high - low <= _RESOLVED / sharp
        lowest = -math.log(power + 44 + 10 * math.sqrt(power))  # e^-a is 0 below this g
        peak = -math.log(power)
        width = 1 / math.sqrt(power)
        near = peak + width * np.arange(-1.5, 9.0, 2.5)
        far = near[-1] + width * 3.5 * (2.0 ** np.arange(1, 24) - 1)
        panels = np.concatenate([near, far])
        reach = math.log(n) + _EMPTY
        panels = np.concatenate([[lowest], panels[(panels > lowest) & (panels < reach)], [reach]])
        inner = np.concatenate([low, high[-1:]])
        start, stop = inner[0] + lowest, inner[-1] + min(reach, reach / power + 12)
        step = 2.0 / sharp
        edge = np.array([lowest, 0.5 * lowest, 0, 3, 6, 10, 15, 22, 30, 40, reach])
        edges = [
            inner,
            inner[0] + edge,
            inner[-1] + edge,
            np.arange(inner[-1], stop, 3 * step),
            np.arange(-8 * step, 8 * step, step) + peak,
            np.array([start, stop]),
        ]
        merged = np.sort(np.concatenate(edges))
        return cls(
            n,
            gamma,
            family,
            cells.centre,
            gamma * cells.scores[keep][narrow].ravel(),
            cells.weights[keep][narrow].ravel(),
            np.stack([low[~narrow], high[~narrow]], axis=1),
            panels,
            _thinned(merged[(merged >= start) & (merged <= stop)], step),
            1 / sharp,
        )

    def others(self, below: Array, above: Array, chosen: int) -> Array:
        """F^(n - chosen), from F and 1 - F."""
        near_one = np.log1p(-np.minimum(above, 0.5))
        log_below = np.where(above < 0.5, near_one, np.log(np.maximum(below, 1e-300)))
        return np.asarray(np.exp((self.n - chosen) * log_below))

    def average(
        self, y: Array, kernels: list[Callable[[Array], Array]], moment: bool = False
    ) -> Array:
        """F, 1 - F and the means of the kernels at y, ascending; with ``moment`` those times s."""
        sums = np.zeros((2 + len(kernels), y.size))

        def values(g: Array, logits: Array) -> list[Array]:
            a = np.exp(-g)
            found = [np.exp(-a), -np.expm1(-a), *(kernel(g) for kernel in kernels)]
            if moment:
                found[2:] = [kernel * (logits / self.gamma) for kernel in found[2:]]
            return found

        if self.logits.size:
            self._add_narrow(y, sums, values)
        if self.wide.size:
            block = max(1, _MOST_PAIRS // (8 * len(self.wide)))
            for begin in range(0, y.size, block):
                rows = slice(begin, begin + block)
                self._add_wide(y[rows], sums[:, rows], values)
        return sums

    def _add_narrow(
        self, y: Array, sums: Array, values: Callable[[Array, Array], list[Array]]
    ) -> None:
        mass = np.concatenate([[0.0], np.cumsum(self.weights)])
        mass_above = np.concatenate([np.cumsum(self.weights[::-1])[::-1], [0.0]])
        begin = 0
        while begin < y.size:
            first = int(np.searchsorted(self.logits, y[begin] - self.panels[-1]))
            end, last = begin, first
            while end < y.size:  # as many y as share most of their nodes
                upto = int(np.searchsorted(self.logits, y[end] - self.panels[0]))
                if end > begin and (
                    y[end] > y[begin] + 12 or (upto - first) * (end + 1 - begin) > _MOST_PAIRS
                ):
                    break
                end, last = end + 1, upto
            rows = slice(begin, end)
            logits, weights = self.logits[first:last], self.weights[first:last]
            for total, value in zip(sums, values(y[rows, None] - logits, logits), strict=True):
                total[rows] += value @ weights
            sums[0, rows] += mass[first]
            sums[1, rows] += mass_above[last]
            begin = end

    def _add_wide(
        self, y: Array, sums: Array, values: Callable[[Array, Array], list[Array]]
    ) -> None:
        low, high = self.wide.T
        # Scores out of the kernels' reach, from each y.
        for row, reach, side in ((0, self.panels[-1], -1), (1, self.panels[0], 1)):
            end = np.clip((y - reach)[:, None], low, high)
            if side < 0:
                inner, outer = self._cdf(end), self._cdf(low)
            else:
                inner, outer = self._sf(end), self._sf(high)
            sums[row] += np.maximum(inner - outer, 0.0).sum(axis=1)
        cell_low, cell_high = y[:, None] - high, y[:, None] - low
        # The scores within it, by cell of the law and panel of the kernels.
        at, cell = np.nonzero((cell_low < self.panels[-1]) & (cell_high > self.panels[0]))
        left = np.maximum(cell_low[at, cell][:, None], self.panels[:-1])
        right = np.minimum(cell_high[at, cell][:, None], self.panels[1:])
        pair, panel = np.nonzero(right > left)
        if not pair.size:
            return
        half = 0.5 * (right - left)[pair, panel][:, None]
        g = 0.5 * (right + left)[pair, panel][:, None] + half * NODES
        logits = y[at[pair], None] - g
        weights = half * WEIGHTS * self.family.pdf(logits / self.gamma + self.centre) / self.gamma
        for total, value in zip(sums, values(g, logits), strict=True):
            total += np.bincount(at[pair], weights=(value * weights).sum(axis=1), minlength=y.size)

    def _cdf(self, logits: Array) -> Array:
        return self.family.cdf(logits / self.gamma + self.centre)

    def _sf(self, logits: Array) -> Array:
        return self.family.sf(logits / self.gamma + self.centre)

    def integrate(self, integrand: Callable[[Array], Array]) -> float:
        """Gauss sums over panels, bisected until each is a polynomial to rounding."""
        left, right = self.edges[:-1], self.edges[1:]
        total = size = 0.0
        with np.errstate(all="ignore"):
            while left.size:
                half = 0.5 * (right - left)
                y = 0.5 * (right + left)[:, None] + half[:, None] * NODES
                values = integrand(y.ravel()).reshape(y.shape)
                area = half * (values @ WEIGHTS)
                sizes = half * (np.abs(values) @ WEIGHTS)
                top = np.abs(values).max(axis=1)
                rough = np.abs(values @ LEGENDRE)[:, -3:].max(axis=1) / np.maximum(top, 1e-300)
                # Coefficients up to degree 15 are seen, errors begin with degree 32.
                error = half * top * rough**1.7
                split = error > _TOLERANCE * (size + sizes.sum())
                # Nothing is sharper than the kernels; what looks so is rounding.
                split &= (rough > 1e-12) & (half > 0.1 * self.sharpness)
                if split.sum() > _MOST_PANELS:
                    split[:] = False
                total += area[~split].sum()
                size += sizes[~split].sum()
                middle = 0.5 * (left + right)[split]
                left, right = (
                    np.stack([left[split], middle], axis=1).ravel(),
                    np.stack([middle, right[split]], axis=1).ravel(),
                )
        return float(total)


def _thinned(edges: Array, step: float) -> Array:
    """Ascending edges at least ``step`` apart, the ends among them."""
    kept = [edges[0]]
    for edge in edges[1:-1]:
        if edge >= kept[-1] + step:
            kept.append(edge)
    if edges[-1] < kept[-1] + step and len(kept) > 1:
        kept.pop()
    return np.array([*kept, edges[-1]])


def _broadcast(
    point: Callable[[float, float], float], n: ArrayLike, gamma: ArrayLike, least: float = 1.0
) -> float | Array:
    """Check the domains, then evaluate point by point over the broadcast shape."""
    keys, scale = np.asarray(n, dtype=np.float64), np.asarray(gamma, dtype=np.float64)
    _check("n", keys, least, f"the number of keys is finite and at least {least:g}")
    _check("gamma", scale, 0.0, "the scale of the logits is finite and at least 0")
    keys, scale = np.broadcast_arrays(keys, scale)
    pairs = zip(keys.ravel().tolist(), scale.ravel().tolist(), strict=True)
    values = np.array([point(*pair) for pair in pairs]).reshape(keys.shape)
    return values if values.ndim else float(values)


def _check(name: str, values: Array, least: float, rule: str) -> None:
    wrong = values[~((values >= least) & np.isfinite(values))]
    if wrong.size:
        raise ValueError(f"{name}: {rule}, got {name}={wrong[0]:g}")
