"""Key-value caches that keep only what each head needs.

A :class:`CachePlan` says what each key head keeps: all keys, the first and the newest, or none, and
in which precision.
"""

from __future__ import annotations

from acutance.caching.layer_shapes import LayerShape, PlanError, cache_shapes
from acutance.caching.plan import CachePlan, HeadPlan

__all__ = ["CachePlan", "HeadPlan", "LayerShape", "PlanError", "cache_shapes"]
