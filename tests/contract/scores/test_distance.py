"""Scale-invariant scores: the formula, blocks, gradients, and what the article claims of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import acutance
from acutance import scores
from acutance.scores import ScaleInvariant


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def formula(
    query: torch.Tensor, key: torch.Tensor, tau: float, scale: float, offset: int
) -> torch.Tensor:
    """The scores one by one, for grouped heads, in plain Python."""
    out = torch.empty(*query.shape[:3], key.shape[2], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        growth = 2 * math.log(abs(i + offset - j) / tau + 1)
        product = scale * float(query[b, h, i] @ key[b, h // group, j])
        out[b, h, i, j] = math.sqrt(growth + 1) * product - growth
    return out


@pytest.mark.parametrize(("tau", "scale", "offset"), [(10.0, None, 0), (0.5, 0.3, 4)])
def test_scores_are_the_formula_whole_and_in_blocks(
    tau: float, scale: float | None, offset: int
) -> None:
    query, key = rand(2, 6, 5, 4), rand(2, 2, 9, 4, seed=1)
    score = ScaleInvariant(tau, scale, offset)
    want = formula(query, key, tau, 0.5 if scale is None else scale, offset)
    torch.testing.assert_close(score.tile(query, key), want, rtol=1e-13, atol=1e-13)
    prepared, q, k = score.prepare(query, key)
    for i in range(0, 5, 2):
        for j in range(0, 9, 4):
            tile = prepared.tile(q[:, :, i : i + 2], k[:, :, j : j + 4], j)
            block = want[:, :, i : i + 2, j : j + 4]
            torch.testing.assert_close(tile, block, rtol=1e-13, atol=1e-13)


def test_attention_weighs_by_them_and_carries_their_gradient() -> None:
    query, key = rand(1, 2, 7, 4).requires_grad_(), rand(1, 2, 7, 4, seed=1).requires_grad_()
    value = rand(1, 2, 7, 3, seed=2)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    plain = scores.scale_invariant(query, key).masked_fill(~causal, -torch.inf).softmax(-1)
    out, stats = acutance.attention(
        query, key, value, is_causal=True, score="scale_invariant", return_stats=True
    )
    torch.testing.assert_close(out, plain @ value)
    torch.testing.assert_close(stats.entropy, torch.special.entr(plain).sum(-1))
    got = torch.autograd.grad(out.square().sum(), (query, key))
    want = torch.autograd.grad((plain @ value).square().sum(), (query, key))
    torch.testing.assert_close(got, want)


def test_half_precision_keeps_positions() -> None:
    """bfloat16 counts to 256 only: positions are float32."""
    query = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    key = torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16)
    got = ScaleInvariant(offset=1001).tile(query, key)
    assert got.dtype == torch.float32
    want = [-2 * math.log(1001 / 10 + 1), -2 * math.log(1000 / 10 + 1)]
    assert got.flatten().tolist() == pytest.approx(want)


def test_of_normal_scores_each_distance_has_the_weight_that_the_article_asks_for() -> None:
    """E exp(s) = E s exp(s) = √e / (t/τ + 1), the conditions that its formula is derived from."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    normal = torch.from_numpy(nodes)
    density = torch.from_numpy(weights / weights.sum())
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for t in (0, 1, 30, 300):
        score = ScaleInvariant(scale=1.0, offset=t)
        s = torch.cat([score.tile(one, x.view(1, 1, 1, 1)) for x in normal]).flatten()
        want = math.sqrt(math.e) / (t / 10 + 1)
        assert (density * s.exp()).sum().item() == pytest.approx(want, rel=1e-9)
        assert (density * s * s.exp()).sum().item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": 0.0}, "tau"),
        ({"scale": -1.0}, "scale"),
        ({"offset": -1}, "offset"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleInvariant(**arguments)  # type: ignore[arg-type]
