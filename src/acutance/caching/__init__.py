"""Key-value caches that keep only what each head needs.

A :class:`CachePlan` says what each key head keeps: all keys, the first and the newest, or none, and
in which precision. :func:`budget` finds one of a given size or loss.
"""

from __future__ import annotations

from acutance.caching.find_plan import budget
from acutance.caching.frontier import Budget, Point
from acutance.caching.layer_shapes import LayerShape, PlanError, cache_shapes
from acutance.caching.plan import CachePlan, HeadPlan

__all__ = [
    "Budget",
    "CachePlan",
    "HeadPlan",
    "LayerShape",
    "PlanError",
    "Point",
    "budget",
    "cache_shapes",
]
