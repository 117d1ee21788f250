"""What must be known before any number: a part of the text, an untrained model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acutance
from acutance.diagnose import rules
from acutance.probing import CLASSES, THRESHOLDS
from acutance.probing.causes import is_untrained
from acutance.summary.layer import notices


def _block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)


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


def test_a_probe_says_that_its_model_is_untrained() -> None:
    block = _block().eval()
    with acutance.probe(block) as probe:
        block(torch.randn(1, 12, 64))
    summary = probe.summary()
    assert summary.about["untrained"] is True
    assert len(summary.to_dict()["notices"]) == 1
    with torch.no_grad():
        block.norm1.weight.mul_(1.1)
    assert "untrained" not in probe.summary().about


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


@pytest.mark.parametrize("name", ["few_keys", "part", "lift"])
def test_conventions_of_this_library_are_called_so(name: str) -> None:
    assert THRESHOLDS[name].source == "acutance's own threshold"


def test_what_a_terminal_shows_is_one_line() -> None:
    block = _block().eval()
    opened = acutance.probe(block)
    assert repr(opened).startswith("Probe of TransformerEncoderLayer: nothing read yet;")
    with opened as probe:
        block(torch.randn(1, 12, 64))
    assert "1 layer read" in repr(probe)
    summary = probe.summary()
    assert repr(summary).startswith("HeadSummary of 4 heads in 1 layer, ")
    assert "\n" not in repr(summary)
    assert "<table" in summary._repr_html_()
    assert [one.kind for one in probe.findings()] == ["sharpest", "most_diffuse"]
