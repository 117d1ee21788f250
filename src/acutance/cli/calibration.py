"""The command that fits a law to a model: calibrate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import (
    FIT,
    LESS,
    MANY,
    READ,
    WRITE,
    AllowMissing,
    AllowPickle,
    AttentionName,
    Device,
    JsonTo,
    Model,
    Resume,
    SaveEvery,
    Tokenizer,
    TrustRemoteCode,
    check_choice,
    check_resume,
    grouped,
)
from acutance.cli.outputs import Overwrite, check_outputs
from acutance.cli.shared import INTERRUPTED, console, fail, plain_errors


def calibrate_command(
    model: Model = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="Text to read; repeat it for more."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="LAW", help="Write the law, for 'probe --law'."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="METRIC[=VALUE]",
            help="What to hold: entropy, normalized_entropy, effective_keys, top_weight, or "
            "max_logit as a bound. Without a value: each head's own at --reference.",
        ),
    ] = "entropy",
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help="Windows to measure, rising. Default: the model's longest and its halves to 1/8.",
        ),
    ] = None,
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            min=0,
            help="Of each length at most, spread over the text. More read longer and leave less "
            "noise; 0 is all.",
        ),
    ] = 64,
    reference: Annotated[
        int | None,
        typer.Option("--reference", min=2, help="Training length. Default: the shortest length."),
    ] = None,
    law: Annotated[
        str,
        typer.Option(
            "--law",
            metavar="NAME",
            help="table, or a family to fit: constant, ssmax, log_n, sqrt_log_n, clip_log_n.",
        ),
    ] = "table",
    passes: Annotated[
        int, typer.Option("--passes", min=2, help="Runs over the text, at most.")
    ] = 6,
    limit: Annotated[
        float, typer.Option("--limit", help="Factors stay between 1/LIMIT and LIMIT.")
    ] = 16.0,
    windowed: Annotated[
        bool, typer.Option("--windowed", help="Also fit layers with a sliding window.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Longest windows run at once.")
    ] = 4,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the windows, and of sampled rows.")
    ] = 0,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Keep the state, as it grows: to resume."),
    ] = None,
    save_every: SaveEvery = 1,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: JsonTo = None,
    tokenizer: Tokenizer = None,
    attention: AttentionName = None,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    allow_missing: AllowMissing = False,
) -> None:
    """Fit, for every head, the scale that keeps its attention as focused at any length."""
    check_outputs(
        {"--out": out, "--json": json, "--save": save},
        {"MODEL": model, "--text": text},
        state="--save",
        resume=resume,
        overwrite=overwrite,
    )
    check_resume(resume, save)
    name, value = _target(target)
    places = None if lengths is None else _lengths(lengths)
    with plain_errors():
        from acutance.calibration.collect import TARGETS
        from acutance.calibration.laws import FITTED
        from acutance.cli import calibrate_actions

        check_choice("--law", law, dict.fromkeys(("table", *FITTED)))
        check_choice("--target", name, TARGETS)

        try:
            calibrate_actions.run(
                model,
                text or [],
                lengths=places,
                given={
                    "target": name,
                    "value": value,
                    "reference": reference,
                    "law": law,
                    "passes": passes,
                    "limit": limit,
                    "windowed": windowed,
                    "seed": seed,
                    "save": save,
                    "save_every": save_every,
                    "resume": resume,
                    "overwrite": overwrite,
                },
                windows=windows,
                batch_size=batch_size,
                tokenizer=tokenizer,
                attention=attention,
                device=device,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
                allow_missing=allow_missing,
                out=out,
                to_json=json,
                console=console,
            )
        except KeyboardInterrupt:
            kept = f"; --resume goes on from {save}" if save is not None else ""
            fail(f"interrupted before the law was found{kept}")
            raise typer.Exit(INTERRUPTED) from None


def _target(text: str) -> tuple[str, float | None]:
    name, equals, value = text.partition("=")
    if not equals:
        return name, None
    try:
        return name, float(value)
    except ValueError as error:
        raise typer.BadParameter(
            f"a value is a number, got {value!r}", param_hint="--target"
        ) from error


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"whole numbers with commas, got {text!r}", param_hint="--lengths"
        ) from error
    if any(n < 2 for n in found) or any(b <= a for a, b in pairwise(found)):
        raise typer.BadParameter(f"they rise from 2 or more, got {text}", param_hint="--lengths")
    return found


grouped(
    calibrate_command,
    {
        READ: "text lengths tokenizer attention device trust_remote_code allow_pickle "
        "allow_missing",
        FIT: "target reference law limit windowed passes",
        LESS: "windows batch_size seed",
        WRITE: "out json save overwrite",
        MANY: "save_every resume",
    },
)
