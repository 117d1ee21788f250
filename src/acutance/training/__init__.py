"""Control attention during training: monitor, clip, regularise, reparametrise, scale."""

from __future__ import annotations

from acutance.training.entropy import EntropyRegularizer, ZLoss
from acutance.training.info_nce import ContrastiveReport, InfoNCE
from acutance.training.monitor import AttentionMonitor, MonitorRecord
from acutance.training.qk_clip import QKClip
from acutance.training.reports import Alarm, AttentionWarning, ClipReport, LayerClip
from acutance.training.sigma_reparam import SigmaReparam, remove_sigma_reparam, sigma_reparam
from acutance.training.temperature import ClampedTemperature, clamp_inward, initial_scale
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
