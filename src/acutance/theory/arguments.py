"""How the functions of the theory take and give numbers: checked at the door, float64 inside.

A scalar comes back as a float, anything else as an array of the broadcast shape.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Array",
    "checked",
    "checked_dimension",
    "checked_keys",
    "pointwise",
    "require",
    "result",
]

Array = NDArray[np.float64]


def require(name: str, values: Array, holds: NDArray[np.bool_], rule: str, what: str = "") -> None:
    """Raise ValueError with the rule and the first value that breaks it, called ``what`` if given.

    Example:
        >>> require("tau", np.array([1.0, -2.0]), np.array([True, False]), "it is positive")
        Traceback (most recent call last):
            ...
        ValueError: tau: it is positive, got tau=-2
    """
    holds = np.asarray(holds)
    if not holds.all():
        values, holds = np.broadcast_arrays(values, holds)
        raise ValueError(f"{name}: {rule}, got {what or name}={values[~holds][0]:g}")


def checked(
    name: str, value: ArrayLike, rule: str, least: float = -np.inf, most: float = np.inf
) -> Array:
    """As float64, if finite and within [least, most].

    Example:
        >>> checked("gamma", [0, 2], "a deviation is finite and at least 0", 0.0)
        array([0., 2.])
    """
    values = np.asarray(value, dtype=np.float64)
    require(name, values, np.isfinite(values) & (values >= least) & (values <= most), rule)
    return values


def checked_keys(name: str, n: ArrayLike) -> Array:
    """A number of keys, at least 2, whole or between the integers."""
    return checked(name, n, "the number of keys is at least 2", 2.0)


def checked_dimension(d: ArrayLike) -> Array:
    """The dimension of queries and keys, at least 2, whole or between the integers."""
    return checked("d", d, "the dimension is finite and at least 2", 2.0)


def result(values: Array) -> float | Array:
    """The values as they go out: a float for a scalar, and no negative zero.

    Example:
        >>> result(np.asarray(-0.0)), result(np.array([1.0]))
        (0.0, array([1.]))
    """
    values = np.asarray(np.asarray(values, np.float64) + 0.0)
    return values if values.ndim else float(values)


def pointwise(point: Callable[..., float], *arrays: Array) -> float | Array:
    """A function of numbers, over arrays of one shape.

    Example:
        >>> import math
        >>> pointwise(math.hypot, np.array([3.0, 5.0]), np.array([4.0, 12.0]))
        array([ 5., 13.])
    """
    rows = zip(*(array.ravel().tolist() for array in arrays), strict=True)
    return result(np.array([point(*row) for row in rows]).reshape(arrays[0].shape))
