"""Noise on the logits and what it does to the output: averaged away fast, slowly, or not."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, distributions

from acutance import attention, theory
from acutance_lab.experiment import Measured, Run, experiment
from acutance_lab.figure import GREY, Axis, Lines, Panel
from acutance_lab.record import Claim, Estimate, beyond, up_to
from acutance_lab.sampling import mean, statistics

Kind = Literal["gaussian", "laplace", "gumbel", "uniform"]

WIDTH = 128  # of the values; the more, the less the error itself varies
N = 256
WIDER = 2.5  # how many times, at least, the noise of one key is widened in importance sampling
GAUSSIAN = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
OTHERS: tuple[tuple[Kind, float], ...] = (
    ("uniform", 0.5), ("uniform", 2.0), ("laplace", 0.1), ("laplace", 0.3), ("laplace", 2.0),
    ("gumbel", 0.1), ("gumbel", 0.3), ("gumbel", 1.0),
)  # fmt: skip
#: Noise whose averaging is followed over n, with the rate r of its right tail, P(ε > x) ~ e^(−rx);
#: "infinite" is 10^9.
TAILS: tuple[tuple[Kind, float, float], ...] = (
    ("gaussian", 0.5, 1e9), ("laplace", 0.2, 5.0), ("laplace", 2 / 3, 1.5), ("gumbel", 1.0, 1.0),
    ("laplace", 2.0, 0.5),
)  # fmt: skip


def density(kind: Kind, scale: float) -> Any:
    """The distribution of unbounded noise of a kind and scale, float64."""
    law = {"gaussian": "Normal", "laplace": "Laplace", "gumbel": "Gumbel"}[kind]
    return getattr(distributions, law)(*torch.tensor([0.0, scale], dtype=torch.float64))


def sample(run: Run, kind: Kind, scale: float, rows: int, n: int) -> Tensor:
    """Noise (rows, n) of a kind and scale."""
    if kind == "gaussian":
        return scale * run.normal(rows, n)
    if kind == "uniform":
        return scale * run.even(rows, n)
    noise: Tensor = density(kind, scale).icdf(run.uniform(rows, n))
    return noise


def output_error(
    run: Run, logits: Tensor, value: Tensor, kind: Kind, scale: float, samples: int
) -> Estimate:
    """Mean square error of attention's output under noise on the logits.

    The call has the same row of logits for every query, each with other noise, added as a bias.

    A few rows with very large noise on one key carry much of this mean, so the standard error of a
    plain sample of some thousand rows says little. In every other row one key therefore draws its
    noise at a larger scale, and each row is weighted by the ratio of the densities, at most 2
    (importance sampling): the mean is the same, and its error can be judged. Noise that is bounded
    needs none of this.
    """
    n, errors = len(logits), []
    key = torch.zeros(1, 1, n, 1, dtype=torch.float64)
    p = torch.softmax(logits, 0)
    clean = p @ value
    chance = (p + 1 / n) / 2  # of a key to be the one with the wider noise
    wide = max(WIDER * scale, math.log(n) / 3)  # reaches the noise of a key that outweighs the rest
    for size in run.blocks(samples, n):
        noise = sample(run, kind, scale, size, n)
        weight = torch.ones(size, dtype=torch.float64)
        if kind != "uniform":
            rows = torch.arange(1, size, 2)
            keys = torch.multinomial(chance.expand(len(rows), n), 1, generator=run.generator)[:, 0]
            noise[rows, keys] = sample(run, kind, wide, len(rows), 1)[:, 0]
            share = len(rows) / size
            wider, narrow = (density(kind, b).log_prob(noise) for b in (wide, scale))
            mixed = (wider - narrow).exp() @ chance
            weight = 1 / (1 - share + share * mixed)
        query = torch.zeros(1, 1, size, 1, dtype=torch.float64)
        output: Any = attention(query, key, value[None, None], bias=(logits + noise)[None, None])
        errors.append(weight * (output[0, 0] - clean).square().sum(-1))
    return mean(errors)


_TAIL_NAMES = {
    rate: f"{kind.capitalize()}, b = {b:.2g}, r = {rate:g}".replace("1e+09", "∞")
    for kind, b, rate in TAILS
}
_ERROR = "mean square error of the output, value²"


@experiment(
    up_to("unchanged",
          "õ ≈ o: noise moves the output by less than a tenth of the spread of the values",
          "Su Jianlin, kexue.fm/archives/9593", relation="<=", bound="ν/N_eff"),
    *(
        up_to(f"first order, {name.lower()}", f"E‖õ − o‖² ≈ ν·Σp²‖v − o‖² for {name} noise",
              within=0.02, bound="ν/N_eff")
        for name in ("Gaussian", "uniform", "Laplace", "Gumbel")
    ),
    Claim("exact", "E‖õ − o‖² is the exact integral, for any noise and row"),
    beyond("averages", "n evenly weighted keys average the noise away: the error falls as 1/n",
           within=0.01, bound="tail rate r"),
    Claim("collapse", "where r < 1, Σp̃² → 1 − r however many keys", within=0.01),
    figure=[
        Panel(Axis("standard deviation b of Gaussian noise, nat", log=True, ticks=GAUSSIAN),
              Axis(_ERROR, log=True, limits=(1e-8, 3e2)),
              [Lines("first order, gaussian", "b", by="N_eff", marks="", style=GREY),
               Lines("exact", "b", "N_eff = {:.3g}", by="N_eff", where={"noise": "gaussian"},
                     marks="bars")],
              "rows of 1 to 256 effective keys"),
        Panel(Axis("keys n, evenly weighted", log=True, ticks=(256, 4096, 65536)),
              Axis(_ERROR, log=True),
              [Lines("exact", "n", _TAIL_NAMES, by="tail rate r", marks="bars")],
              "tail rate r of the noise"),
    ],
)  # fmt: skip
def noise(run: Run) -> Iterator[Measured]:
    """Robustness to noise on the logits.

    The output's error for rows of each width under each noise, and for uniform rows of growing n,
    is compared with the exact integral, the first-order formula and the limits for many keys.

    Predicted: E‖õ − o‖² ≈ ν·Σp²‖v − o‖² while ν/N_eff ≪ 1, an exact integral otherwise; the error
    of n even keys falls as 1/n for a right tail e^(−rx) with r > 2, as n^(1−r) for 1 < r < 2, as
    1/log n at r = 1, and not at all below.

    Figure: Attention averages logit noise away, the slower the heavier its right tail. Lines: exact
    integral. Thin grey lines: ν·Σp²‖v − o‖², the first order. Marks: mean over noisy runs of
    attention, bars of one standard error.
    """
    value, z = run.normal(N, WIDTH), run.normal(N)
    cases = {f"γ = {gamma}": float(gamma) * z for gamma in range(4)}
    cases["two keys"] = torch.zeros(2, dtype=torch.float64)
    cases["0.999 on one key"] = torch.tensor([0.999] + [0.001 / 15] * 15, dtype=torch.float64).log()
    for name, logits in cases.items():
        for kind, b in (*(("gaussian", b) for b in GAUSSIAN), *OTHERS):
            yield from _of_row(run, name, logits, value[: len(logits)], kind, b)
    for kind, b, rate in TAILS:
        yield from _of_lengths(run, kind, b, rate)


def _of_row(
    run: Run, name: str, logits: Tensor, value: Tensor, kind: Kind, b: float
) -> Iterator[Measured]:
    """The output error of one row of logits under one noise."""
    p = torch.softmax(logits, 0)
    weights, v = (p / p.sum()).numpy(), value.numpy()
    keys = float(statistics(logits).effective_keys)
    spread = float((value - value.mean(0)).square().sum(1).mean())
    repeat = 16 if keys < 1.5 else 1  # the errors of a nearly one-hot row are rare
    error = output_error(run, logits, value, kind, b, run.size(5000, 10000) * repeat)
    where = {"row": name, "N_eff": keys, "noise": kind, "b": b}
    yield "exact", "E‖õ − o‖²", theory.exact_noise_mse(weights, v, kind, b), error, where
    infinite = kind in ("laplace", "gumbel") and b >= 0.5
    nu = math.inf if infinite else float(theory.noise_variance_ratio(kind, b))
    where = {**where, "ν/N_eff": nu / keys}
    relative = error._replace(value=error.value / spread, error=error.error / spread)
    yield "unchanged", "E‖õ − o‖² / mean ‖v − v̄‖²", 0.01, relative, where
    if not infinite:
        first = theory.first_order_mse(weights, v, kind, b)
        yield f"first order, {kind}", "E‖õ − o‖²", first, error, where


def _of_lengths(run: Run, kind: Kind, b: float, rate: float) -> Iterator[Measured]:
    """The output error of n evenly weighted keys for growing n."""
    before = None
    for n in (256, 4096) if run.quick else (256, 4096, 65536):
        v = run.normal(n, WIDTH)
        v = v - v.mean(0)
        v = v / v.square().sum(1).mean().sqrt()  # ν/n to the first order, the same at any n
        even = torch.zeros(n, dtype=torch.float64)
        runs = run.size(12000 if n == 256 else 6000, 20000 if n <= 4096 else 2000)
        error = output_error(run, even, v, kind, b, runs)
        where = {"noise": kind, "b": b, "n": n, "tail rate r": rate}
        exact = theory.exact_noise_mse(np.full(n, 1 / n), v.numpy(), kind, b)
        yield "exact", "E‖õ − o‖²", exact, error, where
        if before is not None:
            yield "averages", "error here / at n/16", 1 / 16, error / before, where
        if rate < 1:
            rolls = run.size(10000 if n == 256 else 2000, 20000 if n <= 4096 else 2000)
            draws = (sample(run, kind, b, size, n) for size in run.blocks(rolls, n))
            collision = mean([statistics(noisy).collision for noisy in draws])
            yield "collapse", "mean Σp̃²", 1 - rate, collision, where
        before = error
