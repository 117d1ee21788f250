"""Predictions of every metric of a row, from a few parameters of its scores."""

from __future__ import annotations

from acutance.theory.prediction.mechanisms import PREDICTED_MECHANISMS, predict
from acutance.theory.prediction.record import KINDS, MetricRecord, Prediction

__all__ = ["KINDS", "PREDICTED_MECHANISMS", "MetricRecord", "Prediction", "predict"]
