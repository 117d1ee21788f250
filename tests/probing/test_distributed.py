"""Two and three processes that share a corpus, against one that reads it all."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acutance.corpus.probe_corpus import run_windows
from acutance.corpus.ranks import RankError, Ranks, world
from acutance.probing import HeadSummary, all_reduce_summary, load, load_state

TOY = runpy.run_path(str(Path(__file__).with_name("toy.py")))
text_model, windows, options = TOY["text_model"], TOY["windows"], TOY["options"]
assert_same_rows = TOY["assert_same_rows"]
SIZES = (2, pytest.param(3, marks=pytest.mark.slow))


def run(here: Ranks, model: Any = None, pieces: Any = None, **given: Any) -> Any:
    return run_windows(model or text_model(), pieces or windows(), options(**given), {}, here)


def broken(rank: int, call: int) -> Any:
    """A model that fails on one rank's n-th batch."""
    model, calls = text_model(), []
    plain = model.model.forward

    def forward(**inputs: Any) -> Any:
        calls.append(1)
        if int(os.environ["RANK"]) == rank and len(calls) == call:
            raise ValueError("the third wheel came off")
        return plain(**inputs)

    model.model.forward = forward
    return model


def stopping(here: Ranks, rank: int) -> Any:
    """A model during whose second batch one rank is told to stop."""
    model, calls = text_model(), []
    plain = model.model.forward

    def forward(**inputs: Any) -> Any:
        calls.append(1)
        if here.rank == rank and len(calls) == 2:
            here.stop()
        return plain(**inputs)

    model.model.forward = forward
    return model


