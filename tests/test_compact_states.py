"""A state takes less space on disk than in memory, and comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import acutance
from acutance.summary.files import compact, expand


def test_a_state_comes_back_and_is_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(64, 16, batch_first=True).eval()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
    with acutance.probe(layer, structure=True) as probe:
        layer(*[torch.randn(2, 64, 64)] * 3, attn_mask=mask)
    summary = probe.summary()
    summary.save(path := tmp_path / "state.safetensors")
    _, arrays = summary.parts()
    size = sum(array.numel() * array.element_size() for array in arrays.values())
    assert path.stat().st_size < 0.4 * size
    loaded = acutance.load(path)
    _, again = loaded.parts()
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        assert torch.equal(again[name].view(torch.uint8), array.contiguous().view(torch.uint8))
    assert loaded.merge(summary).moments.count[0, 0] == 2 * summary.moments.count[0, 0]


def test_only_equal_bits_are_joined_and_only_fitting_counts_narrowed() -> None:
    nan = torch.tensor([torch.nan, 0.0])
    arrays = {
        "a": nan, "b": nan.clone(), "c": torch.tensor([torch.nan, -0.0]),
        "d": torch.tensor([-1, 255]), "e": torch.tensor([2**40]), "f": torch.zeros(0).long(),
    }  # fmt: skip
    header, stored = compact({"x": "1"}, arrays)
    assert sorted(stored) == ["a", "c", "d", "e", "f"]
    assert stored["d"].dtype == torch.int16
    assert stored["e"].dtype == torch.int64
    whole = expand(header, stored)
    for name, array in arrays.items():
        assert whole[name].dtype == array.dtype
        assert torch.equal(whole[name].nan_to_num(9), array.nan_to_num(9))
    assert whole["c"].signbit().tolist() == arrays["c"].signbit().tolist()


@pytest.mark.parametrize(
    "record",
    [[], {}, {"narrow": ["b"], "same": {}}, {"narrow": [], "same": {"b": "c"}},
     {"narrow": [], "same": {"a": "a"}}, {"narrow": [["a"]], "same": {}}],
)  # fmt: skip
def test_a_header_that_names_no_such_array_is_refused(record: object) -> None:
    with pytest.raises(ValueError, match=r"'stored'"):
        expand({"stored": json.dumps(record)}, {"a": torch.zeros(1)})
