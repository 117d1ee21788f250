"""Every score is its formula, in float64, for grouped heads, blocks and each kind of mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import acutance
from acutance import scaling, scores
from acutance.scores import (
    SCORES,
    Additive,
    Cosine,
    Dot,
    DotScore,
    FunctionScore,
    General,
    Location,
    QKNorm,
    ScaledDot,
    SwinGain,
    TileScore,
    dot_tile,
)

B, HEADS, GROUP, L, S, E, EK, HIDDEN = 2, 2, 3, 5, 7, 4, 6, 8
HQ = HEADS * GROUP


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def loops(formula: Any, query: Tensor, key: Tensor) -> Tensor:
    """Scores one by one: ``formula(q, k, query head, key head, key position)`` on NumPy vectors."""
    q, k = query.detach().numpy(), key.detach().numpy()
    group = q.shape[1] // k.shape[1]
    out = np.empty((*q.shape[:3], k.shape[2]))
    for b, h, i, j in np.ndindex(*out.shape):
        out[b, h, i, j] = formula(q[b, h, i], k[b, h // group, j], h, h // group, j)
    return torch.from_numpy(out)


def make(name: str, by_head: bool) -> tuple[Any, Any]:
    """A score and its formula."""
    heads = (HQ,) if by_head else ()
    key_heads = (HEADS,) if by_head else ()
    if name == "dot":
        return Dot(), lambda q, k, h, g, j: q @ k
    if name == "scaled_dot":
        return ScaledDot(), lambda q, k, h, g, j: q @ k / math.sqrt(E)
    if name == "cosine":
        return Cosine(0.1), lambda q, k, h, g, j: q @ k / math.sqrt(q @ q) / math.sqrt(k @ k) / 0.1
    if name == "general":
        W = rand(*heads, E, EK)
        w = W.numpy()
        return General(W), lambda q, k, h, g, j: q @ (w[h] if by_head else w) @ k
    if name == "location":
        W = rand(*key_heads, S + 3, E)
        w = W.numpy()
        return Location(W), lambda q, k, h, g, j: ((w[g] if by_head else w) @ q)[j]
    assert name == "additive"
    parts = (rand(*heads, HIDDEN, E), rand(*key_heads, HIDDEN, EK), rand(*heads, HIDDEN),
             rand(*heads, HIDDEN))  # fmt: skip
    wq, wk, v, c = (part.numpy() for part in parts)

    def formula(q: Any, k: Any, h: int, g: int, j: int) -> float:
        if by_head:
            return v[h] @ np.tanh(wq[h] @ q + wk[g] @ k + c[h])
        return v @ np.tanh(wq @ q + wk @ k + c)

    return Additive(*parts), formula


#: ``scale_invariant`` and ``features`` depend on positions too: test_distance, test_features.
NAMES = [name for name in SCORES if name not in ("scale_invariant", "features")]
CASES = [(name, by_head) for name in NAMES for by_head in (False, True)]
TILED = [case for case in CASES if case[0] in ("additive", "location")]
#: The sum of at most 8 products, and a tanh: 16 roundings of numbers of about 10.
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


def inputs(name: str) -> tuple[Tensor, Tensor]:
    width = EK if name in ("general", "additive") else E
    return rand(B, HQ, L, E), rand(B, HEADS, S, width)


def dense(score: Any, query: Tensor, key: Tensor) -> Tensor:
    return dot_tile(score, query, key) if isinstance(score, DotScore) else score.tile(query, key)


@pytest.mark.parametrize(("name", "by_head"), CASES)
def test_a_score_is_its_formula(name: str, by_head: bool) -> None:
    query, key = inputs(name)
    score, formula = make(name, by_head)
    want = loops(formula, query, key)
    torch.testing.assert_close(dense(score, query, key), want, **CLOSE)
    if isinstance(score, TileScore):  # location is both
        torch.testing.assert_close(score.tile(query, key), want, **CLOSE)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("name", "by_head"), TILED)
def test_tiles_side_by_side_are_the_whole(name: str, by_head: bool, prepared: bool) -> None:
    query, key = inputs(name)
    score, formula = make(name, by_head)
    want = loops(formula, query, key)
    if prepared:
        score, query, key = score.prepare(query, key)
    got = torch.full_like(want, math.nan)
    for i in range(0, L, 2):
        for j in range(0, S, 3):
            tile = score.tile(query[:, :, i : i + 2], key[:, :, j : j + 3], j)
            got[:, :, i : i + 2, j : j + 3] = tile
    torch.testing.assert_close(got, want, **CLOSE)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "decoding": {"is_causal": True, "query_offset": S - L},
    "window": {"window": 3},
    "padding": {"key_mask": torch.arange(S).expand(B, S) < torch.tensor([[4], [7]])},
    "boolean": {"attn_mask": torch.rand(B, HQ, L, S, generator=torch.Generator()) > 0.5},
    "packed": {"document_ids": (torch.arange(L) // 2, torch.arange(S) // 3)},
}


def visible(options: dict[str, Any]) -> Tensor:
    i = torch.arange(L)[:, None] + options.get("query_offset", 0)
    j = torch.arange(S)
    seen = torch.ones(B, HQ, L, S, dtype=torch.bool)
    if "is_causal" in options:
        seen &= j <= i
    if "window" in options:
        seen &= (i - j).abs() < 3
    if "key_mask" in options:
        seen &= options["key_mask"][:, None, None]
    if "attn_mask" in options:
        seen &= options["attn_mask"]
    if "document_ids" in options:
        rows, columns = options["document_ids"]
        seen &= rows[:, None] == columns
    return seen


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("name", "by_head"), [(n, h) for n, h in CASES if n not in ("additive",)])
def test_the_transformed_vectors_stream(name: str, by_head: bool, mask: str) -> None:
    """The kernel, given q' and k', gives the softmax of the formula's scores."""
    query, key = inputs(name)
    score, formula = make(name, by_head)
    seen = visible(MASKS[mask])
    s = loops(formula, query, key).masked_fill(~seen, -torch.inf)
    value = rand(B, HEADS, S, 3)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    q, k, scale = score.transform(query, key)
    out, stats = acutance.attention(
        q, k, value, scale=scale, enable_gqa=True, return_stats=True, **MASKS[mask]
    )
    torch.testing.assert_close(out, p @ value.repeat_interleave(GROUP, 1), rtol=1e-11, atol=1e-11)
    some = seen.any(-1)
    entropy = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(stats.entropy[some], entropy[some], rtol=1e-10, atol=1e-10)
    assert some.any()


