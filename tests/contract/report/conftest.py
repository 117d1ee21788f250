"""Summaries made from given rows, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from acutance.probing import HeadSummary, Layer, Moments
from acutance.rowstats import METRICS

Make = Callable[..., HeadSummary]


def make_summary(
    heads: Sequence[int] = (2, 2),
    rows: int = 40,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    layer: Mapping[int, Mapping[str, Any]] | None = None,
    about: Mapping[str, Any] | None = None,
    unread: Sequence[str] = (),
    not_provided: Sequence[str] = (),
    **values: Mapping[tuple[int, int], float],
) -> HeadSummary:
    """A summary of heads that attend to 128 keys neither sharply nor diffusely.

    Args:
        heads: head count of each layer.
        rows: rows of each head.
        metrics: recorded metrics.
        layer: other attributes of some layers.
        about: what was probed.
        unread: what could not be read.
        not_provided: what was left to the model.
        **values: for a metric, what every row of some (layer, head) has instead.
    """
    usual = {
        "n_keys": 128.0,
        "entropy": 3.0,
        "normalized_entropy": 0.62,
        "information": 1.85,
        "effective_keys": 15.0,
        "first_weight": 0.01,
        "max_logit": 4.0,
    }
    places = [(index, head) for index, count in enumerate(heads) for head in range(count)]
    noise = torch.rand(len(places), len(metrics), rows, dtype=torch.float64)
    base = torch.tensor([usual.get(name, 0.5) for name in metrics], dtype=torch.float64)
    table = base[:, None] * (1 + 0.02 * (noise - 0.5))
    for name, changes in values.items():
        for place, value in changes.items():
            table[places.index(place), list(metrics).index(name)] = value
    layers = [
        Layer(
            **{
                "module": f"model.layers.{index}.attn",
                "heads": count,
                "status": "verified",
                "calls": 1,
                "rows": rows,
                "error": 1e-6,
                "source": "sdpa",
            }
            | dict((layer or {}).get(index, {}))
        )
        for index, count in enumerate(heads)
    ]
    return HeadSummary(
        tuple(layers),
        tuple(metrics),
        Moments.of(table.transpose(0, 1).contiguous(), tuple(metrics)),
        dict(about or {"model": "synthetic"}),
        tuple(unread),
        not_provided=tuple(not_provided),
    )


@pytest.fixture
def summary_of() -> Make:
    """:func:`make_summary`, for tests to call."""
    return make_summary


@pytest.fixture
def cache_plan() -> dict[str, Any]:
    """The record of a plan for the first of two layers, of four query heads and two key heads."""

    def key_head(
        head: int, keeps: str, share: float, first: float, second: float
    ) -> dict[str, Any]:
        option = {"keeps": "4 first and \x1b", "share": 0.125, "first": first, "second": second}
        return {
            "head": head,
            "queries": [2 * head, 2 * head + 1],
            "keeps": keeps,
            "share": share,
            "cost": [first, second] if share < 1 else [0.0, 0.0],
            "options": [option | {"chosen": share < 1}],
        }

    return {
        "name": "cache plan (1 full, 1 streaming)",
        "n": 1024,
        "share": 0.5625,
        "bytes": 4096,
        "costs_at": 512,
        "key_heads": [
            key_head(0, "4 first and \x1b", 0.125, 0.01, 0.02),
            key_head(1, "all keys", 1.0, -0.15, 0.05),
        ],
        "heads": [0, 0, 1, 1, None, None],
    }
