"""Recommendations: each kind where it is called for, and never more certain than measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import acutance
from acutance.probing import HeadSummary, Moments
from acutance.report import NOTHING, Recommendation, in_words, recommendations

Make = Callable[..., HeadSummary]


def kinds(summary: HeadSummary) -> list[str]:
    return [found.kind for found in recommendations(summary)]


def only(summary: HeadSummary) -> Recommendation:
    (found,) = recommendations(summary)
    return found


def test_nothing_to_change_is_said(summary_of: Make) -> None:
    assert recommendations(summary_of((3, 3))) == []
    assert in_words([]) == [NOTHING]


def test_heads_that_follow_each_other_are_a_range(summary_of: Make) -> None:
    many = {(0, head): 0.5 for head in (0, 1, 2, 3, 5, 7, 8)}
    assert only(summary_of((16,), first_weight=many)).place == "Layer 0 heads 0–3, 5, 7–8"


def test_heads_of_a_layer_are_told_together_and_layers_apart(summary_of: Make) -> None:
    weights = {(0, 2): 0.4, (1, 0): 0.5, (1, 3): 0.7}
    first, second = recommendations(summary_of((4, 4), first_weight=weights))
    assert (first.layer, first.heads) == (0, (2,))
    assert (second.layer, second.heads) == (1, (0, 3))
    assert second.sentence.startswith("Layer 1 heads 0, 3: 50% to 70% of the weight is on")
    assert second.numbers["first_weight"] == pytest.approx(0.7)
    assert in_words([first, second])[1] == f"{second.place}: {second.reason}."  # advice once


def test_many_layers_are_named_in_part_and_counted(summary_of: Make) -> None:
    weights = {(layer, head): 0.4 + layer / 100 for layer in range(6) for head in range(2)}
    found = recommendations(summary_of((2,) * 6, first_weight=weights))
    assert len(found) == 6
    said = in_words(found)
    assert [sentence[:8] for sentence in said] == ["Layer 3 ", "Layer 4 ", "Layer 5 "]
    assert said[-1].endswith("The same is found in 6 heads of 3 more layers.")


def test_coarse_scores_depend_on_the_dtype(summary_of: Make) -> None:
    for dtype, value, expected in (
        ("bfloat16", 63.0, False),
        ("bfloat16", 65.0, True),
        ("float16", 65.0, False),
        ("float16", 513.0, True),
        ("float32", 99.0, False),
        ("", 99.0, False),
    ):
        summary = summary_of((1,), max_logit={(0, 0): value}, about={"dtype": dtype})
        assert ("coarse_scores" in kinds(summary)) == expected, (dtype, value)
    found = only(summary_of((1,), max_logit={(0, 0): 65.0}, about={"dtype": "torch.bfloat16"}))
    assert (found.numbers["step"], found.certainty) == (0.5, "suspected")


def test_rows_that_are_no_numbers(summary_of: Make) -> None:
    summary = summary_of((2,), lse={(0, 1): math.nan})
    found = only(summary)
    assert (found.kind, found.heads) == ("not_finite", (1,))
    assert "40 of 40 rows have scores that are not finite" in found.sentence


def test_a_mismatched_layer_is_said_to_be_no_more(summary_of: Make) -> None:
    summary = summary_of(
        (2, 2), layer={0: {"status": "mismatch", "error": 0.25}}, first_weight={(0, 0): 0.9}
    )
    found = only(summary)
    assert (found.kind, found.layer, found.heads) == ("mismatch", 0, ())
    assert found.sentence.startswith(
        "Layer 0: the output recomputed from the captured arguments differs"
    )
    assert "by a relative error of 0.25" in found.sentence


def test_few_rows_are_only_suspected(summary_of: Make) -> None:
    found = only(summary_of((1,), rows=5, first_weight={(0, 0): 0.9}))
    assert found.certainty == "suspected"
    assert "(in 5 rows only)" in found.sentence


def test_rows_of_few_keys_call_for_nothing(summary_of: Make) -> None:
    few = {(0, 0): 7.0}
    for change in ({"first_weight": {(0, 0): 0.9}}, {"normalized_entropy": {(0, 0): 1.0}}):
        assert kinds(summary_of((1,), **change, n_keys=few)) == []


def test_a_head_that_copies_by_design_has_not_collapsed() -> None:
    scores = 1e3 * torch.diag(torch.ones(63), -1)

    class Previous(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            one = torch.eye(64)[None, None]
            return torch.nn.functional.scaled_dot_product_attention(
                one, scores.mT[None, None], one, scale=1.0
            )

    with acutance.probe(Previous(), structure=True, metrics=["n_keys", "normalized_entropy"]) as it:
        it._model(torch.zeros(1))
    assert kinds(it.summary()) == []
    with acutance.probe(Previous(), metrics=["n_keys", "normalized_entropy"]) as it:
        it._model(torch.zeros(1))
    assert kinds(it.summary()) == ["entropy_collapse"]
    assert only(it.summary()).certainty == "suspected"


def test_no_head_calls_for_nothing() -> None:
    assert recommendations(HeadSummary((), ("entropy",), Moments.none(0, 1))) == []


def test_a_decoder_whose_rows_are_sampled_or_cached_is_no_encoder(summary_of: Make) -> None:
    keep = [
        only(summary_of((2,), layer={0: counts}, first_weight={(0, 1): 0.4})).advice
        for counts in ({"calls": 20}, {"rows": 400, "skipped": 80}, {"rows": 400, "excluded": 8})
    ]
    assert ["cache" in advice for advice in keep] == [True] * 3
    encoder = only(summary_of((2,), layer={0: {"rows": 400}}, first_weight={(0, 1): 0.4}))
    assert "cache" not in encoder.advice
