"""What is measured is met: target entropies, tables, the polynomial's range."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acutance import scaling, theory
from acutance.scaling import AdaptivePoly, EntropyTarget, HeadTable, fit_entropy, newton_step


def rows(scores: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean entropy and varentropy of rows (..., n) at scales (...)."""
    log_p = torch.log_softmax(scale[..., None, None] * scores, -1)
    p = log_p.exp()
    H = -(p * log_p).sum(-1, keepdim=True)
    return H[..., 0].mean(-1), (p * (log_p + H).square()).sum(-1).mean(-1)


@pytest.fixture(scope="module")
def gaussian() -> Tensor:
    return torch.randn(8, 4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("target", [8.0, 7.0, 5.0, 2.0, 0.5])
@pytest.mark.parametrize("start", [0.01, 1.0, 30.0])
def test_the_entropy_that_was_asked_for_is_met(
    gaussian: Tensor, target: float, start: float
) -> None:
    scale = fit_entropy(lambda x: rows(gaussian, x), target, start=start, steps=30, tolerance=1e-6)
    assert rows(gaussian, scale)[0].item() == pytest.approx(target, abs=1e-6)


def test_four_measurements_are_enough_from_nearby(gaussian: Tensor) -> None:
    """From the scale for 6 nats to that for 5: as from one length to the next."""
    start = fit_entropy(lambda x: rows(gaussian, x), 6.0)
    calls = 0

    def measure(scale: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return rows(gaussian, scale)

    scale = fit_entropy(measure, 5.0, start=start)
    assert calls <= 4
    assert rows(gaussian, scale)[0].item() == pytest.approx(5.0, abs=1e-3)


def test_heads_are_fitted_apart() -> None:
    scores = torch.stack([torch.linspace(-1, 1, 200), torch.linspace(-9, 3, 200)])[:, None].double()
    target = torch.tensor([4.0, 3.0])
    scale = fit_entropy(lambda x: rows(scores, x), target, tolerance=1e-5)
    assert scale.shape == (2,)
    torch.testing.assert_close(rows(scores, scale)[0], target.double(), atol=1e-5, rtol=0)
    # scores 2 wide need six times the scale of scores 12 wide
    same = fit_entropy(lambda x: rows(scores, x), torch.tensor([3.0, 3.0]), tolerance=1e-9)
    assert (same[0] / same[1]).item() == pytest.approx(6.0, rel=1e-6)


@pytest.mark.parametrize("start", [0.1, 1.0, 1e6])
def test_a_plateau_of_the_entropy_is_crossed(start: float) -> None:
    """Two near ties above a bulk: H stays at log 2 over decades, where its slope is no guide."""
    scores = torch.full((1, 1000), -5.0, dtype=torch.float64)
    scores[0, :2] = torch.tensor([0.0, -1e-3])
    for target in (3.0, 0.5, 0.1):
        scale = fit_entropy(lambda x: rows(scores, x), target, start=start, steps=60)
        assert rows(scores, scale)[0].item() == pytest.approx(target, abs=1e-3)


def test_a_target_out_of_reach_is_said() -> None:
    """Two tied maxima: H never falls below log 2."""
    scores = torch.tensor([[1.0, 1.0, 0.0]]).double()
    with pytest.warns(UserWarning, match="after 6 measurements the entropy was still"):
        fit_entropy(lambda x: rows(scores, x), 0.1, steps=6)


def test_equal_scores_teach_nothing_and_break_nothing() -> None:
    with pytest.warns(UserWarning, match="choose a reachable"):
        scale = fit_entropy(lambda x: rows(torch.zeros(1, 9).double(), x), 1.0, start=2.0)
    assert scale.item() == 2.0


def test_a_newton_step_is_exact_for_gaussian_logits() -> None:
    for scale in (0.3, 1.0, 2.0):
        H, V = math.log(10**6) - scale**2 / 2, scale**2
        moved = newton_step(*torch.tensor([scale, H, V, 10.0], dtype=torch.float64))
        assert moved.item() == pytest.approx(math.sqrt(2 * (math.log(10**6) - 10)), rel=1e-12)


def test_a_newton_step_has_the_slope_of_the_entropy() -> None:
    """First order: the step in log λ is (H − target) / V."""
    scores = torch.randn(1, 50, dtype=torch.float64)
    scale = torch.tensor(1.3, dtype=torch.float64)
    H, V = rows(scores, scale)
    h = 1e-5
    slope = (rows(scores, scale * math.exp(h))[0] - rows(scores, scale * math.exp(-h))[0]) / (2 * h)
    assert slope.item() == pytest.approx(-V.item(), rel=1e-6)
    step = (newton_step(scale, H, V, H - 1e-6) / scale).log() / 1e-6
    assert step.item() == pytest.approx(1 / V.item(), rel=1e-4)


def test_a_fitted_law_keeps_the_entropy_between_and_beyond_its_lengths() -> None:
    """Against theory: Gaussian logits of deviation 1 at 512 keys, by their exact mean entropy."""

    def measure(n: int, scale: Tensor) -> tuple[float, float]:
        x, h = scale.item(), 1e-4
        entropy = [float(theory.expected_entropy(n, x * math.exp(d))) for d in (-h, 0.0, h)]
        return entropy[1], (entropy[0] - entropy[2]) / (2 * h)

    target = float(theory.expected_entropy(512, 1.0))
    law = EntropyTarget.fit(measure, target=target, lengths=[512, 2048, 8192, 65536])
    assert law.target == target
    factors = law.factor(torch.tensor([512, 2048, 8192, 65536])).tolist()
    assert factors == pytest.approx([1.0, 1.9664, 2.6235, 3.4148], abs=2e-3)
    # A chord of f = √(1 + 2 log(n/512)) is off by at most h²/8 · |f''|, and dH/dγ is −γ at most:
    # 0.24·1.5, 0.033·2.3, 0.032·3.0; beyond the last length 0.078·3.7.
    for n, error in ((1024, 0.36), (4096, 0.075), (20000, 0.096), (262144, 0.29)):
        found = float(theory.expected_entropy(n, law.factor(n).item()))
        assert found == pytest.approx(target, abs=error)
        # the base-512 logarithm leaves more: 0.58 nat more at 1024, and ever more
        unscaled = float(theory.expected_entropy(n, math.log(n, 512)))
        assert abs(found - target) < abs(unscaled - target)


def test_fit_takes_heads_and_refuses_what_cannot_be() -> None:
    def measure(n: int, scale: Tensor) -> tuple[Tensor, Tensor]:
        width = torch.tensor([1.0, 2.0], dtype=torch.float64) * scale
        return math.log(n) - width**2 / 2, width**2

    law = EntropyTarget.fit(measure, target=[5.0, 5.0], lengths=[512, 4096])
    got = law.factor(torch.tensor([512, 4096]))
    assert got.shape == (2, 2)
    torch.testing.assert_close(got[0], 2 * got[1])
    with pytest.raises(
        ValueError, match=r"target must be below log n at every length, got 6\.5 nats"
    ):
        EntropyTarget.fit(measure, target=6.5, lengths=[512])


@given(
    st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6),
    st.integers(1, 10**6),
)
def test_a_table_is_linear_in_log_n(factors: list[float], n: int) -> None:
    lengths = [16 * 4**i for i in range(len(factors))]
    knots = np.log(lengths)
    got = HeadTable([factors], lengths).factor(n, dtype=torch.float64).item()
    x = math.log(n)
    if n <= lengths[-1]:
        want = float(np.interp(x, knots, factors))
    else:
        slope = (factors[-1] - factors[-2]) / (knots[-1] - knots[-2])
        want = max(0.0, factors[-1] + slope * (x - knots[-1]))
    assert got == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_tables_broadcast_like_per_head_parameters() -> None:
    table = HeadTable([[1.0, 2.0], [3.0, 4.0]], lengths=[10, 100])
    n = torch.tensor([[[10, 100, 1000]], [[1, 31, 31]]])
    got = table.factor(n)
    assert got.shape == (2, 2, 3)
    torch.testing.assert_close(got[0], torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]))
    flat = HeadTable([1.0, 3.0]).factor(n)
    assert flat.shape == (2, 2, 3)
    assert flat[0, 1].tolist() == [3.0, 3.0, 3.0]
    shared = EntropyTarget([10, 100], [1.0, 2.0]).factor(n)
    assert shared.shape == n.shape


