"""Keys that hold a share of the weight, through probes, summaries and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.probing import HeadSummary

KEYS = ("keys_50", "keys_90", "keys_95", "keys_99")


def layer() -> torch.nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()


def inputs(length: int = 40) -> Tensor:
    return 3 * torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1))


def probed(length: int = 40, **options: Any) -> HeadSummary:
    model = layer()
    with torch.no_grad(), acutance.probe(model, **options) as probe:
        model(inputs(length))
    return probe.summary()


def weights(length: int = 40) -> Tensor:
    model, x = layer(), inputs(length)
    return model.self_attn(x, x, x, need_weights=True, average_attn_weights=False)[1].detach()


@pytest.mark.parametrize("provide", [False, True])
def test_a_probe_records_what_sorting_finds(provide: bool) -> None:
    summary = probed(gaps=True, provide=provide)
    cumulated = weights().sort(-1, descending=True).values.cumsum(-1)
    for name in KEYS:
        exact = 1.0 + (cumulated < int(name[5:]) / 100).sum(-1).double()
        found = summary.mean(name)
        torch.testing.assert_close(found, exact.mean((0, 2)), rtol=0.05, atol=0.1)
    assert {f"{name}_mean" for name in KEYS} <= set(summary.columns())
    assert not {*KEYS} & set(probed().metrics)


def test_naming_a_metric_asks_for_it() -> None:
    assert probed(metrics=["entropy", "keys_90"]).metrics == ("entropy", "keys_90")
    with pytest.raises(TypeError, match="gaps"):
        acutance.probe(layer(), gaps="yes")  # type: ignore[arg-type]


def test_heads_rows_and_calls_add_up() -> None:
    whole = probed(gaps=True)
    some = probed(gaps=True, heads=[1, 3])
    torch.testing.assert_close(some.mean("keys_90"), whole.mean("keys_90")[[1, 3]])
    drawn = probed(gaps=True, max_rows=20)
    assert (drawn.sampling_error("keys_90") > 0).all()
    model = layer()
    with torch.no_grad(), acutance.probe(model, gaps=True) as probe:
        for one in inputs().split(1):
            model(one)
    torch.testing.assert_close(probe.summary().mean("keys_90"), whole.mean("keys_90"))
    merged = whole.merge(whole)
    torch.testing.assert_close(merged.mean("keys_90"), whole.mean("keys_90"))


def test_files_and_tables_have_them(tmp_path: Path) -> None:
    summary = probed(gaps=True)
    summary.save(tmp_path / "state.safetensors")
    loaded = acutance.load(tmp_path / "state.safetensors")
    for name in KEYS:
        assert torch.equal(loaded.mean(name), summary.mean(name))
    summary.to_json(tmp_path / "heads.json")
    text = (tmp_path / "heads.json").read_text()
    assert "keys_90" in text
    assert json.loads(text)
