"""``acutance judge``: what laws do to a model's loss on texts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli.inputs import (
    about_run,
    lengths_noted,
    note_lengths,
    note_searches,
    read_laws,
    read_texts,
    reading,
)
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
    LanguageModel,
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
from acutance.cli.shared import (
    console,
    plain_errors,
    progress,
    resumable,
)

if TYPE_CHECKING:
    from acutance.judging.paired import LossComparison


@dataclass(frozen=True, repr=False, eq=False)
class JudgeOptions:
    """The options of ``acutance judge``."""

    model: LanguageModel
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
    train_length: Annotated[
        int | None,
        typer.Option(
            "--train-length",
            metavar="N",
            min=2,
            help="Context length in training, in tokens, from which RoPE settings such as yarn are "
            "computed. Default: the configuration's.",
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
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False


@command(
    JudgeOptions,
    {
        READ: "text law train_length lengths tokenizer attention device trust_remote_code "
        "allow_pickle allow_missing",
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

        with resumable("before all windows were read", options.save):
            comparison = _compare(options, lengths)
        write_and_show(
            {"--json": lambda path: put_text(as_json(comparison.to_dict()) + "\n", path)},
            {"--json": options.json},
            lambda screen: screen.print(comparison.table()),
        )


def _compare(options: JudgeOptions, lengths: tuple[int, ...] | None) -> "LossComparison":
    """Load the model, read the texts, and compare; progress is shown on standard error."""
    from acutance.judging.judge_model import judge_windows
    from acutance.judging.remedies import for_train_length
    from acutance.judging.text_windows import loss_of, text_windows

    remedies = read_laws(options.law or ())
    texts = read_texts(options.text)
    with console().status("loading the model"):
        loaded = load_model(options, options.device, head=True)
    remedies = for_train_length(loaded.model, remedies, options.train_length)
    lengths = (loaded.window(None),) if lengths is None else lengths
    note_lengths(loaded.model, lengths)
    note_searches(remedies, lengths[-1])
    with reading(texts) as texts:
        windows = text_windows(loaded, texts, lengths, options.windows, options.seed)
    tokens = windows.tokens * (1 + len(remedies))
    bar = progress("judging", windows.count, tokens, console())
    with bar as advance, lengths_noted():
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
    return replace(comparison, about=about_run(loaded, texts))
