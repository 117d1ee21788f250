"""Which kernel runs: the rule, the times on disk, when it is timed, and that it is the fastest."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from acutance import attention, kernels, row_statistics
from acutance.kernels import bindings, library, selection
from acutance.kernels.bindings import Library
from acutance.kernels.selection import Selection, fastest, interleaved, timing
from acutance.kernels.selection.timing import DTYPE_CODES, PASSES, sample, seconds

FOUND = library.load()
needs_native = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
CPUS = () if isinstance(FOUND, str) else FOUND.cpus
WIDEST = ("avx512_bf16", "avx512", "baseline")


class FakeLibrary:
    """A library of three instruction sets that remembers what it was told."""

    cpus = WIDEST
    compiler = "a compiler"

    def __init__(self, path: Path) -> None:
        self.path = path / "library.so"
        self.path.write_text("a library")
        self.named: str | None = None
        self.most_queries = math.inf
        self.chosen: dict[tuple[str, str], str] = {}
        self.costs: dict[str, float] = {}
        self.calls: list[str] = []
        self.forward, self.backward = self._forward, self._backward

    def _forward(self, call: bytes, sums: bytes) -> int:
        self.calls.append("forward")
        return 0

    def _backward(self, call: bytes, gradients: bytes) -> int:
        self.calls.append("backward")
        return 0

    def choose(self, code: int, dtype: int, place: int) -> None:
        self.chosen[list(DTYPE_CODES)[dtype], PASSES[code]] = self.cpus[place]

    def row_cost(self, dtype: int, cost: float) -> None:
        self.costs[list(DTYPE_CODES)[dtype]] = cost


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A library whose pairs of bfloat16 are slow, and whose narrow gradients are the fastest."""
    speed = {
        ("bfloat16", "forward"): {"avx512_bf16": 9.3, "avx512": 5.6, "baseline": 40.0},
        ("float32", "backward"): {"avx512_bf16": 3.0, "avx512": 3.0, "baseline": 2.0},
        ("float32", "decode"): {"avx512_bf16": 1.02, "avx512": 1.0, "baseline": 9.0},
    }

    def timed(library: Any, cpu: str, name: str, made: Any) -> Callable[[], float]:
        usual = {"avx512_bf16": 1.0, "avx512": 1.0, "baseline": 4.0}
        return lambda: 1e-4 * speed.get((made, name), usual)[cpu]

    monkeypatch.setenv("ACUTANCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACUTANCE_MEASURE", "auto")
    instead = {
        "sample": lambda dtype, name, queries, keys: dtype,
        "seconds": timed,
        "_time_blocked": lambda: {"16": 2e-5, "256": 3e-4},
    }
    for name, function in instead.items():
        monkeypatch.setattr(selection, name, function)
    return FakeLibrary(tmp_path)


def as_library(fake: FakeLibrary) -> Library:
    return cast(Library, fake)


# -- the rule ----------------------------------------------------------------------------------


def test_the_widest_stays_unless_another_is_clearly_faster() -> None:
    assert fastest({"avx512_bf16": 0.93, "avx512": 0.56}, WIDEST) == "avx512"
    assert fastest({"avx512_bf16": 1.04, "avx512": 1.0}, WIDEST) == "avx512_bf16"
    assert fastest({"avx512_bf16": 1.06, "avx512": 1.0}, WIDEST) == "avx512"
    assert fastest({"avx512_bf16": 1.06, "avx512": 1.04, "baseline": 1.0}, WIDEST) == "avx512"
    assert fastest({}, WIDEST) is None


def test_turns_are_taken_and_the_hopeless_get_one() -> None:
    order: list[str] = []
    times = {"a": iter([5.0, 3.0, 4.0, 9.0, 9.0]), "b": iter([4.0, 6.0, 2.0, 9.0, 9.0])}

    def run(name: str) -> Callable[[], float]:
        def once() -> float:
            order.append(name)
            return 50.0 if name == "slow" else next(times[name])

        return once

    assert interleaved({name: run(name) for name in ("a", "b", "slow")}) == {
        "a": 3.0,
        "b": 2.0,
        "slow": 50.0,
    }
    assert order == ["a", "b", "slow", *["a", "b"] * 4]


