"""verify: what it compares, what it leaves out, and how it refuses."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import acutance
from acutance import testing
from tests.contract.verification.models import IDS, build


def test_a_model_that_returns_no_cache_says_what_it_returned() -> None:
    model = build("llama")
    forward = type(model).forward

    @functools.wraps(forward)
    def without_cache(*given: Any, **options: Any) -> Any:
        output = forward(model, *given, **options)
        output.past_key_values = None
        return output

    model.forward = without_cache
    notes = acutance.verify(model, IDS).notes
    [note] = {note.partition("with eager: ")[2] for note in notes if "cache by token" in note}
    assert note.startswith("no cache to go on with after")
    assert "returned a CausalLMOutputWithPast without past_key_values" in note


def test_implementations_are_compared_and_the_model_keeps_its_own() -> None:
    model = build("llama", "sdpa").train()
    found = acutance.verify(model, IDS, implementations=["eager", "sdpa", "flex"], kinds=["plain"])
    assert found.ok
    assert found.about["implementations"] == ["eager", "sdpa", "flex_attention"]
    names = [check.name for check in found.checks]
    assert names[-2:] == ["sdpa against eager", "flex_attention against eager"]
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_an_implementation_that_a_model_lacks_is_a_note() -> None:
    found = acutance.verify(
        build("gemma2"), IDS, implementations=["eager", "sdpa"], kinds=["plain"]
    )
    assert found.ok
    assert any(note.startswith("sdpa was not run: ") for note in found.notes)
    assert found.left_out == ("sdpa attention",)


def test_a_text_within_the_window_is_a_note() -> None:
    found = acutance.verify(build("mistral"), IDS[:, :8], kinds=["plain"])
    (note,) = found.notes
    assert found.ok
    assert not found.complete
    assert found.headline.endswith("no difference in these; not compared: sliding window")
    assert note.startswith("8 tokens do not reach beyond the sliding window of 8")


def test_what_was_left_out_is_in_the_headline_and_the_record() -> None:
    whole = acutance.verify(build("llama"), IDS)
    assert whole.complete
    names = "(arguments, output, positions, cache)"
    assert whole.headline.endswith(f"{names}, no difference from the configuration")

    model = build("llama")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            del module.is_causal  # nothing states it then, and a window is not known either
    found = acutance.verify(model, IDS, kinds=["plain"])
    assert found.ok
    assert not found.complete
    assert any("masks not checked" in note for note in found.notes)
    assert "no difference in these; not compared: masks of model.layers.0" in found.headline
    record = found.to_dict()
    assert (record["ok"], record["complete"]) == (True, False)
    assert [part.partition(" of ")[0] for part in record["left_out"]] == ["masks"]


def test_input_that_is_not_only_tokens_leaves_masks_and_positions_out() -> None:
    model = build("llama")
    found = acutance.verify(model, {"inputs_embeds": torch.randn(1, 12, model.config.hidden_size)})
    assert found.ok
    left = [part.partition(" of ")[0] for part in found.left_out]
    assert left == ["masks", "positions"]


class Plain(nn.Module):
    """Attention by a plain function, without a configuration."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)


def test_a_module_without_a_configuration_is_compared_with_its_own_arguments() -> None:
    found = acutance.verify(Plain(), {"x": torch.randn(2, 9, 16)}, backward=True)
    assert found.ok
    assert [check.name for check in found.checks] == ["arguments", "output", "gradients"]


def test_a_given_configuration_is_checked() -> None:
    class Config:
        attention_multiplier = 0.5

    inputs = {"x": torch.randn(2, 9, 16)}
    assert acutance.verify(Plain(0.5), inputs, configuration=Config()).ok
    (finding,) = acutance.verify(Plain(), inputs, configuration=Config()).findings
    assert finding.cause == "wrong scale"
    assert "attention_multiplier=0.5 means 0.5" in finding.sentence


def test_misuse_is_named() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=r"kinds must be among plain, .*, got 'padded'"):
        acutance.verify(model, IDS, kinds=["padded"])
    with pytest.raises(TypeError, match="inputs must be a tensor of token ids"):
        acutance.verify(model, [1, 2, 3])
    with pytest.raises(ValueError, match="no attention of Linear was read"):
        acutance.verify(nn.Linear(4, 4), {"input": torch.zeros(1, 4)})


def test_the_command_verifies_a_model_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    done = testing.run(["verify", "--json", str(target), "--implementations", "eager"])
    assert done.exit_code == 0, done.output
    assert "no difference from the configuration" in " ".join(done.output.split())
    found = json.loads(target.read_text(encoding="utf-8"))
    assert found["schema"] == "acutance.verification/1"
    assert (found["ok"], found["complete"], found["left_out"]) == (True, True, [])
    assert found["about"]["tokens"] == 96
    assert {check["inputs"] for check in found["checks"]} == {
        "plain",
        "right padding",
        "left padding",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementations", "eagre"], "did you mean 'eager'"),
        (["--dtype", "int8"], "must be one of float64"),
        (["--length", "4"], "greater than or equal to 12"),
        (["--length", "100000"], "exceeds the 512 positions"),
    ],
)
def test_misuse_of_the_command_exits_with_2(arguments: list[str], message: str) -> None:
    done = testing.run(["verify", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_a_short_text_exits_with_2(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.", encoding="utf-8")
    done = testing.run(["verify", "--text", str(text)])
    assert done.exit_code == 2
    assert "are needed" in done.output


def test_a_model_that_cannot_be_loaded_exits_with_2(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    done = testing.run(["verify", str(tmp_path)])
    assert done.exit_code == 2  # saved without a tokenizer
    assert "tokenizer" in done.output


def test_a_finding_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def without_mask(*args: Any, attention_mask: Any = None, **options: Any) -> Any:
        return right(*args[:4], attention_mask=None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", without_mask)
    done = testing.run(["verify", "--implementations", "sdpa"])
    assert done.exit_code == 1
    assert "padding" in " ".join(done.output.split())
