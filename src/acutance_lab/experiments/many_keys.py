"""What becomes of a row when it has many keys: limits, the exact numbers before them, and laws."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from acutance import attention, row_statistics, theory
from acutance_lab.experiment import Measured, Run, experiment
from acutance_lab.figure import GREY, Axis, Level, Lines, Panel
from acutance_lab.record import Claim, Estimate, among, beyond, refuted, theorem, up_to
from acutance_lab.sampling import Draw, gaussian_collision, mean, median, over_scales, statistics

SU = "Su Jianlin, kexue.fm/archives/8823 and 9889, in the limit of many keys"
_GAMMA = Axis("logit deviation γ, nat")


@experiment(
    Claim("entropy", "E H is the exact integral, for every n and γ"),
    Claim("collision", "E Σp² is the exact integral, for every n and γ"),
    up_to("population entropy", "H = log n − γ²/2", SU, within=0.02, bound="γ/√(2 log n)"),
    up_to("population collision", "Σp² = exp(γ²)/n", SU, within=0.02, bound="γ/√(2 log n)"),
    figure=[
        Panel(_GAMMA, Axis("entropy H, nat", limits=(0.0, 11.6)),
              [Lines("population entropy", "γ", by="n", marks="", style=GREY),
               Lines("entropy", "γ", "n = {:,}", by="n")], "entropy"),
        Panel(_GAMMA, Axis("collision Σp²", log=True, limits=(7e-6, 1.3)),
              [Lines("population collision", "γ", by="n", marks="", style=GREY),
               Lines("collision", "γ", by="n")], "collision"),
    ],
)  # fmt: skip
def finite_n(run: Run) -> Iterator[Measured]:
    """Gaussian logits at finite n.

    Mean entropy H and collision Σp² of sampled rows, for each n and deviation γ, are compared with
    the exact integral and with the formula for infinitely many keys.

    Predicted: E H and E Σp² are the exact integrals (4 standard errors everywhere); exp(γ²)/n
    breaks at about half the γ at which log n − γ²/2 does.

    Figure: Gaussian logits at finite n: the exact integrals hold where the limit formulas break.
    Lines: exact integrals. Thin grey lines: log n − γ²/2 and exp(γ²)/n, true for n → ∞ only. Marks:
    mean over sampled rows; standard errors are smaller than the marks.
    """
    gammas = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(1000, 4000 if n <= 4096 else 1000)
        entropy = over_scales(run, Run.normal, n, count, gammas, ("entropy",))["entropy"]
        collision = gaussian_collision(run, n, count // 2, gammas)
        for gamma, H, Y in zip(gammas, map(mean, entropy), collision, strict=True):
            where = {"n": n, "γ": gamma, "γ/√(2 log n)": gamma / math.sqrt(2 * math.log(n))}
            yield "entropy", "mean H, nat", theory.expected_entropy_gauss(n, gamma), H, where
            yield "collision", "mean Σp²", theory.expected_collision_gauss(n, gamma), Y, where
            yield "population entropy", "mean H, nat", math.log(n) - gamma**2 / 2, H, where
            yield "population collision", "mean Σp²", math.exp(gamma**2) / n, Y, where


GAP = 0.5


def one_gap(run: Run, rows: int, n: int) -> Tensor:
    """Logits (rows, n), all 0 but the first."""
    return GAP * torch.eye(1, n, dtype=torch.float64).expand(rows, n)


#: Families of logits: what draws them, how Λ grows in words and as a function of n, and the tail of
#: their distribution, for :func:`limit_constant`.
FAMILIES: dict[str, tuple[Draw, str, Callable[[int], float], str]] = {
    "normal": (Run.normal, "√log n", lambda n: math.sqrt(math.log(n)), "exponential tail"),
    "one gap": (one_gap, "log n", math.log, ""),
    "uniform": (Run.even, "n", float, "sharp end"),
    "exponential": (Run.exponential, "constant", lambda n: 1.0, "exponential tail"),
}
_GROWTHS = {family: f"{family}: {words}" for family, (_, words, _, _) in FAMILIES.items()}
HAYASE = "Hayase & Karakida (2026), arXiv:2605.12697"


def limit_constant(kind: str, samples: int, seed: int) -> Estimate:
    """Median of Λ/h for infinitely many keys: the critical scale over the hazard rate h.

    Γ_j being the arrivals of a Poisson process, the gaps g_(j) to the maximum times h are
    log(Γ_j/Γ_1) if logits have an exponential tail, and Γ_j − Γ_1 if they have a sharp upper end.

    Args:
        kind: "exponential tail" or "sharp end".
        samples: rows that are drawn.
        seed: of the random numbers.
    """
    arrivals = np.random.default_rng(seed).exponential(size=(samples, 200)).cumsum(axis=1)
    first, later = arrivals[:, :1], arrivals[:, 1:]
    gaps = np.log(later / first) if kind == "exponential tail" else later - first
    return median(torch.from_numpy((np.log(np.arange(2, 201)) / gaps).max(axis=1)))


def critical_scale(run: Run, family: str, n: int) -> Estimate:
    """Median of the critical scale Λ over rows of n logits of a family."""
    # √log n is 0.057 off for normal logits at n = 256: whatever the seed that must be more than the
    # 4 standard errors and 2 per cent allowed
    many = 250_000 if family == "normal" else 60_000
    count = run.size(many if n <= 256 else 4000, 200_000) if n <= 1024 else (1 << 26) // n
    if family == "one gap":
        count = 1  # nothing in it is random
    draw = FAMILIES[family][0]
    scales = [theory.critical_scale(draw(run, rows, n).numpy()) for rows in run.blocks(count, n)]
    return median(torch.from_numpy(np.hstack(scales)))


@experiment(
    among("growth",
          "Λ grows as √log n (normal), log n (one gap), n (uniform), not at all (exponential)",
          HAYASE, within=0.02, bound="logits"),
    theorem("one gap", "one key Δ above the rest: Λ = log n / Δ", HAYASE, within=1e-9),
    refuted("level", "Λ = √(2 log n) for normal logits", HAYASE, within=0.02),
    among("limit", "median Λ = c·h(b_n), h the hazard rate at the top, c of the Poisson limit",
          within=0.01, bound="logits"),
    figure=[Panel(
        Axis("keys n", log=True, ticks=(64, 256, 1024, 4096, 16384)),
        Axis("critical scale Λ, 1/nat", log=True, limits=(0.8, None)),
        [Lines(key, "n", _GROWTHS, by="logits", marks="bars") for key in ("one gap", "limit")],
        legend="logits: growth of Λ",
    )],
)  # fmt: skip
def gap_law(run: Run) -> Iterator[Measured]:
    """Gap counts and the length law they ask for.

    For each family of logits and n, the median over sampled rows of the scale Λ above which a row's
    maximum stands alone (the mean is infinite).

    Predicted: Λ = sup_t log N(t)/t grows as √(2 log n) for iid normal logits (slowly: by the hazard
    rate at the top), is log n/Δ for one gap, ∝ n for uniform and constant for exponential ones.

    Figure: The length law that attention needs depends on the logits. Marks: median of
    Λ = max_j log j / g_(j) over sampled rows, g_(j) the gaps to the maximum. Lines: c·h(b_n), and
    log n/Δ with Δ = 0.5 for one gap.
    """
    samples = run.size(60000, 200000)
    tails = ("exponential tail", "sharp end")
    constants = {tail: limit_constant(tail, samples, run.seed) for tail in tails}
    ns = (64, 256, 1024) if run.quick else (64, 256, 1024, 4096, 16384)
    for family, (_, _, growth, tail) in FAMILIES.items():
        scales = [critical_scale(run, family, n) for n in ns]
        for n, scale in zip(ns, scales, strict=True):
            where = {"n": n, "logits": family}
            if family == "one gap":
                yield "one gap", "Λ, 1/nat", math.log(n) / GAP, scale, where
            else:
                law = "gaussian" if family == "normal" else family
                c, h = constants[tail], float(theory.hazard_scale(law, n))
                both = Estimate(scale.value, math.hypot(scale.error, c.error * h))
                yield "limit", "median Λ, 1/nat", c.value * h, both, where
            if family == "normal":
                yield "level", "median Λ, 1/nat", math.sqrt(2 * math.log(n)), scale, where
            if n > ns[0]:
                grown = growth(n) / growth(ns[0])
                yield "growth", f"Λ(n)/Λ({ns[0]})", grown, scale / scales[0], where


CHEN = "Chen, Lin, Polyanskiy & Rigollet (2025), arXiv:2510.05554"


def closed_form(n: float, rho: float, gamma: float) -> float:
    """Cosine of two outputs of n tokens of unit norm and pairwise cosine ρ at scale γ log n."""
    odds = (n - 1) * float(n) ** (-gamma * (1 - rho))
    own, other = 1 / (1 + odds), odds / (1 + odds) / (n - 1)
    # an output is c x_i + other Σ x_j
    c, sums = own - other, 1 + (n - 1) * rho  # x_i · Σ x_j
    common = (2 * c * other + n * other**2) * sums
    return float((c**2 * rho + common) / (c**2 + common))


def outputs_cosine(n: int, rho: float, gamma: float) -> float:
    """The cosine of :func:`closed_form`, measured by running attention on such tokens."""
    tokens = math.sqrt(1 - rho) * torch.eye(n, n + 1, dtype=torch.float64)
    tokens[:, n] = math.sqrt(rho)
    x = tokens[None, None]
    two: Any = attention(x[:, :, :2], x, x, scale=gamma * math.log(n))
    return float(cosine_similarity(two[0, 0, 0], two[0, 0, 1], dim=0))


@experiment(
    beyond("critical", "at γ(1 − ρ) = 1 the cosine of two outputs is 4ρ/(1 + 3ρ)", CHEN,
           within=0.01, bound="n"),
    beyond("phases", "away from γ(1 − ρ) = 1: outputs' cosine → 1 below, ρ above", CHEN,
           within=0.02, bound="|γ(1 − ρ) − 1|·log n"),
    theorem("exact", "the cosine at finite n is the closed form", within=1e-9),
    figure=[Panel(
        Axis("scale over its critical value, γ(1 − ρ)"), Axis("cosine of two outputs"),
        [Lines("exact", "γ(1 − ρ)", "n = {:,}", by="n", where={"ρ": 0.5})],
        levels=[Level(1.0, 0.8, "critical point")],
    )],
)  # fmt: skip
def simplex(run: Run) -> Iterator[Measured]:
    """Tokens at equal angles, logits scaled by γ log n.

    The cosine of two attention outputs for each number n of tokens, their pairwise cosine ρ, and γ.

    Predicted: outputs' cosine → 1, 4ρ/(1 + 3ρ), ρ for γ below, at, above 1/(1 − ρ), for n ≫ 1;
    0.800 at ρ = ½, γ = 2.

    Figure: Logits scaled by γ log n: tokens merge below a critical γ. Tokens of pairwise cosine
    ρ = 0.5. Lines: closed form. Marks: attention run on such tokens. At the critical γ the cosine
    of two outputs is 4ρ/(1 + 3ρ) = 0.8 for n ≫ 1.
    """
    for n in (16, 128, 1024) if run.quick else (16, 128, 1024, 4096):
        for rho in (0.25, 0.5, 0.75):
            for factor in (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 3.0):
                gamma = factor / (1 - rho)
                cosine = outputs_cosine(n, rho, gamma)
                where = {"n": n, "ρ": rho, "γ(1 − ρ)": factor}
                yield "exact", "cosine", closed_form(n, rho, gamma), cosine, where
                if factor == 1:
                    yield "critical", "cosine", 4 * rho / (1 + 3 * rho), cosine, where
                else:
                    where["|γ(1 − ρ) − 1|·log n"] = abs(factor - 1) * math.log(n)
                    yield "phases", "cosine", 1.0 if factor < 1 else rho, cosine, where


ZHAI = "Zhai et al. (2023), arXiv:2303.06296"
RANDOM, DESCENDED = "least H of random rows, nat", "least H of descended rows, nat"


def one_above_rest(n: int, norm: float) -> Tensor:
    """A row of n logits, (1, n), with mean 0 and a given norm, all equal but the first."""
    logits = torch.eye(1, n, dtype=torch.float64) - 1 / n
    return norm * normalize(logits)


def descend(logits: Tensor, norm: float, steps: int) -> Tensor:
    """Lowest entropies found by gradient descent over logits (rows, n) of a fixed Euclidean norm.

    Returns:
        Entropies in nats after ``steps`` steps, (rows,).
    """
    logits = normalize(logits) * norm
    for step in range(steps):
        logits.requires_grad_()
        (slope,) = torch.autograd.grad(statistics(logits).entropy.sum(), logits)
        logits = logits.detach()
        along = slope - (slope * logits).sum(1, keepdim=True) / norm**2 * logits
        pace = 0.3 * norm * (1 - step / steps)
        length = along.norm(dim=1, keepdim=True).clamp(min=1e-300)
        logits = normalize(logits - pace * along / length) * norm
    entropy: Tensor = statistics(logits).entropy
    return entropy


@experiment(
    theorem("attained", "one logit above the others, which are equal, has least entropy", ZHAI,
            within=1e-9),
    theorem("floor", "no row of logits of norm s has less", ZHAI, relation=">=", rounding=1e-9),
    Claim("reached", "gradient descent on the measured entropy ends there", within=0.01),
    figure=[Panel(
        Axis("norm s of the row's centred logits, nat"), Axis("entropy H, nat"),
        [Lines("attained", "s", "n = {:,}", by="n", style=0),
         Lines("floor", "s", by="n", quantity=RANDOM, line=False, hollow=True, style=0)],
    )],
)  # fmt: skip
def entropy_floor(run: Run) -> Iterator[Measured]:
    """The entropy floor of bounded logits.

    Three kinds of rows are compared with the bound for their norm: the one that should attain it,
    random rows, and rows whose entropy was lowered by gradient descent.

    Predicted: H ≥ log(1 + (n−1)b) + s√(n(n−1))·b/(1 + (n−1)b), b = exp(−s√(n/(n−1))), attained by
    one key above the rest: 2.7168, 1.7675, 0.2137, 0.0056 at n = 16, s = 1, 3, 6, 10.

    Figure: Small logits cannot collapse: the entropy floor at logit norm s. Lines: the closed form.
    Filled marks: one logit above the rest. Hollow marks: the least of random rows of that norm;
    none lies below its line.
    """
    starts, steps = run.size(64, 256), run.size(200, 1000)
    for n in (16, 256, 4096):
        for norm in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0):
            least, where = theory.entropy_lower_bound(n, norm), {"n": n, "s": norm}
            H = float(statistics(one_above_rest(n, norm)).entropy)
            yield "attained", "H of one above rest, nat", least, H, where
            z = run.normal(starts, n)
            z = normalize(z - z.mean(1, keepdim=True)) * norm
            H = float(statistics(z).entropy.min())
            yield "floor", RANDOM, least, H, where
            if n == 16:
                H = float(descend(z, norm, steps).min())
                yield "floor", DESCENDED, least, H, where
                yield "reached", DESCENDED, least, H, where


NAKANISHI = "Nakanishi (2025), arXiv:2501.19399, figure 1"
S, TOP_GAP = 0.43, 5.0  # one logit of 3 among others of −2


def weight_of_top(n: int, scale: float) -> float:
    """Measured weight of one key above n − 1 equal ones, with the logits times ``scale``."""
    key = torch.full((1, 1, n, 1), -2.0, dtype=torch.float64)
    key[..., 0, :] += TOP_GAP
    return float(row_statistics(torch.ones_like(key[:, :, :1]), key, scale=scale).top_weight)


@experiment(
    theorem("ssmax", "with SSMax its weight is 1/(1 + (n − 1)·n^(−2.15))", NAKANISHI, within=1e-9),
    theorem("softmax", "with softmax it is e⁵/(e⁵ + n − 1)", NAKANISHI, within=1e-9),
    theorem("least", "with SSMax it stays above 0.8", NAKANISHI, relation=">="),
    up_to("fades", "softmax leaves the one key half of the weight", "what one would expect of it",
          relation=">=", bound="n"),
    theorem("critical", "a smaller s fails at some length: s·gap must exceed 1", within=1e-9),
    figure=[Panel(
        Axis("keys n", log=True), Axis("weight of the one key", limits=(None, 1.5)),
        [Lines("ssmax", "n", f"SSMax, s = {S} (s·gap = 2.15)"),
         Lines("critical", "n", "SSMax, s = 0.2 (s·gap = 1)", where={"s": 0.2}),
         Lines("critical", "n", "SSMax, s = 0.1 (s·gap = 0.5)", where={"s": 0.1}),
         Lines("softmax", "n", "softmax")],
    )],
)  # fmt: skip
def ssmax(run: Run) -> Iterator[Measured]:
    """Scalable softmax on one key above the rest.

    Weight of one key above n − 1 equal ones, with and without the factor s log n.

    Predicted: weight e⁵/(e⁵ + n − 1) with softmax, 1/(1 + (n − 1)n^(−2.15)) with s = 0.43: 0.129
    against 0.9997 at n = 1000; softmax keeps one half up to n = 149.

    Figure: Softmax fades with length; SSMax holds if s times the gap > 1. One score of 3 among
    n − 1 scores of −2. Lines: closed forms. Marks: measured weight of the one key.
    """
    ns = (2, 4, 10, 30, 100, 148, 149, 150, 300, 1000, 10**4, 10**5)
    for n in ns if run.quick else (*ns, 10**6):
        plain, scaled = weight_of_top(n, 1.0), weight_of_top(n, S * math.log(n))
        kept, left = (1 / (1 + (n - 1) * o) for o in (n ** (-S * TOP_GAP), math.exp(-TOP_GAP)))
        yield "ssmax", "weight", kept, scaled, {"n": n, "s": S}
        yield "softmax", "weight", left, plain, {"n": n}
        yield "least", "weight", 0.8, scaled, {"n": n, "s": S}
        yield "fades", "weight", 0.5, plain, {"n": n}
        for s in (0.1, 0.2):
            odds = float(n) ** (1 - s * TOP_GAP) * (1 - 1 / n)  # of the rest
            smaller = weight_of_top(n, s * math.log(n))
            yield "critical", "weight", 1 / (1 + odds), smaller, {"n": n, "s": s}
    needle = weight_of_top(1000, float(theory.needle_scale(1000, TOP_GAP)))
    yield "critical", "weight", 0.5, needle, {"n": 1000, "s": "needle_scale"}


DERRIDA = "Derrida (1981), Phys. Rev. B 24, 2613"
_RATIO = Axis("scale in units of the maximum, γ/M_n", limits=(0.0, 6.3))


@experiment(
    beyond("collision", "frozen: Σp² = 1 − m, m = M_n/γ", DERRIDA, within=0.02, bound="γ/M_n"),
    beyond("entropy", "frozen: H = ψ(1) − ψ(1 − m)", DERRIDA, within=0.03, bound="γ/M_n"),
    Claim("exact collision", "E Σp² at finite n is the exact integral"),
    Claim("exact entropy", "E H at finite n is the exact integral"),
    figure=[
        Panel(_RATIO, Axis("collision Σp²", limits=(0.0, 1.0)),
              [Lines("collision", "γ/M_n", "frozen law, n → ∞", marks="", style=GREY),
               Lines("exact collision", "γ/M_n", "n = {:,}", by="n")], "collision", [Level(1.0)]),
        Panel(_RATIO, Axis("entropy H, nat", True, (0.2, 0.5, 1, 2, 5, 10), (0.15, 14)),
              [Lines("entropy", "γ/M_n", marks="", style=GREY),
               Lines("exact entropy", "γ/M_n", by="n")], "entropy", [Level(1.0)]),
    ],
)  # fmt: skip
def freezing(run: Run) -> Iterator[Measured]:
    """Freezing of Gaussian logits.

    Mean entropy and collision of rows whose deviation γ is below and above M_n, the expected
    maximum of n standard normal numbers. Above it, rows are also compared with the formulas of the
    random energy model, in which a few keys hold the weight, whatever n.

    Predicted: with m = M_n/γ < 1: Σp² → 1 − m and H → ψ(1) − ψ(1 − m); at finite n the first is a
    few per cent low near γ = 2 M_n, the second too high by more.

    Figure: Above γ = M_n attention freezes onto a few keys, however many there are. Lines: exact
    integrals at each n. Grey line: the frozen law of infinitely many keys, m = M_n/γ. Marks: mean
    over sampled rows.
    """
    multiples = (0.25, 0.5, 0.75, 1.05, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        gammas = [times * float(theory.expected_max_gauss(n)) for times in multiples]
        count = run.size(1000, 6000 if n <= 4096 else 1000)
        entropy = over_scales(run, Run.normal, n, count, gammas, ("entropy",))["entropy"]
        collision = gaussian_collision(run, n, count, gammas)
        numbers = zip(multiples, gammas, map(mean, entropy), collision, strict=True)
        for times, gamma, H, Y in numbers:
            where = {"n": n, "γ/M_n": times}
            exact_H = theory.expected_entropy_gauss(n, gamma)
            exact_Y = theory.expected_collision_gauss(n, gamma)
            yield "exact entropy", "mean H, nat", exact_H, H, where
            yield "exact collision", "mean Σp²", exact_Y, Y, where
            if times > 1:
                yield "collision", "mean Σp²", theory.frozen_collision(1 / times), Y, where
                yield "entropy", "mean H, nat", theory.frozen_entropy(1 / times), H, where
