"""Laws about the tests themselves: which cases `make test` leaves to `make slow`."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from _pytest.doctest import _get_checker


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> ModuleType:
    """The settings of all tests."""
    (module,) = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if isinstance(plugin, ModuleType) and hasattr(plugin, "repeats")
    ]
    return module


def cases(*sizes: int, together: int = 1) -> list[Any]:
    """One case for each place of a product of parameters, marked as a grid."""
    indices: list[dict[str, int]] = [{}]
    for name, size in zip("abc", sizes, strict=False):
        indices = [each | {name: value} for each in indices for value in range(size)]
    mark = SimpleNamespace(args=(together,))  # of grid or few
    return [
        type(
            "Case",
            (),
            {"callspec": SimpleNamespace(params=each), "get_closest_marker": lambda *_: mark},
        )()
        for each in indices
    ]


@pytest.mark.parametrize(
    ("sizes", "together", "count"),
    [((3,), 1, 3), ((3, 4), 1, 4), ((2, 3, 4), 1, 4), ((2, 3), 2, 6), ((2, 2, 2), 2, 4)],
)
def test_a_grid_runs_every_value_and_no_more_than_it_needs(
    conftest: ModuleType, sizes: tuple[int, ...], together: int, count: int
) -> None:
    product = cases(*sizes, together=together)
    left = conftest.repeats(product)
    assert len(product) - len(left) == count
    for name, size in zip("abc", sizes, strict=False):
        run = {case.callspec.params[name] for case in product if case not in left}
        assert run == set(range(size))


@pytest.mark.grid
@pytest.mark.parametrize("second", ["a", "b"])
@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_a_grid_of_pytest_is_one(request: pytest.FixtureRequest, first: str, second: str) -> None:
    shown = [("a", "a"), ("b", "b"), ("c", "a")]
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == ((first, second) not in shown)


@pytest.mark.parametrize(("count", "run"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (9, range(7))])
def test_a_few_cases_are_evenly_spread(
    conftest: ModuleType, count: int, run: Sequence[int]
) -> None:
    all_cases = cases(7, together=count)
    left = conftest.others(all_cases)
    assert [case.callspec.params["a"] for case in all_cases if case not in left] == list(run)


TESTS = Path(__file__).parent
#: Replaced insides of the project, at most: lower it with each that goes.
MOST_PATCHES = 20
OTHERS = {"torch", "os", "sys", "importlib", "pathlib", "transformers", "rich", "numpy"} | {
    "time", "fcntl", "resource", "matplotlib", "trackio", "trl",
}  # fmt: skip


def imported(tree: ast.AST) -> dict[str, str]:
    """The package that each imported name comes from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name.partition(".")[0]] = name.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                found[name.asname or name.name] = (node.module or "").partition(".")[0]
    return found


def patches(source: str) -> list[int]:
    """Lines that replace an attribute of the project's modules, classes or objects."""
    tree = ast.parse(source)
    names, found = imported(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr != "setattr" or not node.args:
                continue
            target = node.args[0]
            parts = re.findall(r"\w+", ast.unparse(target))
            if OTHERS.isdisjoint({*parts, names.get(parts[0], "")}) and "config" not in parts:
                found.append(node.lineno)
        elif isinstance(node, ast.Assign):
            found += [
                node.lineno
                for target in node.targets
                if isinstance(target, ast.Attribute)
                and names.get(ast.unparse(target.value)) == "acutance"
            ]
    return sorted(found)


def test_few_insides_are_replaced() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in patches(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST_PATCHES, "\n".join(found)


def test_a_replaced_inside_is_counted_and_the_rest_is_not() -> None:
    source = """
import torch
from pathlib import Path
from acutance.kernels import tiles
monkeypatch.setattr(tiles, "TILE_ROWS", 4)
monkeypatch.setattr("acutance.files._LOCK", None)
tiles.TILE_ROWS = 4
monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
monkeypatch.setattr(Path, "write_bytes", None)
monkeypatch.setattr(model.config, "name", "x")
monkeypatch.setenv("ACUTANCE_BACKEND", "blocked")
"""
    assert patches(source) == [5, 6, 7]


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("0.43", "0.4349", True),
        ("0.43", "0.4351", False),
        ("0.43", "0.4251", True),
        ("0.43", "0.4249", False),
        ("0.42", "0.425", True),  # a tie may be rounded either way
        ("0.1435", "0.1434", False),
        ("1.2e-5", "1.24e-5", True),
        ("1.2e-5", "1.26e-5", False),
    ],
)
def test_a_number_of_an_example_is_a_correct_rounding(want: str, got: str, same: bool) -> None:
    flags = doctest.register_optionflag("NUMBER")
    checker = _get_checker()
    for number in (1, -1):
        sign = "-" * (number < 0)
        assert checker.check_output(f"{sign}{want}\n", f"{sign}{got}\n", flags) is same
