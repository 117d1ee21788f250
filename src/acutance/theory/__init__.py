"""Predicted statistics of an attention row, from a few parameters of its scores.

NumPy and SciPy only: nothing here is shared with what measures. Names are those of the metrics.
"""

from __future__ import annotations

from acutance.theory import (
    asymptotic,
    bounds,
    cosine,
    entropy,
    laws,
    noise,
    noise_laws,
    scales,
    sparsity,
    trained_heads,
)
from acutance.theory.asymptotic import *
from acutance.theory.bounds import *
from acutance.theory.cosine import *
from acutance.theory.entropy import *
from acutance.theory.finite_n import expected, gaussian
from acutance.theory.finite_n.expected import *
from acutance.theory.finite_n.gaussian import *
from acutance.theory.laws import *
from acutance.theory.noise import *
from acutance.theory.noise_laws import *
from acutance.theory.prediction import mechanisms, record
from acutance.theory.prediction.mechanisms import *
from acutance.theory.prediction.record import *
from acutance.theory.scales import *
from acutance.theory.sparsity import *
from acutance.theory.trained_heads import *

__all__ = [
    *asymptotic.__all__,
    *bounds.__all__,
    *cosine.__all__,
    *entropy.__all__,
    *expected.__all__,
    *gaussian.__all__,
    *laws.__all__,
    *noise.__all__,
    *noise_laws.__all__,
    *mechanisms.__all__,
    *record.__all__,
    *scales.__all__,
    *sparsity.__all__,
    *trained_heads.__all__,
]
