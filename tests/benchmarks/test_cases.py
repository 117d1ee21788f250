"""Which cases there are, what they decide, and how they are asked for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cpu.cases import CASES, GROUPS, SETS, Case, choose
from benchmarks.cpu.contenders import CONTENDERS
from benchmarks.cpu.goals import GOALS
from benchmarks.cpu.inputs import make_inputs
from benchmarks.cpu.runner import run


def deciding(goal: str) -> list[Case]:
    return [case for case in CASES.values() if goal in case.goals]


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_the_forward_goals_are_decided_at_every_length_and_width(kind: str) -> None:
    cases = deciding(f"forward-{kind}")
    assert all(case.causal == (kind == "causal") for case in cases)
    assert {(case.queries, case.width) for case in cases} == {
        (n, width) for n in (1024, 4096, 16384, 32768) for width in (64, 128)
    }
    assert {case.dtype for case in cases} == {"float32"}
    assert all("forward-avx2" in case.goals for case in cases)
    assert CASES[f"{kind}-65536"].queries == 65536


@pytest.mark.parametrize(
    ("goal", "sizes"),
    [
        ("statistics", {(n, n) for n in (1024, 4096, 16384)}),
        ("noise", {(n, n) for n in (1024, 4096, 16384)}),
        ("decode", {(row, keys) for row in (1, 2, 4) for keys in (1024, 8192, 32768)}),
        ("short", {(n, n) for n in (64, 128, 256, 512)}),
        ("tiny", {(n, n) for n in (1, 4, 16, 32)}),
        ("bfloat16", {(n, n) for n in (1024, 4096)}),
        ("boolean", {(n, n) for n in (1024, 4096)}),
        ("backward", {(n, n) for n in (1024, 4096, 16384)}),
        ("entropy-backward", {(n, n) for n in (1024, 4096, 16384)}),
        ("blocked-1", {(n, n) for n in (1024, 4096, 16384)}),
        ("blocked-2", {(n, n) for n in (1024, 4096, 16384)}),
        ("memory", {(16384, 16384)}),
    ],
)
def test_every_other_goal_is_decided_at_its_sizes(goal: str, sizes: set[tuple[int, int]]) -> None:
    assert {(case.queries, case.keys) for case in deciding(goal)} == sizes


@pytest.mark.parametrize("what", ["queries", "keys", "batch", "heads", "width", "window", "rounds"])
@pytest.mark.parametrize("size", [1e29, 10**29, -1, True])
def test_sizes_are_those_of_a_call(what: str, size: object) -> None:
    sizes: dict[str, object] = {"queries": 8, "keys": 8, "causal": True, what: size}
    with pytest.raises(ValueError, match=f"^{what} must be a whole number from"):
        Case("x", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("mask", ["", "padding"])
def test_pairs_are_counted(window: int | None, queries: int, keys: int, mask: str) -> None:
    case = Case("x", queries, keys, causal=True, window=window, mask=mask, batch=3, heads=2)
    ends = [min(window or length, length) for length in case.lengths]
    assert case.pairs == 2 * sum(min(i + 1, end) for end in ends for i in range(queries))


def test_no_goal_is_left_undecided_and_each_group_has_a_quick_case() -> None:
    assert len(GOALS) == 15
    assert {goal for case in CASES.values() for goal in case.goals} == set(GOALS)
    slow = {"memory", "scaling"}
    for group, names in GROUPS.items():
        assert any(CASES[name].quick for name in names) == (group not in slow), group
    assert {case.mask for case in CASES.values()} == {"", "padding", "boolean", "additive"}
    assert {case.dtype for case in CASES.values()} == {"float32", "bfloat16", "float16"}
    assert {case.timing for case in CASES.values()} == {"forward", "backward", "step", "memory"}


def test_every_case_has_the_reference_first_and_known_contenders() -> None:
    assert len(CASES) == sum(map(len, GROUPS.values()))
    for name, case in CASES.items():
        assert case.name == name
        assert case.contenders[0] == "sdpa"
        assert set(case.contenders) <= set(CONTENDERS)
        assert len(set(case.contenders)) == len(case.contenders) > 1
    assert set(CONTENDERS) == {name for case in CASES.values() for name in case.contenders}
    assert SETS["all"] == tuple(CASES)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("causal-4069", "no benchmark case is named 'causal-4069'; did you mean 'causal-4096'?"),
        ("quikc", "no benchmark case is named 'quikc'; did you mean 'quick'?"),
        (["full-1024", "zzz"], "no benchmark case is named 'zzz': choose from all, quick, forward"),
        ([], "no benchmark case was asked for: choose from all, quick"),
    ],
)
def test_an_unknown_case_is_refused_with_the_nearest(asked: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        run(asked)


def test_quick_thins_groups_and_keeps_what_was_named() -> None:
    assert [case.name for case in choose(["short", "tiny-1-h1"], quick=True)] == [
        "short-causal-256",
        "tiny-1-h1",
    ]
    assert [case.name for case in choose("all", quick=True)] == list(SETS["quick"])


def test_an_unknown_contender_is_refused_before_anything_runs() -> None:
    case = Case("tiny", 8, 8, contenders=("sdpa", "acutence"))
    with pytest.raises(ValueError, match=r"'acutence' \(case 'tiny'\); did you mean 'acutance'\?"):
        run(case)


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two different benchmark cases are named 'tiny'"):
        choose([Case("tiny", 8, 8), Case("tiny", 8, 9)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float64"},
            "dtype must be one of 'float32', 'bfloat16', 'float16', got 'float64'",
        ),
        (
            {"mask": "lower"},
            "mask must be one of '', 'padding', 'boolean', 'additive', got 'lower'",
        ),
        ({"timing": "both"}, "timing must be one of"),
        ({"loss": "none"}, "loss must be one of"),
        ({"heads": 8, "key_heads": 3}, "heads must be a multiple of key_heads"),
        ({"goals": ("speed",)}, "goals must be among forward-full"),
        ({"goals": ("noise",)}, "goal 'noise' is of 'noise', which is no contender of case 'tiny'"),
    ],
)
def test_a_case_checks_itself(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case("tiny", 8, 8, **options)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 2 * 6 * 8),
        ({"causal": True}, 2 * (1 + 2 + 3 + 4 + 5 + 6)),
        ({"causal": True, "window": 2}, 2 * (1 + 5 * 2)),
        ({"mask": "padding", "batch": 3}, 2 * 6 * (8 + 6 + 4)),
        ({"mask": "boolean"}, 2 * 6 * 8),
    ],
)
def test_pairs_are_those_that_have_to_be_multiplied(options: dict, pairs: int) -> None:
    case = Case("tiny", 6, 8, heads=2, **options)
    assert case.pairs == pairs
    inputs = make_inputs(case)
    if case.mask != "boolean":  # the hidden ones of a mask are not skipped
        seen = inputs.visible(torch.arange(6))
        whole = torch.ones(case.batch, 2, 6, 8, dtype=torch.bool)
        assert (whole if seen is None else whole & seen).sum().item() == pairs


def test_operations_are_counted() -> None:
    case = Case("tiny", 10, 10, heads=1, width=32)
    pair = 2e-9 * 100 * 32  # one matrix product
    assert CONTENDERS["acutance"].gflop(case) == pytest.approx(2 * pair)
    assert CONTENDERS["statistics"].gflop(case) == pytest.approx(pair)
    assert CONTENDERS["noise"].gflop(case) == pytest.approx(3 * pair)
    back = Case("tiny", 10, 10, heads=1, width=32, timing="backward")
    assert CONTENDERS["acutance"].gflop(back) == pytest.approx(5 * pair)
    step = Case("tiny", 10, 10, heads=1, width=32, timing="step")
    assert CONTENDERS["acutance"].gflop(step) == pytest.approx(7 * pair)
    entropy = Case("tiny", 10, 10, heads=1, width=32, timing="backward", loss="entropy")
    assert CONTENDERS["statistics"].gflop(entropy) == pytest.approx(3 * pair)
    assert CONTENDERS["sdpa"].gflop(entropy) == pytest.approx(5 * pair)


def test_padding_shortens_each_entry_but_the_first() -> None:
    mask = make_inputs(Case("tiny", 8, 8, mask="padding", batch=3)).key_mask
    assert mask is not None
    assert mask.sum(1).tolist() == [8, 6, 4]


@pytest.mark.parametrize("options", [{"threads": 0}, {"rounds": 0}, {"threads": (1, 0)}])
def test_numbers_below_one_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        run("decode-1x1024", **options)
