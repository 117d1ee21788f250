"""flash-attn 2, 3 and 4: every variant is verified, with the reference's entropies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.kernel_functions.checks import (
    HEADS,
    assert_listed,
    assert_read,
    cumulative,
    packed,
    tensor,
    tensors,
)
from tests.contract.kernel_functions.stand_ins import flash_attn_2, flash_attn_3, flash_attn_4

WINDOWS = [(-1, -1), (2, 0), (2, 2), (3, 1), (-1, 2), (1, -1)]


@pytest.mark.few(12)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 7), (1, 5), (6, 3)])
def test_batches(queries: int, keys: int, causal: bool, window: Any, softcap: float) -> None:
    given = tensors(2, queries, keys)
    options = {"causal": causal, "window_size": window, "softcap": softcap, "softmax_scale": 0.4}
    name = "flash_attn_func"
    assert_read(lambda: flash_attn_2.flash_attn_func(*given, **options), name)
    sinks = tensor(HEADS)
    assert_read(lambda: flash_attn_3.flash_attn_func(*given, s_aux=sinks, **options), name)
    sides = tuple(None if side < 0 else side for side in window)
    options |= {"window_size": sides, "learnable_sink": sinks}
    assert_read(lambda: flash_attn_4.flash_attn_func(*given, **options), name)


@pytest.mark.parametrize("shape", [(HEADS,), (2, HEADS)])
@pytest.mark.parametrize("keys", [4, 7])
def test_alibi(keys: int, shape: tuple[int, ...]) -> None:
    given, slopes = tensors(2, 4, keys), tensor(*shape).abs()
    options = {"causal": True, "alibi_slopes": slopes, "softcap": 4.0}
    assert_read(lambda: flash_attn_2.flash_attn_func(*given, **options))
    query, key, value, asks, answers = packed([2, 3], [4, keys])
    places = (asks, answers, 3, keys)
    run = flash_attn_2.flash_attn_varlen_func
    assert_read(lambda: run(query, key, value, *places, **options))


@pytest.mark.few(9)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"), [([3, 5, 2], [3, 5, 2]), ([2, 1, 4], [5, 3, 4]), ([3, 2], [1, 6])]
)
def test_packed_sequences(queries: list[int], keys: list[int], causal: bool, window: Any) -> None:
    query, key, value, asks, answers = packed(queries, keys)
    places = (asks, answers, max(queries), max(keys))
    options = {"causal": causal, "window_size": window, "softcap": 5.0}
    name = "flash_attn_varlen_func"
    run = flash_attn_2.flash_attn_varlen_func
    assert_read(lambda: run(query, key, value, *places, **options), name)
    kvpacked = flash_attn_2.flash_attn_varlen_kvpacked_func
    assert_read(lambda: kvpacked(query, torch.stack([key, value], 1), *places, **options))
    options["s_aux"] = tensor(HEADS)
    other = flash_attn_3.flash_attn_varlen_func
    assert_read(lambda: other(query, key, value, *places, **options), name)


def test_sequences_that_use_part_of_their_space() -> None:
    query, key, value, asks, answers = packed([4, 5], [6, 4])
    used = {"seqused_q": torch.tensor([2, 5]), "seqused_k": torch.tensor([5, 3])}
    run = flash_attn_3.flash_attn_varlen_func
    assert_read(lambda: run(query, key, value, asks, answers, 5, 6, causal=True, **used))
    fourth = flash_attn_4.flash_attn_varlen_func
    options: dict[str, Any] = {
        "cu_seqlens_q": asks,
        "cu_seqlens_k": answers,
        "causal": True,
        **used,
    }
    assert_read(lambda: fourth(query, key, value, **options))
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pages = [tensor(4, 4, 2, 8, seed=place) for place in (5, 6)]
    options = {"cu_seqlens_q": asks, "page_table": table, "causal": True, **used}
    assert_read(lambda: fourth(query, *pages, **options))
    batch = tensors(3, 2, 6)
    lengths = torch.tensor([6, 4, 2])
    assert_read(lambda: fourth(*batch, seqused_k=lengths, causal=True))


def test_packed_queries_keys_and_values() -> None:
    qkv, cuts = tensor(2, 5, 3, HEADS, 8), cumulative([4, 1, 5])
    assert_read(lambda: flash_attn_2.flash_attn_qkvpacked_func(qkv, causal=True))
    assert_read(lambda: flash_attn_3.flash_attn_qkvpacked_func(qkv, window_size=(2, 2)))
    grouped = tensor(2, 5, HEADS + 4, 8)
    run = flash_attn_3.flash_attn_qkvpacked_func
    assert_read(lambda: run(grouped, causal=True, num_heads_q=HEADS))
    flat = tensor(10, 3, HEADS, 8)
    varlen = flash_attn_2.flash_attn_varlen_qkvpacked_func
    assert_read(lambda: varlen(flat, cuts, 5, causal=True))
    kv, query = tensor(2, 5, 2, 2, 8), tensor(2, 3, HEADS, 8)
    assert_read(lambda: flash_attn_2.flash_attn_kvpacked_func(query, kv, causal=True))


@pytest.mark.few(8)
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 1)])
@pytest.mark.parametrize("lengths", [4, torch.tensor([4, 4]), torch.tensor([6, 2])])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_caches(new: int, lengths: Any, window: Any) -> None:
    rows = max(new, 1)
    query, key, value = tensors(2, rows, 10)
    options = {"cache_seqlens": lengths, "causal": True, "window_size": window}
    if new:
        options |= {"k": tensor(2, new, 2, 8), "v": tensor(2, new, 2, 8, seed=9)}
    for library in (flash_attn_2, flash_attn_3):
        cache = key.clone(), value.clone()
        run = library.flash_attn_with_kvcache
        assert_read(lambda run=run, cache=cache: run(query, *cache, **options))  # type: ignore[misc]


def test_caches_in_pages_rows_and_with_padding() -> None:
    query, key, value = tensors(2, 2, 12)
    pages = [part.reshape(6, 4, 2, 8) for part in (key, value)]
    table = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32)
    new = {"k": tensor(2, 2, 2, 8), "v": tensor(2, 2, 2, 8, seed=9)}
    run = flash_attn_2.flash_attn_with_kvcache
    options: dict[str, Any] = {"causal": True, "cache_seqlens": torch.tensor([7, 3]), **new}
    assert_read(lambda: run(query, *(part.clone() for part in pages), block_table=table, **options))
    chosen, blank = torch.tensor([1, 0]), torch.tensor([2, 1])
    options |= {"cache_batch_idx": chosen, "cache_leftpad": blank, "alibi_slopes": tensor(HEADS)}
    assert_read(lambda: run(query, key.clone(), value.clone(), **options))
    ask, answer = cumulative([2, 2]), cumulative([9, 5])
    varlen = flash_attn_2.flash_attn_varlen_func
    flat = query.flatten(0, 1)
    assert_read(lambda: varlen(flat, *pages, ask, answer, 2, 9, causal=True, block_table=table))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_caches_that_rotate(width: int, causal: bool, pairs: bool) -> None:
    query, key, value = tensors(2, 2, 9)
    angle = tensor(12, width)
    options = {
        "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
        "rotary_interleaved": pairs,
        "causal": causal,
        "k": tensor(2, 2, 2, 8),
        "v": tensor(2, 2, 2, 8, seed=9),
    }
    run = flash_attn_2.flash_attn_with_kvcache
    for lengths in (5, torch.tensor([3, 6])):
        cache = key.clone(), value.clone()
        assert_read(lambda: run(query, *cache, cache_seqlens=lengths, **options))  # noqa: B023


def test_eight_bits_are_descaled() -> None:
    query, key, value = (part.to(torch.float8_e4m3fn) for part in tensors(2, 3, 5))
    options = {
        f"{name}_descale": tensor(2, 2, seed=place).abs() + 0.5
        for place, name in enumerate(("q", "k", "v"))
    }
    assert_read(lambda: flash_attn_3.flash_attn_func(query, key, value, causal=True, **options))


def test_what_is_not_understood_is_listed() -> None:
    given = tensors(1, 3, 5)
    third, fourth = flash_attn_3.flash_attn_func, flash_attn_4.flash_attn_func
    assert_listed(lambda: third(*given, qv=given[0]), "flash_attn_func", "qv=Tensor")
    assert_listed(lambda: third(*given, attention_chunk=4), "flash_attn_func", "attention_chunk")
    assert_listed(lambda: fourth(*given, score_mod=len), "flash_attn_func", "score_mod")
    blocks = {"block_sparse_tensors": object()}
    assert_listed(lambda: fourth(*given, **blocks), "flash_attn_func", "block_sparse_tensors")
    cache = flash_attn_2.flash_attn_with_kvcache
    turned = {"rotary_cos": tensor(9, 4), "rotary_sin": tensor(9, 4), "cache_seqlens": 2}
    new = {"k": tensor(1, 1, 2, 8), "v": tensor(1, 1, 2, 8), "cache_leftpad": torch.tensor([1])}
    words = "flash_attn_with_kvcache", "rotary"
    assert_listed(lambda: cache(*given, **turned, **new), *words)
    assert_listed(lambda: third(*given, window_size=(3, -2)), "window (3, -2)")
