"""Scores of queries and keys: dot products, cosines, bilinear, additive, by position or distance.

A score is named (``score="cosine"``), given with its parameters (``score=General(weight)``, or a
module such as :class:`GeneralScore` that trains them), or any function of a block of queries and a
block of keys. What reduces to a dot product of transformed vectors is a :class:`DotScore` and costs
what plain attention costs; anything else is a :class:`TileScore` and gives a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from acutance.escapes import check_name
from acutance.scores import modules, records
from acutance.scores.modules import *
from acutance.scores.records import *

__all__ = ["SCORES", "get", *modules.__all__, *records.__all__]

#: Every score by its name.
SCORES: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (ScaledDot, Dot, Cosine, General, Additive, Location, ScaleInvariant, Features)
}

_PARAMETERS = {
    "general": "General(weight), or the module GeneralScore",
    "additive": "Additive(query_weight, key_weight, vector), or the module AdditiveScore",
    "location": "Location(weight), or the module LocationScore",
    "features": "Features(query_map, key_map)",
}


def get(
    score: str | DotScore | TileScore | Callable[[Tensor, Tensor, int], Tensor],
) -> DotScore | TileScore:
    """Return the score of a name; a score is returned unchanged, a function is wrapped.

    The wrapper is :class:`FunctionScore`.

    Raises:
        ValueError: if the name is unknown, naming the nearest, or it needs parameters.
        TypeError: if it is neither a name nor a score nor callable.

    Example:
        >>> get("cosine")
        Cosine(temperature=1.0, eps=1e-06)
    """
    if isinstance(score, str):
        check_name("score", score, SCORES)
        if score in _PARAMETERS:
            raise ValueError(f"score={score!r} needs parameters: pass scores.{_PARAMETERS[score]}")
        instance: DotScore | TileScore = SCORES[score]()
        return instance
    if isinstance(score, type):
        raise TypeError(f"score must be an instance, got the class {score.__name__}")
    if isinstance(score, DotScore | TileScore):
        return score
    if callable(score):
        return FunctionScore(score)
    raise TypeError(f"score must be a name, a score or a function, got {type(score).__name__}")
