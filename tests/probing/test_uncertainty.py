"""Standard errors of rows that are alike within a sequence."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch

from acutance.probing import HeadSummary, Layer, Run
from acutance.summary.diff import HOW, uncertainty, worst

DRAWN = runpy.run_path(str(Path(__file__).with_name("drawn.py")))
rows_of, summary_of = DRAWN["rows_of"], DRAWN["summary_of"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_error_is_the_deviation_of_means_of_other_texts(share: float) -> None:
    sequences, heads, rows = 12, 400, 40
    generator = torch.Generator().manual_seed(5)
    means, errors, floors = [], [], []
    for _ in range(4):
        summary = summary_of(rows_of(generator, sequences, heads, rows, share))
        found = uncertainty(summary)
        assert found.how == "sequences"
        assert found.dof.unique().tolist() == [sequences - 1]
        means.append(summary.mean("entropy"))
        errors.append(found.error[:, 0].square().mean())
        floors.append(found.floor[:, 0].square().mean())
    exact = math.sqrt((share + (1 - share) / rows) / sequences)
    # 1600 squared errors, each of 11 degrees of freedom: relative deviation √(2/11/1600) = 0.011
    assert torch.stack(errors).mean().sqrt() == pytest.approx(exact, rel=0.03)
    assert torch.cat(means).std() == pytest.approx(exact, rel=0.07)
    if share:
        assert float(torch.stack(floors).mean().sqrt()) < 0.4 * exact


def test_octaves_are_no_more_sure_than_their_sequences() -> None:
    generator = torch.Generator().manual_seed(1)
    values = rows_of(generator, 10, 300, 64, 0.5)
    n = (1 + torch.arange(64)).expand(10, -1)
    one, many = uncertainty(summary_of(values)), uncertainty(summary_of(values, n))
    assert (many.error >= one.error * (1 - 1e-9)).all()
    assert float((many.error / one.error).mean()) < 1.25  # and not much less sure


def test_an_octave_of_one_sequence_borrows_the_largest_spread() -> None:
    values = rows_of(torch.Generator().manual_seed(2), 6, 3, 8, 0.5)
    n = torch.full((6, 8), 40)
    n[5] = 9  # a short last window: alone in its octave
    whole, part = summary_of(values, n), summary_of(values[:, :5], n[:5])
    long = uncertainty(part).error
    expected = 40 / 48 * long + 8 / 48 * long * math.sqrt(5)
    assert uncertainty(whole).error == pytest.approx(expected, rel=1e-9)


def test_without_a_profile_a_sequence_is_one_observation() -> None:
    values = rows_of(torch.Generator().manual_seed(3), 9, 200, 30, 0.4)
    bare = summary_of(values, profile=False)
    run = Run({"length": 30}, 9, done=((0, 9),), tokens=270)
    found = uncertainty(bare, run)
    assert found.how == "bound"
    assert found.dof.unique().tolist() == [8]
    assert found.error == pytest.approx(bare.moments.std / math.sqrt(8))
    assert (found.error > uncertainty(summary_of(values)).error).float().mean() > 0.95
    short = Run(
        {"length": 60}, 9, done=((0, 9),), tokens=270
    )  # windows half as long as they may be
    assert uncertainty(bare, short).dof.unique().tolist() == [3.5]


def test_what_nobody_knows_is_nan() -> None:
    values = rows_of(torch.Generator().manual_seed(4), 1, 2, 30, 0.0)
    one = uncertainty(summary_of(values))  # one sequence: no spread between sequences
    assert one.how == "bound"
    assert one.error.isnan().all()
    assert one.floor.isfinite().all()
    bare = summary_of(values, profile=False)
    no_calls = HeadSummary((Layer("attn", 2),), bare.metrics, bare.moments)
    assert uncertainty(no_calls).how == "unknown"
    assert uncertainty(no_calls).error.isnan().all()


def test_the_worst_way_counts() -> None:
    assert worst("sequences", "bound") == "bound"
    assert worst("unknown", "sequences") == "unknown"
    assert set(HOW) == {"sequences", "bound", "unknown"}
