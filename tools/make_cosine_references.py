r"""Make tests/contract/theory/reference_cosine.json, values of a cosine row.

Run it from the repository's root:

    python tools/make_cosine_references.py

It evaluates the definitions of ``acutance.theory.cosine``, ``von_mises_fisher`` and ``retrieval``
and of the scales of ``acutance.theory`` in 60 digits with mpmath, none of them rearranged for
stability, and the inverses by bisection: about a minute. mpmath comes with torch, by way of SymPy.
Arguments are the float64 numbers that the tests pass. ``GIVEN`` are values computed elsewhere; the
script fails if its own differ from them, and writes them along with the others.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import mpmath as mp
from mpmath import mpf

REFERENCE = Path("tests/contract/theory/reference_cosine.json")
DIGITS = 60

GIVEN: list[tuple[str, dict[str, Any], float, float]] = [
    ("information_range_limit", {"tau": 1.0}, 0.47447464707052694, 1e-12),
    ("information_range_limit", {"tau": 0.1}, 16.004267765607928, 1e-12),
    ("information_range_limit", {"tau": 0.01}, 193.70168263345195, 1e-12),
    ("information_range_limit", {"tau": 1000.0}, 4.999999722222247e-07, 1e-12),
    ("cosine_entropy_lower_bound", {"n": 2, "tau": 1.0}, 0.3653338550872076, 1e-12),
    ("cosine_entropy_lower_bound", {"n": 16, "tau": 1.0}, 2.299438875386786, 1e-12),
    ("cosine_entropy_lower_bound", {"n": 65536, "tau": 1.0}, 10.61588024209988, 1e-12),
    ("cosine_entropy_lower_bound", {"n": 16, "tau": 0.1}, 6.49263371472613e-07, 1e-12),
    ("cosine_entropy_lower_bound", {"n": 65536, "tau": 0.1}, 0.0028362577629761285, 1e-12),
    ("cosine_entropy_lower_bound", {"n": 65536, "tau": 0.01}, 1.8229425434818186e-80, 1e-12),
    ("cosine_best_count", {"n": 5, "tau": 1.0}, 1.0, 0.0),
    ("cosine_best_count", {"n": 256, "tau": 1.0}, 53.0, 0.0),
    ("cosine_best_count", {"n": 65536, "tau": 0.2}, 27.0, 0.0),
    ("tau_for_information", {"n": 16, "fraction": 0.5}, 0.5547787337419536, 1e-10),
    ("tau_for_information", {"n": 16, "fraction": 0.99}, 0.23400297663289277, 1e-10),
    ("tau_for_information", {"n": 256, "fraction": 0.9}, 0.24086598760663191, 1e-10),
    ("tau_for_information", {"n": 4096, "fraction": 0.5}, 0.2810391054219646, 1e-10),
    ("tau_for_information", {"n": 4096, "fraction": 0.99}, 0.14846848584922973, 1e-10),
    ("tau_for_information", {"n": 65536, "fraction": 0.9}, 0.14715434509503125, 1e-10),
    ("vmf_entropy_drop", {"d": 2, "kappa": 1.0}, 0.21047560738935586, 1e-11),
    ("vmf_entropy_drop", {"d": 16, "kappa": 6.0}, 0.9555246773173228, 1e-11),
    ("vmf_entropy_drop", {"d": 64, "kappa": 64.0}, 15.47340016023409, 1e-11),
    ("vmf_entropy_drop", {"d": 768, "kappa": 30.0}, 0.5846043731773474, 1e-11),
    ("vmf_entropy_drop", {"d": 8, "kappa": 300.0}, 13.54021561448136, 1e-11),
    ("needle_scale", {"n": 256, "gap": 1.0, "sigma": 0.0, "mass": 0.5}, 5.541263545158426, 1e-12),
    ("needle_scale", {"n": 4096, "gap": 8.0, "sigma": 1.0, "mass": 0.9}, 1.4448106928363067, 1e-12),
    ("gauss_invariant_scale", {"n": 2048, "n0": 512, "gamma0": 1.0}, 1.9423152993887942, 1e-12),
    ("gauss_hazard_scale", {"n": 64}, 2.51018498917847, 1e-12),
]


def limit(tau: float, width: float = 2.0) -> mpf:
    """D(A) as it is defined."""
    span = mpf(width) / mpf(tau)
    b = span / (1 - mp.exp(-span))
    return b - 1 - mp.log(b)


def entropy(n: int, count: int, span: mpf) -> mpf:
    """Entropy of ``count`` keys ``span`` above the others, in more digits when those are light."""
    with mp.workdps(DIGITS + min(int(span), 800)):
        rest = (n - count) * mp.exp(-span)
        return mp.log(count + rest) + span * rest / (count + rest)


def best_count(n: int, span: mpf) -> int:
    """The best of all counts up to 64 keys, else of the seven around the limit's."""
    near = int(n * (span / (1 - mp.exp(-span)) - 1) / mp.expm1(span))
    counts = range(1, n) if n <= 64 else range(max(1, near - 3), min(n - 1, near + 3) + 1)
    return min(counts, key=lambda count: entropy(n, count, span))


