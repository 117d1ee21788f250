"""Planted faults are found and named, and the models that they are planted in are clean."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from tests.contract.verification.models import IDS, attend, build, with_function
from tests.contract.verification.planted import FAULTS

#: Faults that always run; the others are slow in all.
FEW = (
    "sinks_swallowed_by_keywords",
    "no_gradient_through_the_log_sum_exp",
    "window_counts_one_key_more",
    "softcap_is_not_passed",
    "hidden_keys_have_a_score_of_0",
    "packed_documents_see_each_other",
    "decoding_counts_padding",
    "explicit_attention_factor_is_ignored",
    "scores_in_bfloat16",
)


def test_there_are_thirty_faults_from_as_many_threads() -> None:
    assert len(FAULTS) >= 30
    assert len({fault.thread for fault in FAULTS.values()}) >= 30
    assert set(FEW) <= set(FAULTS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FAULTS],
)
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    fault = FAULTS[name]
    found = acutance.verify(fault.make(), IDS, backward=True)
    causes = [finding.cause for finding in found.findings]
    assert set(fault.causes) & set(causes), str(found)
    if fault.backward:
        assert all(check.ok for check in found.checks if check.name == "output")
    (finding, *_) = (each for each in found.findings if each.cause in fault.causes)
    assert finding.sentence
    assert finding.advice
    assert finding.layers
    assert finding.inputs
    assert finding.cause in found.to_dict()["findings"][found.findings.index(finding)]["cause"]


def test_masks_that_do_not_separate_documents_as_flash_attention_does() -> None:
    """gpt-oss gives its masks no position_ids, and its attention function does get them."""
    (finding,) = acutance.verify(build("gpt_oss"), IDS, kinds=["packed"]).findings
    assert finding.cause == "documents mixed"
    assert len(finding.layers) == 2


def test_a_boolean_mask_that_is_added_to_scores() -> None:
    """As grounding-dino's text encoder does in eager attention."""
    from transformers.masking_utils import sdpa_mask

    model = with_function(build("bert"), attend, "planted_boolean", sdpa_mask)
    (finding,) = acutance.verify(model, IDS).findings
    assert finding.cause == "boolean mask added"
    assert finding.inputs == ("right padding", "left padding")
    assert "minus infinity" in finding.advice


def test_cross_attention_with_another_scale() -> None:
    def change(module: Any, *parts: Any, scaling: float, **rest: Any) -> Any:
        cross = parts[0].shape[2] != parts[1].shape[2]
        return attend(module, *parts, scaling=scaling * (1 + cross), **rest)

    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :7]}
    assert acutance.verify(build("bart"), inputs).ok
    (finding,) = acutance.verify(
        with_function(build("bart"), change, "planted_scale"), inputs
    ).findings
    assert finding.layers == ("decoder.layers.0.encoder_attn",)


def test_padding_that_a_softmax_by_hand_does_not_hide() -> None:
    model: Any = build("mpnet")
    assert acutance.verify(model, IDS).ok
    forward = model.encoder.forward
    model.encoder.forward = lambda *args, attention_mask=None, **rest: forward(
        *args, attention_mask=0 * attention_mask, **rest
    )
    (finding,) = acutance.verify(model, IDS).findings
    assert finding.cause == "padding ignored"
    assert len(finding.layers) == 2


def test_a_softmax_by_hand_of_nan() -> None:
    model: Any = build("mpnet")
    with torch.no_grad():
        model.encoder.layer[1].attention.attn.q.weight.fill_(torch.nan)
    found = acutance.verify(model, IDS, kinds=["right padding"])
    (finding,) = found.findings
    assert finding.sentence == "the weights of a real token's row are NaN"


def test_the_note_on_a_softmax_by_hand_says_whether_padding_is_compared() -> None:
    with pytest.raises(ValueError, match="only the scores are seen: nothing is compared"):
        acutance.verify(build("mpnet"), IDS, kinds=["plain"])
    (note,) = acutance.verify(build("mpnet"), IDS, kinds=["plain", "right padding"]).notes
    assert note.endswith("only the scores are seen: only padding is compared")


def test_one_query_without_the_softcap_is_a_finding() -> None:
    class Config:
        attn_logit_softcapping = 0.01

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x[..., :1, :], x, x)

    inputs = {"x": torch.randn(1, 2, 9, 16)}
    found = acutance.verify(Pool(), inputs, configuration=Config())
    assert "softcap missing" in [finding.cause for finding in found.findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_rounds_its_keys_is_a_finding(dtype: torch.dtype) -> None:
    """By one step in 256 of the largest key, as an 8-bit cache: less than bfloat16 resolves."""
    from transformers.cache_utils import DynamicLayer

    model: Any = build("llama").to(dtype)
    forward = DynamicLayer.update

    def rounded(self: Any, key: Any, value: Any, *args: Any, **rest: Any) -> Any:
        keys, values = forward(self, key, value, *args, **rest)
        size = keys.abs().max() / 256
        self.keys = (keys / size).round() * size
        return keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicLayer, "update", rounded)
        found = acutance.verify(model, IDS, kinds=["cache by token"])
    assert "cache" in [finding.cause for finding in found.findings], str(found)
    assert acutance.verify(model, IDS, kinds=["cache by token"]).ok


def test_documents_that_are_not_checked_are_a_note() -> None:
    """Of a model without a cache, whose attention function does not get its position_ids."""

    class Decoder(nn.Module):
        is_causal = True

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(96, 8), nn.Embedding(96, 8)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            x = (self.words(input_ids) + self.places(position_ids)).unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    found = acutance.verify(Decoder(), IDS)
    assert {check.inputs for check in found.checks} == {"plain"}
    assert any("packed: documents are not checked, since" in note for note in found.notes)


def test_a_window_that_is_halved_by_mistake() -> None:
    model: Any = build("modernbert")
    assert acutance.verify(model, IDS).ok
    model.config = copy.deepcopy(model.config)  # the masks are made from this one
    model.config.sliding_window = 4
    (finding,) = acutance.verify(model, IDS, kinds=["plain"]).findings
    assert finding.cause == "wrong window"


def test_the_attention_that_faults_are_planted_in_is_right() -> None:
    for kind in ("llama", "gemma2", "gpt_oss"):
        model: nn.Module = with_function(build(kind), attend, "unplanted")
        found = acutance.verify(model, IDS, kinds=("plain", "left padding"), backward=True)
        assert found.ok, str(found)
