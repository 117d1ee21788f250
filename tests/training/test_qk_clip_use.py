"""QKClip: with an optimiser, its state, its options, and the layers it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from acutance import training
from acutance.training.qk_clip import LAYOUTS
from tests.contract.training.test_qk_clip_use import Plain


class Mixed(nn.Module):
    """One projection for all three, by head, under a name that means blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (4, 3, 8)).permute(3, 0, 2, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


INTERLEAVED = LAYOUTS.index("interleaved")


def test_a_repeated_prompt_tells_the_layout_by_its_tokens() -> None:
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(4)).expand(3, 7, 32)
    clip = training.QKClip(Mixed(), 1e9)
    with clip:
        clip._model(x)
    assert clip.state_dict()["layouts"] == {"Mixed": INTERLEAVED}


def test_tokens_that_are_all_alike_tell_no_layout_and_others_do() -> None:
    model = Mixed()
    generator = torch.Generator().manual_seed(4)
    alike = torch.randn(1, 1, 32, generator=generator).expand(3, 7, 32)
    clip = training.QKClip(model, 1e9)
    with clip:
        model(alike)
    assert clip.state_dict()["layouts"] == {}
    clip.step()
    with clip:
        model(torch.randn(3, 7, 32, generator=generator))
    assert clip.state_dict()["layouts"] == {"Mixed": INTERLEAVED}


class Dropping(nn.Module):
    """Layers of which some may not run, and an unused and a misnamed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Plain(), Mixed(), Plain(lambda q: q.clamp(-0.2, 0.2))])
        self.in_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor, *run: int, fail: bool = False) -> Tensor:
        x = self.in_proj(x)
        for number in run:
            out: Tensor = self.layers[number](x)
            if fail:
                raise RuntimeError("midway")
        return out


def test_a_layer_is_checked_whenever_it_first_runs() -> None:
    model = Dropping()
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(4))
    clip = training.QKClip(model, 1e9)
    with pytest.raises(RuntimeError, match="midway"), clip:
        model(x, 0, fail=True)
    assert set(clip.state_dict()["layouts"]) == {"layers.0"}
    with clip:
        model(x, 0)
    clip.step()
    last = {model.layers[2].q_proj, model.layers[2].k_proj}
    assert clip._with_unknown_layout() == last | {
        model.layers[1].qkv
    }  # in_proj ran without any attention
    with clip:
        model(x, 0, 1)
    assert clip._with_unknown_layout() == last
    assert clip.state_dict()["layouts"]["layers.1"] == INTERLEAVED
    clip.step()
    with clip:
        model(x, 2)
    with pytest.raises(ValueError, match=r"layers\.2 cannot be clipped"):
        clip.step()
    chosen = training.QKClip(model, 1e9, layers=[1])
    assert chosen._with_unknown_layout() == {model.layers[1].qkv}
    with chosen:
        model(x, 0, 1)
    assert chosen._with_unknown_layout() == set()


class Twice(Plain):
    """Projects two inputs before it attends with the first."""

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.q_proj(x), self.q_proj(x.flip(1) + 1)
        q, k = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (first, self.k_proj(x)))
        return nn.functional.scaled_dot_product_attention(self.change(q), k, k)


class Alone(Mixed):
    """Runs its projection twice and attends with neither output."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.qkv(x) + self.qkv(x.flip(1)).square()).unflatten(-1, (3, 4, 8)).unbind(2)
        return nn.functional.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)))


def test_one_of_several_outputs_is_enough_and_none_refuses_nothing() -> None:
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(4))
    clip = training.QKClip(Twice(), 1e9)
    with clip:
        clip._model(x)
        clip._model(x)
    assert clip.state_dict()["layouts"] == {"Twice": LAYOUTS.index("separate")}
    model = Alone()
    clip = training.QKClip(model, 1e9)
    with clip:
        model(x)
    assert clip.state_dict()["layouts"] == {}
    assert clip.step().layers


def partly(q: Tensor) -> Tensor:
    """An attention factor on the rotated part, here of 4 entries."""
    return torch.cat([1.3 * q[..., :4].flip(-1), q[..., 4:]], -1)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_rotary_part_may_have_its_own_factor(batch: int) -> None:
    x = torch.randn(batch, 7, 32, generator=torch.Generator().manual_seed(4))
    for known in ({"rotary_ndims": 4}, {"config": SimpleNamespace(partial_rotary_factor=0.5)}):
        for change, right in ((partly, True), (lambda q: partly(q).clamp(-0.2, 0.2), False)):
            model = Plain(change)
            for name, value in known.items():
                setattr(model, name, value)
            clip = training.QKClip(model, 1e9)
            with clip:
                model(x)
            separate = LAYOUTS.index("separate")
            assert (clip.state_dict()["layouts"] == {"Plain": separate}) is right


def test_phi3_with_an_attention_factor_is_clipped() -> None:
    from transformers import Phi3Config, Phi3Model

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        partial_rotary_factor=0.75,
    )
    model = Phi3Model(config).eval()
    model.rotary_emb.attention_scaling = 1.2  # as longrope has it
    clip = training.QKClip(model, 1e-3)
    with clip:
        model(torch.randint(3, 61, (2, 11)))
    assert set(clip.state_dict()["layouts"].values()) == {LAYOUTS.index("blocks")}
    assert clip.step().clipped
