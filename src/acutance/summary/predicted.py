"""Predictions for each head of a summary, from four numbers of its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acutance.summary.readouts.by_octave import Profile
from acutance.theory.trained_heads import expected_head_metrics

#: Metrics that are predicted.
PREDICTED = ("entropy", "effective_keys", "top_weight", "first_weight")
#: Metrics that the prediction is made from.
PREDICTED_FROM = ("first_gap", "rest_logit_std", "rest_jensen_gap")
_FEWEST_KEYS = 8.0
_FULL = 0.25  # of the rows of the fullest octave, below which an octave is left out


@dataclass(frozen=True)
class PredictedHeads:
    """Predicted and measured means of every head, over its rows in one octave of n.

    Attributes:
        n: (heads,), mean number of visible keys of these rows; NaN without rows.
        predicted: for each name in ``PREDICTED``, (heads,); NaN for heads without a prediction.
        measured: the measured means of the same rows, by name.
        skewness: (heads,), skewness of the logits of all keys but the first, as inferred.
        impossible: boolean (heads,), heads left out since their Jensen gap is impossible for their
            deviation: a few keys beyond the first dominate.
    """

    n: Tensor
    predicted: dict[str, Tensor]
    measured: dict[str, Tensor]
    skewness: Tensor
    impossible: Tensor

    def r_squared(self, name: str = "entropy") -> float:
        """Coefficient of determination R² of the prediction of a metric over the heads.

        1 at best; below 0 it is worse than predicting the mean for every head. NaN with fewer than
        two heads that have both values.
        """
        predicted, measured = self.predicted[name], self.measured[name]
        both = predicted.isfinite() & measured.isfinite()
        if int(both.sum()) < 2:
            return math.nan
        miss = (measured - predicted)[both].square().sum()
        whole = (measured[both] - measured[both].mean()).square().sum()
        return float(1 - miss / whole)


def predict_heads(
    profile: Profile, metrics: tuple[str, ...], n: float | None = None
) -> PredictedHeads:
    """Predict each head's metrics from its ``first_gap``, ``rest_logit_std``, ``rest_jensen_gap``.

    Args:
        profile: means by octave of the number of visible keys.
        metrics: names of its metrics, which must include these three.
        n: a number of visible keys; the octave that contains it is predicted. None for the largest
            octave with enough rows.

    Returns:
        Predicted and measured means; NaN for heads whose weights are not softmax, that have a sink
        outside the keys, that see fewer than 8 keys, or whose Jensen gap is ``impossible``.
    """
    columns = [metrics.index(name) for name in PREDICTED_FROM]
    heads = torch.arange(len(profile.rows))
    rows = profile.rows.double()
    if n is None:
        filled = rows >= _FULL * rows.amax(1, keepdim=True).clamp(min=1)
        octave = torch.where(filled, torch.arange(profile.octaves), -1).amax(1)
    else:
        octave = torch.full((len(heads),), min(int(math.log2(n)), profile.octaves - 1))
    keys = profile.log_n[heads, octave].exp()
    counts = profile.count[heads, columns[0], octave]
    first, std, jensen = (profile.mean[heads, column, octave] for column in columns)
    spread = profile.std[heads, columns[0], octave]
    usable = (counts > 0) & (keys >= _FEWEST_KEYS)
    if "sink_mass" in metrics:
        usable &= profile.mean[heads, metrics.index("sink_mass"), octave] == 0
    expected = expected_head_metrics(
        np.where(usable, keys, _FEWEST_KEYS),
        first_gap=torch.where(usable, first, math.nan).numpy(),
        first_gap_std=spread.nan_to_num(0.0).numpy(),
        rest_logit_std=std.clamp(min=0).numpy(),
        rest_jensen_gap=jensen.clamp(min=0).numpy(),
    )
    measured = {
        name: torch.where(
            profile.count[heads, metrics.index(name), octave] > 0,
            profile.mean[heads, metrics.index(name), octave],
            math.nan,
        )
        for name in PREDICTED
        if name in metrics
    }
    return PredictedHeads(
        n=torch.where(rows.sum(1) > 0, keys, math.nan),
        predicted={name: torch.as_tensor(getattr(expected, name)) for name in PREDICTED},
        measured=measured,
        skewness=torch.as_tensor(expected.skewness),
        impossible=torch.as_tensor(np.isfinite(expected.first_weight) & np.isnan(expected.entropy)),
    )
