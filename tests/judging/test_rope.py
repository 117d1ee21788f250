"""RoPE settings as a remedy: what plain transformers computes, and gone when the context ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acutance.judging import RopeRemedy
from acutance.judging.changes import named_change
from acutance_lab.trained import decoder
from tests.contract.judging.test_rope import TRAINED, ids


@pytest.mark.parametrize(
    "name",
    [
        "linear,factor=2",
        f"dynamic,factor=2,{TRAINED}=128",
        f"yarn,factor=4,{TRAINED}=128",
        f"yarn,factor=4,{TRAINED}=128,attention_factor=1.2",
        f"llama3,factor=8,{TRAINED}=128",
        f"longrope,factor=2,short_factor={[1.0] * 12},long_factor={[2.0] * 12},{TRAINED}=128",
        "default,rope_theta=100.0",
    ],
)
@torch.no_grad()
def test_the_remedy_is_the_configuration_it_writes(name: str) -> None:
    """A model built by transformers from the written configuration gives the same logits."""
    import transformers as hf

    model, tokens = decoder(), ids(300)
    remedy = named_change(f"rope:{name}")
    assert isinstance(remedy, RopeRemedy)
    before = model(input_ids=tokens).logits
    with remedy.applied(model):
        found = model(input_ids=tokens).logits
    written = remedy.configuration(model, 1024)
    assert not torch.equal(found, before)
    assert torch.equal(model(input_ids=tokens).logits, before)
    config = hf.LlamaConfig(**(model.config.to_dict() | written))
    plain = hf.LlamaForCausalLM(config).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(input_ids=tokens).logits, found)
    assert written["max_position_embeddings"] == (128 if remedy.kind == "dynamic" else 1024)


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("yran,factor=2", ValueError, "transformers has no RoPE type 'yran'; did you mean 'yarn'"),
        ("yarn", ValueError, "rope:yarn lacks factor"),
        ("longrope,factor=2", ValueError, "lacks long_factor"),
        ("yarn,factor=0.5", ValueError, "factor must be a finite number at least 1"),
        ("yarn,factor", ValueError, "parameters must be name=number, got 'factor'"),
        ("yarn,factor=x", ValueError, "factor must be a number, got 'x'"),
    ],
)
def test_bad_settings_are_one_sentence(name: str, kind: Any, match: str) -> None:
    model = decoder()
    rotary = model.model.rotary_emb
    with pytest.raises(kind, match=match), named_change(f"rope:{name}").applied(model):
        pass
    assert model.model.rotary_emb is rotary
