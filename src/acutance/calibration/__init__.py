"""Scaling laws: fit, apply and save them.

:func:`apply` puts a law on a model that runs as it always does, and takes it off again. A
:class:`Law` says which scaling each head has and which model it is for; it saves to JSON and
refuses another model. :func:`calibrate` finds such a law by measuring. :func:`loss_slopes` says
which heads a law could help, and :func:`gate_slopes` which heads a window.
"""

from __future__ import annotations

from acutance.calibration.apply_law import Applied, ApplyError, apply
from acutance.calibration.by_loss.fit import loss_slopes
from acutance.calibration.by_loss.gates import gate_slopes
from acutance.calibration.by_loss.result import GateSlope, HeadSlope, LossCalibration
from acutance.calibration.fit.calibrate import calibrate
from acutance.calibration.fit.measure import Measured, measure
from acutance.calibration.fit.result import Calibration, HeadCalibration
from acutance.calibration.head_laws import HeadLaws
from acutance.calibration.identity import Identity
from acutance.calibration.law import Law, LawError
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
