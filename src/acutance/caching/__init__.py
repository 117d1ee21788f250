"""Key-value caches that keep only what each head needs.

A :class:`CachePlan` says what each key head keeps: all keys, the first and the newest, or none, and
in which precision. :func:`budget` finds one of a given size or loss, and ``acutance.apply(model,
plan)`` runs a model with a :class:`PlannedCache`, which holds no more than the plan says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acutance.caching.exchange.export_plan import export_plan
from acutance.caching.exchange.import_plan import import_plan
from acutance.caching.find_plan import budget
from acutance.caching.frontier import Budget, Point
from acutance.caching.layer_shapes import LayerShape, PlanError, cache_shapes
from acutance.caching.plan import CachePlan, HeadPlan
from acutance.caching.planted import Recall, plant, recall

if TYPE_CHECKING:
    from acutance.caching.planned_cache import PlannedCache
    from acutance.caching.run_plan import AppliedPlan

__all__ = [
    "AppliedPlan",
    "Budget",
    "CachePlan",
    "HeadPlan",
    "LayerShape",
    "PlanError",
    "PlannedCache",
    "Point",
    "Recall",
    "budget",
    "cache_shapes",
    "export_plan",
    "import_plan",
    "plant",
    "recall",
]


def __getattr__(name: str) -> Any:  # these two import transformers
    if name == "PlannedCache":
        from acutance.caching.planned_cache import PlannedCache

        return PlannedCache
    if name == "AppliedPlan":
        from acutance.caching.run_plan import AppliedPlan

        return AppliedPlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
