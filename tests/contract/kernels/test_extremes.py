"""Numbers at the end of a dtype's range, and statistics as files, on every backend."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import RowStatistics, dense_statistics
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.grid(2)
@pytest.mark.parametrize("softcap", [1e-300, 1e-50, 1e-20, 1e20, 1e38, 1e39, 1e300])
def test_softcaps_beyond_the_dtype(backend: str, softcap: float) -> None:
    """A very low one leaves scores of 0, a very high one leaves them as they are."""
    for queries in (3, 40) if backend == "native" else (3,):
        check_softcap(backend, softcap, queries)


def check_softcap(backend: str, softcap: float, queries: int) -> None:
    query, key = normal(1, 1, queries, 8).requires_grad_(), normal(1, 1, 9, 8)
    kinds = (torch.float32,) if backend == "triton" else (torch.float32, torch.float64)
    for dtype in kinds:
        stats = row_statistics(query.to(dtype), key.to(dtype), softcap=softcap, backend=backend)
        slope = torch.autograd.grad(stats.entropy.sum(), query)[0]
        assert slope.isfinite().all()
        if softcap < 1:
            want = torch.full((1, 1, queries), math.log(9), dtype=dtype)
            torch.testing.assert_close(stats.entropy, want)
            assert float(stats.logit_std.detach().max()) < 1e-19
        else:
            plain = dense_statistics(query, key)
            torch.testing.assert_close(stats.entropy, plain["entropy"].to(dtype))
            torch.testing.assert_close(stats.logit_std, plain["logit_std"].to(dtype))


def test_the_documented_accuracy_of_spread_scores(backend: str) -> None:
    """Scores of deviation 7, exact in float32, against float64: 300 keys are three tiles."""
    key = 7 * torch.randn(40, 1, 300, 1, generator=torch.Generator().manual_seed(0))
    if backend == "triton":
        key = key[:2]
    found = row_statistics(torch.ones(len(key), 1, 40, 1), key, scale=1.0, backend=backend)
    scores = key.double()[:, :, :, 0].unsqueeze(2)
    logs = torch.log_softmax(scores, -1)
    entropy = -(logs.exp() * logs).sum(-1)
    varentropy = (logs.exp() * (logs + entropy.unsqueeze(-1)).square()).sum(-1)
    assert float((found.entropy - entropy).abs().max()) < 4e-7
    assert float((found.varentropy - varentropy).abs().max()) < 1e-6  # 8.6e-7 without FMA


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["native", "blocked"], indirect=True)
def test_keys_beyond_what_float32_counts(backend: str, masked: bool) -> None:
    """The other backends count in integers, or leave such a call to the blocked one."""
    queries = 16 if backend == "native" else 1  # fewer take the native kernel's other way
    keys = 2**24 + 3
    query, key = torch.zeros(1, 1, queries, 1), torch.zeros(1, 1, keys, 1)
    seen = None
    if masked:
        seen = torch.ones(1, keys, dtype=torch.bool)
        seen[0, 7] = seen[0, -1] = False
    found = row_statistics(query, key, key_mask=seen, backend=backend).n_keys
    assert found.unique().tolist() == [keys - 2 * masked]


@pytest.mark.parametrize("hide", ["nothing", "padding", "causal"])
def test_a_product_that_overflows_counts_as_a_visible_key(backend: str, hide: str) -> None:
    """Masks alone say what is visible. Its weight is 0, weight times score is NaN."""
    for queries in (1, 40) if backend == "native" else (1,):
        check_overflow(backend, hide, queries)


def check_overflow(backend: str, hide: str, queries: int) -> None:
    query = torch.full((1, 1, queries, 2), 1e20)
    key = torch.zeros(1, 1, 5, 2)
    key[:, :, 1], key[:, :, 2] = -1e-21, -1e20
    options = {
        "nothing": {},
        "padding": {"key_mask": torch.tensor([[True, True, True, True, False]])},
        "causal": {"is_causal": True, "query_offset": 4},
    }[hide]
    out, stats = attention(
        query, key, torch.ones(1, 1, 5, 2), scale=1.0, return_stats=True, backend=backend, **options
    )
    keys = 4 if hide == "padding" else 5
    scores = torch.zeros(keys, dtype=torch.float64)
    scores[1], scores[2] = -0.2, -torch.inf
    p = torch.softmax(scores, -1)
    assert stats.n_keys.unique().tolist() == [keys]
    torch.testing.assert_close(out, torch.ones_like(out))
    want = {
        "lse": scores.logsumexp(-1),
        "max_logit": 0.0,
        "top_weight": p[0],
        "first_weight": p[0],
        "collision": p.square().sum(),
    }
    for name, number in want.items():
        expected = torch.full((1, 1, queries), float(number))
        torch.testing.assert_close(stats[name], expected, msg=name)
    for name in ("entropy", "varentropy", "logit_std", "information"):
        assert stats[name].isnan().all(), name
    assert not stats.logit_mean.isfinite().any()


@pytest.mark.parametrize("queries", [1, 40])
def test_a_row_of_nothing_but_overflow_has_keys_and_no_weight(backend: str, queries: int) -> None:
    query = torch.full((1, 1, queries, 2), 1e20)
    out, stats = attention(
        query, -query[:, :, :1].expand(1, 1, 3, 2), torch.ones(1, 1, 3, 2), scale=1.0,
        return_stats=True, backend=backend,
    )  # fmt: skip
    assert stats.n_keys.unique().tolist() == [3]
    assert not out.any()
    assert stats.lse.unique().tolist() == [-torch.inf]
    assert stats.entropy.isnan().all()


def test_statistics_go_through_pickle_save_and_copy(backend: str) -> None:
    query, key = normal(1, 2, 3, 8), normal(1, 2, 5, 8)
    for options in ({}, {"key_mask": torch.ones(1, 5, dtype=torch.bool)}):
        stats = row_statistics(query, key, backend=backend, **options)
        file = io.BytesIO()
        torch.save(stats, file)
        file.seek(0)
        again = (
            pickle.loads(pickle.dumps(stats)),
            torch.load(file, weights_only=False),
            copy.deepcopy(stats),
            copy.copy(stats),
        )
        for other in again:
            assert isinstance(other, RowStatistics)
            assert other.backend == backend
            for name in EXACT:
                if name in stats.available:
                    torch.testing.assert_close(other[name], stats[name], equal_nan=True, msg=name)
