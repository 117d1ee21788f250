"""Laws about the tests themselves: which cases `make test` leaves to `make slow`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


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
            {"callspec": SimpleNamespace(indices=each), "get_closest_marker": lambda *_: mark},
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
        run = {case.callspec.indices[name] for case in product if case not in left}
        assert run == set(range(size))


@pytest.mark.parametrize(("count", "run"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (9, range(7))])
def test_a_few_cases_are_evenly_spread(
    conftest: ModuleType, count: int, run: Sequence[int]
) -> None:
    all_cases = cases(7, together=count)
    left = conftest.others(all_cases)
    assert [case.callspec.indices["a"] for case in all_cases if case not in left] == list(run)
