"""Which ways from queries and keys to a softmax a law follows, and which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance import scaling

B, H, L, S, E = 2, 3, 5, 7, 4
FACTOR = 1.7


class Attention(nn.Module):
    """Attention whose scores (..., L, S) a function makes of queries, keys and others."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, given: dict[str, Tensor], factor: float = 1.0) -> Tensor:
        scores = self.way(**{**given, "q": given["q"] * factor})
        value = torch.arange(scores.shape[-1] * E, dtype=scores.dtype).view(-1, E).sin()
        return scores.softmax(-1) @ value.expand(*scores.shape[:-2], -1, -1)


def given() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(B, H, L, E), "k": draw(B, H, S, E), "bias": draw(H, L, S), "row": draw(L, 1),
        "table": draw(9, E), "seen": torch.rand(L, S, generator=generator) < 0.7,
        "low": torch.full((L, S), -1e300, dtype=torch.float64).triu(2),
    }  # fmt: skip


def _in_place(q: Tensor, k: Tensor, low: Tensor, seen: Tensor, **_: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    twice = scores * 2
    scores /= 3.0
    scores += low
    scores.masked_fill_(~seen, -1e30)
    return scores + twice


def _through_views(q: Tensor, k: Tensor, seen: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.view(B * H, L, S).transpose(0, 1)[1:].mul_(2.0)
    scores.data.masked_fill_(~seen, -1e30)
    scores[..., 0] = -torch.inf
    return scores * 1.5


def _relative(q: Tensor, k: Tensor, table: Tensor, **_: Tensor) -> Tensor:
    """Of two products, the second of every query with every distance, then gathered."""
    far = torch.einsum("bhle,re->bhlr", q, table)
    steps = (torch.arange(L)[:, None] - torch.arange(S)).clamp(-4, 4) + 4
    return torch.matmul(q, k.transpose(-1, -2)) + far.gather(-1, steps.expand(B, H, L, S))


def _cache(q: Tensor, k: Tensor, table: Tensor, **_: Tensor) -> Tensor:
    """Keys that are a product themselves, written to a tensor."""
    cache = torch.zeros(B, H, 64, E, dtype=k.dtype)
    cache[:, :, :S] = k @ table[:E]
    return q @ cache[:, :, :S].mT


def _largest(q: Tensor, k: Tensor, low: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT + low
    return scores - scores.amax(-1, keepdim=True).detach()


PLAIN: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda q, k, **_: torch.matmul(q, k.transpose(-1, -2)) / E**0.5,
    "operator": lambda q, k, **_: (q * 0.3) @ k.mT,
    "scaled from the left": lambda q, k, low, **_: low + 2.0 * (q @ k.mT),
    "mask taken away": lambda q, k, low, **_: q @ k.mT - low.abs(),
    "divided": lambda q, k, row, **_: torch.div(q @ k.mT, row.abs() + 1),
    "bmm": lambda q, k, **_: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, L, S),
    "baddbmm": lambda q, k, low, **_: torch.baddbmm(
        low.repeat(B * H, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.3
    ).unflatten(0, (B, H)),
    "baddbmm into anything": lambda q, k, **_: torch.baddbmm(
        torch.full((1, 1, 1), torch.nan, dtype=q.dtype), q[0], k[0].mT, beta=0, alpha=0.3
    ),
    "einsum": lambda q, k, **_: torch.einsum("bhle,bhse->bhls", q, k),
    "where": lambda q, k, seen, **_: torch.where(seen, q @ k.mT, torch.finfo(q.dtype).min),
    "where with tensors": lambda q, k, seen, **_: torch.where(
        seen, q @ k.mT, torch.full((), -torch.inf, dtype=q.dtype)
    ),
    "masked_fill": lambda q, k, seen, **_: (q @ k.mT).masked_fill(~seen, -torch.inf),
    "mask of zeros and ones": lambda q, k, seen, **_: (q @ k.mT) * seen - 1e9 * (1 - seen.double()),
    "mask added, held up": lambda q, k, low, **_: torch.max(
        q @ k.mT + low, torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    ),
    "clamped far below": lambda q, k, **_: (q @ k.mT).clamp(min=-5e4),
    "float": lambda q, k, **_: (q @ k.mT).float().to(torch.float64),
    "mask of the scores' dtype": lambda q, k, low, **_: (lambda s: s + low.type_as(s))(q @ k.mT),
    "padded": lambda q, k, **_: F.pad(q @ k.mT, (0, 1), value=-torch.inf),
    "joined": lambda q, k, **_: torch.cat([q @ k[:, :, :3].mT, q @ k[:, :, 3:].mT], -1),
    "split": lambda q, k, **_: (q @ k.mT).split(4, -1)[0],
    "dropout at rest": lambda q, k, **_: F.dropout(q @ k.mT, 0.5, training=False),
    "out": lambda q, k, low, **_: torch.add(
        q @ k.mT, low, out=torch.empty(B, H, L, S, dtype=q.dtype)
    ),
    "largest taken away": _largest,
    "in place": _in_place,
    "through views": _through_views,
    "relative": _relative,
    "a cache of keys": _cache,
}


@pytest.mark.parametrize("way", PLAIN)
def test_plain_scores_are_scaled_as_a_query_would_be(way: str) -> None:
    model, inputs = Attention(PLAIN[way]), given()
    want = model(inputs, FACTOR)
    assert (want - model(inputs)).abs().max() > 0.01
    with acutance.apply(model, scaling.HeadTable([FACTOR])) as applied:
        got = model(inputs)
    assert applied.calls == {"Attention": 1}
    atol = 1e-5 if way == "float" else 1e-12
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("way", [way for way in PLAIN if way != "out"])  # which has no gradient
def test_gradients_are_those_of_a_scaled_query(way: str) -> None:
    model, inputs = Attention(PLAIN[way]), given()
    leaves = [inputs[name].requires_grad_() for name in ("q", "k")]
    want = torch.autograd.grad(model(inputs, FACTOR).square().sum(), leaves)
    with acutance.apply(model, scaling.HeadTable([FACTOR])):
        got = torch.autograd.grad(model(inputs).square().sum(), leaves)
    for mine, theirs in zip(got, want, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 if way == "float" else 1e-9)


def _through_a_view(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    first, whole = scores[:, 1], scores.view(B, -1)
    whole.mul_(2.0)
    first.add_(1.0)
    return scores


def _through_data(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.data.view(-1)[:5] = 2.0
    return scores


def _into_zeros(q: Tensor, k: Tensor, **_: Tensor) -> Tensor:
    scores = torch.zeros(B, H, L, S + 2, dtype=q.dtype)
    scores[..., :S] = q @ k.mT
    return scores


def _from_elsewhere(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores + bias.to(scores)


def _overwritten(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
    scores = q @ k.mT
    torch.add(scores, bias, out=scores)
    return scores


HEADS = nn.Parameter(torch.arange(9.0, dtype=torch.float64).view(H, H) / 5 - 1)

OTHERS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "bias": (lambda q, k, bias, **_: q @ k.mT + bias, "have numbers added"),
    "bias first": (lambda q, k, bias, **_: bias + q @ k.mT, "have numbers added"),
    "bias in baddbmm": (
        lambda q, k, bias, **_: torch.baddbmm(bias, q[0], k[0].mT), "have numbers added"
    ),
    "bias of the scores' dtype": (_from_elsewhere, "have numbers added"),
    "number to some keys": (
        lambda q, k, seen, **_: torch.where(seen, q @ k.mT, 1.5), "have numbers added"
    ),
    "mask with another number": (
        lambda q, k, seen, **_: (q @ k.mT).masked_fill(~seen, -100.0), "have numbers added"
    ),
    "with global keys": (
        lambda q, k, bias, **_: torch.cat([bias.expand(B, H, L, S), q @ k.mT], -1),
        "have numbers added",
    ),
    "padded": (lambda q, k, **_: F.pad(q @ k.mT, (0, 1), value=4.0), "have numbers added"),
    "taken away": (lambda q, k, bias, **_: bias - q @ k.mT, "are subtracted from something"),
    "softcap": (lambda q, k, **_: 5 * torch.tanh(q @ k.mT / 5), "go through tanh"),
    "divided by the largest": (
        lambda q, k, **_: (lambda s: s / s.amax(-1, keepdim=True))(q @ k.mT), "go through amax"
    ),
    "largest of each key taken away": (
        lambda q, k, **_: (lambda s: s - s.amax(-2, keepdim=True))(q @ k.mT), "go through amax"
    ),
    "largest turned": (
        lambda q, k, **_: (lambda s: s - s.amax(-1, keepdim=True).mT)(q @ k[:, :, :L].mT),
        "go through amax",
    ),
    "clamp": (lambda q, k, **_: (q @ k.mT).clamp(-1, 1), "go through clamp"),
    "largest": (lambda q, k, bias, **_: torch.max(q @ k.mT, bias), "go through max"),
    "rounded": (
        lambda q, k, **_: torch.div(q @ k.mT, 0.1, rounding_mode="floor"), "go through div"
    ),
    "square": (
        lambda q, k, **_: (q @ k.mT) * (q @ k.mT), "are products multiplied or divided by products"
    ),
    "inverse": (lambda q, k, **_: 1.0 / (q @ k.mT), "are divided by products|go through reciproc"),
    "dropped": (lambda q, k, **_: F.dropout(q @ k.mT, 0.5), "are dropped out"),
    "talking heads": (
        lambda q, k, bias, **_: torch.einsum("bhls,hg->bgls", q @ k.mT + bias, HEADS),
        "have numbers added",
    ),
    "view": (_through_a_view, "have numbers added"),
    "data": (_through_data, "have numbers added"),
    "into zeros": (_into_zeros, "are written into a tensor"),
    "out": (_overwritten, "have numbers added"),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("way", OTHERS)
def test_other_scores_are_refused_with_the_reason(way: str, mode: Any) -> None:
    make, why = OTHERS[way]
    model = Attention(make)
    with mode():
        inputs = given()
        with (
            pytest.raises(acutance.ApplyError, match=f"cannot be applied to Attention: .*{why}"),
            acutance.apply(model, scaling.HeadTable([FACTOR])),
        ):
            model(inputs)


def test_weights_in_the_dtype_of_their_scores_are_weights() -> None:
    """As in XLM: what ``type_as`` gives is made of weights, not of the scores beside them."""

    class Cast(nn.Module):
        def forward(self, given: dict[str, Tensor], factor: float = 1.0) -> Tensor:
            scores = (given["q"] * factor) @ given["k"].mT
            weights = torch.softmax(scores.float(), dim=-1).type_as(scores)
            return weights @ given["k"]

    model, inputs = Cast(), given()
    with acutance.apply(model, scaling.HeadTable([FACTOR])) as applied:
        got = model(inputs)
    assert applied.calls == {"Cast": 1}
    torch.testing.assert_close(got, model(inputs, FACTOR), rtol=0, atol=1e-5)


def test_a_number_added_outside_of_what_is_followed_is_noticed() -> None:
    """A write that no function of PyTorch makes, such as NumPy's, is left to its author; one of a
    function that is not known is counted by PyTorch."""

    def way(q: Tensor, k: Tensor, bias: Tensor, **_: Tensor) -> Tensor:
        scores = q @ k.mT
        with torch._C.DisableTorchFunction():
            scores.add_(bias)
        return scores

    model = Attention(way)
    with (
        pytest.raises(acutance.ApplyError, match="its scores were overwritten"),
        acutance.apply(model, scaling.HeadTable([FACTOR])),
    ):
        model(given())
