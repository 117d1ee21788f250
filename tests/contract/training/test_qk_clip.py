"""QKClip: factors, layouts of weights, ranks, and what it must leave alone."""

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

VOCABULARY = 61


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(7))


def sharpen(model: nn.Module, factor: float = 6.0) -> nn.Module:
    """Longer weights, and biases that are not zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_bias=True,
            max_position_embeddings=32,
        )
    )


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        )
    )


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=32,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
        )
    )


def deepseek(rank: int | None = 16) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=2,
            q_lora_rank=rank,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
            max_position_embeddings=32,
            pad_token_id=0,
        )
    )


LANGUAGE: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "neox": neox,
    "phi3": phi3,
    "bert": bert,
    "t5": t5,
    "deepseek": deepseek,
    "deepseek-full-rank": lambda: deepseek(None),
}


class Vectors(nn.Module):
    """An attention module fed with vectors."""

    def __init__(self, attend: nn.Module, key_width: int = 32) -> None:
        super().__init__()
        self.attend = attend
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(2, 9, 32, generator=generator)
        self.y = self.x if key_width == 32 else torch.randn(2, 7, key_width, generator=generator)

    def forward(self, ids: Tensor) -> Any:
        x, y = (part.to(next(self.parameters()).dtype) for part in (self.x, self.y))
        x = y if self.y is self.x else x
        return self.attend(x, y, y)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: Vectors(nn.MultiheadAttention(32, 4, batch_first=True)),
    "torch-without-bias": lambda: Vectors(
        nn.MultiheadAttention(32, 4, batch_first=True, bias=False)
    ),
    "torch-separate": lambda: Vectors(
        nn.MultiheadAttention(32, 4, batch_first=True, kdim=12, vdim=12), 12
    ),
    "torch-extra-key": lambda: Vectors(
        nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True)
    ),
    "ours": lambda: Vectors(MultiheadAttention(32, 4, batch_first=True)),
    "ours-grouped": lambda: Vectors(
        MultiheadAttention(32, 4, batch_first=True, num_kv_heads=2, positions="rotary")
    ),
    "ours-alibi": lambda: Vectors(MultiheadAttention(32, 4, batch_first=True, positions="alibi")),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    return sharpen({**LANGUAGE, **MODULES}[name]())


def measure(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Largest product of each head by call, in the order the layers ran."""
    watch = training.AttentionWatch(model, gradients=False, products=True)
    with watch:
        model(tokens())
    return [
        (
            rows.module,
            torch.where(rows.kept, rows.statistics.max_logit, -torch.inf).amax((0, 2)).double(),
        )
        for rows in watch.rows
    ]


def test_factors_are_those_of_the_article() -> None:
    model = build("torch").double()
    attend = model.attend
    before = {name: value.clone() for name, value in attend.named_parameters()}
    largest = measure(model)[0][1]
    tau = float(largest.min()) / 3
    clip = training.QKClip(model, tau, alpha=0.5)
    with clip:
        model(tokens())
    factors = torch.tensor(clip.step().layers[0].factor, dtype=torch.float64)
    torch.testing.assert_close(factors, tau / largest, rtol=1e-12, atol=0)
    for name in ("in_proj_weight", "in_proj_bias"):
        whole, was = getattr(attend, name), before[name]
        for head in range(4):
            for start in (8 * head, 32 + 8 * head):
                want = was[start : start + 8] * factors[head].sqrt()
                torch.testing.assert_close(whole[start : start + 8], want, rtol=1e-12, atol=0)
        assert torch.equal(whole[64:], was[64:])


