"""What a mask hides, on every backend: one rule, and nothing of a hidden key reaches a row."""

from __future__ import annotations

import pytest
import torch

from acutance import row_statistics
from acutance.masks import check_masking, hidden_scores, hides, mask_limit
from acutance.rowstats import dense_statistics
from acutance.scaling import visible_keys
from acutance.structure import statistics
from tests.contract.kernels.test_hidden import normal

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOWEST = {
    "-1e9": lambda dtype: torch.tensor(-1e9, dtype=torch.float64).to(dtype),
    "lowest": lambda dtype: torch.tensor(torch.finfo(dtype).min, dtype=dtype),
    "-1e4 max": lambda dtype: torch.tensor(-1e4 * torch.finfo(dtype).max).to(dtype),
    "-inf": lambda dtype: torch.tensor(-torch.inf, dtype=dtype),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("number", LOWEST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_hides_with_every_dtypes_lowest_numbers(
    backend: str, dtype: torch.dtype, number: str
) -> None:
    # few queries and many are different kernels natively, a mask that rows share a third way
    for queries, rows in ((3, 1), (40, 1), (40, 40)) if backend == "native" else ((3, 3),):
        check_hiding(backend, dtype, number, queries, rows)


def check_hiding(backend: str, dtype: torch.dtype, number: str, queries: int, rows: int) -> None:
    query, key = normal(1, 2, queries, 8), normal(1, 2, 5, 8)
    mask = torch.zeros(1, 1, rows, 5, dtype=dtype)
    mask[..., 1:3] = LOWEST[number](dtype)
    seen = torch.tensor([True, False, False, True, True])
    assert torch.equal(hides(mask[0, 0, 0]), ~seen)
    want = dense_statistics(query, key[:, :, seen])
    for name in ("attn_mask", "bias"):
        found = row_statistics(query, key, backend=backend, **{name: mask})
        assert found.n_keys.unique().tolist() == [3], name
        for metric in ("entropy", "logit_mean", "max_logit"):
            torch.testing.assert_close(
                found[metric].double(), want[metric], rtol=1e-5, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rest_of_the_library_follows_the_same_rule(dtype: torch.dtype) -> None:
    query, key = normal(1, 1, 2, 8), normal(1, 1, 5, 8)
    mask = torch.zeros(2, 5, dtype=dtype)
    mask[:, 1:3] = LOWEST["-1e9"](dtype)
    options = dict.fromkeys(("window", "key_mask", "document_ids", "cu_seqlens", "bias"))
    masking = check_masking(
        query, key, attn_mask=mask, is_causal=False, query_offset=0, alibi_slopes=None, **options
    )
    assert visible_keys(masking).tolist() == [[[3, 3]]]
    seen = torch.tensor([True, False, False, True, True])
    distances = [statistics(query, key, attn_mask=m).attention_distance for m in (mask, seen)]
    torch.testing.assert_close(*distances)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(hidden_scores(mask.to(wide) + 640.0, dtype), hides(mask))
    assert not bool(hides(torch.full((1,), -1e4, dtype=dtype)))
    if dtype != torch.float16:  # a bfloat16 mask hides the same keys widened
        assert mask_limit(dtype) == mask_limit(torch.bfloat16)
