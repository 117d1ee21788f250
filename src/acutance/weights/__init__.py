"""Weightings: functions from a row of scores to weights, softmax and its alternatives.

A weighting is a small record. It is named (``weights="relu2"``) or, with options of its own, given
(``weights=ReLU2(normalize="sum")``).
"""

from __future__ import annotations

from acutance.escapes import check_name
from acutance.weights import weightings
from acutance.weights.weightings import *

__all__ = ["WEIGHTS", "get", *weightings.__all__]

#: Every weighting by its name.
WEIGHTS: dict[str, type[Weighting]] = {
    kind.name: kind
    for kind in (
        Softmax, SoftmaxOne, Sink, TopKSoftmax, Exp, Sigmoid, ReLU, ReLU2, Power, Identity, L1, L2,
        Sparsemax, Entmax15, Entmax,
    )
}  # fmt: skip


def get(weights: str | Weighting) -> Weighting:
    """Return the weighting of a given name; a weighting is returned unchanged.

    Raises:
        ValueError: if no weighting has that name (the message suggests the closest), or it needs
            parameters.
        TypeError: if it is neither a name nor a weighting.

    Example:
        >>> get("relu2")
        ReLU2(normalize='n')
    """
    if isinstance(weights, Weighting):
        return weights
    if not isinstance(weights, str):
        raise TypeError(f"weights must be a name or a Weighting, got {type(weights).__name__}")
    if weights == Sink.name:
        raise ValueError(
            "weights='sink' needs a parameter: pass weights.Sink(sinks), sinks of shape (Hq,)"
        )
    check_name("weights", weights, WEIGHTS)
    return WEIGHTS[weights]()
