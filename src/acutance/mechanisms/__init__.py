"""The table of all mechanisms, and the feature maps and decays of those without scores."""

from __future__ import annotations

from acutance.mechanisms.features import FEATURE_MAPS, alibi_decays, decay_statistics, retnet_decays
from acutance.mechanisms.table import MECHANISMS, Mechanism, Theory, mechanism

__all__ = [
    "FEATURE_MAPS",
    "MECHANISMS",
    "Mechanism",
    "Theory",
    "alibi_decays",
    "decay_statistics",
    "mechanism",
    "retnet_decays",
]
