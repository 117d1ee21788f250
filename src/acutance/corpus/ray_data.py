"""Probe a Ray dataset on a cluster (the extra ``ray``): actors probe, the driver merges.

The state of a chunk depends only on its rows, so a task that Ray retries gives the same state; the
driver adds each chunk once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from acutance.corpus import texts as corpus
from acutance.corpus.load_model import TextModel, load_model
from acutance.corpus.probe_corpus import CorpusRun, Options
from acutance.corpus.ranks import packed, unpacked
from acutance.extras import install
from acutance.files import refuse_replacing
from acutance.probing.settings import ProbeSettings
from acutance.shapes import check_count
from acutance.summary.state import State

if TYPE_CHECKING:
    import ray.data

#: The name of a model, or a function that returns one.
Model: TypeAlias = str | Callable[[], TextModel] | None


def probe_dataset(
    dataset: ray.data.Dataset,
    model: str | Callable[[], TextModel] | None = None,
    *,
    column: str = "text",
    length: int | None = None,
    batch_size: int = 8,
    verify: bool = True,
    noise: bool = False,
    gaps: bool = False,
    structure: bool = False,
    examples: int = 0,
    actors: int = 2,
    cpus: float = 1,
    gpus: float = 0,
    batches_per_task: int = 16,
    save: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    about: Mapping[str, Any] | None = None,
) -> State:
    """Probe a text model on a Ray dataset, as ``acutance probe`` does on files.

    The driver cuts the texts into windows, which are numbered in the dataset's order; each actor
    loads the model once and probes chunks of windows; the driver merges their states as they come.
    Batches are those of one process over the same texts, so counts, extremes and histograms are
    exactly those of one process with as many threads, and means and spreads agree to rounding in
    float64.

    Args:
        dataset: rows with a column of text; empty texts are skipped.
        model: directory or name as for ``acutance probe``, available on every node; a function that
            returns a model, run on every node and on the driver; None is the embedded model.
        column: where the text is.
        length: tokens in a window; None is the model's longest, at most 512.
        batch_size: windows run at once.
        verify: rebuild each output and compare.
        noise: also measure ``noise_gain``.
        gaps: also measure how many keys hold 90 % of the weight, and its like.
        structure: also measure which positions and kinds of token the weight falls on.
        examples: sharpest rows of each head to keep.
        actors: number of actors, each with its own copy of the model.
        cpus: CPUs of each actor, also its number of threads.
        gpus: GPUs of each actor; if above 0, the model runs on ``cuda``.
        batches_per_task: batches whose state is sent, and on failure retried, as a unit.
        save: file that the state is saved to during the run, as by ``acutance probe --save``.
        resume: continue from the state saved in ``save``.
        overwrite: replace the file of ``save``.
        about: facts to keep with the summary.

    Returns:
        The state of all windows.

    Raises:
        ImportError: without ray.
        FileExistsError: if the file of ``save`` exists, and is neither resumed nor overwritten.
        ValueError: if the dataset has no such column or no text, or the file to resume belongs
            to a different run.
        RuntimeError: if a node loads another model than the driver, or a task fails.
    """
    try:
        import ray.data as ray_data
    except ImportError as error:
        raise ImportError(
            f"acutance.corpus.ray_data needs Ray; install it with: {install('ray')}"
        ) from error
    check_count("actors", actors, 1)
    check_count("batch_size", batch_size, 1)
    check_count("batches_per_task", batches_per_task, 1)
    refuse_replacing(save, resume=resume, overwrite=overwrite)
    loaded = _load(model, "cpu")
    texts = _texts(dataset, column, ray_data)
    options = Options(
        loaded.window(length),
        batch_size,
        "cuda" if gpus else "cpu",
        ProbeSettings(
            verify=verify, noise=noise, gaps=gaps, structure=structure, examples=examples
        ),
        save=save,
        resume=resume,
    )
    pieces = corpus.windows(texts, loaded.tokenizer, options.length)
    facts = {
        "text": [f"{len(texts)} texts of a Ray dataset"],
        "actors": actors,
        "acutance": version("acutance"),
        **(about or {}),
    }
    run = CorpusRun(loaded, pieces, options, facts)
    state = run.restored()
    tasks = _tasks(run, state, batches_per_task)
    digest, threads = run.run.settings["model"], max(1, int(cpus))
    run.release()
    del loaded
    if tasks:
        rows = ray_data.from_items(tasks, override_num_blocks=len(tasks)).map(
            _Prober,
            fn_constructor_args=(model, options, digest, threads, facts),
            concurrency=actors,
            num_cpus=cpus,
            num_gpus=gpus or None,
        )
        for row in rows.iter_rows():
            state = _add(run, state, row)
            if save is not None:
                state.save(save)
    assert state is not None
    return state


class _Prober:
    """A Ray actor that loads the model once and probes batches of windows."""

    def __init__(
        self, model: Model, options: Options, digest: str, threads: int, about: dict[str, Any]
    ) -> None:
        torch.set_num_threads(threads)
        self._loaded = _load(model, options.device)
        if (here := corpus.model_digest(self._loaded.model)) != digest:
            raise RuntimeError(
                f"this node loaded a different model than the driver: its digest is {here}, the "
                f"driver's {digest}"
            )
        self._options, self._about = options, about

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        """Probe the batches of a task with a new probe; return the summary with their numbers."""
        batches = [int(number) for number in task["batches"]]
        windows = [[int(token) for token in piece] for piece in task["windows"]]
        run = CorpusRun(self._loaded, windows, self._options, self._about)
        with run.probe, torch.inference_mode():
            for turn, number in enumerate(batches):
                summary = run.read(turn, number)
        return {"batches": batches, "summary": packed(summary)}


def _tasks(run: CorpusRun, state: State | None, most: int) -> list[dict[str, Any]]:
    """The batches that a state lacks, at most so many in a task, with their windows."""
    todo = run.todo(state.run.done if state else ())
    groups = [todo[first : first + most] for first in range(0, len(todo), most)]
    return [
        {"batches": group, "windows": [list(piece) for n in group for piece in run.batch(n)]}
        for group in groups
    ]


def _add(run: CorpusRun, state: State | None, row: Mapping[str, Any]) -> State:
    """Merge the summary of a task into the state, unless it is already there."""
    batches = [int(number) for number in row["batches"]]
    first = batches[0] * run.options.batch_size
    if state is not None and any(start <= first < stop for start, stop in state.run.done):
        return state  # a task that ran twice
    return run.added(state, unpacked(row["summary"]), batches)


def _texts(dataset: Any, column: str, ray_data: Any) -> list[corpus.Text]:
    """The dataset's non-empty texts, in its order, which numbers the windows."""
    execution = ray_data.DataContext.get_current().execution_options
    before, execution.preserve_order = execution.preserve_order, True
    texts = []
    try:
        for index, row in enumerate(dataset.iter_rows()):
            if column not in row:
                raise ValueError(
                    f"column: the dataset has {', '.join(map(repr, row))}, got {column!r}"
                )
            content = row[column]
            if not isinstance(content, str):
                raise ValueError(
                    f"column: {column!r} must contain text, got {type(content).__name__} in "
                    f"row {index}"
                )
            if content.strip():
                texts.append(corpus.Text(f"row {index}", content))
    finally:
        execution.preserve_order = before
    if not texts:
        raise ValueError("the dataset contains no text")
    return texts


def _load(model: Model, device: str) -> TextModel:
    """Load the model by name, or call the function that returns it."""
    if not callable(model):
        return load_model(model, device=device, head=False)
    loaded = model()
    loaded.model.to(device).eval()
    return loaded
