"""Queries and keys of a model: what is kept of them, and that the file gives them back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import acutance
from acutance.comparison import compare
from acutance.probing import ProbeError, QueryKeySample, load_queries_keys, probe


class Attend(nn.Module):
    """One attention over given tensors."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None, *,
                causal: bool = False, scale: float | None = None) -> Tensor:  # fmt: skip
        return scaled_dot_product_attention(
            query, key, key, attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip


class Twice(nn.Module):
    """Two of them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(), Attend()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.second(query + self.first(query, key), key, causal=True)


def tensors(batch: int = 1, heads: int = 8, groups: int = 2, n: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, n, 4), torch.randn(batch, groups, n, 4)


def kept(model: nn.Module, *arguments: object, **options: object) -> QueryKeySample:
    with probe(model, keep=True) as opened:
        model(*arguments, **options)
    return opened.queries_keys()


def test_the_longest_sequence_is_kept_without_its_padding() -> None:
    query, key = tensors(batch=3, heads=2)
    visible = torch.ones(3, 1, 1, 12, dtype=torch.bool)
    visible[0, ..., 9:] = False
    visible[1, ..., :1] = False  # padded on the left
    visible[2, ..., 5:] = False
    found = kept(Attend(), query, key, visible)
    assert found.length == 11
    assert torch.equal(found.query, query[1, :, 1:])
    assert not found.is_causal
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None] & visible
    assert kept(Attend(), query, key, causal).is_causal


def test_the_first_call_of_a_module_counts() -> None:
    model, (query, key) = Attend(), tensors(heads=2)
    with probe(model, keep=True) as opened:
        model(query, key)
        model(query + 1, key)
    assert torch.equal(opened.queries_keys().query, query[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_products_of_them_are_the_rows_of_the_model(causal: bool) -> None:
    model, (query, key) = Attend(), tensors(heads=2)
    with probe(model, keep=True) as opened:
        model(query, key, causal=causal)
    found = compare("scaled_dot", n=12, source=opened.queries_keys(), samples=12, costs=False)
    summary = opened.summary()
    for name in ("entropy", "effective_keys", "sparsity"):
        theirs = float(summary.mean(name).mean())
        assert found["scaled_dot", 12][name].measured == pytest.approx(theirs, rel=1e-5)


def test_a_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    query, key = tensors()
    sample = kept(Twice(), query, key)
    path = tmp_path / "qk.safetensors"
    sample.save(path)
    again = load_queries_keys(path)
    assert again.heads == sample.heads
    assert again.is_causal == sample.is_causal
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(again, name), getattr(sample, name))
    assert os.listdir(tmp_path) == ["qk.safetensors"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file at nowhere"):
        load_queries_keys("nowhere")
    model, (query, key) = Attend(), tensors(heads=2)
    with probe(model, keep=True) as opened:
        model(query, key)
    opened.save(str(tmp_path / "state"))
    with pytest.raises(
        ValueError, match=r"state is not a sample of queries and keys \(probe --keep-qk\)"
    ):
        load_queries_keys(tmp_path / "state")
    opened.queries_keys().save(tmp_path / "qk")
    half = (tmp_path / "qk").read_bytes()[:-100]
    (tmp_path / "qk").write_bytes(half)
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        load_queries_keys(tmp_path / "qk")


def test_a_probe_that_kept_nothing_says_why() -> None:
    model, (query, key) = Attend(), tensors(heads=2)
    with probe(model) as opened:
        model(query, key)
    with pytest.raises(ProbeError, match="opened with keep=True"):
        opened.queries_keys()
    with acutance.probe(model, keep=True) as opened:
        model(query[:, :, :3], key)  # no whole sequence
    with pytest.raises(ProbeError, match="no queries and keys were recorded"):
        opened.queries_keys()


def test_the_lengths_of_keys_move_top_keys_and_their_directions_do_not() -> None:
    key = torch.nn.functional.normalize(torch.randn(2, 200, 16), dim=-1)
    query = torch.randn(2, 200, 16)
    even = QueryKeySample(query, 3 * key, key, ("a", "b"), is_causal=False)
    assert even.key_norm_effect().tolist() == [0.0, 0.0]
    long = key * torch.linspace(0.5, 2.0, 200)[:, None]
    effect = QueryKeySample(query, long, key, ("a", "b"), is_causal=True).key_norm_effect()
    for head in range(2):
        moved = [
            int((query[head, i] @ long[head, : i + 1].T).argmax())
            != int((query[head, i] @ key[head, : i + 1].T).argmax())
            for i in range(200)
        ]
        assert effect[head].item() == pytest.approx(sum(moved) / 200)
    assert (effect > 0.2).all()
    several = QueryKeySample(query, long, key, ("a.b/1", "c/7"), is_causal=True).key_norms()
    assert (several["tokens"], several["is_causal"]) == (200, True)
    assert several["mean"] == pytest.approx(effect.mean().item())
    assert [(layer["module"], layer["heads"]) for layer in several["layers"]] == [
        ("a.b", [{"head": "1", "moved": effect[0].item()}]),
        ("c", [{"head": "7", "moved": effect[1].item()}]),
    ]
