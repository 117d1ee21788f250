"""However many heads a model has, the terminal shows ten lines of findings and five of advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from acutance.diagnose.overview import MOST_ADVICE, MOST_FINDINGS, advice_in_brief, overview
from acutance.probing import HeadSummary

Make = Callable[..., HeadSummary]


@pytest.mark.parametrize("heads", [(3, 3), (9,) * 30, (64,) * 80])
def test_a_summary_fits_a_screen_whatever_its_size(
    summary_of: Make, heads: tuple[int, ...]
) -> None:
    places = [(layer, head) for layer, count in enumerate(heads) for head in range(count)]
    half = places[::2]
    summary = summary_of(
        heads,
        rows=30,
        first_weight=dict.fromkeys(half, 0.9),
        max_logit=dict.fromkeys(places[1::4], 400.0),
        top_weight=dict.fromkeys(half, 0.9),
        normalized_entropy=dict.fromkeys(places[::3], 0.01) | dict.fromkeys(places[1::3], 0.99),
    )
    findings, advice = overview(summary), advice_in_brief(summary)
    assert 4 <= len(findings) <= MOST_FINDINGS
    assert 4 <= len(advice) <= MOST_ADVICE
    assert [line for line in (*findings, *advice) if len(line) > 77] == []  # of 80 columns
    total = f"of {len(places):,} heads"
    assert any(line.startswith(f"sink: {len(half):,} {total}") for line in findings)


def test_kinds_are_counted_and_placed(summary_of: Make) -> None:
    sinks = {(layer, head): 0.5 for layer in (1, 3) for head in range(3)}
    low = {(layer, head): 0.2 for layer in range(5) for head in range(4)}
    summary = summary_of((4,) * 5, first_weight=sinks, top_weight={**low, (2, 1): 0.8})
    first, second, *_ = overview(summary)
    assert first == "sink: 6 of 20 heads: 3 in layer 1, 3 in layer 3"
    assert second == "sharp: 1 of 20 heads: L2 H1"
    assert advice_in_brief(summary) == [
        "first token: 6 heads in 2 layers (L1 most); keep it in a KV cache"
    ]


def test_a_head_far_from_the_others_is_named(summary_of: Make) -> None:
    lines = overview(summary_of((4,) * 5, max_logit={(3, 2): 40.0}))
    (unusual,) = [line for line in lines if line.startswith("unusual")]
    assert unusual.startswith("unusual: L3 H2, max_logit 40 (heads' median 4, ")
    assert not any(line.startswith("unusual") for line in overview(summary_of((4,) * 5)))


def test_an_untrained_model_has_extremes_alone(summary_of: Make) -> None:
    summary = summary_of((4,) * 5, first_weight={(0, 0): 0.9}, about={"untrained": True})
    (line,) = overview(summary)
    assert line.startswith("sharpest: L")
    assert len(advice_in_brief(summary)) == 1
