"""What ``acutance probe`` and ``acutance merge`` do once their options are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from acutance.cli.report_actions import show_and_write
from acutance.corpus import load_model
from acutance.corpus import texts as corpus
from acutance.corpus.probe_corpus import Options, Outcome, Subset, run_windows
from acutance.corpus.ranks import SingleProcess
from acutance.probing.open_probe import ProbeError
from acutance.report.exports import Targets
from acutance.report.screen import note
from acutance.summary.state import WHOLE, Shard, merge_states

__all__ = ["merge", "probe"]


def probe(
    model: str | None,
    text: Sequence[str],
    *,
    world: SingleProcess,
    length: int | None,
    batch_size: int,
    shard: str | None,
    save_every: int,
    resume: bool,
    verify: bool,
    noise: bool,
    structure: bool,
    examples: int,
    subset: Subset,
    tokenizer: str | None,
    attention: str | None,
    device: str,
    trust_remote_code: bool,
    allow_pickle: bool,
    allow_missing: bool,
    targets: Targets,
    chart: str,
    dark: bool,
    console: Callable[..., Any],
    law: tuple[str, Callable[[Any], AbstractContextManager[Any]]] | None = None,
) -> bool:
    """Probe a model on texts, show the table and write what was asked for.

    Only the first rank reads texts, shows and writes. ``law`` is a scaling law in words, and what
    puts it on a model.

    Returns:
        Whether all windows that were asked for are done; ^C ends a run early.

    Raises:
        ImportError: if a figure is wanted without matplotlib.
        KeyboardInterrupt: if ^C came before any window was done.
        OSError: if a file cannot be read or written.
        RuntimeError: if the model cannot be loaded or shows no attention.
        ValueError: if a text, a shard or the state to resume does not fit.
    """
    first = world.rank == 0
    with world.together():
        part = WHOLE if shard is None else Shard.parse(shard)
        texts = (corpus.read(text) if text else [corpus.bundled()]) if first else []
    texts = world.first(texts)
    with world.together(), console().status("loading the model") if first else nullcontext():
        loaded = load_model.load(
            model,
            tokenizer=tokenizer,
            attention=attention,
            device=world.device(device),
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            allow_missing=allow_missing,
        )
        window = loaded.window(length)
        pieces = corpus.windows(texts, loaded.tokenizer, window)[:: subset.every]
        loaded.check_tokens(pieces)
        loaded.check_heads(subset.heads)
    options = Options(
        length=window,
        batch_size=batch_size,
        device=world.device(device),
        verify=verify,
        noise=noise,
        structure=structure,
        examples=examples,
        subset=subset,
        keep=first and targets["--keep-qk"] is not None,
        shard=part,
        save=targets["--save"],
        save_every=save_every,
        resume=resume,
        law=None if law is None else law[0],
    )
    about = {"text": [text.name for text in texts]} | {
        name: version(name) for name in ("acutance", "transformers")
    }
    if law is not None:
        about["law"] = law[0]
    tokens = sum(
        len(piece)
        for start in part.of(-(-len(pieces) // batch_size))
        for piece in pieces[start * batch_size : (start + 1) * batch_size]
    )
    with world.together():
        scaled = nullcontext() if law is None else law[1](loaded.model)
    with scaled, _progress(tokens, console()) as advance:
        outcome = run_windows(loaded, pieces, options, about, world, advance)
    with world.together():
        if first:
            _finish(outcome, targets, console, chart, dark)
    return outcome.finished


def _finish(
    outcome: Outcome, targets: Targets, console: Callable[..., Any], chart: str, dark: bool
) -> None:
    """Show and write what a run found."""
    if outcome.state is None:
        raise KeyboardInterrupt
    notes, run = console(), outcome.state.run
    if outcome.resumed:
        notes.print(f"resumed after {outcome.resumed} windows")
    if not outcome.finished:
        notes.print(note(("interrupted", "yellow"), f" after {run.windows} of {run.total} windows"))
    first: dict[str, Callable[[], object]] = {}
    if targets["--save"] is not None:
        first["--save"] = lambda: None  # it was written as the run went on
    key_norms = None
    if (path := targets["--keep-qk"]) is not None and (probe := outcome.probe) is not None:
        first["--keep-qk"] = lambda: probe.queries_keys().save(path)
        with suppress(ProbeError):  # which writing the sample reports
            key_norms = probe.queries_keys().key_norms()
    show_and_write(
        outcome.state.summary,
        targets,
        console,
        chart=chart,
        dark=dark,
        first=first,
        key_norms=key_norms,
    )


def merge(states: Sequence[Path], *, targets: Targets, console: Callable[..., Any]) -> None:
    """Join states, show the table and write what was asked for.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if a file is no state, or the states are not parts of one run.
    """
    state = merge_states(states)
    first: dict[str, Callable[[], object]] = {}
    if (path := targets["--out"]) is not None:
        first["--out"] = lambda: state.save(path)
    if not state.run.complete:
        console().print(
            note(
                ("incomplete", "yellow"),
                f": {state.run.windows} of {state.run.total} windows are here",
            )
        )
    show_and_write(state.summary, targets, console, first=first)


@contextmanager
def _progress(tokens: int, console: Any) -> Iterator[Callable[[int], None]]:
    """A bar on standard error with rate and remaining time; silent where that is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("probing"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("probing", total=tokens, rate="")

        def advance(count: int) -> None:
            bar.advance(task, count)
            speed = bar.tasks[0].speed
            bar.update(task, rate=f"{speed:,.0f} tokens/s" if speed else "")

        yield advance
