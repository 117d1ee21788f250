"""Trained scalings give what their records give, and their gradients are right."""

from __future__ import annotations

import math

import pytest
import torch

from acutance import scaling
from acutance.scaling import (
    LearnedASEntmax,
    LearnedScaling,
    LearnedSSMax,
    LearnedTemperature,
    apply_scaling,
)

N = torch.tensor([[[0, 1, 2, 64, 4096]], [[3, 9, 27, 81, 243]]])

MODULES = {
    "ssmax": lambda: LearnedSSMax(3, dtype=torch.float64),
    "ssmax, bias": lambda: LearnedSSMax(3, train_length=64, bias=0.5, dtype=torch.float64),
    "asentmax": lambda: LearnedASEntmax(3, gamma=0.7, dtype=torch.float64),
    "asentmax, falling": lambda: LearnedASEntmax(3, gamma=-0.7, dtype=torch.float64),
    "temperature": lambda: LearnedTemperature(3, start=1.7, dtype=torch.float64),
}


def perturbed(name: str) -> LearnedScaling:
    module = MODULES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(3))
    return module


@pytest.mark.parametrize("name", MODULES)
def test_a_module_and_its_record_agree(name: str) -> None:
    module = perturbed(name)
    record = module.record()
    got = module.factor(N, dtype=torch.float64)
    assert got.shape == (2, 3, 5)
    torch.testing.assert_close(got, record.factor(N, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert scaling.from_dict(record.to_dict()) == record
    assert not torch.equal(got[:, 0], got[:, 1]), "heads differ"


@pytest.mark.parametrize("name", MODULES)
def test_gradients_reach_every_parameter(name: str) -> None:
    module = perturbed(name)
    query = torch.randn(2, 3, 5, 2, dtype=torch.float64, requires_grad=True)
    parameters = dict(module.named_parameters())

    def call(q: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        factor = torch.func.functional_call(module, dict(zip(parameters, values, strict=True)),
                                            (N.double(),))  # fmt: skip
        return q * factor.unsqueeze(-1)

    assert torch.autograd.gradcheck(call, (query, *parameters.values()))
    apply_scaling(query, module, N).sum().backward()
    for parameter in parameters.values():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).all()


def test_training_finds_the_law_that_made_the_data() -> None:
    """Least squares on the entropy of one-against-the-rest rows recovers s of each head."""
    want = scaling.SSMax([0.3, 0.6])
    module = LearnedSSMax(2, s=0.4, dtype=torch.float64)
    n = torch.tensor([8, 64, 512])
    optimiser = torch.optim.LBFGS(module.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (module.factor(n) - want.factor(n)).square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    assert module.record().s == pytest.approx((0.3, 0.6), abs=1e-6)


def test_starts() -> None:
    assert LearnedSSMax(2).record().s == pytest.approx((0.43, 0.43))
    module = LearnedSSMax(2, train_length=777)
    assert module(777).flatten().tolist() == pytest.approx([1.0, 1.0])
    assert LearnedSSMax(2, bias=None).bias is None
    assert dict(LearnedSSMax(2, bias=0.0).named_parameters()).keys() == {"s", "bias"}
    record = LearnedASEntmax(1, delta=2.0, beta=0.25, gamma=-1.0).record()
    assert (record.delta, *record.beta, *record.gamma) == pytest.approx((2.0, 0.25, -1.0))
    assert LearnedTemperature(1, start=math.e).log_factor.item() == pytest.approx(1.0)


def test_half_precision_parameters_do_not_round_n() -> None:
    module = LearnedSSMax(1, s=0.5, dtype=torch.bfloat16)
    assert module.factor(1000).dtype == torch.float32
    assert module.factor(1000).item() == pytest.approx(0.5 * math.log(1000))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LearnedSSMax(0), ValueError, "num_heads must be at least 1, got 0"),
        (
            lambda: LearnedSSMax(1, s=0.1, train_length=9),
            ValueError,
            "pass either s or train_length",
        ),
        (
            lambda: LearnedASEntmax(1, beta=0.0),
            ValueError,
            "beta must be a finite number above 0 and",
        ),
        (
            lambda: LearnedTemperature(1, start=-1.0),
            ValueError,
            "start must be a finite number above 0",
        ),
        (
            lambda: apply_scaling(torch.ones(1, 4, 1, 1), LearnedSSMax(3), torch.tensor([5])),
            ValueError,
            "parameters for 3 heads",
        ),
    ],
)
def test_bad_parameters_are_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()
