"""``acutance judge``: what laws do to a model's loss on texts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.options import (
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
    check_resume,
    command,
    load_model,
    read_lengths,
)
from acutance.cli.outputs import Overwrite, check_outputs, write_and_show
from acutance.cli.shared import INTERRUPTED, console, fail, plain_errors, progress

if TYPE_CHECKING:
    from acutance.calibration.fit.result import Calibration
    from acutance.corpus.text_model import TextModel
    from acutance.corpus.texts import Text
    from acutance.judging.paired import LossComparison
    from acutance.judging.text_windows import HeldOut
    from acutance.summary.head_summary import HeadSummary
    from acutance.summary.state import State


@dataclass(frozen=True, repr=False, eq=False)
class JudgeOptions:
    """The options of ``acutance judge``."""

    model: Model = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text for measuring the loss, other than what a law was fitted to; repeat for "
            "more. With 5 texts or more, standard errors come from the differences between "
            "texts, not windows. Default: the included text.",
        ),
    ] = None
    law: Annotated[
        list[str] | None,
        typer.Option(
            "--law",
            metavar="LAW",
            help="What to judge (required); repeat for more. A file from 'calibrate -o' or "
            "'budget -o', a cache plan of another tool such as duo_attention:DIR, a name such as "
            "ssmax or log_n:train_length=512, a window such as window:size=1024,sinks=4, RoPE "
            "settings such as rope:yarn,factor=2, or heads to switch off, such as off:3.1,4.0 "
            "(layer 3 head 1, layer 4 head 0).",
        ),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help="Window lengths to compare at, ascending. Default: the model's maximum length, at "
            "most 512.",
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            min=0,
            help="Maximum number of windows of the longest length, spread over the text; 0: all. "
            "Shorter windows are cut from these.",
        ),
    ] = 16
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for the choice of windows.")
    ] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Save the state to this file as windows finish, for --resume.",
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
    JudgeOptions,
    {
        READ: "text law lengths tokenizer attention device trust_remote_code allow_pickle "
        "allow_missing",
        LESS: "windows seed",
        WRITE: "json save overwrite",
        LONG: "save_every resume",
    },
)
def judge(options: JudgeOptions) -> None:
    """Compare a model's loss with and without each law, on the same windows of text.

    A law is a factor on the attention logits as a function of n, the number of keys that a row
    sees. Laws by name are log_n, clip_log_n, sqrt_log_n, ssmax, yarn, llama4, mistral3, info_scale,
    cosine_log_n, cos_scale, critical, asentmax and adaptive_poly, with the parameters that
    acutance.scaling documents. Windows, RoPE settings and heads to switch off are compared in the
    same way.
    """
    check_outputs(
        {"--json": options.json, "--save": options.save},
        {"MODEL": options.model, "--text": options.text, "--law": options.law},
        state="--save",
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_resume(options.resume, options.save)
    if not options.law:
        raise typer.BadParameter(
            "name at least one law to judge, such as ssmax or a file from 'calibrate -o'",
            param_hint="--law",
        )
    if len(set(options.law)) < len(options.law):
        twice = next(law for law in options.law if options.law.count(law) > 1)
        raise typer.BadParameter(f"{twice} is given twice", param_hint="--law")
    lengths = None if options.lengths is None else read_lengths(options.lengths)
    with plain_errors():
        from acutance.files import as_json, put_text
        from acutance.judging.render import show

        try:
            comparison = _compare(options, lengths)
        except KeyboardInterrupt:
            rest = "" if options.save is None else f"; continue from {options.save} with --resume"
            fail(f"interrupted before all windows were read{rest}")
            raise typer.Exit(INTERRUPTED) from None
        write_and_show(
            {"--json": lambda path: put_text(as_json(comparison.to_dict()) + "\n", path)},
            {"--json": options.json},
            lambda screen: screen.print(show(comparison)),
        )


def _compare(options: JudgeOptions, lengths: tuple[int, ...] | None) -> "LossComparison":
    """Load the model, read the texts, and compare; progress is shown on standard error."""
    import warnings
    from importlib.metadata import version

    from acutance.calibration.fit.request import check_positions
    from acutance.corpus import texts as corpus
    from acutance.judging.judge_model import judge_windows
    from acutance.judging.remedies import as_remedies
    from acutance.judging.text_windows import loss_of, text_windows
    from acutance.report.screen import note

    remedies = as_remedies(options.law)
    texts = corpus.read(options.text) if options.text else [corpus.bundled()]
    with console().status("loading the model"):
        loaded = load_model(options, options.device, head=True)
    lengths = (loaded.window(None),) if lengths is None else lengths
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_positions(loaded.model, lengths)
    for warning in caught:
        console().print(note(("note", "yellow"), f": {warning.message}"))
    windows = text_windows(loaded, texts, lengths, options.windows, options.seed)
    tokens = windows.tokens * (1 + len(remedies))
    bar = progress("judging", windows.count, tokens, console())
    with bar as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lengths reach", UserWarning)  # said above
        comparison = judge_windows(
            loaded.model,
            windows,
            remedies,
            loss_of(loaded),
            save=options.save,
            save_every=options.save_every,
            resume=options.resume,
            overwrite=options.overwrite,
            advance=advance,
        )
    about = {"model": loaded.name, "text": [text.name for text in texts], **loaded.about}
    about |= {name: version(name) for name in ("acutance", "transformers")}
    return replace(comparison, about=about)


#: Held-out windows of ``probe --judge``, at least.
_HELD_OUT = 4


@dataclass(frozen=True)
class Judged:
    """What ``probe --judge`` measured of the changes that its statistics propose.

    Attributes:
        comparison: of the losses; None if nothing was to be judged.
        reasons: why each change was proposed.
    """

    comparison: "LossComparison | None" = None
    reasons: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """Sentences: the verdicts, how they were measured, and which changes to make."""
        from acutance.judging.render import conclusion, sentences

        if self.comparison is None:
            return []
        return [*sentences(self.comparison), conclusion(self.comparison)]

    def to_dict(self) -> dict[str, Any]:
        """JSON record for files and the page: laws with verdicts, windows and loss, sentences."""
        if self.comparison is None:
            return {"laws": []}
        record = self.comparison.to_dict()
        for law, reason in zip(record["laws"], self.reasons, strict=True):
            law["reason"] = reason
        return record | {"sentences": self.sentences}

    def noted(self, state: "State", save: Path | None) -> "State":
        """The state with the verdicts in ``about``, written to the file if there is one."""
        about = {**state.summary.about, "judged": self.sentences}
        state = replace(state, summary=replace(state.summary, about=about))
        if save is not None:
            state.save(save)
        return state


def check_judge(**options: object) -> None:
    """Refuse options of ``probe`` that do not go with --judge, unless they are None."""
    for name, given in options.items():
        if given is not None:
            raise typer.BadParameter(f"cannot be combined with --{name}", param_hint="--judge")


def hold_out_windows(headed: "TextModel", texts: "list[Text]", length: int) -> "HeldOut":
    """Split texts: the probe reads the beginnings, the losses are measured on the ends.

    Raises:
        ValueError: if the text is too short.
    """
    from acutance.judging.text_windows import hold_out

    return hold_out(headed, texts, length, _HELD_OUT)


def judge_proposals(
    headed: "TextModel",
    held: "HeldOut",
    summary: "HeadSummary",
    *,
    length: int,
    train_length: int | None,
    save: Path | None,
    save_every: int,
    resume: bool,
) -> Judged:
    """Judge what a summary proposes on held-out windows; progress is shown on standard error.

    Raises:
        typer.Exit: after Ctrl-C.
    """
    from acutance.judging.judge_model import judge_windows
    from acutance.judging.proposed import proposed_remedies
    from acutance.judging.text_windows import loss_of, text_windows
    from acutance.report.screen import note

    loss = loss_of(headed)
    proposed = proposed_remedies(
        headed.model, summary, length, train_length=train_length, causal=not loss.reads_all
    )
    for sentence in proposed.left_out:
        console().print(note(("note", "yellow"), f": {sentence}"), soft_wrap=True)
    if not proposed.remedies:
        return Judged()
    windows = text_windows(replace(headed, tokenizer=held.ends), held.judged, [length], 0, 0)
    tokens = windows.tokens * (1 + len(proposed.remedies))
    with progress("judging", windows.count, tokens, console()) as advance:
        try:
            comparison = judge_windows(
                headed.model,
                windows,
                proposed.remedies,
                loss,
                save=None if save is None else f"{save}.judging",
                save_every=save_every,
                resume=resume,
                overwrite=not resume,
                advance=advance,
            )
        except KeyboardInterrupt:
            rest = "" if save is None else f"; continue from {save} with --resume"
            fail(f"interrupted while judging by the loss{rest}")
            raise typer.Exit(INTERRUPTED) from None
    return Judged(comparison, proposed.reasons)


def judge_law(
    calibration: "Calibration",
    headed: "TextModel",
    held: "HeldOut",
    lengths: tuple[int, ...],
    *,
    windowed: bool,
    save: Path | None,
    save_every: int,
    resume: bool,
) -> "Calibration":
    """Measure a fitted law's effect on the held-out loss, print it, and add it to the result."""
    import warnings

    from acutance.judging.judge_model import judge_windows
    from acutance.judging.remedies import LawRemedy
    from acutance.judging.render import verdict_sentence
    from acutance.judging.text_windows import loss_of, text_windows
    from acutance.report.screen import note

    loss = loss_of(headed)
    # a causal model's long windows have the short ones inside
    read = lengths if loss.reads_all else lengths[-1:]
    windows = text_windows(replace(headed, tokenizer=held.ends), held.judged, read, 0, 0)
    remedy = LawRemedy("the law", calibration, windowed)
    with (
        progress("judging", windows.count, 2 * windows.tokens, console()) as advance,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "lengths reach", UserWarning)  # said before
        comparison = judge_windows(
            headed.model,
            windows,
            [remedy],
            loss,
            save=None if save is None else f"{save}.judging",
            save_every=save_every,
            resume=resume,
            overwrite=not resume,
            advance=advance,
        )
    (law,) = comparison.laws
    where = f"on {comparison.windows} held-out windows, {comparison.loss}"
    console().print(note(f"{where}: {verdict_sentence(law)}"), soft_wrap=True)
    record = law.to_dict() | {
        name: part
        for name, part in comparison.to_dict().items()
        if name in ("windows", "tokens", "loss", "mean_loss", "lengths", "groups", "unit")
    }
    return replace(calibration, judged=record)


def held_out_ends(
    headed: "TextModel", texts: "list[Text]", longest: int, *, unjudged: bool
) -> "HeldOut | None":
    """Split texts: the law is fitted to the beginnings and judged on the ends.

    None, for no judging, if the text is too short and ``unjudged`` allows it.
    """
    from acutance.judging.text_windows import hold_out

    try:
        return hold_out(headed, texts, longest)
    except ValueError as error:
        if unjudged:
            return None
        raise type(error)(f"{error}, or --even-if-worse for a law that nothing judged") from error


def hurts(calibration: "Calibration") -> bool:
    """Whether the law raises the loss, at least at some positions."""
    from acutance.judging.paired import HURTS, MIXED

    return calibration.judged is not None and calibration.judged["verdict"] in (HURTS, MIXED)


def nothing_found(calibration: "Calibration") -> bool:
    """Whether a fit to the loss found no law, so that there is nothing to judge or write."""
    from acutance.calibration.by_loss.result import LossCalibration

    return isinstance(calibration, LossCalibration) and calibration.empty
