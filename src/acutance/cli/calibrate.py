"""``acutance calibrate``: fit a law to a model on texts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.held_out import (
    held_out_ends,
    hurts,
    judge_law,
    load_with_head,
    nothing_found,
)
from acutance.cli.inputs import lengths_noted, note_lengths, read_texts, reading
from acutance.cli.options import (
    FIT,
    LESS,
    LONG,
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
    read_lengths,
    read_window,
)
from acutance.cli.outputs import Overwrite, check_outputs, write_and_show
from acutance.cli.shared import (
    console,
    fail,
    pass_progress,
    plain_errors,
    resumable,
)

if TYPE_CHECKING:
    from acutance.calibration.fit.result import Calibration


@dataclass(frozen=True, repr=False, eq=False)
class CalibrateOptions:
    """The options of ``acutance calibrate``."""

    model: Model = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text file to fit to; repeat for more. Default: the included text.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="LAW",
            help="Write the law to this file, for 'probe --law', 'judge --law' and acutance.apply.",
        ),
    ] = None
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="METRIC[=VALUE]",
            help=(
                "What the factors achieve. entropy, normalized_entropy, effective_keys or "
                "top_weight: each head has the same mean of this metric at every length. loss: "
                "the model's loss falls. VALUE is the mean to reach; without it, each head keeps "
                "its value at --reference."
            ),
        ),
    ] = "entropy"
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help=(
                "Window lengths to fit at, ascending. Default: 1/8, 1/4, 1/2 and all of the "
                "model's maximum length."
            ),
        ),
    ] = None
    windows: Annotated[
        int | None,
        typer.Option(
            "--windows",
            min=0,
            help=(
                "Maximum number of windows of each length, spread over the text; 0: all. "
                "More windows take longer and reduce noise. Default: 64; 24 with --target loss."
            ),
        ),
    ] = None
    reference: Annotated[
        int | None,
        typer.Option(
            "--reference",
            metavar="N",
            min=2,
            help=(
                "Length at which every head keeps its present value (factor 1), usually the "
                "training length. One of --lengths. Default: the shortest."
            ),
        ),
    ] = None
    law: Annotated[
        str,
        typer.Option(
            "--law",
            metavar="NAME",
            help=(
                "Form of the law: one factor per length (table), or a function of n: constant, "
                "ssmax, log_n, sqrt_log_n or clip_log_n. With --target loss: table, constant, or "
                "none if --window is given."
            ),
        ),
    ] = "table"
    window: Annotated[
        list[str] | None,
        typer.Option(
            "--window",
            metavar="SIZE[,SINKS]",
            help=(
                "With --target loss: let a head read only the newest SIZE keys and the first SINKS "
                "(an attention window) if this lowers the loss; repeat to choose between windows."
            ),
        ),
    ] = None
    passes: Annotated[
        int,
        typer.Option(
            "--passes",
            metavar="N",
            min=2,
            help=(
                "Maximum number of passes over the text. Each measures with the factors of the "
                "pass before and improves them."
            ),
        ),
    ] = 6
    limit: Annotated[
        float,
        typer.Option(
            "--limit",
            metavar="FACTOR",
            help="Keep every factor between 1/FACTOR and FACTOR.",
        ),
    ] = 16.0
    windowed: Annotated[
        bool, typer.Option("--windowed", help="Also fit layers with sliding-window attention.")
    ] = False
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            help=(
                "Windows of the longest length per batch; batches of shorter windows have as many "
                "tokens. Always 1 with --target loss."
            ),
        ),
    ] = 4
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for the choice of windows.")
    ] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help=(
                "With --target loss: save the state to this file as windows finish, for --resume, "
                "and the losses of the held-out text to FILE.judging."
            ),
        ),
    ] = None
    even_if_worse: Annotated[
        bool,
        typer.Option(
            "--even-if-worse",
            help=(
                "Write the law even if it raises the loss of the held-out text, or the loss could "
                "not be measured."
            ),
        ),
    ] = False
    save_every: SaveEvery = 1
    resume: Resume = False
    overwrite: Overwrite = False
    json: JsonTo = None
    tokenizer: Tokenizer = None
    attention: AttentionName = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False


@command(
    CalibrateOptions,
    {
        READ: "text lengths tokenizer attention device trust_remote_code allow_pickle "
        "allow_missing",
        FIT: "target reference law window limit windowed passes",
        LESS: "windows batch_size seed",
        WRITE: "out even_if_worse json save overwrite",
        LONG: "save_every resume",
    },
)
def calibrate(options: CalibrateOptions) -> None:
    """Fit a law: for every head, a factor on its logits for each length of the input.

    A law is a factor on the attention logits as a function of n, the number of keys that a row
    sees. By default the factors keep attention equally focused at every length; with --target loss
    they lower the model's loss. The end of the text is not used for fitting: there the model's loss
    is measured with and without the law before the law is written.
    """
    check_outputs(
        {"--out": options.out, "--json": options.json, "--save": options.save},
        {"MODEL": options.model, "--text": options.text},
        state="--save",
        parts=("", ".judging"),
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_resume(options.resume, options.save)
    target, value = _target(options.target)
    lengths = None if options.lengths is None else read_lengths(options.lengths)
    with plain_errors():
        from acutance.calibration.fit.families import FITTED
        from acutance.calibration.fit.measure import TARGETS
        from acutance.files import as_json, put_text
        from acutance.report.screen import note

        check_choice("--law", options.law, dict.fromkeys(("table", *FITTED, "none")))
        check_choice("--target", target, (*TARGETS, "loss"))
        if target == "loss":
            _check_by_loss(options, value)
        elif options.window or options.law == "none":
            option = "--window" if options.window else "--law none"
            raise typer.BadParameter("it needs --target loss", param_hint=option)
        elif options.save is not None:
            raise typer.BadParameter(
                "it needs --target loss; every other target is fitted in one run, without a state",
                param_hint="--save",
            )
        with resumable("before the law was fitted and judged", options.save):
            calibration = _fit(options, lengths, target, value)

        nothing = nothing_found(calibration)
        refused = options.out is not None and not options.even_if_worse and hurts(calibration)

        text = as_json(calibration.to_dict(), indent=1) + "\n"
        write_and_show(
            {"law": calibration.save, "json": lambda path: put_text(text, path)},
            {"law": None if refused or nothing else options.out, "json": options.json},
            lambda screen: screen.print(calibration.table()),
        )
        if refused:
            fail(
                f"the law was not written to {options.out}: it raises the loss of held-out text; "
                "--even-if-worse writes it"
            )
            raise typer.Exit(1)
        if nothing:
            rest = "nothing was judged" if options.out is None else f"{options.out} was not written"
            console().print(note(f"no law was found, so {rest}"), soft_wrap=True)


def _check_by_loss(options: CalibrateOptions, value: float | None) -> None:
    """Refuse options that do not go with ``--target loss``, before a model is loaded."""
    from acutance.calibration.by_loss.fit import FAMILIES

    if options.model is None:
        raise typer.BadParameter("--target loss needs a language model", param_hint="MODEL")
    if value is not None:
        raise typer.BadParameter(
            f"loss is lowered, not brought to a value: remove ={value:g}", param_hint="--target"
        )
    if options.reference is not None:
        raise typer.BadParameter("cannot be combined with --target loss", param_hint="--reference")
    check_choice("--law with --target loss", options.law, FAMILIES)
    if options.law == "none" and not options.window:
        raise typer.BadParameter(
            "needs --window, or there is nothing to fit", param_hint="--law none"
        )
    for text in options.window or ():
        read_window(text)


def _fit(
    options: CalibrateOptions, lengths: tuple[int, ...] | None, target: str, value: float | None
) -> "Calibration":
    """Load the model, read the texts, and fit."""
    from acutance.calibration.fit.calibrate import calibrate, check_request
    from acutance.calibration.fit.windows import batches, default_lengths, describe_samples, draw
    from acutance.report.screen import note

    texts = read_texts(options.text)
    by_loss = target == "loss"
    with console().status("loading the model"):
        headed, loaded = load_with_head(options, by_loss)
    lengths = default_lengths(loaded) if lengths is None else lengths
    most = options.windows if options.windows is not None else (24 if by_loss else 64)
    arguments: dict[str, Any] = {
        "lengths": lengths,
        "target": target,
        "value": value,
        "reference": options.reference,
        "law": options.law,
        "passes": options.passes,
        "limit": options.limit,
        "windowed": options.windowed,
    }
    if not by_loss:
        check_request(**arguments)
    elif options.window:
        arguments["window"] = [read_window(text) for text in options.window]
    note_lengths(loaded.model, lengths)
    with reading(texts) as texts:
        texts = [replace(text, content=text.tokenised(loaded.tokenizer)) for text in texts]
    held_out = None
    if headed is not None:
        held_out = held_out_ends(headed, texts, lengths[-1], unjudged=options.even_if_worse)
    if held_out is not None:
        texts = held_out.fit
    read = lengths
    if by_loss and headed is not None:
        from acutance.judging.text_windows import loss_of

        loaded = replace(loaded, model=headed.model)
        arguments["loss"] = loss_of(headed)
        read = lengths if arguments["loss"].reads_all else lengths[-1:]
    samples = draw(texts, loaded.tokenizer, read, most, options.seed)
    loaded.check_tokens(piece for sample in samples.values() for piece in sample.pieces)
    console().print(note((describe_samples(samples), "dim")), soft_wrap=True)
    windows: Any = batches(loaded, samples, 1 if by_loss else options.batch_size)
    tokens = sum(part["input_ids"].numel() for parts in windows.values() for part in parts)
    if len(read) < len(lengths):  # cut from the longest
        (windows,) = windows.values()
    with pass_progress(tokens, console()) as advance, lengths_noted():
        calibration = calibrate(
            loaded.model, windows, **arguments, save=options.save, save_every=options.save_every,
            resume=options.resume, overwrite=options.overwrite, advance=advance,
        )  # fmt: skip
    calibration = replace(calibration, weights_not_loaded=loaded.not_loaded)
    if nothing_found(calibration):
        return calibration
    if headed is not None and held_out is not None:
        return judge_law(
            calibration, headed, held_out, lengths,
            windowed=options.windowed, save=options.save, save_every=options.save_every,
            resume=options.resume,
        )  # fmt: skip
    reason = "the model has no language-model head" if headed is None else "the text is too short"
    console().print(
        note(("note", "yellow"), f": {reason}, so the loss under the law was not measured"),
        soft_wrap=True,
    )
    return calibration


def _target(text: str) -> tuple[str, float | None]:
    """Parse ``METRIC[=VALUE]`` into the name of a target and its value, None if it has none."""
    name, equals, value = text.partition("=")
    if not equals:
        return name, None
    try:
        return name, float(value)
    except ValueError as error:
        raise typer.BadParameter(
            f"the value after '=' must be a number, got {value!r}", param_hint="--target"
        ) from error
