"""QKClip: with an optimiser, its state, its options, and the layers it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acutance import training
from acutance.nn import MultiheadAttention
from acutance.probing import ProbeError
from acutance.scores import QKNorm


class Fed(nn.Module):
    """An attention module with something to attend to."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend
        self.x = 4 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(5))

    def forward(self) -> Any:
        return self.attend(self.x, self.x, self.x)


def fed() -> Fed:
    torch.manual_seed(1)
    return Fed(nn.MultiheadAttention(32, 4, batch_first=True))


def test_the_optimiser_steps_it() -> None:
    model = fed().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    clip = training.QKClip(model, 2.0)
    handle = clip.after(optimizer)
    with clip:
        loss = model()[0].square().mean()
    loss.backward()
    optimizer.step()
    assert clip.steps == 1
    assert int(clip.clips["attend"].sum()) == 4
    handle.remove()
    optimizer.step()
    assert clip.steps == 1


def test_its_state_goes_on_elsewhere() -> None:
    model = fed()
    clip = training.QKClip(model, 2.0, alpha=0.25)
    with clip:
        model()
    other = copy.deepcopy(model)
    again = training.QKClip(other, 7.0)
    again.load_state_dict(clip.state_dict())
    assert again.step() == clip.step()
    assert torch.equal(model.attend.in_proj_weight, other.attend.in_proj_weight)
    assert again.state_dict()["alpha"] == 0.25
    with pytest.raises(ValueError, match="the state of a QKClip must have"):
        again.load_state_dict({"tau": 1.0})


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.q_norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v)


class Scored(nn.Module):
    """Attention of queries and keys that the module around it projects."""

    def forward(self, *heads: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*heads)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.scored = Scored()

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = [project(x).unflatten(-1, (4, 8)).transpose(1, 2) for project in projections]
        return self.scored(*heads)


def test_projections_of_the_module_around_attention_are_scaled() -> None:
    torch.manual_seed(0)
    model, x = Around(), 4 * torch.randn(2, 9, 32)
    clip = training.QKClip(model, 1.0)
    with clip:
        model(x)
    report = clip.step()
    assert [layer.module for layer in report.layers] == ["scored"]
    assert report.max_logit > 1.0
    with clip:
        model(x)
    assert clip.step().max_logit == pytest.approx(1.0, rel=1e-4)


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q)


def test_layers_that_cannot_be_clipped_are_named() -> None:
    x = torch.randn(1, 5, 32)
    for model, reason in (
        (Normed(), "q_norm normalises .* which undoes"),
        (Strange(), "has no known projections"),
    ):
        clip = training.QKClip(model, 1.0)
        with clip:
            model(x)
        with pytest.raises(ValueError, match=reason):
            clip.step()
    ours = Fed(MultiheadAttention(32, 4, batch_first=True, score=QKNorm(8)))
    clip = training.QKClip(ours, 1.0)
    with clip:
        ours()
    with pytest.raises(ValueError, match="only for dot and scaled dot products"):
        clip.step()
    reparametrized = Fed(nn.MultiheadAttention(32, 4, batch_first=True))
    training.sigma_reparam(reparametrized.attend, "in_proj_weight")
    clip = training.QKClip(reparametrized, 1.0)
    with clip:
        reparametrized()
    with pytest.raises(ValueError, match="computed by a parametrization"):
        clip.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0.0}, "tau must be a finite number above 0"),
        ({"alpha": -0.1}, "alpha must be a finite number at least 0"),
        ({"alpha": 1.5}, "alpha must be between 0 and 1"),
        ({"layers": []}, r"layers must name at least one, got \[\]"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.QKClip(nn.Linear(2, 2), **options)


def test_bad_types_and_absent_layers() -> None:
    with pytest.raises(ValueError, match="layers='attn' is not a layer of the model"):
        training.QKClip(nn.Linear(2, 2), layers="attn")
    with pytest.raises(TypeError, match=r"layers must contain numbers, ranges and text, got 1\.5"):
        training.QKClip(nn.Linear(2, 2), layers=[1.5])
    model = fed()
    other = [name for name, part in model.named_modules() if name and not list(part.children())]
    with (
        pytest.raises(ProbeError, match="matches none of the layers that ran: attend"),
        training.QKClip(model, layers=other[-1]),
    ):
        model()


def test_layers_are_chosen_by_block_and_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, eos_token_id=2)
    )
    ids = torch.randint(3, 61, (2, 11))
    for layers, want in (([1], ["transformer.h.1.attn"]), (["*.0.attn"], ["transformer.h.0.attn"])):
        clip = training.QKClip(model, layers=layers)
        with clip:
            model(ids)
        assert [layer.module for layer in clip.step().layers] == want


class Plain(nn.Module):
    """Attention with two projections, which ``change`` may alter before the scores."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda q: q) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return nn.functional.scaled_dot_product_attention(self.change(q), k, v)


@pytest.mark.parametrize("batch", [1, 3])
def test_queries_that_are_zero_or_not_a_number_stop_no_forward(batch: int) -> None:
    x = torch.randn(batch, 7, 32, generator=torch.Generator().manual_seed(4))
    model = Plain()
    with torch.no_grad():
        model.q_proj.weight.zero_()
    clip = training.QKClip(model, 1.0)
    with clip:
        model(x)
    report = clip.step()
    assert report.max_logit == 0
    assert report.not_finite == report.clipped == ()
    model = Plain()
    clip = training.QKClip(model, 1e-3)
    model.q_proj.register_forward_hook(poison)
    with clip:
        model(x)
    report = clip.step()
    assert report.not_finite == (("Plain", 1),)
    assert [head for _, head in report.clipped] == [0, 2, 3]


def poison(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    output = output.clone()
    output[0, 2, 9] = torch.nan  # of head 1
    return output


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda q: nn.functional.normalize(q, dim=-1),
        lambda q: q + torch.arange(8.0),
        lambda q: q.clamp(-0.2, 0.2),
        lambda q: q.flip(1),
    ],
)
def test_what_lies_between_is_refused_for_a_repeated_prompt(
    change: Callable[[Tensor], Tensor], batch: int
) -> None:
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(4)).expand(batch, 7, 32)
    clip = training.QKClip(Plain(change), 1e-3)
    with clip:
        clip._model(x)
    with pytest.raises(ValueError, match="not just rotated or scaled outputs"):
        clip.step()
