"""Findings: each kind is found where it is, and not where it is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from acutance.diagnose.findings import LABELS, MOST_NAMED
from acutance.diagnose.recommendations import no_recommendation
from acutance.diagnose.rules import COLLAPSE, DEAD, LARGE_LOGIT, SINK
from acutance.report import findings, in_words, recommendations
from tests.contract.report.test_findings import Make, kinds, only


@pytest.mark.parametrize(
    ("kind", "metric", "beyond", "within"),
    [
        ("first_key_sink", "first_weight", SINK + 0.01, SINK - 0.01),
        ("collapsed", "normalized_entropy", COLLAPSE - 0.001, COLLAPSE + 0.001),
        ("dead", "normalized_entropy", DEAD + 0.001, DEAD - 0.001),
    ],
)
def test_a_kind_is_found_beyond_its_threshold_only(
    summary_of: Make, kind: str, metric: str, beyond: float, within: float
) -> None:
    found = only(summary_of((2, 2), **{metric: {(1, 0): beyond}}), kind)
    assert (found.layer, found.head) == (1, 0)
    assert found.value == pytest.approx(beyond)
    assert found.sentence.startswith("Layer 1 head 0 ")
    assert kind not in kinds(summary_of((2, 2), **{metric: {(1, 0): within}}))


def test_many_heads_of_a_kind_are_named_in_part_and_counted(summary_of: Make) -> None:
    sinks = {(0, head): 0.4 + head / 100 for head in range(5)}
    found = [one for one in findings(summary_of((8,), first_weight=sinks)) if "sink" in one.kind]
    assert [one.head for one in found] == [4, 3, 2]
    assert len(found) == MOST_NAMED
    assert "It may be an attention sink" in found[0].sentence
    assert found[-1].sentence.endswith(
        "In all, 5 of 8 heads give the first visible key more than 30% of their weight."
    )


def test_the_largest_logit_says_what_bfloat16_makes_of_it(summary_of: Make) -> None:
    calm = only(summary_of((2,), max_logit={(0, 1): LARGE_LOGIT - 1}), "largest_logit")
    narrow = {"dtype": "bfloat16"}
    large = only(summary_of((2,), max_logit={(0, 1): 67.0}, about=narrow), "largest_logit")
    huge = only(summary_of((2,), max_logit={(0, 1): 1e4}, about=narrow), "largest_logit")
    wide = only(summary_of((2,), max_logit={(0, 1): 101.0}), "largest_logit")
    assert "This size is not a problem" in calm.sentence
    assert "a resolution of 0.5, so rounding can change a weight by 28%" in large.sentence
    assert (
        "a resolution of 64, so rounding can change a weight by a factor of 7.9e+13"
        in huge.sentence
    )
    assert "above 100; logits that grow" in huge.sentence
    assert "above 100; logits that grow" in wide.sentence
    assert "above 100" not in large.sentence
    assert "bfloat16" not in wide.sentence


def test_every_kind_has_a_label_and_a_test(summary_of: Make) -> None:
    summary = summary_of(
        (6,),
        first_weight={(0, 0): 0.9},
        normalized_entropy={(0, 1): 0.01, (0, 2): 0.99},
    )
    assert Counter(kinds(summary)) == Counter(list(LABELS))


def test_an_untrained_model_is_said_once(summary_of: Make) -> None:
    heads = {(layer, head): 0.99 for layer in range(4) for head in range(8)}
    about = {"untrained": True}
    summary = summary_of((8,) * 4, normalized_entropy=heads, about=about)
    assert kinds(summary) == ["sharpest", "most_diffuse"]
    assert recommendations(summary) == []
    assert in_words([], no_recommendation(summary)) == [
        "Untrained model: load trained weights before diagnosing its heads."
    ]
    (notice,) = summary.to_dict()["notices"]
    assert notice.startswith("Untrained: every norm has its initial gain")
    assert kinds(replace(summary, about={})).count("dead") == MOST_NAMED


def test_a_head_whose_rows_saw_no_key_is_no_sink(summary_of: Make) -> None:
    summary = summary_of((1,), n_keys={(0, 0): 0.0}, first_weight={(0, 0): 0.9})
    assert "sink" not in kinds(summary)
