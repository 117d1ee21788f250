"""The probe and what it finds: capture, records, summaries."""

from __future__ import annotations

from acutance.probing.changes import Diff, HeadChange, LayerChange
from acutance.probing.classes import CLASSES, HeadClass, classify
from acutance.probing.context import Probe, ProbeError, probe
from acutance.probing.difference import diff
from acutance.probing.distances import Distances
from acutance.probing.distributed import all_reduce_summary
from acutance.probing.examples import Example, Examples
from acutance.probing.kept import QueryKeySample, load_queries_keys
from acutance.probing.moments import Moments, edges
from acutance.probing.profile import Profile
from acutance.probing.ray_data import probe_dataset
from acutance.probing.shards import Run, Shard, State, load_state, merge_states
from acutance.probing.slopes import Slope, slope
from acutance.probing.summary import SCHEMA, STATUSES, HeadSummary, Layer, load
from acutance.probing.tapping import Tap, tap
from acutance.probing.thresholds import THRESHOLDS, Threshold

__all__ = [
    "CLASSES",
    "SCHEMA",
    "STATUSES",
    "THRESHOLDS",
    "Diff",
    "Distances",
    "Example",
    "Examples",
    "HeadChange",
    "HeadClass",
    "HeadSummary",
    "Layer",
    "LayerChange",
    "Moments",
    "Probe",
    "ProbeError",
    "Profile",
    "QueryKeySample",
    "Run",
    "Shard",
    "Slope",
    "State",
    "Tap",
    "Threshold",
    "all_reduce_summary",
    "classify",
    "diff",
    "edges",
    "load",
    "load_queries_keys",
    "load_state",
    "merge_states",
    "probe",
    "probe_dataset",
    "slope",
    "tap",
]
