r"""Asymptotic forms for softmax rows of Gaussian logits: for orientation, never for use.

Textbook limits for many keys, kept to be compared with the exact expectations of
``acutance.theory.iid`` and ``acutance.theory.gaussian``. Corrections fall off only with log n, so
at any n in use they are wrong by whole nats around :math:`\gamma_c = \sqrt{2 \log n}`.

Sources: Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855.
"""

import math

from numpy.typing import ArrayLike

from acutance.theory.gaussian import Array, _broadcast, expected_max_gauss
from acutance.theory.jacobian import frozen_collision, frozen_entropy

__all__ = [
    "asymptotic_collision_gauss",
    "asymptotic_entropy_gauss",
    "asymptotic_logsumexp_gauss",
]


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

    The pieces do not meet. At n = 65536 and gamma = gamma_c the exact value is 3.4 nats, the limit
    from below 0 and that from above 11; the last piece is 10 % high at 2 M_n and 2 % at 4 M_n.
    ``expected_entropy_gauss`` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form in nats, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_entropy_gauss(65536, [1.0, 4.0, 20.0])
        array([10.59038326,  3.09035489,  0.42174251])
        >>> from acutance.theory import expected_entropy_gauss
        >>> expected_entropy_gauss(65536, [1.0, 4.0, 20.0])
        array([10.59038325,  4.51089175,  0.41516912])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855 (the
        Poisson-Dirichlet law).
    """
    return _broadcast(_entropy, n, gamma, 2.0)


def asymptotic_collision_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Asymptotic Σp² of a softmax row with n Gaussian logits: for orientation, not for use.

    .. math::

        E Y \approx \begin{cases}
            e^{\gamma^2} / n & \gamma \le \sqrt{2 \log n / 3}, \\
            e^{-(\log n / \gamma - \gamma / 2)^2 / 2} & \text{up to } \sqrt{2 \log n}, \\
            1 - M_n / \gamma & \text{above.}
        \end{cases}

    The first is the square of the sparsity exp(-gamma²/2) of many keys, inverted; the middle one
    has the right exponent but no factor. ``expected_collision_gauss`` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_collision_gauss(65536, [1.0, 3.0, 20.0])
        array([4.14776890e-05, 8.95523340e-02, 7.85443534e-01])
        >>> from acutance.theory import expected_collision_gauss
        >>> expected_collision_gauss(65536, [1.0, 3.0, 20.0])
        array([4.14728667e-05, 2.01832318e-02, 7.85990618e-01])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855.
    """
    return _broadcast(_collision, n, gamma, 2.0)


def asymptotic_logsumexp_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Asymptotic log-normaliser of a row of n Gaussian logits: for orientation, not for use.

    .. math::

        E \log Z \approx \begin{cases}
            \log n + \gamma^2/2 & \gamma < \sqrt{2 \log n}, \\
            \gamma M_n & \text{above.}
        \end{cases}

    ``expected_logsumexp_gauss`` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form in nats, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_logsumexp_gauss(65536, [1.0, 4.0, 20.0])
        array([11.59035489, 19.09035489, 85.82258632])
        >>> from acutance.theory import expected_logsumexp_gauss
        >>> expected_logsumexp_gauss(65536, [1.0, 4.0, 20.0])
        array([11.59034178, 18.86773844, 86.01892178])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return _broadcast(_logsumexp, n, gamma, 2.0)


def _entropy(n: float, gamma: float) -> float:
    log_n, square = math.log(n), gamma * gamma
    if square >= 2 * log_n:
        return float(frozen_entropy(expected_max_gauss(n) / gamma))
    correction = ((square - 0.5) * math.exp(square) + 0.5) / n if square <= log_n / 2 else 0.0
    return log_n - square / 2 + correction


def _collision(n: float, gamma: float) -> float:
    log_n, square = math.log(n), gamma * gamma
    if square >= 2 * log_n:
        return float(frozen_collision(expected_max_gauss(n) / gamma))
    if square > 2 * log_n / 3:
        return math.exp(-0.5 * (log_n / gamma - gamma / 2) ** 2)
    return math.exp(square - log_n)


def _logsumexp(n: float, gamma: float) -> float:
    if gamma * gamma >= 2 * math.log(n):
        return gamma * float(expected_max_gauss(n))
    return math.log(n) + gamma * gamma / 2