def work(folder: Path) -> None:
    """One rank, which says what it met in a file of its own."""
    torch.set_num_threads(1)
    met: dict[str, Any] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            met[name] = call()
        except Exception as error:
            met[name] = f"{type(error).__name__}: {error}"

    with world() as here:
        assert isinstance(here, Ranks)
        assert here.device("cuda") == f"cuda:{here.rank}"
        assert here.device("cpu") == "cpu"
        found = run(here, save=folder / "whole")
        met["state"] = found.state is not None
        met["finished"] = found.finished
        run(here, pieces=windows(2), save=folder / "short")  # ranks without a batch
        attempt("error", lambda: run(here, broken(here.size - 1, 2), save=folder / "error"))
        attempt("all", lambda: run(here, broken(here.rank, 1)))
        attempt("models", lambda: run(here, text_model(seed=here.rank)))
        part = run(here, stopping(here, here.size - 1), save=folder / "stopped")
        met["stopped"] = part.finished
        here._stop = False
        rest = run(here, save=folder / "stopped", resume=True)
        met["resumed"] = rest.resumed, rest.finished
        attempt("settings", lambda: run(here, save=folder / "whole", resume=True, batch_size=3))
        summary = run(Ranks(), pieces=windows()[4 * here.rank : 4 * here.rank + 4]).state.summary
        everywhere = all_reduce_summary(summary)
        everywhere.save(folder / f"all{here.rank}")
        all_reduce_summary(None if here.rank == 0 else summary).save(folder / f"but{here.rank}")
        attempt("nobody", lambda: all_reduce_summary(None))
        odd = summary if here.rank else replace(summary, metrics=tuple(reversed(summary.metrics)))
        attempt("metrics", lambda: all_reduce_summary(odd))
        told = replace(summary, about={"model": {1, 2}}) if here.rank == here.size - 1 else summary
        attempt("unsaid", lambda: all_reduce_summary(told))
        pair = dist.new_group([here.size - 2, here.size - 1])
        if here.rank >= here.size - 2:
            all_reduce_summary(summary, pair).save(folder / f"pair{here.rank}")
    torch.save(met, folder / f"met{here.rank}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def of_size(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder that processes, so many of them, wrote to; they start once for all tests."""

    @cache
    def started(size: int) -> Path:
        folder, port = tmp_path_factory.mktemp("ranks"), str(free_port())
        command = [sys.executable, __file__, str(folder), str(size), port]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
        try:
            assert [process.wait(timeout=240) for process in running] == [0] * size
        finally:
            for process in running:
                process.kill()
        return folder

    return started


@pytest.fixture(params=SIZES)
def ranks(request: pytest.FixtureRequest, of_size: Callable[[int], Path]) -> Any:
    """The folder that ranks wrote to, and what each met."""
    folder = of_size(request.param)
    return folder, [torch.load(folder / f"met{rank}") for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        yield run(Ranks()).state
    finally:
        torch.set_num_threads(threads)


def test_ranks_equal_one_process(ranks: Any, alone: Any) -> None:
    folder, met = ranks
    found = load_state(folder / "whole")
    assert found.run == alone.run
    assert found.run.complete
    assert_same_rows(found.summary, alone.summary)
    about = dict(found.summary.about)
    assert about.pop("ranks") == len(met)
    assert about == dict(alone.summary.about)
    assert [words["state"] for words in met] == [True] + [False] * (len(met) - 1)
    assert all(words["finished"] for words in met)


def test_ranks_without_a_batch(ranks: Any) -> None:
    found = load_state(ranks[0] / "short")
    assert found.run.done == ((0, 2),)
    assert_same_rows(found.summary, run(Ranks(), pieces=windows(2)).state.summary)


def test_an_error_on_one_rank_ends_all(ranks: Any) -> None:
    folder, met = ranks
    size = len(met)
    words = [said["error"] for said in met]
    assert words[-1] == "ValueError: the third wheel came off"
    assert set(words[:-1]) == {f"RankError: rank {size - 1}: the third wheel came off"}
    assert load_state(folder / "error").run.windows == 2 * size  # the round before is kept
    assert {said["all"] for said in met} == {"ValueError: the third wheel came off"}
    assert "have the same settings, but this rank is for another model" in met[1]["models"]
    assert "rank 1: all ranks of a run must have the same settings" in met[0]["models"]
    assert all("cannot be resumed with other settings" in said["settings"] for said in met)


def test_a_signal_to_one_rank_stops_all_between_batches(ranks: Any, alone: Any) -> None:
    folder, met = ranks
    assert not any(said["stopped"] for said in met)
    # two rounds of two windows for each rank; what the first rank resumed, it alone knows
    assert [said["resumed"] for said in met] == [(4 * len(met), True)] + [(0, True)] * (
        len(met) - 1
    )
    assert_same_rows(load_state(folder / "stopped").summary, alone.summary)


def merged(parts: list[HeadSummary]) -> HeadSummary:
    total = parts[0]
    for part in parts[1:]:
        total = total.merge(part)
    return total


def test_summaries_of_any_loop_are_reduced(ranks: Any) -> None:
    folder, met = ranks
    size = len(met)
    parts = [
        run(Ranks(), pieces=windows()[4 * rank : 4 * rank + 4]).state.summary
        for rank in range(size)
    ]
    for rank in range(size):
        assert_same_rows(load(folder / f"all{rank}"), merged(parts))
        assert_same_rows(load(folder / f"but{rank}"), merged(parts[1:]))
    for rank in (size - 2, size - 1):
        assert_same_rows(load(folder / f"pair{rank}"), merged(parts[-2:]))
    assert {said["nobody"] for said in met} == {
        "ValueError: no rank has a summary, because none captured attention"
    }
    assert all("merged only if they recorded the same metrics" in said["metrics"] for said in met)
    assert all(
        "ValueError: the summaries of ranks 0 to 1 do not merge" in said["metrics"] for said in met
    )
    unsaid = f"ValueError: rank {size - 1} cannot send its summary: Object of"
    assert all(unsaid in said["unsaid"] for said in met)


def test_reducing_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="which is not initialised"):
        all_reduce_summary(None)


def test_a_rank_that_was_killed_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("[/build/gloo/transport/tcp/pair.cc:537] Connection reset by peer")

    for name in ("all_reduce", "broadcast_object_list", "send", "recv", "get_rank"):
        monkeypatch.setattr(torch.distributed, name, gone)
    here = Ranks(0, 2, 0)

    def work() -> None:
        with here.together():
            pass

    for ask in (work, here.stopped, lambda: here.first(1), lambda: here.collect(None)):
        with pytest.raises(RankError, match=r"^another rank has exited or does not respond, .*"):
            ask()


def test_one_process_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with world() as here:
        assert (type(here), here.rank, here.size) == (Ranks, 0, 1)
        assert here.device("cuda") == "cuda"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with world() as here:
        assert type(here) is Ranks


@pytest.mark.slow
def test_torchrun_says_an_error_once(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "acutance", "probe", "--text", str(tmp_path / "missing.txt"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("acutance: ")]
    assert said == [f"acutance: there is no text file at {tmp_path / 'missing.txt'}"]
    assert not done.stdout


if __name__ == "__main__":
    where, world_size, at, number = sys.argv[1:]
    os.environ |= {
        "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": at,
    }  # fmt: skip
    work(Path(where))
    os._exit(0)  # an object that holds gloo's threads past shutdown would abort it
