"""A diagonal recurrence is its loop; the LRU is its paper's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance.mechanisms import (
    diagonal_recurrence,
    linear_recurrent_unit,
    lru_decays,
    lru_parameters,
    recurrence_statistics,
)
from acutance.mechanisms.recurrent import CHUNK, STRETCH
from acutance.rowstats import WeightStatistics, observe_weights


def loop(x: Tensor, decay: Tensor, state: Tensor | None = None) -> Tensor:
    h = torch.zeros_like(x[..., 0, :] * decay) if state is None else state
    states = []
    for t in range(x.shape[-2]):
        h = decay * h + x[..., t, :]
        states.append(h)
    return torch.stack(states, -2)


def ring(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.polar(
        torch.linspace(0.3, 1.0, n, dtype=dtype), torch.linspace(0, 6, n, dtype=dtype)
    )


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300, 4099])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_the_scan_is_the_loop(length: int, kind: str) -> None:
    x = torch.randn(2, length, 3, dtype=torch.float64)
    decay = ring(3) if kind == "complex" else torch.tensor([1.0, 0.9, 0.01], dtype=torch.float64)
    found = diagonal_recurrence(x, decay)
    assert found.is_complex() == (kind == "complex")
    torch.testing.assert_close(found, loop(x.to(decay.dtype), decay), rtol=1e-11, atol=1e-11)
    half = decay.to(torch.complex64 if decay.is_complex() else torch.float32)
    single = diagonal_recurrence(x.float(), half)
    want = loop(x.float().to(decay.dtype), half.to(decay.dtype))
    size = float(want.abs().max())
    torch.testing.assert_close(single.to(want.dtype), want, rtol=0, atol=1e-5 * size)


def test_pieces_and_steps_go_on_where_they_were() -> None:
    x, decay = torch.randn(3, 100, 4, dtype=torch.float64), ring(4)
    whole = diagonal_recurrence(x, decay)
    state, found = None, []
    for a, b in ((0, 70), (70, 71), (71, 71), (71, 100)):
        h = diagonal_recurrence(x[:, a:b], decay, state)
        state = h[:, -1] if b > a else state
        found.append(h)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_gradients_agree_with_finite_differences_twice(kind: str) -> None:
    dtype = torch.complex128 if kind == "complex" else torch.float64
    x = torch.randn(1, 2 * CHUNK + 3, 2, dtype=dtype, requires_grad=True)
    state = torch.randn(1, 2, dtype=dtype, requires_grad=True)
    decay = 0.8 * ring(2) if kind == "complex" else torch.tensor([0.9, 0.2], dtype=dtype)
    decay = decay.detach().requires_grad_()
    assert torch.autograd.gradcheck(diagonal_recurrence, (x, decay, state))
    assert torch.autograd.gradgradcheck(diagonal_recurrence, (x, decay, state), fast_mode=True)


@pytest.mark.parametrize("outputs", [None, 6])
def test_the_unit_is_its_published_form_forward_and_gradient(outputs: int | None) -> None:
    states = 512
    assert 2 * states * 300 > 4 * STRETCH  # several stretches
    p = lru_parameters(states, 3, outputs, r_min=0.4, r_max=0.99, dtype=torch.float64)
    leaves = [part.requires_grad_() for part in p]
    u = torch.randn(2, 300, 3, dtype=torch.float64, requires_grad=True)
    y, state = linear_recurrent_unit(u, p)

    lam = torch.exp(-torch.exp(p.nu_log) + 1j * torch.exp(p.theta_log))
    B = torch.exp(p.gamma_log)[:, None] * p.B
    h = loop(torch.einsum("nh,bth->btn", B, u.to(B.dtype)), lam)
    D = torch.diag(p.D) if outputs is None else p.D
    want = torch.einsum("mn,btn->btm", p.C, h).real + torch.einsum("mh,bth->btm", D, u)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, h[:, -1], rtol=1e-11, atol=1e-11)
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, [u, *leaves], upstream)
    wanted = torch.autograd.grad(want, [u, *leaves], upstream)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_the_ring_is_filled_evenly_by_area_and_states_keep_their_variance() -> None:
    generator = torch.Generator().manual_seed(3)
    p = lru_parameters(
        40_000, 1, r_min=0.5, r_max=0.9, max_phase=math.pi, generator=generator, dtype=torch.float64
    )
    lam = lru_decays(p.nu_log, p.theta_log)
    area = (lam.abs().square() - 0.25) / (0.81 - 0.25)
    assert ((area >= -1e-12) & (area <= 1 + 1e-12)).all()
    # uniform on (0, 1): standard error of the mean is 1/√(12 n) = 0.0014
    assert abs(area.mean() - 0.5) < 5 * 0.0015
    assert abs(area.std() - 12**-0.5) < 0.005
    phase = torch.exp(p.theta_log) / math.pi
    assert abs(phase.mean() - 0.5) < 5 * 0.0015
    # γ² Σ|λ|^2k = 1: white inputs of variance 1 keep it
    torch.testing.assert_close(
        torch.exp(2 * p.gamma_log) / (1 - lam.abs() ** 2), torch.ones(40_000).double()
    )


def test_the_whole_disc_is_allowed_and_finite() -> None:
    p = lru_parameters(5000, 2)
    assert all(part.isfinite().all() for part in p)
    assert (lru_decays(p.nu_log, p.theta_log).abs() <= 1).all()


def test_statistics_of_the_states_are_those_of_the_powers() -> None:
    decay = ring(5)
    stats = recurrence_statistics(40, decay)
    ages = torch.arange(40)[:, None] - torch.arange(40)
    powers = decay.abs()[:, None, None] ** ages.clamp(min=0)
    exact = WeightStatistics(observe_weights(powers, ages >= 0, distribution=True))
    assert stats.available == exact.available
    for name in stats.available:
        torch.testing.assert_close(
            stats[name], exact[name].mT, rtol=1e-10, atol=1e-12, equal_nan=True
        )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: diagonal_recurrence(x, torch.tensor([0.5, 1.1])), ValueError, "got 1.1"),
        (
            lambda x: diagonal_recurrence(x, torch.tensor([0.5, 0.0])),
            ValueError,
            r"\(0, 1\], got 0",
        ),
        (
            lambda x: diagonal_recurrence(x, torch.ones(3)),
            ValueError,
            r"decay \(N,\), got x \(4, 2\)",
        ),
        (
            lambda x: diagonal_recurrence(x, torch.ones(2), x),
            ValueError,
            "state must have the shape of x",
        ),
        (lambda x: diagonal_recurrence(x.half(), torch.ones(2)), TypeError, "got torch.float16"),
        (lambda x: lru_parameters(3, 2, r_min=0.9, r_max=0.5), ValueError, "r_min=0.9, r_max=0.5"),
        (
            lambda x: lru_parameters(3, 2, max_phase=7.0),
            ValueError,
            r"max_phase must be in \(0, 2π\]",
        ),
        (lambda x: lru_parameters(0, 2), ValueError, "states must be at least 1, got 0"),
        (lambda x: linear_recurrent_unit(x, lru_parameters(3, 5)), ValueError, "with H=5"),
        (
            lambda x: linear_recurrent_unit(x.long(), lru_parameters(3, 2)),
            TypeError,
            "got torch.int64",
        ),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(4, 2))
