"""QKClip of projections with LoRA and DoRA adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from acutance import training

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # what PEFT warns of is its own
TARGETS = {
    "llama": ["q_proj", "k_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj"],
    "gpt2": ["c_attn"],
}


def base(kind: str) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, **sizes, eos_token_id=1, bos_token_id=1))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if kind == "llama" else 2}
    configuration, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # with biases and grouped queries
    }[kind]
    return model(configuration(vocab_size=50, **sizes, **heads))


def adapted(kind: str, **given: Any) -> Any:
    """A model with adapters that are not zero, and large queries and keys."""
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2", **given
    )
    model = peft.get_peft_model(base(kind), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(target in name for target in TARGETS[kind]) and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
            elif "magnitude" in name:
                parameter.mul_(4)
    return model


IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_step_bounds_the_first_layer_and_changes_heads_above_only(kind: str, dora: bool) -> None:
    model = adapted(kind, use_dora=dora)
    with training.AttentionWatch(model, gradients=False, products=True) as before, torch.no_grad():
        model(IDS)
    logits = before.rows[0].statistics.max_logit.amax((0, 2))
    tau = float(logits.sort().values[1:3].mean())  # two heads above, two below
    clip = training.QKClip(model, tau, layers=[0], base_weights=True)
    with clip, torch.no_grad():
        model(IDS)
    report = clip.step()
    assert {head for _, head in report.clipped} == set((logits > tau).nonzero()[:, 0].tolist())
    with training.AttentionWatch(model, gradients=False, products=True) as after, torch.no_grad():
        model(IDS)
    clipped = after.rows[0].statistics.max_logit.amax((0, 2))
    assert bool((clipped <= tau).all())
    torch.testing.assert_close(clipped[logits > tau], torch.full((2,), tau), rtol=1e-4, atol=0)
    assert torch.equal(clipped[logits <= tau], logits[logits <= tau])
    merged = copy.deepcopy(model).merge_and_unload()
    with training.AttentionWatch(merged, gradients=False, products=True) as saved, torch.no_grad():
        merged(IDS)
    torch.testing.assert_close(
        saved.rows[0].statistics.max_logit, after.rows[0].statistics.max_logit, rtol=1e-3, atol=1e-3
    )


def test_frozen_weights_are_changed_on_request_only() -> None:
    model = adapted("llama")
    before = copy.deepcopy(model.state_dict())
    clip = training.QKClip(model, 1e-3)
    with clip:
        model(IDS)
    with pytest.raises(ValueError, match=r"LoRA adapters, .* pass base_weights=True and save the"):
        clip.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_dora_without_bias_changes_the_adapter_only() -> None:
    model = adapted("llama", use_dora=True)
    before = copy.deepcopy(model.state_dict())
    clip = training.QKClip(model, 1e-3)
    with clip:
        model(IDS)
    assert len(clip.step().clipped) == 8
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(before[name], value)
    }
    assert len(changed) == 4
    assert all("lora_magnitude_vector" in name for name in changed)


def test_a_training_run_stays_below_tau() -> None:
    model = adapted("llama").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    clip = training.QKClip(model, 2.0, base_weights=True)
    for _ in range(20):
        optimizer.zero_grad()
        with clip:
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        clip.step()
    clip.settle(lambda: model(IDS))
    with training.AttentionWatch(model, gradients=False, products=True) as watch, torch.no_grad():
        model(IDS)
    assert all(float(rows.statistics.max_logit.max()) <= 2.0 for rows in watch.rows)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), r"\(Linear\)"),
        (lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]), r"\(Linear\)"),
    ],
)
def test_other_adapters_are_refused(config: Any, message: str) -> None:
    model = peft.get_peft_model(base("llama"), config())
    clip = training.QKClip(model, 1e-3, base_weights=True)
    with clip:
        model(IDS)
    with pytest.raises(ValueError, match=f"an adapter other than LoRA and DoRA {message}"):
        clip.step()


def test_merged_dora_is_refused() -> None:
    model = adapted("llama", use_dora=True)
    model.merge_adapter()
    clip = training.QKClip(model, 1e-3)
    with clip:
        model(IDS)
    with pytest.raises(ValueError, match="DoRA adapters that are merged"):
        clip.step()
