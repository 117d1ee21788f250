r"""Make tests/contract/theory/reference_closed_forms.json, values of the closed forms.

Run it from the repository's root, after a change of the cases below:

    python tools/make_reference_values.py

It evaluates the *defining* formula of each function with mpmath (which comes with PyTorch, by
way of SymPy) at some hundreds of digits, so that no cancellation matters, on arguments that are
exact in float64, and writes the values rounded to float64. Nothing of ``acutance`` is imported: the
code under test uses other, stable forms. Two integrals that the closed forms come from are checked
by quadrature first, and so are the moments of Poisson–Dirichlet weights. A few seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpmath import mp, mpf

REFERENCE = Path(__file__).parents[1] / "tests/contract/theory/reference_closed_forms.json"
TOLERANCE = 1e-12
mp.dps = 400  # Phi(-1e8) is cancelled to its eighth inverse power, and scales of 1e-100 squared

ROWS: list[list[float]] = [
    [2.0, 1.0, 0.5, -0.25, -3.0],
    [0.0, 0.0],
    [3.5],
    [1.0, 1.0, 1.0, 0.0],
    [-700.0, 0.0, 20.0, 700.0],
    [1e8, 1e8 + 1, 1e8 + 2.5],
    [1e-12, -2e-12, 5e-13],
    [1e300, -1e300, 0.0],
    [float(j % 7) / 8 for j in range(64)],
]
SCALES = [0.0, 1e-100, 1e-8, 0.1, 1.0, 10.0, 300.0, 1e5]


def relu2_of_ratio(u: mpf) -> mpf:
    """Sparsity of max(u + z, 0)²."""
    second = (u**2 + 1) * mp.ncdf(u) + u * mp.npdf(u)
    fourth = (u**4 + 6 * u**2 + 3) * mp.ncdf(u) + u * (u**2 + 5) * mp.npdf(u)
    return second / mp.sqrt(fourth)


def relu2(beta: float, gamma: float) -> mpf:
    """S of max(score, 0)²; at gamma = 0 its limit."""
    if gamma == 0:
        return mpf(beta > 0)
    return relu2_of_ratio(mpf(beta) / gamma)


def identity(beta: float, gamma: float) -> mpf:
    """S of the score itself; at gamma = 0 its limit."""
    if gamma == 0:
        return mpf(1)
    beta_, gamma_ = mpf(beta), mpf(gamma)
    size = mp.sqrt(2 / mp.pi) * gamma_ * mp.exp(-(beta_**2) / (2 * gamma_**2))
    size += beta_ * mp.erf(beta_ / (mp.sqrt(2) * gamma_))
    return size / mp.sqrt(beta_**2 + gamma_**2)


def linear(q: list[float], mu: list[float], Sigma: list[list[float]]) -> mpf:
    """S from mean and covariance of the keys."""
    mean = mp.fsum(mpf(a) * b for a, b in zip(q, mu, strict=True))
    square = mp.fsum(
        mpf(a) * cov * b
        for a, row in zip(q, Sigma, strict=True)
        for b, cov in zip(q, row, strict=True)
    )
    return mean / mp.sqrt(mean**2 + square)


def linear_iid(q: list[float], mu: float, sigma: float) -> mpf:
    """S from mean and deviation of independent components."""
    first, second = mp.fsum(q), mp.fsum(mpf(a) ** 2 for a in q)
    return 1 / mp.sqrt(1 + (mpf(sigma) / mpf(mu)) ** 2 * second / first**2)


def decay(lam: float, n: float) -> mpf:
    """S of (lam^(n-1), ..., lam, 1)."""
    if lam == 1:
        return mpf(1)
    lam_ = mpf(lam)
    whole = (1 - lam_**n) / (mp.sqrt(n) * (1 - lam_))
    return whole * mp.sqrt((1 - lam_**2) / (1 - lam_ ** (2 * n)))


def decay_keys(lam: float, n: float) -> mpf:
    """Give n S² of the same."""
    return n * decay(lam, n) ** 2


def weights(logits: list[float], scale: float) -> tuple[list[mpf], list[mpf], mpf]:
    """Scaled logits, softmax, log-normaliser."""
    scaled = [mpf(scale) * mpf(s) for s in logits]
    log_total = max(scaled) + mp.log(mp.fsum(mp.exp(s - max(scaled)) for s in scaled))
    return scaled, [mp.exp(s - log_total) for s in scaled], log_total


def entropy(logits: list[float], scale: float) -> mpf:
    """Shannon entropy of softmax."""
    scaled, p, log_total = weights(logits, scale)
    return mp.fsum(w * (log_total - s) for w, s in zip(p, scaled, strict=True))


def jensen(logits: list[float], scale: float) -> mpf:
    """Log-mean-exp less the mean."""
    scaled, _, log_total = weights(logits, scale)
    return log_total - mp.log(len(scaled)) - mp.fsum(scaled) / len(scaled)


def max_gap(logits: list[float], scale: float) -> mpf:
    """Maximum less the mean attended logit."""
    scaled, p, _ = weights(logits, scale)
    return mp.fsum(w * (max(scaled) - s) for w, s in zip(p, scaled, strict=True))


def mean_field(logits: list[float], scale: float) -> mpf:
    """Give log n less maximum plus mean."""
    scaled, _, _ = weights(logits, scale)
    return mp.log(len(scaled)) - max(scaled) + mp.fsum(scaled) / len(scaled)


def uniform_drop(half_range: float) -> mpf:
    """Entropy missing from log n, for logits uniform on an interval."""
    if half_range == 0:
        return mpf(0)
    size = mpf(half_range)
    log_sinhc = size + mp.log((1 - mp.exp(-2 * size)) / (2 * size))
    return size / mp.tanh(size) - 1 - log_sinhc


def onehot(n: float, lam: float) -> mpf:
    """Entropy with one logit above n - 1 equal ones."""
    others = (mpf(n) - 1) * mp.exp(-mpf(lam))
    return mp.log(1 + others) + mpf(lam) * others / (1 + others)


def norm_floor(n: float, logit_norm: float) -> mpf:
    """Lowest entropy at a norm of the logits."""
    size, keys = mpf(logit_norm), mpf(n)
    b = mp.exp(-size * mp.sqrt(keys / (keys - 1)))
    slope = size * mp.sqrt(keys * (keys - 1)) * b
    return mp.log(1 + (keys - 1) * b) + slope / (1 + (keys - 1) * b)


def trace(logits: list[float], scale: float) -> mpf:
    """Trace of diag p - p p^T."""
    _, p, _ = weights(logits, scale)
    return 1 - mp.fsum(w**2 for w in p)


def fro2(logits: list[float], scale: float) -> mpf:
    """Squared norm of diag p - p p^T."""
    _, p, _ = weights(logits, scale)
    square = mp.fsum(w**2 for w in p)
    return square - 2 * mp.fsum(w**3 for w in p) + square**2


def gradmax(n: float) -> mpf:
    """Maximum of lambda (1 - e^(lambda²)/n)."""
    if n == 1:
        return mpf(0)
    return mp.sqrt(mp.lambertw(mpf(n) * mp.sqrt(mp.e) / 2) - mpf(1) / 2)


def frozen_entropy(m: float) -> mpf:
    """Mean entropy of Poisson–Dirichlet weights."""
    return mp.psi(0, 1) - mp.psi(0, 1 - mpf(m))


def log_of(value: Callable[..., mpf]) -> Callable[..., mpf]:
    """Logarithm of another function here."""
    return lambda **arguments: mp.log(value(**arguments))


FUNCTIONS: dict[str, Callable[..., mpf]] = {
    "sparsity_exp": lambda gamma: mp.exp(-(mpf(gamma) ** 2) / 2),
    "log_sparsity_exp": lambda gamma: -(mpf(gamma) ** 2) / 2,
    "sparsity_relu2": relu2,
    "log_sparsity_relu2": log_of(relu2),
    "sparsity_identity": identity,
    "log_sparsity_identity": log_of(identity),
    "sparsity_linear": linear,
    "log_sparsity_linear": log_of(linear),
    "sparsity_linear_iid": linear_iid,
    "log_sparsity_linear_iid": log_of(linear_iid),
    "sparsity_decay": decay,
    "log_sparsity_decay": log_of(decay),
    "effective_keys_decay": decay_keys,
    "softmax_entropy": entropy,
    "jensen_gap": jensen,
    "max_gap": max_gap,
    "mean_field_entropy": mean_field,
    "uniform_entropy_drop": uniform_drop,
    "onehot_entropy": onehot,
    "entropy_lower_bound": norm_floor,
    "jacobian_trace": trace,
    "jacobian_fro2": fro2,
    "scale_gradmax_annealed": gradmax,
    "frozen_entropy": frozen_entropy,
    "frozen_collision": lambda m: 1 - mpf(m),
    "frozen_jacobian_fro2": lambda m: mpf(m) * (1 - mpf(m)) / 3,
}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Give functions and arguments, extremes included."""
    for gamma in [0.0, 1e-200, 1e-8, 0.5, 1.0, 2.0, 6.7, 37.0]:
        yield "sparsity_exp", {"gamma": gamma}
    for gamma in [1e-8, 3.3, 38.7, 1000.0, 1e150]:
        yield "log_sparsity_exp", {"gamma": gamma}

    sizes = [
        1e-300,
        1e-8,
        0.1,
        0.5,
        0.999,
        1.0,
        1.0000001,
        1.5,
        2.0,
        3.0,
        5.0,
        7.0,
        8.0,
        10.0,
        13.7,
    ]
    sizes += [20.0, 30.0, 37.0]
    far = [50.0, 100.0, 1e3, 1e5, 1e8, 1e15, 1e100]
    for u in [0.0, *sizes, *far, *(-u for u in sizes)]:
        yield "sparsity_relu2", {"beta": u, "gamma": 1.0}
    for u in [0.0, *sizes, *far, *(-u for u in sizes + far)]:
        yield "log_sparsity_relu2", {"beta": u, "gamma": 1.0}
    ratios = [
        (-2.0, 0.5),
        (-3.0, 10.0),
        (-1.0, 1e6),
        (1e-3, 1e-4),
        (-1.0, 1e300),
        (-1e-300, 3e-301),
    ]
    ratios += [(1.0, 0.0), (1e300, 1e-300), (1e-310, 3e-310)]
    for beta, gamma in ratios:
        yield "sparsity_relu2", {"beta": beta, "gamma": gamma}
    yield "sparsity_relu2", {"beta": -1.0, "gamma": 0.0}

    for u in [0.0, *sizes, *far[:4], -0.5, -3.0]:
        yield "sparsity_identity", {"beta": u, "gamma": 1.0}
    for u in [0.0, *sizes, *far, -5.0]:
        yield "log_sparsity_identity", {"beta": u, "gamma": 1.0}
    for beta, gamma in [
        (1.0, 0.0),
        (-2.0, 0.0),
        (3.0, 2.0),
        (1.0, 1e6),
        (1e-310, 3e-310),
        (1e300, 7e299),
    ]:
        yield "sparsity_identity", {"beta": beta, "gamma": gamma}

    eye: list[list[float]] = [[1.0, 0.0], [0.0, 1.0]]
    moments: list[tuple[list[float], list[float], list[list[float]]]] = [
        ([1.0, 2.0], [1.0, 0.5], [[1.0, 0.25], [0.25, 2.0]]),
        ([1.0, 1.0], [1e-8, 1e-8], eye),
        ([1.0, 1.0], [1e8, 1e8], eye),
        ([1e200, 3e200], [1e-150, 2e-150], [[1e-300, 0.0], [0.0, 4e-300]]),
        ([1e-200, 3e-200], [1e150, 2e150], [[1e300, -5e299], [-5e299, 4e300]]),
        ([0.0, 1.0, 5.0], [0.0, 1.0, 0.5], [[9.0, 1.0, 2.0], [1.0, 3.0, 0.5], [2.0, 0.5, 1.0]]),
        ([2.0], [3.0], [[0.0]]),
    ]
    for q, mu, cov in moments:
        yield "sparsity_linear", {"q": q, "mu": mu, "Sigma": cov}
        yield "log_sparsity_linear", {"q": q, "mu": mu, "Sigma": cov}
    spreads: list[tuple[list[float], float, float]] = [
        ([1.0] * 4, 1.0, 1.0),
        ([1.0] * 64, 0.5, 2.0),
        ([1.0, 0.0, 0.0], 1.0, 1.0),
        ([1.0, 2.0, 0.5, 0.0], 1e-8, 1.0),
        ([1.0, 2.0, 0.5, 0.0], 1.0, 1e-8),
        ([1e300, 1e300], 1.0, 3.0),
        ([1e-310, 2e-310], 1.0, 3.0),
        ([1.0, 1.0], 1.0, 0.0),
    ]
    for q, mean, sigma in spreads:
        yield "sparsity_linear_iid", {"q": q, "mu": mean, "sigma": sigma}
        yield "log_sparsity_linear_iid", {"q": q, "mu": mean, "sigma": sigma}

    for lam in [1e-300, 0.01, 0.5, 0.9, 0.99, 1 - 1e-9, 1 - 1e-12, 1 - 2**-53, 1.0]:
        for n in [1, 2, 4, 7, 1000, 10**9, 10**12]:
            yield "sparsity_decay", {"lam": lam, "n": n}
            yield "log_sparsity_decay", {"lam": lam, "n": n}
            yield "effective_keys_decay", {"lam": lam, "n": n}

    for function in ["softmax_entropy", "jensen_gap", "max_gap", "jacobian_trace", "jacobian_fro2"]:
        for row in ROWS:
            for scale in SCALES:
                yield function, {"logits": row, "scale": scale}
    for scale in SCALES:
        yield "mean_field_entropy", {"logits": ROWS[0], "scale": scale}

    for size in [
        0.0,
        1e-150,
        1e-6,
        0.1,
        0.5,
        0.999,
        1.0,
        1.001,
        1.5,
        4.0,
        20.0,
        400.0,
        1e4,
        1e100,
        1e308,
    ]:
        yield "uniform_entropy_drop", {"half_range": size}
    for n in [1, 2, 10, 100, 10**12]:
        for lam in [0.0, 1e-9, 1.0, 10.0, 27.6, 100.0, 700.0]:
            yield "onehot_entropy", {"n": n, "lam": lam}
    for n in [2, 16, 1024, 10**12]:
        for norm in [0.0, 1e-6, 1.0, 3.0, 6.0, 10.0, 100.0]:
            yield "entropy_lower_bound", {"n": n, "logit_norm": norm}

    for n in [1, 2, 3, 40, 512, 20000, 65536, 10**7, 10**12]:
        yield "scale_gradmax_annealed", {"n": n}
    for m in [0.0, 1e-300, 1e-12, 1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 1e-9, 1 - 2**-53]:
        yield "frozen_entropy", {"m": m}
        yield "frozen_collision", {"m": m}
        yield "frozen_jacobian_fro2", {"m": m}