def test_each_dtype_and_pass_has_its_own_kernel(fake: FakeLibrary) -> None:
    chosen = Selection(as_library(fake))
    assert chosen.choice("bfloat16", "forward").cpu == "avx512_bf16"  # nothing timed: the widest
    chosen.complete()
    assert {key for key, cpu in fake.chosen.items() if cpu != "avx512_bf16"} == {
        ("bfloat16", "forward"),
        ("float32", "backward"),
    }
    assert fake.chosen["bfloat16", "forward"] == "avx512"
    assert fake.chosen["float32", "backward"] == "baseline"
    found = chosen.choice("bfloat16", "forward")
    assert (found.cpu, found.seconds["avx512_bf16"]) == ("avx512", pytest.approx(9.3e-4))
    assert len(chosen.choices()) == 12
    fake.named = "baseline"  # ACUTANCE_CPU
    assert {choice.cpu for choice in chosen.choices()} == {"baseline"}


def test_a_row_among_few_costs_what_it_took(fake: FakeLibrary) -> None:
    Selection(as_library(fake)).complete()
    lane, row = 1e-4 / (64 * 512), 1e-4 / (8 * (512 + 64))
    assert fake.costs["float16"] == pytest.approx(row / lane)


@pytest.mark.parametrize(
    ("native", "few", "many", "most"),
    [
        (1e-6, 1e-4, 8e-4, math.inf),  # plain PyTorch takes 2.9e-6 a query
        (4e-6, 0.6e-4, 5.4e-4, 14.0),  # 2e-6 a query and 2.8e-5 to start
        (4e-6, 1e-5, 5e-4, 0.0),
    ],
)
def test_plain_pytorch_takes_over_where_it_is_faster(
    native: float, few: float, many: float, most: float
) -> None:
    assert selection._most_queries(native, few, many) == pytest.approx(most, abs=1e-9)


def test_times_that_a_coarse_clock_rounded_decide_nothing() -> None:
    """Windows counts CPU time in steps of 16 ms."""
    for few, many in ((0.0, 0.0), (0.016, 0.0), (0.016, 0.016), (0.0, 0.016)):
        assert selection._most_queries(1e-6, few, many) == math.inf


def test_the_number_of_queries_decides_the_backend(limits: Callable[..., None]) -> None:
    limits(library.load(), most_queries=20.0)
    few, many = torch.ones(1, 1, 20, 8), torch.ones(1, 1, 21, 8)
    for value in (None, few):  # with noise a call takes the long way
        noise = value is not None
        assert row_statistics(few, few, value, noise=noise).backend == "native"
    assert row_statistics(many, many).backend == "blocked"
    assert row_statistics(many, many, many, noise=True).backend == "blocked"
    assert row_statistics(many, many, backend="native").backend == "native"


# -- the times on disk -------------------------------------------------------------------------


