"""Measure and predict how sharply attention focuses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acutance import (
        caching,
        calibration,
        comparison,
        extending,
        judging,
        kernels,
        mechanisms,
        nn,
        plugins,
        probing,
        report,
        reproduce,
        rowstats,
        scaling,
        scores,
        serving,
        shapes,
        structure,
        testing,
        theory,
        training,
        verification,
        weights,
    )
    from acutance.attend import attention, key_mass, row_statistics
    from acutance.caching import Budget, CachePlan, HeadPlan, budget
    from acutance.calibration import Applied, ApplyError, Calibration, Law, calibrate
    from acutance.capture.tap import tap
    from acutance.comparison import compare
    from acutance.corpus.load_model import load_model
    from acutance.diagnose.classes import classify
    from acutance.extending import Extension, extend
    from acutance.judging import LossComparison, apply, judge
    from acutance.mechanisms import MECHANISMS, Mechanism
    from acutance.probing.open_probe import Probe, ProbeError, probe
    from acutance.rowstats import METRICS, Metric, RowState, RowStatistics
    from acutance.summary.head_summary import HeadSummary
    from acutance.summary.state import load
    from acutance.verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "METRICS",
    "Applied",
    "ApplyError",
    "Budget",
    "CachePlan",
    "Calibration",
    "Extension",
    "HeadPlan",
    "HeadSummary",
    "Law",
    "LossComparison",
    "Mechanism",
    "Metric",
    "Probe",
    "ProbeError",
    "RowState",
    "RowStatistics",
    "Verification",
    "__version__",
    "apply",
    "attention",
    "budget",
    "caching",
    "calibrate",
    "calibration",
    "classify",
    "compare",
    "comparison",
    "extend",
    "extending",
    "judge",
    "judging",
    "kernels",
    "key_mass",
    "load",
    "load_model",
    "mechanisms",
    "nn",
    "plugins",
    "probe",
    "probing",
    "report",
    "reproduce",
    "row_statistics",
    "rowstats",
    "scaling",
    "scores",
    "serving",
    "shapes",
    "structure",
    "tap",
    "testing",
    "theory",
    "training",
    "verification",
    "verify",
    "weights",
]

#: Where each public name lives. They load on first use, so that ``acutance --help`` needs no torch.
_HOMES = {
    "attention": "acutance.attend",
    "key_mass": "acutance.attend",
    "row_statistics": "acutance.attend",
    "CachePlan": "acutance.caching",
    "HeadPlan": "acutance.caching",
    "Budget": "acutance.caching",
    "budget": "acutance.caching",
    "Applied": "acutance.calibration",
    "ApplyError": "acutance.calibration",
    "Calibration": "acutance.calibration",
    "Law": "acutance.calibration",
    "calibrate": "acutance.calibration",
    "compare": "acutance.comparison",
    "load_model": "acutance.corpus.load_model",
    "Extension": "acutance.extending",
    "extend": "acutance.extending",
    "LossComparison": "acutance.judging",
    "apply": "acutance.judging",
    "judge": "acutance.judging",
    "MECHANISMS": "acutance.mechanisms",
    "Mechanism": "acutance.mechanisms",
    "METRICS": "acutance.rowstats",
    "Metric": "acutance.rowstats",
    "RowState": "acutance.rowstats",
    "RowStatistics": "acutance.rowstats",
    "HeadSummary": "acutance.probing",
    "Probe": "acutance.probing",
    "ProbeError": "acutance.probing",
    "classify": "acutance.probing",
    "load": "acutance.probing",
    "probe": "acutance.probing",
    "tap": "acutance.probing",
    "Verification": "acutance.verification",
    "verify": "acutance.verification",
}
_MODULES = (
    "caching",
    "calibration",
    "comparison",
    "extending",
    "judging",
    "kernels",
    "mechanisms",
    "nn",
    "plugins",
    "probing",
    "report",
    "reproduce",
    "rowstats",
    "scaling",
    "scores",
    "serving",
    "shapes",
    "structure",
    "testing",
    "theory",
    "training",
    "verification",
    "weights",
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"acutance.{name}")
    else:
        raise AttributeError(f"module 'acutance' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
