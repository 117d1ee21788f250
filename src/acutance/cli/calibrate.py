"""``acutance calibrate``: fit a law to a model on texts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli import inputs
from acutance.cli import options as cli
from acutance.cli.held_out import compare_held_out, record_of
from acutance.cli.shared import fail, pass_progress, refuse, tell

if TYPE_CHECKING:
    from acutance.calibration.result import Calibration
    from acutance.corpus.load_model import TextModel
    from acutance.judging.judge_model import HeldOut


def _target(text: str) -> tuple[str, float | None]:
    """Parse ``METRIC[=VALUE]`` into the name of a target and its value, None if it has none."""
    name, equals, value = text.partition("=")
    if not equals:
        return name, None
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"the value after '=' must be a number, got {value!r}") from None


def _window(text: str) -> list[int]:
    """Parse ``SIZE[,SINKS]``."""
    return cli.read_pair(text, "SIZE or SIZE,SINKS, as in 1024,4", 1, (1, 0))


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CalibrateOptions(cli.RunOptions):
    """The options of ``acutance calibrate``.

    Attributes:
        text: Text file to fit to; repeat for more. Default: the included text.
        out: Write the law to this file, for 'probe --law', 'judge --law' and acutance.apply.
        target: What the factors achieve. entropy, normalized_entropy, effective_keys or top_weight:
            each head has the same mean of this metric at every length. loss: the model's loss
            falls. VALUE is the mean to reach; without it, each head keeps its value at --reference.
            Default: entropy.
        lengths: Window lengths to fit at, ascending. Default: 1/8, 1/4, 1/2 and all of the model's
            maximum length.
        windows: Maximum number of windows of each length, spread over the text; 0: all. More
            windows take longer and reduce noise. Default: 64; 24 with --target loss.
        reference: Length at which every head keeps its present value (factor 1), usually the
            training length. One of --lengths. Default: the shortest.
        law: Form of the law: one factor per length (table) or for all lengths (constant). With
            --target loss and --window also none.
        window: With --target loss: let a head read only the newest SIZE keys and the first SINKS
            (an attention window) if this lowers the loss; repeat to choose between windows.
        passes: Maximum number of passes over the text. Each measures with the factors of the pass
            before and improves them.
        limit: Keep every factor between 1/FACTOR and FACTOR.
        windowed: Also fit layers with sliding-window attention.
        batch_size: Windows of the longest length per batch; batches of shorter windows have as many
            tokens. Always 1 with --target loss.
        save: With --target loss: save the state to this file as windows finish, for --resume, and
            the losses of the held-out text to FILE.judging.
        save_every: Save the state after this many new windows. Unsaved windows are run again after
            an interruption.
        even_if_worse: Write the law even if it raises the loss of the held-out text, or the loss
            could not be measured.
    """

    model: cli.Model = None
    out: cli.Out = None
    target: Annotated[
        tuple[str, float | None], typer.Option(metavar="METRIC[=VALUE]"), cli.Role(read=_target)
    ] = ("entropy", None)
    lengths: cli.Lengths = None
    windows: Annotated[int | None, typer.Option(min=0)] = None
    reference: cli.Tokens = None
    law: Annotated[str, typer.Option(metavar="NAME")] = "table"
    window: Annotated[
        list[list[int]] | None, typer.Option(metavar="SIZE[,SINKS]"), cli.Role(read=_window)
    ] = None
    passes: Annotated[int, typer.Option(metavar="N", min=2)] = 6
    limit: Annotated[float, typer.Option(metavar="FACTOR")] = 16.0
    windowed: bool = False
    batch_size: cli.Least1 = 4
    even_if_worse: bool = False
    save_every: cli.SaveEvery = 1

    parts = ("", ".judging")


@cli.command(
    CalibrateOptions,
    {cli.FIT: "target reference law window limit windowed passes", cli.WRITE: "even_if_worse"},
    interrupted="before the law was fitted and judged",
)
def calibrate(options: CalibrateOptions) -> None:
    """Fit a law: for every head, a factor on its logits for each length of the input.

    A law is a factor on the attention logits as a function of n, the number of keys that a row
    sees. By default the factors keep attention equally focused at every length; with --target loss
    they lower the model's loss. The end of the text is not used for fitting: there the model's loss
    is measured with and without the law before the law is written.
    """
    _check(options)
    from acutance.calibration.result import LossCalibration
    from acutance.judging.paired import HURTS, MIXED

    calibration = _fit(options)
    verdict = None if calibration.judged is None else calibration.judged["verdict"]
    nothing = isinstance(calibration, LossCalibration) and calibration.empty
    hurts = verdict in (HURTS, MIXED)
    refused = options.out is not None and not options.even_if_worse and hurts
    law = None if refused or nothing else options.out
    options.write_and_show(calibration.table, calibration.to_dict, law=(law, calibration.save))
    if refused:
        fail(
            f"the law was not written to {options.out}: it raises the loss of held-out text; "
            "--even-if-worse writes it"
        )
        raise typer.Exit(1)
    if nothing:
        rest = "nothing was judged" if options.out is None else f"{options.out} was not written"
        tell(f"no law was found, so {rest}")


def _check(options: CalibrateOptions) -> None:
    """Refuse options that do not go together, before a model is loaded."""
    from acutance.calibration.gradients import FAMILIES
    from acutance.calibration.measured import TARGETS

    target, value = options.target
    cli.check_choice("--law", options.law, FAMILIES)
    cli.check_choice("--target", target, (*TARGETS, "loss"))
    by_loss, no_law = target == "loss", options.law == "none"
    if by_loss:
        if options.model is None:
            refuse("MODEL", "--target loss needs a language model")
        if value is not None:
            refuse("--target", f"loss is lowered, not brought to a value: remove ={value}")
        if options.reference is not None:
            refuse("--reference", "cannot be combined with --target loss")
        if no_law and not options.window:
            refuse("--law none", "needs --window, or there is nothing to fit")
        return
    loss = "it needs --target loss"
    if options.window:
        refuse("--window", loss)
    if no_law:
        refuse("--law none", loss)
    if options.save is not None:
        rest = "every other target is fitted in one run, without a state"
        refuse("--save", f"{loss}; {rest}")


def _fit(options: CalibrateOptions) -> "Calibration":
    """Load the model, read the texts, fit, and judge on the held-out ends of the texts."""
    from acutance.calibration.fit import calibrate
    from acutance.calibration.measured import check_request
    from acutance.calibration.result import LossCalibration
    from acutance.calibration.windows import batches, default_lengths, describe_samples, draw
    from acutance.corpus.load_model import HeadError
    from acutance.judging.judge_model import hold_out, loss_of
    from acutance.scaling import Window

    texts = options.texts()
    target, value = options.target
    by_loss = target == "loss"
    headed: TextModel | None = None
    try:
        headed = options.load(head=True)
        loaded = headed if by_loss else headed.base
    except HeadError:
        if by_loss:
            raise
        loaded = options.load()
    lengths = options.lengths or default_lengths(loaded)
    most = options.windows if options.windows is not None else (24 if by_loss else 64)
    windows = [Window(size, sinks=sum(sinks)) for size, *sinks in options.window or []]
    arguments = cli.keywords(
        calibrate, options, target=target, value=value, lengths=lengths, window=windows or None
    )
    if not by_loss:
        names = ("target", "value", "lengths", "reference", "law")
        check_request(**{name: arguments[name] for name in names})
    inputs.note_lengths(loaded.model, lengths)
    with inputs.reading(texts) as texts:
        texts = [replace(text, content=text.tokenised(loaded.tokenizer)) for text in texts]
    held_out: HeldOut | None = None
    if headed is not None:
        try:
            held_out = hold_out(headed, texts, lengths[-1])
        except ValueError as error:
            if not options.even_if_worse:
                advice = "or --even-if-worse for a law that nothing judged"
                raise type(error)(f"{error}, {advice}") from error
        else:
            texts = held_out.fit
    read = lengths
    if by_loss:
        arguments["loss"] = loss_of(loaded)
        read = lengths if arguments["loss"].reads_all else lengths[-1:]
    samples = draw(texts, loaded.tokenizer, read, most, options.seed)
    loaded.check_tokens(piece for sample in samples.values() for piece in sample.pieces)
    tell((describe_samples(samples), "dim"))
    drawn: Any = batches(loaded, samples, 1 if by_loss else options.batch_size)
    tokens = sum(batch["input_ids"].numel() for several in drawn.values() for batch in several)
    if len(read) < len(lengths):  # cut from the longest
        (drawn,) = drawn.values()
    with pass_progress(tokens) as advance, inputs.lengths_noted():
        arguments |= {"model": loaded.model, "batches": drawn, "advance": advance}
        calibration = calibrate(**arguments)
    calibration = replace(calibration, weights_not_loaded=loaded.not_loaded)
    if isinstance(calibration, LossCalibration) and calibration.empty:
        return calibration
    if headed is not None and held_out is not None:
        return _judge(options, calibration, headed, held_out, lengths)
    reason = "the model has no language-model head" if headed is None else "the text is too short"
    inputs.noted(f"{reason}, so the loss under the law was not measured")
    return calibration


def _judge(
    options: CalibrateOptions,
    calibration: "Calibration",
    headed: "TextModel",
    held: "HeldOut",
    lengths: tuple[int, ...],
) -> "Calibration":
    """Measure a fitted law's effect on the held-out loss, print it, and add it to the result."""
    from acutance.calibration.apply_law import LawChange
    from acutance.judging.judge_model import loss_of, text_windows
    from acutance.judging.paired import verdict_sentence

    # a causal model's long windows have the short ones inside
    read = lengths if loss_of(headed).reads_all else lengths[-1:]
    windows = text_windows(headed, held.judged, read, 0, 0)
    with inputs.lengths_noted():
        change = LawChange("the law", calibration, options.windowed)
        comparison = compare_held_out(options, headed, windows, [change])
    (law,) = comparison.laws
    where = f"judged on {comparison.windows} held-out windows ({comparison.loss})"
    tell(f"{where}: {verdict_sentence(law)}")
    return replace(calibration, judged=record_of(law, comparison))
