"""GatedAttentionUnit is the articles' formula."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance.nn import GatedAttentionUnit, Rotary
from acutance.scaling import LearnedSSMax, LogN

B, L, D, S = 2, 9, 6, 8


def unit(**options: Any) -> tuple[GatedAttentionUnit, Tensor]:
    module = GatedAttentionUnit(D, S, 3, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name or name in ("gamma", "beta"):
                parameter.normal_()
    return module, torch.randn(B, L, D, dtype=torch.float64)


def parts(module: GatedAttentionUnit, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, v, q, k written anew."""
    e = 3 * D
    h = x @ module.in_proj.weight.T + module.in_proj.bias
    h = h / (1 + torch.exp(-h))
    u, v, z = h[..., :e], h[..., e : 2 * e], h[..., 2 * e :]
    q = z * module.gamma[0] + module.beta[0]
    k = z * module.gamma[1] + module.beta[1]
    return u, v, q, k


def turned(x: Tensor, base: float = 1e4) -> Tensor:
    half = x.shape[-1] // 2
    speeds = base ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    z = torch.complex(x[..., :half], x[..., half:])
    z = z * torch.exp(1j * torch.outer(torch.arange(x.shape[-2]).double(), speeds))
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("weights", ["relu2", "softmax plus"])
@pytest.mark.parametrize("positions", [None, "rotary"])
@pytest.mark.parametrize("call", ["full", "causal", "padded", "both"])
def test_it_is_the_published_formula(weights: str, positions: str | None, call: str) -> None:
    options: dict[str, Any] = {"positions": positions}
    if weights != "relu2":
        options |= {"weights": "softmax", "scaling": LogN(train_length=512, n_min=1)}
    module, x = unit(**options)
    hidden = torch.zeros(B, L, dtype=torch.bool)
    seen = torch.ones(B, L, L, dtype=torch.bool)
    if call in ("padded", "both"):
        hidden[1, 6:] = True
        seen &= ~hidden[:, None]
    if call in ("causal", "both"):
        seen &= torch.ones(L, L, dtype=torch.bool).tril()
    out = module(x, hidden if hidden.any() else None, is_causal=call in ("causal", "both"))

    u, v, q, k = parts(module, x)
    if positions:
        q, k = turned(q), turned(k)
    n = seen.sum(-1, keepdim=True).double()
    s = q @ k.transpose(1, 2) / math.sqrt(S)
    if weights == "relu2":
        a = torch.where(seen, s.clamp(min=0) ** 2, 0.0) / n
    else:
        a = torch.softmax((s * n.log() / math.log(512)).masked_fill(~seen, -torch.inf), -1)
    want = (u * (a @ v)) @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)

    stats = module.last_statistics
    share = a.abs() / a.abs().sum(-1, keepdim=True)
    keys = 1 / share.square().sum(-1)  # NaN where every weight is 0
    torch.testing.assert_close(stats.effective_keys[:, 0], keys, equal_nan=True)
    again = acutance.row_statistics(
        q[:, None], k[:, None], weights=module.weights(), scaling=module.scaling,
        is_causal=call in ("causal", "both"), key_mask=~hidden,
    )  # fmt: skip
    for name in again.available:
        torch.testing.assert_close(stats[name], again[name], equal_nan=True)


def test_gradients_reach_every_parameter() -> None:
    module, x = unit(positions=Rotary(100.0))
    module(x, is_causal=True).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_it_starts_as_published() -> None:
    module = GatedAttentionUnit(32, bias=False)
    assert (module.beta == 0).all()
    # 256 normal numbers: five standard errors of the deviation are 22 %
    assert module.gamma.std().item() == pytest.approx(0.02, rel=0.22)
    assert module.in_proj.weight.shape == (2 * 64 + 128, 32)
    bound = math.sqrt(6 / (256 + 32))
    assert float(module.in_proj.weight.detach().abs().max()) <= bound
    assert set(module.state_dict()) == {"gamma", "beta", "in_proj.weight", "out_proj.weight"}


@pytest.mark.parametrize("options", [
    {"score": "additive", "weights": "softmax"}, {"score": "general"}, {"weights": "sink"},
    {"scaling": LearnedSSMax(1, train_length=8), "weights": "softmax"}, {},
])  # fmt: skip
def test_it_learns(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    module = GatedAttentionUnit(12, 8, **copy.deepcopy(options))
    x = torch.randn(2, 10, 12)
    aim = x.roll(1, 1)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.04)
    losses = []
    for _ in range(25):
        loss = nn.functional.mse_loss(module(x), aim)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_statistics_may_be_off_and_dropout_is_for_training() -> None:
    module, x = unit(statistics="off", dropout=0.5)
    module(x)
    assert module.last_statistics is None
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


X = torch.zeros(B, L, D)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GatedAttentionUnit(0), ValueError, "embed_dim must be at least 1, got 0"),
        (lambda: GatedAttentionUnit(6, 0), ValueError, "key_dim must be at least 1, got 0"),
        (lambda: GatedAttentionUnit(6, 8, 1.5), TypeError, "expansion must be an integer, got 1.5"),
        (lambda: GatedAttentionUnit(6, 7, positions="rotary"), ValueError, "even key_dim, got 7"),
        (lambda: GatedAttentionUnit(6, 8, positions="alibi"), ValueError, "None or 'rotary', got"),
        (lambda: GatedAttentionUnit(6, 8, weights="relu3"), ValueError, "did you mean 'relu"),
        (lambda: GatedAttentionUnit(6, 8)(X[0]), ValueError, r"shape \(B, L, embed_dim=6\)"),
        (lambda: GatedAttentionUnit(6, 8)([1]), TypeError, "x must be a Tensor, got list"),
        (lambda: GatedAttentionUnit(6, 8)(X, torch.zeros(2, 9)), TypeError,
         "key_padding_mask must be boolean, True for hidden keys, got torch.float32"),
        (lambda: GatedAttentionUnit(6, 8)(X, torch.zeros(9, 2, dtype=torch.bool)), ValueError,
         r"key_padding_mask must have shape \(B, S\) = \(2, 9\), got \(9, 2\)"),
        (lambda: GatedAttentionUnit(6, 8)(X, is_causal=1), TypeError, "must be True or False"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
