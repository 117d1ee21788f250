"""Sinks far above the row, far below it, and none at all, on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import RowStatistics, dense_statistics, merge, observe
from tests.contract.names import metric_names

NAMES = [name for name in metric_names() if name != "n_keys"]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("queries", [3, 40])
def test_no_sink_beside_no_key_gives_an_output_of_zero(backend: str, queries: int) -> None:
    query, key = normal(1, 2, queries, 8), normal(1, 2, 5, 8)
    sinks = torch.tensor([-torch.inf, 0.5]).requires_grad_()
    query.requires_grad_()
    out, stats = attention(
        query,
        key,
        key,
        key_mask=torch.zeros(1, 5, dtype=torch.bool),
        sinks=sinks,
        return_stats=True,
        backend=backend,
    )
    assert not out.any()
    assert not stats.n_keys.any()
    assert stats.entropy.isnan().all()
    found = torch.autograd.grad(out.sum(), (query, sinks))
    assert not any(part.any() for part in found)


@pytest.mark.grid
@pytest.mark.parametrize("sink", [-torch.inf, -1e30, 80.0, 90.0, 100.0, 1e30])
def test_every_metric_and_its_gradient_are_finite_and_right(backend: str, sink: float) -> None:
    """A sink that holds all of a row's weight, or none of it: never 0 by 0, forward or backward."""
    query, key = normal(1, 2, 5, 16), normal(1, 2, 7, 16)
    leaves = [part.requires_grad_() for part in (query, key, torch.full((2,), sink))]
    wide = [part.detach().double().requires_grad_() for part in leaves]
    stats = row_statistics(leaves[0], leaves[1], sinks=leaves[2], backend=backend)
    oracle = dense_statistics(wide[0], wide[1], sinks=wide[2])
    for name in NAMES:
        found, want = stats[name], oracle[name]
        assert found.isfinite().all(), name
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5, msg=name)
        if not found.requires_grad:
            continue
        mine = torch.autograd.grad(found.sum(), leaves, allow_unused=True, retain_graph=True)
        theirs = torch.autograd.grad(want.sum(), wide, allow_unused=True, retain_graph=True)
        for a, b in zip(mine, theirs, strict=True):
            if a is None:
                continue
            assert a.isfinite().all(), name
            if abs(sink) < 1e4:  # beyond, the oracle's own log p has no gradient
                expected = torch.zeros_like(a).double() if b is None else b
                torch.testing.assert_close(a.double(), expected, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("option", ["alibi", "bfloat16", "wide"])
def test_a_sink_that_dwarfs_the_row_has_finite_gradients(backend: str, option: str) -> None:
    width = 160 if option == "wide" else 16
    dtype = torch.bfloat16 if option == "bfloat16" else torch.float32
    query, key = (normal(1, 1, n, width).to(dtype).requires_grad_() for n in (5, 7))
    slopes = torch.tensor([0.5]) if option == "alibi" else None
    for sink in (90.0, 95.0):
        stats = row_statistics(
            query, key, sinks=torch.tensor([sink]), alibi_slopes=slopes, backend=backend
        )
        for part in torch.autograd.grad(stats.varentropy.sum(), (query, key)):
            assert part.isfinite().all()


@pytest.mark.parametrize("gap", [0.0, 80.0, 90.0, 100.0, 1e4])
def test_parts_that_lie_far_apart_merge_with_finite_gradients(gap: float) -> None:
    """Of two parts one may have next to no weight: the same quotients, of what has shrunk."""
    scores = torch.cat([normal(3, 4), normal(3, 4) + gap], -1).requires_grad_()
    wide = scores.detach().double().requires_grad_()
    parts = merge(observe(scores[:, :4]), observe(scores[:, 4:]))
    for name in ("entropy", "varentropy", "collision", "lse", "first_weight"):
        found, want = (RowStatistics(s)[name] for s in (parts, observe(wide)))
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5, msg=name)
        mine = torch.autograd.grad(found.sum(), scores, retain_graph=True)[0]
        theirs = torch.autograd.grad(want.sum(), wide, retain_graph=True)[0]
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_the_oracle_takes_a_sink_of_minus_infinity_for_none() -> None:
    query, key = normal(1, 2, 3, 8), normal(1, 2, 5, 8)
    none = torch.full((2,), -torch.inf)
    found, want = dense_statistics(query, key, sinks=none), dense_statistics(query, key)
    for name, values in want.items():
        torch.testing.assert_close(found[name], values, equal_nan=True, msg=name)