def test_norms_do_what_they_should() -> None:
    """A cosine ignores both lengths; the key's reorders a dot product, the query's does not."""
    query, key = rand(1, 1, 4, E), rand(1, 1, 20, E)
    lengths = torch.rand(20, dtype=torch.float64)[:, None] * 5 + 0.1
    torch.testing.assert_close(
        scores.cosine(3 * query, key * lengths), scores.cosine(query, key), **CLOSE
    )
    order = scores.dot(query, key).argsort(-1)
    assert torch.equal(scores.dot(3 * query, key).argsort(-1), order)
    assert not torch.equal(scores.dot(query, key * lengths).argsort(-1), order)


def test_cosines_lie_between_minus_one_and_one() -> None:
    query = rand(1, 1, 50, E)
    s = scores.cosine(query, torch.cat([query, -query], 2))
    assert s.abs().max() <= 1 + 1e-15
    torch.testing.assert_close(s[0, 0].diagonal(), torch.ones(50).double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_zero_vector_scores_zero_and_has_a_finite_gradient(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 1, 2, 4, dtype=dtype)
    query[0, 0, 1] = 1
    query.requires_grad_()
    s = scores.cosine(query, torch.ones(1, 1, 3, 4, dtype=dtype))
    assert s[0, 0].tolist() == [[0.0] * 3, [1.0] * 3]
    if dtype != torch.float16:  # whose largest number is 65504: the gradient is 1/ε = 10⁶
        s.sum().backward()
        assert query.grad is not None
        assert query.grad.isfinite().all()


@pytest.mark.parametrize(("name", "by_head"), CASES)
def test_half_precision_scores_are_made_in_float32(name: str, by_head: bool) -> None:
    query, key = (t.bfloat16() for t in inputs(name))
    score, formula = make(name, by_head)
    want = loops(formula, query.double(), key.double())
    got = dense(score, query, key)
    assert got.dtype == torch.float32
    # cosine and general round q' to bfloat16, whose ulp is 2⁻⁸: half of it, on q' and k' each
    size = (want.abs().amax() + 1).item()
    error = 2**-8 * 4 * size if name in ("cosine", "general", "location") else 1e-5 * size
    torch.testing.assert_close(got.double(), want, rtol=0, atol=error)


@pytest.mark.parametrize(("name", "by_head"), CASES)
def test_gradients(name: str, by_head: bool) -> None:
    query, key = (t[:1, :, :2].contiguous().requires_grad_() for t in inputs(name))
    score, _ = make(name, by_head)
    parameters = [
        part.requires_grad_() for part in vars(score).values() if isinstance(part, Tensor)
    ]

    def call(q: Tensor, k: Tensor, *parts: Tensor) -> Tensor:
        fresh = type(score)(*parts) if parts else score
        return dense(fresh, q, k)

    assert torch.autograd.gradcheck(call, (query, key, *parameters))


@pytest.mark.parametrize("by_head", [False, True])
def test_gradients_of_additive_scores_are_autograds(by_head: bool) -> None:
    """The backward pass is written by hand; here beside that of the whole formula."""
    query, key = (t.requires_grad_() for t in inputs("additive"))
    score, _ = make("additive", by_head)
    wq, wk, v, c = (part.requires_grad_() for part in vars(score).values())
    inner = (query @ wq.mT + c.unsqueeze(-2)).unsqueeze(3)
    inner = inner + (key @ wk.mT).repeat_interleave(GROUP, 1).unsqueeze(2)
    dense = (inner.tanh() * v.view(-1, 1, 1, HIDDEN)).sum(-1)
    weight = rand(*dense.shape)
    found, want = (
        torch.autograd.grad((s * weight).sum(), (query, key, wq, wk, v, c))
        for s in (score.tile(query, key), dense)
    )
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_second_gradients_of_additive_scores_are_refused() -> None:
    query = rand(1, 1, 2, 2).requires_grad_()
    score = Additive(rand(3, 2), rand(3, 2), rand(3))
    loss = score.tile(query, rand(1, 1, 2, 2)).square().sum()
    (grad,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_scaling_multiplies_scores_that_are_not_linear_in_the_query() -> None:
    query, key = inputs("additive")
    score, formula = make("additive", by_head=True)
    law = scaling.SSMax([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], bias=0.5)
    n = torch.arange(1, L + 1)
    s = loops(formula, query, key) * law.factor(n, dtype=torch.float64).unsqueeze(-1)
    s = s.masked_fill(~visible(MASKS["causal"]), -torch.inf)
    value = rand(B, HEADS, S, 3)
    out = acutance.attention(
        query, key, value, score=score, scaling=law, is_causal=True, enable_gqa=True
    )
    want = torch.softmax(s, -1) @ value.repeat_interleave(GROUP, 1)
    # the factor of a row is kept in float32
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_location_reads_positions_not_keys() -> None:
    query = rand(1, 1, 3, E)
    score = Location(rand(9, E))
    one, other = score.tile(query, rand(1, 1, 5, E)), score.tile(query, rand(1, 1, 5, 2))
    assert torch.equal(one, other)
    later = score.tile(query, rand(1, 1, 5, E), 4)
    torch.testing.assert_close(later[..., 0], one[..., 4])
    _, keys, _ = score.transform(rand(2, 4, 3, E), rand(2, 2, 5, 1))
    assert keys.shape == (2, 2, 5, E)
    assert keys.untyped_storage().nbytes() == 9 * E * 8, "rows of W, not copies"


def test_functions_are_scores() -> None:
    def distance(query: Tensor, key: Tensor, start: int) -> Tensor:
        return -torch.cdist(query, key) + start

    score = scores.get(distance)
    assert isinstance(score, FunctionScore)
    assert isinstance(score, TileScore)
    q, k = rand(1, 2, 3, 4), rand(1, 2, 5, 4)
    torch.testing.assert_close(score.tile(q, k, 2), 2 - torch.cdist(q, k))
    assert score.prepare(q, k) == (score, q, k)
    with pytest.raises(
        ValueError, match=r"score function must return \(B, Hq, L, S\) = \(1, 2, 3, 5\)"
    ):
        FunctionScore(lambda q, k, start: q).tile(q, k)
    with pytest.raises(TypeError, match="the score function must return a Tensor, got int"):
        FunctionScore(lambda q, k, start: 3).tile(q, k)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="function must be callable, got int"):
        FunctionScore(3)  # type: ignore[arg-type]


def test_every_name_is_found_or_says_what_it_needs() -> None:
    assert [*NAMES, "scale_invariant", "features"] == list(SCORES)
    assert NAMES == ["scaled_dot", "dot", "cosine", "general", "additive", "location"]
    for name in ("scaled_dot", "dot", "cosine", "scale_invariant"):
        assert type(scores.get(name)) is SCORES[name]
        assert SCORES[name].name == name
    for name in ("general", "additive", "location", "features"):
        with pytest.raises(
            ValueError, match=rf"score='{name}' needs parameters: pass scores\.\w+\("
        ):
            scores.get(name)
    for given in (General(rand(2, 2)), QKNorm(4), scores.AdditiveScore(4)):
        assert scores.get(given) is given
    assert isinstance(QKNorm(4, gain=SwinGain(2)), DotScore)
    assert isinstance(scores.AdditiveScore(4), TileScore)
    assert not isinstance(scores.AdditiveScore(4), DotScore)
    assert not isinstance(Dot(), TileScore)
