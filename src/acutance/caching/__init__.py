"""Key-value caches that keep only what each head needs.

A :class:`CachePlan` says what each key head keeps: all keys, the first and the newest, or none, and
in which precision. :func:`budget` finds one of a given size or loss, and ``acutance.apply(model,
plan)`` runs a model with a :class:`PlannedCache`, which holds no more than the plan says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.caching.find_plan import budget
from acutance.caching.frontier import Budget, Point
from acutance.caching.head_plan import HeadPlan, LayerShape, PlanError, cache_shapes
from acutance.caching.plan import CachePlan, export_plan, import_plan
from acutance.caching.planted import Recall, plant, recall
from acutance.lazy import lazy

if TYPE_CHECKING:
    from acutance.caching.run_plan import AppliedPlan, PlannedCache

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

# these two import transformers
__getattr__, __dir__ = lazy(__name__, __all__, {}, f"{__name__}.run_plan")
