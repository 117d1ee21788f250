"""Rows of independent logits, their statistics over scales, and the lines of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.reproduce.experiment import Run, statistics

#: From a run, a number of rows and n to scores of unit scale, (rows, n).
Draw = Callable[[Run, int, int], Tensor]
Array = NDArray[np.float64]


def gaussian(run: Run, rows: int, n: int) -> Tensor:
    """N(0, 1)."""
    return run.normal(rows, n)


def uniform(run: Run, rows: int, n: int) -> Tensor:
    """Uniform on [-1, 1]."""
    return 2 * run.uniform(rows, n) - 1


def exponential(run: Run, rows: int, n: int) -> Tensor:
    """P(s > x) = exp(-x)."""
    return -run.uniform(rows, n).log()


def cosine(d: int) -> Draw:
    """Cosines of uniform directions of R^d with a fixed one."""

    def draw(run: Run, rows: int, n: int) -> Tensor:
        # x / sqrt(x² + the sum of d - 1 other squares), a chi-squared number
        x = run.normal(rows, n)
        rest = torch.full_like(x, (d - 1) / 2)
        others = 2 * torch._standard_gamma(rest, generator=run.generator)
        return x / (x.square() + others).sqrt()

    return draw


@cache
def curve(form: Callable[..., Any], *arguments: float, at: tuple[float, ...]) -> Array:
    """A formula along a line of a figure, computed once for all its themes.

    Example:
        >>> curve(pow, 2.0, at=(1.0, 2.0, 3.0))
        array([2., 4., 8.])
    """
    return np.array([float(form(*arguments, point)) for point in at])


def over_scales(
    run: Run, draw: Draw, n: int, rows: int, scales: Sequence[float], metrics: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Metrics of softmax rows at several scales, the same unit scores at each.

    Args:
        run: gives the random numbers.
        draw: the law of the unit scores.
        n: keys in a row.
        rows: how many rows.
        scales: what multiplies the scores.
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
