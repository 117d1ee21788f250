"""Which cases there are, and how they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from acutance import bench
from acutance.bench.cases import CASES, SETS, Case, choose
from acutance.bench.contenders import CONTENDERS, make_inputs


def test_the_cases_of_the_claims_are_there() -> None:
    assert len(CASES) == 10
    for length in (1024, 4096, 16384):
        for kind in ("causal", "full"):
            case = CASES[f"{kind}-{length}"]
            assert case.shape.startswith(f"B=1 H=8 L=S={length} E=64 float32")
            assert case.causal == (kind == "causal")
    assert all(name == case.name for name, case in CASES.items())
    assert SETS["full"] == tuple(CASES)
    assert {CASES[name].keys for name in SETS["quick"]} == {1024, 4096}


def test_every_case_has_the_reference_and_known_contenders() -> None:
    for case in CASES.values():
        assert case.contenders[0] == "sdpa"
        assert "naive" in case.contenders
        assert set(case.contenders) <= set(CONTENDERS)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("causal-4069", "no benchmark case is named 'causal-4069'; did you mean 'causal-4096'?"),
        ("quikc", "no benchmark case is named 'quikc'; did you mean 'quick'?"),
        (
            ["full-1024", "zzz"],
            "no benchmark case is named 'zzz': choose from quick, full, causal-",
        ),
        ([], "no benchmark case was asked for: choose from quick"),
    ],
)
def test_an_unknown_case_is_refused_with_the_nearest(asked: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        bench.run(asked)


def test_an_unknown_contender_is_refused_before_anything_runs() -> None:
    case = Case("tiny", 8, 8, contenders=("sdpa", "acutence"))
    with pytest.raises(ValueError, match=r"'acutence' \(case 'tiny'\); did you mean 'acutance'\?"):
        bench.run(case)


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two different benchmark cases are named 'tiny'"):
        choose([Case("tiny", 8, 8), Case("tiny", 8, 9)])


def test_a_case_checks_itself() -> None:
    with pytest.raises(ValueError, match="dtype is one of"):
        Case("tiny", 8, 8, dtype="float64")
    with pytest.raises(ValueError, match="heads is a multiple of key_heads"):
        Case("tiny", 8, 8, heads=8, key_heads=3)


def test_padding_shortens_each_entry_but_the_first() -> None:
    mask = make_inputs(Case("tiny", 8, 8, padded=True, batch=3)).key_mask
    assert mask is not None
    assert mask.sum(1).tolist() == [8, 6, 4]


@pytest.mark.parametrize("options", [{"threads": 0}, {"rounds": 0}])
def test_numbers_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is at least 1, got 0"):
        bench.run("decode-4096", **options)


def test_the_names_come_without_torch() -> None:
    code = "import sys, acutance.bench; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
