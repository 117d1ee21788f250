"""Findings: each kind is found where it is, and not where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import acutance
from acutance.probing import HeadSummary, Moments
from acutance.report import Finding, findings, recommendations
from acutance.rowstats import METRICS

Make = Callable[..., HeadSummary]


def kinds(summary: HeadSummary) -> list[str]:
    return [found.kind for found in findings(summary)]


def only(summary: HeadSummary, kind: str) -> Finding:
    (found,) = [found for found in findings(summary) if found.kind == kind]
    return found


def test_ordinary_heads_yield_extremes_and_the_largest_logit_alone(summary_of: Make) -> None:
    assert kinds(summary_of((3, 3))) == ["sharpest", "most_diffuse", "largest_logit"]


def test_the_sharpest_and_the_most_diffuse_head(summary_of: Make) -> None:
    summary = summary_of(
        (3, 5),
        normalized_entropy={(1, 4): 0.12, (0, 1): 0.9},
        entropy={(1, 4): 0.61},
        information={(1, 4): 4.37},
        effective_keys={(1, 4): 2.1},
        n_keys={(1, 4): 154.0},
    )
    sharp, diffuse = only(summary, "sharpest"), only(summary, "most_diffuse")
    assert (sharp.layer, sharp.head, sharp.module) == (1, 4, "model.layers.1.attn")
    assert sharp.value == pytest.approx(0.12)
    assert sharp.sentence == (
        "Layer 1 head 4 is the sharpest: it spreads a row over 2.1 effective keys of 154 on "
        "average (entropy 0.61 of 4.98 nats), close to picking one key."
    )
    assert (diffuse.layer, diffuse.head) == (0, 1)


def test_one_head_is_not_called_both(summary_of: Make) -> None:
    assert kinds(summary_of((1,))) == ["sharpest", "largest_logit"]


def test_rows_of_few_keys_are_neither_sink_nor_collapsed_nor_dead(summary_of: Make) -> None:
    changes = {
        "first_weight": {(0, 0): 0.9},
        "normalized_entropy": {(0, 0): 0.01, (0, 1): 1.0},
    }
    few = {(0, 0): 2.0, (0, 1): 7.0}
    assert {"first_key_sink", "collapsed", "dead"} <= set(kinds(summary_of((2,), **changes)))
    assert kinds(summary_of((2,), **changes, n_keys=few)) == [
        "sharpest",
        "most_diffuse",
        "largest_logit",
    ]


def test_the_largest_logit_is_of_all_rows_not_of_means(summary_of: Make) -> None:
    found = only(summary_of((2,), max_logit={(0, 0): -3.0, (0, 1): -5.0}), "largest_logit")
    assert (found.head, found.value) == (0, -3.0)


def test_a_layer_that_did_not_verify_yields_nothing(summary_of: Make) -> None:
    summary = summary_of((1, 2), layer={0: {"status": "mismatch"}}, first_weight={(0, 0): 0.9})
    assert {found.layer for found in findings(summary)} == {1}
    assert "first_key_sink" not in kinds(summary)


def test_sentences_say_what_limits_them(summary_of: Make) -> None:
    summary = summary_of((2,), rows=3, layer={0: {"status": "unverified"}})
    for found in findings(summary):
        assert found.sentence.endswith(
            "Only 3 rows were read. Captured only from a softmax, so not verified."
        )
    assert "Only 1 row was read." in findings(summary_of((2,), rows=1))[0].sentence


@pytest.mark.parametrize("metrics", [("entropy",), ("effective_keys",), ("normalized_entropy",)])
def test_a_single_metric_is_enough_for_the_extremes(
    summary_of: Make, metrics: tuple[str, ...]
) -> None:
    found = findings(summary_of((2, 2), metrics=metrics))
    assert [one.kind for one in found] == ["sharpest", "most_diffuse"]
    assert not any("nan" in one.sentence for one in found)


def test_metrics_that_were_not_recorded_find_nothing(summary_of: Make) -> None:
    assert findings(summary_of((2, 2), metrics=("sink_mass", "logit_std"))) == []


def test_nan_finds_nothing(summary_of: Make) -> None:
    nan = {(0, 0): math.nan, (0, 1): math.nan}
    everything = dict.fromkeys(METRICS, nan)
    assert findings(summary_of((2,), **everything)) == []
    some = summary_of((3,), **everything)
    assert {found.head for found in findings(some)} == {2}
    assert not any("nan" in found.sentence for found in findings(some))


def test_no_head_finds_nothing() -> None:
    assert findings(HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("logit", [20.0, 40.0, 87.7, 120.0, 600.0])
@pytest.mark.parametrize("share", [0.01, 0.06, 0.5, 0.97, 0.99])
@pytest.mark.parametrize("keys", [1.2, 1.6])
def test_findings_and_recommendations_agree(
    summary_of: Make, dtype: str, logit: float, share: float, keys: float
) -> None:
    summary = summary_of(
        (2,),
        max_logit={(0, 1): logit},
        normalized_entropy={(0, 1): share},
        effective_keys={(0, 1): keys},
        about={"dtype": dtype},
    )
    advised = {each.kind for each in recommendations(summary)}
    found = {each.kind: each.sentence for each in findings(summary)}
    assert ("collapsed" in found) == ("entropy_collapse" in advised)
    assert ("dead" in found) == ("dead" in advised)
    assert ("instability" in found["largest_logit"]) == ("large_logits" in advised)
    assert ("rounding" in found["largest_logit"]) == ("coarse_scores" in advised)


def test_cross_attention_is_called_that(summary_of: Make) -> None:
    names = {0: {"module": "decoder.block.0.layer.1.EncDecAttention"}}
    summary = summary_of((2, 2), layer=names, first_weight={(0, 1): 0.9, (1, 0): 0.8})
    (cross, plain) = [one for one in findings(summary) if one.kind == "first_key_sink"]
    assert cross.sentence.startswith("Layer 0 (cross-attention) head 1 gives 90%")
    assert plain.sentence.startswith("Layer 1 head 0 ")
    assert recommendations(summary)[0].place == "Layer 0 (cross-attention) head 1"


def test_a_head_is_judged_alike_everywhere() -> None:
    """Zero scores: over 5 keys nothing says much; over 40 keys the head is dead in every view."""
    for n, dead in ((5, False), (40, True)):
        layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        with acutance.probe(layer, structure=True) as probe:
            layer(*[torch.zeros(1, n, 8)] * 3)
        summary = probe.summary()
        assert [{"dead"} if dead else set()] * 2 == [
            {one.name for one in head} for head in acutance.classify(summary)
        ]
        assert ("dead" in kinds(summary)) is dead
        assert ([each.kind for each in recommendations(summary)] == ["dead"]) is dead
        record = summary.to_dict()
        assert all(bool(head["classes"]) is dead for head in record["heads"])