def check_by_quadrature() -> None:
    """Compare closed forms with the integrals that they are, to 20 digits."""
    with mp.workdps(25):
        for u in [mpf(-3), mpf("-0.4"), mpf(0), mpf("1.3"), mpf(4)]:
            points = sorted({mpf(-14), -u, mpf(0), mpf(14)})

            def mean(power: int, u: mpf = u, points: list[mpf] = points) -> mpf:
                inside = [x for x in points if x >= -u]
                return mp.quad(lambda x: (u + x) ** power * mp.npdf(x), inside)

            close(relu2_of_ratio(u), mean(2) / mp.sqrt(mean(4)))
            size = mp.quad(lambda x, u=u: abs(u + x) * mp.npdf(x), points)
            close(identity(float(u), 1.0), size / mp.sqrt(1 + mpf(float(u)) ** 2), 1e-14)
        for size in [mpf("0.3"), mpf(5)]:
            z, first = (
                mp.quad(lambda x, k=k, size=size: x**k * mp.exp(size * x), [-1, 1]) for k in (0, 1)
            )
            close(uniform_drop(float(size)), size * first / z - mp.log(z / 2), 1e-14)
        for m in [mpf("0.25"), mpf("0.7")]:
            # a key drawn by weight has a weight distributed as Beta(1 - m, m)
            scale = 1 / mp.beta(1 - m, m)

            def of_drawn(f: Callable[[mpf], mpf], m: mpf = m, scale: mpf = scale) -> mpf:
                return scale * mp.quad(lambda v: f(v) * v**-m * (1 - v) ** (m - 1), [0, 0.5, 1])

            close(frozen_entropy(float(m)), of_drawn(lambda v: -mp.log(v)), 1e-7)
            close(1 - m, of_drawn(lambda v: v), 1e-7)


def close(a: mpf, b: mpf, tolerance: float = 1e-20) -> None:
    """Raise if two routes to one number differ."""
    if abs(a - b) > tolerance * abs(b):
        raise ArithmeticError(
            f"two routes to one number differ: {mp.nstr(a, 22)}, {mp.nstr(b, 22)}"
        )


def main() -> int:
    """Check, evaluate, write."""
    check_by_quadrature()
    lines = []
    for function, arguments in cases():
        value = float(FUNCTIONS[function](**arguments))
        if abs(value) == float("inf"):
            raise ArithmeticError(f"{function}{arguments} is not a float64")
        case = {"function": function, "args": arguments, "value": value, "rel_tol": TOLERANCE}
        lines.append("  " + json.dumps(case))
    REFERENCE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{REFERENCE.name}: {len(lines)} values of {len(FUNCTIONS)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