def cosine_best_count(n: float, tau: float, width: float = 2.0) -> mpf:
    """The count alone."""
    return mpf(best_count(int(n), mpf(width) / mpf(tau)))


def lower_bound(n: float, tau: float, width: float = 2.0) -> mpf:
    """Least entropy over the counts."""
    span = mpf(width) / mpf(tau)
    return entropy(int(n), best_count(int(n), span), span)


def bisect(rising: Any, low: float, high: float) -> mpf:
    """Zero of a rising function of the logarithm of x, for x between 10^low and 10^high."""
    a, b = low * mp.log(10), high * mp.log(10)
    for _ in range(130):
        middle = (a + b) / 2
        a, b = (a, middle) if rising(mp.exp(middle)) > 0 else (middle, b)
    return mp.exp((a + b) / 2)


def tau_for_information(
    n: float, fraction: float, setting: str = "free", d: float | None = None
) -> mpf:
    """Bisection on the entropy; random keys in the phase where their average holds."""
    keys, wanted = int(n), (1 - mpf(fraction)) * mp.log(n)

    def free(span: mpf) -> mpf:
        return wanted - entropy(keys, best_count(keys, span), span)

    def simplex(span: mpf) -> mpf:
        return wanted - entropy(keys, 1, span)

    def random_keys(kappa: mpf) -> mpf:
        log_f, product_ = bessel(d, kappa)
        if product_ - log_f > mp.log(keys - 1):
            return mpf(1)  # beyond the average: excluded by the choice of cases
        rest = (keys - 1) * mp.exp(log_f)
        total = mp.exp(kappa) + rest
        return wanted - (mp.log(total) - (mp.exp(kappa) * kappa + rest * product_) / total)

    if setting == "free":
        return 2 / bisect(free, -9, 3)
    if setting == "simplex":
        return mpf(keys) / (keys - 1) / bisect(simplex, -9, 3)
    return 1 / bisect(random_keys, -9, 3)


def bessel(d: float, kappa: Any) -> tuple[mpf, mpf]:
    """Log 0F1(; d/2; κ²/4) and κ A_d(κ), by the positive series outwards from its largest term."""
    half, quarter = mpf(d) / 2, mpf(kappa) ** 2 / 4
    top = int((mp.sqrt(half**2 + 4 * quarter) - half) / 2)
    small = mpf(10) ** -DIGITS
    total = moment = mpf(0)
    term, k = mpf(1), top
    while term > small * total or k < 2:
        total, moment, k = total + term, moment + 2 * k * term, k + 1
        term *= quarter / (k * (half + k - 1))
    term, k = mpf(1), top
    while k > 0 and term > small * total:
        term, k = term * k * (half + k - 1) / quarter, k - 1
        total, moment = total + term, moment + 2 * k * term
    largest = mpf(0)
    if top:
        largest = top * mp.log(quarter) - mp.loggamma(top + 1)
        largest += mp.loggamma(half) - mp.loggamma(half + top)
    return largest + mp.log(total), moment / total


def vmf_entropy_drop(d: float, kappa: float) -> mpf:
    """Relative entropy of the von Mises-Fisher law to the uniform one."""
    log_f, product_ = bessel(d, kappa)
    return product_ - log_f


