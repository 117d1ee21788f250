"""Predicted statistics of an attention row, from a few parameters of its scores.

NumPy and SciPy only: nothing here is shared with what measures. Names are those of the metrics.
"""

from __future__ import annotations

from acutance.theory import (
    cosine,
    entropy,
    expected,
    noise,
    prediction,
    scales,
    sparsity,
    trained_heads,
)
from acutance.theory.cosine import *
from acutance.theory.entropy import *
from acutance.theory.expected import *
from acutance.theory.noise import *
from acutance.theory.prediction import *
from acutance.theory.scales import *
from acutance.theory.sparsity import *
from acutance.theory.trained_heads import *

__all__ = [
    *cosine.__all__,
    *entropy.__all__,
    *expected.__all__,
    *noise.__all__,
    *prediction.__all__,
    *scales.__all__,
    *sparsity.__all__,
    *trained_heads.__all__,
]
