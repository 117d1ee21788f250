"""Scaling laws: fit, apply and save them.

:func:`apply` puts a law on a model that runs as it always does, and takes it off again. A
:class:`Law` says which scaling each head has and which model it is for; it saves to JSON and
refuses another model. :func:`calibrate` finds such a law by measuring. :func:`loss_slopes` says
which heads a law could help, and :func:`gate_slopes` which heads a window.
"""

from __future__ import annotations

from acutance.calibration.apply_law import Applied, ApplyError, apply
from acutance.calibration.fit import calibrate
from acutance.calibration.gradients import gate_slopes, loss_slopes
from acutance.calibration.law import HeadLaws, Identity, Law, LawError
from acutance.calibration.measured import Measured, measure
from acutance.calibration.result import (
    Calibration,
    GateSlope,
    HeadCalibration,
    HeadSlope,
    LossCalibration,
)
from acutance.capture.find_layers import attention_layers

__all__ = [
    "Applied",
    "ApplyError",
    "Calibration",
    "GateSlope",
    "HeadCalibration",
    "HeadLaws",
    "HeadSlope",
    "Identity",
    "Law",
    "LawError",
    "LossCalibration",
    "Measured",
    "apply",
    "attention_layers",
    "calibrate",
    "gate_slopes",
    "loss_slopes",
    "measure",
]
