"""Sparsity S = E|a| / √E[a²] of a row of weights, for each kind of weights in article 9889."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from scipy.special import ndtr

from acutance import theory
from acutance_lab.experiment import Measured, Run, experiment
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import Claim, among, at_least, beyond, refuted, theorem, up_to, values
from acutance_lab.sampling import gaussian_collision, mean, over_scales, sparsity, statistics

SU = "Su Jianlin, kexue.fm/archives/9889"
_S = partial(Axis, "sparsity S = E|a| / √E[a²]")
_SCORES = Axis("standard deviation of the scores γ = σ‖q‖", True, (0.25, 0.5, 1, 2, 5, 10))


@experiment(
    up_to("formula", "S = exp(−γ²/2)", f"{SU}, eq. 5", within=0.02, bound="γ/√(log n / 2)"),
    Claim("exact", "E Σp² at finite n is the exact integral"),
    theorem("floor", "S ≥ 1/√n in every row", relation=">="),
    figure=[Panel(
        Axis("logit deviation γ = σ‖q‖, nat"), _S(log=True, limits=(2e-3, 1.4)),
        [Lines("formula", "γ", "exp(−γ²/2)", marks=""),
         Lines("formula", "γ", "n = {:,}", by="n", line=False)],
        levels=lambda record: [Level(y=n**-0.5) for n in values(record.of("formula"), "n")],
    )],
)  # fmt: skip
def sparsity_exp(run: Run) -> Iterator[Measured]:
    """Sparsity of exponential weights.

    Mean sparsity S and collision Σp² of Gaussian rows, for each n and deviation γ.

    Predicted: S = exp(−γ²/2) whatever β, until γ nears √(log n / 2); never below 1/√n.

    Figure: Wide logits make softmax attention sparse, down to 1/√n. Line: S = exp(−γ²/2), the limit
    of many keys. Marks: mean over sampled rows of n keys; dotted: the floor 1/√n below which no row
    can go.
    """
    gammas = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(1000, 4000 if n <= 4096 else 1000)
        sampled = over_scales(run, Run.normal, n, count, gammas, ("sparsity",))["sparsity"]
        collision = gaussian_collision(run, n, count // 2, gammas)
        for gamma, S, Y in zip(gammas, sampled, collision, strict=True):
            where = {"n": n, "γ": gamma, "γ/√(log n / 2)": gamma / math.sqrt(math.log(n) / 2)}
            yield "formula", "mean S", theory.sparsity_exp(gamma), mean(S), where
            yield "exact", "mean Σp²", theory.expected_collision_gauss(n, gamma), Y, where
            yield "floor", "least S", n**-0.5, float(S.min()), where


def printed(beta: float, gamma: float) -> float:
    """Sparsity by equation 6 of the article, term by term as printed there."""
    e, square = math.exp(-(beta**2) / (2 * gamma**2)), beta**2 + gamma**2
    tail = math.erf(beta / (math.sqrt(2) * gamma)) + 1
    top = e * (math.sqrt(2) * beta * gamma + math.sqrt(math.pi) / e * square * tail)
    fourth = beta**4 + 6 * beta**2 * gamma**2 + 3 * gamma**4
    first = 2 * math.sqrt(2) * beta * gamma * e * (beta**2 + 5 * gamma**2)
    below = math.sqrt(first + 2 * math.sqrt(math.pi) * fourth * tail)
    return float(top / (math.pi**0.25 * below))


@experiment(
    beyond("formula", "S = M₂/√M₄, a function of u = β/γ alone", f"{SU}, eq. 6", within=0.02,
           bound="n·Φ(u)"),
    theorem("printed", "eq. 6, typeset rightly, is M₂/√M₄", f"{SU}, eq. 6", rounding=0.0,
            within=1e-9),
    at_least("bounded", "for β ≥ 0, S ≥ 1/√6", f"{SU}, eq. 6", within=0.005),
    Claim("opposite", "for β < 0, a smaller γ is sparser", f"{SU}, eq. 6", relation="<="),
    theorem("floor", "S ≥ 1/√n in every row", relation=">="),
    figure=[Panel(_SCORES, _S(), [Lines("formula", "γ", "β = {:g}", by="β")],
                  levels=[Level(y=6**-0.5)])],
)  # fmt: skip
def sparsity_relu2(run: Run) -> Iterator[Measured]:
    """Sparsity of squared-ReLU weights.

    Mean sparsity S of rows with a positive score, for each mean β and deviation γ.

    Predicted: S depends on u = β/γ alone and rises with it; S ≥ 1/√6 for β ≥ 0, S → 0 only as
    β/γ → −∞; the formula needs many active keys, n·Φ(u) ≫ 1; one active key has S = 1/√n.

    Figure: Squared ReLU is sparse only where most scores are negative. Lines: eq. 6 of article
    9889. Marks: mean over sampled rows of 65,536 keys (4,096 at the quick size); they leave the
    line where too few keys are active. Dotted: 1/√6, the bound for β ≥ 0.
    """
    n, count = run.size(4096, 65536), run.size(60, 100)
    blocks = [run.normal(size, n) for size in run.blocks(count, n)]
    for beta in (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0):
        before = None
        for gamma in (0.25, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0):
            u, S = beta / gamma, theory.sparsity_relu2(beta, gamma)
            where = {"β": beta, "γ": gamma, "n": n, "n·Φ(u)": n * float(ndtr(u))}
            if u > -3:
                yield "printed", "S", printed(beta, gamma), float(S), where
            sampled = torch.cat([sparsity((beta + gamma * z).relu().square()) for z in blocks])
            sampled = sampled[torch.logical_not(sampled.isnan())]  # rows in which a key is active
            if len(sampled) < count / 2:
                continue
            estimate = mean(sampled)
            yield "formula", "mean S", S, estimate, where
            yield "floor", "least S", n**-0.5, float(sampled.min()), where
            if beta >= 0:
                yield "bounded", "mean S", 1 / math.sqrt(6), estimate, where
            elif before is not None:
                yield "opposite", "S here − S at next γ", 0, before - estimate, where
            before = estimate


@experiment(
    Claim("formula", "S = (√(2/π)·e^(−u²/2) + u·erf(u/√2)) / √(1 + u²), u = β/γ", f"{SU}, eq. 7",
          within=0.001),
    among("bounded", "linear attention has S ≥ √(2/π) whatever the query", f"{SU}, eq. 7",
          relation=">=", within=0.001, bound="keys"),
    figure=[Panel(
        _SCORES, _S(), [Lines("formula", "γ", "β = {:g}", by="β")],
        levels=lambda record: [Level(y=row.measured) for row in record.of("bounded")[-2:]],
    )],
)  # fmt: skip
def sparsity_identity(run: Run) -> Iterator[Measured]:
    """Sparsity of linear attention.

    Mean sparsity S of signed weights: normal scores of mean β and deviation γ, then others.

    Predicted: S is even in β, rises with |β|/γ and is least at β = 0, where it is √(2/π) = 0.7979;
    that bound is a property of Gaussian keys, not of linear attention.

    Figure: Linear attention over Gaussian keys cannot be sparse. Lines: eq. 7 of article 9889,
    nowhere below √(2/π) = 0.80. Marks: mean over sampled rows of 65,536 keys (4,096 at the quick
    size). Dotted: what keys of other distributions have, Laplace 0.71 and nine in ten zero 0.25.
    """
    n, count, bound = run.size(4096, 65536), run.size(100, 200), math.sqrt(2 / math.pi)
    blocks = [run.normal(size, n) for size in run.blocks(count, n)]
    for beta in (0.0, 0.5, 1.0, 2.0, 4.0):
        for gamma in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0):
            estimate = mean([sparsity(beta + gamma * z) for z in blocks])
            where = {"β": beta, "γ": gamma, "n": n}
            yield "formula", "mean S", theory.sparsity_identity(beta, gamma), estimate, where
            yield "bounded", "mean S", bound, estimate, {**where, "keys": "Gaussian"}
    # one component of the query matters, and the keys' distribution is seen as it is
    laplace, sparse = [], []
    for z in blocks:
        u = run.even(*z.shape)
        laplace.append(sparsity(-u.sign() * (1 - u.abs()).log()))
        sparse.append(sparsity(z * (run.uniform(*z.shape) < 0.1)))
    yield "bounded", "mean S", bound, mean(laplace), {"n": n, "keys": "Laplace"}
    yield "bounded", "mean S", bound, mean(sparse), {"n": n, "keys": "nine in ten zero"}


_GENERAL = f"{SU}, on general linear attention"


@experiment(
    theorem("identity", "S = (1 + q'Σ'q' / (q'·μ')²)^(−1/2) with the row's own μ', Σ'", _GENERAL,
            within=1e-9),
    Claim("iid", "independent components: S = (1 + (σ'/μ')²‖q'‖₂²/‖q'‖₁²)^(−1/2)", _GENERAL,
          within=0.002),
    refuted("wider", "a larger d makes it sparser", f"{_GENERAL}, as two public copies have it",
            relation="<="),
    theorem("ratio", "‖q'‖₂/‖q'‖₁ ≥ d^(−1/2): a minimum, not a maximum", relation=">="),
    figure=[Panel(Axis("width d of the features", log=True, ticks=(1, 4, 16, 64, 256)), _S(),
                  [Lines("iid", "d", "σ'/μ' = {:g}", by="σ'/μ'")])],
)  # fmt: skip
def sparsity_linear(run: Run) -> Iterator[Measured]:
    """Sparsity of linear attention with non-negative features.

    S of sampled features is compared with the formula from their moments: first the row's own,
    then those of the distribution, for growing width d.

    Predicted: S is set by the features' relative spread along q'; ‖q'‖₂/‖q'‖₁ is least, d^(−1/2),
    for a dense query, so S → 1 as d grows.

    Figure: A wider non-negative linear attention is less sparse, not more. Lines:
    S = (1 + (σ'/μ')²/d)^(−1/2) for a dense query and independent feature components. Marks: mean
    over sampled rows of 4,096 keys (1,024 at the quick size) with gamma-distributed components.
    """
    for n in (16, 1024):
        query, keys = run.uniform(8), run.normal(n, 8).exp()
        centred = keys - keys.mean(0)
        formula = theory.sparsity_linear(query, keys.mean(0), centred.T @ centred / n)
        S = float(sparsity((keys @ query)[None]))
        yield "identity", "S", formula, S, {"n": n, "d": 8, "keys": "log-normal"}
    n = run.size(1024, 4096)
    for shape in (0.25, 1.0, 4.0):  # of the gamma distribution; σ'/μ' = 1/√shape
        spread, before = 1 / math.sqrt(shape), None
        for d in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            shapes = torch.full((n, d), shape, dtype=torch.float64)
            draws = (torch._standard_gamma(shapes, generator=run.generator) for _ in range(32))
            estimate = mean([sparsity(keys.sum(1)[None]) for keys in draws])
            where, dense = {"d": d, "σ'/μ'": spread, "n": n}, torch.ones(d, dtype=torch.float64)
            yield "iid", "mean S", theory.sparsity_linear_iid(dense, 1.0, spread), estimate, where
            if before is not None:
                yield "wider", "S at d − S at the d before", 0.0, estimate - before, where
            before = estimate
            q = run.uniform(1000, d)
            norms = q.norm(dim=1) / q.sum(1)
            yield "ratio", "least of 1000 queries", d**-0.5, float(norms.min()), {"d": d}


LAMBDAS = (0.5, 0.9, 0.99, 0.999)
_RNN = f"{SU}, on linear RNNs"
_N = Axis("keys n", log=True, ticks=(16, 256, 4096, 65536))


@experiment(
    theorem("formula", "S = (1 − λⁿ)/(√n(1 − λ))·√((1 − λ²)/(1 − λ²ⁿ))", _RNN, within=1e-9),
    theorem("vanishes", "S → 0 as n grows", _RNN, relation="<="),
    refuted("keys", "so it attends to ever fewer keys: 1/Σp² falls as S does",
            "a reading of article 9889", within=0.02),
    beyond("limit", "1/Σp² → (1 + λ)/(1 − λ), whatever n", within=0.01, bound="n·(1 − λ)"),
    figure=[
        Panel(_N, _S(log=True), [Lines("formula", "n", "λ = {:g}", by="λ")], "sparsity"),
        Panel(_N, Axis("effective keys 1/Σp²", log=True), [Lines("limit", "n", by="λ")],
              "effective keys", [Level(y=(1 + lam) / (1 - lam)) for lam in LAMBDAS]),
    ],
)  # fmt: skip
def sparsity_decay(run: Run) -> Iterator[Measured]:
    """Sparsity of geometrically decaying weights.

    Sparsity S and effective keys of n weights λ^(n−1), …, λ, 1, for n from 16 to 65,536.

    Predicted: S ~ √((1 + λ)/((1 − λ)n)) → 0, while 1/Σp² = nS² → (1 + λ)/(1 − λ): 3, 19, 199, 1999
    keys for λ = 0.5, 0.9, 0.99, 0.999.

    Figure: A decaying linear RNN: S → 0, but it goes on attending to the same keys. Lines: closed
    forms. Marks: the weights (λ^(n−1), …, λ, 1) themselves. S falls only because zeros are
    appended; dotted: (1 + λ)/(1 − λ).
    """
    for lam in LAMBDAS:
        before = None
        for n in (16, 64, 256, 1024, 4096, 16384, 65536):
            far = torch.arange(n - 1, -1, -1, dtype=torch.float64)
            S = float(sparsity((lam**far)[None]))
            # weights below float64's range still have logarithms
            keys = float(statistics((far * math.log(lam))[None]).effective_keys)
            where, near = {"λ": lam, "n": n}, {"λ": lam, "n": n, "n·(1 − λ)": n * (1 - lam)}
            yield "formula", "S", theory.sparsity_decay(lam, n), S, where
            yield "limit", "effective keys", (1 + lam) / (1 - lam), keys, near
            if before is not None:
                yield "vanishes", "S at n − S at n/4", 0.0, S - before[0], where
                yield "keys", "effective keys", before[1] * S / before[0], keys, where
            before = (S, keys)
