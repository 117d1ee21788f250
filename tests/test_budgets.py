"""No package grows beyond its number in ``budgets.toml``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tools.count_lines import count

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

BUDGETS = Path(__file__).parents[1] / "budgets.toml"


def excesses(budgets: dict[str, Any], lines: dict[str, int], cpp: int) -> list[str]:
    """One sentence for each number that is above its budget, or a budget of nothing."""
    numbers = [
        *(
            (package, found, budgets["packages"].get(package, 0))
            for package, found in lines.items()
        ),
        ("all packages", sum(lines.values()), budgets["python"]),
        ("C++", cpp, budgets["cpp"]),
    ]
    return [
        f"{name} has {found} lines of code, its budget is {budget}"
        for name, found, budget in numbers
        if found > budget
    ] + [f"{name} has a budget and no code" for name in budgets["packages"].keys() - lines.keys()]


def test_no_package_is_above_its_budget() -> None:
    counts = count()
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    assert excesses(budgets, counts.lines, counts.cpp) == []


@pytest.mark.parametrize(
    ("lines", "cpp", "said"),
    [
        ({"a": 10, "b": 5}, 7, []),
        ({"a": 11, "b": 4}, 7, ["a has 11 lines of code, its budget is 10"]),
        ({"a": 10, "b": 4, "c": 1}, 7, ["c has 1 lines of code, its budget is 0"]),
        ({"a": 9, "b": 5}, 7, []),
        ({"a": 10}, 8, ["C++ has 8 lines of code, its budget is 7", "b has a budget and no code"]),
    ],
)
def test_an_excess_is_named(lines: dict[str, int], cpp: int, said: list[str]) -> None:
    budgets = {"python": 15, "cpp": 7, "packages": {"a": 10, "b": 5}}
    assert excesses(budgets, lines, cpp) == said
    total = sum(lines.values())
    assert f"all packages has {total} lines of code, its budget is 1" in excesses(
        budgets | {"python": 1}, lines, cpp
    )
