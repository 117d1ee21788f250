"""``acutance probe``: how sharply every head of a model focuses on a text."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli import options as cli
from acutance.cli.held_out import Judged, judge_proposals
from acutance.cli.inputs import reading
from acutance.cli.shared import INTERRUPTED, console, misuse, plain_errors, progress, refuse, tell

if TYPE_CHECKING:
    from acutance.corpus.load_model import TextModel
    from acutance.corpus.probe_corpus import Outcome
    from acutance.corpus.ranks import Ranks
    from acutance.corpus.texts import Text
    from acutance.corpus.texts import Tokens as TokenList
    from acutance.judging.judge_model import HeldOut
    from acutance.probing.settings import ProbeSettings

    #: A law in words, and what applies it to a model.
    Law = tuple[str, Callable[[Any], AbstractContextManager[None]]]

#: Windows that one rank sends to the others at once.
_TOGETHER = 1024
#: Held-out windows of --judge, at least.
_HELD_OUT = 4


def _map(text: str) -> tuple[str, list[int]]:
    """Read ``LAYER.HEAD:ROWS`` of a --map; rows are numbers and ranges, ``0,10,20-29``."""
    name, _, places = text.rpartition(":")
    rows: list[int] = []
    for place in places.split(","):
        first, dash, last = place.partition("-")
        plain = all(number.isascii() and number.isdigit() for number in (first, last or first))
        if not (name and plain) or bool(dash) != bool(last) or len(place) > 20:
            raise ValueError(f"a map is LAYER.HEAD:ROWS, as 5.3:0,10,20-29, got {text}")
        rows += range(int(first), min(int(last or first), int(first) + 1000) + 1)
    return name, rows


def _span(text: str) -> tuple[str, tuple[int, int | None]]:
    """Read ``NAME=START:STOP`` of a --span; without STOP it goes to the end."""
    name, equals, places = text.rpartition("=")
    start, colon, stop = places.partition(":")
    plain = all(number.isascii() and number.isdigit() for number in (start, stop or "0"))
    if not (name and equals and colon and plain) or len(places) > 20:
        raise ValueError(f"a span is NAME=START:STOP, as system=0:31, got {text}")
    return name, (int(start), int(stop) if stop else None)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProbeOptions(cli.SummaryOptions, cli.RunOptions):
    """The options of ``acutance probe``.

    Attributes:
        text: Text file to read, '-' for standard input; repeat for more. Default: the included
            text.
        length: Tokens per window. Default: the model's maximum, at most 512.
        batch_size: Number of windows that run at once.
        save: Save the state (results so far) to this file as windows finish, for --resume, 'merge',
            'report' and 'diff'.
        save_every: Save the state after this many new windows. Unsaved windows are run again after
            an interruption.
        shard: Probe only part I of N of the text, I from 1 to N; join the parts with 'merge'.
        keep_qk: Write a sample of queries and keys to this file, for 'compare --from', and show in
            how many rows the norms of the keys decide which key has the largest weight.
        verify: Recompute each layer's output and compare it with the model's. Default: in every
            batch; with --provide only in the first.
        every: Run only one window of every K.
        layers: Layers to read: numbers, ranges or names, such as 0-3,-1,decoder.*; -1 is the last.
        heads: Heads of each layer to read, such as 0,4-7.
        max_rows: Read at most this many rows (queries) of each layer in a batch, drawn at random.
        seed: Random seed of --max-rows.
        provide: Compute the model's attention with acutance's kernel, which gives the output and
            its statistics in one pass, to save time.
        noise: Also measure noise_gain: how strongly noise on the logits reaches the output.
        gaps: Also count the keys that hold 50, 90, 95 and 99 % of a row's weight, from the gaps
            between its scores and its largest score.
        structure: Also measure the weight by distance and on the row's own token, its other
            occurrences, the previous token and special tokens, and classify heads.
        examples: Store this many of each head's sharpest rows, with the tokens that they attend to.
        span: Also measure each head's weight on tokens START to STOP - 1 of each window; repeat for
            more.
        map: Store rows of a head's weights in the page and JSON: 5.3:0,10 is layer 5, head 3, rows
            0 and 10; repeat for more.
        law: Change the attention by a law while probing: a file from 'calibrate -o', or a name such
            as ssmax, log_n:train_length=512 or window:size=1024, as for 'judge'.
        judge: Also measure how each change that the statistics suggest affects the loss, on the
            ends of the texts (a quarter of the windows, 4 to 16), which are then not probed.
        write_law: With --judge: write the law that lowers the loss most to this file, for 'judge
            --law', 'probe --law' and acutance.apply. Nothing is written if none lowers it.
        train_length: Context length in training, in tokens; --judge tries changes beyond it.
            Default: the configuration's.
    """

    model: cli.Model = None
    length: Annotated[int | None, typer.Option(min=2)] = None
    batch_size: cli.Least1 = 8
    save_every: cli.SaveEvery = 1
    shard: Annotated[str | None, typer.Option(metavar="I/N")] = None
    keep_qk: cli.OutputFile = None
    verify: Annotated[bool | None, typer.Option("--verify/--no-verify")] = None
    every: Annotated[int, typer.Option(metavar="K", min=1)] = 1
    layers: Annotated[str | None, typer.Option(metavar="LIST")] = None
    heads: Annotated[str | None, typer.Option(metavar="LIST")] = None
    max_rows: Annotated[int | None, typer.Option(metavar="ROWS", min=2)] = None
    provide: bool = False
    noise: bool = False
    gaps: bool = False
    structure: bool = False
    examples: Annotated[int, typer.Option(metavar="ROWS", min=0, max=64)] = 0
    span: Annotated[
        dict[str, tuple[int, int | None]] | None,
        typer.Option(metavar="NAME=START:STOP"),
        cli.Role(read=_span, named=True),
    ] = None
    map: Annotated[
        dict[str, list[int]] | None,
        typer.Option(metavar="LAYER.HEAD:ROWS"),
        cli.Role(read=_map, named=True),
    ] = None
    law: Annotated[str | None, typer.Option(metavar="LAW"), cli.Role("input")] = None
    judge: bool = False
    write_law: cli.OutputFile = None
    train_length: cli.Tokens = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Ends of the names of the files of the state."""
        return ("", ".judging") if self.judge else ("",)


