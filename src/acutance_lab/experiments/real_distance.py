"""Decay of attention with distance in a trained language model, and its published exponent."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from acutance_lab import language
from acutance_lab.experiment import Experiment, Run, mean
from acutance_lab.figure import Axis, Curve, Level, Page, Panel, Points, measured
from acutance_lab.record import Claim, Record, Row, Where, untested_row

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
            keys: :attr:`acutance_lab.language.Measured.octaves`.
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


def measure(run: Run) -> Iterator[Row]:
    """Fit γ of weight ∝ distance^−γ: of the mean over heads at each text length, and of each head.

    Gives a row for each comparison with the published exponent, and the fitted numbers.
    """
    subject = language.measured(run)
    base, heads = subject.reader.config.rope_parameters["rope_theta"], subject.reader.heads[1]
    of_means: list[Tensor] = []  # of each length
    for length, octaves in subject.octaves.items():
        where: Where = {"model": subject.reader.name, "T": length}
        gamma = published(float(base), length)
        distances, density = densities(octaves, length)
        of_means.append(exponent(distances, density.mean(1)))
        yield EXPONENT.row("γ", gamma, mean(of_means[-1]), where)
        of_heads = exponent(distances, density.mean(0))
        near = (of_heads / gamma - 1).abs() < NEAR
        yield DECAYS.row("share of heads", 0.9, float((of_heads > 0).double().mean()), where)
        yield ONE.row("share of heads", 0.5, float(near.double().mean()), where)
    longer = mean(of_means[-1] - of_means[0])  # of the same windows
    yield LENGTH.row("γ, less that at a quarter of T", 0.0, longer, where)
    # the same distances as at the shortest text
    below = exponent(distances[:-2], density.mean(1)[:, :-2])
    yield untested_row("γ of distances below T/8", mean(below), where)
    for d, weight in zip(distances.tolist(), density.mean(1).T, strict=True):
        yield untested_row("weight at a distance", mean(weight), {"distance": d, "γ": gamma})
    for head, exponents in enumerate(exponent(distances, density).T):
        place: Where = {"layer": head // heads, "head": head % heads}
        yield untested_row("γ of a head", mean(exponents), place)


def _gamma(record: Record) -> float:
    return float(record.untested("weight at a distance")[0].condition["γ"])


def _over_heads(record: Record) -> Iterator[Curve]:
    rows, gamma = record.untested("weight at a distance"), _gamma(record)
    weights = measured(rows, "distance")
    middle = len(rows) // 2
    through = weights.y[middle] * weights.x[middle] ** gamma
    yield Curve("measured", marks=weights)
    line = Points(weights.x, [through * d**-gamma for d in weights.x])
    yield Curve(f"d^−{gamma:.3g}", line)


EXPERIMENT = Experiment(
    "real_distance", "decay of attention with distance in a trained language model",
    "the mean over heads falls as a power of distance, with the exponent that rotary "
    "base and length of text give; single heads do not, since some look near and some far",
    (EXPONENT, LENGTH, DECAYS, ONE), measure,
    Page(
        "Attention falls with distance as a power; heads differ in the power",
        "Left: mean over heads at the longest text, with the published slope through the middle "
        "mark. Right: each head's exponent; the line is the published one.",
        Panel(
            Axis("distance, tokens", log=True), Axis("mean weight of a key", log=True),
            [_over_heads], "mean over heads",
        ),
        Panel(
            Axis("layer"), Axis("exponent γ"),
            [lambda record: [
                Curve("a head", marks=measured(record.untested("γ of a head"), "layer"))
            ]],
            "head by head", lambda record: [Level(y=_gamma(record), name="published")],
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE, full_only=("exponent", "length", "one"),
)  # fmt: skip
