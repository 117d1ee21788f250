"""A law on hand-written attention in odd circumstances: masks, interrupts, laws within laws."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance import scaling, training

LAW = scaling.LogN(train_length=3, n_min=2)
DIM, HEADS, LENGTH = 16, 4, 11
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Causal attention; a subclass makes weights of queries and keys in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = HEADS, nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        return self.attend(q * factor, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 2).masked_fill(LATER, -torch.inf).softmax(-1) @ v


def built(kind: type[nn.Module], seed: int = 1) -> tuple[Any, Tensor]:
    torch.manual_seed(seed)
    return kind().double().eval(), 3 * torch.randn(2, LENGTH, DIM).double()


def factor() -> Tensor:
    return LAW.factor(torch.arange(1, LENGTH + 1), dtype=torch.float64).unsqueeze(-1)


@torch.no_grad()
def check(kind: type[nn.Module], want: Tensor | None = None) -> None:
    model, x = built(kind)
    plain = model(x)
    want = model(x, factor() if want is None else want)
    assert (want - plain).abs().max() > 0.1
    with acutance.apply(model, LAW):
        got = model(x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    with acutance.apply(model, scaling.HeadTable([1.0])):
        assert torch.equal(model(x), plain)


# -- masks ----------------------------------------------------------------------------------------


class AddedMask(Attention):
    """Where a score above 0 lifts the mask above −10⁹."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 2 + LATER.double() * -1e9).softmax(-1) @ v


class RoundedMask(Attention):
    """Where bfloat16 rounds the mask to above −10⁹."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(LATER, -1e9, 0.0).bfloat16()
        return (q @ k.mT / 2 + mask.double()).softmax(-1) @ v


class MaskInPlace(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / 2
        scores.data.masked_fill_(LATER, -1e9)
        scores.view(-1, LENGTH, LENGTH)[:, :, 2].mul_(1.5)
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("kind", [AddedMask, RoundedMask, MaskInPlace])
def test_keys_that_a_mask_hides_do_not_count(kind: type[Attention]) -> None:
    check(kind)
    model, x = built(kind)
    with torch.no_grad(), acutance.probe(model, metrics=["n_keys"]) as probe:
        model(x)
    mean = (LENGTH + 1) / 2
    assert probe.summary().columns()["n_keys_mean"] == pytest.approx([mean] * HEADS)


class Shallow(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 2).masked_fill(LATER, -1e4).softmax(-1) @ v


def test_a_mask_that_does_not_count_as_one_is_told() -> None:
    model, x = built(Shallow)
    match = "^Shallow hides keys with a number above -1e9"
    with pytest.warns(UserWarning, match=match), acutance.apply(model, LAW):
        model(x)


# -- what is attention, and what is not -----------------------------------------------------------


class Stepwise(nn.Module):
    """One query at a time, with scores of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        keys, state = self.memory(x), x[:, 0]
        for _ in range(3):
            scores = torch.bmm(keys, (state * factor).unsqueeze(2)).squeeze(2) / 8
            state = state + torch.bmm(scores.softmax(1).unsqueeze(1), x).squeeze(1)
        return state


class Pooling(nn.Module):
    """Learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Parameter(2 * torch.randn(3, DIM)), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        return torch.einsum("nd,bsd->bns", self.query * factor, self.key(x)).softmax(-1) @ x


@pytest.mark.parametrize("kind", [Stepwise, Pooling])
def test_rows_that_see_every_key(kind: type[nn.Module]) -> None:
    check(kind, LAW.factor(torch.tensor([LENGTH]), dtype=torch.float64))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attention()
        self.route = nn.Parameter(torch.randn(DIM, 3))

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        return self.attend(x, factor) * (x @ self.route).softmax(-1)[..., :1]


class Functional(nn.Module):
    """With other tensors in the place of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Routed()

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        weights = {name: part.detach() * 1.0 for name, part in self.inner.named_parameters()}
        found: Tensor = torch.func.functional_call(self.inner, weights, (x, factor))
        return found


