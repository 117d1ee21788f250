"""Random scores, statistics of their rows, and means with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from acutance.rowstats import RowStatistics, observe
from acutance_lab.experiment import Run
from acutance_lab.record import Estimate


def statistics(scores: Tensor) -> RowStatistics:
    """Row statistics of scores (rows, n), by :func:`acutance.rowstats.observe`."""
    return RowStatistics(observe(scores))


def sparsity(weights: Tensor) -> Tensor:
    """S = E abs(a) / sqrt(E a²) of each row of weights, from its measured collision.

    Any non-negative weights are the softmax of their logarithms, so the collision is that of rows
    with scores log abs(a); a weight of 0 is a hidden key.

    Args:
        weights: (..., n), any sign; a row of zeros gives NaN.

    Example:
        >>> sparsity(torch.tensor([[1.0, -1.0, 0.0, 0.0]]))
        tensor([0.7071])
    """
    collision: Tensor = statistics(weights.abs().log()).collision
    return (collision * weights.shape[-1]).rsqrt()


def mean(values: Tensor | Sequence[Tensor]) -> Estimate:
    """The mean of independent numbers, its standard error, and its skewness.

    Example:
        >>> mean(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        Estimate(value=2.5, error=0.645497, samples=4, skewness=0.0)
    """
    x = _flat(values)
    root = math.sqrt(x.numel())
    centred = x - x.mean()
    second = float(centred.square().mean())
    skewness = float(centred.pow(3).mean()) / second**1.5 if second > 0.0 else 0.0
    return Estimate(float(x.mean()), float(x.std()) / root, x.numel(), skewness / root)


def median(values: Tensor | Sequence[Tensor]) -> Estimate:
    """The median of independent numbers; its error is half the span of ± one deviation in rank.

    Example:
        >>> median(torch.arange(1.0, 102.0))
        Estimate(value=51.0, error=5.0, samples=101, skewness=0.0)
    """
    x = _flat(values).sort().values
    samples = x.numel()
    middle = (samples - 1) / 2
    reach = max(1, round(math.sqrt(samples) / 2))
    low, high = max(0, int(middle) - reach), min(samples - 1, math.ceil(middle) + reach)
    centre = float(x[int(middle)] + x[math.ceil(middle)]) / 2
    return Estimate(centre, float(x[high] - x[low]) / 2, samples)


def between_seeds(values: Sequence[float]) -> Estimate:
    """The mean over trainings with its standard error from seed to seed: 0 for a single one.

    Example:
        >>> between_seeds([1.0, 3.0])
        Estimate(value=2.0, error=1.0, samples=0, skewness=0.0)
    """
    x = torch.tensor(values, dtype=torch.float64)
    error = float(x.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(float(x.mean()), error)


def _flat(values: Tensor | Sequence[Tensor]) -> Tensor:
    tensors = [values] if isinstance(values, Tensor) else list(values)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double()


#: From a run, a number of rows and n to scores of unit scale, (rows, n), as :meth:`Run.normal`.
Draw = Callable[[Run, int, int], Tensor]


def cosine(d: int) -> Draw:
    """A function that draws cosines of random directions of R^d with a fixed one, (rows, n)."""

    def draw(run: Run, rows: int, n: int) -> Tensor:
        # x / sqrt(x² + the sum of d - 1 other squares), a chi-squared number
        x = run.normal(rows, n)
        rest = torch.full_like(x, (d - 1) / 2)
        others = 2 * torch._standard_gamma(rest, generator=run.generator)
        return x / (x.square() + others).sqrt()

    return draw


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
    blocks = []
    for count in run.blocks(rows, n):
        scores = draw(run, count, n)
        blocks.append([statistics(scale * scores) for scale in scales])
    by_scale = list(zip(*blocks, strict=True))
    return {name: [torch.cat([x[name] for x in stats]) for stats in by_scale] for name in metrics}


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
    blocks: list[list[Tensor]] = [[] for _ in scales]
    done, freezing = 0, math.sqrt(2 * math.log(n))
    for count in run.blocks(rows, n):
        z = run.normal(count, n)
        other = (torch.arange(done, done + count) % 2).to(z.dtype)  # half of all rows
        done += count
        plain = z[:, 0].clone()
        for index, scale in enumerate(scales):
            raised = min(2 * scale, freezing) if scale < freezing else 0.0
            z[:, 0] = plain + raised * other
            density = (torch.logsumexp(raised * z, 1) - raised**2 / 2 - math.log(n)).exp()
            blocks[index].append(statistics(scale * z).collision / (0.5 + 0.5 * density))
    return [mean(rows) for rows in blocks]
