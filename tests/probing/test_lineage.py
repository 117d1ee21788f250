"""Scores without their products: every way from a product to a softmax that is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.capture.handwritten.products import Lineage, LineageError

B, H, L, S, E = 2, 3, 5, 7, 4


class Following(TorchFunctionMode):
    """Lets a lineage run every function in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.lineage = Lineage()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.lineage.call(func, args, kwargs or {})


def given(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(B, H, L, E), "k": draw(B, H, S, E), "bias": draw(H, L, S), "row": draw(L, 1),
        "table": draw(9, E), "seen": torch.rand(L, S, generator=generator) < 0.7,
        "low": torch.full((L, S), -1e300, dtype=torch.float64).triu(2),
    }  # fmt: skip


def _softmax_shift(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT + bias
    return scores - scores.amax(-1, keepdim=True)


def _through_a_view(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[:, 1:] += bias[1:]
    scores[..., :2] *= 0.5
    return scores


def _through_views(q: Tensor, k: Tensor, bias: Tensor, seen: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    heads = scores.view(B * H, L, S).transpose(0, 1)[1:]
    heads.add_(bias[0, 1:, None]).mul_(2.0)
    scores.data.masked_fill_(~seen, -1e30)
    scores.unbind(1)[2].add_(bias[1])
    return scores * 1.5


def _into_zeros(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = bias.new_zeros(B, H, L, S + 2) + 3
    scores[..., :S] = q @ k.mT
    scores[..., 1:3] += 1.0
    return scores


def _relative(q: Tensor, k: Tensor, table: Tensor, **_: Tensor) -> Tensor:
    """Of two products, the second of every query with every distance, then gathered."""
    far = torch.einsum("bhle,re->bhlr", q, table)
    steps = (torch.arange(L)[:, None] - torch.arange(S)).clamp(-4, 4) + 4
    return torch.matmul(q, k.transpose(-1, -2)) + far.gather(-1, steps.expand(B, H, L, S))


def _in_place(q: Tensor, k: Tensor, bias: Tensor, seen: Tensor, **_: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    twice = scores * 2
    scores /= 3.0
    scores += bias
    scores.masked_fill_(~seen, -1e30)
    return scores + twice


HEADS = torch.nn.Parameter(torch.arange(9.0, dtype=torch.float64).view(H, H) / 5 - 1)

WAYS: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda q, k, **_: torch.matmul(q, k.transpose(-1, -2)) / E**0.5,
    "operator": lambda q, k, bias, **_: (q * 0.3) @ k.mT + bias,
    "added from the left": lambda q, k, bias, **_: bias + 2.0 * (q @ k.mT),
    "taken away": lambda q, k, bias, **_: 1.0 - (bias - q @ k.mT),
    "divided": lambda q, k, bias, row, **_: torch.div(q @ k.mT, row.abs() + 1) + bias,
    "bmm": lambda q, k, bias, **_: (
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, L, S) + bias
    ),
    "baddbmm": lambda q, k, bias, **_: torch.baddbmm(
        bias.repeat(B, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.3
    ).unflatten(0, (B, H)),
    "baddbmm into anything": lambda q, k, **_: torch.baddbmm(
        torch.full((1, 1, 1), torch.nan, dtype=q.dtype), q[0], k[0].mT, beta=0, alpha=0.3
    ),
    "einsum": lambda q, k, bias, **_: torch.einsum("bhle,bhse->blsh", q, k) + bias.movedim(0, -1),
    "where": lambda q, k, seen, **_: torch.where(seen, q @ k.mT, torch.finfo(q.dtype).min),
    "masked_fill": lambda q, k, seen, **_: (q @ k.mT).masked_fill(~seen, -torch.inf),
    "mask added, held up": lambda q, k, low, **_: torch.max(
        q @ k.mT + low, torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    ),
    "clamped far below": lambda q, k, low, **_: (q @ k.mT + low).clamp(min=-5e4),
    "float": lambda q, k, bias, **_: ((q @ k.mT).float() + bias.float()).to(torch.float64),
    "with global keys": lambda q, k, bias, **_: torch.cat([bias.expand(B, H, L, S), q @ k.mT], -1),
    "padded": lambda q, k, **_: F.pad(q @ k.mT, (0, 1), value=4.0)[..., 1:],
    "split": lambda q, k, bias, **_: (q @ k.mT + bias).split(2, -1)[1],
    "talking heads": lambda q, k, bias, **_: torch.einsum("bhls,hg->bgls", q @ k.mT + bias, HEADS),
    "talking heads, a view": lambda q, k, bias, **_: (
        HEADS[None] @ (q @ k.mT + bias).flatten(2)
    ).view(B, H, L, S),
    "added inside a product of its own": lambda q, k, bias, **_: torch.baddbmm(
        torch.bmm(q[0], k[1].mT) + bias, q[0], k[0].mT
    ),
    "turned by einsum": lambda q, k, bias, **_: torch.einsum("bhls->blhs", q @ k.mT + bias),
    "addcmul": lambda q, k, bias, **_: torch.addcmul(q @ k.mT, bias, bias, value=2.0),
    "summed": lambda q, k, bias, **_: torch.stack([q @ k.mT, bias.expand(B, H, L, S)]).sum(0),
    "dropout at rest": lambda q, k, bias, **_: F.dropout(q @ k.mT + bias, 0.5, training=False),
    "largest taken away": _softmax_shift,
    "through a view": _through_a_view,
    "through views": _through_views,
    "into zeros": _into_zeros,
    "relative": _relative,
    "in place": _in_place,
}


@pytest.mark.parametrize("way", WAYS)
def test_scores_without_products_are_those_of_a_query_that_is_zero(way: str) -> None:
    """Of every way, the scores at any multiple of the query follow from two of them."""
    inputs = given()
    with Following() as following:
        scores = WAYS[way](**inputs)
        bare = following.lineage.without_products(scores)
    assert bare is not None
    assert bare.shape == scores.shape
    zero = WAYS[way](**{**inputs, "q": torch.zeros_like(inputs["q"])})
    if way == "largest taken away":  # by a number for each row, which no softmax notices
        bare, zero, scores = (each.softmax(-1).log() for each in (bare, zero, scores))
    torch.testing.assert_close(bare, zero, rtol=1e-12, atol=1e-12)
    thrice = WAYS[way](**{**inputs, "q": 3 * inputs["q"]})
    hidden = scores <= -1e9
    ours = torch.where(hidden, scores, scores + 2 * (scores - bare).masked_fill(hidden, 0.0))
    atol = 1e-5 if way == "float" else 1e-9
    torch.testing.assert_close(ours.softmax(-1), thrice.softmax(-1), rtol=0, atol=atol)


def _written_elsewhere(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    first, whole = scores[:, 1], scores.view(B, -1)
    whole.mul_(2.0)
    first.add_(1.0)  # of what the other view has written to
    return scores


def _overwritten_bias(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    bias = bias.clone()
    scores = q @ k.mT + bias
    bias.zero_()
    return scores


NO_WAYS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "softcap": (lambda q, k, **_: 5 * torch.tanh(q @ k.mT / 5), "its scores go through tanh"),
    "clamp": (lambda q, k, **_: (q @ k.mT).clamp(-1, 1), "its scores go through clamp"),
    "largest": (lambda q, k, bias, **_: torch.max(q @ k.mT, bias), "its scores go through max"),
    "square": (lambda q, k, **_: (q @ k.mT) * (q @ k.mT), "multiplied or divided by products"),
    "inverse": (lambda q, k, **_: 1.0 / (q @ k.mT), "are divided by products|reciprocal"),
    "normalised": (
        lambda q, k, **_: (lambda s: s / s.amax(-1, keepdim=True))(q @ k.mT), "by their largest"
    ),
    "dropped": (lambda q, k, **_: F.dropout(q @ k.mT, 0.5), "its scores are dropped out"),
    "view": (_written_elsewhere, "its scores were written to through a view"),
    "bias": (_overwritten_bias, "a tensor that its scores depend on was overwritten"),
    "out": (
        lambda q, k, bias, **_: torch.add(q @ k.mT, bias, out=torch.empty(B, H, L, S).double()),
        "written to with out=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", NO_WAYS)
def test_what_is_not_affine_in_the_products_says_so(way: str) -> None:
    make, match = NO_WAYS[way]
    with Following() as following:
        scores = make(**given())
        with pytest.raises(LineageError, match=match):
            following.lineage.without_products(scores)


def test_what_no_product_went_into_has_none() -> None:
    inputs = given()
    head = torch.nn.Parameter(inputs["table"])
    with Following() as following:
        scores = F.linear(inputs["q"], inputs["table"])
        assert following.lineage.without_products(scores) is None
        assert following.lineage.without_products(torch.matmul(inputs["q"], head.mT)) is None
        after = F.linear((inputs["q"] @ inputs["k"].mT), torch.ones(2, S).double())
        assert following.lineage.without_products(after) is None


def test_nothing_is_kept_of_tensors_that_are_gone() -> None:
    inputs = given()
    with Following() as following:
        scores = torch.relu(inputs["q"] @ inputs["k"].mT + 1.0) * 2.0
        assert following.lineage._nodes
        del scores
        assert not following.lineage._nodes


def test_gradients_flow_through_what_is_left() -> None:
    inputs = given()
    bias = inputs["bias"].requires_grad_()
    with Following() as following:
        scores = inputs["q"] @ inputs["k"].mT + bias * 2
        bare = following.lineage.without_products(scores)
    assert bare is not None
    bare.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((H, L, S), 2.0 * B).double())


def test_the_dtype_whose_mask_value_hides() -> None:
    query, key = torch.randn(2, 3, 4).half(), torch.randn(2, 3, 4).half()
    with Following() as following:
        scores = (query @ key.mT).float() + 1.0
        assert following.lineage.narrowest(scores) == torch.float16
        assert following.lineage.narrowest(torch.zeros(2)) == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_overwritten_is_noticed_where_pytorch_does_not_count(mode: Any) -> None:
    """Inference mode counts no writes, and neither does what is written through ``data``."""
    with mode():
        inputs = given()
        with Following() as following:
            bias = inputs["bias"] * 1.0
            scores = inputs["q"] @ inputs["k"].mT + bias
            bias.view(-1).zero_()
            with pytest.raises(LineageError, match="was overwritten"):
                following.lineage.without_products(scores)
            scores = inputs["q"] @ inputs["k"].mT
            scores.data.add_(inputs["bias"])
            scores.view(-1).mul_(2.0)
            bare = following.lineage.without_products(scores)
            torch.testing.assert_close(bare, (2 * inputs["bias"]).expand(B, H, L, S))


def test_which_products_are_scores() -> None:
    """Keys come from the input; weights of a router do not, whatever stands for a parameter."""
    inputs = given()
    queries = torch.nn.Parameter(inputs["table"])
    with Following() as following:
        active = following.lineage.is_active
        assert active(torch.matmul(queries, inputs["k"].mT))
        assert active(torch.einsum("ne,bhse->bhns", queries, inputs["k"]))
        assert not active(torch.matmul(inputs["q"], queries.mT * 1.0))
        assert not active(torch.einsum("bhle,hen->bhln", inputs["q"], torch.nn.Parameter(
            torch.ones(H, E, 2).double()
        )))  # fmt: skip
        weights = torch.rand(B, H, L, S).double()
        following.lineage.weights(weights)
        assert not active(weights * 2.0 @ inputs["k"])
        assert not following.lineage._nodes.get(id(weights @ inputs["k"]))


def test_neither_steps_nor_memory_grow_without_bound() -> None:
    inputs = given()
    with Following() as following:
        scores = inputs["q"] @ inputs["k"].mT
        for _ in range(1200):
            scores = scores + 1.0
        with pytest.raises(LineageError, match="more than 150 steps"):
            following.lineage.without_products(scores)
        stream = torch.randn(1, 1 << 10, 4) @ torch.randn(1, 4, 1 << 10)
        for _ in range(40):
            stream = stream + torch.randn(1, 1 << 10, 1 << 10)
        made = following.lineage._nodes[id(stream)][1]
        assert made.saved_bytes <= 17 * stream.nbytes
        with pytest.raises(LineageError, match="too many tensors"):
            following.lineage.without_products(stream)


def test_a_cache_that_is_written_to_is_not_copied() -> None:
    inputs, cache = given(), torch.zeros(B, H, 64, E).double()
    weight = torch.nn.Parameter(torch.eye(E).double())
    with Following() as following:
        cache[:, :, :S] = inputs["k"] @ weight
        scores = inputs["q"] @ cache[:, :, :S].mT
        assert following.lineage._nodes[id(cache)][1].args == ()
        assert torch.equal(following.lineage.without_products(scores), torch.zeros(B, H, L, S))