def test_the_polynomial_acts_between_its_roots_only() -> None:
    law = AdaptivePoly()
    H = torch.tensor([0.2, 0.5, 0.84, 0.86, 1.0, 3.0, 5.9], dtype=torch.float64)
    want = np.maximum(np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], H.numpy()), 1.0)
    want[:2] = 1.0
    got = law.factor(torch.tensor([1000]), entropy=H, dtype=torch.float64)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-14)
    assert (got[:3] == 1).all()
    assert (got[3:] > 1).all()
    assert law.upper_limit == pytest.approx(5.9445, abs=1e-4)
    assert math.exp(law.upper_limit) == pytest.approx(381.7, abs=0.1)


def test_rows_beyond_the_polynomials_range_stay_and_are_counted() -> None:
    entropy = torch.tensor([[[6.0, 7.0, 5.0]]])
    with pytest.warns(UserWarning, match="no effect above 5.94 nats: 2 of 3 rows are above"):
        got = AdaptivePoly().factor(torch.tensor([[[4096] * 3]]), entropy=entropy)
    assert got[0, 0, :2].tolist() == [1.0, 1.0]
    assert got[0, 0, 2] > 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdaptivePoly().factor(torch.tensor([4096]), entropy=torch.tensor([5.0]))


def test_the_polynomial_sharpens_a_row_it_reaches() -> None:
    scores = torch.randn(1, 100, dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    H = rows(scores, one)[0]
    factor = AdaptivePoly().factor(100, entropy=H, dtype=torch.float64)
    assert rows(scores, factor)[0] < H - 1


def test_a_polynomial_that_ends_above_one_has_no_limit() -> None:
    assert AdaptivePoly(coefficients=(1.0, 0.0)).upper_limit == math.inf
    assert AdaptivePoly(coefficients=(0.5,)).upper_limit == 0.5  # never above 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HeadTable([]), ValueError, "factors must have one entry for each head, got none"),
        (lambda: HeadTable([1.0, 0.0]), ValueError, "factors must be finite above 0, got 0.0"),
        (
            lambda: HeadTable([[1.0]]),
            ValueError,
            r"factors must have shape \(Hq,\) without lengths",
        ),
        (lambda: HeadTable([1.0, [2.0]]), ValueError, "got a mixture of numbers and rows"),
        (lambda: HeadTable(3.0), TypeError, "factors must be numbers, one for each head"),
        (lambda: HeadTable([1.0], [512]), ValueError, "one factor for each of the 1 lengths"),
        (lambda: HeadTable([[1.0, 2.0]], [512]), ValueError, r"of the 1 lengths, got \[2\]"),
        (
            lambda: HeadTable([[1.0, 2.0]], [9, 9]),
            ValueError,
            r"lengths must be ascending .* got \[9, 9\]",
        ),
        (
            lambda: HeadTable(torch.ones(1, 1, 1)),
            ValueError,
            r"factors must have shape \(Hq,\) or \(Hq, P\)",
        ),
        (lambda: EntropyTarget([], []), ValueError, "lengths must be ascending and not empty"),
        (lambda: EntropyTarget([9], [1.0, 2.0]), ValueError, "of the 1 lengths, got"),
        (lambda: AdaptivePoly(2.0), TypeError, "numbers from the highest power down, got 2.0"),
        (lambda: AdaptivePoly().factor(9), ValueError, "adaptive_poly needs the measured entropy"),
        (
            lambda: fit_entropy(lambda x: (x, x), 1.0, start=0.0),
            ValueError,
            "start must be positive",
        ),
        (
            lambda: fit_entropy(lambda x: (x, x), 1.0, steps=0),
            ValueError,
            "steps must be at least 1",
        ),
    ],
)
def test_bad_parameters_are_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()


def test_needs_entropy_is_said_by_the_class() -> None:
    assert [kind.name for kind in scaling.SCALINGS.values() if kind.needs_entropy] == [
        "adaptive_poly"
    ]
