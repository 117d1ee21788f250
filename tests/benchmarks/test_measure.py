"""Turns, times and the memory of a call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acutance.comparison import timing
from acutance.comparison.timing import Seconds
from benchmarks.cpu import machine, measure, memory
from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.contenders import CONTENDERS
from benchmarks.cpu.records import Spread


def job(call: Callable[[], object]) -> measure.Job:
    return lambda: nullcontext(call)


def test_the_order_is_reversed_every_other_round() -> None:
    calls: list[str] = []
    jobs = {name: job(lambda name=name: calls.append(name)) for name in "abc"}
    rounds = list(measure.take_turns(jobs, 4, dict.fromkeys("abc", 1)))
    assert "".join(calls) == "abccbaabccba"
    assert [set(times) for times in rounds] == [set("abc")] * 4


def test_each_round_is_handed_over_when_it_is_whole() -> None:
    calls: list[str] = []
    jobs = {name: job(lambda name=name: calls.append(name)) for name in "ab"}
    first = next(measure.take_turns(jobs, 4, {"a": 2, "b": 1}))
    assert calls == ["a", "a", "b"]
    assert list(first) == ["a", "b"]


def test_short_calls_are_repeated_and_long_ones_are_not() -> None:
    jobs = {"short": job(lambda: None), "long": job(lambda: time.sleep(0.03))}
    repeats = measure.warm_up(jobs)
    assert repeats["long"] == 1
    assert 10 < repeats["short"] <= measure.MOST_REPEATS


class Clock:
    """Time that passes only when a call says so: wall and CPU seconds."""

    def __init__(self) -> None:
        self.now = [0.0, 0.0]

    def perf_counter(self) -> float:
        return self.now[0]

    def cpu_seconds(self) -> float:
        return self.now[1]

    def spend(self, wall: float, cpu: float) -> None:
        self.now[0] += wall
        self.now[1] += cpu

    def set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let measurements read this clock."""
        monkeypatch.setattr(time, "perf_counter", self.perf_counter)
        for module in (timing, machine):
            monkeypatch.setattr(module, "cpu_seconds", self.cpu_seconds)


def test_preparing_a_turn_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.set(monkeypatch)

    @contextmanager
    def slow_to_prepare() -> Iterator[Callable[[], object]]:
        clock.spend(100.0, 100.0)
        yield lambda: clock.spend(3.0, 2.0)
        clock.spend(100.0, 100.0)

    (times,) = measure.take_turns({"a": slow_to_prepare}, 1, {"a": 4})
    assert times["a"] == Seconds(wall=3.0, cpu=2.0)


def test_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


# -- memory ---------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="the mark is reset on Linux only")


@linux
def test_a_process_of_its_own_sees_the_maps_of_the_naive_way() -> None:
    case = Case("maps", 1024, 1024, heads=16, width=8)  # a map is 64 MiB, p@v and H are small
    naive = memory.weigh_apart(case, "naive", threads=1)
    assert naive == pytest.approx(3 * 64, abs=8)


@pytest.mark.slow
def test_a_process_that_fails_says_why() -> None:
    case = Case("tiny", 8, 8)
    object.__setattr__(case, "dtype", "float8")  # what reads it over there refuses it
    with pytest.raises(RuntimeError, match="memory of sdpa could not be measured: ValueError: dty"):
        memory.weigh_apart(case, "sdpa", threads=1)


def system_has(monkeypatch: pytest.MonkeyPatch, kib: int | None) -> None:
    """Have the system say how much memory is available, or refuse to."""

    def read(path: Path, **_: object) -> str:
        if kib is None:
            raise OSError("no such file")
        return f"MemTotal: 1 kB\nMemAvailable: {kib} kB\n"

    def refuse(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sysconf", refuse)


def test_maps_that_do_not_fit_are_named_with_their_size(monkeypatch) -> None:
    long = replace(CASES["full-16384"], heads=8)
    needed = CONTENDERS["naive"].needs(long)
    assert needed == 24 << 30
    assert CONTENDERS["naive"].needs(replace(long, timing="backward")) == 48 << 30
    assert CONTENDERS["acutance"].needs(long) == 0
    system_has(monkeypatch, 64 << 20)
    assert memory.no_room(needed) == "needs 24.0 GiB, limit 6.0 GiB"
    assert memory.no_room(6 << 30) is None
    system_has(monkeypatch, 1 << 20)
    assert memory.no_room(2 << 30) == "needs 2.0 GiB, limit 1.0 GiB"
    system_has(monkeypatch, None)
    assert memory.no_room(2 << 30) is None


def test_available_memory_is_known_here() -> None:
    available = memory.available_memory()
    assert available is None or 2**26 < available < 2**50


# -- the machine ----------------------------------------------------------------------------------


def test_the_peak_is_above_what_one_product_reaches() -> None:
    former = torch.get_num_threads()
    peak = machine.measure_peak(1, ["float16"])
    assert torch.get_num_threads() == former
    assert list(peak.gflops) == ["float32"]  # float16 is multiplied in float32
    assert 0.1 < peak.gflops["float32"] < 1e4
    assert 0.005 < peak.exps < 1e3
    assert peak.of("float16") == peak.gflops["float32"]


def test_rates_are_operations_over_time(monkeypatch) -> None:
    clock = Clock()
    clock.set(monkeypatch)
    monkeypatch.setattr(torch, "mm", lambda left, right: clock.spend(9.0, len(left) / 1e6))
    monkeypatch.setattr(
        torch.nn.functional, "conv2d", lambda *given, **options: clock.spend(9.0, 1.0)
    )
    # n³ · 2 operations in n / 1e6 seconds: the larger square is the faster one
    assert machine._products(torch.float32, 1) == pytest.approx(2e-3 * 1024**2)
