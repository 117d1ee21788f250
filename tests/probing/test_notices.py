"""What must be known before any number: a part of the text, an untrained model."""

from __future__ import annotations

import torch
from torch import nn

from acutance.diagnose import rules
from acutance.probing import CLASSES, THRESHOLDS
from acutance.probing.causes import is_untrained
from acutance.summary.layer import notices
from tests.contract.probing.test_notices import _block


def test_a_model_as_it_was_drawn_is_recognised() -> None:
    from transformers import GemmaConfig, GemmaModel, LlamaConfig, LlamaModel

    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    models = [_block(), LlamaModel(LlamaConfig(**sizes)), GemmaModel(GemmaConfig(**sizes))]
    assert [is_untrained(model) for model in models] == [True, True, True]


def test_a_step_of_training_is_enough_not_to_be() -> None:
    block = _block().train()
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-4)
    block(torch.randn(2, 8, 64)).square().mean().backward()
    optimiser.step()
    assert not is_untrained(block)


def test_gains_folded_into_trained_matrices_are_not_untrained() -> None:
    block = _block()
    with torch.no_grad():
        block.self_attn.in_proj_weight.mul_(torch.linspace(0.5, 2.0, 64))
    assert not is_untrained(block)


def test_without_norms_nothing_is_claimed() -> None:
    assert not is_untrained(nn.MultiheadAttention(64, 4))
    assert not is_untrained(nn.TransformerEncoderLayer(64, 4, device="meta"))


def test_a_part_of_a_text_is_said_with_its_size() -> None:
    about = {"complete": False, "windows": 28, "windows_in_all": 1092, "tokens": 14336}
    assert notices(about)[0].startswith("Incomplete: 28 of 1,092 windows were read (14,336 tokens)")
    assert "of shard 1/3" in notices(about | {"shard": "1/3"})[0]
    assert notices({"complete": False})[0].startswith("Incomplete: only a part of the windows")
    assert notices({"complete": True}) == []


def test_classes_and_rules_read_one_table() -> None:
    for name, one in CLASSES.items():
        assert (one.threshold, one.source) == (THRESHOLDS[name].value, THRESHOLDS[name].source)
    assert THRESHOLDS["entropy_collapse"].value == rules.COLLAPSE
    assert THRESHOLDS["large_logits"].value == rules.LARGE_LOGIT
    assert (CLASSES["sink"].threshold, CLASSES["dead"].threshold) == (rules.SINK, rules.DEAD)
    assert all(one.reason and one.source and one.name == key for key, one in THRESHOLDS.items())
