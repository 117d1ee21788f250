"""Recommendations: each kind where it is called for, and never more certain than measured."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import acutance
from acutance.diagnose.overview import advice_in_brief
from acutance.diagnose.recommendations import KINDS, head_reasons
from acutance.diagnose.rules import COLLAPSE, DEAD, DIFFUSE, LARGE_LOGIT, SINK, Kind
from acutance.files import put_json
from acutance.probing import HeadSummary, Moments, Profile
from acutance.report import recommendations
from acutance.report.exports import summary_record
from acutance.summary.cells import Parts
from tests.contract.report.test_recommendations import Make, kinds, only


@pytest.mark.parametrize(
    ("kind", "metric", "beyond", "within", "certainty"),
    [
        ("large_logits", "max_logit", LARGE_LOGIT + 0.1, LARGE_LOGIT - 0.1, "measured"),
        ("entropy_collapse", "normalized_entropy", COLLAPSE - 1e-3, COLLAPSE + 1e-3, "suspected"),
        ("sink", "first_weight", SINK + 1e-3, SINK - 1e-3, "measured"),
        ("dead", "normalized_entropy", DEAD + 1e-3, DEAD - 1e-3, "suspected"),
    ],
)
def test_a_kind_is_found_beyond_its_threshold_only(
    summary_of: Make, kind: str, metric: str, beyond: float, within: float, certainty: str
) -> None:
    found = only(summary_of((2, 2), **{metric: {(1, 0): beyond, (1, 1): within}}))
    assert (found.kind, found.layer, found.heads) == (kind, 1, (0,))
    assert found.certainty == certainty
    assert found.module == "model.layers.1.attn"
    assert found.numbers[metric] == pytest.approx(beyond)
    assert found.sentence.startswith("Layer 1 head 0: ")
    assert found.sentence.endswith(".")


def test_what_may_be_by_design_is_not_named_as_a_fault(summary_of: Make) -> None:
    found = only(summary_of((2,), first_weight={(0, 1): 0.4}))
    assert "sink" not in KINDS[found.kind].lower()  # weight was measured, no purpose
    assert "which the weights alone do not prove" in found.advice
    assert "collapse" not in KINDS["entropy_collapse"].lower()


def test_the_most_urgent_comes_first(summary_of: Make) -> None:
    summary = summary_of(
        (4,), first_weight={(0, 0): 0.9}, max_logit={(0, 1): 300.0},
        normalized_entropy={(0, 2): 0.99, (0, 3): 0.01},
    )  # fmt: skip
    assert kinds(summary) == ["large_logits", "entropy_collapse", "sink", "dead"]
    order = list(KINDS)
    assert set(order) - {"mismatch"} <= set(get_args(Kind))
    assert kinds(summary) == sorted(kinds(summary), key=order.index)


def growing(
    slope: float,
    level: float = 1.0,
    noise: float = 0.1,
    sequences: int = 12,
    share: float = 0.6,
    bend: float = 0.0,
) -> HeadSummary:
    """Two heads over causal rows of 256 tokens: the second's entropy is level + slope · log n.

    And bend times the square of log n / 64 more.
    """
    metrics = ("n_keys", "entropy", "normalized_entropy")
    n = torch.arange(1, 257).double()
    off = noise * torch.randn(sequences, 1, dtype=torch.float64)
    rows = torch.empty(3, 2, sequences, 256, dtype=torch.float64)
    rows[0], rows[2] = n, share
    rows[1, 0] = 2.0 + off
    rows[1, 1] = level + slope * n.log() + bend * (n / 64).log().square() + off
    whole = torch.ones(sequences, 2, 256, dtype=torch.bool)
    layer = acutance.probing.Layer("m", 2, calls=1, rows=sequences * 256)
    profile = Profile.of(rows, n.long().view(1, 1, -1), whole)
    return HeadSummary(
        (layer,),
        metrics,
        Moments.of(rows.flatten(2), metrics),
        optional_parts=Parts(profile=profile),
    )


def test_growth_with_n_is_told_with_its_error_and_what_to_expect() -> None:
    torch.manual_seed(0)
    found = only(growing(0.7))
    assert (found.kind, found.heads, found.certainty) == ("dilution", (1,), "fitted")
    assert found.numbers["value"] == pytest.approx(0.7, abs=3 * found.numbers["error"])
    assert 0 < found.numbers["error"] < 0.1
    low, high = found.numbers["low_n"], found.numbers["high_n"]
    assert high / low == pytest.approx(8, rel=0.4)
    drop = found.numbers["high"] - found.numbers["low"]
    assert drop == pytest.approx(found.numbers["value"] * math.log(high / low))
    assert "measure a law with acutance judge before you use it" in found.advice
    assert "calibrate" not in found.advice  # nothing that may raise the loss
    assert "it has" in found.reason
    assert high == pytest.approx(184, rel=0.05)  # n = 256 itself is alone in its octave
    assert f"(± {found.numbers['error']:.2f})" in found.reason


def test_what_to_expect_is_what_was_measured_also_off_the_line() -> None:
    torch.manual_seed(0)
    summary = growing(0.9, bend=0.25)
    found = only(summary)
    profile = summary.profile
    assert profile is not None
    low, high = found.numbers["low_entropy"], found.numbers["high_entropy"]
    assert low == float(profile.mean[1, 1, 4])  # rows of 16 to 31 keys
    assert high == float(profile.mean[1, 1, 7])  # of 128 to 255
    assert found.numbers["low_error"] == float(profile.error[1, 1, 4])
    off = low - found.numbers["low"]  # the line is too low at its ends by a bent curve's sagitta
    assert off > 5 * found.numbers["low_error"]
    low_n, high_n = (f"{found.numbers[name]:,.0f}" for name in ("low_n", "high_n"))
    measured = f"{low:.2f} nats (± {found.numbers['low_error']:.1g}) at n ≈ {low_n}"
    measured += f" and {high:.2f} nats at n ≈ {high_n}"
    assert found.reason.endswith(f": it has {measured}")


@pytest.mark.parametrize(
    "options",
    [
        {"slope": 0.1},  # too flat to matter
        {"slope": -0.7},
        {"slope": 0.7, "sequences": 1},  # no error is known
        {"slope": 0.7, "noise": 20.0},  # within its error
        {"slope": 0.9, "share": DIFFUSE + 0.01},  # spreads widely at any length
    ],
)
def test_growth_that_is_not_told(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    assert kinds(growing(**options)) == []  # type: ignore[arg-type]


def test_growth_needs_a_profile() -> None:
    assert kinds(replace(growing(0.7), optional_parts=Parts())) == []


def test_of_heads_without_growth_hardly_one_in_a_hundred_is_named() -> None:
    torch.manual_seed(2)
    named = 0
    for _ in range(100):
        n = torch.arange(1, 129).double()
        tilt = 1.0 * torch.randn(4, 1, dtype=torch.float64)  # sequences go up and down alike
        rows = torch.stack([n.expand(4, -1), 2 + tilt * n.log(), 0.0 * tilt + 0.6 + 0 * n])
        profile = Profile.of(
            rows[:, None], n.long().view(1, 1, -1), torch.ones(4, 1, 128, dtype=torch.bool)
        )
        metrics = ("n_keys", "entropy", "normalized_entropy")
        layer = acutance.probing.Layer("m", 1, calls=1, rows=512)
        moments = Moments.of(rows.flatten(1)[:, None], metrics)
        named += bool(
            kinds(HeadSummary((layer,), metrics, moments, optional_parts=Parts(profile=profile)))
        )
    assert named <= 4


def test_everything_is_plain_json(summary_of: Make, tmp_path: Path) -> None:
    summary = summary_of((2,), first_weight={(0, 0): 0.9}, max_logit={(0, 1): 300.0})
    path = tmp_path / "out.json"
    put_json(summary_record(summary), path)
    record = json.loads(path.read_text())
    assert [each["kind"] for each in record["recommendations"]] == ["large_logits", "sink"]
    first = record["recommendations"][0]
    assert first["heads"] == [1]
    assert first["sentence"].startswith("Layer 0 head 1: the largest logit is")
    assert record["schema"] == summary.to_dict()["schema"]


@pytest.mark.parametrize("causal", [True, False])
def test_advice_fits_encoders_and_decoders(causal: bool) -> None:
    key = torch.zeros(2, 2, 32, 8)
    key[:, 1, 0] = 1.0  # the second head's sink; the first head averages
    query = torch.full((2, 2, 32, 8), 2.0)
    model = torch.nn.Module()
    model.forward = lambda: torch.nn.functional.scaled_dot_product_attention(  # type: ignore[method-assign]
        query, key, key, is_causal=causal
    )
    with acutance.probe(model) as probe:
        model()
    summary = probe.summary()
    advice = {found.kind: found.advice for found in recommendations(summary)}
    assert set(advice) == {"sink", "dead"}
    assert ("cache" in advice["sink"]) is causal
    assert ("acutance judge" in advice["dead"]) is causal
    assert ("acutance.apply" in advice["dead"]) is not causal
    brief = " ".join(advice_in_brief(summary))
    assert ("KV cache" in brief, "judge the loss" in brief) == (causal, causal)


def test_a_panel_has_the_reason_in_numbers_of_its_own_head(summary_of: Make) -> None:
    summary = summary_of((2,), first_weight={(0, 0): 0.5, (0, 1): 0.8})
    (found,) = [each for each in recommendations(summary) if each.kind == "sink"]
    assert found.reason.startswith("50% to 80%")  # of the layer
    assert [own["sink"][:4] for own in head_reasons(summary)] == ["50% ", "80% "]
    grows = head_reasons(growing(0.7))
    assert "dilution" not in grows[0]
    assert "head" not in grows[1]["dilution"]


def test_a_summary_begins_with_model_and_text(summary_of: Make) -> None:
    from acutance.report.exports import summary_view
    from acutance.report.screen import Screen

    about = {"model": "tiny\x1b[2J", "text": ["a.txt"], "tokens": 1738, "windows": 1}
    stream = io.StringIO()
    Screen(file=stream, width=80).print(summary_view(summary_of(about=about)))
    assert stream.getvalue().startswith("tiny\\x1b[2J · a.txt: 1,738 tokens in 1 window\n")
