"""Models of other libraries, where these are installed."""

from __future__ import annotations

import pytest
import torch

import acutance


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
