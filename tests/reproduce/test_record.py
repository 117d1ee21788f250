"""Verdicts are a function of the rows, and records survive being written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from acutance.reproduce import Claim, Record, Row, judge, load
from acutance_lab.command import verdict
from acutance_lab.record import UNTESTED, Estimate


def rows_at(claim: Claim, misses: dict[float, float]) -> list[Row]:
    """Rows at values of x, each so far off its prediction of 1."""
    return [claim.row("y", 1.0, 1.0 + miss, {"x": x}) for x, miss in misses.items()]


@pytest.mark.parametrize(
    ("relation", "measured", "agrees"),
    [
        ("=", 1.039, True), ("=", 1.041, False), ("=", 0.959, False),
        ("<=", 0.0, True), ("<=", 1.039, True), ("<=", 1.041, False),
        (">=", 2.0, True), (">=", 0.961, True), (">=", 0.959, False),
    ],
)  # fmt: skip
def test_a_row_agrees_within_four_standard_errors_on_the_side_that_counts(
    relation: str, measured: float, agrees: bool
) -> None:
    claim = Claim("c", "text", relation=relation)  # type: ignore[arg-type]
    row = claim.row("y", 1.0, Estimate(measured, 0.01), {})
    assert row.agrees is agrees
    assert (row.miss <= 1.0) is agrees
    assert row.allowed == pytest.approx(0.04, abs=1e-11)


def test_a_claim_may_leave_a_share_of_the_prediction_open() -> None:
    claim = Claim("c", "text", within=0.02)
    assert claim.row("y", -5.0, -5.099, {}).agrees
    assert not claim.row("y", -5.0, -5.101, {}).agrees


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_never_agrees(value: float) -> None:
    assert not Claim("c", "text").row("y", 1.0, value, {}).agrees
    assert not Claim("c", "text").row("y", math.nan, 1.0, {}).agrees


def test_every_row_decides_whether_a_claim_holds() -> None:
    claim = Claim("c", "text")
    good = rows_at(claim, {1.0: 0.0, 2.0: 0.0, 3.0: 0.0})
    assert judge(claim, good).verdict == "holds"
    one_off = judge(claim, [*good, claim.row("y", 1.0, 1.05, {"x": 4.0})])
    assert one_off.verdict == "does not hold"
    assert (one_off.agree, one_off.rows, one_off.worst.measured) == (3, 4, 1.05)


@pytest.mark.parametrize(
    ("sense", "misses", "verdict"),
    [
        ("up to", {1.0: 0, 2.0: 0, 3.0: 1, 4.0: 1}, "holds only where x ≤ 2"),
        ("up to", {4.0: 1, 3.0: 1, 2.0: 0, 1.0: 0}, "holds only where x ≤ 2"),
        ("up to", {0.5: 0, 1.25: 0, 3.0: 1, 4.0: 0}, "holds only where x ≤ 1.25"),
        ("up to", {1.0: 0, 2.0: 1, 3.0: 0, 4.0: 0}, "does not hold"),  # one row proves nothing
        ("up to", {1.0: 1, 2.0: 0, 3.0: 0, 4.0: 0}, "does not hold"),
        ("from", {1.0: 1, 2.0: 0, 3.0: 0, 4.0: 0}, "holds only where x ≥ 2"),
        ("from", {1.0: 0, 2.0: 0, 3.0: 0, 4.0: 1}, "does not hold"),
        ("in", {1.0: 1, 2.0: 0, 3.0: 1, 4.0: 0}, "holds only where x: 2 or 4"),
        ("in", {1.0: 1, 2.0: 1}, "does not hold"),
    ],
)
def test_the_range_in_which_a_claim_holds_is_read_off_the_rows(
    sense: str, misses: dict[float, float], verdict: str
) -> None:
    claim = Claim("c", "text", bound="x", sense=sense)  # type: ignore[arg-type]
    assert judge(claim, rows_at(claim, misses)).verdict == verdict


def test_a_range_ends_before_the_first_value_at_which_any_row_fails() -> None:
    claim = Claim("c", "text", bound="x")
    rows = rows_at(claim, {1.0: 0, 2.0: 0}) + rows_at(claim, {2.0: 1, 0.5: 0})
    assert judge(claim, rows).verdict == "holds only where x ≤ 1"


def test_a_verdict_of_another_kind_than_expected_shows() -> None:
    claim = Claim("c", "text", expected="does not hold")
    assert not judge(claim, rows_at(claim, {1.0: 0.0})).as_expected
    assert judge(claim, rows_at(claim, {1.0: 1.0})).as_expected


def test_a_theorem_is_marked_in_the_verdict_and_in_the_record(tmp_path: Path) -> None:
    claim = Claim("c", "text", theorem=True)
    rows = rows_at(claim, {1.0: 0.0})
    assert verdict(judge(claim, rows)).plain.startswith("holds (theorem)")
    record = Record("r", "t", "p", (claim,), tuple(rows), 0, True, 0.0)
    record.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json").judgements[0].claim.theorem
    plain = Claim("c", "text")
    assert "theorem" not in verdict(judge(plain, rows)).plain


def test_a_claim_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one result for the claim 'c', got none"):
        judge(Claim("c", "text"), [Claim("other", "text").row("y", 1.0, 1.0, {})])


def a_record() -> Record:
    claim = Claim("c", "a claim", "a source", bound="x")
    rows = (
        claim.row("y", 0.1, Estimate(0.1 + 1e-17, 0.0), {"x": 1, "kind": "α"}),
        claim.row("y", math.inf, Estimate(math.nan, math.inf), {"x": 2.5}),
        UNTESTED.row("z", math.nan, 3.0, {}),
    )
    return Record(
        name="n", title="t", prediction="p", claims=(claim,), rows=rows,
        seed=3, quick=True, seconds=0.5, about={"torch": "2"},
    )  # fmt: skip


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    record, path = a_record(), tmp_path / "n.json"
    record.save(path)
    back = load(path)
    back.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert back.judgements[0].claim == record.judgements[0].claim
    assert back.rows[0] == record.rows[0]
    assert math.isnan(back.rows[1].measured)
    assert back.rows[1].predicted == math.inf
    assert back.of("") == [back.rows[2]]
    assert json.loads(path.read_text(encoding="utf-8"))["verdict"] == back.judgements[0].verdict


def test_verdicts_are_judged_anew_on_reading(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    a_record().save(path)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["verdict"] == "does not hold"
    written["verdict"] = written["claims"][0]["verdict"] = "holds"
    path.write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(ValueError, match="it is damaged or was edited"):
        load(path)
    del written["sha256"]  # as acutance 0.1.0 wrote it
    path.write_text(json.dumps(written), encoding="utf-8")
    assert load(path).judgements[0].verdict == "does not hold"


def test_rows_are_judged_anew_on_reading(tmp_path: Path) -> None:
    claim, path = Claim("quarter", "it is a quarter"), tmp_path / "n.json"
    rows = tuple(claim.row("share", 0.25, Estimate(0.25, 0.001), {"n": n}) for n in range(3))
    Record("n", "t", "p", (claim,), rows, 0, True, 0.5, {}).save(path)
    written = json.loads(path.read_text(encoding="utf-8"))
    del written["sha256"]
    for row in written["rows"]:
        row["measured"], row["allowed"] = 999.0, 1e9
    path.write_text(json.dumps(written), encoding="utf-8")
    record = load(path)
    assert not any(row.agrees for row in record.rows)
    assert record.judgements[0].verdict == "does not hold"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a record"),
        ("[]", "is not a record"),
        ('{"schema": 1}', "is not a record"),
        ('{"schema": 99}', "its schema is 99, but this version reads 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("claim", "values", "enough"),
    [
        (Claim("c", "equal"), [Estimate(1.0, 0.001)], True),
        (Claim("c", "equal"), [Estimate(1.0, 0.1)], False),  # 5 per cent is half an error
        (Claim("c", "refuted"), [Estimate(2.0, 0.01)], True),
        (Claim("c", "refuted by a hair"), [Estimate(1.052, 0.001)], False),
        (Claim("c", "more", relation=">="), [Estimate(1.5, 0.1)], True),
        (Claim("c", "more, or less", relation=">="), [Estimate(1.1, 0.1)], False),
        (Claim("c", "less", relation="<="), [Estimate(0.5, 0.1), Estimate(1.0, 0.1)], True),
    ],
)
def test_a_verdict_that_a_wrong_prediction_would_get_too_is_undecided(
    claim: Claim, values: list[Estimate], enough: bool
) -> None:
    rows = [claim.row("y", 1.0, value, {}) for value in values]
    assert judge(claim, rows).decided is enough


def test_a_record_says_which_verdicts_are_decided() -> None:
    claim = Claim("c", "a claim")
    rows = (claim.row("y", 1.0, Estimate(1.0, 0.1), {}),)
    record = replace(a_record(), claims=(claim,), rows=rows)
    assert record.to_dict()["claims"][0]["decided"] is False
    assert "undecided" in verdict(record.judgements[0]).plain
