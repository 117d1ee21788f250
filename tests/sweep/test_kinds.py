"""One model of each kind of attention, judged as the sweep judges all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from acutance.capture.intercept import Interception
from acutance.capture.listener import Listener

#: Kind of attention, model type, verdict, and whether the model gives maps to compare with.
KINDS = [
    ("multi-head, post-norm", "bert", "verified", True),
    ("grouped queries", "llama", "verified", True),
    ("one key head for all", "gpt_bigcode", "verified", True),
    ("latent keys", "deepseek_v3", "verified", True),
    ("sinks and windows", "gpt_oss", "verified", True),
    ("softcap and windows", "gemma2", "verified", True),
    ("windows", "mistral", "verified", True),
    ("chunks", "llama4_text", "verified", True),
    ("ALiBi", "bloom", "unverified", True),
    ("relative bias", "t5", "verified", True),
    ("disentangled", "deberta-v2", "unverified", True),
    ("cross-attention", "bart", "verified", True),
    ("blocks of a local window", "longformer", "unverified", True),
    ("differential", "diffllama", "verified", True),
    ("hybrid with state space", "bamba", "verified", True),
    ("hybrid with linear attention", "qwen3_next", "verified", True),
    ("state space", "mamba", "attention-free", False),
    ("recurrent", "rwkv", "attention-free", False),
    ("images", "vit", "verified", True),
    ("image windows", "swin", "verified", True),
    ("audio features", "whisper", "verified", True),
    ("audio samples", "wav2vec2", "verified", True),
    ("two towers", "clip", "verified", False),
    ("shared layers", "albert", "verified", True),
]
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("model_type", "verdict", "maps"),
    [pytest.param(*row[1:], id=f"{row[1]}: {row[0]}") for row in KINDS],
)
def test_a_kind_of_attention(model_type: str, verdict: str, maps: bool) -> None:
    from zoo.examine import examine

    found = examine(model_type)
    assert (found.verdict, found.reason if verdict != "attention-free" else "") == (verdict, "")
    assert not found.moved
    assert found.missed == []
    assert found.read == found.calls
    assert (found.calls == 0) == (verdict == "attention-free")
    assert (found.maps > 0) == maps
    assert found.worst <= 1.0


def places(patch: pytest.MonkeyPatch, place_of: Any) -> None:
    """Have the listener place modules otherwise, or not at all: no model makes it miss a layer."""
    nowhere = {Listener: ("call_name_of", place_of), Interception: ("call_name", lambda self: None)}
    for owner, (name, function) in nowhere.items():
        patch.setattr(owner, name, function)


def test_every_verdict_can_be_given(
    monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    from zoo import examine, small

    def verdict(model_type: str = "vit") -> tuple[str, str]:
        found = examine.examine(model_type)
        return found.verdict, found.reason

    with monkeypatch.context() as patch:  # entropies one per cent too high
        entropies = examine.row_entropy
        patch.setattr(
            examine, "row_entropy", lambda weights: (1.01 * entropies(weights)[0],
                                                     entropies(weights)[1])
        )  # fmt: skip
        kind, reason = verdict()
        assert kind == "wrong"
        assert "entropies differ from the model's own maps" in reason
    with monkeypatch.context() as patch:  # the second layer is not seen

        def blind(self: Any, module: torch.nn.Module) -> str | None:
            name = self.name_of(module)
            return None if name is None or ".1." in name else str(name)

        places(patch, blind)
        kind, reason = verdict()
        assert kind == "in part"
        assert ".1." in reason
    with monkeypatch.context() as patch:
        places(patch, lambda self, module: None)
        assert verdict()[0] == "not read"
    limits(small, LARGEST=10)
    kind, reason = verdict()
    assert kind == "not built"
    assert "million parameters where" in reason


def test_an_output_that_moves_is_wrong() -> None:
    from zoo import examine

    counts = [0]

    def move(model: Any, given: Any, output: Any) -> None:
        counts[0] += 1
        if counts[0] == 4:  # plain, plain, witnessed, probed
            output["last_hidden_state"] += 1e-6

    found = examine.Examined("vit")
    model, _, _, given = examine.runnable("vit", found)
    model.register_forward_hook(move)
    wrong = examine._judge(found, model, given, None, True)
    assert found.moved
    assert wrong == ["the output is another while it is probed"]


def test_the_witness_sees_what_is_attention_and_nothing_else() -> None:
    from zoo.witness import watching

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = torch.softmax(x @ x.mT, -1)
            gate = torch.softmax(x, -1)  # no product takes it
            other = torch.softmax(x @ x.mT, -1).clone()  # a copy is followed
            return (weights @ x + (other * 0.5) @ x) * gate

    model = torch.nn.Sequential(Layer(), Layer())
    with watching(model) as witness:
        model(torch.randn(2, 5, 4))
    assert witness.attention == {"0": 2, "1": 2}
    assert len(witness.seen) == 6
    with watching(torch.nn.MultiheadAttention(8, 2, batch_first=True)) as witness:
        witness_of = torch.nn.functional.scaled_dot_product_attention
        witness_of(*[torch.randn(1, 2, 5, 4)] * 3)
    assert witness.attention.total() == 1


def test_a_part_is_examined_on_what_its_whole_gives_it() -> None:
    from zoo.examine import examine

    found = examine("sam_mask_decoder")  # its forward takes the embeddings of an encoder
    assert (found.verdict, found.model) == ("verified", "SamMaskDecoder")
    assert "as a part of sam" in found.inputs
    assert found.read == found.calls > 0
    assert not found.moved


@pytest.mark.parametrize(
    ("model_type", "inputs"),
    [
        ("qwen2_vl_vision", "states of patches"),  # two images, as packed patches
        ("siglip2_vision_model", "pixels"),  # patches with their mask and the images' shapes
        ("musicgen", "ids"),  # a row of codes for each codebook
        ("dots1", "ids"),  # sizes that are None in its configuration
    ],
)
def test_inputs_and_sizes_that_a_signature_does_not_say(model_type: str, inputs: str) -> None:
    from zoo.examine import Examined, runnable

    found = runnable(model_type, Examined(model_type))
    assert found is not None
    assert found[2] == inputs


def test_a_name_that_sounds_like_a_size_is_made_small() -> None:
    from zoo.small import WIDTH, _roughly

    assert _roughly("upsample_initial_channel", 1536) == WIDTH
    assert _roughly("stage_out_channels", [256, 16]) == [WIDTH // 2, 16]
    assert _roughly("num_fusion_layers", 12) == 2
    for name, default in (("max_position_embeddings", 512), ("vocab_size", 999), ("eps", 1)):
        assert _roughly(name, default) is None


def test_another_library_is_examined_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo import libraries
    from zoo.examine import examine

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.fused_attn = torch.nn.Linear(16, 48), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            if self.fused_attn:
                y = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            else:
                y = (query @ key.mT / 2).softmax(-1) @ value
            return x + y.transpose(1, 2).flatten(2)

    def build(name: str) -> Any:
        yield lambda: (libraries.ready(Layer()), [{"y": 1}, {"x": torch.randn(2, 6, 16)}])

    library = libraries.Library("torch", lambda: ["layer"], build)
    monkeypatch.setitem(libraries.LIBRARIES, "stand-in", library)
    found = examine("layer", "stand-in")
    assert (found.verdict, found.calls, found.read) == ("verified", 1, 1)
    assert found.implementations == ["default", "eager"]
    limit = torch.nn.Linear(20000, 20000, device="meta")
    with pytest.raises(Exception, match="400 million parameters where 100 are the most"):
        libraries.ready(limit)
