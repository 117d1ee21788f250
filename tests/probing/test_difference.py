"""What changed between two summaries: the arithmetic, the verdicts, and what must be said."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.probing import Diff, HeadSummary, Layer, Run, Shard, State, diff
from acutance.summary.diff import ORDER, VERDICTS

DRAWN = runpy.run_path(str(Path(__file__).with_name("drawn.py")))
rows_of, summary_of = DRAWN["rows_of"], DRAWN["summary_of"]


def drawn(
    seed: int, *, sequences: int = 10, heads: int = 6, shift: float = 0.0, **more: Any
) -> Any:
    """Rows of which nearly all variance is common to a sequence; head 2 is shifted."""
    values = rows_of(torch.Generator().manual_seed(seed), sequences, heads, 50, 0.8)
    values[:, :, 2:3] += shift
    return summary_of(values, **more)


def state(summary: HeadSummary, **settings: Any) -> State:
    plain = {"model": "m", "text": "t", "length": 50, "batch_size": 5}
    return State(summary, Run(plain | settings, 10, ((0, 10),), 500))


def test_the_numbers_are_those_of_the_two() -> None:
    one, other = drawn(1), drawn(2, shift=3.0)
    found = diff(one, other)
    assert torch.equal(found.change[:, 0], other.mean("entropy") - one.mean("entropy"))
    heads = found.of("entropy")
    assert [(head.layer, head.head) for head in heads] == [(0, index) for index in range(6)]
    for head in heads:
        assert head.rows == (500, 500)
        assert head.change == head.after - head.before
        assert head.low < head.change < head.high
        assert head.error > 2 * float(found.floor[head.head, 0])  # rows are not independent here
    spread = torch.sqrt((one.moments.M2 + other.moments.M2) / 1000)[:, 0]
    assert [head.size for head in heads] == pytest.approx((found.change[:, 0] / spread).tolist())


def test_the_head_that_moved_comes_first() -> None:
    found = diff(drawn(1), drawn(2, shift=4.0))
    order = found.moved("entropy")
    assert order[0].head == 2
    assert order[0].verdict == "moved"
    assert {head.verdict for head in order[1:]} == {"within noise"}
    sizes = [abs(head.change) for head in order[1:]]
    assert sizes == sorted(sizes, reverse=True)
    assert found.moved("entropy", 2) == order[:2]
    assert found.count("entropy", "moved") == 1


def test_the_second_against_the_first_is_the_opposite() -> None:
    one, other = drawn(3), drawn(4, shift=4.0)
    there, back = diff(one, other), diff(other, one)
    assert torch.equal(there.change, -back.change)
    assert torch.equal(there.low, -back.high)
    assert torch.equal(there.verdicts, back.verdicts)
    assert torch.equal(there.shift, back.shift)


def test_a_summary_has_not_moved_from_itself() -> None:
    one = drawn(5)
    found = diff(one, one)
    assert (found.verdicts == ORDER.index("equal")).all()
    assert (found.shift == 0).all()
    assert found.warnings == ()


def test_texts_of_one_kind_seldom_move_a_head() -> None:
    """Where rows taken as independent would call most heads moved."""
    moved = wrong = 0
    for seed in range(24):
        found = diff(drawn(2 * seed, heads=50), drawn(2 * seed + 1, heads=50))
        moved += bool(found.count("entropy", "moved"))
        wrong += int((found.change.abs() > 1.96 * found.floor).sum())
    # of 24 pairs a share of 0.05 or less has any such head: 6 or more has probability 0.001
    assert moved < 6
    assert wrong > 0.5 * 24 * 50


def test_a_change_of_shape_alone_shows_in_the_shift() -> None:
    one = rows_of(torch.Generator().manual_seed(1), 10, 1, 400, 0.0)
    other = one.sign() * 2.0
    found = diff(
        summary_of(one + 8, metrics=["entropy"]), summary_of(other + 8, metrics=["entropy"])
    )
    assert found.of("entropy")[0].verdict == "within noise"
    assert float(found.shift[0, 0]) > 0.5


def test_without_profiles_only_bounds_are_known() -> None:
    small = diff(drawn(1, profile=False), drawn(2, profile=False))
    assert small.how == "bound"
    assert small.error.isnan().all()  # one call, which may be one sequence
    assert set(small.verdicts[:, 0].tolist()) <= {
        ORDER.index("unclear"),
        ORDER.index("within noise"),
    }
    sure = diff(state(drawn(1, profile=False)), state(drawn(2, profile=False, shift=9.0)))
    assert sure.error.isfinite().all()
    assert sure.of("entropy")[2].verdict == "moved"
    mixed = diff(drawn(1), state(drawn(2, profile=False)))
    assert mixed.how == "bound"


def test_what_one_alone_has_is_listed() -> None:
    kept = Layer("h.0.attn", 4, calls=1, rows=500)
    one = drawn(1, layers=[kept, Layer("h.1.attn", 2, calls=1, rows=500)])
    other = drawn(2, heads=5, layers=[replace(kept, heads=5)])
    found = diff(one, other)
    assert len(found.matched.places) == 4
    assert found.matched.only == (
        ("layer 1, h.1.attn (heads 0–1)",),
        ("head 4 of layer 0, h.0.attn",),
    )
    generator = torch.Generator().manual_seed(1)
    pair = torch.cat([rows_of(generator, 4, 2, 9, 0.1) for _ in range(2)])
    both = diff(summary_of(pair), summary_of(pair[:1]))
    assert both.metrics == ("entropy",)
    assert both.matched.only == (("the metric max_logit",), ())


def test_heads_that_were_chosen_are_matched_by_their_numbers() -> None:
    one = drawn(1, heads=3, layers=[Layer("attn", 3, calls=1, chosen=(1, 4, 6))])
    other = drawn(2, heads=2, layers=[Layer("attn", 2, calls=1, chosen=(0, 4))])
    found = diff(one, other)
    assert [place.head for place in found.matched.places] == [4]
    assert found.of("entropy")[0].before == float(one.mean("entropy")[1])
    assert found.of("entropy")[0].after == float(other.mean("entropy")[1])
    assert found.matched.only == (("heads 1, 6 of layer 0, attn",), ("head 0 of layer 0, attn",))


def test_layers_of_other_names_are_matched_by_order_and_it_says_so() -> None:
    one = drawn(1, layers=[Layer("a.0", 2), Layer("a.1", 4)])
    found = diff(one, drawn(2, layers=[Layer("b.0", 2), Layer("b.1", 4)]))
    assert found.matched.by_order
    assert any("matched by order" in text for text in found.warnings)
    with pytest.raises(ValueError, match=r"have no head in common: one has 2 layers \(a.0, a.1\)"):
        diff(one, drawn(2, layers=[Layer("b.0", 6)]))


def test_layers_average_their_heads() -> None:
    layers = [Layer("h.0", 2), Layer("h.1", 4)]
    found = diff(drawn(1, layers=layers), drawn(2, layers=layers, shift=-5.0))
    first, second = found.layers("entropy")
    assert (first.heads, second.heads) == (2, 4)
    assert second.change == pytest.approx(float(found.change[2:, 0].mean()))
    assert second.error == pytest.approx(float(found.error[2:, 0].mean()))
    assert (second.moved, second.most) == (1, 0)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            {"architecture": "BertModel"},
            {"architecture": "GPT2Model"},
            "different kinds, BertModel",
        ),
        ({"text": ["a.txt"]}, {"text": ["b.txt"]}, "different texts, a.txt and b.txt"),
        ({"window_length": 128}, {"window_length": 512}, "(128 and 512 tokens)"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "dtypes differ: float32 and bfloat16"),
        ({"torch": "2.6"}, {"torch": "2.13"}, "releases of torch differ: 2.6 and 2.13"),
        (
            {},
            {"complete": False, "windows": 3, "windows_in_all": 9, "shard": "1/3"},
            "second state holds 3 of 9 windows, shard 1/3",
        ),
    ],
)
def test_what_makes_two_hard_to_compare_is_said(
    before: dict[str, Any], after: dict[str, Any], sentence: str
) -> None:
    found = diff(drawn(1, about=before), drawn(2, about=after))
    assert [text for text in found.warnings if sentence in text], found.warnings
    assert diff(drawn(1, about=before), drawn(2, about=before)).warnings == ()


def test_settings_of_runs_are_compared() -> None:
    one = drawn(1, about={"text": ["a.txt"], "model": "x"})
    assert any(
        "different tokens" in text for text in diff(state(one), state(one, text="u")).warnings
    )
    both = diff(state(one), state(one, text="u", model="n")).warnings
    assert any("Model and text differ" in text for text in both)
    halves = [
        State(one, Run({"model": "m"}, 10, ((start, start + 6),), 300, Shard(part, 2)))
        for part, start in ((1, 0), (2, 4))
    ]
    assert any("share 2 windows" in text for text in diff(*halves).warnings)


def test_a_wrong_capture_and_other_numbers_of_keys_are_said() -> None:
    wrong = drawn(1, layers=[Layer("attn", 6, status="mismatch")])
    assert any("did not pass verification" in text for text in diff(wrong, drawn(2)).warnings)
    names = ("entropy", "n_keys")
    rows = rows_of(torch.Generator().manual_seed(1), 4, 2, 9, 0.0)
    few, many = (summary_of(torch.cat([rows, torch.full_like(rows, n)]), metrics=names)
                 for n in (64.0, 80.0))  # fmt: skip
    assert any("see 64 and 80 keys" in text for text in diff(few, many).warnings)


def test_tables_hold_every_head_of_every_metric() -> None:
    rows = rows_of(torch.Generator().manual_seed(1), 4, 3, 9, 0.0)
    rows = torch.cat([rows, torch.full_like(rows, math.nan)])  # a metric that no row has
    found = diff(summary_of(rows), summary_of(rows + 0.1))
    table = found.to_arrow()
    assert table.num_rows == 6
    assert table.column("metric").to_pylist() == ["entropy"] * 3 + ["max_logit"] * 3
    assert table.column("verdict").to_pylist()[3:] == [None] * 3
    assert len(found.to_frame()) == 6
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [head["change"] for head in record["heads"]][3:] == [None] * 3
    assert record["heads"][0]["change"] == pytest.approx(0.1)
    assert record["verdicts"] == VERDICTS
    assert len(record["layers"]) == 2
    assert found.moved("max_logit") == []
    assert math.isnan(found.layers("max_logit")[0].change)


def test_what_cannot_be_compared_is_refused() -> None:
    one = drawn(1, metrics=("entropy",))
    with pytest.raises(
        ValueError, match="no metric in common: one has entropy, the other max_logit"
    ):
        diff(one, drawn(1, metrics=("max_logit",)))
    with pytest.raises(TypeError, match="summaries or states, got str"):
        diff("a.safetensors", one)  # type: ignore[arg-type]
    found: Diff = diff(one, one)
    with pytest.raises(ValueError, match="'lse' is not in both states; they share entropy"):
        found.of("lse")


def at_lengths(seed: int, length: int, slope: float, step: float = 0.0) -> HeadSummary:
    """Causal rows whose entropy rises with log n, seen in windows of a length."""
    values = rows_of(torch.Generator().manual_seed(seed), 12, 3, length, 0.5) / 10
    n = 1 + torch.arange(length)
    values += slope * n.log() + step
    about = {"window_length": length}
    return summary_of(values, n.expand(12, -1), metrics=("entropy",), about=about)


def test_at_equal_n_a_longer_window_alone_changes_nothing() -> None:
    short, long = at_lengths(1, 32, 0.7), at_lengths(2, 128, 0.7)
    plain = diff(short, long)
    assert plain.count("entropy", "moved") == 3
    assert any("rows at equal n (--equal-n)" in text for text in plain.warnings)
    equal = diff(short, long, equal_n=True)
    assert equal.count("entropy", "moved") == 0
    assert equal.change.abs().max() < 0.15
    assert equal.keys is not None
    assert 1 == equal.keys[0] < equal.keys[1] < 32
    assert equal.shift.isnan().all()
    assert any(
        "rows with the same number of keys are comparable" in text for text in equal.warnings
    )
    assert equal.to_dict()["equal_n"] == list(equal.keys)


def test_at_equal_n_what_is_not_n_remains() -> None:
    found = diff(at_lengths(1, 32, 0.7), at_lengths(2, 128, 0.7, step=0.5), equal_n=True)
    assert found.count("entropy", "moved") == 3
    # 12 sequences a side, of deviation 0.07 each: five standard errors of the change are 0.15
    assert found.change[:, 0].tolist() == pytest.approx([0.5] * 3, abs=0.15)


def test_equal_n_of_one_summary_is_all_but_equal() -> None:
    one = at_lengths(1, 31, 0.7)
    found = diff(one, one, equal_n=True)
    assert (found.verdicts == ORDER.index("equal")).all()
    assert found.before == pytest.approx(one.moments.mean)  # all octaves, by their own rows


def test_without_a_shared_n_or_a_profile_it_says_so() -> None:
    rows = rows_of(torch.Generator().manual_seed(1), 4, 2, 9, 0.0)
    few, many = (summary_of(rows, torch.full((4, 9), n)) for n in (100, 500))
    with pytest.raises(ValueError, match="rows see 100 to 100 keys in one and"):
        diff(few, many, equal_n=True)
    with pytest.raises(
        ValueError, match="the second state does not record how metrics depend on n"
    ):
        diff(few, summary_of(rows, profile=False), equal_n=True)
