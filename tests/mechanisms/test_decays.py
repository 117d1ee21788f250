"""Decays by name, and the closed forms of what they leave."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import theory
from acutance.mechanisms import (
    alibi_decays,
    decay_attention,
    decay_statistics,
    linear_state,
    linear_step,
    retnet_decays,
)
from acutance.rowstats import WeightStatistics, observe_weights

LAMBDAS = [1.0, 1 - 1e-12, 0.999999, 0.9995, 0.99, 0.5, 1e-3, 1e-30]


def test_retnet_decays_are_the_published_ones() -> None:
    found = retnet_decays(8, dtype=torch.float64).tolist()
    assert found == [1 - 2.0 ** (-5 - h) for h in range(8)]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20])
def test_alibi_decays_are_the_published_slopes(heads: int) -> None:
    def published(n: int) -> list[float]:  # as in the article's code
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        whole = 2 ** math.floor(math.log2(n))
        return published(whole) + published(2 * whole)[0::2][: n - whole]

    want = torch.tensor([math.exp(-slope) for slope in published(heads)], dtype=torch.float64)
    torch.testing.assert_close(alibi_decays(heads, dtype=torch.float64), want)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_closed_forms_are_the_sums(lam: float) -> None:
    n = torch.tensor([0, 1, 2, 3, 50, 3000])
    decay = torch.tensor(lam, dtype=torch.float64)
    stats = decay_statistics(n, decay)
    for place, count in enumerate(n.tolist()):
        if count == 0:
            assert stats.n_keys[0] == 0
            assert stats.entropy[0].isnan()
            continue
        row = torch.exp(math.log(lam) * torch.arange(count - 1, -1, -1, dtype=torch.float64))
        exact = WeightStatistics(observe_weights(row, distribution=True))
        assert stats.available == exact.available
        assert {"entropy", "effective_keys", "sparsity"} <= set(exact.available)
        for name in exact.available:
            torch.testing.assert_close(
                stats[name][place], exact[name], rtol=1e-11, atol=1e-12, equal_nan=True
            )


@pytest.mark.parametrize("lam", [0.9, 0.999, 1.0])
def test_theory_predicts_what_is_measured(lam: float) -> None:
    stats = decay_statistics(4096, torch.tensor(lam, dtype=torch.float64))
    row = theory.predict("decay", 4096, lam=lam)
    for name in ("entropy", "effective_keys", "sparsity", "top_weight", "first_weight"):
        assert stats[name].item() == pytest.approx(getattr(row, name), rel=1e-10), name


def test_a_measurement_less_its_prediction_is_their_difference() -> None:
    stats = decay_statistics(torch.tensor([4096, 4096]), torch.tensor(0.9, dtype=torch.float64))
    away = stats - theory.predict("decay", 4096, lam=0.9)
    assert away.effective_keys.abs().max() < 1e-9
    assert away.sparsity.shape == (2,)


def test_effective_keys_stay_where_sparsity_vanishes() -> None:
    stats = decay_statistics(torch.tensor([10**4, 10**6, 10**9]), 0.99)
    torch.testing.assert_close(stats.effective_keys, torch.full((3,), 199.0), rtol=1e-5, atol=0)
    assert stats.sparsity[-1] < 5e-4


@pytest.mark.parametrize("lam", [1.0, 0.97, 0.2])
def test_the_gradient_in_the_decay_is_the_sums(lam: float) -> None:
    decay = torch.tensor(lam, dtype=torch.float64, requires_grad=True)
    ages = torch.arange(39, -1, -1, dtype=torch.float64)

    def gradient(stats: WeightStatistics) -> Tensor:
        total = stats.entropy + stats.effective_keys.log() + stats.sparsity
        return torch.autograd.grad(total, decay)[0]

    found = gradient(decay_statistics(40, decay))
    exact = gradient(WeightStatistics(observe_weights(decay**ages, distribution=True)))
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-9)


def test_attention_without_content_has_these_statistics() -> None:
    ones = torch.ones(1, 4, 500, 1, dtype=torch.float64)
    decay = alibi_decays(4, dtype=torch.float64)
    _, stats = decay_attention(ones, ones, ones, decay=decay, feature_map="relu", return_stats=True)
    want = decay_statistics(torch.arange(1, 501), decay[:, None])
    assert {"effective_keys", "sparsity"} <= set(stats.available)
    for name in stats.available:
        torch.testing.assert_close(stats[name][0], want[name], rtol=1e-11, atol=1e-12)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 1.5"):
        decay_statistics(3, 1.5)
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 0"):
        decay_statistics(3, torch.tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        decay_statistics(-1, 0.5)
    with pytest.raises(
        TypeError, match=r"n must contain whole numbers of keys, got torch\.float32"
    ):
        decay_statistics(torch.ones(2), 0.5)
    with pytest.raises(
        TypeError, match="decay must be a number or a floating-point tensor, got str"
    ):
        decay_statistics(3, "half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        retnet_decays(0)


def in_logs(
    q: Tensor, k: Tensor, decay: Tensor, is_causal: bool, offset: int, visible: Tensor
) -> dict[str, Tensor]:
    """Statistics of rows from the logarithms of their weights, in float64."""
    content = q @ k.mT
    distance = torch.arange(q.shape[-2])[:, None] + offset - torch.arange(k.shape[-2])
    seen = visible & ((distance >= 0) | torch.tensor(not is_causal))
    some = seen & (content > 0)
    logs = torch.log(torch.where(some, content, 1.0))
    logs = torch.where(some, logs + distance.abs() * torch.log(decay), -torch.inf)
    known = some.any(-1)
    share = torch.softmax(torch.where(known[..., None], logs, 0.0), -1)
    collision = share.square().sum(-1)
    first = seen.to(torch.uint8).argmax(-1)[None, None, :, None].expand(*known.shape, 1)
    found = {
        "collision": collision,
        "effective_keys": 1 / collision,
        "sparsity": torch.rsqrt(seen.sum(-1) * collision),
        "first_weight": share.gather(-1, first).squeeze(-1),
        "top_weight": share.amax(-1),
    }
    return {name: torch.where(known, metric, torch.nan) for name, metric in found.items()}


FEATURES = {
    "relu2": lambda x: torch.relu(x).square(),
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "softmax": lambda x: torch.softmax(x, -1),
    "hedgehog": lambda x: torch.softmax(torch.cat([x, -x], -1), -1),
}


@pytest.mark.few(24)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [("sums", torch.float32), ("sums", torch.float64), ("blockwise", torch.float32)],
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(
    ("decays", "offset"), [((0.5, 0.1), 0), ((1e-3, 0.97), 4000), ((0.1, 0.9), -60)]
)
def test_rows_whose_weights_all_underflow_have_their_statistics(
    decays: tuple[float, float], offset: int, name: str, is_causal: bool, rows: str, dtype: Any
) -> None:
    draw = torch.Generator().manual_seed(5)
    query = torch.randn(1, 2, 90, 4, generator=draw).to(dtype)
    key, value = torch.randn(2, 1, 2, 20, 4, generator=draw).to(dtype).unbind(0)
    visible = torch.arange(20) % 5 > 0
    decay = torch.tensor(decays, dtype=dtype)
    given = [part.clone().requires_grad_() for part in (query, key, decay)]
    exact = [part.double().requires_grad_() for part in (query, key, decay)]
    out, stats = decay_attention(
        given[0],
        given[1],
        value,
        decay=given[2],
        feature_map=name,
        is_causal=is_causal,
        query_offset=offset,
        key_mask=visible[None],
        return_stats=True,
        rows=rows,  # type: ignore[arg-type]
    )
    q, k = (FEATURES[name](part) for part in exact[:2])
    want = in_logs(q, k, exact[2].view(-1, 1, 1), is_causal, offset, visible)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for metric in want:
        if metric not in stats.available:
            continue
        found = stats[metric].double()
        torch.testing.assert_close(
            found, want[metric], rtol=tolerance, atol=tolerance, equal_nan=True
        )
        some = ~want[metric].isnan()
        losses[0] = losses[0] + found[some].sum()
        losses[1] = losses[1] + want[metric][some].sum()
    assert out.isfinite().all()
    grads = [torch.autograd.grad(losses[0], given), torch.autograd.grad(losses[1], exact)]
    for one, other in zip(*grads, strict=True):
        size = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=10 * tolerance * max(1, size))


def test_a_state_keeps_its_keys_through_hidden_tokens() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 400, 4, generator=draw).unbind(0)
    visible = (torch.arange(400) < 30)[None]
    options: dict[str, Any] = {"feature_map": "elu1", "decay": 0.5}
    out, stats = decay_attention(q, k, v, key_mask=visible, return_stats=True, **options)
    state = linear_state(k[:, :, :30], v[:, :, :30], decay=0.5, statistics=True)
    for start in range(30, 400, 74):
        part = slice(start, min(start + 74, 400))
        piece, state, rows = linear_step(
            state,
            q[:, :, part],
            k[:, :, part],
            v[:, :, part],
            key_mask=visible[:, part],
            return_stats=True,
            **options,
        )
        torch.testing.assert_close(piece, out[:, :, part])
        for name in ("effective_keys", "sparsity", "first_weight"):
            torch.testing.assert_close(rows[name], stats[name][:, :, part])
    assert out[:, :, -1].abs().amax() > 0.01
