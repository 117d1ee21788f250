"""What every test may rely on: no model hub, a fixed number of threads, a seed."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported: before anything
# A compiled graph kept from another version of the operators would be run in place of this one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="acutance-tests-")
# One process a core: further threads would only wait for each other, in commands under test too.
# `make portable` names another number.
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS") or (
    "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
)

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels run on the CPU

# sums are split the same way on a laptop and on a large machine
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_unconfigure() -> None:
    """Remove what this process cached."""
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what a grid repeats, and all but a few cases where a few are enough."""
    chosen: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        for name in ("grid", "few"):
            if item.get_closest_marker(name) and not item.get_closest_marker("slow"):
                assert isinstance(item, pytest.Function)
                chosen[name, item.nodeid.partition("[")[0]].append(item)
    for (name, _), cases in chosen.items():
        for case in repeats(cases) if name == "grid" else others(cases):
            case.add_marker("slow")


def others(cases: list[pytest.Function]) -> list[pytest.Function]:
    """All cases but a few, from the first on evenly spread."""
    marker = cases[0].get_closest_marker("few")
    assert marker is not None
    count = min(marker.args[0], len(cases))
    run = {index * len(cases) // count for index in range(count)}
    return [case for index, case in enumerate(cases) if index not in run]


def repeats(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Cases whose values occur in the others: the one with the most new values is chosen next."""
    marker = cases[0].get_closest_marker("grid")
    assert marker is not None
    # the cases of a product share the objects of their parameters
    values = [
        sorted((name, id(value)) for name, value in case.callspec.params.items()) for case in cases
    ]
    together = min(marker.args[0] if marker.args else 1, len(values[0]))
    shows = {
        case: set(combinations(value, together)) for case, value in zip(cases, values, strict=True)
    }
    seen: set[tuple[tuple[str, int], ...]] = set()
    rest = list(cases)
    while rest:
        best = max(rest, key=lambda case: len(shows[case] - seen))
        if shows[best] <= seen:
            break
        seen |= shows[best]
        rest.remove(best)
    return rest


@pytest.fixture
def use_backend() -> Iterator[Callable[[str], None]]:
    """Set ACUTANCE_BACKEND, which a process reads once, for the rest of a test."""
    from acutance.kernels import dispatch

    def use(name: str) -> None:
        patch.setenv(dispatch.BACKEND_VARIABLE, name)
        dispatch.forced.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        yield use
    dispatch.forced.cache_clear()


@pytest.fixture
def blocked_only(use_backend: Callable[[str], None]) -> None:
    """Have the plain PyTorch kernel take every call."""
    use_backend("blocked")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set block sizes and other limits of a module, which small inputs do not reach otherwise.

    Inputs that reach the usual ones would take seconds here, or are too large for a reference.
    """

    def use(module: Any, **sizes: Any) -> None:
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)

    return use


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[int]]:
    """Have a function run ``after`` times and then be stopped, by an error or a signal.

    What it returns counts the calls: its next number is that of the calls so far.

    A real interrupt, or a disk that becomes full, cannot be timed to hit one step of a run.
    """

    def use(place: Any, name: str, after: int, stop: Callable[[], object]) -> Iterator[int]:
        plain, calls = getattr(place, name), itertools.count()

        def stopped(*given: Any, **options: Any) -> Any:
            if next(calls) == after:
                stop()
            return plain(*given, **options)

        monkeypatch.setattr(place, name, stopped)
        return calls

    return use


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Record the first argument of every call of a native function: results do not show them."""
    from acutance.kernels import library

    found = library.load()
    if isinstance(found, str):
        pytest.skip(found)

    def record(name: str) -> list[Any]:
        run, calls = getattr(found, name), []

        def recorded(*arguments: Any) -> int:
            calls.append(arguments[0])
            return int(run(*arguments))

        monkeypatch.setattr(found, name, recorded)
        return calls

    return record


@pytest.fixture
def small_tiles(limits: Callable[..., None], blocked_only: None) -> None:
    """Tiles of 256 keys, the fewest there are, by at most four rows, of the blocked kernel."""
    from acutance.kernels import tiles

    # of the usual size, a tile would hold all that the float64 definition can be computed for
    limits(tiles, TILE_ROWS=4, LEVEL_ROWS=4, TILE_ELEMENTS=512)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start each test from the same random state, whichever tests ran before it."""
    torch.default_generator.manual_seed(0)  # manual_seed would note a call for every absent device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    return 0


@pytest.fixture
def as_library() -> Iterator[Callable[[type], None]]:
    """Have the methods of a class pass for PyTorch's own, by the file that they say they are of."""
    before = []

    def mark(kind: type) -> None:
        for member in vars(kind).values():
            if inspect.isfunction(member):
                before.append((member, member.__code__))
                member.__code__ = member.__code__.replace(co_filename=torch.__file__)

    yield mark
    for member, code in before:
        member.__code__ = code


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run a command in this process, as a user with a wide terminal; returns typer's result."""
    from typer.testing import CliRunner

    from acutance.cli import app

    runner = CliRunner(env={"COLUMNS": "160"})
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])
