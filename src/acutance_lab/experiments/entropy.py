"""Entropy and gradient of rows at a scale: how far they fall, rise, or stay when n grows."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor

from acutance import theory
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import Claim, Estimate, among, at_most, refuted, theorem, up_to
from acutance_lab.sampling import Draw, cosine, mean, median, over_scales, statistics

SU = "Su Jianlin, kexue.fm/archives"
N = 512
LAMBDAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)
_SCALE = Axis("logit scale λ, nat", log=True, ticks=(0.25, 0.5, 1, 2, 5, 10, 20, 40))
MEDIAN = "median λ(1 − Σp²)"


@experiment(
    refuted("vanishes", "beyond its best scale the mean gradient λ(1 − Σp²) falls", f"{SU}/9812",
            relation="<="),
    up_to("surrogate", "E λ(1 − Σp²) = λ(1 − exp(λ²)/n), greatest at λ = 2.008 for n = 512",
          f"{SU}/9812", within=0.02, bound="λ"),
    Claim("exact", "E λ(1 − Σp²) = λ(1 − E Σp²), the exact integral, rising to M_n"),
    at_most("typical", "from 4 M_n on the median gradient is below half of its best"),
    Claim("frobenius", "E ‖J‖_F² = E[Σp² − 2 Σp³ + (Σp²)²], the exact integral"),
    at_most("typical_norm", "from 4 M_n on the median ‖λJ‖_F is below half too"),
    Claim("entropy", "E H falls from log n to 0 as the exact integral"),
    theorem("range", "0 ≤ H ≤ log n in every row", f"{SU}/9593", relation="<=", rounding=1e-9),
    theorem("trace", "1 − Σp² ≤ H in every row: low entropy, small Jacobian", relation="<="),
    figure=[
        Panel(_SCALE, Axis("entropy H, nat"), [Lines("entropy", "λ", "mean H")], "entropy",
              [Level(y=math.log(N), name="log n")]),
        Panel(_SCALE, Axis("gradient λ(1 − Σp²)", limits=(-0.15, 5.0)),
              [Lines("exact", "λ", "mean"),
               Lines("", "λ", "median", quantity=MEDIAN, line=False, hollow=True),
               Lines("surrogate", "λ", "λ(1 − exp(λ²)/n), article 9812", marks="")],
              "gradient", [Level(y=3.04, name="M_n")]),
        Panel(_SCALE, Axis("‖J‖_F²"), [Lines("frobenius", "λ", "mean")], "Jacobian norm, squared"),
    ],
)  # fmt: skip
def information(run: Run) -> Iterator[Measured]:
    """Entropy and gradient of large logits.

    Entropy and softmax Jacobian of rows of 512 Gaussian logits, at each scale λ. The typical row
    loses its gradient at a large scale, the mean over rows does not.

    Predicted: E λ(1 − Σp²) = E⟨z⟩ rises with λ without end, to M_n = 3.04 at n = 512; its median
    rises and falls; the annealed optimum 2.008 is that of a surrogate.

    Figure: Large logits: entropy vanishes, and the typical gradient with it, but not the mean.
    n = 512 Gaussian logits. Lines: exact integrals. Marks: mean over sampled rows, and their
    median. Dotted: M_n, which the mean tends to.
    """
    scales = LAMBDAS + tuple(3 * lam for lam in LAMBDAS)  # log Σp³ = log Z(3λ) − 3 log Z(λ)
    metrics = ("entropy", "jacobian_trace", "lse")
    sampled = over_scales(run, Run.normal, N, run.size(4000, 40000), scales, metrics)
    traces, lse = sampled["jacobian_trace"][: len(LAMBDAS)], sampled["lse"]
    squares = []  # ‖J‖_F² of each row
    for at, trace in enumerate(traces):
        Y, cubes = 1 - trace, torch.exp(lse[at + len(LAMBDAS)] - 3 * lse[at])
        squares.append((Y - 2 * cubes + Y * Y).clamp(min=0.0))
    medians = [median(lam * trace) for lam, trace in zip(LAMBDAS, traces, strict=True)]
    norms = [median(lam * square.sqrt()) for lam, square in zip(LAMBDAS, squares, strict=True)]
    peak, height = (max(estimate.value for estimate in estimates) for estimates in (medians, norms))
    best, top = theory.scale_gradmax_annealed(N), theory.expected_max_gauss(N)
    before = None
    for at, (lam, trace) in enumerate(zip(LAMBDAS, traces, strict=True)):
        H, gradient, where = sampled["entropy"][at], lam * trace, {"n": N, "λ": lam}
        exact = lam * (1 - theory.expected_collision_gauss(N, lam))
        surrogate = lam * (1 - math.exp(min(lam**2, 700)) / N)
        norm = theory.expected_jacobian_fro2(N, lam)
        yield "exact", "mean λ(1 − Σp²)", exact, mean(gradient), where
        yield "surrogate", "mean λ(1 − Σp²)", surrogate, mean(gradient), where
        yield "entropy", "mean H, nat", theory.expected_entropy_gauss(N, lam), mean(H), where
        yield "range", "largest H, nat", math.log(N), float(H.max()), where
        yield "range", "largest −H, nat", 0.0, float(-H.min()), where
        yield "frobenius", "mean ‖J‖_F²", norm, mean(squares[at]), where
        yield "trace", "largest 1 − Σp² − H", 0.0, float((trace - H).max()), where
        yield untested(MEDIAN, medians[at], where)
        if lam > best and before is not None:
            # the same rows at both scales: the step's own spread is its error
            yield "vanishes", "mean λ(1 − Σp²), gain", 0.0, mean(gradient - before), where
        if lam >= 4 * top:
            yield "typical", MEDIAN, peak / 2, medians[at], where
            yield "typical_norm", "median ‖λJ‖_F", height / 2, norms[at], where
        before = gradient


WIDTH = 16
_KEYS = Axis("keys n", log=True, ticks=(16, 256, 4096, 65536))


def best_two_level(n: int, tau: float) -> tuple[float, int]:
    """Largest information log n − H of rows with k cosines at +1 and n − k at −1, and its k."""
    keys = torch.arange(n)

    def information(k: int) -> float:
        cosines = torch.where(keys < k, 1.0, -1.0).double()
        return float(statistics(cosines[None] / tau).information)

    # it rises with k, then falls
    k = bisect_left(range(n - 1), True, 1, key=lambda k: information(k) >= information(k + 1))
    return information(k), k


@experiment(
    theorem("range", "at τ = 1 a row of cosines has H ≥ log n − 0.4745", f"{SU}/9593",
            relation="<="),
    Claim("limit", "that range is reached as n grows: D(2) = 0.474474647", within=0.005),
    Claim("share", "with 20.55 % of the cosines at +1, the others at −1", within=0.002),
    theorem("exact", "the least entropy at finite n is that of two levels", within=1e-9),
    theorem("widens", "the τ for 50, 90, 99 % of log n allows it", f"{SU}/9593", within=1e-6),
    Claim("random", "random keys: the exact integral over cosines in R^d"),
    among("linear", f"random keys at scale λd lose 0.24·λd nat (d = {WIDTH})", f"{SU}/8823",
          within=0.02, bound="λ"),
    figure=[
        Panel(Axis("temperature τ", log=True, ticks=(0.05, 0.1, 0.2, 0.5, 1, 2)),
              Axis("most information log n − H, nat", True, (0.1, 0.4745, 1, 3, 10), (0.07, 20)),
              [Lines("exact", "τ", "n = {:,}", by="n")], "range", [Level(1.0, 0.4745)]),
        Panel(_KEYS, Axis("temperature τ"),
              [Lines("widens", "n", "{:.0%} of log n", by="f", of="τ")], "temperature needed"),
    ],
)  # fmt: skip
def temperature(run: Run) -> Iterator[Measured]:
    """The entropy range of cosine attention.

    Information log n − H of rows of cosines at temperature τ. Rows with two values and random rows
    are compared with bounds, rows of random keys in d dimensions with expected values.

    Predicted: log n − H ≤ 0.474474647 at τ = 1, reached with 20.55 % of the cosines at +1; 90 % of
    log n needs τ = 0.340, 0.241, 0.183, 0.147 at n = 16, 256, 4096, 65536.

    Figure: A softmax over cosines says at most 0.4745 nat at τ = 1; a smaller τ lets it say more.
    Lines: closed form. Marks: the best row found by trying two-level rows. Right: the temperature
    that allows a row a share of log n.
    """
    most = float(theory.information_range_limit(1.0))
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        for tau in (2.0, 1.0, 0.5, 0.2, 0.1, 0.05):
            said, k = best_two_level(n, tau)
            exact = math.log(n) - float(theory.cosine_entropy_lower_bound(n, tau))
            yield "exact", "log n − H, nat", exact, said, {"n": n, "τ": tau, "k": k}
            if tau == 1:
                yield "range", "log n − H of two levels, nat", most, said, {"n": n}
                yield "limit", "log n − H of two levels, nat", most, said, {"n": n}
                if n >= 4096:
                    top = (2 / -math.expm1(-2) - 1) / math.expm1(2)
                    yield "share", "k / n", top, k / n, {"n": n}
        z = run.even(run.size(64, 512), n)
        corners = torch.where(run.uniform(*z.shape) < 0.2055, 1.0, -1.0).double()
        for name, cosines in {"even": z, "corners": corners}.items():
            said = float(statistics(cosines).information.max())
            yield "range", f"log n − H of random rows ({name}), nat", most, said, {"n": n}
        for fraction in (0.5, 0.9, 0.99):
            tau = float(theory.tau_for_information(n, fraction))
            share = best_two_level(n, tau)[0] / math.log(n)
            yield "widens", "share of log n", fraction, share, {"n": n, "f": fraction, "τ": tau}
    n, count, d = run.size(4096, 16384), run.size(1000, 2000), WIDTH
    lams = (1 / math.sqrt(d), 0.5, 1.0, 2.0)
    sampled = over_scales(run, cosine(d), n, count, [lam * d for lam in lams], ("information",))
    for lam, lost in zip(lams, sampled["information"], strict=True):
        where, H = {"n": n, "d": d, "λ": lam}, theory.expected_entropy(n, lam * d, "cosine", d=d)
        yield "random", "log n − H, nat", math.log(n) - H, mean(lost), where
        yield "linear", "log n − H, nat", 0.24 * lam * d, mean(lost), where


START = 512
#: Families of independent logits, with what theory calls them.
LAWS: dict[str, tuple[Draw, str, dict[str, Any]]] = {
    "Gaussian": (Run.normal, "gaussian", {}),
    "uniform": (Run.even, "uniform", {}),
    "exponential": (Run.exponential, "exponential", {}),
    "cosine, d = 64": (cosine(64), "cosine", {"d": 64}),
}
ONE = "one key above the rest"


def measured_scale(scores: Sequence[Tensor], start: float) -> Estimate:
    """The scale at which rows of scores have a mean Σp² of 1/2, by the secant method.

    Args:
        scores: blocks of rows, each (rows, n).
        start: first guess of the scale.
    """

    def collision(scale: float) -> Estimate:
        return mean([statistics(scale * block).collision for block in scores])

    low, high = 0.9 * start, 1.1 * start
    at_low, at_high = collision(low), collision(high)
    for _ in range(4):
        slope = (at_high.value - at_low.value) / (high - low)
        low, at_low, high = high, at_high, high + (0.5 - at_high.value) / slope
        at_high = collision(high)
        if abs(at_high.value - 0.5) < 1e-9:
            break
    return at_high._replace(value=high, error=at_high.error / slope)


def mean_given(values: Tensor, control: Tensor, expected: float) -> Estimate:
    """Mean of ``values``, made more precise by a control variate with the known mean ``expected``.

    Entropy varies from row to row mostly with Σp². So the error of the sample's mean Σp² tells most
    of the error of its mean entropy, which is subtracted.
    """
    centred = control - control.mean()
    slope = (centred * values).mean() / centred.square().mean()
    return mean(values - slope * (control - expected))


def entropy_above(scale: float, least: float, row: Tensor) -> float:
    """Entropy in nats of a row of scores times a scale, less ``least``."""
    return float(statistics(scale * row).entropy) - least


_N = Axis("keys n", log=True, ticks=(512, 2048, 8192, 65536))


@experiment(
    refuted("entropy", "λ ∝ log n keeps H what it was at n = 512", f"{SU}/8823 and 9034",
            within=0.01, bound="logits", sense="in"),
    among("effective keys", "λ ∝ log n keeps Σp² what it was at n = 512", within=0.03,
          bound="logits"),
    refuted("deviation", "Gaussian logits of deviation log n / log 512 keep H",
            f"{SU}/8823 and 9034", within=0.03),
    Claim("collision", "under that law E Σp² is the exact integral"),
    Claim("drift", "under that law E H is the exact integral"),
    Claim("scale", "the scale that does keep 1/E Σp² = 2 is the integral's solution"),
    theorem("match", "one key above the rest keeps H at λ = log(n − 1) + logit p, with h(p) + (1 − "
            "p)·log(n − 1) = H", rounding=1e-9),
    figure=[
        Panel(_N, Axis("collision Σp²", log=True),
              [Lines("collision", "n", "{}", by="logits"),
               Lines("effective keys", "n", ONE, where={"logits": ONE})], "under λ ∝ log n"),
        Panel(_N, Axis("scale λ(n)", log=True),
              [Lines("scale", "n", by="logits"), Lines("match", "n")],
              "what keeps Σp², or H of one key above the rest"),
    ],
)  # fmt: skip
def invariance(run: Run) -> Iterator[Measured]:
    """Entropy invariance by scaling with log n.

    Collision and entropy of rows of each family of logits, for n from 512 on: with a scale λ
    proportional to log n, and with the scale that should keep both constant.

    Predicted: no family of logits keeps H under λ ∝ log n; one key above the rest keeps its Σp²,
    while its H rises from 3.81 nat at n = 512 to 6.25 at 65536. For Σp² Gaussian logits need
    √log n, uniform ones n, exponential ones a constant; H of Gaussian logits drifts 5.74, 6.88,
    7.97 at n = 512, 2048, 8192.

    Figure: Scaling by log n keeps the effective keys of one kind of logits, not of all. Left: Σp²
    under λ ∝ log n, one over the effective keys. Right: the scale that does keep it. Lines exact,
    marks sampled.
    """
    ns = (START, 16384) if run.quick else (START, 1024, 4096, 16384, 65536)
    for name in LAWS:
        for n in ns:
            yield from _of_family(run, name, n)
    half = float(theory.needle_scale(START, 1.0))  # half of the weight on the one key
    for n in ns:
        needle = torch.eye(1, n, dtype=torch.float64)
        lam = half * math.log(n) / math.log(START)
        under = statistics(lam * needle)
        kept = 0.25 * START / (START - 1)  # ¼ + ¼/(n − 1)
        start = math.log(2) + math.log(START - 1) / 2  # half on one key, half spread evenly
        where = {"n": n, "λ": lam, "logits": ONE}
        yield "entropy", "H, nat", start, float(under.entropy), where
        yield "effective keys", "Σp²", kept, float(under.collision), where
        scale = theory.needle_scale_for_entropy(n, start)
        keeps = brentq(entropy_above, 0.0, 100.0, (start, needle), xtol=1e-12)
        yield "match", "λ that keeps H", scale, keeps, {"n": n}


def _of_family(run: Run, name: str, n: int) -> Iterator[Measured]:
    """Numbers of n logits of one family."""
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
    before = theory.expected_entropy(START, first, family, **parameter)
    now = theory.expected_entropy(n, lam, family, **parameter)
    # all rows where they are short: 5 per cent must be more than 4 standard errors
    tried = scores if n == START else scores[: len(scores) // run.size(6, 3) + 1]
    where = {"logits": name, "n": n, "λ": lam}
    yield "entropy", "mean H, nat", before, mean_given(H, Y, exact), where
    yield "drift", "mean H, nat", now, mean(H), where
    yield "effective keys", "mean Σp²", 0.5, mean(Y), where
    yield "collision", "mean Σp²", exact, mean(Y), where
    yield "scale", "λ that keeps it", kept, measured_scale(tried, kept), where
    if name == "Gaussian":
        grown, where = mean([statistics(growth * z).entropy for z in scores]), {"n": n, "γ": growth}
        same, there = (theory.expected_entropy_gauss(*at) for at in ((START, 1.0), (n, growth)))
        yield "deviation", "mean H, nat", same, grown, where
        yield "drift", "mean H, nat", there, grown, where


FAMILIES = ("Gaussian", "uniform", "one-hot")
DEPTH = "λ(s_max − s̄)/log n"


def _lines(claim: str, name: str, family: str, **shown: Any) -> Lines:
    """A curve of a family of logits, at the largest n."""
    return Lines(claim, "λ", name, where={"logits": family}, last="n", **shown)


@experiment(
    up_to("approximate", "H ≈ log n − λ(s_max − s̄)", f"{SU}/9034", within=0.02, bound=DEPTH),
    theorem("identity", "H = H_mf + J + G in every row", rounding=1e-9),
    theorem("lower", "H_mf ≤ H in every row", relation="<=", rounding=1e-9),
    Claim("jensen", "E J = E log Z − log n − λE s̄, exactly"),
    Claim("gap", "E G = λ(E s_max − E⟨s⟩), exactly"),
    figure=[
        Panel(Axis("scale λ"), Axis("nat", limits=(-4.0, None)),
              [_lines("approximate", "H", family, line=False),
               _lines("approximate", "H_mf", family, marks=""),
               _lines("jensen", "J, logsumexp above the mean", family),
               _lines("gap", "G, maximum above ⟨s⟩", family)], f"{family} logits")
        for family in FAMILIES
    ],
)  # fmt: skip
def mean_field(run: Run) -> Iterator[Measured]:
    """The mean-field entropy and its errors.

    H = H_mf + J + G is checked on sampled rows, and J and G against their expectations, for each
    family of logits, n and scale λ; H_mf = log n − λ(s_max − s̄) is a bound, J the Jensen gap and G
    the max gap.

    Predicted: H = log n − λ(s_max − s̄) + J + G with J, G ≥ 0, so the approximation is a lower
    bound, close only while λ(s_max − s̄) is a few per cent of log n.

    Figure: The mean-field entropy is a lower bound; two errors of one sign complete it. At the
    largest n. Lines: exact expectations, and H_mf. Marks: mean over sampled rows. H = H_mf + J + G
    in every row. Below 0 the bound says nothing.
    """
    for n in (16, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(400, 2000 if n <= 4096 else 400)
        for family in FAMILIES:
            if family == "one-hot":
                scores = torch.eye(1, n, dtype=torch.float64)
            else:
                law: Draw = Run.normal if family == "Gaussian" else Run.even
                scores = torch.cat([law(run, size, n) for size in run.blocks(count, n)])
            for lam in (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0):
                yield from _of_scores(family, scores, lam)


def _of_scores(family: str, scores: Tensor, lam: float) -> Iterator[Measured]:
    """Numbers of scores (rows, n) of a family at a scale."""
    n = scores.shape[1]
    blocks = (lam * scores).split(max(1, (1 << 17) // n))
    stats = [statistics(block) for block in blocks]
    H, H_mf, J, G = (
        torch.cat([block[name] for block in stats])
        for name in ("entropy", "mean_field_entropy", "jensen_gap", "max_gap")
    )
    mean_H, mean_J, mean_G = (
        mean(rows) if len(rows) > 1 else Estimate(float(rows), 0.0) for rows in (H, J, G)
    )
    if family == "one-hot":
        exact_J, exact_G = (gap(scores[0], lam) for gap in (theory.jensen_gap, theory.max_gap))
    else:
        law = family.lower()
        exact_J = theory.expected_logsumexp(n, lam, law) - math.log(n)
        exact_G = lam * (theory.expected_max(n, law) - theory.expected_weighted_mean(n, lam, law))
    # −Σ p log p, from the weights themselves and not acutance's sums
    log_p = [torch.log_softmax(block, -1) for block in blocks]
    defined = torch.cat([-(x.exp() * x).sum(-1) for x in log_p])
    total, field = H_mf + J + G, float(H_mf.mean())
    furthest = int((total - defined).abs().argmax())
    sums = float(total[furthest]), float(defined[furthest])
    where = {"logits": family, "n": n, "λ": lam}
    deep = {**where, DEPTH: (math.log(n) - field) / math.log(n)}
    yield "approximate", "mean H, nat", field, mean_H, deep
    yield "identity", "H of the row furthest off, nat", *sums, where
    yield "lower", "largest H_mf − H, nat", 0.0, float((H_mf - defined).max()), where
    yield "jensen", "mean J, nat", exact_J, mean_J, where
    yield "gap", "mean G, nat", exact_G, mean_G, where
