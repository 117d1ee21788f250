"""What an experiment is: a name, a prediction, claims, a measurement and a figure."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.experiments.harness.record import Claim, Estimate, Record, Row
from acutance.report.plot_style import Theme
from acutance.rowstats import RowStatistics, observe

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

    def checkpoint(self, name: str) -> Path | None:
        """Path for a model's checkpoint, different for each seed and size; None stores none."""
        if self.keep is None:
            return None
        return self.keep / f"{name}-{'quick' if self.quick else 'full'}-seed{self.seed}.checkpoint"

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be a whole number from 0 to {MAX_SEED}, got {self.seed}")

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
        draw: draws the figure from the record.
        needs: a package it imports that acutance does not require; "" for none.
        full_needs: a further package that only the full size imports; "" for none.
        full_only: keys of claims that the quick size is too small to decide.
    """

    name: str
    title: str
    prediction: str
    claims: tuple[Claim, ...]
    measure: Callable[[Run], Sequence[Row]]
    draw: Callable[[Record, Theme], Figure]
    needs: str = ""
    full_needs: str = ""
    full_only: tuple[str, ...] = ()

    def tested(self, *, quick: bool) -> tuple[Claim, ...]:
        """The claims that a run of this size tests; the first gives the verdict.

        Example:
            >>> from acutance.experiments import EXPERIMENTS
            >>> [[claim.key for claim in EXPERIMENTS["mlm_table"].tested(quick=q)] for q in (0, 1)]
            [['above', 'most', 'equal', 'entropy', 'same'], ['entropy', 'same']]
        """
        return tuple(claim for claim in self.claims if not (quick and claim.key in self.full_only))


def statistics(scores: Tensor) -> RowStatistics:
    """Row statistics of scores (rows, n), by :func:`acutance.rowstats.observe`."""
    return RowStatistics(observe(scores))


def of_weights(weights: Tensor) -> RowStatistics:
    """The statistics of rows given by weights of any sign, not necessarily normalised.

    Any non-negative weights are the softmax of their logarithms, so the sums are those of rows
    with scores log abs(a); a weight of 0 is a hidden key.
    """
    return statistics(weights.abs().log())


def sparsity(weights: Tensor) -> Tensor:
    """S = E abs(a) / sqrt(E a²) of each row of weights, from its measured collision.

    Args:
        weights: (..., n), any sign; a row of zeros gives NaN.

    Example:
        >>> sparsity(torch.tensor([[1.0, -1.0, 0.0, 0.0]]))
        tensor([0.7071])
    """
    collision: Tensor = of_weights(weights).collision
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
    middle = (x.numel() - 1) / 2
    reach = max(1, round(math.sqrt(x.numel()) / 2))
    low, high = max(0, int(middle) - reach), min(x.numel() - 1, math.ceil(middle) + reach)
    centre = float(x[int(middle)] + x[math.ceil(middle)]) / 2
    return Estimate(centre, float(x[high] - x[low]) / 2, samples)


def _flat(values: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [values] if isinstance(values, Tensor) else list(values)
    return torch.cat([part.detach().reshape(-1) for part in parts]).double()
