"""Structure of attention: how far rows attend, and to which tokens, in memory of O(n)."""

from __future__ import annotations

from acutance.structure.metrics import STRUCTURE, StructureMetric, describe
from acutance.structure.statistics import StructureStatistics, statistics

__all__ = ["STRUCTURE", "StructureMetric", "StructureStatistics", "describe", "statistics"]
