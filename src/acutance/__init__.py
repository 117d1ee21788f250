"""Measure and predict how sharply attention focuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.lazy import lazy

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
    from acutance.capture.listener import tap
    from acutance.comparison import compare
    from acutance.corpus.load_model import load_model
    from acutance.diagnose.classes import classify
    from acutance.extending import Extension, extend
    from acutance.judging import LossComparison, apply, judge
    from acutance.mechanisms import MECHANISMS, Mechanism
    from acutance.probing.probe import Probe, ProbeError, probe
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

#: Where each public name is that is no module. All load on first use: ``acutance --help`` needs no
#: torch.
_HOMES = {
    "acutance.attend": ("attention", "key_mass", "row_statistics"),
    "acutance.caching": ("CachePlan", "HeadPlan", "Budget", "budget"),
    "acutance.calibration": ("Applied", "ApplyError", "Calibration", "Law", "calibrate"),
    "acutance.comparison": ("compare",),
    "acutance.corpus.load_model": ("load_model",),
    "acutance.extending": ("Extension", "extend"),
    "acutance.judging": ("LossComparison", "apply", "judge"),
    "acutance.mechanisms": ("MECHANISMS", "Mechanism"),
    "acutance.rowstats": ("METRICS", "Metric", "RowState", "RowStatistics"),
    "acutance.probing": ("HeadSummary", "Probe", "ProbeError", "classify", "load", "probe", "tap"),
    "acutance.verification": ("Verification", "verify"),
}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
