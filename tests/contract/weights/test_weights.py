"""Every weighting against its formula, written out in float64, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import expit
from torch import Tensor

import acutance
from acutance import weights as w

ROWS = (2, 3, 5, 7)  # batch, heads, rows, keys


def simplex(z: Tensor, alpha: float) -> Tensor:
    """α-entmax of one row by bisection on its threshold, slowly."""
    z = (alpha - 1) * z
    low, high = float(z.max()) - 1, float(z.max())
    for _ in range(200):
        middle = (low + high) / 2
        total = (z - middle).clamp(min=0).pow(1 / (alpha - 1)).sum()
        low, high = (middle, high) if total > 1 else (low, middle)
    return (z - low).clamp(min=0).pow(1 / (alpha - 1))


def softmax(z: Tensor, extra: float = 0.0) -> Tensor:
    e = [math.exp(x) for x in z.tolist()]
    return torch.tensor([x / (sum(e) + extra) for x in e], dtype=z.dtype)


def topk(z: Tensor, k: int) -> Tensor:
    kept = sorted(range(len(z)), key=lambda j: (-float(z[j]), j))[:k]
    total = sum(math.exp(z[j]) for j in kept)
    row = [math.exp(z[j]) / total if j in kept else 0.0 for j in range(len(z))]
    return torch.tensor(row, dtype=z.dtype)


SINKS = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
BIAS = torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64)
#: weighting, and its formula for one row of visible scores of one head
CASES = {
    "softmax": (w.Softmax(), lambda z, h: softmax(z)),
    "softmax warm": (w.Softmax(temperature=2.5), lambda z, h: softmax(z / 2.5)),
    "softmax_one": (w.SoftmaxOne(), lambda z, h: softmax(z, 1.0)),
    "sink": (w.Sink(SINKS), lambda z, h: softmax(z, math.exp(SINKS[h]))),
    "topk_softmax": (w.TopKSoftmax(3), lambda z, h: topk(z, 3)),
    "topk all": (w.TopKSoftmax(99), lambda z, h: softmax(z)),
    "exp": (w.Exp(), lambda z, h: z.exp()),
    "exp l2": (w.Exp(normalize="l2"), lambda z, h: z.exp() / (2 * z).exp().sum().sqrt()),
    "sigmoid": (w.Sigmoid(), lambda z, h: torch.tensor(expit(z.numpy() - math.log(len(z))))),
    "sigmoid -2": (w.Sigmoid(bias=-2.0), lambda z, h: torch.tensor(expit(z.numpy() - 2))),
    "sigmoid head": (w.Sigmoid(bias=BIAS), lambda z, h: 1 / (1 + (-z - BIAS[h]).exp())),
    "relu": (w.ReLU(), lambda z, h: z.clamp(min=0) / len(z)),
    "relu sum": (w.ReLU(normalize="sum"), lambda z, h: z.clamp(min=0) / z.clamp(min=0).sum()),
    "relu2": (w.ReLU2(), lambda z, h: z.clamp(min=0) ** 2 / len(z)),
    "relu2 sum": (
        w.ReLU2(normalize="sum"),
        lambda z, h: z.clamp(min=0) ** 2 / (z.clamp(min=0) ** 2).sum(),
    ),
    "relu2 none": (w.ReLU2(normalize="none"), lambda z, h: z.clamp(min=0) ** 2),
    "power": (w.Power(k=3.0), lambda z, h: z.abs() ** 3 / (z.abs() ** 3).sum()),
    "identity": (w.Identity(), lambda z, h: z / len(z)),
    "identity none": (w.Identity(normalize="none"), lambda z, h: z),
    "l1": (w.L1(), lambda z, h: z / z.abs().sum()),
    "l2": (w.L2(), lambda z, h: z / (z * z).sum().sqrt()),
    "sparsemax": (w.Sparsemax(), lambda z, h: simplex(z, 2.0)),
    "entmax15": (w.Entmax15(), lambda z, h: simplex(z, 1.5)),
    "entmax 1.3": (w.Entmax(alpha=1.3), lambda z, h: simplex(z, 1.3)),
}


def scores(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 1.5


def visible(seed: int) -> Tensor:
    """Random keys, but always one that is positive for relu to have a sum, and one empty row."""
    seen = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) < 0.6
    seen[scores(0) == scores(0).amax(-1, keepdim=True)] = True
    seen[0, 0, 0] = False
    return seen


def test_every_weighting_has_a_formula_here() -> None:
    assert {type(weighting) for weighting, _ in CASES.values()} == set(w.WEIGHTS.values())
    assert len(w.WEIGHTS) == 15
    assert all(kind.name == name and kind.source for name, kind in w.WEIGHTS.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hides", [False, True], ids=["all", "masked"])
def test_weights_follow_the_formula(case: str, hides: bool) -> None:
    weighting, formula = CASES[case]
    s, seen = scores(0), visible(1) if hides else None
    got = weighting(s, seen)
    assert got.shape == s.shape
    compared = 0
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in ROWS[:3])).tolist():
        keys = torch.arange(ROWS[3]) if seen is None else seen[b, h, i].nonzero().squeeze(1)
        want = torch.zeros(ROWS[3], dtype=s.dtype)
        if len(keys):
            want[keys] = formula(s[b, h, i, keys], h).to(s.dtype)
        torch.testing.assert_close(got[b, h, i], want, rtol=1e-9, atol=1e-9)
        compared += 1
    assert compared == 30


@pytest.mark.parametrize("case", CASES)
def test_what_is_hidden_changes_nothing(case: str) -> None:
    weighting, seen = CASES[case][0], visible(1)
    s = scores(0)
    poisoned = torch.where(seen, s, torch.nan)
    poisoned[1, 1, 1] = torch.where(seen[1, 1, 1], s[1, 1, 1], torch.inf)
    poisoned.requires_grad_()
    got = weighting(poisoned, seen)
    assert torch.equal(got, weighting(s, seen))
    (grad,) = torch.autograd.grad(got.square().sum(), poisoned)
    assert grad.isfinite().all()
    assert (grad[~seen] == 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(2, 3, 5, 0), (2, 3, 0, 7)], ids=["no keys", "no rows"])
def test_rows_of_no_keys_have_no_weights(case: str, shape: tuple[int, ...]) -> None:
    s = torch.zeros(shape, requires_grad=True)
    seen = torch.ones(shape, dtype=torch.bool)
    for weights in (CASES[case][0](s), CASES[case][0](s, seen)):
        assert weights.shape == s.shape
        assert torch.autograd.grad(weights.sum(), s)[0].shape == s.shape


@pytest.mark.parametrize("case", CASES)
def test_attention_to_no_keys_is_zero_and_its_metrics_are_nan(case: str) -> None:
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    for k, mask in ((key[:, :, :0], None), (key, hidden)):
        out, stats = acutance.attention(
            query, k, k, weights=CASES[case][0], key_mask=mask, return_stats=True
        )
        assert torch.equal(out, torch.zeros(2, 3, 5, 4))
        assert (stats.n_keys == 0).all()
        for name in ("entropy", "effective_keys", "collision", "top_weight", "first_weight"):
            assert stats[name].isnan().all()


@pytest.mark.parametrize("case", [name for name in CASES if "max" not in name or "soft" in name])
def test_gradients(case: str) -> None:
    weighting, seen = CASES[case][0], visible(1)
    s = scores(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: weighting(s, seen), s, fast_mode=True)


@pytest.mark.parametrize("case", ["sparsemax", "entmax15", "entmax 1.3"])
def test_gradients_of_the_solvers(case: str) -> None:
    """By differences of the slow bisection, away from where a key enters the support."""
    weighting, formula = CASES[case]
    z = torch.tensor([0.9, 0.4, 0.1, -3.0], dtype=torch.float64, requires_grad=True)
    direction = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(weighting(z[None])[0] @ direction, z)
    step = 1e-6
    for j in range(4):
        shift = torch.zeros(4, dtype=torch.float64).index_fill_(0, torch.tensor(j), step)
        above, below = (formula(z.detach() + sign * shift, 0) @ direction for sign in (1, -1))
        assert float(grad[j]) == pytest.approx(float(above - below) / (2 * step), abs=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_distribution_says_so(case: str) -> None:
    weighting = CASES[case][0]
    got = weighting(scores(5))
    if weighting.distribution:
        assert (got >= 0).all()
        rest = 1 - got.sum(-1)
        if isinstance(weighting, w.SoftmaxOne | w.Sink):
            assert (rest > 0).all()
        else:
            rest = rest[got.any(-1)]  # relu leaves a row without a positive score empty
            assert len(rest) > 20
            torch.testing.assert_close(rest, torch.zeros_like(rest), rtol=0, atol=1e-9)
    assert bool((got < 0).any()) == weighting.signed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    s = (scores(7) * 300).to(dtype)
    for name, (weighting, _) in CASES.items():
        if name == "exp":
            continue  # e^s is what was asked for
        got = weighting(s)
        assert got.dtype == dtype, name
        assert got.isfinite().all(), name


@pytest.mark.parametrize(("case", "alpha"), [("sparsemax", 2.0), ("entmax15", 1.5)])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_a_support_of_any_size_is_solved(case: str, alpha: float, spread: float) -> None:
    """Solvers sort few keys at first: a nearly flat row of 300 has them all in its support."""
    z = torch.randn(2, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = CASES[case][0](z * spread)
    assert (found > 0).sum(-1).max() > 100 if spread < 1 else (found > 0).sum(-1).max() < 64
    for row, got in zip(z * spread, found, strict=True):
        torch.testing.assert_close(got, simplex(row, alpha), rtol=1e-9, atol=1e-9)


def test_of_equal_scores_the_earlier_stay() -> None:
    got = w.TopKSoftmax(2)(torch.zeros(1, 5))
    assert got.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]
    mixed = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0], [5.0, 1.0, 0.0, 1.0, 1.0]])
    kept = w.TopKSoftmax(3)(mixed) > 0
    assert kept.tolist() == [[True, True, False, True, False], [True, True, False, True, False]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: w.get("sofmax"),
            ValueError,
            r"weights='sofmax' is not one of .*did you mean 'softmax",
        ),
        (lambda: w.get(3), TypeError, "weights must be a name or a Weighting, got int"),
        (lambda: w.get("sink"), ValueError, r"weights='sink' needs a parameter"),
        (
            lambda: w.Softmax(temperature=-1.0),
            ValueError,
            "temperature must be a finite number above 0",
        ),
        (
            lambda: w.Softmax(temperature=math.nan),
            ValueError,
            "temperature must be a finite number",
        ),
        (lambda: w.TopKSoftmax(0), ValueError, "k must be at least 1, got 0"),
        (lambda: w.Power(k=0.0), ValueError, "k must be a finite number above 0, got 0"),
        (lambda: w.Entmax(alpha=1.0), ValueError, "alpha must be a finite number above 1, got 1"),
        (
            lambda: w.ReLU(normalize="l2"),
            ValueError,
            "normalize must be 'n', 'sum' or 'none', got 'l2'",
        ),
        (lambda: w.Identity(normalize="sum"), ValueError, "normalize must be 'n' or 'none'"),
        (lambda: w.Exp(normalize="n"), ValueError, "normalize must be 'none' or 'l2', got 'n'"),
        (
            lambda: w.Sink(torch.zeros(2, 2)),
            ValueError,
            r"sinks must have shape \(Hq,\).*got \(2, 2\)",
        ),
        (lambda: w.Sink([1.0]), TypeError, "sinks must be a Tensor, got list"),
        (lambda: w.Sink(torch.zeros(2))(scores(0)), ValueError, r"sinks \(2,\), scores \(2, 3"),
        (lambda: w.Sigmoid(torch.zeros(2))(scores(0)), ValueError, r"bias \(2,\), scores"),
    ],
)
def test_bad_input_is_named(make, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        make()


def test_without_entmax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "entmax", None)
    with pytest.raises(ImportError, match=r'pip install "entmax<2'):
        w.Sparsemax()(torch.zeros(1, 2))