def odds(n: float, mass: float) -> mpf:
    """log(n - 1) + logit mass."""
    return mp.log(mpf(n) - 1) + mp.log(mpf(mass)) - mp.log(1 - mpf(mass))


def match_dimension(n: float, mass: float = 0.5) -> mpf:
    """Twice the log-odds."""
    return 2 * odds(n, mass)


def retrieval_capacity(d: float, mass: float = 0.5) -> mpf:
    """The n at which the mass is the one asked for."""
    return 1 + mp.exp(mp.sqrt(mpf(d)) - mpf("0.5") - mp.log(mpf(mass)) + mp.log(1 - mpf(mass)))


def needle_scale(n: float, gap: float, sigma: float = 0.0, mass: float = 0.5) -> mpf:
    """Smaller root of gap λ - sigma² λ² / 2 = c."""
    c, top, variance = odds(n, mass), mpf(gap), mpf(sigma) ** 2
    return c / top if variance == 0 else (top - mp.sqrt(top**2 - 2 * variance * c)) / variance


def gauss_invariant_scale(n: float, n0: float, gamma0: float = 1.0) -> mpf:
    """As it is written."""
    return mp.sqrt(mpf(gamma0) ** 2 + 2 * mp.log(mpf(n) / mpf(n0)))


def gauss_hazard_scale(n: float) -> mpf:
    """Density over tail, at the point above which 1/n lies."""
    b = mp.findroot(
        lambda x: mp.log(mp.erfc(x / mp.sqrt(2)) / 2) + mp.log(mpf(n)),
        mp.sqrt(2 * mp.log(mpf(n))) - mpf("0.3"),
    )
    return mp.npdf(b) * mpf(n)


def cosine_hazard_scale(family: str, n: float, d: float) -> mpf:
    """Hazard n f(b_n) for cosines in R^d, d odd, where density and tail are polynomials."""
    if family != "cosine" or d % 2 == 0:
        raise ValueError(f"written for odd d, got d={d}")
    power = (int(d) - 3) // 2
    ordinary = [mp.binomial(power, k) * (-1) ** k for k in range(power + 1)]
    norm = mp.gamma(mpf(d) / 2) / (mp.sqrt(mp.pi) * mp.gamma((mpf(d) - 1) / 2))

    def tail(x: mpf) -> mpf:
        return norm * sum(c * (1 - x ** (2 * k + 1)) / (2 * k + 1) for k, c in enumerate(ordinary))

    low, high = mpf(-1), mpf(1)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > 1 / mpf(n) else (low, middle)
    return n * norm * (1 - low**2) ** power


FUNCTIONS = {
    "information_range_limit": limit,
    "cosine_entropy_lower_bound": lower_bound,
    "cosine_best_count": cosine_best_count,
    "tau_for_information": tau_for_information,
    "vmf_entropy_drop": vmf_entropy_drop,
    "match_dimension": match_dimension,
    "retrieval_capacity": retrieval_capacity,
    "needle_scale": needle_scale,
    "gauss_invariant_scale": gauss_invariant_scale,
    "gauss_hazard_scale": gauss_hazard_scale,
    "hazard_scale": cosine_hazard_scale,
}


