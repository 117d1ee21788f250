"""Probe a model over a corpus: shards, batches, saved states and resuming, on one or many ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from acutance.corpus.load_model import TextModel
from acutance.corpus.ranks import Ranks
from acutance.corpus.texts import model_digest, padded, text_digest
from acutance.files import tidy
from acutance.probing.probe import Probe
from acutance.probing.settings import ProbeSettings
from acutance.summary.head_summary import HeadSummary
from acutance.summary.state import WHOLE, Run, Shard, State, load_state, ranges

#: Windows of tokens.
Windows: TypeAlias = Sequence[Sequence[int]]
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
    pieces: Windows,
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
        about = about | ({"ranks": world.size} if world.size > 1 else {})
        corpus = CorpusRun(loaded, pieces, options, about)
        corpus.probe.expect_tokens(max(map(len, pieces), default=0))
        run = corpus.run
    with world.together():
        if difference := run.difference(world.first(run), "this rank", "the first rank"):
            raise ValueError(f"all ranks of a run must have the same settings, but {difference}")
        base = corpus.restored() if world.rank == 0 else None
        if not options.shard.of(corpus.batches):
            raise ValueError(
                f"shard {options.shard} has no windows: the text has {len(pieces)} windows, in "
                f"{corpus.batches} batches of {options.batch_size}"
            )
    done = world.first(() if base is None else base.run.done)
    todo = corpus.todo(done)
    for start, stop in done:
        advance(sum(len(piece) for piece in pieces[start:stop]), stop - start, False)
    # what was read and from which batches changes in one step: an interrupt cannot part them
    progress: tuple[HeadSummary | None, tuple[int, ...]] = (None, ())

    def state_so_far() -> State | None:
        """The state of all ranks, on the first one; saved if the run saves."""
        summary, numbers = progress
        with world.together():
            state, joined = base, world.collect(summary)
            if joined is not None and world.rank == 0:
                state = corpus.added(base, joined, numbers)
            if state is not None and options.save is not None:
                state.save(options.save)
        return state

    finished, unsaved = True, 0
    try:
        with ExitStack() as context:
            with world.together():
                if world.rank < len(todo):
                    context.enter_context(corpus.probe)
                    context.enter_context(torch.inference_mode())
            for start in range(0, len(todo), world.size):  # in rounds of one batch for each rank
                if world.stopped():
                    finished = False
                    break
                turn = todo[start : start + world.size]
                with world.together():
                    summary, numbers = progress
                    if world.rank < len(turn):
                        summary = corpus.read(turn[world.rank])
                    progress = summary, (*numbers, *turn)
                lengths = [len(piece) for number in turn for piece in corpus.batch(number)]
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
    return Outcome(state_so_far(), finished, resumed, corpus.probe if todo else None)


class CorpusRun:
    """A run over the windows of a corpus: the probe, the batches, and the states made of them.

    Args:
        loaded: the model.
        pieces: windows of tokens.
        options: options of the run.
        about: facts to store in the summary, beside those of the model.

    Attributes:
        options: as given.
        probe: the probe of the run, which is not entered.
        batches: number of batches.
    """

    def __init__(
        self, loaded: TextModel, pieces: Windows, options: Options, about: Mapping[str, Any]
    ) -> None:
        self._loaded, self._pieces, self.options = loaded, pieces, options
        self.probe = Probe(loaded.model, replace(options.probe, tokenizer=loaded.tokenizer))
        self.batches = -(-len(pieces) // options.batch_size)
        config, parameter = getattr(loaded.model, "config", None), next(loaded.model.parameters())
        self._arithmetic = {
            "attention": str(getattr(config, "_attn_implementation", "")),  # empty if unknown
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
        self._about = {
            "model": loaded.name,
            "architecture": type(loaded.model).__name__,
            **loaded.about,
            **about,
            **options.left_out(),
            "window_length": options.length,
            **self._arithmetic,
            "device": options.device,
        }

    @cached_property
    def run(self) -> Run:
        """The settings that determine the results of a window, in order of comparison."""
        options, probing = self.options, self.options.probe
        settings: dict[str, Any] = {
            "model": model_digest(self._loaded.model),
            "length": options.length,
            "text": text_digest(self._pieces),
            "batch_size": options.batch_size,
            "verify": probing.verify,
            "noise": probing.noise,
            **self._arithmetic,
            "metrics": list(self.probe.metrics),
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
        return Run(settings | options.left_out(), len(self._pieces), shard=options.shard)

    def batch(self, number: int) -> Windows:
        """The windows of one batch."""
        size = self.options.batch_size
        return self._pieces[number * size : (number + 1) * size]

    def todo(self, done: Iterable[tuple[int, int]]) -> list[int]:
        """Numbers of the shard's batches, without ranges of windows that are done."""
        before = {index for start, stop in done for index in range(start, stop)}
        numbers = self.options.shard.of(self.batches)
        return [number for number in numbers if number * self.options.batch_size not in before]

    def read(self, number: int, drawn: int | None = None) -> HeadSummary:
        """Run one batch in the entered probe, and return the probe's summary so far.

        Args:
            number: of the batch.
            drawn: its number in the corpus, which determines the rows that are drawn; None for
                ``number``.

        Raises:
            ProbeError: if it saw no attention.
        """
        self.probe.number_passes(number if drawn is None else drawn)
        windows = padded(self.batch(number), self._loaded.pad)
        ids, mask = (tensor.to(self.options.device) for tensor in windows)
        self.probe.attention_mask = mask
        self._loaded.run(ids, mask)
        return self.probe.summary(self._about)

    def added(self, base: State | None, summary: HeadSummary, batches: Iterable[int]) -> State:
        """The state with the summary of some more batches; ``base`` None for the first."""
        size, pieces = self.options.batch_size, self._pieces
        done = ranges((n * size, min((n + 1) * size, len(pieces))) for n in batches)
        tokens = sum(len(piece) for start, stop in done for piece in pieces[start:stop])
        state = State(summary, replace(self.run, done=done, tokens=tokens))
        return state.updated() if base is None else base.join(state)

    def release(self) -> None:
        """Let the model go: only batches are read, and states added, from now on."""
        del self._loaded, self.probe

    def restored(self) -> State | None:
        """The state to resume from; None if there is none, or it is not asked for.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is not a state, or has other settings; the message names them.
        """
        path, run = self.options.save, self.run
        if path is None or not self.options.resume:
            return None
        state = load_state(path) if os.path.exists(path) else None
        if state is not None:
            difference = state.run.difference(run, os.fspath(path), "this run")
            if not difference and state.run.shard != run.shard:
                difference = f"it is for shard {state.run.shard}, this run for shard {run.shard}"
            if difference:
                raise ValueError(
                    f"{os.fspath(path)} cannot be resumed with other settings: {difference}"
                )
        tidy(path)
        return state
