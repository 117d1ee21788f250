"""Where attention rows put their weight: distances and tokens, in O(n) memory."""

from __future__ import annotations

from acutance.structure.metrics import STRUCTURE, StructureMetric, describe
from acutance.structure.statistics import StructureStatistics, statistics

__all__ = ["STRUCTURE", "StructureMetric", "StructureStatistics", "describe", "statistics"]
