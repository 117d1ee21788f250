"""Probe a model over a corpus: shards, batches, saved states and resuming, on one or many ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from acutance.corpus.load_model import TextModel
from acutance.corpus.ranks import Ranks
from acutance.corpus.texts import model_digest, padded, text_digest
from acutance.files import tidy
from acutance.probing.probe import Probe
from acutance.probing.settings import ProbeSettings
from acutance.summary.head_summary import HeadSummary
from acutance.summary.state import WHOLE, Run, Shard, State, load_state, ranges

#: Options of a probe by which it reads less than everything, or computes it in another way.
_FEWER = ("layers", "heads", "max_rows", "seed", "provide")
_EVERYTHING = ProbeSettings(verify=True)


@dataclass(frozen=True)
class Options:
    """Options of a run over a corpus.

    Attributes:
        length: tokens per window.
        batch_size: windows per batch.
        device: device on which this rank runs the model.
        probe: options of the probe; the model's tokenizer is added.
        every: run one of this many windows, the first of each group.
        shard: the part of the corpus to run.
        save: file to which the state is saved during the run.
        save_every: least number of windows between two writes; batches are not split.
        resume: continue from the state in ``save``.
        law: a text that identifies the scaling law applied to the model; None for none.
    """

    length: int
    batch_size: int = 8
    device: str = "cpu"
    probe: ProbeSettings = _EVERYTHING
    every: int = 1
    shard: Shard = WHOLE
    save: str | os.PathLike[str] | None = None
    save_every: int = 1
    resume: bool = False
    law: str | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    def batch(self, pieces: Sequence[Sequence[int]], number: int) -> Sequence[Sequence[int]]:
        """The windows of one batch of the corpus."""
        return pieces[number * self.batch_size : (number + 1) * self.batch_size]

    def todo(self, windows: int, done: Iterable[tuple[int, int]]) -> list[int]:
        """Numbers of the shard's batches of so many windows, without ranges that are done."""
        before = {index for start, stop in done for index in range(start, stop)}
        batches = -(-windows // self.batch_size)
        return [n for n in self.shard.of(batches) if n * self.batch_size not in before]

    def left_out(self) -> dict[str, Any]:
        """The options that restrict what is read, by name."""
        options = {name: getattr(self.probe, name) for name in _FEWER}
        if self.probe.max_rows is None:
            options["seed"] = 0  # nothing is drawn
        changed = {
            name: value for name, value in options.items() if value != getattr(_EVERYTHING, name)
        }
        return changed if self.every == 1 else {"every": self.every, **changed}


@dataclass(frozen=True)
class Outcome:
    """The result of a run; ranks other than the first know only whether it finished.

    Attributes:
        state: the summary and the windows it covers; None on other ranks.
        finished: whether every requested window is done.
        resumed: number of windows done in earlier runs.
        probe: the probe; None if nothing was left to run.
    """

    state: State | None
    finished: bool
    resumed: int
    probe: Probe | None


def run_windows(
    loaded: TextModel,
    pieces: Sequence[Sequence[int]],
    options: Options,
    about: dict[str, Any],
    world: Ranks,
    advance: Callable[[int, int, bool], None] = lambda *_: None,
) -> Outcome:
    """Run a model over windows of tokens, batch by batch, and return the state.

    Batches are the same for any shard and number of ranks, so counts and extremes equal those of
    one process with as many threads.

    Args:
        loaded: the model.
        pieces: windows of tokens, the same on every rank.
        options: options of the run.
        about: facts to store in the summary.
        world: the ranks.
        advance: called after each batch with its number of tokens, its number of windows, and
            whether it ran now rather than in the resumed run.

    Returns:
        The outcome; the state so far if a signal or Ctrl-C stopped the run early.

    Raises:
        KeyboardInterrupt: if Ctrl-C came before any window was done.
        ValueError: if the state to resume belongs to another run.
    """
    with world.together():
        probe = open_probe(loaded, options)
        probe.expect_tokens(max(map(len, pieces), default=0))
        run = Run(run_settings(loaded, pieces, options, probe), len(pieces), shard=options.shard)
    with world.together():
        if difference := run.difference(world.first(run), "this rank", "the first rank"):
            raise ValueError(f"all ranks of a run must have the same settings, but {difference}")
        base = None
        if world.rank == 0 and options.resume and options.save is not None:
            base = restore(options.save, run)
            tidy(options.save)
        batches = -(-len(pieces) // options.batch_size)
        if not options.shard.of(batches):
            raise ValueError(
                f"shard {options.shard} has no windows: the text has {len(pieces)} windows, in "
                f"{batches} batches of {options.batch_size}"
            )
    done = world.first(() if base is None else base.run.done)
    todo = options.todo(len(pieces), done)
    for start, stop in done:
        advance(sum(len(piece) for piece in pieces[start:stop]), stop - start, False)
    facts = about | options.left_out() | ({"ranks": world.size} if world.size > 1 else {})
    # what was read and from which batches changes in one step: an interrupt cannot part them
    progress: tuple[HeadSummary | None, tuple[int, ...]] = (None, ())

    def state_so_far() -> State | None:
        """The state of all ranks, on the first one; saved if the run saves."""
        summary, numbers = progress
        with world.together():
            state, joined = base, world.collect(summary)
            if joined is not None and world.rank == 0:
                state = added(base, joined, numbers, run, pieces, options)
            if state is not None and options.save is not None:
                state.save(options.save)
        return state

    finished, unsaved = True, 0
    try:
        with ExitStack() as context:
            with world.together():
                if world.rank < len(todo):
                    context.enter_context(probe)
                    context.enter_context(torch.inference_mode())
            for start in range(0, len(todo), world.size):  # in rounds of one batch for each rank
                if world.stopped():
                    finished = False
                    break
                turn = todo[start : start + world.size]
                with world.together():
                    summary, numbers = progress
                    if world.rank < len(turn):
                        mine = turn[world.rank]
                        windows = options.batch(pieces, mine)
                        summary = run_batch(loaded, probe, mine, windows, options, facts)
                    progress = summary, (*numbers, *turn)
                lengths = [len(piece) for number in turn for piece in options.batch(pieces, number)]
                unsaved += len(lengths)
                advance(sum(lengths), len(lengths), True)
                if options.save is not None and unsaved >= options.save_every:
                    state_so_far()
                    unsaved = 0
            else:
                with world.together():
                    context.close()  # raises if the model ran no attention that can be read
    except KeyboardInterrupt:
        if not progress[1] and base is None:
            raise
        finished = False
    resumed = 0 if base is None else base.run.windows
    return Outcome(state_so_far(), finished, resumed, probe if todo else None)


def open_probe(loaded: TextModel, options: Options) -> Probe:
    """Create the probe of a run, without entering it."""
    return Probe(loaded.model, replace(options.probe, tokenizer=loaded.tokenizer))


def run_settings(
    loaded: TextModel, pieces: Sequence[Sequence[int]], options: Options, probe: Probe
) -> dict[str, Any]:
    """The settings that determine the results of a window, in order of comparison."""
    probing = options.probe
    settings: dict[str, Any] = {
        "model": model_digest(loaded.model),
        "length": options.length,
        "text": text_digest(pieces),
        "batch_size": options.batch_size,
        "verify": probing.verify,
        "noise": probing.noise,
        **_arithmetic(loaded),
        "metrics": list(probe.metrics),
    }
    if probing.examples:
        settings["examples"] = probing.examples
    if probing.spans:  # as the command line writes them
        settings["spans"] = [
            f"{name}={start}:{'' if stop is None else stop}"
            for name, (start, stop) in probing.spans.items()
        ]
    maps: Mapping[Any, Any] = probing.maps or {}
    if maps:
        settings["maps"] = [f"{name}:{list(rows)}" for name, rows in maps.items()]
    if options.law is not None:
        settings["law"] = options.law
    return settings | options.left_out()


def _arithmetic(loaded: TextModel) -> dict[str, str]:
    """Attention implementation, empty if unknown, and dtype of the model's first parameter."""
    config, parameter = getattr(loaded.model, "config", None), next(loaded.model.parameters())
    attention = str(getattr(config, "_attn_implementation", ""))
    return {"attention": attention, "dtype": str(parameter.dtype).removeprefix("torch.")}


def run_batch(
    loaded: TextModel,
    probe: Probe,
    number: int,
    pieces: Sequence[Sequence[int]],
    options: Options,
    about: dict[str, Any],
) -> HeadSummary:
    """Run one batch in an entered probe.

    Args:
        loaded: the model.
        probe: its probe.
        number: of the batch in the corpus, which determines the rows that are drawn.
        pieces: windows of the batch.
        options: options of the run.
        about: facts to store in the summary, beside those of the model.

    Returns:
        The probe's summary so far.

    Raises:
        ProbeError: if it saw no attention.
    """
    probe.number_passes(number)
    ids, mask = (part.to(options.device) for part in padded(pieces, loaded.pad))
    probe.attention_mask = mask
    loaded.run(ids, mask)
    return probe.summary(
        {
            "model": loaded.name,
            "architecture": type(loaded.model).__name__,
            **loaded.about,
            **about,
            "window_length": options.length,
            **_arithmetic(loaded),
            "device": options.device,
        }
    )


def added(
    base: State | None,
    summary: HeadSummary,
    batches: Iterable[int],
    run: Run,
    pieces: Sequence[Sequence[int]],
    options: Options,
) -> State:
    """The state with the summary of some more batches of a run; ``base`` None for the first."""
    size = options.batch_size
    done = ranges((n * size, min((n + 1) * size, len(pieces))) for n in batches)
    tokens = sum(len(piece) for start, stop in done for piece in pieces[start:stop])
    state = State(summary, replace(run, done=done, tokens=tokens))
    return state.updated() if base is None else base.join(state)


def restore(path: str | os.PathLike[str], run: Run) -> State | None:
    """The state to resume from; None if the file does not exist.

    Args:
        path: the file.
        run: the requested run.

    Raises:
        OSError: if it cannot be read.
        ValueError: if the file is not a state, or has other settings; the message names them.
    """
    name = os.fspath(path)
    if not os.path.exists(path):
        return None
    state = load_state(path)
    difference = state.run.difference(run, name, "this run")
    if not difference and state.run.shard != run.shard:
        difference = f"it is for shard {state.run.shard}, this run for shard {run.shard}"
    if difference:
        raise ValueError(f"{name} cannot be resumed with other settings: {difference}")
    return state
