"""Probing a Ray dataset: what an actor does, how its states are taken, and a cluster of two."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.corpus import texts as corpus
from acutance.corpus.load_model import TextModel
from acutance.corpus.probe_corpus import CorpusRun, Options, run_windows
from acutance.corpus.ranks import Ranks
from acutance.corpus.ray_data import _add, _Prober, _tasks, _texts
from acutance.probing import State, probe_dataset

TOY = str(Path(__file__).with_name("toy.py"))
SENTENCES = [f"line {index} " + "of a text that goes on " * (1 + index % 5) for index in range(23)]
OPTIONS = Options(12, batch_size=3)


class Words:
    """A tokenizer of words that travels between processes."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [sum(map(ord, word)) % 50 for word in text.split()]}

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return 0


def load(marker: str | None = None) -> TextModel:
    """The toy model; with a marker, the second batch of the first process to get there kills it."""
    loaded = replace(runpy.run_path(TOY)["text_model"](), tokenizer=Words())
    if marker is None:
        return loaded
    plain, calls = loaded.model.forward, []

    def forward(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and os.getpid() != int(os.environ["DRIVER"]):
            try:
                Path(marker).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os._exit(1)
        return plain(*args, **more)

    loaded.model.forward = forward
    return loaded


@pytest.fixture(scope="module")
def whole() -> Iterator[tuple[State, list[list[int]]]]:
    """One process with one thread over all texts, and its windows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load()
    texts = [corpus.Text(str(index), text) for index, text in enumerate(SENTENCES)]
    pieces = corpus.windows(texts, loaded.tokenizer, OPTIONS.length)
    state = run_windows(loaded, pieces, OPTIONS, {}, Ranks()).state
    assert state is not None
    yield state, pieces
    torch.set_num_threads(threads)


def assert_same(found: State, whole: State) -> None:
    runpy.run_path(TOY)["assert_same_rows"](found.summary, whole.summary)
    assert found.run.done == whole.run.done
    assert found.run.tokens == whole.run.tokens
    assert found.run.settings == whole.run.settings
    assert found.run.complete


@pytest.mark.parametrize("order", [1, -1])
def test_tasks_probed_apart_and_twice_make_one_run(
    whole: tuple[State, list[list[int]]], order: int
) -> None:
    state, pieces = whole
    prober = _Prober(load, OPTIONS, state.run.settings["model"], 1, {"model": "toy"})
    run = CorpusRun(load(), pieces, OPTIONS, {})
    tasks = _tasks(run, None, 2)
    assert len(tasks) > 3
    joined = None
    for task in tasks[::order]:
        for _ in range(2):  # Ray runs a task again: the actor has run it before
            row = prober(task)
            joined = _add(run, joined, row)
    assert joined is not None
    assert_same(joined, state)


def test_only_what_is_missing_is_cut_into_tasks(whole: tuple[State, list[list[int]]]) -> None:
    state, pieces = whole
    done = {3, 4, 5, 9, 10, 11}
    part = replace(state, run=replace(state.run, done=((3, 6), (9, 12))))
    tasks = _tasks(CorpusRun(load(), pieces, OPTIONS, {}), part, 2)
    held = [number for task in tasks for number in task["batches"]]
    assert held == [number for number in range(-(-len(pieces) // 3)) if number not in (1, 3)]
    windows = [piece for task in tasks for piece in task["windows"]]
    assert windows == [list(p) for index, p in enumerate(pieces) if index not in done]
    assert max(len(task["batches"]) for task in tasks) == 2


def test_another_model_on_a_node_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="this node loaded a different model than the driver"):
        _Prober(load, OPTIONS, "0" * 16, 1, {})


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ImportError, match=r'install it with: pip install "ray\[data\]"'):
        probe_dataset(None)  # type: ignore[arg-type]


# -- with ray itself ------------------------------------------------------------------------------

noisy = pytest.mark.filterwarnings("ignore")  # Ray's own: none of them is about what is tested


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is an extra")
    pytest.importorskip("ray.data", reason="ray[data] is an extra")
    os.environ["DRIVER"] = str(os.getpid())
    # a worker cannot import a test module: what it needs of it travels along
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def dataset(ray: Any) -> Any:
    return ray.data.from_items([{"text": text} for text in [*SENTENCES, "  "]])


@noisy
@pytest.mark.parametrize("killed", [False, True])
def test_a_cluster_reads_what_one_process_reads(
    cluster: Any, whole: tuple[State, Any], tmp_path: Path, killed: bool
) -> None:
    marker, save = tmp_path / "killed", tmp_path / "state.safetensors"
    model: Callable[[], TextModel] = functools.partial(load, str(marker)) if killed else load
    common: dict[str, Any] = {"length": 12, "batch_size": 3, "batches_per_task": 2, "save": save}
    found = probe_dataset(dataset(cluster), model, actors=2, **common)
    assert_same(found, whole[0])
    assert marker.exists() == killed
    again = probe_dataset(dataset(cluster), load, resume=True, **common)
    assert torch.equal(again.summary.moments.M2, found.summary.moments.M2)  # nothing was left to do


@noisy
def test_datasets_without_text_are_refused(cluster: Any) -> None:
    with pytest.raises(ValueError, match="column: the dataset has 'text', got 'body'"):
        probe_dataset(dataset(cluster), load, column="body")
    data = cluster.data
    with pytest.raises(ValueError, match="'text' must contain text, got int in row 0"):
        _texts(data.from_items([{"text": 3}]), "text", data)
    with pytest.raises(ValueError, match="the dataset contains no text"):
        _texts(data.from_items([{"text": " "}]), "text", data)
    with pytest.raises(ValueError, match="actors must be at least 1, got 0"):
        probe_dataset(dataset(cluster), load, actors=0)
