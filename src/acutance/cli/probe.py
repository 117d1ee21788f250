"""``acutance probe``: how sharply every head of a model focuses on a text."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.held_out import (
    JudgeChanges,
    WriteLaw,
    check_judge,
    hold_out_windows,
)
from acutance.cli.inputs import read_texts, reading
from acutance.cli.options import (
    LESS,
    MANY,
    READ,
    WRITE,
    AllowMissing,
    AllowPickle,
    AttentionName,
    Chart,
    CsvTo,
    Dark,
    Device,
    FigureTo,
    JsonTo,
    Maps,
    Model,
    ParquetTo,
    ProbeLaw,
    ReportTo,
    Resume,
    SaveEvery,
    Spans,
    Tokenizer,
    TrainLength,
    TrustRemoteCode,
    check_chart,
    check_resume,
    command,
    load_model,
    parse_maps,
    parse_spans,
)
from acutance.cli.outputs import Overwrite, check_outputs
from acutance.cli.report import judge_and_show
from acutance.cli.shared import (
    INTERRUPTED,
    check_figure,
    console,
    misuse,
    plain_errors,
    progress,
)

if TYPE_CHECKING:
    from acutance.corpus.load_model import TextModel
    from acutance.corpus.ranks import SingleProcess
    from acutance.corpus.texts import Text, Tokens
    from acutance.probing.settings import ProbeSettings

    #: A law in words, and what applies it to a model.
    Law = tuple[str, Callable[[Any], AbstractContextManager[None]]]

#: Windows that one rank sends to the others at once.
_TOGETHER = 1024


@dataclass(frozen=True, repr=False, eq=False)
class ProbeOptions:
    """The options of ``acutance probe``."""

    model: Model = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text file to read, '-' for standard input; repeat for more. Default: the "
            "included text.",
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            "--length", min=2, help="Tokens per window. Default: the model's maximum, at most 512."
        ),
    ] = None
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Number of windows that run at once.")
    ] = 8
    report: ReportTo = None
    json: JsonTo = None
    csv: CsvTo = None
    parquet: ParquetTo = None
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help=(
                "Save the state (results so far) to this file as windows finish, for "
                "--resume, 'merge', 'report' and 'diff'."
            ),
        ),
    ] = None
    resume: Resume = False
    overwrite: Overwrite = False
    save_every: SaveEvery = 1
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Probe only part I of N of the text, I from 1 to N; join the parts with 'merge'.",
        ),
    ] = None
    figure: FigureTo = None
    chart: Chart = "heads"
    dark: Dark = False
    keep_qk: Annotated[
        Path | None,
        typer.Option(
            "--keep-qk",
            metavar="FILE",
            help=(
                "Write a sample of queries and keys to this file, for 'compare --from', and show "
                "in how many rows the norms of the keys decide which key has the largest weight."
            ),
        ),
    ] = None
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help=(
                "Recompute each layer's output and compare it with the model's. Default: in every "
                "batch; with --provide only in the first."
            ),
        ),
    ] = None
    every: Annotated[
        int, typer.Option("--every", metavar="K", min=1, help="Run only one window of every K.")
    ] = 1
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="LIST",
            help="Layers to read: numbers, ranges or names, such as 0-3,-1,decoder.*; -1 is the "
            "last.",
        ),
    ] = None
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="LIST", help="Heads of each layer to read, such as 0,4-7."),
    ] = None
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max-rows",
            metavar="ROWS",
            min=2,
            help="Read at most this many rows (queries) of each layer in a batch, drawn at random.",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of --max-rows.")] = 0
    provide: Annotated[
        bool,
        typer.Option(
            "--provide",
            help=(
                "Compute the model's attention with acutance's kernel, which gives the output and "
                "its statistics in one pass, to save time."
            ),
        ),
    ] = False
    noise: Annotated[
        bool,
        typer.Option(
            "--noise",
            help="Also measure noise_gain: how strongly noise on the logits reaches the output.",
        ),
    ] = False
    gaps: Annotated[
        bool,
        typer.Option(
            "--gaps",
            help=(
                "Also count the keys that hold 50, 90, 95 and 99 % of a row's weight, from the "
                "gaps between its scores and its largest score."
            ),
        ),
    ] = False
    structure: Annotated[
        bool,
        typer.Option(
            "--structure",
            help=(
                "Also measure the weight by distance and on the row's own token, its other "
                "occurrences, the previous token and special tokens, and classify heads."
            ),
        ),
    ] = False
    examples: Annotated[
        int,
        typer.Option(
            "--examples",
            metavar="ROWS",
            min=0,
            max=64,
            help=(
                "Store this many of each head's sharpest rows, with the tokens that they attend to."
            ),
        ),
    ] = 0
    span: Spans = None
    map: Maps = None
    law: ProbeLaw = None
    judge: JudgeChanges = False
    write_law: WriteLaw = None
    train_length: TrainLength = None
    tokenizer: Tokenizer = None
    attention: AttentionName = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False

    @property
    def targets(self) -> dict[str, Path | None]:
        """The output file of each option."""
        return {
            "--report": self.report,
            "--json": self.json,
            "--csv": self.csv,
            "--parquet": self.parquet,
            "--save": self.save,
            "--figure": self.figure,
            "--keep-qk": self.keep_qk,
            "--write-law": self.write_law,
        }


@command(
    ProbeOptions,
    {
        READ: "text length tokenizer law attention device trust_remote_code allow_pickle "
        "allow_missing",
        WRITE: "report json csv parquet save figure chart dark keep_qk noise gaps structure "
        "examples span map verify judge train_length write_law overwrite",
        LESS: "every layers heads max_rows seed provide batch_size",
        MANY: "shard resume save_every",
    },
)
def probe(options: ProbeOptions) -> None:
    """Show how sharply every head of a model focuses on a text."""
    check_outputs(
        options.targets,
        {"MODEL": options.model, "--text": options.text, "--law": options.law},
        state="--save",
        parts=("", ".judging") if options.judge else ("",),
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_figure("--figure", options.figure)
    check_chart(options.chart)
    check_resume(options.resume, options.save)
    if options.resume and options.keep_qk is not None:
        raise typer.BadParameter(
            "cannot be combined with --keep-qk, which reads the first windows",
            param_hint="--resume",
        )
    check_judge(
        options.judge,
        excluded={"--law": options.law, "--shard": options.shard},
        needing={"--train-length": options.train_length, "--write-law": options.write_law},
    )
    spans, maps = parse_spans(options.span or []), parse_maps(options.map or [])
    with plain_errors():
        from acutance.corpus import ranks as distributed
        from acutance.probing.head_maps import check_maps
        from acutance.probing.settings import ProbeSettings
        from acutance.probing.spans import check_spans
        from acutance.summary.state import Shard

        if options.shard is not None:
            with misuse():
                Shard.parse(options.shard)
        with misuse():
            if spans:
                check_spans(spans)
            if maps:
                check_maps(maps)
        settings = ProbeSettings(
            verify=not options.provide if options.verify is None else options.verify,
            noise=options.noise,
            gaps=options.gaps,
            structure=options.structure,
            examples=options.examples,
            spans=spans or None,
            maps=maps or None,
            layers=options.layers,
            heads=options.heads,
            max_rows=options.max_rows,
            seed=options.seed,
            provide=options.provide,
        )
        law = None
        if options.law is not None:
            from acutance.judging.apply_change import applying

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
    options: ProbeOptions,
    settings: "ProbeSettings",
    law: "Law | None",
    world: "SingleProcess",
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
        texts = read_texts(options.text) if first else []
    names = world.first([text.name for text in texts])
    device = world.device(options.device)
    with world.together(), console().status("loading the model") if first else nullcontext():
        headed = load_model(options, device, head=options.judge)
        loaded, held = headed.base if options.judge else headed, None
        window = loaded.window(options.length)
        loaded.check_heads(options.heads)
    with reading(texts) as texts:
        if options.judge:
            held = hold_out_windows(headed, texts, window)
            texts = held.fit
        pieces = _windows(texts, loaded, window, options.every, world)
    about: dict[str, Any] = {"text": names}
    about |= {name: version(name) for name in ("acutance", "transformers")}
    if law is not None:
        about["law"] = law[0]
    size = options.batch_size
    todo = [
        len(piece)
        for start in part.of(-(-len(pieces) // size))
        for piece in pieces[start * size : (start + 1) * size]
    ]
    how = Options(
        length=window,
        batch_size=size,
        device=device,
        probe=replace(settings, keep=first and options.keep_qk is not None),
        every=options.every,
        shard=part,
        save=options.save,
        save_every=options.save_every,
        resume=options.resume,
        law=None if law is None else law[0],
    )
    with world.together():
        scaled = nullcontext() if law is None else law[1](loaded.model)
    with scaled, progress("probing", len(todo), sum(todo), console()) as advance:
        outcome = run_windows(loaded, pieces, how, about, world, advance)
    with world.together():
        if first:
            judge_and_show(outcome, options, headed, held)
    return outcome.finished


def _windows(
    texts: "list[Text]", loaded: "TextModel", length: int, every: int, world: "SingleProcess"
) -> "list[Tokens[int]]":
    """One of ``every`` windows of the texts, on every rank; only the first reads and tokenises."""
    from acutance.corpus.texts import each_window

    pieces: list[Tokens[int]] = []
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
