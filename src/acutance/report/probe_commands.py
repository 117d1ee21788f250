"""What ``acutance probe`` and ``acutance merge`` do once their options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from acutance.probing import HeadSummary, Shard, corpus, merge_states, models
from acutance.probing.distributed import Alone
from acutance.probing.run import Options, Outcome, run_windows
from acutance.probing.shards import WHOLE
from acutance.report.console import console_table
from acutance.report.findings import findings

__all__ = ["merge", "probe"]

Targets = Mapping[str, Path | None]


def probe(
    model: str | None,
    text: Sequence[str],
    *,
    world: Alone,
    length: int | None,
    batch_size: int,
    shard: str | None,
    save_every: int,
    resume: bool,
    verify: bool,
    noise: bool,
    attention: str | None,
    device: str,
    trust_remote_code: bool,
    allow_pickle: bool,
    targets: Targets,
    console: Callable[..., Any],
) -> bool:
    """Probe a model on texts, show the table and write what was asked for.

    Only the first rank reads texts, shows and writes.

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
        loaded = models.load(
            model,
            attention=attention,
            device=world.device(device),
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        window = loaded.window(length)
        pieces = corpus.windows(texts, loaded.tokenizer, window)
    options = Options(
        length=window,
        batch_size=batch_size,
        device=world.device(device),
        verify=verify,
        noise=noise,
        keep=first and targets["--keep-qk"] is not None,
        shard=part,
        save=targets["--save"],
        save_every=save_every,
        resume=resume,
    )
    about = {"text": [text.name for text in texts]} | {
        name: version(name) for name in ("acutance", "transformers")
    }
    tokens = sum(
        len(piece)
        for start in part.of(-(-len(pieces) // batch_size))
        for piece in pieces[start * batch_size : (start + 1) * batch_size]
    )
    with _progress(tokens, console()) as advance:
        outcome = run_windows(loaded, pieces, options, about, world, advance)
    with world.together():
        if first:
            _finish(outcome, targets, console)
    return outcome.finished


def _finish(outcome: Outcome, targets: Targets, console: Callable[..., Any]) -> None:
    """Show and write what a run found."""
    if outcome.state is None:
        raise KeyboardInterrupt
    notes, run = console(), outcome.state.run
    if outcome.resumed:
        notes.print(f"resumed after {outcome.resumed} windows", highlight=False)
    if not outcome.finished:
        notes.print(f"[yellow]interrupted[/] after {run.windows} of {run.total} windows")
    if (path := targets["--keep-qk"]) is not None and outcome.probe is not None:
        outcome.probe.queries_keys().save(path)
    _show_and_write(outcome.state.summary, targets, console)


def merge(states: Sequence[Path], *, targets: Targets, console: Callable[..., Any]) -> None:
    """Join states, show the table and write what was asked for.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if a file is no state, or the states are not parts of one run.
    """
    state = merge_states(states)
    if (path := targets["--out"]) is not None:
        state.save(path)
    if not state.run.complete:
        console().print(
            f"[yellow]incomplete[/]: {state.run.windows} of {state.run.total} windows are here",
            highlight=False,
        )
    _show_and_write(state.summary, targets, console)


def _show_and_write(summary: HeadSummary, targets: Targets, console: Callable[..., Any]) -> None:
    _write(summary, targets)
    if str(targets["--json"]) != "-":
        _show(summary, console(stderr=False))
    for option, path in targets.items():
        if path is not None and str(path) != "-":
            what = "state" if option == "--out" else option[2:]
            console().print(f"[dim]{what} written to[/] {path}", highlight=False)


def _show(summary: HeadSummary, output: Any) -> None:
    """Print the table, then what stands out in it."""
    output.print(console_table(summary))
    found = findings(summary)
    if found:
        output.print("\nWhat stands out", style="bold")
    for finding in found:
        output.print(Padding(Text(f"• {finding.sentence}"), (0, 0, 0, 1)))


def _write(summary: HeadSummary, targets: Targets) -> None:
    """Write what was asked for; the figure last, since it may lack its library."""
    if (path := targets["--json"]) is not None:
        if str(path) == "-":
            sys.stdout.write(json.dumps(summary.to_dict(), allow_nan=False) + "\n")
        else:
            summary.to_json(path)
    if (path := targets["--parquet"]) is not None:
        summary.to_parquet(path)
    if (path := targets["--report"]) is not None:
        from acutance.report.page import write_html

        write_html(summary, path)
    if (path := targets["--figure"]) is not None:
        from acutance.report.figures import draw_heads

        draw_heads(summary, path)


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
