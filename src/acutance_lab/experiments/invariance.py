"""Logits scaled by log n: for which of them attention stays as focused when n grows."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from acutance import theory
from acutance_lab.experiment import (
    Draw,
    Experiment,
    Run,
    cosine,
    exponential,
    gaussian,
    mean,
    statistics,
    uniform,
)  # fmt: skip
from acutance_lab.figure import Array, Axis, Curve, Page, Panel, Points
from acutance_lab.record import Claim, Estimate, Record, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/8823 and 9034"
START = 512
D = 64
#: Families of independent logits, with what theory calls them.
LAWS: dict[str, tuple[Draw, str, dict[str, Any]]] = {
    "Gaussian": (gaussian, "gaussian", {}),
    "uniform": (uniform, "uniform", {}),
    "exponential": (exponential, "exponential", {}),
    f"cosine, d = {D}": (cosine(D), "cosine", {"d": D}),
}
ONE = "one key above the rest"

ENTROPY = Claim(
    "entropy", "λ ∝ log n keeps H what it was at n = 512", SOURCE, "does not hold",
    within=0.01, bound="logits", sense="in",
)  # fmt: skip
KEYS = Claim(
    "effective keys", "λ ∝ log n keeps Σp² what it was at n = 512", expected="holds only where",
    within=0.03, bound="logits", sense="in",
)  # fmt: skip
DEVIATION = Claim(
    "deviation", "Gaussian logits of deviation log n / log 512 keep H", SOURCE, "does not hold",
    within=0.03,
)  # fmt: skip
COLLISION = Claim("collision", "under that law E Σp² is the exact integral")
DRIFT = Claim("drift", "under that law E H is the exact integral")
SCALE = Claim("scale", "the scale that does keep 1/E Σp² = 2 is the integral's solution")
MATCH = Claim(
    "match", "one key above the rest keeps H at λ = log(n − 1) + logit p, with "
    "h(p) + (1 − p)·log(n − 1) = H", rounding=1e-9, theorem=True,
)  # fmt: skip


def measured_scale(scores: Sequence[torch.Tensor], start: float) -> Estimate:
    """The scale at which rows of scores have a mean Σp² of 1/2, by the secant method.

    Args:
        scores: blocks of rows, each (rows, n).
        start: first guess of the scale.
    """

    def collision(scale: float) -> Estimate:
        return mean([statistics(scale * block).collision for block in scores])

    low, high = 0.9 * start, 1.1 * start
    at_low, at_high = collision(low), collision(high)
    slope = math.nan
    for _ in range(4):
        slope = (at_high.value - at_low.value) / (high - low)
        low, at_low, high = high, at_high, high + (0.5 - at_high.value) / slope
        at_high = collision(high)
        if abs(at_high.value - 0.5) < 1e-9:
            break
    return at_high._replace(value=high, error=at_high.error / slope)


def mean_given(values: torch.Tensor, control: torch.Tensor, expected: float) -> Estimate:
    """Mean of ``values``, made more precise by a control variate with the known mean ``expected``.

    Entropy varies from row to row mostly with Σp². So the error of the sample's mean Σp² tells most
    of the error of its mean entropy, which is subtracted.
    """
    centred = control - control.mean()
    slope = (centred * values).mean() / centred.square().mean()
    return mean(values - slope * (control - expected))


def scale_of_entropy(row: torch.Tensor, entropy: float) -> float:
    """The scale at which a row of scores has a given entropy in nats, by bisection."""

    def excess(scale: float) -> float:
        return float(statistics(scale * row).entropy) - entropy

    return float(brentq(excess, 0.0, 100.0, xtol=1e-12))


def measure(run: Run) -> Iterator[Row]:
    """Collision and entropy of rows of each family of logits, for n from 512 on.

    Measured twice: with a scale λ proportional to log n, and with the scale that should keep both
    constant.
    """
    ns = (START, 16384) if run.quick else (START, 1024, 4096, 16384, 65536)
    for name in LAWS:
        for n in ns:
            yield from _of_family(run, name, n)
    half = float(theory.needle_scale(START, 1.0))  # half of the weight on the one key
    for n in ns:
        needle = torch.zeros(1, n, dtype=torch.float64)
        needle[0, 0] = 1.0
        lam = half * math.log(n) / math.log(START)
        under = statistics(lam * needle)
        kept = 0.25 * START / (START - 1)  # ¼ + ¼/(n − 1)
        start = math.log(2) + math.log(START - 1) / 2  # half on one key, half spread evenly
        scale = float(theory.needle_scale_for_entropy(n, start))
        where: Where = {"n": n, "λ": lam, "logits": ONE}
        yield ENTROPY.row("H, nat", start, float(under.entropy), where)
        yield KEYS.row("Σp²", kept, float(under.collision), where)
        yield MATCH.row("λ that keeps H", scale, scale_of_entropy(needle, start), {"n": n})


def _of_family(run: Run, name: str, n: int) -> Iterator[Row]:
    """Rows on n logits of one family."""
    law, family, parameter = LAWS[name]
    first = float(theory.scale_for_effective_keys(START, 2.0, family, **parameter))
    count = run.size(4000 if n == START else 1000, 6000 if n <= 4096 else (1 << 26) // n)
    scores = [law(run, size, n) for size in run.blocks(count, n)]
    growth = math.log(n) / math.log(START)
    lam = first * growth
    stats = [statistics(lam * block) for block in scores]
    Y, H = (torch.cat([s[metric] for s in stats]) for metric in ("collision", "entropy"))
    exact = float(theory.expected_collision(n, lam, family, **parameter))
    kept = float(theory.scale_for_effective_keys(n, 2.0, family, **parameter))
    before, now = (
        float(theory.expected_entropy(keys, scale, family, **parameter))
        for keys, scale in ((START, first), (n, lam))
    )
    # all rows where they are short: 5 per cent must be more than 4 standard errors
    tried = scores if n == START else scores[: len(scores) // run.size(6, 3) + 1]
    where: Where = {"logits": name, "n": n, "λ": lam}
    yield ENTROPY.row("mean H, nat", before, mean_given(H, Y, exact), where)
    yield DRIFT.row("mean H, nat", now, mean(H), where)
    yield KEYS.row("mean Σp²", 0.5, mean(Y), where)
    yield COLLISION.row("mean Σp²", exact, mean(Y), where)
    yield SCALE.row("λ that keeps it", kept, measured_scale(tried, kept), where)
    if name == "Gaussian":
        mean_H = mean([statistics(growth * block).entropy for block in scores])
        at: Where = {"n": n, "γ": growth}
        same = float(theory.expected_entropy_gauss(START, 1.0))
        there = float(theory.expected_entropy_gauss(n, growth))
        yield DEVIATION.row("mean H, nat", same, mean_H, at)
        yield DRIFT.row("mean H, nat", there, mean_H, at)


_LINE = np.unique(np.geomspace((START,) * 2, (1800, 65536), 6).round())


@cache
def _lines(name: str) -> tuple[Array, Array]:
    """For each n: effective keys with λ ∝ log n, and the scale λ that keeps them constant."""
    growth = np.log(_LINE) / math.log(START)
    if name == ONE:
        kept = np.asarray(theory.needle_scale(_LINE, 1.0))
        odds = (_LINE - 1) * np.exp(-kept[0] * growth)
        return (1 + odds) ** 2 / (1 + odds**2 / (_LINE - 1)), kept
    _, family, parameter = LAWS[name]
    kept = np.asarray(theory.scale_for_effective_keys(_LINE, 2.0, family, **parameter))
    collision = theory.expected_collision(_LINE, kept[0] * growth, family, **parameter)
    return 1 / np.asarray(collision), kept


def _keys(record: Record) -> Iterator[Curve]:
    for name in (*LAWS, ONE):
        rows, (keys, _) = record.of("effective keys", logits=name), _lines(name)
        relative = [rows[0].predicted / row.measured for row in rows]
        marks = Points([row.condition["n"] for row in rows], relative)
        yield Curve(name, Points(_LINE, keys / keys[0]), marks)


def _scales(record: Record) -> Iterator[Curve]:
    for name in (*LAWS, ONE):
        rows, (_, kept) = record.of("scale", logits=name), _lines(name)
        relative = [row.measured / kept[0] for row in rows]
        marks = Points([row.condition["n"] for row in rows], relative)
        yield Curve("", Points(_LINE, kept / kept[0]), marks)


_N = Axis("keys n", log=True, ticks=(512, 2048, 8192, 65536))
EXPERIMENT = Experiment(
    "invariance", "entropy invariance by scaling with log n",
    "no family of logits keeps H under λ ∝ log n; one key above the rest keeps its Σp², "
    "while its H rises from 3.81 nat at n = 512 to 6.25 at 65536. For Σp² Gaussian logits need "
    "√log n, uniform ones n, exponential ones a constant; H of Gaussian logits drifts 5.74, 6.88, "
    "7.97 at n = 512, 2048, 8192",
    (ENTROPY, KEYS, DEVIATION, COLLISION, DRIFT, SCALE, MATCH), measure,
    Page(
        "Scaling by log n keeps the effective keys of one kind of logits, not of all",
        "Left: effective keys under λ ∝ log n, matched at n = 512; lines exact, marks sampled. "
        "Right: the scale that does keep them; for uniform logits it leaves the panel, λ ∝ n.",
        Panel(
            _N, Axis("effective keys, relative to n = 512", True, (0.5, 1, 2, 5, 10, 30, 60)),
            [_keys], "under λ ∝ log n", legend="upper left", legend_title="logits",
        ),
        Panel(
            _N, Axis("scale λ(n), relative to n = 512", limits=(0.85, 3.05)), [_scales],
            "what keeps the effective keys", legend=None,
        ),
    ),
)  # fmt: skip
