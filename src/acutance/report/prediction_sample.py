"""Sample random rows from the distribution of a prediction and measure them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from acutance.attend import row_statistics
from acutance.report.prediction_table import logit_deviation
from acutance.theory import Prediction
from acutance.theory.families import as_family
from acutance.theory.prediction import score_moments

_MOST = 1 << 22  # scores in memory at a time


def sample_rows(prediction: Prediction, rows: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Means and standard errors of every metric over random rows, by metric name.

    Args:
        prediction: a softmax of independent logits: ``softmax``, ``cosine``, ``dot`` or
            ``scaled_dot``.
        rows: number of rows, at least 2.
        seed: seed of the random numbers.

    Raises:
        ValueError: for other mechanisms, whose weights ``row_statistics`` does not measure.

    Example:
        >>> from acutance import theory
        >>> mean, error = sample_rows(theory.predict("softmax", 64, logit_std=1.0), 500)["entropy"]
        >>> bool(abs(mean - theory.expected_entropy(64, 1.0)) < 4 * error)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    n = round(prediction.parameters["n"])
    parts: dict[str, list[Tensor]] = {}
    left = rows
    while left:
        count = min(left, max(1, _MOST // n))
        left -= count
        scores = _draw(prediction, count, n, generator)[:, None, :, None]
        value = torch.randn(count, 1, n, 1, generator=generator, dtype=torch.float64)
        value *= math.sqrt(prediction.parameters["value_variance"])
        query = torch.ones(count, 1, 1, 1, dtype=torch.float64)
        statistics = row_statistics(query, scores, value, scale=1.0, noise=True)
        for name in statistics.available:
            parts.setdefault(name, []).append(statistics[name].to(torch.float64).flatten())
    values = {name: torch.cat(column) for name, column in parts.items()}
    return {
        name: (float(column.mean()), float(column.std()) / math.sqrt(rows))
        for name, column in values.items()
    }


def _draw(prediction: Prediction, rows: int, n: int, generator: torch.Generator) -> Tensor:
    """Random logits (rows, n) of the prediction's distribution."""
    parameters: dict[str, Any] = dict(prediction.parameters)
    gamma, mean = logit_deviation(prediction), parameters.get("logit_mean")
    logits: Tensor
    if gamma is not None:
        logits = torch.randn(rows, n, generator=generator, dtype=torch.float64) * gamma
        return logits if mean is None else logits + float(mean)
    if prediction.mechanism == "cosine":
        law, gamma = as_family("cosine", d=parameters["d"]), 1 / parameters["tau"]
    elif prediction.mechanism == "softmax":
        named = {name: parameters[name] for name in ("d", "rho", "a") if name in parameters}
        law, gamma = as_family(parameters["family"], **named), parameters["scale"]
    else:
        raise ValueError(
            "sampling is available for softmax weights only (softmax, cosine, dot, "
            f"scaled_dot), got {prediction.mechanism}"
        )
    uniform = torch.rand(rows, n, generator=generator, dtype=torch.float64)
    logits = torch.from_numpy(law.quantile(torch.logit(uniform, eps=1e-17).numpy())) * gamma
    return logits if mean is None else logits + (float(mean) - gamma * score_moments(law)[0])