@pytest.mark.parametrize("kind", [Routed, Functional])
def test_a_router_is_left_alone_whatever_stands_for_its_weights(kind: type[nn.Module]) -> None:
    check(kind)


class Exponentials(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        powers = (q @ k.mT / 2).masked_fill(LATER, -torch.inf)
        powers = torch.exp(powers - powers.amax(-1, keepdim=True))
        return powers / (powers.sum(-1, keepdim=True) + 1e-9) @ v


class LogSums(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / 2).masked_fill(LATER, -torch.inf)
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


class KeysFirst(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k @ q.mT / 2).masked_fill(LATER.T, -torch.inf).softmax(-2).mT @ v


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Exponentials, "are exponentiated and divided by their sum"),
        (LogSums, "are exponentiated and divided by their sum"),
        (KeysFirst, r"its softmax is over dimension -2 of \(2, 4, 11, 11\)"),
    ],
)
def test_other_softmaxes_are_refused_next_to_layers_that_are_scaled(
    kind: type[Attention], why: str
) -> None:
    model, x = built(kind)
    both = nn.Sequential(built(Attention)[0], model)
    match = f"cannot be applied to 1: .*{why}"
    with pytest.raises(acutance.ApplyError, match=match), acutance.apply(both, LAW):
        both(x)
    with acutance.apply(both, {"0": LAW}) as applied:
        both(x)
    assert applied.calls == {"0": 1}


class Mixed(Attention):
    """Weights that are mixed over heads before they are used, of scores that are too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(HEADS, HEADS, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mix(self.mix(q @ k.mT).softmax(-1)) @ v


def test_what_may_be_attention_and_was_left_alone_is_listed() -> None:
    model, x = built(Mixed)
    both = nn.Sequential(built(Attention)[0], model)
    with acutance.apply(both, LAW) as applied:
        both(x)
    assert applied.calls == {"0": 1}
    assert "no matrix product uses its softmax" in applied.skipped["1"]


# -- laws within laws, interrupts, threads --------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_laws_within_laws_multiply(turned: bool) -> None:
    model, x = built(Attention)
    laws = [LAW, scaling.HeadTable([1.5])]
    outer, inner = laws[::-1] if turned else laws
    with torch.no_grad():
        with acutance.apply(model, outer), acutance.apply(model, inner):
            got = model(x)
        torch.testing.assert_close(got, model(x, 1.5 * factor()), rtol=0, atol=1e-11)


@torch.no_grad()
def test_qk_clip_sees_the_scaled_products() -> None:
    model, x = built(Attention)
    clip = training.QKClip(model, tau=1.0)
    with acutance.apply(model, scaling.HeadTable([2.0])), clip:
        model(x)
    q, k, _ = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in model.qkv(x).chunk(3, -1))
    want = (q @ k.mT).masked_fill(LATER, -math.inf).amax((0, 2, 3)).tolist()
    assert clip._maxima["Attention"].tolist() == pytest.approx(want, rel=1e-6)


class Stopped(Attention):
    stop = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.stop:
            raise KeyboardInterrupt("Ctrl-C")
        return super().attend(q, k, v)


@torch.no_grad()
def test_an_interrupt_leaves_neither_law_nor_mode_behind() -> None:
    """PyTorch calls no hook after an interrupt."""
    model, x = built(Stopped)
    plain = model(x)
    model.stop = True

    def run() -> None:
        with acutance.apply(model, LAW), acutance.probe(model):
            model(x)

    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        run()
    model.stop = False
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.equal(model(x), plain)
    with acutance.apply(model, LAW):
        torch.testing.assert_close(model(x), model.forward(x, factor()))


def test_threads_do_not_disturb_each_other() -> None:
    model, x = built(Attention)
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                found[number] = model(x)

    with acutance.apply(model, LAW) as applied:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert applied.calls == {"Attention": 40}
    for got in found.values():
        torch.testing.assert_close(got, model(x, factor()), rtol=0, atol=1e-11)
