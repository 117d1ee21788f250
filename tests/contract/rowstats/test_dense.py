"""The oracle itself, against PyTorch and against masks written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from acutance.rowstats import dense_statistics
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

X, o = True, False
MASKS: dict[str, tuple[dict[str, Any], list[list[bool]]]] = {
    "causal, top left": ({"is_causal": True}, [[X, o, o, o], [X, X, o, o], [X, X, X, o]]),
    "causal, bottom right": (
        {"is_causal": True, "query_offset": 1},
        [[X, X, o, o], [X, X, X, o], [X, X, X, X]],
    ),
    "window": ({"window": 2}, [[X, X, o, o], [X, X, X, o], [o, X, X, X]]),
    "causal window": (
        {"window": 2, "is_causal": True, "query_offset": 1},
        [[X, X, o, o], [o, X, X, o], [o, o, X, X]],
    ),
    "padding": ({"key_mask": torch.tensor([[X, o, X, o]])}, [[X, o, X, o]] * 3),
    "documents": (
        {"document_ids": torch.tensor([0, 0, 1, 1])},
        [[X, X, o, o], [X, X, o, o], [o, o, X, X]],
    ),
    "documents, offset": (
        {"document_ids": torch.tensor([[0, 0, 1, 1]]), "query_offset": 1},
        [[X, X, o, o], [o, o, X, X], [o, o, X, X]],
    ),
    "documents of both": (
        {"document_ids": (torch.tensor([7, 8, 9]), torch.tensor([8, 8, 7, 6]))},
        [[o, o, X, o], [X, X, o, o], [o, o, o, o]],
    ),
    "lengths": (
        {"cu_seqlens": torch.tensor([0, 1, 1, 4])},
        [[X, o, o, o], [o, X, X, X], [o, X, X, X]],
    ),
    "boolean": ({"attn_mask": torch.tensor([[X], [o], [X]])}, [[X] * 4, [o] * 4, [X] * 4]),
    "additive": (
        {"attn_mask": torch.tensor([0.0, -math.inf, -3.4e38, -5.0])},
        [[X, o, o, X]] * 3,
    ),
    "bias": ({"bias": torch.tensor([[[[-1e9], [0.0], [9.0]]]])}, [[o] * 4, [X] * 4, [X] * 4]),
}


@pytest.mark.parametrize("case", MASKS)
def test_visible_keys_are_those_written_out(case: str) -> None:
    options, rows = MASKS[case]
    query, key = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2)
    value = torch.eye(4)[None, None]
    found = dense_statistics(query, key, value, **options)
    seen = torch.tensor(rows)
    assert torch.equal(found["n_keys"][0, 0], seen.sum(-1))
    assert torch.equal(found["output"][0, 0] > 0, seen)


def test_the_output_is_pytorch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    key, value = key[:, :2], torch.randn(2, 2, 5, 3, generator=generator, dtype=torch.float64)
    bias = torch.randn(4, 5, 5, generator=generator, dtype=torch.float64)
    for ours, theirs in (
        ({"is_causal": True, "scale": 0.7}, {"is_causal": True, "scale": 0.7}),
        ({"bias": bias}, {"attn_mask": bias}),
        ({"attn_mask": bias > 0}, {"attn_mask": bias > 0}),
    ):
        found = dense_statistics(query, key, value, enable_gqa=True, **ours)
        want = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **theirs)
        seen = found["n_keys"] > 0
        torch.testing.assert_close(found["output"][seen], want[seen], rtol=1e-13, atol=1e-14)


def test_scores_are_scaled_capped_and_biased_in_that_order() -> None:
    query, key = torch.full((1, 1, 1, 1), 3.0), torch.tensor([2.0, -1.0]).view(1, 1, 2, 1)
    found = dense_statistics(
        query,
        key,
        scale=0.5,
        softcap=2.0,
        bias=torch.tensor([0.25, 0.5]),
        alibi_slopes=torch.tensor([0.125]),
        sinks=torch.tensor([1.0]),
    )
    scores = [2 * math.tanh(1.5) + 0.25, 2 * math.tanh(-0.75) + 0.5 - 0.125]
    total = sum(map(math.exp, [*scores, 1.0]))
    assert found["max_logit"].item() == pytest.approx(scores[0], rel=1e-15)
    assert found["logit_mean"].item() == pytest.approx(sum(scores) / 2, rel=1e-15)
    assert found["lse"].item() == pytest.approx(math.log(total), rel=1e-15)
    assert found["sink_mass"].item() == pytest.approx(math.e / total, rel=1e-15)
    assert found["first_weight"].item() == pytest.approx(math.exp(scores[0]) / total, rel=1e-15)


def test_every_metric_is_there_and_float64() -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    found = dense_statistics(query, query, query)
    assert set(found) == {*EXACT, "output"}
    for name, part in found.items():
        assert part.dtype == (torch.int64 if name == "n_keys" else torch.float64)
        assert part.shape[:3] == (1, 2, 3)
    assert set(dense_statistics(query, query)) == set(EXACT) - {"noise_gain"}


def test_a_row_without_keys_has_no_gradient() -> None:
    query = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    found = dense_statistics(query, query.detach(), query.detach(), attn_mask=mask)
    total = sum(part.nan_to_num(neginf=0.0).sum() for part in found.values())
    total.backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()
    assert query.grad[0, 0, 0].eq(0).all()