def cases() -> list[tuple[str, dict[str, Any], float]]:
    """Function, arguments and relative tolerance of every further value."""
    temperatures = [1e-6, 1e-3, 0.02, 0.07, 0.3, 1.0, 1.9, 2.0, 2.1, 3.7, 40.0, 1e3, 1e6]
    counts = [2, 3, 5, 16, 17, 64, 1000, 65537, 10**7, 10**12]
    found: list[tuple[str, dict[str, Any], float]] = []

    def add(function: str, tolerance: float, **arguments: Any) -> None:
        found.append((function, arguments, tolerance))

    for tau in temperatures:
        add("information_range_limit", 1e-12, tau=tau)
    add("information_range_limit", 1e-12, tau=0.3, width=1.25)
    for n, tau in product(counts, temperatures):
        add("cosine_entropy_lower_bound", 1e-12, n=n, tau=tau)
        add("cosine_best_count", 0.0, n=n, tau=tau)
    for n, tau, width in [(16, 0.1, 16 / 15), (10**12, 0.03, 0.5), (65537, 2.0, 1e-3)]:
        add("cosine_entropy_lower_bound", 1e-12, n=n, tau=tau, width=width)
        add("cosine_best_count", 0.0, n=n, tau=tau, width=width)
    for n in (17, 65537):  # where k and k + 1 differ by less than float64 can see
        add("cosine_best_count", 0.0, n=n, tau=1e15)
    for n, fraction in product([2, 3, 16, 4096, 10**12], [1e-12, 0.01, 0.5, 0.9, 0.999, 1 - 1e-12]):
        add("tau_for_information", 1e-12, n=n, fraction=fraction)
        add("tau_for_information", 1e-12, n=n, fraction=fraction, setting="simplex")
    for n, fraction, d in [
        (65536, 0.9, 128), (65536, 1e-9, 128), (4096, 0.5, 64), (10**12, 0.3, 768),
        (10**12, 0.99, 10**6), (3, 0.2, 2),
    ]:  # fmt: skip
        add("tau_for_information", 1e-12, n=n, fraction=fraction, setting="random_keys", d=d)
    dimensions = [2, 3, 16, 61, 62, 64, 65, 128, 768, 10**4, 10**6]
    scales = [0.0, 1e-8, 0.01, 1.0, 19.0, 29.0, 31.0, 100.0, 465.0, 480.0, 3e3, 1e5, 1e7]
    for d, kappa in product(dimensions, scales):
        add("vmf_entropy_drop", 1e-12, d=d, kappa=kappa)
    for d in (2, 65, 10**6):
        add("vmf_entropy_drop", 1e-12, d=d, kappa=1e8)
    for n, mass in product([2, 512, 10**12], [0.5, 0.9, 1 - 1e-9]):
        add("match_dimension", 1e-12, n=n, mass=mass)
    add("match_dimension", 1e-12, n=4096, mass=0.001)
    for d, mass in product([2, 64, 256, 10**5], [1e-9, 0.5, 0.99]):
        add("retrieval_capacity", 1e-12, d=d, mass=mass)
    for n, gap, sigma, mass in [
        (2, 1.0, 0.0, 0.5), (2, 1.0, 0.3, 0.75), (10**12, 1.0, 0.125, 0.5),
        (10**12, 1e-6, 0.0, 0.99), (4096, 8.0, 1e-9, 0.9), (4096, 4.08, 1.0, 0.5),
        (65536, 1.0, 0.05, 1 - 1e-12), (1000, 2.0, 0.1, 0.0011),
    ]:  # fmt: skip
        add("needle_scale", 1e-12, n=n, gap=gap, sigma=sigma, mass=mass)
    for n, n0, gamma0 in [
        (512, 512, 1.0), (513, 512, 0.0), (10**12, 512, 1.0), (10**12, 2, 1e6), (400, 512, 1.0),
        (10**12 + 1, 10**12, 1e-5), (2, 10**12, 10.0),
    ]:  # fmt: skip
        add("gauss_invariant_scale", 1e-12, n=n, n0=n0, gamma0=gamma0)
    for n in (2, 3, 16, 4096, 65536, 10**7, 10**12, 1e100, 1e300):
        add("gauss_hazard_scale", 1e-12, n=n)
    for n, d in product([2, 64, 10**6, 10**12], [3, 9, 65]):
        add("hazard_scale", 1e-11, family="cosine", n=n, d=d)
    return found


def main() -> int:
    """Compute, compare with the given values, write."""
    mp.mp.dps = DIGITS
    wrong, records = 0, []
    for function, arguments, value, tolerance in GIVEN:
        own = FUNCTIONS[function](**arguments)
        if abs(own - mpf(value)) > max(tolerance, 4e-16) * abs(own):
            print(f"{function}{arguments}: given {value!r}, found {float(own)!r}")
            wrong += 1
        records.append((function, arguments, value, tolerance))
    for function, arguments, tolerance in cases():
        records.append((function, arguments, float(FUNCTIONS[function](**arguments)), tolerance))
    lines = [
        json.dumps({"function": function, "args": arguments, "value": value, "rel_tol": tolerance})
        for function, arguments, value, tolerance in records
    ]
    REFERENCE.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{REFERENCE}: {len(records)} values, {wrong} given ones differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
