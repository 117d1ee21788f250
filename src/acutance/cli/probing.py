"""The command that measures a model: probe."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

import typer

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
    Model,
    ParquetTo,
    ReportTo,
    Resume,
    SaveEvery,
    Tokenizer,
    TrustRemoteCode,
    check_chart,
    check_resume,
    grouped,
)
from acutance.cli.outputs import Overwrite, check_outputs
from acutance.cli.shared import (
    INTERRUPTED,
    check_figure,
    console,
    misuse,
    plain_errors,
)


def probe_command(
    model: Model = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to read, '-' for standard input; repeat it for more.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", min=2, help="Tokens in a window. Default: the model's longest, at most 512."
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Windows run at once.")
    ] = 8,
    report: ReportTo = None,
    json: JsonTo = None,
    csv: CsvTo = None,
    parquet: ParquetTo = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Keep the state, as it grows: to merge, resume, reload."
        ),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    save_every: SaveEvery = 1,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Probe the I-th of N parts of the text; then 'merge'."
        ),
    ] = None,
    figure: FigureTo = None,
    chart: Chart = "heads",
    dark: Dark = False,
    keep_qk: Annotated[
        Path | None,
        typer.Option(
            "--keep-qk",
            metavar="FILE",
            help="Write some queries and keys, for 'compare --from'; say what key lengths do.",
        ),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Rebuild each output and compare. Default: yes, but with --provide the first.",
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--every", metavar="K", min=1, help="Run one window of every K only.")
    ] = 1,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="LIST", help="Layers to read: 0-3,-1,decoder.*"),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="LIST", help="Heads of each layer to read: 0,4-7"),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max-rows", metavar="ROWS", min=2, help="Rows to read of a call, drawn at random."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which rows --max-rows draws.")] = 0,
    provide: Annotated[
        bool,
        typer.Option(
            "--provide", help="Let acutance compute the attention it measures, in one pass."
        ),
    ] = False,
    noise: Annotated[bool, typer.Option("--noise", help="Also measure noise_gain.")] = False,
    structure: Annotated[
        bool, typer.Option("--structure", help="Also measure where weight lies, and name classes.")
    ] = False,
    examples: Annotated[
        int,
        typer.Option(
            "--examples",
            metavar="ROWS",
            min=0,
            max=64,
            help="Keep so many of each head's sharpest rows, with what they attend to.",
        ),
    ] = 0,
    law: Annotated[
        str | None,
        typer.Option(
            "--law",
            metavar="LAW",
            help="Scale attention meanwhile: a file of 'calibrate -o', or a name as "
            "ssmax or log_n:train_length=512.",
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    attention: AttentionName = None,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    allow_missing: AllowMissing = False,
) -> None:
    """Show how sharply every head of a model focuses on a text."""
    targets = {
        "--report": report,
        "--json": json,
        "--csv": csv,
        "--parquet": parquet,
        "--save": save,
        "--figure": figure,
        "--keep-qk": keep_qk,
    }
    check_outputs(
        targets,
        {"MODEL": model, "--text": text, "--law": law},
        state="--save",
        resume=resume,
        overwrite=overwrite,
    )
    check_figure("--figure", figure)
    check_chart(chart)
    check_resume(resume, save)
    if resume and keep_qk is not None:
        raise typer.BadParameter(
            "it may skip the first windows, which --keep-qk reads", param_hint="--resume"
        )
    with plain_errors():
        from acutance.cli import probe_actions
        from acutance.corpus import ranks as distributed
        from acutance.corpus.probe_corpus import Subset
        from acutance.summary.state import Shard

        if shard is not None:
            with misuse():
                Shard.parse(shard)
        subset = Subset(every, layers, heads, max_rows, seed, provide)
        scaled = None
        if law is not None:
            from acutance.cli.calibrate_actions import applying

            with nullcontext() if os.path.exists(law) else misuse():
                scaled = applying(law)
        ranks = ExitStack()
        world = ranks.enter_context(distributed.world())
    with ranks, plain_errors():  # what went wrong is said before the other ranks are let go
        finished = probe_actions.probe(
            model,
            text or [],
            world=world,
            length=length,
            batch_size=batch_size,
            shard=shard,
            save_every=save_every,
            resume=resume,
            verify=not provide if verify is None else verify,
            noise=noise,
            structure=structure or examples > 0,
            examples=examples,
            subset=subset,
            tokenizer=tokenizer,
            attention=attention,
            device=device,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            allow_missing=allow_missing,
            targets=targets,
            chart=chart,
            dark=dark,
            console=console,
            law=scaled,
        )
    if not finished:
        raise typer.Exit(INTERRUPTED)


grouped(
    probe_command,
    {
        READ: "text length tokenizer law attention device trust_remote_code allow_pickle "
        "allow_missing",
        WRITE: "report json csv parquet save figure chart dark keep_qk noise structure examples "
        "verify overwrite",
        LESS: "every layers heads max_rows seed provide batch_size",
        MANY: "shard resume save_every",
    },
)
