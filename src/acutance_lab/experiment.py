"""What an experiment is, the settings of its run, and the means and rows that experiments share."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acutance.rowstats import RowStatistics, observe
from acutance_lab.record import Claim, Estimate, Record, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Seeds of models are up to a hundred times as large, and must fit 64 bits.
MAX_SEED = 2**32 - 1
_BLOCK = 1 << 17  # scores at a time: they stay in the cache


@dataclass(frozen=True)
class Run:
    """The settings of one run of an experiment: its size, random numbers and progress lines.

    Attributes:
        name: the experiment's; its random numbers do not depend on which others run.
        quick: whether to run at the small size.
        seed: of all random numbers, from 0 to 2³² − 1.
        keep: directory of trained models, finished and not; None keeps none.
        note: takes a line of progress now and then.

    Raises:
        ValueError: if the seed is out of range.
    """

    name: str
    quick: bool
    seed: int = 0
    keep: Path | None = None
    note: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be a whole number from 0 to {MAX_SEED}, got {self.seed}")

    def checkpoint(self, name: str) -> Path | None:
        """Path for a model's checkpoint, different for each seed and size; None stores none."""
        if self.keep is None:
            return None
        return self.keep / f"{name}-{'quick' if self.quick else 'full'}-seed{self.seed}.checkpoint"

    @cached_property
    def generator(self) -> torch.Generator:
        """The generator of all random numbers of this run."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.name} {self.seed}".encode()))

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normal numbers, float64."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Independent numbers uniform on (0, 1), float64."""
        tiny = torch.finfo(torch.float64).tiny
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).clamp(min=tiny)

    def size(self, quick: int, full: int) -> int:
        """``quick`` in a quick run, else ``full``."""
        return quick if self.quick else full

    def seeds(self, quick: int, full: int) -> range:
        """Seeds of that many trainings, different for each seed of the run."""
        return range(100 * self.seed, 100 * self.seed + self.size(quick, full))

    def blocks(self, rows: int, n: int) -> Iterable[int]:
        """Numbers of rows that sum to ``rows``, each block of rows with n keys small in memory."""
        step = max(1, _BLOCK // n)
        return (min(step, rows - start) for start in range(0, rows, step))


@dataclass(frozen=True)
class Experiment:
    """One or several published claims about one subject, and the measurement that tests them.

    Attributes:
        name: of the experiment, its files and its argument on the command line.
        title: what it is about, in a line.
        prediction: what is expected, with the formula, stated before it runs.
        claims: the first gives the experiment its verdict.
        measure: computes the rows of predictions and measurements.
        draw: draws the figure from the record, in a theme; a :class:`~acutance_lab.figure.Page`.
        needs: a package it imports that acutance does not require; "" for none.
        full_needs: a further package that only the full size imports; "" for none.
        full_only: keys of claims that the quick size is too small to decide.
    """

    name: str
    title: str
    prediction: str
    claims: tuple[Claim, ...]
    measure: Callable[[Run], Iterable[Row]]
    draw: Callable[[Record, Any], Figure]
    needs: str = ""
    full_needs: str = ""
    full_only: tuple[str, ...] = ()

    def tested(self, *, quick: bool) -> tuple[Claim, ...]:
        """The claims that a run of this size tests; the first gives the verdict.

        Example:
            >>> from acutance_lab.run import EXPERIMENTS
            >>> [[claim.key for claim in EXPERIMENTS["mlm_table"].tested(quick=q)] for q in (0, 1)]
            [['above', 'most', 'equal', 'entropy', 'same'], ['entropy', 'same']]
        """
        return tuple(claim for claim in self.claims if not (quick and claim.key in self.full_only))


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


def _flat(values: Tensor | Sequence[Tensor]) -> Tensor:
    tensors = [values] if isinstance(values, Tensor) else list(values)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double()


def ratio(upper: Estimate, lower: Estimate) -> Estimate:
    """The ratio of two independent estimates.

    Example:
        >>> ratio(Estimate(6.0, 0.3), Estimate(2.0, 0.0))
        Estimate(value=3.0, error=0.15, samples=0, skewness=0.0)
    """
    value = upper.value / lower.value
    return Estimate(value, value * math.hypot(upper.error / upper.value, lower.error / lower.value))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """The first of two independent estimates less the second.

    Example:
        >>> difference(Estimate(5.0, 0.3), Estimate(2.0, 0.4))
        Estimate(value=3.0, error=0.5, samples=0, skewness=0.0)
    """
    return Estimate(first.value - second.value, math.hypot(first.error, second.error))


#: From a run, a number of rows and n to scores of unit scale, (rows, n).
Draw = Callable[[Run, int, int], Tensor]


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
    blocks: dict[str, list[list[Tensor]]] = {name: [[] for _ in scales] for name in metrics}
    for count in run.blocks(rows, n):
        scores = draw(run, count, n)
        for index, scale in enumerate(scales):
            stats = statistics(scale * scores)
            for name in metrics:
                blocks[name][index].append(stats[name])
    return {name: [torch.cat(rows) for rows in by_scale] for name, by_scale in blocks.items()}


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
        z = gaussian(run, count, n)
        other = (torch.arange(done, done + count) % 2).to(z.dtype)  # half of all rows
        done += count
        plain = z[:, 0].clone()
        for index, scale in enumerate(scales):
            raised = min(2 * scale, freezing) if scale < freezing else 0.0
            z[:, 0] = plain + raised * other
            density = (torch.logsumexp(raised * z, 1) - raised**2 / 2 - math.log(n)).exp()
            blocks[index].append(statistics(scale * z).collision / (0.5 + 0.5 * density))
    return [mean(rows) for rows in blocks]
