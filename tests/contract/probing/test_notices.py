"""What must be known before any number: a part of the text, an untrained model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acutance
from acutance.probing import THRESHOLDS


def _block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)


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
