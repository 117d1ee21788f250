"""Models of other libraries, where these are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import acutance


def probed(model: torch.nn.Module, *given: Any, **named: Any) -> acutance.Probe:
    """A probe that has read one run, which it left as it is."""
    model.eval()
    with torch.no_grad():
        plain = model(*given, **named)
        with acutance.probe(model, verify=True) as probe:
            output = model(*given, **named)
    first, second = (part[0] if isinstance(part, tuple) else part for part in (output, plain))
    first, second = (getattr(part, "sample", part) for part in (first, second))
    assert torch.equal(first, second)
    return probe


def statuses(probe: acutance.Probe) -> set[tuple[str, str]]:
    """What the layers are read from, and how far they are known."""
    return {(layer.source, layer.status) for layer in probe.summary().layers}


SDPA = ("scaled_dot_product_attention", "verified")
BY_HAND = ("softmax", "unverified")


@pytest.mark.parametrize(
    ("name", "options", "heads", "found"),
    [
        ("beit_base_patch16_224", {"depth": 2, "embed_dim": 48, "num_heads": 3}, [3, 3], {SDPA}),
        ("deit3_small_patch16_224", {"depth": 2}, [6, 6], {SDPA}),
        (
            "swin_tiny_patch4_window7_224",
            {"window_size": 4, "depths": (1, 1), "embed_dim": 24, "num_heads": (3, 6)},
            [3, 6],
            {BY_HAND},
        ),
        ("xcit_nano_12_p16_224", {"depth": 1}, [4] * 3, {SDPA, BY_HAND}),
    ],
)
def test_models_of_timm(
    name: str, options: dict[str, Any], heads: list[int], found: set[tuple[str, str]]
) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, img_size=64, num_classes=3, **options)
    probe = probed(model, torch.randn(2, 3, 64, 64))
    assert statuses(probe) == found
    assert [layer.heads for layer in probe.summary().layers] == heads
    assert probe.unread == []


def test_talking_heads_are_listed() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("cait_xxs24_224", img_size=64, num_classes=3, depth=2)
    probe = probed(model, torch.randn(2, 3, 64, 64))
    assert statuses(probe) == {SDPA}  # those of the class token; others mix heads after softmax
    assert [line.partition(":")[0] for line in probe.unread] == ["blocks.0.attn", "blocks.1.attn"]


def unet(diffusers: Any) -> torch.nn.Module:
    model: torch.nn.Module = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return model


@pytest.mark.parametrize("old", [False, True])
def test_a_unet_of_diffusers(old: bool) -> None:
    diffusers = pytest.importorskip("diffusers")
    model: Any = unet(diffusers)
    if old:
        from diffusers.models.attention_processor import AttnProcessor

        model.set_attn_processor(AttnProcessor())
    probe = probed(
        model, torch.randn(2, 4, 8, 8), torch.tensor(3), encoder_hidden_states=torch.randn(2, 7, 24)
    )
    layers = probe.summary().layers
    assert statuses(probe) == {BY_HAND if old else SDPA}
    assert [(layer.heads, layer.calls) for layer in layers] == [(4, 1)] * 8
    assert probe.unread == []
    assert {int(heads[0]) for heads in probe.summary().grid("n_keys")} == {7, 16}


def test_joint_attention_of_text_and_image() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    probe = probed(
        model,
        hidden_states=torch.randn(2, 9, 4),
        encoder_hidden_states=torch.randn(2, 5, 32),
        pooled_projections=torch.randn(2, 32),
        timestep=torch.ones(2),
        img_ids=torch.zeros(9, 3),
        txt_ids=torch.zeros(5, 3),
    )
    layers = probe.summary().layers
    assert statuses(probe) == {SDPA}
    assert [(layer.heads, layer.rows) for layer in layers] == [(3, 28)] * 2
    assert probe.unread == []


def test_a_vit_of_timm() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=3).eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(image)
        with acutance.probe(model, verify=True) as probe:
            assert torch.equal(model(image), plain)
    layers = probe.summary().layers
    assert [(layer.status, layer.heads, layer.rows) for layer in layers] == [
        ("verified", 3, 10)
    ] * 2


def test_a_transformer_block_of_diffusers() -> None:
    attention = pytest.importorskip("diffusers.models.attention")
    block = attention.BasicTransformerBlock(32, 4, 8, cross_attention_dim=16).eval()
    x, text = torch.randn(2, 9, 32), torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = block(x, encoder_hidden_states=text)
        with acutance.probe(block, verify=True) as probe:
            assert torch.equal(block(x, encoder_hidden_states=text), plain)
    layers = probe.summary().layers
    assert [(layer.status, layer.heads, layer.rows) for layer in layers] == [
        ("verified", 4, 18)
    ] * 2
