"""A trained head's rows predicted from four numbers: a sink, and a skew of the other logits."""

import math

from acutance.theory.prediction.record import NAMES, Kind
from acutance.theory.prediction.softmax import Formulas
from acutance.theory.prediction.weighted import constant
from acutance.theory.trained_heads import expected_head_metrics

__all__ = ["HEAD_NUMBERS", "head_formulas"]

#: The numbers of a head, as :func:`acutance.theory.expected_head_metrics` names them.
HEAD_NUMBERS = ("first_gap", "first_gap_std", "rest_logit_std", "rest_jensen_gap")

_REASON = "The four numbers of a trained head do not determine it."


def head_formulas(n: float, numbers: dict[str, float]) -> Formulas:
    """Formulas for a row of n >= 3 keys of a head with these numbers."""
    head = expected_head_metrics(n, **numbers)
    log_n, entropy = math.log(n), float(head.entropy)
    values: dict[str, tuple[Kind, float]] = {
        "n_keys": ("fixed", n),
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", entropy / log_n),
        "information": ("mean", log_n - entropy),
        "effective_keys": ("plug-in", float(head.effective_keys)),
        "top_weight": ("plug-in", float(head.top_weight)),
        "first_weight": ("mean", float(head.first_weight)),
        "sink_mass": ("fixed", 0.0),
        "first_gap": ("mean", numbers["first_gap"]),
        "rest_logit_std": ("mean", numbers["rest_logit_std"]),
        "rest_jensen_gap": ("mean", numbers["rest_jensen_gap"]),
    }
    formulas: Formulas = dict.fromkeys(NAMES, _REASON)
    return formulas | {name: (kind, constant(value)) for name, (kind, value) in values.items()}