def test_times_are_kept_for_the_next_process(fake: FakeLibrary) -> None:
    first = Selection(as_library(fake))
    first.measure("bfloat16")
    again = FakeLibrary(fake.path.parent)
    os.utime(again.path, ns=(fake.path.stat().st_atime_ns, fake.path.stat().st_mtime_ns))
    timing.write(as_library(again), first.times)
    kept = timing.read(as_library(again))
    assert kept == first.times
    next_one = Selection(as_library(again), kept)
    assert again.chosen["bfloat16", "forward"] == "avx512"
    next_one.measure("float32")
    assert set(timing.read(as_library(again)) or ()) == {"bfloat16", "float32"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: "\x00\xff",
        lambda text: text.replace("kernel-times/1", "kernel-times/0"),
        lambda text: text.replace('"torch": "', '"torch": "other '),
        lambda text: text.replace('"processor": "', '"processor": "other '),
        lambda text: text.replace('"library": "', '"library": "other '),
        lambda text: text.replace("0.00", "-0.00"),
        lambda text: text.replace("0.00", "1e999, 0.00"),
        lambda text: json.dumps({**json.loads(text), "seconds": {"bfloat16": {"forward": 3}}}),
        lambda text: "[" * 50_000,
        lambda text: text + " " * 100_000,
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_written_anew(
    fake: FakeLibrary, damage: Callable[[str], str]
) -> None:
    chosen = Selection(as_library(fake))
    chosen.measure("bfloat16")
    path = timing.cache_file(as_library(fake))
    assert path is not None
    path.write_text(damage(path.read_text()))
    assert timing.read(as_library(fake)) is None
    timing.write(as_library(fake), chosen.times)
    assert timing.read(as_library(fake)) == chosen.times


def test_times_of_other_kernels_are_left_out(fake: FakeLibrary) -> None:
    whole = Selection(as_library(fake))
    whole.complete()
    times = json.loads(json.dumps(whole.times))
    del times["float32"]["decode"]["avx512"]
    times["float64"]["forward"]["avx10"] = 1e-9
    times["float8"] = times["float16"]
    assert set(Selection(as_library(fake), times).times) == {"bfloat16", "float16"}


def test_a_folder_that_cannot_be_written_is_no_error(
    fake: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing"):
        monkeypatch.setenv("ACUTANCE_CACHE", str(folder))
        Selection(as_library(fake)).measure("bfloat16")
        assert timing.read(as_library(fake)) is None
        assert fake.chosen["bfloat16", "forward"] == "avx512"


def test_processes_that_write_at_once_leave_a_whole_file(fake: FakeLibrary) -> None:
    chosen = Selection(as_library(fake))
    chosen.complete()

    def write(_: int) -> bool:
        timing.write(as_library(fake), chosen.times)
        return timing.read(as_library(fake)) == chosen.times

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, range(80)))
    path = timing.cache_file(as_library(fake))
    assert path is not None
    assert list(path.parent.iterdir()) == [path]


