"""Probe a Ray dataset on a cluster (the extra ``ray``): actors probe, the driver merges.

The state of a chunk depends only on its rows, so a task that Ray retries gives the same state; the
driver adds each chunk once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from acutance.corpus import load_model
from acutance.corpus import texts as corpus
from acutance.corpus.load_model import TextModel
from acutance.corpus.probe_corpus import Options, open_probe, restore, run_settings, tidy
from acutance.corpus.texts import model_digest
from acutance.extras import install
from acutance.files import refuse_replacing
from acutance.probing.settings import ProbeSettings
from acutance.summary.head_summary import HeadSummary
from acutance.summary.state import Run, State, from_parts

if TYPE_CHECKING:
    import ray.data

__all__ = ["probe_dataset"]


@dataclass(frozen=True)
class _Chunk:
    """Consecutive windows that one task probes, in whole batches of the corpus.

    Attributes:
        first: index of the first window in the corpus.
        pieces: the windows' tokens.
    """

    first: int
    pieces: Sequence[Sequence[int]]


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
    ray_data = _ray_data()
    for name, value in (("actors", actors), ("batch_size", batch_size),
                        ("batches_per_task", batches_per_task)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    refuse_replacing(save, resume=resume, overwrite=overwrite)
    loaded = _load(model, "cpu")
    window = loaded.window(length)
    texts = _texts(dataset, column, ray_data)
    pieces = corpus.windows(texts, loaded.tokenizer, window)
    device = "cuda" if gpus else "cpu"
    options = Options(
        window,
        batch_size=batch_size,
        device=device,
        probe=ProbeSettings(
            verify=verify, noise=noise, gaps=gaps, structure=structure, examples=examples
        ),
    )
    probe = open_probe(loaded, options)
    run = Run(run_settings(loaded, pieces, options, probe), len(pieces))
    joined = restore(save, run) if resume and save is not None else None
    if save is not None and resume:
        tidy(save)
    done = {i for start, stop in (joined.run.done if joined else ()) for i in range(start, stop)}
    chunks = _chunks(pieces, done, batch_size, batches_per_task)
    settings = {
        "model": model,
        "options": options,
        "digest": run.settings["model"],
        "threads": max(1, int(cpus)),
        "about": {
            "model": loaded.name,
            "architecture": type(loaded.model).__name__,
            "text": [f"{len(texts)} texts of a Ray dataset"],
            "window_length": window,
            "attention": run.settings["attention"],
            "dtype": run.settings["dtype"],
            "device": device,
            "actors": actors,
            **loaded.about,
            "acutance": version("acutance"),
            **(about or {}),
        },
    }
    del loaded
    if chunks:
        states = ray_data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
            _Prober,
            fn_constructor_kwargs=settings,
            batch_size=1,
            concurrency=actors,
            num_cpus=cpus,
            num_gpus=gpus or None,
        )
        for row in states.iter_rows():
            joined = _add(joined, row, run, pieces)
            if save is not None:
                joined.save(save)
    assert joined is not None
    return joined


class _Prober:
    """A Ray actor that loads the model once and probes chunks of windows."""

    def __init__(
        self,
        model: str | Callable[[], TextModel] | None,
        options: Options,
        digest: str,
        threads: int,
        about: dict[str, Any],
    ) -> None:
        torch.set_num_threads(threads)
        self._loaded = _load(model, options.device)
        if (model_digest_here := model_digest(self._loaded.model)) != digest:
            raise RuntimeError(
                "this node loaded a different model than the driver: its digest is "
                f"{model_digest_here}, the driver's {digest}"
            )
        self._options, self._about = options, about

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Probe chunks; return their states with the windows they cover."""
        from safetensors.torch import save

        states = []
        for first, pieces in zip(batch["first"], batch["pieces"], strict=True):
            summary = self._probe(_Chunk(int(first), [list(map(int, piece)) for piece in pieces]))
            header, tensors = summary.parts()
            states.append(bytes(save(tensors, metadata=header)))
        stops = [int(first) + len(pieces) for first, pieces in
                 zip(batch["first"], batch["pieces"], strict=True)]  # fmt: skip
        return {"first": [int(first) for first in batch["first"]], "stop": stops, "state": states}

    def _probe(self, chunk: _Chunk) -> HeadSummary:
        """Probe one chunk with a new probe."""
        loaded, options = self._loaded, self._options
        with open_probe(loaded, options) as probe, torch.inference_mode():
            for batch in corpus.batches(chunk.pieces, options.batch_size, loaded.pad):
                ids = batch.input_ids.to(options.device)
                mask = batch.attention_mask.to(options.device)
                probe.attention_mask = mask
                loaded.run(ids, mask)
        return probe.summary(dict(self._about))


def _add(joined: State | None, row: Mapping[str, Any], run: Run, pieces: Sequence[Any]) -> State:
    """Merge a chunk's state into the whole, unless it is already there."""
    first, stop = int(row["first"]), int(row["stop"])
    if joined is not None and any(a <= first and stop <= b for a, b in joined.run.done):
        return joined  # a task that ran twice
    tokens = sum(len(piece) for piece in pieces[first:stop])
    part = State(_unpack(row["state"]), replace(run, done=((first, stop),), tokens=tokens))
    return part.updated() if joined is None else joined.join(part)


def _unpack(raw: bytes) -> HeadSummary:
    """The summary from safetensors bytes."""
    from safetensors.torch import load

    size = int.from_bytes(raw[:8], "little")
    return from_parts(json.loads(raw[8 : 8 + size])["__metadata__"], load(raw))


def _chunks(
    pieces: Sequence[Sequence[int]], done: set[int], batch: int, most: int
) -> list[dict[str, Any]]:
    """Split the batches that are not done into chunks of consecutive ones.

    Example:
        >>> chunks = _chunks([[1], [2], [3], [4], [5]], {2, 3}, 2, 8)
        >>> [(chunk["first"], chunk["pieces"]) for chunk in chunks]
        [(0, [[1], [2]]), (4, [[5]])]
    """
    chunks: list[dict[str, Any]] = []
    for start in range(0, len(pieces), batch):
        if start in done:
            continue
        part = [list(piece) for piece in pieces[start : start + batch]]
        last = chunks[-1] if chunks else None
        if (
            last is not None
            and last["first"] + len(last["pieces"]) == start
            and len(last["pieces"]) < batch * most
        ):
            last["pieces"] += part
        else:
            chunks.append({"first": start, "pieces": part})
    return chunks


def _texts(dataset: Any, column: str, ray_data: Any) -> list[corpus.Text]:
    """The dataset's non-empty texts, in order."""
    with _in_order(ray_data):
        texts = []
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
    if not texts:
        raise ValueError("the dataset contains no text")
    return texts


@contextmanager
def _in_order(ray_data: Any) -> Iterator[None]:
    """Context in which Ray preserves the order of rows, which numbers the windows."""
    options = ray_data.DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _load(model: str | Callable[[], TextModel] | None, device: str) -> TextModel:
    """Load the model by name, or call the function that returns it."""
    if callable(model):
        loaded = model()
        loaded.model.to(device).eval()
        return loaded
    return load_model.load(model, device=device, head=False)


def _ray_data() -> Any:
    """Import ``ray.data``.

    Raises:
        ImportError: if Ray is not installed; the message says how to install it.
    """
    try:
        import ray.data
    except ImportError as error:
        raise ImportError(
            f"acutance.corpus.ray_data needs Ray; install it with: {install('ray')}"
        ) from error
    return ray.data
