"""attention() with every score, weighting and scaling, against one dense float64 formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import scaling, scores
from acutance import weights as w
from acutance.rowstats import RowStatistics, WeightStatistics, observe, observe_weights

B, H, G, L, S, E, V = 2, 2, 2, 9, 11, 6, 3


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


QUERY, KEY, VALUE = draw(B, H * G, L, E, seed=1), draw(B, H, S, E, seed=2), draw(B, H, S, V, seed=3)
KEYS, VALUES = KEY.repeat_interleave(G, 1), VALUE.repeat_interleave(G, 1)
W = draw(E, E, seed=4) / E
WQ, WK, VECTOR = draw(7, E, seed=5) / 2, draw(7, E, seed=6) / 2, draw(7, seed=7)
PLACES = draw(S, E, seed=8)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


def cosines() -> Tensor:
    unit = [t / t.norm(dim=-1, keepdim=True) for t in (QUERY, KEYS)]
    return torch.einsum("bhle,bhse->bhls", *unit)


def hidden_layer() -> Tensor:
    q, k = QUERY @ WQ.T, KEYS @ WK.T
    return torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)) @ VECTOR


#: score, and all its scores
SCORES: dict[str, tuple[Any, Tensor]] = {
    "scaled_dot": ("scaled_dot", torch.einsum("bhle,bhse->bhls", QUERY, KEYS) / math.sqrt(E)),
    "dot": ("dot", torch.einsum("bhle,bhse->bhls", QUERY, KEYS)),
    "cosine": (scores.Cosine(temperature=0.3), cosines() / 0.3),
    "general": (scores.General(W), torch.einsum("bhle,ef,bhsf->bhls", QUERY, W, KEYS)),
    "additive": (scores.Additive(WQ, WK, VECTOR), hidden_layer()),
    "location": (scores.Location(PLACES), QUERY @ PLACES.T),
    "function": (lambda q, k, start: -torch.cdist(q, k.repeat_interleave(G, 1)),
                 -torch.cdist(QUERY, KEYS)),
}  # fmt: skip
WEIGHTS: dict[str, w.Weighting] = {
    name: kind() for name, kind in w.WEIGHTS.items() if name != "sink"
} | {"sink": w.Sink(SINKS), "warm": w.Softmax(temperature=2.0), "sum": w.ReLU2(normalize="sum")}
PADDING = torch.ones(B, S, dtype=torch.bool)
PADDING[1, 8:] = False
BIAS = draw(1, 1, L, S, seed=9)
PLACE, COLUMN = torch.arange(L)[:, None], torch.arange(S)
MASKS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "full": ({}, torch.ones(L, S, dtype=torch.bool)),
    "causal": ({"is_causal": True}, COLUMN <= PLACE),
    "offset": ({"is_causal": True, "query_offset": 2}, COLUMN <= PLACE + 2),
    "window": ({"is_causal": True, "window": 3}, (COLUMN <= PLACE) & (COLUMN > PLACE - 3)),
    "padding": ({"key_mask": PADDING}, PADDING[:, None, None].expand(B, 1, L, S)),
    "bias": ({"bias": BIAS}, torch.ones(L, S, dtype=torch.bool)),
    "boolean": ({"attn_mask": BIAS > -0.5}, BIAS > -0.5),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("score", SCORES)
def test_every_combination_is_its_formula(score: str, weights: str, mask: str) -> None:
    given, s = SCORES[score]
    weighting = WEIGHTS[weights]
    options, seen = MASKS[mask]
    seen = seen.expand(B, H * G, L, S)
    s = s + options.get("bias", 0.0)
    out, stats = acutance.attention(
        QUERY, KEY, VALUE, enable_gqa=True, return_stats=True,
        score=given, weights=weighting, **options,
    )  # fmt: skip
    a = weighting(s, seen)
    torch.testing.assert_close(out, a @ VALUES, rtol=1e-9, atol=1e-9)
    softmax = isinstance(weighting, w.Softmax | w.SoftmaxOne | w.Sink)
    want: RowStatistics | WeightStatistics
    if softmax and weights != "warm":
        sink = {"softmax_one": torch.zeros(H * G).double(), "sink": SINKS}.get(weights)
        rows = None if sink is None else sink[:, None].expand(B, H * G, L)
        want = RowStatistics(observe(s, seen, sink=rows))
        assert isinstance(stats, RowStatistics)
        names = want.available
    else:
        want = WeightStatistics(observe_weights(a, seen, distribution=weighting.distribution))
        names = want.available
        assert isinstance(stats, WeightStatistics) or weights == "warm"
    assert len(names) > 6
    for name in names:
        torch.testing.assert_close(
            stats[name], want[name], rtol=1e-7, atol=1e-8, equal_nan=True, msg=name
        )
    again = acutance.row_statistics(
        QUERY, KEY, enable_gqa=True, score=given, weights=weighting, **options
    )
    for name in names:
        torch.testing.assert_close(again[name], stats[name], equal_nan=True)


LAW = scaling.LogN(train_length=4)


@pytest.mark.parametrize("mask", ["causal", "padding", "boolean", "window"])
@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "additive"])
def test_a_scaling_multiplies_the_scores_of_each_row(score: str, mask: str) -> None:
    given, s = SCORES[score]
    options, seen = MASKS[mask]
    seen = seen.expand(B, H * G, L, S)
    factor = LAW.factor(seen.sum(-1)).double().unsqueeze(-1)
    out = acutance.attention(
        QUERY, KEY, VALUE, enable_gqa=True, score=given, scaling=LAW, **options
    )
    want = w.Softmax()(s * factor, seen) @ VALUES
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(out, w.Softmax()(s, seen) @ VALUES, rtol=1e-3)


def test_a_packed_row_has_the_factor_it_has_alone() -> None:
    """A law by position counts from the start of the document, as models do."""
    law = scaling.Llama4(length=2)
    q = draw(1, 1, 8, E, seed=12)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    together = acutance.attention(q, q, q, is_causal=True, document_ids=documents, scaling=law)
    alone = acutance.attention(q[:, :, 3:], q[:, :, 3:], q[:, :, 3:], is_causal=True, scaling=law)
    torch.testing.assert_close(together[:, :, 3:], alone)
    plain = acutance.attention(q[:, :, 3:], q[:, :, 3:], q[:, :, 3:], is_causal=True)
    assert not torch.allclose(alone, plain, rtol=1e-3)


def test_a_law_that_needs_the_entropy_measures_it() -> None:
    law = scaling.AdaptivePoly()
    s = SCORES["dot"][1]
    entropy = RowStatistics(observe(s)).entropy
    n = torch.full((B, H * G, L), S)
    factor = law.factor(n, entropy=entropy, dtype=torch.float64).unsqueeze(-1)
    got = acutance.attention(QUERY, KEY, VALUE, enable_gqa=True, score="dot", scaling=law)
    torch.testing.assert_close(got, torch.softmax(s * factor, -1) @ VALUES)
    assert factor.max() > 1.01


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("weights", ["softmax", "relu2", "sigmoid"])
def test_gradients_reach_queries_keys_values(score: str, weights: str) -> None:
    q, k, v = (t.clone().requires_grad_() for t in (QUERY, KEY, VALUE))
    out, stats = acutance.attention(
        q, k, v, is_causal=True, enable_gqa=True, return_stats=True,
        score=SCORES[score][0], weights=weights,
    )  # fmt: skip
    loss = out.sin().sum() + stats.effective_keys.nan_to_num().sum()
    grads = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    for name, tensor, grad in zip("qkv", (q, k, v), grads, strict=True):
        if grad is None:
            assert score == "location"
            assert name == "k"
            continue
        step = draw(*tensor.shape, seed=11)
        values = []
        for sign in (1.0, -1.0):
            moved = {"q": q, "k": k, "v": v} | {name: tensor + sign * 1e-6 * step}
            with torch.no_grad():
                out, stats = acutance.attention(
                    moved["q"], moved["k"], moved["v"], is_causal=True, enable_gqa=True,
                    return_stats=True, score=SCORES[score][0], weights=weights,
                )  # fmt: skip
                values.append(out.sin().sum() + stats.effective_keys.nan_to_num().sum())
        slope = float(values[0] - values[1]) / 2e-6
        assert float((grad * step).sum()) == pytest.approx(slope, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("weights", ["relu2", "sparsemax", "softmax_one"])
def test_half_precision_in_half_precision_out(weights: str) -> None:
    q, k, v = (t.to(torch.bfloat16) for t in (QUERY, KEY, VALUE))
    out, stats = acutance.attention(
        q, k, v, enable_gqa=True, return_stats=True, score="cosine", weights=weights
    )
    assert out.dtype == torch.bfloat16
    assert stats.effective_keys.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"score": "cosin"}, ValueError, "score='cosin' is not one of .*did you mean 'cosine'"),
        ({"weights": "relu3"}, ValueError, "weights='relu3' is not one of .*did you mean 'relu"),
        ({"scaling": "logn"}, ValueError, "scaling='logn' is not one of .*did you mean 'log_n'"),
        ({"score": "additive"}, ValueError, "score='additive' needs parameters"),
        (
            {"weights": "relu2", "sinks": SINKS},
            ValueError,
            "sinks can be used only with weights='softmax'",
        ),
        (
            {"weights": w.Sink(SINKS[:3])},
            ValueError,
            r"sinks must have shape \(Hq,\) = \(4,\), got \(3,\)",
        ),
        ({"weights": 1}, TypeError, "weights must be a name or a Weighting, got int"),
        ({"score": lambda q, k, start: q}, ValueError, "the score function must return"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        acutance.attention(QUERY, KEY, VALUE, enable_gqa=True, **options)
