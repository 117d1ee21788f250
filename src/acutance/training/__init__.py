"""Keep attention in bounds while a model trains: clip, regularise, reparametrise, initialise."""

from __future__ import annotations

from acutance.training.entropy import EntropyRegularizer
from acutance.training.info_nce import ContrastiveReport, InfoNCE
from acutance.training.initial import initial_scale
from acutance.training.qk_clip import ClipReport, LayerClip, QKClip
from acutance.training.sigma_reparam import SigmaReparam, remove_sigma_reparam, sigma_reparam
from acutance.training.temperature import ClampedTemperature, clamp_inward
from acutance.training.watch import AttentionWatch, WatchedRows
from acutance.training.z_loss import ZLoss

__all__ = [
    "AttentionWatch",
    "ClampedTemperature",
    "ClipReport",
    "ContrastiveReport",
    "EntropyRegularizer",
    "InfoNCE",
    "LayerClip",
    "QKClip",
    "SigmaReparam",
    "WatchedRows",
    "ZLoss",
    "clamp_inward",
    "initial_scale",
    "remove_sigma_reparam",
    "sigma_reparam",
]
