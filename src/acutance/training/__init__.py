"""Control attention during training: monitor, clip, regularise, reparametrise, scale."""

from __future__ import annotations

from acutance.training.alarms import Alarm, AttentionWarning
from acutance.training.losses import (
    ClampedTemperature,
    ContrastiveReport,
    EntropyRegularizer,
    InfoNCE,
    SigmaReparam,
    ZLoss,
    clamp_inward,
    initial_scale,
    remove_sigma_reparam,
    sigma_reparam,
)
from acutance.training.monitor import AttentionMonitor, MonitorRecord
from acutance.training.qk_clip import ClipReport, LayerClip, QKClip
from acutance.training.watch import AttentionWatch, WatchedRows

__all__ = [
    "Alarm",
    "AttentionMonitor",
    "AttentionWarning",
    "AttentionWatch",
    "ClampedTemperature",
    "ClipReport",
    "ContrastiveReport",
    "EntropyRegularizer",
    "InfoNCE",
    "LayerClip",
    "MonitorRecord",
    "QKClip",
    "SigmaReparam",
    "WatchedRows",
    "ZLoss",
    "clamp_inward",
    "initial_scale",
    "remove_sigma_reparam",
    "sigma_reparam",
]
