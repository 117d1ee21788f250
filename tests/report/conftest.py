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
