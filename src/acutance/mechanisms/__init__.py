"""Linear and recurrent attention, each in O(n), and the table of all mechanisms."""

from __future__ import annotations

from acutance.mechanisms.decays import alibi_decays, decay_statistics, retnet_decays
from acutance.mechanisms.entry import Mechanism, Theory
from acutance.mechanisms.feature_maps import (
    FEATURE_MAPS,
    CallableMap,
    CosFormer,
    FeatureMap,
    feature_map,
)
from acutance.mechanisms.linear import decay_attention, linear_attention
from acutance.mechanisms.lru import (
    LRUParameters,
    linear_recurrent_unit,
    lru_decays,
    lru_parameters,
)
from acutance.mechanisms.recurrent import diagonal_recurrence, recurrence_statistics
from acutance.mechanisms.state import LinearState
from acutance.mechanisms.steps import linear_state, linear_step
from acutance.mechanisms.table import MECHANISMS, mechanism

__all__ = [
    "FEATURE_MAPS",
    "CallableMap",
    "CosFormer",
    "FeatureMap",
    "LRUParameters",
    "LinearState",
    "MECHANISMS",
    "Mechanism",
    "Theory",
    "alibi_decays",
    "decay_attention",
    "decay_statistics",
    "diagonal_recurrence",
    "feature_map",
    "linear_attention",
    "linear_recurrent_unit",
    "linear_state",
    "linear_step",
    "lru_decays",
    "lru_parameters",
    "mechanism",
    "recurrence_statistics",
    "retnet_decays",
]
