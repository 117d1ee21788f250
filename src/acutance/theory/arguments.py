"""Checks and conversions of arguments and results, shared by every module of the theory.

Arguments become float64 arrays. A scalar result is a float, any other an array of the broadcast
shape.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def require(name: str, values: Array, valid: NDArray[np.bool_], rule: str, what: str = "") -> None:
    """Raise ValueError unless all values are valid.

    The message has the rule and the first invalid value, labelled ``what``, by default ``name``.

    Example:
        >>> require("tau", np.array([1.0, -2.0]), np.array([True, False]), "it must be positive")
        Traceback (most recent call last):
            ...
        ValueError: tau: it must be positive, got tau=-2
    """
    valid = np.asarray(valid)
    if not valid.all():
        values, valid = np.broadcast_arrays(values, valid)
        raise ValueError(f"{name}: {rule}, got {what or name}={values[~valid][0]:g}")


def checked(
    name: str,
    value: ArrayLike,
    rule: str,
    least: float = -np.inf,
    most: float = np.inf,
    *,
    above: float = -np.inf,
) -> Array:
    """Convert to float64; ValueError unless every value is finite, in [least, most] and > above.

    Example:
        >>> checked("gamma", [0, 2], "a deviation must be finite and at least 0", 0.0)
        array([0., 2.])
    """
    values = np.asarray(value, dtype=np.float64)
    valid = np.isfinite(values) & (values >= least) & (values <= most) & (values > above)
    require(name, values, valid, rule)
    return values


def checked_keys(name: str, n: ArrayLike) -> Array:
    """Convert numbers of keys to float64; ValueError unless all are finite and at least 2."""
    return checked(name, n, "the number of keys must be at least 2", 2.0)


def checked_dimension(d: ArrayLike) -> Array:
    """Convert dimensions of queries and keys to float64; ValueError unless finite and >= 2."""
    return checked("d", d, "the dimension must be finite and at least 2", 2.0)


def result(values: ArrayLike) -> float | Array:
    """Convert to what public functions return: a float for a scalar, and no negative zero.

    Example:
        >>> result(np.asarray(-0.0)), result(np.array([1.0]))
        (0.0, array([1.]))
    """
    array = np.asarray(np.asarray(values, np.float64) + 0.0)
    return array if array.ndim else float(array)


def pointwise(point: Callable[..., float], *arrays: Array) -> float | Array:
    """Evaluate a function of floats entry by entry, on arrays of equal shape.

    Example:
        >>> import math
        >>> pointwise(math.hypot, np.array([3.0, 5.0]), np.array([4.0, 12.0]))
        array([ 5., 13.])
    """
    rows = zip(*(array.ravel().tolist() for array in arrays), strict=True)
    return result(np.array([point(*row) for row in rows]).reshape(arrays[0].shape))


def pointwise_rows(
    point: Callable[[float, float], float], n: ArrayLike, gamma: ArrayLike, least: float = 1.0
) -> float | Array:
    """Check n >= ``least`` and gamma >= 0, then evaluate ``point(n, gamma)`` for each pair.

    Returns:
        float64 of the shape to which n and gamma broadcast; a float for scalars.

    Raises:
        ValueError: if n or gamma is out of range.
    """
    keys = checked("n", n, f"the number of keys must be finite and at least {least:g}", least)
    scale = checked("gamma", gamma, "the scale of the logits must be finite and at least 0", 0.0)
    return pointwise(point, *np.broadcast_arrays(keys, scale))


def log_probability(below: Array, above: Array) -> Array:
    """Logarithm of a probability ``below``, given ``above = 1 - below``.

    It is precise where either of them is small.
    """
    near_one = np.log1p(-np.minimum(above, 0.5))
    return np.where(above < 0.5, near_one, np.log(np.maximum(below, 1e-300)))


def normal_density(z: Array) -> Array:
    """Density of the standard normal distribution."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))


def one_number(name: str, value: Any, least: float, rule: str, most: float = math.inf) -> float:
    """Convert to a float; ValueError unless it is one finite number within [least, most]."""
    values = np.asarray(value, dtype=np.float64)
    if values.ndim or not (np.isfinite(values) and least <= values <= most):
        raise ValueError(f"{name}: {rule}, got {name}={value!r}")
    return float(values)
