"""n is the number of keys a row sees, for every kind of mask, and never the padded length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import acutance
from acutance import scaling
from acutance.masks import Masking, check_masking, hides
from acutance.scaling import visible_keys
from acutance.testing import attention_case

B, H, G, L, S = 2, 3, 2, 11, 17


def brute_force(masking: Masking) -> Tensor:
    """(B, Hq, L), from the definition of each mask and the whole L×S matrix."""
    i = torch.arange(masking.queries)[:, None] + masking.offset
    j = torch.arange(masking.keys)
    seen = torch.ones(
        masking.batch, masking.heads * masking.group, masking.queries, masking.keys
    ).bool()
    if masking.causal:
        seen &= j <= i
    if masking.window is not None:
        seen &= (i - j).abs() < masking.window
    for mask in (masking.attn_mask, masking.bias):
        if mask is not None:
            seen &= mask if mask.dtype == torch.bool else ~hides(mask)
    if masking.key_mask is not None:
        seen &= masking.key_mask[:, None, None]
    if masking.query_documents is not None and masking.key_documents is not None:
        same = masking.query_documents[:, :, None] == masking.key_documents[:, None, :]
        seen &= same[:, None]
    return seen.sum(-1)


def coin(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.4


DOCUMENTS = {
    "query_documents": torch.tensor([[7, 7, 7, -2, -2, -2, 5, 5, 6, 6, 9]]),
    "key_documents": torch.tensor(
        [[7] * 5 + [-2] * 3 + [5] * 8 + [7]]
    ),  # 7 comes twice, 6 and 9 never
}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "causal, offset": {"causal": True, "offset": 4},
    "causal, negative offset": {"causal": True, "offset": -3},
    "causal, past the keys": {"causal": True, "offset": 40},
    "causal, before the keys": {"causal": True, "offset": -40},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 4},
    "causal window, offset": {"causal": True, "window": 4, "offset": 7},
    "window before the keys": {"window": 4, "offset": -20},
    "window past the keys": {"window": 4, "offset": 30},
    "padding": {"key_mask": torch.arange(S).expand(B, S) < torch.tensor([[9], [17]])},
    "padding on the left, causal": {"key_mask": torch.arange(S).repeat(B, 1) > 4, "causal": True},
    "padding, causal window": {"key_mask": coin(B, S), "causal": True, "window": 5, "offset": 3},
    "packed": {**DOCUMENTS, "causal": True},
    "packed, not causal": DOCUMENTS,
    "packed, window, padding": {**DOCUMENTS, "window": 3, "key_mask": coin(B, S)},
    "two batches of documents": {
        "query_documents": torch.stack([torch.arange(L) // 4, torch.arange(L) // 7]),
        "key_documents": torch.arange(S)[None] // 4,
        "causal": True,
    },
    "boolean keys": {"attn_mask": coin(S)},
    "boolean keys of heads": {"attn_mask": coin(H * G, 1, S), "window": 6},
    "boolean keys of heads, packed": {"attn_mask": coin(B, H * G, 1, S), **DOCUMENTS},
    "boolean one for all": {"attn_mask": coin(1), "key_mask": coin(B, S)},
    "boolean": {"attn_mask": coin(B, 1, L, S), "window": 9},
    "boolean of heads": {"attn_mask": coin(H * G, L, S)},
    "boolean rows": {"attn_mask": coin(L, 1)},
    "additive": {"attn_mask": torch.tensor([0.0, -1.0, -torch.inf, -1e30]).repeat(5)[:S]},
    "bias of heads and mask": {
        "bias": torch.zeros(H * G, 1, 1),
        "attn_mask": torch.full((L, S), -torch.inf).triu(1),
        "key_mask": coin(B, S),
    },
    "bias": {"bias": torch.randn(H * G, L, S), "causal": True},
    "alibi": {"alibi_slopes": torch.arange(6.0), "causal": True, "offset": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_n_is_the_count_of_the_whole_mask(case: str) -> None:
    masking = Masking(batch=B, heads=H, group=G, queries=L, keys=S, **CASES[case])
    n = visible_keys(masking)
    assert n.dtype == torch.int64
    assert n.shape in ((B, 1, L), (B, H * G, L))
    assert torch.equal(n.expand(B, H * G, L), brute_force(masking))


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 3, 4), (2, 1, 1, 0, 4), (2, 1, 1, 3, 0), (1, 0, 1, 3, 4), (2, 3, 2, 0, 0)]
)
def test_empty_calls_have_empty_counts(sizes: tuple[int, int, int, int, int]) -> None:
    batch, heads, group, queries, keys = sizes
    documents = {
        "query_documents": torch.zeros(1, queries, dtype=torch.int64),
        "key_documents": torch.zeros(1, keys, dtype=torch.int64),
    }
    padding = torch.ones(batch, keys, dtype=torch.bool)
    for masks in (
        {},
        {"causal": True, "window": 2},
        {"key_mask": padding},
        documents,
        {**documents, "key_mask": padding},
        {"attn_mask": torch.ones(queries, keys, dtype=torch.bool)},
        {"attn_mask": torch.ones(heads * group, queries, keys, dtype=torch.bool)},
        {"attn_mask": torch.ones(heads * group, 1, keys, dtype=torch.bool)},
    ):
        n = visible_keys(Masking(*sizes, **masks))
        assert n.shape in ((batch, 1, queries), (batch, heads * group, queries))
        assert (n == keys).all() or "causal" in masks


def test_heads_are_counted_apart_only_where_their_masks_differ() -> None:
    shapes = {}
    for case in ("causal", "padding", "packed", "boolean", "boolean keys", "boolean of heads",
                 "boolean keys of heads"):  # fmt: skip
        masking = Masking(batch=B, heads=H, group=G, queries=L, keys=S, **CASES[case])
        shapes[case] = visible_keys(masking).shape[1]
    assert shapes.pop("boolean of heads") == shapes.pop("boolean keys of heads") == H * G
    assert set(shapes.values()) == {1}


def test_keys_are_counted_in_blocks() -> None:
    for heads, rows, keys in ((1, 1100, 1000), (2, 3, 600_000)):  # blocks have 2²⁰ entries
        seen = torch.rand(1, heads, rows, keys) > 0.5
        masking = Masking(batch=1, heads=heads, group=1, queries=rows, keys=keys, attn_mask=seen)
        assert torch.equal(visible_keys(masking), seen.sum(-1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_n_is_what_the_kernel_counted(seed: int) -> None:
    case = attention_case(seed)
    options = {name: case.options.get(name) for name in
               ("attn_mask", "window", "key_mask", "document_ids", "cu_seqlens", "bias",
                "alibi_slopes")}  # fmt: skip
    masking = check_masking(
        case.query,
        case.key,
        is_causal=case.options.get("is_causal", False),
        query_offset=case.options.get("query_offset", 0),
        **options,
    )
    measured = acutance.row_statistics(case.query, case.key, **case.options).n_keys
    assert torch.equal(visible_keys(masking).expand_as(measured), measured), case.name


@pytest.mark.parametrize("law", [scaling.LogN(train_length=8, n_min=1), scaling.SSMax(),
                                 scaling.SqrtLogN(train_length=4)])  # fmt: skip
@pytest.mark.parametrize(
    "kind", ["causal", "decoding", "window", "padding", "left padding", "packed"]
)
def test_the_factor_is_that_of_the_sequence_alone(kind: str, law: scaling.Scaling) -> None:
    """Batched, padded, packed or with a cache, a row is scaled as in its own short sequence.

    A published implementation took the padded length instead, for every row of the batch.
    """
    short, long = 5, 12
    alone = law.factor(torch.arange(1, short + 1))  # five tokens, causal, nothing else
    full = Masking(2, 1, 1, long, long, causal=True)
    keys = torch.arange(long)
    if kind == "causal":
        found = law.factor(visible_keys(full))[0, 0, :short]
    elif kind == "decoding":  # one new token at a time, over a cache
        found = torch.cat(
            [
                law.factor(visible_keys(Masking(1, 1, 1, 1, i + 1, causal=True, offset=i)))[0, 0]
                for i in range(short)
            ]
        )
    elif kind == "window":  # sees its last five keys: n stops at 5
        n = visible_keys(Masking(1, 1, 1, long, long, causal=True, window=short))
        assert n[0, 0].tolist() == [1, 2, 3, 4] + [5] * 8
        found = law.factor(n)[0, 0, :short]
    elif kind == "padding":
        padded = Masking(2, 1, 1, long, long, causal=True,
                         key_mask=torch.stack([keys < short, keys < long]))  # fmt: skip
        found = law.factor(visible_keys(padded))[0, 0, :short]
        assert torch.equal(law.factor(visible_keys(padded))[1], law.factor(visible_keys(full))[1])
    elif kind == "left padding":
        padded = Masking(1, 1, 1, long, long, causal=True, key_mask=keys[None] >= long - short)
        found = law.factor(visible_keys(padded))[0, 0, long - short :]
    else:
        ids = (keys >= long - short).long()[None]
        packed = Masking(1, 1, 1, long, long, causal=True, query_documents=ids, key_documents=ids)
        found = law.factor(visible_keys(packed))[0, 0, long - short :]
    assert torch.equal(found, alone)
    wrong = law.factor(torch.tensor([long])).expand_as(alone)
    assert not torch.allclose(alone, wrong, rtol=0.05), "the law tells the two apart"


def test_no_matrix_of_queries_and_keys_is_formed() -> None:
    """At a million keys the L×S mask would be 1 TB; this allocates a few int64 rows."""
    length = 1 << 20
    ids = torch.arange(length)[None] // 1000
    masking = Masking(1, 1, 1, length, length, causal=True, window=300, query_documents=ids,
                      key_documents=ids, key_mask=torch.arange(length)[None] % 2 == 0)  # fmt: skip
    n = visible_keys(masking)[0, 0]
    assert n[999] == 150
    assert n[1000].item() == 1
    assert n[1299] == 150
    assert n[1001] == 1
