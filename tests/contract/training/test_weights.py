"""SigmaReparam, ClampedTemperature and initial_scale."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import acutance
from acutance import training
from acutance.nn import MultiheadAttention


def norm(weight: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))


def test_the_weight_has_the_norm_gamma() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 20)
    before = layer.weight.detach().clone()
    training.sigma_reparam(layer)
    layer.eval()
    # thirty power iterations leave a norm that is too small by (σ₂/σ₁)⁶⁰ of a part
    torch.testing.assert_close(layer.weight.detach(), before / norm(before), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        layer.parametrizations.weight[0].gamma.fill_(3.0)
    assert norm(layer.weight) == pytest.approx(3.0, rel=1e-3)
    assert isinstance(layer.parametrizations.weight[0].sigma, torch.Tensor)


def test_its_gradient_is_that_of_the_norm() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    chosen = training.SigmaReparam(weight, gamma=2.0).eval()
    for _ in range(500):
        chosen._iterate(weight.detach()[None])
    upstream = torch.randn(5, 4, dtype=torch.float64)
    mine = torch.autograd.grad((chosen(weight) * upstream).sum(), weight)[0]
    exact = 2.0 * weight / torch.linalg.matrix_norm(weight, 2)
    theirs = torch.autograd.grad((exact * upstream).sum(), weight)[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_the_power_iteration_follows_the_weight_in_training_alone() -> None:
    torch.manual_seed(0)
    layer = training.sigma_reparam(nn.Linear(8, 8))
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(8, 8))
    layer.eval()
    stuck = layer.weight.detach()
    assert torch.equal(layer.weight.detach(), stuck)
    layer.train()
    for _ in range(300):
        layer.weight  # noqa: B018
    assert norm(layer.weight) == pytest.approx(1.0, rel=1e-5)


def test_gamma_of_the_norm_leaves_the_layer_and_removal_restores_it() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 6).double(), torch.randn(3, 6, dtype=torch.float64)
    weight, out = layer.weight.detach().clone(), layer(x)
    training.sigma_reparam(layer, gamma=None)
    layer.eval()
    torch.testing.assert_close(layer(x), out, rtol=1e-12, atol=1e-12)
    training.remove_sigma_reparam(layer, keep=False)
    assert torch.equal(layer.weight, weight)
    assert isinstance(layer.weight, nn.Parameter)
    assert not parametrize.is_parametrized(layer)

    training.sigma_reparam(layer)
    layer.train()
    used = copy.deepcopy(layer).eval().weight.detach()
    training.remove_sigma_reparam(layer)
    assert layer.training
    assert torch.equal(layer.weight.detach(), used)
    assert list(layer.state_dict()) == ["bias", "weight"] or set(layer.state_dict()) == {
        "weight",
        "bias",
    }


def test_packed_projections_have_three_norms_and_a_state() -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(16, 2, batch_first=True)
    training.sigma_reparam(attend, "in_proj_weight")
    x = torch.randn(2, 5, 16)
    out = attend(x, x, x)[0]
    assert [norm(part) for part in attend.in_proj_weight.chunk(3)] == pytest.approx(
        [1.0] * 3, rel=2e-2
    )
    out.square().mean().backward()
    gamma = attend.parametrizations.in_proj_weight[0].gamma
    assert gamma.shape == (3,)
    assert bool((gamma.grad != 0).any())

    other = training.sigma_reparam(nn.MultiheadAttention(16, 2, batch_first=True), "in_proj_weight")
    other.load_state_dict(attend.state_dict())
    assert torch.equal(other.eval()(x, x, x)[0], attend.eval()(x, x, x)[0])


def test_transformers_conv1d_is_cut_along_its_outputs() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer = Conv1D(24, 8)
    training.sigma_reparam(layer, parts=3)
    assert layer.weight.shape == (8, 24)
    for part in layer.eval().weight.chunk(3, 1):
        assert norm(part) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_reparametrized_layer_can_be_narrowed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = training.sigma_reparam(nn.Linear(32, 24)).to(dtype).eval()
    # a rounded entry of W is off by eps/2, the vectors' lengths are put right
    assert norm(layer.weight) == pytest.approx(1.0, abs=4 * torch.finfo(dtype).eps)
    layer.train()
    layer(torch.randn(3, 32, dtype=dtype)).sum().backward()
    gamma = layer.parametrizations.weight[0].gamma
    assert gamma.grad is not None
    assert bool(gamma.grad.isfinite().all())


def test_bad_reparametrizations() -> None:
    layer = nn.Linear(4, 6)
    with pytest.raises(ValueError, match="a nonzero entry in each of its parts"):
        training.SigmaReparam(torch.cat([torch.ones(2, 3), torch.zeros(2, 3)]), parts=2)
    with pytest.raises(ValueError, match="Linear has no weight named 'gain'"):
        training.sigma_reparam(layer, "gain")
    with pytest.raises(ValueError, match="weight must be a floating-point matrix"):
        training.sigma_reparam(layer, "bias")
    with pytest.raises(TypeError, match="weight must be a Tensor, got int"):
        training.SigmaReparam(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"floating-point matrix, got \(2, 2\) of torch.int64"):
        training.SigmaReparam(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="parts must divide 6, got 4"):
        training.sigma_reparam(layer, parts=4)
    with pytest.raises(ValueError, match="gamma must be a finite number above 0"):
        training.sigma_reparam(layer, gamma=0.0)
    with pytest.raises(ValueError, match="is not reparametrized"):
        training.remove_sigma_reparam(layer)
    training.sigma_reparam(layer)
    with pytest.raises(ValueError, match="is already reparametrized"):
        training.sigma_reparam(layer)


def test_the_clamped_temperature_holds_and_is_not_stuck() -> None:
    law = training.ClampedTemperature(2, start=1.0, minimum=0.5, maximum=2.0)
    attend = MultiheadAttention(8, 2, batch_first=True, scaling=law)
    with torch.no_grad():
        law.log_factor.copy_(torch.tensor([3.0, -3.0]))
    factor = law(torch.tensor([10]))
    torch.testing.assert_close(factor.detach(), torch.tensor([[2.0], [0.5]]))
    factor.sum().backward()  # descent lowers both: the first may, the second is at its bound
    torch.testing.assert_close(law.log_factor.grad, torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(torch.tensor(law.record().factors), torch.tensor([2.0, 0.5]))
    x = torch.randn(1, 5, 8)
    attend(x, x, x)
    other = training.ClampedTemperature(2, maximum=2.0, minimum=0.5)
    other.load_state_dict(law.state_dict())
    assert other.record() == law.record()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum": 2.0}, "minimum ≤ start ≤ maximum must hold"),
        ({"maximum": 0.5}, "minimum ≤ start ≤ maximum must hold"),
        ({"minimum": 0.0}, "minimum must be a finite number above 0"),
    ],
)
def test_bad_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.ClampedTemperature(2, **options)


@pytest.mark.parametrize(
    ("d", "n", "target", "unit", "score"),
    [
        (16, 256, 2.0, "nats", "dot"),
        (64, 1024, 4.0, "nats", "dot"),
        (64, 512, 0.5, "fraction", "dot"),
        (64, 512, 3.0, "nats", "cosine"),
    ],
)
def test_initial_rows_have_the_entropy(
    d: int, n: int, target: float, unit: str, score: str
) -> None:
    scale = training.initial_scale(d, n, target, unit=unit, score=score)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(400, 1, 1, d, generator=generator)
    key = torch.randn(400, 1, n, d, generator=generator)
    if score == "cosine":
        query, key = (nn.functional.normalize(part, dim=-1) for part in (query, key))
    entropy = acutance.row_statistics(query, key, scale=scale).entropy.double().flatten()
    want = target * math.log(n) if unit == "fraction" else target
    error = float(entropy.std()) / math.sqrt(len(entropy))
    assert abs(float(entropy.mean()) - want) < 4 * error
    assert 4 * error < 0.1 * want


def test_the_usual_scale_is_found_again() -> None:
    """1/√d leaves log n − ½ nats but for finite n, so asking for that many gives 1/√d."""
    scale = training.initial_scale(256, 10**6, math.log(1e6) - 0.5)
    assert scale * 16 == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((64, 100, math.log(100)), {}, "target must be below log n = 4.60517 nats"),
        ((64, 100, 1.0), {"unit": "fraction"}, "target must be below 1"),
        ((64, 100, 0.0), {}, "target must be a finite number above 0"),
        ((64, 1, 0.5), {}, "n must be at least 2"),
        ((0, 16, 0.5), {}, "d must be at least 1"),
        ((64, 16, 0.5), {"score": "additive"}, "score must be one of dot, cosine"),
        ((64, 16, 0.5), {"unit": "bits"}, "unit must be one of nats, fraction"),
        ((2, 100, 1e-6), {"score": "cosine"}, "target must be larger: .* got 1e-06"),
    ],
)
def test_bad_scales(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.initial_scale(*arguments, **options)
