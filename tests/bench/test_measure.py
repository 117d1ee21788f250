"""Turns, times and the memory of a call."""

from __future__ import annotations

import itertools
import sys
import time

import pytest
import torch

from acutance.bench import measure
from acutance.bench.cases import CASES, Case
from acutance.bench.contenders import CONTENDERS
from acutance.bench.records import Spread

MIB = 1 << 20


def test_the_order_is_reversed_every_other_round() -> None:
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "abc"}
    rounds = list(measure.take_turns(work, 4, dict.fromkeys("abc", 1)))
    assert "".join(calls) == "abccbaabccba"
    assert [set(taken) for taken in rounds] == [set("abc")] * 4


def test_each_round_is_handed_over_when_it_is_whole() -> None:
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "ab"}
    first = next(measure.take_turns(work, 4, {"a": 2, "b": 1}))
    assert calls == ["a", "a", "b"]
    assert list(first) == ["a", "b"]


def test_short_calls_are_repeated_and_long_ones_are_not() -> None:
    repeats = measure.warm_up({"short": lambda: None, "long": lambda: time.sleep(0.03)})
    assert repeats["long"] == 1
    assert repeats["short"] > 10


def test_wall_and_cpu_time_are_told_apart() -> None:
    taken = measure.timed(lambda: time.sleep(0.05))
    assert 0.05 <= taken.wall < 0.5
    assert taken.cpu < 0.04


def test_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


# -- memory ---------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="the mark is reset on Linux only")


def allocate(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


@linux
def test_a_deliberate_allocation_is_seen_and_a_former_one_is_not() -> None:
    allocate(256)
    assert measure.high_water(lambda: allocate(64)) / MIB == pytest.approx(64, abs=4)
    assert measure.high_water(lambda: allocate(64).sum()) / MIB == pytest.approx(64, abs=4)
    assert measure.high_water(lambda: None) / MIB == pytest.approx(0, abs=4)


def test_without_a_resettable_mark_the_largest_size_stands_in(monkeypatch) -> None:
    sizes = itertools.chain([100 * MIB, 164 * MIB])
    monkeypatch.setattr(measure, "_resettable", lambda: False)
    monkeypatch.setattr(measure, "_largest_so_far", lambda: next(sizes))
    assert measure.high_water(lambda: None) == 64 * MIB
    assert "a lower bound" in measure.memory_method()


@linux
def test_the_largest_size_so_far_is_in_bytes() -> None:
    assert 50 * MIB < measure._largest_so_far() < measure.available_memory() + 64 * 1024 * MIB


@linux
def test_a_process_of_its_own_sees_the_maps_of_the_naive_way() -> None:
    case = Case("maps", 1024, 1024, heads=16, width=8)  # a map is 64 MiB, p@v and H are small
    naive = measure.weigh_apart(case, "naive", threads=1, backward=False)
    assert naive == pytest.approx(3 * 64, abs=8)


def test_a_process_that_fails_says_why() -> None:
    case = Case("tiny", 8, 8)
    object.__setattr__(case, "dtype", "float8")  # what reads it over there refuses it
    with pytest.raises(RuntimeError, match="memory of sdpa could not be measured: ValueError: dty"):
        measure.weigh_apart(case, "sdpa", threads=1, backward=False)


def test_maps_that_do_not_fit_are_named_with_their_size(monkeypatch) -> None:
    needed = CONTENDERS["naive"].needs(CASES["full-16384"], backward=False)
    assert needed == 24 << 30
    assert CONTENDERS["naive"].needs(CASES["full-16384"], backward=True) == 48 << 30
    assert CONTENDERS["acutance"].needs(CASES["full-16384"], backward=True) == 0
    monkeypatch.setattr(measure, "available_memory", lambda: 64 << 30)
    assert measure.no_room(needed) == "needs 24.0 GiB, limit 6.0 GiB"
    assert measure.no_room(6 << 30) is None
    monkeypatch.setattr(measure, "available_memory", lambda: 1 << 30)
    assert measure.no_room(2 << 30) == "needs 2.0 GiB, limit 1.0 GiB"
    monkeypatch.setattr(measure, "available_memory", lambda: None)
    assert measure.no_room(2 << 30) is None


def test_available_memory_is_known_here() -> None:
    available = measure.available_memory()
    assert available is None or 2**26 < available < 2**50
