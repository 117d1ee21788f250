"""``acutance judge``: what laws do to a model's loss on texts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli.options import (
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
    check_resume,
    command,
    load_model,
    read_lengths,
)
from acutance.cli.outputs import Overwrite, check_outputs, write_and_show
from acutance.cli.shared import INTERRUPTED, console, fail, plain_errors, progress

if TYPE_CHECKING:
    from acutance.judging.paired import LossComparison


@dataclass(frozen=True, repr=False, eq=False)
class JudgeOptions:
    """The options of ``acutance judge``."""

    model: Model = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text that no law was fitted to; repeat for more. From 5 texts on, errors are "
            "from text to text.",
        ),
    ] = None
    law: Annotated[
        list[str] | None,
        typer.Option(
            "--law",
            metavar="LAW",
            help="What to judge; repeat for more: a file of 'calibrate -o', a name as ssmax or "
            "log_n:train_length=512, RoPE settings as rope:yarn,factor=2, or heads to switch off, "
            "off:LAYER.HEAD,...",
        ),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help="Window lengths, ascending. Default: the model's longest, at most 512.",
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option(
            "--windows", min=0, help="Windows of the longest length, spread over the text; 0: all."
        ),
    ] = 16
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the windows' positions.")] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Save the state after every window, for --resume."
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
        MANY: "save_every resume",
    },
)
def judge(options: JudgeOptions) -> None:
    """Compare a model's loss with and without laws for its scale, on the same windows."""
    check_outputs(
        {"--json": options.json, "--save": options.save},
        {"MODEL": options.model, "--text": options.text, "--law": options.law},
        state="--save",
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_resume(options.resume, options.save)
    if not options.law:
        raise typer.BadParameter("name at least one law to judge", param_hint="--law")
    if len(set(options.law)) < len(options.law):
        raise typer.BadParameter("a law is given twice", param_hint="--law")
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
