"""Bad input is refused at the door, in one sentence that says which rule it broke."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import RowStatistics, observe
from acutance.shapes import FLOATS, check_count, check_flag, check_number, describe
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

SHAPES = "(query (2, 4, 3, 8), key (2, 2, 5, 8), value (2, 2, 5, 6))"


def inputs(**changed: Any) -> dict[str, Any]:
    """A legal call, changed: query (2, 4, 3, 8), key (2, 2, 5, 8), value (2, 2, 5, 6)."""
    legal = {
        "query": torch.zeros(2, 4, 3, 8),
        "key": torch.zeros(2, 2, 5, 8),
        "value": torch.zeros(2, 2, 5, 6),
        "enable_gqa": True,
    }
    return legal | changed


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


def test_the_unchanged_call_is_legal() -> None:
    assert attention(**inputs()).shape == (2, 4, 3, 6)


# what is changed, the error, and every part of its message that a reader needs
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "source lengths differ": (
        {"value": zeros(2, 2, 7, 6)},
        ValueError,
        [
            "key and value must have the same source length S: key has S=5, value has S=7",
            "(query (2, 4, 3, 8), key (2, 2, 5, 8), value (2, 2, 7, 6))",
        ],
    ),
    "widths differ": (
        {"query": zeros(2, 4, 3, 9)},
        ValueError,
        [
            "query and key must have the same width E: query has E=9, key has E=8",
            "value (2, 2, 5, 6)",
        ],
    ),
    "no width": (
        {"query": zeros(2, 4, 3, 0), "key": zeros(2, 2, 5, 0)},
        ValueError,
        ["width E of at least 1", "key (2, 2, 5, 0)"],
    ),
    "batches differ": (
        {"key": zeros(1, 2, 5, 8)},
        ValueError,
        ["same batch size B: query has B=2, key has B=1", "value (2, 2, 5, 6)"],
    ),
    "the value's batch differs": (
        {"value": zeros(3, 2, 5, 6)},
        ValueError,
        ["query has B=2, value has B=3", "key (2, 2, 5, 8)"],
    ),
    "heads without enable_gqa": (
        {"enable_gqa": False},
        ValueError,
        ["query has 4 heads but key has 2", "pass enable_gqa=True", SHAPES],
    ),
    "heads that do not divide": (
        {"query": zeros(2, 3, 3, 8)},
        ValueError,
        ["number of key heads: 3 is not a multiple of 2", "query (2, 3, 3, 8)", "value"],
    ),
    "no key heads": (
        {"key": zeros(2, 0, 5, 8), "value": zeros(2, 0, 5, 6)},
        ValueError,
        ["a multiple of the number of key heads", "key (2, 0, 5, 8)"],
    ),
    "key and value heads differ": (
        {"value": zeros(2, 4, 5, 6)},
        ValueError,
        ["key and value must have the same number of heads H: key has H=2, value has H=4", "query"],
    ),
    "rank of the query": (
        {"query": zeros(4, 3, 8)},
        ValueError,
        ["query must have four dimensions", "got 3", "query (4, 3, 8), key (2, 2, 5, 8), value"],
    ),
    "rank of the key": ({"key": zeros(2, 2, 2, 5, 8)}, ValueError, ["key must have four", "got 5"]),
    "rank of the value": ({"value": zeros(5, 6)}, ValueError, ["value must have four", "got 2"]),
    "dtypes differ": (
        {"key": zeros(2, 2, 5, 8, dtype=torch.float64)},
        TypeError,
        ["same dtype: query is torch.float32, key is torch.float64", SHAPES],
    ),
    "an integer dtype": (
        {"query": zeros(2, 4, 3, 8, dtype=torch.int64)},
        TypeError,
        ["query must be float64, float32, bfloat16 or float16, got torch.int64", SHAPES],
    ),
    "a complex dtype": (
        {"value": zeros(2, 2, 5, 6, dtype=torch.complex64)},
        TypeError,
        ["value must be float64, float32, bfloat16 or float16, got torch.complex64"],
    ),
    "devices differ": (
        {"value": zeros(2, 2, 5, 6, device="meta")},
        ValueError,
        ["same device: query is on cpu, value on meta", SHAPES],
    ),
    "an array": (
        {"query": np.zeros((2, 4, 3, 8))},
        TypeError,
        ["query must be a Tensor, got ndarray"],
    ),
    "no key": ({"key": None}, TypeError, ["key must be a Tensor, got NoneType"]),
    "no value": (
        {"value": None},
        TypeError,
        ["value must be a Tensor, got None", "row_statistics"],
    ),
    "a mask that does not broadcast": (
        {"attn_mask": zeros(4, 5, dtype=torch.bool)},
        ValueError,
        [
            "attn_mask must broadcast to (B, Hq, L, S) = (2, 4, 3, 5), got (4, 5)",
            "query (2, 4, 3, 8), key (2, 2, 5, 8)",
        ],
    ),
    "a mask of key heads": (
        {"attn_mask": zeros(2, 2, 3, 5, dtype=torch.bool)},
        ValueError,
        ["attn_mask must broadcast to", "got (2, 2, 3, 5)"],
    ),
    "a mask of five dimensions": (
        {"attn_mask": zeros(1, 2, 4, 3, 5)},
        ValueError,
        ["attn_mask must broadcast to", "got (1, 2, 4, 3, 5)"],
    ),
    "an integer mask": (
        {"attn_mask": zeros(3, 5, dtype=torch.int64)},
        TypeError,
        [
            "attn_mask must be boolean (True is visible) or floating-point (added to the scores)",
            "got torch.int64",
            "(3, 5)",
        ],
    ),
    "a mask that is no tensor": (
        {"attn_mask": [[True]]},
        TypeError,
        ["attn_mask must be a Tensor, got list"],
    ),
    "a mask elsewhere": (
        {"attn_mask": zeros(3, 5, device="meta")},
        ValueError,
        [
            "attn_mask must be on the query's device cpu, got meta (attn_mask (3, 5)",
            "key (2, 2, 5, 8)",
        ],
    ),
    "a mask with is_causal": (
        {"attn_mask": torch.ones(3, 5, dtype=torch.bool), "is_causal": True},
        ValueError,
        [
            "attn_mask and is_causal=True exclude each other",
            "attn_mask (3, 5), query (2, 4, 3, 8), key (2, 2, 5, 8)",
        ],
    ),
    "a bias that does not broadcast": (
        {"bias": zeros(4, 3, 6)},
        ValueError,
        ["bias must broadcast to (B, Hq, L, S) = (2, 4, 3, 5), got (4, 3, 6)", "key (2, 2, 5, 8)"],
    ),
    "a boolean bias": (
        {"bias": zeros(3, 5, dtype=torch.bool)},
        TypeError,
        ["bias must be a floating-point tensor, got torch.bool"],
    ),
    "a bias that is no tensor": ({"bias": 1.0}, TypeError, ["bias must be a Tensor, got float"]),
    "a bias elsewhere": (
        {"bias": zeros(3, 5, device="meta")},
        ValueError,
        ["bias must be on the query's device cpu, got meta"],
    ),
    "an additive key mask": (
        {"key_mask": zeros(2, 5)},
        TypeError,
        ["key_mask must be boolean, True for visible keys, got torch.float32"],
    ),
    "a key mask of queries": (
        {"key_mask": zeros(2, 3, dtype=torch.bool)},
        ValueError,
        [
            "key_mask must have shape (B, S) = (2, 5), got (2, 3)",
            "query (2, 4, 3, 8), key (2, 2, 5, 8)",
        ],
    ),
    "a key mask elsewhere": (
        {"key_mask": zeros(2, 5, dtype=torch.bool, device="meta")},
        ValueError,
        ["key_mask must be on the query's device cpu, got meta"],
    ),
    "a key mask that is no tensor": ({"key_mask": True}, TypeError, ["key_mask must be a Tensor"]),
    "a window of nothing": ({"window": 0}, ValueError, ["window must be at least 1, got 0"]),
    "a window that is no integer": (
        {"window": 2.0},
        TypeError,
        ["window must be an integer, got 2.0"],
    ),
    "a window past 64 bits": ({"window": 2**80}, ValueError, [f"window must be at most {2**61}"]),
    "an offset past 64 bits": (
        {"query_offset": 2**80},
        ValueError,
        ["query_offset must be at most"],
    ),
    "an offset below 64 bits": (
        {"query_offset": -(2**80)},
        ValueError,
        ["query_offset must be at"],
    ),
    "an offset that is no integer": (
        {"query_offset": True},
        TypeError,
        ["query_offset must be an integer, got True (bool)"],
    ),
    "an infinite scale": (
        {"scale": float("inf")},
        ValueError,
        ["scale must be a finite number, got inf"],
    ),
    "a scale that is not a number": (
        {"scale": float("nan")},
        ValueError,
        ["scale must be a finite"],
    ),
    "a scale of another type": (
        {"scale": torch.tensor(1.0)},
        TypeError,
        ["scale must be a number, got tensor(1.)"],
    ),
    "a negative softcap": (
        {"softcap": -1.0},
        ValueError,
        ["softcap must be a finite number above 0"],
    ),
    "no softcap": (
        {"softcap": 0.0},
        ValueError,
        ["softcap must be a finite number above 0, got 0.0"],
    ),
    "a negative dropout": (
        {"dropout_p": -0.1},
        ValueError,
        ["dropout_p must be a finite number at least 0 and below 1, got -0.1"],
    ),
    "a dropout of everything": (
        {"dropout_p": 1.0},
        ValueError,
        ["dropout_p must be a finite", "1.0"],
    ),
    "a dropout that is no number": (
        {"dropout_p": "0.1"},
        TypeError,
        ["dropout_p must be a number"],
    ),
    "is_causal as a number": (
        {"is_causal": 1},
        TypeError,
        ["is_causal must be True or False, got 1"],
    ),
    "enable_gqa as a number": ({"enable_gqa": 1}, TypeError, ["enable_gqa must be True or False"]),
    "return_stats as text": ({"return_stats": "yes"}, TypeError, ["return_stats must be True or"]),
    "noise as text": (
        {"noise": "yes"},
        TypeError,
        ["noise must be True or False, got 'yes' (str)"],
    ),
    "sinks of key heads": (
        {"sinks": zeros(2)},
        ValueError,
        ["sinks must have shape (Hq,) = (4,), got (2,)", "query (2, 4, 3, 8)"],
    ),
    "integer sinks": (
        {"sinks": zeros(4, dtype=torch.int64)},
        TypeError,
        ["sinks must be a floating-point tensor, got torch.int64"],
    ),
    "sinks that are no tensor": ({"sinks": 0.0}, TypeError, ["sinks must be a Tensor, got float"]),
    "sinks elsewhere": (
        {"sinks": zeros(4, device="meta")},
        ValueError,
        ["sinks must be on the query's device cpu, got meta"],
    ),
    "slopes of key heads": (
        {"alibi_slopes": zeros(2)},
        ValueError,
        [
            "alibi_slopes must have shape (Hq,) = (4,), got (2,)",
            "query (2, 4, 3, 8), key (2, 2, 5, 8)",
        ],
    ),
    "integer slopes": (
        {"alibi_slopes": zeros(4, dtype=torch.int64)},
        TypeError,
        ["alibi_slopes must be a floating-point tensor, got torch.int64"],
    ),
    "slopes elsewhere": (
        {"alibi_slopes": zeros(4, device="meta")},
        ValueError,
        ["alibi_slopes must be on the query's device cpu, got meta"],
    ),
    "slopes to be learned": (
        {"alibi_slopes": zeros(4, requires_grad=True)},
        ValueError,
        ["alibi_slopes must be constants", "pass learned slopes as a bias"],
    ),
    "documents twice": (
        {"document_ids": torch.zeros(5).long(), "cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        ["document_ids and cu_seqlens exclude each other"],
    ),
    "documents as numbers": (
        {"document_ids": zeros(5)},
        TypeError,
        ["document_ids must be integers, got torch.float32"],
    ),
    "documents of too few keys": (
        {"document_ids": torch.zeros(4).long()},
        ValueError,
        ["document_ids of keys must have shape (5,) or (2, 5), got (4,)"],
    ),
    "documents of another batch": (
        {"document_ids": torch.zeros(3, 5).long()},
        ValueError,
        ["document_ids of queries must have shape (3,) or (2, 3), got (3, 3)"],
    ),
    "documents that do not hold the queries": (
        {"document_ids": torch.zeros(5).long(), "query_offset": 3},
        ValueError,
        ["L=3 from offset 3 does not lie within 5 ids", "pass a pair (for queries, for keys)"],
    ),
    "a scalar of documents": (
        {"document_ids": torch.tensor(0)},
        ValueError,
        ["L=3 from offset 0 does not lie within 0 ids"],
    ),
    "three tensors of documents": (
        {"document_ids": (torch.zeros(5).long(),) * 3},
        ValueError,
        ["one tensor, or a pair of tensors (for queries, for keys), got a tuple of 3"],
    ),
    "documents as a list": (
        {"document_ids": [0, 0, 1, 1, 1]},
        TypeError,
        ["document_ids must be a Tensor, got list"],
    ),
    "documents elsewhere": (
        {"document_ids": torch.zeros(5, device="meta").long()},
        ValueError,
        ["document_ids of queries must be on the query's device cpu, got meta"],
    ),
    "lengths that end early": (
        {"cu_seqlens": torch.tensor([0, 4])},
        ValueError,
        ["cu_seqlens must rise from 0 to the source length S=5, got [0, 4]"],
    ),
    "lengths that fall": (
        {"cu_seqlens": torch.tensor([0, 4, 2, 5])},
        ValueError,
        ["cu_seqlens must rise from 0 to the source length S=5, got [0, 4, 2, 5]"],
    ),
    "lengths as numbers": (
        {"cu_seqlens": torch.tensor([0.0, 5.0])},
        ValueError,
        ["cu_seqlens must be one row of at least two integers", "torch.float32"],
    ),
    "boolean lengths": (
        {"cu_seqlens": torch.tensor([False, True])},
        ValueError,
        ["cu_seqlens must be one row of at least two integers", "torch.bool"],
    ),
    "lengths of each batch": (
        {"cu_seqlens": torch.tensor([[0, 5], [0, 5]])},
        ValueError,
        ["cu_seqlens must be one row of at least two integers", "(2, 2)"],
    ),
    "lengths as a list": (
        {"cu_seqlens": [0, 5]},
        TypeError,
        ["cu_seqlens must be a Tensor, got list"],
    ),
    "a misspelt option": (
        {"is_casual": True},
        TypeError,
        ["unexpected keyword argument 'is_casual'"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    changed, error, parts = BAD[case]
    with pytest.raises(error, match=re.escape(parts[0])) as caught:
        attention(**inputs(**changed))
    message = str(caught.value)
    assert type(caught.value) is error
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message
    assert ". " not in message.replace(". Did you mean", ""), "one sentence"  # Python 3.13 asks


@pytest.mark.parametrize(
    "case", [name for name in BAD if "dropout" not in name and "return" not in name]
)
def test_row_statistics_refuses_the_same(case: str) -> None:
    changed, error, parts = BAD[case]
    if case == "no value":
        return
    with pytest.raises(error, match=re.escape(parts[0])):
        row_statistics(**inputs(**changed))


def test_row_statistics_refuses_a_value_that_is_none_of_its_business() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="value must be a Tensor, got bool"):
        row_statistics(query, query, True)
    with pytest.raises(ValueError, match=r"noise=True needs value .* got None"):
        row_statistics(query, query, noise=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        row_statistics(query, query, dropout_p=0.1)


def test_options_are_keywords_only() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="positional arguments"):
        attention(query, query, query, None, False, None, False, True)


def test_an_unknown_metric_is_answered_with_the_nearest_known_one() -> None:
    stats = RowStatistics(observe(torch.zeros(1, 3)))
    with pytest.raises(
        ValueError, match="there is no metric named 'entropie'; did you mean 'entropy'"
    ):
        stats["entropie"]
    with pytest.raises(
        ValueError, match="there is no metric named 'xyzzy': choose from n_keys, entropy"
    ):
        stats["xyzzy"]
    with pytest.raises(ValueError, match="noise_gain needs values: pass value="):
        stats["noise_gain"]
    assert [stats[name] is not None for name in EXACT if name != "noise_gain"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_is_taken(dtype: torch.dtype) -> None:
    legal = inputs()
    tensors = {name: legal[name].to(dtype) for name in ("query", "key", "value")}
    out, stats = attention(**tensors, enable_gqa=True, return_stats=True)
    assert out.dtype == dtype
    assert stats.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert stats.n_keys.dtype == torch.int64


def test_the_checks_return_what_they_checked() -> None:
    assert check_flag("f", True) is True
    assert check_number("x", 3) == 3.0
    assert isinstance(check_number("x", 3), float)
    assert check_number("x", 0.0, above=0.0, including=True) == 0.0
    assert check_count("n", 4, 4) == 4
    with pytest.raises(ValueError, match="x must be a finite number above 1 and below 2, got 2"):
        check_number("x", 2.0, above=1.0, below=2.0)
    with pytest.raises(ValueError, match="n must be at least 5, got 4"):
        check_count("n", 4, 5)
    assert describe(key=torch.zeros(2, 0)) == "key (2, 0)"


@pytest.mark.parametrize(
    ("query", "key"),
    [((0, 2, 3, 4), (0, 2, 5, 4)), ((1, 2, 0, 4), (1, 2, 5, 4)), ((1, 0, 3, 4), (1, 0, 5, 4))],
)
def test_sizes_of_zero_are_empty_results(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    q, k = torch.zeros(query), torch.zeros(key)
    out, stats = attention(q, k, k, return_stats=True)
    assert out.shape == query
    assert stats.entropy.shape == query[:3]


def test_a_source_without_keys_has_rows_that_see_nothing() -> None:
    query, key = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4)
    out, stats = attention(query, key, key, return_stats=True)
    assert torch.equal(out, torch.zeros(1, 2, 3, 4))
    assert stats.n_keys.eq(0).all()
    assert stats.lse.eq(-torch.inf).all()
    assert stats.entropy.isnan().all()
