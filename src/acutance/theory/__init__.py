"""Statistical models of attention rows: what the metrics are before anything is measured.

One model per file, on NumPy and SciPy alone. The names follow the metrics they predict.
"""

from acutance.theory.gaussian import (
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_logsumexp_gauss,
    expected_max_gauss,
)

__all__ = [
    "expected_collision_gauss",
    "expected_entropy_gauss",
    "expected_logsumexp_gauss",
    "expected_max_gauss",
]
