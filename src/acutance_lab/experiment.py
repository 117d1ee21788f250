"""What an experiment is, and the settings of its run."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from acutance_lab.figure import Page, Panel
from acutance_lab.record import UNTESTED, Claim, Estimate, Record, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A number that an experiment measures: key of the claim it tests, quantity, prediction,
#: measurement (a number or an :class:`~acutance_lab.record.Estimate`), and condition.
Measured: TypeAlias = tuple[str, str, Any, Any, Mapping[str, Any]]

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
        # seeds of models are up to a hundred times as large, and must fit 64 bits
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a whole number from 0 to {2**32 - 1}, got {self.seed}")

    def saving(self, name: str) -> dict[str, Any]:
        """Options of :func:`acutance_lab.training.fit`: a checkpoint of that name, and the notes.

        Its path is different for each seed and size; None stores none.
        """
        file = f"{name}-{'quick' if self.quick else 'full'}-seed{self.seed}.checkpoint"
        return {"keep": self.keep and self.keep / file, "note": self.note}

    @cached_property
    def generator(self) -> torch.Generator:
        """The generator of all random numbers of this run."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.name} {self.seed}".encode()))

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normal numbers, float64."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Independent numbers uniform on (0, 1), float64."""
        numbers = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return numbers.clamp(min=2**-54)

    def even(self, *shape: int) -> Tensor:
        """Independent numbers uniform on [−1, 1], float64."""
        return 2 * self.uniform(*shape) - 1

    def exponential(self, *shape: int) -> Tensor:
        """Independent numbers with P(s > x) = exp(−x), float64."""
        return -self.uniform(*shape).log()

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


def experiment(
    *claims: Claim, figure: Sequence[Panel], **needs: Any
) -> Callable[[Callable[[Run], Iterator[Measured]]], Experiment]:
    """Make an :class:`Experiment` of the function that measures; its name is the function's.

    The function yields numbers (:data:`Measured`) that name the claim they test by its key. Its
    docstring has the texts: the first line is the title, the paragraph "Predicted: ..." tells what
    is expected, and of the paragraph "Figure: ..." the first sentence is the figure's title and the
    others stand below it. Python without docstrings (``-OO``) shows the name in their place.

    Args:
        claims: what is tested; the first gives the verdict.
        figure: the panels that draw the record.
        needs: ``needs``, ``full_needs`` and ``full_only`` of the experiment.
    """

    def made_of(measurement: Callable[[Run], Iterator[Measured]]) -> Experiment:
        @wraps(measurement)
        def measure(run: Run) -> Iterator[Row]:
            return rows(claims, measurement(run))

        name = measurement.__name__
        paragraphs = (measurement.__doc__ or name).split("\n\n")
        title, *others = (" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs)
        texts = dict(text.partition(": ")[::2] for text in others)
        headline, _, note = texts.get("Figure", name).partition(". ")
        page = Page(headline, note and note + ".", figure)
        prediction = texts.get("Predicted", name)
        return Experiment(name, title, prediction, claims, measure, page, **needs)

    return made_of


def rows(claims: Iterable[Claim], numbers: Iterable[Measured]) -> Iterator[Row]:
    """The rows of numbers, each compared with its prediction as the claim that it tests says."""
    by_key = {claim.key: claim for claim in (*claims, UNTESTED)}
    for key, quantity, predicted, measured, where in numbers:
        yield by_key[key].row(quantity, predicted, measured, where)


def untested(quantity: str, measured: float | Estimate, where: Mapping[str, Any]) -> Measured:
    """A number that tests no claim: it is recorded for the figure."""
    return "", quantity, math.nan, measured, where
