r"""The error that rounded keys and values cause in a head's output, to first order.

A key rounded with the step :math:`\Delta_c` in channel c has an error of variance
:math:`\Delta_c^2 / 12` there, if it is spread evenly within a step. The logit of a query q then has
noise of variance

.. math:: \nu_j = \mathrm{scale}^2 \sum_c q_c^2 \, \Delta_{jc}^2 / 12,

and the output moves as in :func:`~acutance.theory.first_order_mse`, with a variance for each key. A
rounded value moves the output by its weight times its error.

Sources: Bennett (1948), Bell System Technical Journal 27, 446 (rounding as uniform noise);
Liu et al. (2024), arXiv:2402.02750 (keys by channel, values by token).
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from acutance.theory.arguments import Array
from acutance.theory.noise import finite

_BLOCK = 256  # rows computed at a time

Along = Literal["tokens", "channels"]


@dataclass(frozen=True)
class RoundingError:
    """Predicted mean squared error of a head's output with rounded keys and values.

    Attributes:
        keys: share of the keys, a mean over rows, in squared units of the values.
        values: share of the values.
        logit_variance: variance ν of the logit noise, a mean over rows and over keys by weight. The
            prediction is of first order in it: it holds while ν is well below 1.
    """

    keys: float
    values: float
    logit_variance: float

    @property
    def total(self) -> float:
        """Error of both: they are independent."""
        return self.keys + self.values


def rounding_error(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    key_bits: int = 16,
    value_bits: int = 16,
    keys_along: Along = "tokens",
    group: int = 32,
    scale: float | None = None,
    positions: ArrayLike | None = None,
) -> RoundingError:
    r"""Mean squared error of a head's output with rounded keys and values, to first order.

    .. math::

        E \|\tilde o - o\|^2 \approx \sum_j p_j^2 \, \nu_j \|v_j - o\|^2 +
        \sum_j p_j^2 \sum_c \frac{\Delta_{jc}'^2}{12}, \qquad
        \nu_j = \mathrm{scale}^2 \sum_c q_c^2 \frac{\Delta_{jc}^2}{12}

    with the steps Δ of the keys and Δ' of the values: a group of numbers is rounded to
    :math:`2^b` evenly spaced levels between its least and its largest. Values are rounded along
    channels, as caches do.

    The first order ends where ν comes near 1, as it does at 2 bits. Then weights change by factors,
    and the prediction is too large. It also assumes many levels: with 4 of them a rounding error is
    not spread evenly within a step.

    Args:
        query: Queries of one head, shape (rows, d).
        key: Keys, shape (n, d).
        value: Values, shape (n, dim).
        key_bits: Bits b of the keys, 1 to 16; 16 does not round.
        value_bits: Bits of the values.
        keys_along: ``"tokens"``: ``group`` tokens share a step, one for each channel (keys by
            channel). ``"channels"``: ``group`` channels of one token do (keys by token).
        group: Numbers that share a step; the last group may be smaller.
        scale: Factor of the logits; 1 / sqrt(d) by default.
        positions: (rows,), index of the last key that each query sees. None: they see all keys.

    Returns:
        The prediction, a mean over rows.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or an argument is out of range.

    Example:
        >>> draw = np.random.default_rng(0).standard_normal
        >>> q, k, v = draw((8, 64)), draw((256, 64)), draw((256, 64))
        >>> [rounding_error(q, k, v, key_bits=bits).keys for bits in (8, 4, 2)]
        [0.0000146, 0.00421, 0.105]

    Source:
        See the top of this file.
    """
    q, k, v = (finite(name, x, 2) for name, x in (("query", query), ("key", key), ("value", value)))
    shapes = f"(query {q.shape}, key {k.shape}, value {v.shape})"
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query and key must have the same width d: {q.shape[1]}, {k.shape[1]} {shapes}"
        )
    if len(k) != len(v) or not len(k) or not len(q):
        raise ValueError(
            f"key and value must have the same number of keys, at least one, and there must be "
            f"queries {shapes}"
        )
    last = _last(positions, len(q), len(k))
    factor = 1 / math.sqrt(q.shape[1]) if scale is None else float(scale)
    if keys_along not in ("tokens", "channels"):
        raise ValueError(f"keys_along must be 'tokens' or 'channels', got {keys_along!r}")
    variance = _variance("key_bits", k, key_bits, keys_along, group)
    of_values = _variance("value_bits", v, value_bits, "channels", group).sum(1)
    squares = (v**2).sum(1)
    sums = np.zeros(3)
    for start in range(0, len(q), _BLOCK):
        part, seen = q[start : start + _BLOCK], last[start : start + _BLOCK, None]
        hidden = np.arange(len(k)) > seen
        p = softmax(np.where(hidden, -np.inf, factor * (part @ k.T)), axis=1)
        nu = factor**2 * (part**2 @ variance.T)
        output = p @ v
        away = squares - 2 * output @ v.T + (output**2).sum(1, keepdims=True)
        p2 = p**2
        sums += (p2 * nu * away.clip(0)).sum(), (p2 @ of_values).sum(), (p * nu).sum()
    return RoundingError(*(sums / len(q)).tolist())


def _last(positions: ArrayLike | None, rows: int, n: int) -> Array:
    """Index of the last key that each row sees."""
    if positions is None:
        return np.full(rows, n - 1)
    last = np.asarray(positions)
    if last.shape != (rows,) or last.min() < 0 or last.max() >= n:
        raise ValueError(
            f"positions must be {rows} indices of keys, 0 to {n - 1}, got shape {last.shape}"
        )
    return last


def _variance(name: str, x: Array, bits: int, along: Along, group: int) -> Array:
    """Variance of the rounding error of every number, Δ² / 12."""
    if not 1 <= bits <= 16:
        raise ValueError(f"{name}: must be 1 to 16, got {bits}")
    if group < 1:
        raise ValueError(f"group: must be at least 1, got {group}")
    if bits == 16:
        return np.zeros_like(x)
    axis = 0 if along == "tokens" else 1
    starts = np.arange(0, x.shape[axis], group)
    least, most = (f.reduceat(x, starts, axis) for f in (np.minimum, np.maximum))
    sizes = np.diff(np.append(starts, x.shape[axis]))
    step: Array = np.repeat((most - least) / (2**bits - 1), sizes, axis)
    return step**2 / 12
