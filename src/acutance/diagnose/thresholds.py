"""The table of thresholds that classes of heads, findings and recommendations use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_ACUTANCE = "acutance's own threshold"


@dataclass(frozen=True)
class Threshold:
    """A number that a head's statistic is compared with: a convention, not a law.

    Attributes:
        name: its name.
        metric: what is compared: a metric of :data:`acutance.METRICS`, or a description.
        side: on which side of the number the rule applies.
        value: the number.
        reason: why this number.
        source: where it comes from.
    """

    name: str
    metric: str
    side: Literal["above", "below"]
    value: float
    reason: str
    source: str = _ACUTANCE


_ROWS = (
    # which heads are compared at all
    ("least_keys", "n_keys", "above", 8.0,
     "with fewer keys every head looks sharp, local or uniform"),
    ("few_rows", "rows", "below", 30.0, "a mean over fewer rows is shown with the number of rows"),
    # what a head does
    ("sink", "first_weight, mass_special", "above", 0.3,
     "the usual criterion for an attention sink",
     "Gu et al. (2024), arXiv:2410.10781, for 0.3; Xiao et al. (2023), arXiv:2309.17453"),
    ("lift", "weight / uniform weight", "above", 2.0,
     "otherwise the number of keys explains the weight"),
    ("near", "distance in tokens", "below", 7.0, "three octaves of distance: 1, 2–3, 4–7"),
    ("local", "weight within 7 positions", "above", 0.5, "most of the weight",
     f"{_ACUTANCE}; the name as in Kovaleva et al. (2019), arXiv:1908.08593"),
    ("previous-token", "mass_previous", "above", 0.5, "most of the weight",
     "Clark et al. (2019), arXiv:1906.04341"),
    ("diffuse", "normalized_entropy", "above", 0.9, "close to uniform weights, at any length",
     f"{_ACUTANCE}; Clark et al. (2019) call such heads broad"),
    ("sharp", "top_weight", "above", 0.5, "one key outweighs all others together",
     f"{_ACUTANCE}: one key outweighs all others together"),
    ("dead", "normalized_entropy", "above", 0.98, "within 2 % of averaging everything",
     f"{_ACUTANCE}: within 2 % of averaging everything"),
    ("positional", "share of rows with one peak", "above", 0.9, "the same position almost always",
     "Voita et al. (2019), arXiv:1905.09418"),
    ("few_keys", "effective_keys", "below", 3.0,
     "close to picking one key; used only in sentences"),
    ("part", "normalized_entropy", "below", 0.5,
     "a small part of the keys; used only in sentences"),
    # what calls for a change
    ("entropy_collapse", "normalized_entropy", "below", 0.05,
     "rows this sharp pass little gradient",
     "Zhai et al. (2023), arXiv:2303.06296, on collapse; the value is a convention of acutance"),
    ("large_logits", "max_logit", "above", 100.0, "where QK-clip acts by default",
     "Kimi Team (2025), arXiv:2507.20534"),
    ("coarse_scores", "resolution of the dtype at max_logit", "above", 0.5,
     "rounding then changes a weight by a quarter"),
    ("steep", "slope of entropy against log n", "above", 0.25, "in nats per unit of log n"),
    ("growth", "entropy gained over the fit", "above", 0.5,
     "in nats; smaller growth hardly matters"),
)  # fmt: skip

#: Every threshold by name.
THRESHOLDS: dict[str, Threshold] = {row[0]: Threshold(*row) for row in _ROWS}


def limit(name: str) -> float:
    """Value of a threshold.

    Raises:
        KeyError: if the name is unknown.

    Example:
        >>> limit("sink"), limit("large_logits")
        (0.3, 100.0)
    """
    return THRESHOLDS[name].value


#: Positions that count as near, for the class "local".
NEAR = int(limit("near"))
