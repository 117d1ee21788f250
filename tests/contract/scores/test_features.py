"""Features with gates: the formula, blocks, gradients, long sequences, and the means of theory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import acutance
from acutance.mechanisms import MECHANISMS
from acutance.rowstats import WeightStatistics, observe_weights
from acutance.scores import Features
from acutance.weights import ReLU


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def log_gate(key: Tensor) -> Tensor:
    return logsigmoid(key.sum(-1))


def formula(query: Tensor, key: Tensor, offset: int) -> Tensor:
    """The scores one by one, for grouped heads, the gates multiplied out."""
    out = torch.empty(*query.shape[:3], key.shape[2], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        own = key[b, h // group]
        between = own[min(i + offset, j) + 1 : max(i + offset, j) + 1]
        gates = torch.sigmoid(between.sum(-1)).prod()
        out[b, h, i, j] = query[b, h, i].exp() @ own[j].relu() * gates
    return out


@pytest.mark.parametrize("offset", [0, 4])
def test_scores_are_the_formula_whole_and_in_blocks(offset: int) -> None:
    query, key = rand(2, 6, 5, 4), rand(2, 2, 9, 4, seed=1)
    score = Features(torch.exp, torch.relu, log_gate, offset)
    want = formula(query, key, offset)
    torch.testing.assert_close(score.tile(query, key), want, rtol=1e-12, atol=1e-13)
    prepared, q, k = score.prepare(query, key)
    for i in range(0, 5, 2):
        for j in range(0, 9, 4):
            tile = prepared.tile(q[:, :, i : i + 2], k[:, :, j : j + 4], j)
            block = want[:, :, i : i + 2, j : j + 4]
            torch.testing.assert_close(tile, block, rtol=1e-12, atol=1e-13)


def test_attention_weighs_by_them_and_carries_every_gradient() -> None:
    query, key = rand(1, 2, 3, 4).requires_grad_(), rand(1, 2, 7, 4, seed=1).requires_grad_()
    value, bias = rand(1, 2, 7, 3, seed=2), rand(1).requires_grad_()
    score = Features(torch.exp, torch.exp, lambda k: logsigmoid(k.sum(-1) + bias))
    out, stats = acutance.attention(
        query, key, value, is_causal=True, query_offset=4, score=score,
        weights=ReLU(normalize="sum"), return_stats=True,
    )  # fmt: skip
    total = logsigmoid(key.sum(-1) + bias).cumsum(-1)
    a = (total[..., 4:, None] - total[..., None, :]).exp() * (query.exp() @ key.exp().mT)
    a = a.tril(4)
    p = a / a.sum(-1, keepdim=True)
    torch.testing.assert_close(out, p @ value)
    torch.testing.assert_close(stats.entropy, torch.special.entr(p).sum(-1))
    got = torch.autograd.grad(out.square().sum(), (query, key, bias))
    want = torch.autograd.grad((p @ value).square().sum(), (query, key, bias))
    torch.testing.assert_close(got, want)


def test_a_constant_gate_is_a_decay_far_from_the_start_in_float32() -> None:
    """Sums of log gates reach 7e4 there, where float32 alone is 4e-3 coarse."""
    n = 200_000
    query, key, value = rand(3, 1, 1, n, 2).float().unbind(0)
    score = Features(torch.exp, torch.exp, lambda k: torch.full_like(k[..., 0], math.log(0.7)))
    last = query[:, :, -2:]
    _, stats = acutance.attention(
        last, key, value, is_causal=True, query_offset=n - 2, score=score,
        weights=ReLU(normalize="sum"), return_stats=True,
    )  # fmt: skip
    distance = torch.arange(n - 2, n)[:, None] - torch.arange(n)
    decay = torch.where(distance >= 0, 0.7 ** distance.clamp(min=0).double(), 0.0)
    a = last.double().exp() @ key.double().exp().mT * decay
    want = WeightStatistics(observe_weights(a, distance >= 0))
    torch.testing.assert_close(
        stats.effective_keys.double(), want.effective_keys, rtol=1e-5, atol=0
    )


def test_the_table_s_gated_rows_have_the_means_of_theory() -> None:
    """The ratio of the means of (sum a)² and of sum a² is 1 + 2 m S²/(1 - m)."""
    query, key = rand(1, 400, 1, 64).float(), rand(1, 400, 1024, 64, seed=1).float()
    form = MECHANISMS["linear_gated"].form
    score = form.options(None)["score"]  # type: ignore[attr-defined]
    a = Features(score.query_map, score.key_map, score.log_gate, 1023).tile(query, key).double()
    ratio = float(a.sum(-1).square().mean() / a.square().sum(-1).mean())
    m = float(logsigmoid(rand(1_000_000, seed=2)).div(16).exp().mean())
    content = score.query_map(query) @ score.key_map(key).mT
    S2 = float(content.mean(-1).square().mean() / content.square().mean())
    assert ratio == pytest.approx(1 + 2 * m * S2 / (1 - m), rel=0.05)


def test_gates_that_do_not_fit_are_refused() -> None:
    query, key = rand(1, 1, 2, 4), rand(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"log_gate must return \(B, H, S\) = \(1, 1, 3\), got"):
        Features(torch.exp, torch.exp, lambda k: k).tile(query, key)
    with pytest.raises(ValueError, match=r"logarithms of gates, at most 0, got 0\.5"):
        Features(torch.exp, torch.exp, lambda k: k[..., 0] * 0 + 0.5).tile(query, key)

    with pytest.raises(ValueError, match="at most 0, got nan"):
        Features(torch.exp, torch.exp, lambda k: k[..., 0] * torch.nan).tile(query, key)
    with pytest.raises(TypeError, match=r"log_gate\(key\) must be a Tensor, got float"):
        Features(torch.exp, torch.exp, lambda _: 0.5).tile(query, key)  # type: ignore[arg-type,return-value]


def test_maps_that_do_not_fit_are_refused() -> None:
    query, key = rand(1, 1, 2, 4), rand(1, 1, 3, 4)
    with pytest.raises(TypeError, match="query_map must be a function of a Tensor, such as"):
        Features("elu1", torch.exp)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"log_gate must be a function of a Tensor, got 0\.9"):
        Features(torch.exp, torch.exp, 0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key_map must return a vector of features for each of"):
        Features(torch.exp, lambda k: k[:, :, :1]).tile(query, key)
    with pytest.raises(ValueError, match="features of the same width, got"):
        Features(torch.exp, lambda k: k[..., :2]).tile(query, key)


def test_a_hidden_key_that_is_nan_changes_no_gate() -> None:
    query, key = rand(1, 1, 6, 4), rand(1, 1, 6, 4, seed=1)
    options = {
        "score": Features(torch.exp, torch.exp, lambda k: -k[..., 0].abs()),
        "weights": ReLU(normalize="sum"),
        "key_mask": torch.arange(6)[None] != 2,
        "is_causal": True,
    }
    strange = key.clone()
    strange[:, :, 2] = torch.nan
    free = key.clone()
    free[:, :, 2] = 0.0  # a gate of 1
    out = acutance.attention(query, strange, strange, **options)
    torch.testing.assert_close(out, acutance.attention(query, free, free, **options))


@pytest.mark.parametrize("name", ["retention", "decay", "alibi_decay"])
def test_decays_are_not_rounded_to_half_precision(name: str) -> None:
    query, key, value = rand(3, 1, 8, 300, 8).unbind(0)
    narrow = [x.bfloat16() for x in (query, key, value)]
    exact, _ = MECHANISMS[name].run(*(x.double() for x in narrow), is_causal=True)
    out, _ = MECHANISMS[name].run(*narrow, is_causal=True)
    assert float((out.double() - exact).abs().max() / exact.abs().max()) < 2**-7


def test_a_recurrence_has_the_same_parameters_in_both_precisions() -> None:
    query, key, value = rand(3, 1, 2, 40, 8).unbind(0)
    out, _ = MECHANISMS["lru"].run(query.float(), key.float(), value.float(), is_causal=True)
    expected, _ = MECHANISMS["lru"].run(query, key, value, is_causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


def test_a_gate_of_zero_leaves_nothing_of_earlier_keys() -> None:
    query, key = rand(1, 1, 5, 4), rand(1, 1, 5, 4, seed=1)
    closed = torch.where(torch.arange(5) == 2, -torch.inf, -0.1).expand(1, 1, 5)
    found = Features(torch.exp, torch.exp, lambda _: closed).tile(query, key)
    free = Features(torch.exp, torch.exp, lambda _: closed.clamp(min=-0.1)).tile(query, key)
    same = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
    assert torch.equal(found == 0, ~same[None, None])
    torch.testing.assert_close(found[..., same], free[..., same])
