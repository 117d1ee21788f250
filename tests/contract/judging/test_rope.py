"""RoPE settings as a remedy: what plain transformers computes, and gone when the context ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.judging import RopeRemedy
from tests.contract import texts
from tests.contract.trained import decoder

TRAINED = "original_max_position_embeddings"
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def ids(length: int) -> Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def test_only_layers_that_see_all_keys_change() -> None:
    """Gemma 3 has settings by type of layer: those of its windows stay."""
    import transformers as hf

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**SIZES, head_dim=8, layer_types=kinds)
    model, tokens = hf.Gemma3ForCausalLM(config).eval(), ids(60)
    remedy = RopeRemedy("linear", {"factor": 4.0})
    before = model(input_ids=tokens).logits
    with remedy.applied(model):
        assert not torch.equal(model(input_ids=tokens).logits, before)
    written = remedy.configuration(model, 256)["rope_parameters"]
    assert written["full_attention"]["factor"] == 4.0
    assert written["sliding_attention"] == config.rope_parameters["sliding_attention"]


def test_settings_are_judged_like_laws() -> None:
    """The decoder's loss in its own context rises with other frequencies."""
    text = texts.read(texts.files("held out")).long()
    found = acutance.judge(decoder(), text[: 4 * 128].view(4, 128), "rope:linear,factor=2")
    assert [(law.name, law.verdict) for law in found.laws] == [("rope:linear,factor=2", "hurts")]


def test_a_model_without_rope_is_refused() -> None:
    import transformers as hf

    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None))
    match = "GPT2LMHeadModel has no rotary position embedding"
    with pytest.raises(acutance.ApplyError, match=match):
        acutance.judge(model, ids(32), "rope:yarn,factor=2")


def test_settings_are_computed_from_a_stated_trained_length() -> None:
    """As if the text of the law said it; the configuration has 4096."""
    code = texts.read(texts.files("held out")).long()[: 4 * 256].view(4, 256)
    laws = ["rope:yarn,factor=4", "rope:linear,factor=2", f"rope:dynamic,factor=2,{TRAINED}=64"]
    found = acutance.judge(decoder(), code, laws, train_length=128)
    assert [law.name for law in found.laws] == [f"{laws[0]},{TRAINED}=128", *laws[1:]]
    assert (
        found.laws == acutance.judge(decoder(), code, [f"{laws[0]},{TRAINED}=128", *laws[1:]]).laws
    )
    plain = acutance.judge(decoder(), code, laws[:1])
    assert (plain.laws[0].name, plain.laws[0].delta != found.laws[0].delta) == (laws[0], True)
    same = acutance.judge(decoder(), code, laws[:1], train_length=4096)
    assert same.laws == plain.laws
    longer = acutance.extend(
        decoder(), 256, code, train_length=128, laws=laws[:1], entropy=False, by_head=False
    )
    assert [one.name for one in longer.tried] == [f"{laws[0]},{TRAINED}=128"]
