"""Rows of independent logits, their statistics over scales, and the lines of figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.experiments.harness.experiment import Run, mean, statistics
from acutance.experiments.harness.record import Estimate

#: From a run, a number of rows and n to scores of unit scale, (rows, n).
Draw = Callable[[Run, int, int], Tensor]
Array = NDArray[np.float64]


def gaussian(run: Run, rows: int, n: int) -> Tensor:
    """Independent standard normal scores, (rows, n)."""
    return run.normal(rows, n)


def uniform(run: Run, rows: int, n: int) -> Tensor:
    """Independent scores uniform on [-1, 1], (rows, n)."""
    return 2 * run.uniform(rows, n) - 1


def exponential(run: Run, rows: int, n: int) -> Tensor:
    """Independent scores with P(s > x) = exp(-x), (rows, n)."""
    return -run.uniform(rows, n).log()


def cosine(d: int) -> Draw:
    """A function that draws cosines of random directions of R^d with a fixed one, (rows, n)."""

    def draw(run: Run, rows: int, n: int) -> Tensor:
        # x / sqrt(x² + the sum of d - 1 other squares), a chi-squared number
        x = run.normal(rows, n)
        rest = torch.full_like(x, (d - 1) / 2)
        others = 2 * torch._standard_gamma(rest, generator=run.generator)
        return x / (x.square() + others).sqrt()

    return draw


@cache
def curve(form: Callable[..., Any], *arguments: float, at: tuple[float, ...]) -> Array:
    """``form(*arguments, x)`` for each x of ``at``, cached: a figure is drawn in two themes.

    Example:
        >>> curve(pow, 2.0, at=(1.0, 2.0, 3.0))
        array([2., 4., 8.])
    """
    return np.array([float(form(*arguments, point)) for point in at])


def over_scales(
    run: Run, draw: Draw, n: int, rows: int, scales: Sequence[float], metrics: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Metrics of softmax rows at several scales, with the same random scores at each.

    Args:
        run: gives the random numbers.
        draw: draws scores at scale 1.
        n: keys in a row.
        rows: how many rows.
        scales: factors on the scores.
        metrics: names in :data:`acutance.METRICS`.

    Returns:
        By metric, for each scale, the rows' values, shape (rows,).
    """
    parts: dict[str, list[list[Tensor]]] = {name: [[] for _ in scales] for name in metrics}
    for count in run.blocks(rows, n):
        scores = draw(run, count, n)
        for index, scale in enumerate(scales):
            stats = statistics(scale * scores)
            for name in metrics:
                parts[name][index].append(stats[name])
    return {name: [torch.cat(part) for part in values] for name, values in parts.items()}


def gaussian_collision(run: Run, n: int, rows: int, scales: Sequence[float]) -> list[Estimate]:
    """Mean Σp² of rows of Gaussian logits, with a trustworthy standard error at every scale.

    From half the freezing scale √(2 log n) on, a few rows with one large logit carry the mean: at
    γ = 2 and 65,536 keys that of 1000 plain rows had a skewness of 0.8. So below freezing one key
    of every other row is raised by t = min(2γ, √(2 log n)), and rows count by the ratio of the
    densities (importance sampling): 1 / (½ + ½ r), r being the mean of exp(t·z − t²/2) over the
    row's keys, any of which could be the one. Beyond freezing rows are plain.

    Args:
        run: gives the random numbers.
        n: keys in a row.
        rows: how many rows, an even number.
        scales: standard deviations γ of the logits.

    Returns:
        An estimate for each scale.
    """
    parts: list[list[Tensor]] = [[] for _ in scales]
    done, freezing = 0, math.sqrt(2 * math.log(n))
    for count in run.blocks(rows, n):
        z = gaussian(run, count, n)
        other = (torch.arange(done, done + count) % 2).to(z.dtype)  # half of all rows
        done += count
        plain = z[:, 0].clone()
        for index, scale in enumerate(scales):
            raised = min(2 * scale, freezing) if scale < freezing else 0.0
            z[:, 0] = plain + raised * other
            ratio = (torch.logsumexp(raised * z, 1) - raised**2 / 2 - math.log(n)).exp()
            parts[index].append(statistics(scale * z).collision / (0.5 + 0.5 * ratio))
    return [mean(part) for part in parts]