@cli.command(
    ProbeOptions,
    {
        cli.WRITE: "keep_qk noise gaps structure examples span map verify judge train_length "
        "write_law",
        cli.LESS: "every layers heads max_rows provide",
        cli.LONG: "shard",
    },
)
def probe(options: ProbeOptions) -> None:
    """Show how sharply every head of a model focuses on a text."""
    if options.resume and options.keep_qk is not None:
        refuse("--resume", "cannot be combined with --keep-qk, which reads the first windows")
    for name, flag in {"law": "--law", "shard": "--shard"}.items():
        if options.judge and getattr(options, name) is not None:
            refuse("--judge", f"cannot be combined with {flag}")
    for name, flag in {"train_length": "--train-length", "write_law": "--write-law"}.items():
        if not options.judge and getattr(options, name) is not None:
            refuse(flag, "needs --judge")
    from acutance.corpus import ranks as distributed
    from acutance.probing.head_maps import check_maps
    from acutance.probing.settings import ProbeSettings
    from acutance.probing.spans import check_spans
    from acutance.summary.state import Shard

    with misuse():
        if options.shard is not None:
            Shard.parse(options.shard)
        if options.span:
            check_spans(options.span)
        if options.map:
            check_maps(options.map)
    verify = not options.provide if options.verify is None else options.verify
    settings = ProbeSettings(
        **cli.keywords(
            ProbeSettings, options, verify=verify, spans=options.span, maps=options.map,
            every=1, tokenizer=None,  # what these mean to a probe is not what the options say
        )
    )  # fmt: skip
    law = None
    if options.law is not None:
        from acutance.judging.changes import applying

        with nullcontext() if os.path.exists(options.law) else misuse():
            law = applying(options.law)
    ranks = ExitStack()
    world = ranks.enter_context(distributed.world())
    if options.judge and world.size > 1:
        raise ValueError(f"--judge runs in one process, and this run has {world.size}")
    with ranks, plain_errors():  # what went wrong is said before the other ranks are let go
        finished = _run(options, settings, law, world)
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _run(
    options: ProbeOptions, settings: "ProbeSettings", law: "Law | None", world: "Ranks"
) -> bool:
    """Load the model, probe the text, print the table and write the files.

    Only the first rank reads texts, prints and writes.

    Returns:
        Whether all windows were read; False after Ctrl-C.
    """
    from importlib.metadata import version

    from acutance.corpus.probe_corpus import Options, run_windows
    from acutance.summary.state import WHOLE, Shard

    first = world.rank == 0
    with world.together():
        part = WHOLE if options.shard is None else Shard.parse(options.shard)
        texts = options.texts() if first else []
    about: dict[str, Any] = {"text": world.first([text.name for text in texts])}
    about |= {name: version(name) for name in ("acutance", "transformers")}
    device = world.device(options.device)
    with world.together():
        headed = options.load(device=device, head=options.judge)
        loaded, held = headed.base if options.judge else headed, None
        window = loaded.window(options.length)
        loaded.check_heads(options.heads)
    with reading(texts) as texts:
        if options.judge:
            from acutance.judging.judge_model import hold_out

            held = hold_out(headed, texts, window, _HELD_OUT)
            texts = held.fit
        pieces = _windows(texts, loaded, window, options.every, world)
    size = options.batch_size
    todo = [
        len(piece)
        for start in part.of(-(-len(pieces) // size))
        for piece in pieces[start * size : (start + 1) * size]
    ]
    how = cli.keywords(
        Options, options, length=window, device=device, shard=part,
        probe=replace(settings, keep=first and options.keep_qk is not None),
        law=None,
    )  # fmt: skip
    with world.together():
        scaled: AbstractContextManager[None] = nullcontext()
        if law is not None:
            about["law"] = how["law"] = law[0]
            scaled = law[1](loaded.model)
    with scaled, progress("probing", len(todo), sum(todo), console()) as advance:
        outcome = run_windows(loaded, pieces, Options(**how), about, world, advance)
    with world.together():
        if first:
            _judge_and_show(outcome, options, headed, held)
    return outcome.finished


def _windows(
    texts: "list[Text]", loaded: "TextModel", length: int, every: int, world: "Ranks"
) -> "list[TokenList[int]]":
    """One of ``every`` windows of the texts, on every rank; only the first reads and tokenises."""
    from acutance.corpus.texts import each_window

    pieces: list[TokenList[int]] = []
    windows, number = each_window(texts, loaded.tokenizer, length), 0
    while True:
        if world.stopped():
            raise KeyboardInterrupt
        with world.together():
            some = list(islice(windows, _TOGETHER))
        some = world.first(some)
        if not some:
            break
        pieces += some[-number % every :: every]
        number += len(some)
    with world.together():
        loaded.check_tokens(pieces)
    return pieces


def _judge_and_show(
    outcome: "Outcome", options: ProbeOptions, headed: "TextModel", held: "HeldOut | None"
) -> None:
    """Judge what the statistics suggest, if asked; show and write the results of a run."""
    judged = None
    try:
        if held is not None and outcome.finished and outcome.state is not None:
            state = outcome.state
            judged = judge_proposals(options, headed, held, state.summary)
            about = {**state.summary.about, "judged": judged.sentences}
            state = replace(state, summary=replace(state.summary, about=about))
            if options.save is not None:
                state.save(options.save)
            outcome = replace(outcome, state=state)
    finally:  # what was measured is shown whatever becomes of the judging
        _show(outcome, options, judged)
    if judged is not None:
        judged.write_law(headed.model, options.write_law)


def _show(outcome: "Outcome", options: ProbeOptions, judged: Judged | None) -> None:
    """Show and write the results of a run, whose state is written already."""
    from acutance.probing.probe import ProbeError
    from acutance.report.exports import summary_view

    if outcome.state is None:
        raise KeyboardInterrupt
    summary, run = outcome.state.summary, outcome.state.run
    if outcome.resumed:
        tell(f"resumed after {outcome.resumed} windows")
    if not outcome.finished:
        done = f" after {run.windows} of {run.total} windows"
        tell(("interrupted", "yellow"), done)
    files: dict[str, Any] = {"state": (options.save, lambda _: None)}
    key_norms = table = None
    if options.keep_qk is not None and (opened := outcome.probe) is not None:
        files["queries and keys"] = (
            options.keep_qk, lambda path: opened.queries_keys().save(path),
        )  # fmt: skip
        with suppress(ProbeError):  # which writing the sample reports
            key_norms = opened.queries_keys().key_norms()
    record = None if judged is None else judged.to_dict()
    if judged is not None and judged.comparison is not None:
        table = judged.comparison.table(judged.proposed.reasons)
    view = partial(summary_view, summary, None, key_norms, table)
    options.write_summary(summary, view, files=files, key_norms=key_norms, judged=record)
