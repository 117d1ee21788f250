"""Attention modules that store the statistics of their last forward pass.

A boolean ``key_padding_mask`` or ``attn_mask`` of a module is True where a key is **hidden**, as in
``torch.nn.MultiheadAttention``. In the rest of acutance ``key_mask`` and ``attn_mask`` are True
where a key takes part.
"""

from __future__ import annotations

from acutance.nn.attention import GatedAttentionUnit, MultiheadAttention
from acutance.nn.positions import Alibi, Rotary, rotate
from acutance.nn.recording import Recorded

__all__ = [
    "Alibi",
    "GatedAttentionUnit",
    "MultiheadAttention",
    "Recorded",
    "Rotary",
    "rotate",
]
