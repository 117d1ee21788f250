"""The probe and what it finds: capture, records, summaries."""

from __future__ import annotations

from acutance.probing.context import Probe, ProbeError, probe
from acutance.probing.distributed import all_reduce_summary
from acutance.probing.kept import QueryKeySample, load_queries_keys
from acutance.probing.moments import Moments, edges
from acutance.probing.shards import Run, Shard, State, load_state, merge_states
from acutance.probing.summary import SCHEMA, STATUSES, HeadSummary, Layer, load

__all__ = [
    "SCHEMA",
    "STATUSES",
    "HeadSummary",
    "Layer",
    "Moments",
    "Probe",
    "ProbeError",
    "QueryKeySample",
    "Run",
    "Shard",
    "State",
    "all_reduce_summary",
    "edges",
    "load",
    "load_queries_keys",
    "load_state",
    "merge_states",
    "probe",
]
