"""The probe: capture attention calls, record statistics, and summarise them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.capture.listener import Tap, tap
from acutance.diagnose.classes import CLASSES, HeadClass, classify
from acutance.diagnose.thresholds import THRESHOLDS, Threshold
from acutance.lazy import lazy
from acutance.probing.probe import Probe, ProbeError, probe
from acutance.probing.query_key_sample import QueryKeySample, load_queries_keys
from acutance.summary.diff import Diff, HeadChange, LayerChange, diff, slope
from acutance.summary.head_summary import SCHEMA, HeadSummary
from acutance.summary.layer import STATUSES, Layer
from acutance.summary.readouts.by_octave import Profile, Slope
from acutance.summary.readouts.distances import Distances
from acutance.summary.readouts.examples import Example, Examples
from acutance.summary.readouts.head_maps import HeadMap
from acutance.summary.readouts.moments import Moments, edges
from acutance.summary.readouts.spans import Spans
from acutance.summary.state import Run, Shard, State, load, load_state, merge_states

if TYPE_CHECKING:
    from acutance.corpus.ranks import all_reduce_summary
    from acutance.corpus.ray_data import probe_dataset

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
    "HeadMap",
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
    "Spans",
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

#: Names from a later stage, loaded on first use: those modules import this package.
_HOMES = {
    "acutance.corpus.ranks": ("all_reduce_summary",),
    "acutance.corpus.ray_data": ("probe_dataset",),
}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
