"""What a mask hides, on every backend: one rule, and nothing of a hidden key reaches a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import dense_statistics


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_any_byte_but_zero_is_true(backend: str) -> None:
    raw = torch.randint(0, 4, (1, 1, 40, 70), generator=torch.Generator().manual_seed(0))
    raw = (raw * 85).to(torch.uint8)  # 0, 85, 170, 255
    query, key = normal(1, 1, 40, 8), normal(1, 1, 70, 8)
    for mask in (raw, raw[:, :, :, :35].repeat_interleave(2, 3)):
        odd = mask.view(torch.bool)
        found = row_statistics(query, key, attn_mask=odd, backend=backend)
        assert torch.equal(found.n_keys, (mask != 0).sum(-1))
    found = row_statistics(query, key, key_mask=raw[0, 0, :1].view(torch.bool), backend=backend)
    assert found.n_keys.unique().tolist() == [int((raw[0, 0, 0] != 0).sum())]


def padded(queries: int, holds: str, number: float, **options: Any) -> dict[str, Any]:
    """A call with twelve keys, of which the last four hold a number and are hidden."""
    query, key, value = normal(1, 2, queries, 8), normal(1, 2, 12, 8), normal(1, 2, 12, 8)
    if "key" in holds:
        key[:, :, 8:] = number
    if "value" in holds:
        value[:, :, 8:, ::2] = number
    return {"query": query, "key": key, "value": value} | options


HIDE = {
    "key_mask": {"key_mask": torch.arange(12).view(1, 12) < 8},
    "bias": {"bias": torch.where(torch.arange(12) < 8, 0.0, -torch.inf).expand(1, 2, 1, 12)},
    "documents": {"document_ids": "pair"},
}


@pytest.mark.grid(2)
@pytest.mark.parametrize(("holds", "number"), [("key", torch.nan), ("key and value", torch.inf)])
@pytest.mark.parametrize("hide", HIDE)
def test_padding_that_is_no_number_reaches_nothing(
    backend: str, hide: str, number: float, holds: str
) -> None:
    for queries in (3, 40) if backend == "native" else (3,):
        check_padding(backend, hide, number, holds, queries)


def check_padding(backend: str, hide: str, number: float, holds: str, queries: int) -> None:
    options = dict(HIDE[hide])
    if hide == "documents":
        ids = torch.zeros(queries, dtype=torch.int64), (torch.arange(12) >= 8).long()
        options = {"document_ids": ids}
    given = padded(queries, holds, number, **options)
    leaves = [given[name].requires_grad_() for name in ("query", "key", "value")]
    if hide == "bias":
        bias = given["bias"].expand(1, 2, queries, 12).clone().requires_grad_()
        given["bias"] = bias
        leaves.append(bias)
    out, stats = attention(**given, return_stats=True, backend=backend)
    names = ("entropy", "max_logit", "first_weight", "logit_std", "varentropy", "lse")
    total = out.sum() + sum(stats[name].sum() for name in names)
    found = torch.autograd.grad(total, leaves)

    query, key, value = (part.detach().double().requires_grad_() for part in leaves[:3])
    few = dense_statistics(query, key[:, :, :8], value[:, :, :8])
    torch.testing.assert_close(out.double(), few["output"], rtol=1e-5, atol=1e-5)
    want = torch.autograd.grad(
        few["output"].sum() + sum(few[name].sum() for name in names), (query, key, value)
    )
    for mine, theirs in zip(found[:3], want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_padding_under_a_softcap_reaches_no_gradient(backend: str, number: float) -> None:
    given = padded(5, "key and value", number, softcap=5.0, **HIDE["key_mask"])
    leaves = [given[name].requires_grad_() for name in ("query", "key", "value")]
    found = torch.autograd.grad(attention(**given, backend=backend).square().sum(), leaves)
    few = [part.detach()[:, :, :8].requires_grad_() for part in leaves]
    short = attention(*few, softcap=5.0, backend=backend)
    want = torch.autograd.grad(short.square().sum(), few)
    for mine, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(mine[:, :, :8], theirs)
        assert not mine[:, :, 8:].any()


@pytest.mark.parametrize("place", ["key", "value"])
def test_what_is_no_number_shows_where_it_is_seen(backend: str, place: str) -> None:
    """Only the rows from the third on see the key, and only they are NaN."""
    for queries in (3, 40) if backend == "native" else (3,):
        given = padded(queries, "", 0.0, is_causal=True)
        given[place][:, :, 2] = torch.nan
        key_mask = torch.arange(12).view(1, 12) != 11  # a mask that is data: no row is cut short
        out = attention(**given, key_mask=key_mask, backend=backend)
        assert out[:, :, 2:].isnan().all(), place
        if not (backend == "triton" and place == "value"):  # there padding alone is set aside
            assert out[:, :, :2].isfinite().all(), place


@pytest.mark.parametrize("weights", ["relu2", "sparsemax", "softmax"])
def test_rows_with_other_weights_see_nothing_of_padding(weights: str) -> None:
    """A cosine score takes the softmax by whole rows too."""
    given = padded(5, "key and value", torch.nan, **HIDE["key_mask"])
    score = "cosine" if weights != "softmax" else (lambda q, k, start: q @ k.mT)
    given = given | {"score": score, "weights": weights}
    leaves = [given[name].requires_grad_() for name in ("query", "key", "value")]
    out = attention(**given)
    found = torch.autograd.grad(out.square().sum(), leaves)
    few = {name: given[name].detach()[:, :, :8].requires_grad_() for name in ("key", "value")}
    query = given["query"].detach().requires_grad_()
    short = attention(query, **few, score=score, weights=weights)
    want = torch.autograd.grad(short.square().sum(), (query, few["key"], few["value"]))
    torch.testing.assert_close(out, short)
    torch.testing.assert_close(found[0], want[0])
    for mine, theirs in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(mine[:, :, :8], theirs)
        assert not mine[:, :, 8:].any()


def test_lazily_negated_views_keep_their_sign(backend: str) -> None:
    """A bias, a query of one column and slopes, each the imaginary part of a conjugate."""
    z = torch.randn(1, 1, 40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.cfloat)
    lazy = z.conj().imag
    assert lazy.is_neg()
    query, key = normal(1, 1, 40, 8), normal(1, 1, 40, 8)
    for queries in (3, 40) if backend == "native" else (3,):
        found = row_statistics(
            query[:, :, :queries], key, bias=lazy[:, :, :queries], backend=backend
        )
        want = dense_statistics(query[:, :, :queries], key, bias=-z.imag[:, :, :queries])
        torch.testing.assert_close(found.entropy.double(), want["entropy"], rtol=1e-5, atol=1e-5)
    column = lazy[:, :, 0].unsqueeze(-1)  # (1, 1, 40, 1), stride 1
    want = dense_statistics(column.resolve_neg(), key[..., :1])["logit_mean"]
    found = row_statistics(column, key[..., :1].contiguous(), backend=backend).logit_mean
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    close = lazy.as_strided((1, 1, 40, 8), (320, 320, 8, 1))  # both parts of z, of stride 1
    assert close.is_neg()
    found = attention(query, key, close, backend=backend)
    torch.testing.assert_close(found, attention(query, key, close.resolve_neg(), backend="blocked"))
    wide = torch.tensor([0.5 + 0.5j], dtype=torch.cdouble).conj().imag
    found = row_statistics(query, key, alibi_slopes=wide, sinks=wide.float(), backend=backend)
    want = dense_statistics(query, key, alibi_slopes=wide.resolve_neg(), sinks=wide.resolve_neg())
    torch.testing.assert_close(found.lse.double(), want["lse"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "bias", "sinks"])
def test_sparse_tensors_are_refused_in_one_sentence(backend: str, name: str) -> None:
    x = normal(1, 1, 4, 4)
    given = {"query": x, "key": x, "value": x}
    dense = torch.ones(1) if name == "sinks" else x
    given[name] = dense.to_sparse()
    with pytest.raises(
        TypeError, match=rf"^{name} must be a dense Tensor, got .*{name}.to_dense\(\)$"
    ):
        attention(**given, backend=backend)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("batch", [2])
def test_documents_without_keys_or_queries(
    backend: str, batch: int, queries: int, keys: int
) -> None:
    query, key = normal(batch, 2, queries, 8), normal(batch, 2, keys, 8)
    rows, columns = torch.zeros(queries, dtype=torch.int64), torch.zeros(keys, dtype=torch.int64)
    for ids in ((rows, columns), (rows.expand(batch, -1), columns.expand(batch, -1))):
        out, stats = attention(
            query, key, key, document_ids=ids, return_stats=True, backend=backend
        )
        assert out.shape == query.shape
        assert not out.any()
        assert stats.n_keys.shape == (batch, 2, queries)
        assert not stats.n_keys.any()
    if queries == 0:
        lengths = torch.tensor([0, keys])
        out = attention(query, key, key, cu_seqlens=lengths, backend=backend)
        assert out.shape == query.shape
