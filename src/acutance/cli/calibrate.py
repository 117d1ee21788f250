"""``acutance calibrate``: fit a law to a model on texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    command,
    load_model,
    read_lengths,
)
from acutance.cli.outputs import Overwrite, check_outputs, write_and_show
from acutance.cli.shared import INTERRUPTED, console, fail, plain_errors

if TYPE_CHECKING:
    from acutance.calibration.fit.calibrate import Advance
    from acutance.calibration.fit.result import Calibration


@dataclass(frozen=True, repr=False, eq=False)
class CalibrateOptions:
    """The options of ``acutance calibrate``."""

    model: Model = None
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="Text file to read; can be repeated."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="LAW", help="Write the law to this file, for 'probe --law'."
        ),
    ] = None
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="METRIC[=VALUE]",
            help=(
                "Metric to keep constant: entropy, normalized_entropy, effective_keys, "
                "top_weight, or max_logit as an upper bound. Without a value: each head's "
                "value at --reference."
            ),
        ),
    ] = "entropy"
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help=(
                "Window lengths to measure, ascending. Default: the model's maximum and its "
                "halves down to 1/8."
            ),
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            min=0,
            help=(
                "Maximum number of windows of each length, spread over the text; 0 reads all. "
                "More windows take longer and reduce noise."
            ),
        ),
    ] = 64
    reference: Annotated[
        int | None,
        typer.Option("--reference", min=2, help="Training length. Default: the shortest length."),
    ] = None
    law: Annotated[
        str,
        typer.Option(
            "--law",
            metavar="NAME",
            help=(
                "A factor per length (table), or a family to fit: constant, ssmax, log_n, "
                "sqrt_log_n, clip_log_n."
            ),
        ),
    ] = "table"
    passes: Annotated[
        int, typer.Option("--passes", min=2, help="Maximum number of passes over the text.")
    ] = 6
    limit: Annotated[
        float, typer.Option("--limit", help="Limit factors to between 1/LIMIT and LIMIT.")
    ] = 16.0
    windowed: Annotated[
        bool, typer.Option("--windowed", help="Also fit layers with a sliding window.")
    ] = False
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", min=1, help="Number of the longest windows that run at once."),
    ] = 4
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for the choice of windows and rows.")
    ] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Save the state after every batch, for --resume."
        ),
    ] = None
    save_every: SaveEvery = 1
    resume: Resume = False
    overwrite: Overwrite = False
    json: JsonTo = None
    tokenizer: Tokenizer = None
    attention: AttentionName = None
    device: Device = "cpu"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False


@command(
    CalibrateOptions,
    {
        READ: "text lengths tokenizer attention device trust_remote_code allow_pickle "
        "allow_missing",
        FIT: "target reference law limit windowed passes",
        LESS: "windows batch_size seed",
        WRITE: "out json save overwrite",
        MANY: "save_every resume",
    },
)
def calibrate(options: CalibrateOptions) -> None:
    """Fit, for every head, the scale that keeps its attention equally focused at any length."""
    check_outputs(
        {"--out": options.out, "--json": options.json, "--save": options.save},
        {"MODEL": options.model, "--text": options.text},
        state="--save",
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_resume(options.resume, options.save)
    target, value = _target(options.target)
    lengths = None if options.lengths is None else read_lengths(options.lengths)
    with plain_errors():
        from acutance.calibration.fit.collect import TARGETS
        from acutance.calibration.fit.law_families import FITTED
        from acutance.calibration.render import show
        from acutance.files import as_json, put_text

        check_choice("--law", options.law, dict.fromkeys(("table", *FITTED)))
        check_choice("--target", target, TARGETS)
        try:
            calibration = _fit(options, lengths, target, value)
        except KeyboardInterrupt:
            kept = (
                f"; continue from {options.save} with --resume" if options.save is not None else ""
            )
            fail(f"interrupted before the law was fitted{kept}")
            raise typer.Exit(INTERRUPTED) from None

        def write_json(path: Path) -> None:
            if str(path) == "-":
                put_text(as_json(calibration.to_dict()) + "\n", path)
            else:
                calibration.to_json(path)

        write_and_show(
            {"law": calibration.save, "json": write_json},
            {"law": options.out, "json": options.json},
            lambda screen: screen.print(show(calibration)),
        )


def _fit(
    options: CalibrateOptions, lengths: tuple[int, ...] | None, target: str, value: float | None
) -> "Calibration":
    """Load the model, read the texts, and fit."""
    import warnings

    from acutance.calibration.fit.calibrate import calibrate
    from acutance.calibration.fit.request import check_asked, check_positions
    from acutance.calibration.fit.windows import batches, default_lengths, describe_samples, draw
    from acutance.corpus import texts as corpus
    from acutance.report.screen import note

    texts = corpus.read(options.text) if options.text else [corpus.bundled()]
    with console().status("loading the model"):
        loaded = load_model(options, options.device)
    lengths = default_lengths(loaded) if lengths is None else lengths
    wanted: dict[str, Any] = {
        "lengths": lengths,
        "target": target,
        "value": value,
        "reference": options.reference,
        "law": options.law,
        "passes": options.passes,
        "limit": options.limit,
        "windowed": options.windowed,
    }
    check_asked(**wanted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_positions(loaded.model, lengths)
    for warning in caught:
        console().print(note(("note", "yellow"), f": {warning.message}"))
    samples = draw(texts, loaded.tokenizer, lengths, options.windows, options.seed)
    loaded.check_tokens(piece for sample in samples.values() for piece in sample.pieces)
    console().print(note((describe_samples(samples), "dim")), soft_wrap=True)
    windows = batches(loaded, samples, options.batch_size)
    tokens = sum(part["input_ids"].numel() for parts in windows.values() for part in parts)
    with _progress(tokens, console()) as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lengths reach", UserWarning)  # said above
        calibration = calibrate(
            loaded.model,
            windows,
            **wanted,
            seed=options.seed,
            save=options.save,
            save_every=options.save_every,
            resume=options.resume,
            overwrite=options.overwrite,
            advance=advance,
        )
    return replace(calibration, weights_not_loaded=loaded.not_loaded)


def _target(text: str) -> tuple[str, float | None]:
    """Parse ``METRIC[=VALUE]`` into the name of a target and its value, None if it has none."""
    name, equals, value = text.partition("=")
    if not equals:
        return name, None
    try:
        return name, float(value)
    except ValueError as error:
        raise typer.BadParameter(
            f"the value must be a number, got {value!r}", param_hint="--target"
        ) from error


@contextmanager
def _progress(tokens: int, screen: Any) -> "Iterator[Advance]":
    """A bar on standard error; silent where that is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("measuring without a law", total=tokens)

        def advance(count: int, number: int, most: int) -> None:
            bar.update(
                task,
                total=tokens * most,
                description="without a law" if number == 1 else f"pass {number} of {most}",
            )
            bar.advance(task, count)

        yield advance