def test_latent_attention_takes_the_article_s_rule() -> None:
    model = build("deepseek").double()
    first, largest = measure(model)[0]
    attend = dict(model.named_modules())[first]
    before = copy.deepcopy(attend.state_dict())
    clip = training.QKClip(model, float(largest.min()) / 2, layers=[0])
    with clip:
        model(tokens())
    factor = torch.tensor(clip.step().layers[0].factor, dtype=torch.float64)
    now = attend.state_dict()
    query = (now["q_b_proj.weight"] / before["q_b_proj.weight"]).view(4, 12, -1)
    torch.testing.assert_close(query[:, :8], factor.sqrt()[:, None, None].expand(4, 8, 16))
    torch.testing.assert_close(query[:, 8:], factor[:, None, None].expand(4, 4, 16))
    key = (now["kv_b_proj.weight"] / before["kv_b_proj.weight"]).view(4, 14, -1)
    torch.testing.assert_close(key[:, :8], factor.sqrt()[:, None, None].expand(4, 8, 16))
    assert bool((key[:, 8:] == 1).all())
    shared = "kv_a_proj_with_mqa.weight"
    assert torch.equal(now[shared], before[shared])


def test_grouped_keys_are_left_alone() -> None:
    model = build("llama")
    first, largest = measure(model)[0]
    attend = dict(model.named_modules())[first]
    keys = attend.k_proj.weight.clone()
    clip = training.QKClip(model, float(largest.min()) / 2)
    with clip:
        model(tokens())
    assert len(clip.step().clipped) >= 4
    assert torch.equal(attend.k_proj.weight, keys)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_settle_holds_every_head_of_every_layer(name: str) -> None:
    model = build(name)
    tau = min(float(largest.min()) for _, largest in measure(model)) / 2
    reports = training.QKClip(model, tau).settle(lambda: model(tokens()))
    assert 2 <= len(reports) <= 3  # each of two layers, and the round that finds nothing
    assert all(bool((largest <= tau).all()) for _, largest in measure(model))


def test_bfloat16_stays_under_tau() -> None:
    model = build("torch").to(torch.bfloat16)
    largest = measure(model)[0][1]
    tau = float(largest.min()) / 2
    clip = training.QKClip(model, tau)
    with clip:
        model(tokens())
    clip.step()
    after = measure(model)[0][1]
    assert bool((after <= tau).all())
    assert bool((after >= 0.9 * tau).all())


def test_nothing_happens_under_tau_and_maxima_add_up_until_the_step() -> None:
    model = build("torch")
    before = copy.deepcopy(model.state_dict())
    clip = training.QKClip(model, 1e6)
    with clip:
        model(tokens())
    first = {name: value.clone() for name, value in clip.state_dict()["maxima"].items()}
    model.x *= 2
    model.y = model.x
    with clip:
        model(tokens())
    assert bool((clip.state_dict()["maxima"]["attend"] > first["attend"]).all())
    report = clip.step()
    assert report.clipped == ()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ProbeError, match=r"captured no attention of .* since its last step"):
        clip.step()
    assert clip.steps == 1


def test_a_step_before_any_attention_is_an_error() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ProbeError, match=r"captured no attention of Linear .* inside 'with clip:'"):
        training.QKClip(layer).step()


def test_padded_queries_and_hidden_keys_do_not_count() -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 6, 32)
    x[:, 4:] *= 100
    clip = training.QKClip(attend)
    with clip:
        attend(x, x, x, key_padding_mask=torch.arange(6)[None] >= 4)
    padded = clip.step().max_logit
    with clip:
        attend(x[:, :4], x[:, :4], x[:, :4])
    assert padded == pytest.approx(clip.step().max_logit, rel=1e-6)


def test_softcap_bias_and_float_masks_are_left_out_of_the_maximum() -> None:
    model = build("t5")
    name, largest = measure(model)[0]
    attend = dict(model.named_modules())[name]
    with torch.no_grad():
        attend.relative_attention_bias.weight.add_(50.0)
    torch.testing.assert_close(measure(model)[0][1], largest, rtol=1e-5, atol=0)


def test_a_head_that_is_not_finite_is_reported_and_left() -> None:
    model = build("torch")
    with torch.no_grad():
        model.attend.in_proj_weight[0, 0] = torch.nan
    before = model.attend.in_proj_weight.clone()
    clip = training.QKClip(model, 1e-3)
    with clip:
        model(tokens())
    report = clip.step()
    assert report.not_finite == (("attend", 0),)
    assert [head for _, head in report.clipped] == [1, 2, 3]
    assert torch.equal(model.attend.in_proj_weight[1:8], before[1:8])