def test_the_folder_of_caches(monkeypatch: pytest.MonkeyPatch, fake: FakeLibrary) -> None:
    monkeypatch.delenv("ACUTANCE_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    path = timing.cache_file(as_library(fake))
    assert path is not None
    assert path.parent == Path("/somewhere/acutance")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    path = timing.cache_file(as_library(fake))
    assert path is not None
    assert path.parent == Path("/somebody/.cache/acutance")


# -- when it is timed --------------------------------------------------------------------------


def packed(dtype: str, queries: int, keys: int) -> bytes:
    """The call of eight heads of width 64."""
    return bindings.CALL.pack(
        abi=bindings.ABI, dtype=DTYPE_CODES[dtype], batch=1, heads=8, group=1, queries=queries,
        keys=keys, width=64, value_width=64,
    )  # fmt: skip


def test_a_dtype_is_timed_once_it_has_had_enough_work(fake: FakeLibrary) -> None:
    chosen = selection.install(as_library(fake))
    plain = FakeLibrary._forward
    for _ in range(50):
        fake.forward(packed("float32", 16, 16), b"")
    assert chosen.times == {}
    fake.forward(packed("float32", 1024, 1024), b"")
    assert set(chosen.times) == {"float32"}
    fake.backward(packed("bfloat16", 4096, 4096), b"")
    assert set(chosen.times) == {"float32", "bfloat16"}
    assert len(fake.calls) == 52
    assert fake.forward != fake._forward  # float64 and float16 may come
    for dtype in ("float64", "float16"):
        fake.forward(packed(dtype, 4096, 4096), b"")
    assert fake.forward == fake._forward
    assert fake.forward.__func__ is plain
    assert fake.backward == fake._backward


def test_a_process_of_small_calls_is_let_alone(fake: FakeLibrary) -> None:
    chosen = selection.install(as_library(fake))
    for _ in range(selection.MOST_CALLS):
        fake.forward(packed("float32", 4, 4), b"")
    assert chosen.times == {}
    assert fake.forward == fake._forward


def test_a_process_with_times_on_disk_counts_nothing(fake: FakeLibrary) -> None:
    selection.install(as_library(fake)).complete()
    again = FakeLibrary(fake.path.parent)
    os.utime(fake.path, ns=(1, 1))
    timing.write(as_library(again), Selection(as_library(fake)).times)
    selection.install(as_library(fake)).complete()
    chosen = selection.install(as_library(again))
    assert len(chosen.times) == 4
    assert again.forward == again._forward
    assert again.chosen["bfloat16", "forward"] == "avx512"


def test_the_environment_decides(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    selection.install(as_library(fake)).complete()
    monkeypatch.setenv("ACUTANCE_MEASURE", "never")
    chosen = selection.install(as_library(fake))
    chosen.complete()
    assert chosen.times == {}
    monkeypatch.setenv("ACUTANCE_MEASURE", "again")
    assert selection.install(as_library(fake)).times == {}
    monkeypatch.setenv("ACUTANCE_MEASURE", "sometimes")
    with pytest.raises(
        ValueError, match=r"^ACUTANCE_MEASURE must be one of 'auto', 'never', 'again', "
    ):
        selection.install(as_library(fake))
    monkeypatch.setenv("ACUTANCE_MEASURE", "auto")
    fake.named = "avx512"
    assert selection.install(as_library(fake)).choice("float32", "forward").cpu == "avx512"


@needs_native
def test_a_first_call_times_nothing_and_a_large_one_does(tmp_path: Path) -> None:
    code = """
import torch, acutance
from acutance.kernels import library
query = torch.ones(1, 8, 16, 64)
acutance.attention(query, query, query)
assert not library.load().selection.times
assert not list(__import__("pathlib").Path(FOLDER).iterdir())
query = torch.ones(1, 8, 1024, 64)
acutance.attention(query, query, query)
assert set(library.load().selection.times) == {"float32"}
(kept,) = __import__("pathlib").Path(FOLDER).iterdir()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"FOLDER = {str(tmp_path)!r}\n{code}"],
        env=os.environ | {"ACUTANCE_CACHE": str(tmp_path), "ACUTANCE_MEASURE": "auto"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- that it is the fastest --------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The library with its kernels timed anew; afterwards as it was."""
    assert not isinstance(FOUND, str)
    monkeypatch.setenv("ACUTANCE_CACHE", str(tmp_path))
    monkeypatch.setenv("ACUTANCE_MEASURE", "again")
    former = FOUND.selection, FOUND.most_queries, torch.get_num_threads()
    torch.set_num_threads(1)
    FOUND.selection = Selection(FOUND)
    yield FOUND
    FOUND.selection, FOUND.most_queries, threads = former
    torch.set_num_threads(threads)
    FOUND.use_cpu(FOUND.named)
    for dtype in DTYPE_CODES.values():
        FOUND.row_cost(dtype, 0.0)
        for code in range(len(PASSES)):
            FOUND.choose(code, dtype, -1)


def call_of(dtype: torch.dtype, name: str) -> Callable[[], object]:
    """Public calls that spend their time in one pass."""
    rows = 1 if name == "decode" else 192
    query, key = (
        torch.randn(1, 2, size, 64, dtype=torch.float32).to(dtype) for size in (rows, 768)
    )
    if name != "backward":
        return lambda: attention(query, key, key)
    for tensor in (query, key):
        tensor.requires_grad_()
    out = attention(query, key, key)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (query, key), grad, retain_graph=True)


def over_best(loaded: Library, call: Callable[[], object]) -> float:
    """How many times longer a call takes by what is chosen than by the best of the kernels."""

    def once(name: str | None) -> Callable[[], float]:
        def run() -> float:
            loaded.use_cpu(name)
            call()
            start = time.thread_time()
            for _ in range(3):
                call()
            return time.thread_time() - start

        return run

    most = loaded.most_queries
    try:
        least = interleaved({"auto": once(None)} | {name: once(name) for name in loaded.cpus})
    finally:
        loaded.use_cpu(None)
        loaded.most_queries = most
    return least["auto"] / min(least[name] for name in loaded.cpus)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_is_within_a_tenth_of_the_best_kernel(real: Library, dtype: torch.dtype) -> None:
    """A few tries, since the machine may be busy; a wrong choice fails every one of them."""
    assert real.selection is not None
    name = str(dtype).removeprefix("torch.")
    real.selection.measure(name)
    for each in PASSES:
        call = call_of(dtype, each)
        tries = (over_best(real, call) for _ in range(6))
        assert any(ratio <= 1.1 for ratio in tries), each


@needs_native
@pytest.mark.skipif("avx2" not in CPUS, reason="one kernel alone cannot be the wrong one")
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_wrong_choice_is_seen(real: Library, name: str) -> None:
    """The narrowest kernel planted for one pass: the test above would fail."""
    real.choose(PASSES.index(name), DTYPE_CODES["float32"], real.cpus.index("baseline"))
    assert all(over_best(real, call_of(torch.float32, name)) > 1.1 for _ in range(2))


@needs_native
@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
def test_every_sample_runs_by_every_kernel(real: Library, dtype: str) -> None:
    for name in PASSES:
        made = sample(dtype, name, 3, 40)
        for cpu in real.cpus:
            assert real.run(real.cpus.index(cpu), PASSES.index(name), made.call, made.result) == 0
            assert 0.0 < seconds(real, cpu, name, made)() < 1.0


@needs_native
def test_a_name_holds_until_it_is_taken_back(real: Library) -> None:
    assert real.selection is not None
    real.selection.measure("float32")
    real.selection.times["float32"]["blocked"] = {"16": 1e-9, "256": 2e-9}
    real.use_cpu(None)
    assert real.most_queries < 16  # plain PyTorch would be the faster one
    real.use_cpu("baseline" if "baseline" in real.cpus else real.cpus[0])
    assert real.most_queries in (bindings.MOST_QUERIES_OF_BASELINE, math.inf)
    real.use_cpu(None)
    assert real.most_queries < 16


@needs_native
def test_info_tells_what_was_chosen_and_why(real: Library) -> None:
    found = kernels.info()
    assert len(found.choices) == len(DTYPE_CODES) * len(PASSES)
    for choice in found.choices:
        assert choice.cpu == fastest(choice.seconds, real.cpus)
        assert set(choice.seconds) == set(real.cpus)
    assert found.times_file is not None
    assert Path(found.times_file).is_file()
    text = str(found)
    (line,) = [line for line in text.splitlines() if line.startswith("bfloat16")]
    assert "decode" in line
    assert " µs" in line
    assert found.times_file in text


@needs_native
def test_kernels_chosen_apart_are_still_right(real: Library) -> None:
    """Forward by one instruction set, gradients by another, against float64."""
    for code, cpu in enumerate((real.cpus[-1], real.cpus[0], real.cpus[-1])):
        real.choose(code, DTYPE_CODES["float32"], real.cpus.index(cpu))
    for rows in (1, 40):
        query, key = torch.randn(1, 2, rows, 16), torch.randn(1, 2, 50, 16)

        def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
            leaves = [part.clone().requires_grad_() for part in inputs]
            stats = row_statistics(*leaves)
            return torch.autograd.grad(stats.entropy.sum(), leaves)

        for ours, exact in zip(
            gradients(query, key), gradients(query.double(), key.double()), strict=True
        ):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)
