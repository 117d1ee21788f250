"""The probe and what it finds: capture, records, summaries."""

from __future__ import annotations

from acutance.probing.context import Probe, ProbeError, probe
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
    "edges",
    "load",
    "probe",
]
