"""The probe and what it finds: capture, records, summaries."""

from __future__ import annotations

from acutance.probing.context import Probe, ProbeError, probe
from acutance.probing.kept import QueryKeySample, load_queries_keys
from acutance.probing.moments import Moments, edges
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
    "edges",
    "load",
    "load_queries_keys",
    "probe",
]
