"""Rows of many small calls are summarised together, as if each had been by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import acutance
from acutance.kernels.fast_path import PackedStatistics, joined, packed_alike
from acutance.probing import accumulate
from acutance.summary.layer import Layer


def packed(seed: int, keys: int) -> PackedStatistics:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 3, 1, 8), torch.randn(2, 3, keys, 8)
    stats = acutance.row_statistics(q, k, backend="native")
    assert isinstance(stats, PackedStatistics)
    return stats


def test_packed_rows_are_joined_field_by_field() -> None:
    parts = [packed(seed, keys) for seed, keys in enumerate((5, 6, 7))]
    assert packed_alike(parts[0], parts[1])
    for dim in (0, 1):
        together = joined(parts, dim)
        assert isinstance(together, PackedStatistics)
        for name, field in together.state._asdict().items():
            expected = torch.cat([getattr(part.state, name) for part in parts], dim)
            assert torch.equal(field, expected), name
        assert torch.equal(together.n, together.state.n)
        for name, values in together.as_dict(["entropy", "logit_std"]).items():
            assert torch.equal(values, torch.cat([part[name] for part in parts], dim))
    assert torch.equal(parts[0].n, parts[0].state.n)
    assert parts[0].n.tolist() == [[[5]] * 3] * 2


def test_rows_of_other_kinds_are_joined_too() -> None:
    parts = [packed(0, 5), acutance.row_statistics(*torch.randn(2, 2, 3, 1, 8), backend="blocked")]
    assert not packed_alike(parts[0], parts[1])
    assert torch.equal(joined(parts).state.n, torch.cat([part.state.n for part in parts]))
    with pytest.raises(ValueError, match="parts must be packed rows of one dtype and shape"):
        joined(parts, 1)


def test_layers_summarised_together_are_those_summarised_apart(
    limits: Callable[..., None],
) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.MultiheadAttention(8 * heads, heads) for heads in (2, 2, 3)]
    inputs = [torch.randn(5, 2, layer.embed_dim) for layer in layers]
    found, sides, together_rows = [], [], accumulate._join_rows

    def counted(calls: Any, dim: int) -> Any:
        if len(calls) > 1:
            sides.append((len(calls), dim))
        return together_rows(calls, dim)

    for most, together_now in ((accumulate.MAX_TOGETHER, [(2, 1)]), (0, [])):
        limits(accumulate, MAX_TOGETHER=most, _join_rows=counted)
        sides.clear()
        with acutance.probe(torch.nn.ModuleList(layers)) as probe:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x, x, x, need_weights=False)
        found.append(probe.summary())
        assert sides == together_now
    together, apart = found
    assert [layer.heads for layer in together.layers] == [2, 2, 3]
    for part, other in ((together.moments, apart.moments), (together.profile, apart.profile)):
        for name, values in part.tensors().items():
            expected = other.tensors()[name]
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_layers_of_calls_that_are_alike_merge_in_one_step() -> None:
    one = Layer("attn", 4, calls=1, rows=3, padded=2, padded_by="masks", error=0.5, source="tap")
    merged = one
    for _ in range(4):
        merged = merged.merge(one)
    assert one.times(5) == merged


@pytest.mark.parametrize("tokens", [6, pytest.param(70, marks=pytest.mark.slow)])
def test_structure_of_decoded_rows_is_that_of_each_call(
    llama_models: Any, random_tokens: Any, limits: Callable[..., None], tokens: int
) -> None:
    ids, found = random_tokens(2, 3), []
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    for most in (accumulate.MAX_PENDING, 0):
        limits(accumulate, MAX_PENDING=most)
        probe = acutance.probe(llama_models["sdpa"], structure=True, special=(0, 5))
        with probe, torch.no_grad():
            llama_models["sdpa"].generate(ids, eos_token_id=None, **options)
        found.append(probe.summary().parts()[1])
    assert found[0].keys() == found[1].keys()
    assert any(name.startswith("distances") for name in found[0])
    for name, part in found[0].items():
        torch.testing.assert_close(part, found[1][name], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_packed_rows_stay_packed_while_they_wait() -> None:
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    with acutance.probe(layer, verify=False) as probe, torch.no_grad():
        for _ in range(3):
            layer(*[torch.randn(2, 5, 16)] * 3)
        (record,) = probe._records._records.values()
        waiting = [call.stats for call in record.pending]
        assert len(waiting) == 3
        assert all(isinstance(stats, PackedStatistics) for stats in waiting)
        assert not any("state" in vars(stats) for stats in waiting)
