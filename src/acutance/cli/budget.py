"""``acutance budget``: what each key head must keep in the cache, at a given size or loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.inputs import read_texts, reading
from acutance.cli.options import (
    LESS,
    LONG,
    READ,
    WRITE,
    AllowMissing,
    AllowPickle,
    AttentionName,
    Dark,
    Device,
    JsonTo,
    LanguageModel,
    Resume,
    Tokenizer,
    TrustRemoteCode,
    check_resume,
    command,
    load_model,
    read_lengths,
)
from acutance.cli.outputs import Overwrite, check_outputs, write_and_show
from acutance.cli.shared import (
    check_figure,
    console,
    pass_progress,
    plain_errors,
    resumable,
)

if TYPE_CHECKING:
    from acutance.caching import Budget, HeadPlan

PLAN = "What heads may keep"
#: Windows that a search needs.
_LEAST = 4


@dataclass(frozen=True, repr=False, eq=False)
class BudgetOptions:
    """The options of ``acutance budget``."""

    model: LanguageModel
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text file to read; repeat for more. Default: the included text.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PLAN", help="Write the plan to this file."),
    ] = None
    keep: Annotated[
        float | None,
        typer.Option(
            "--keep",
            help="Share of the full cache (all keys and values, not quantised) that the plan may "
            "take. Default: 0.5.",
        ),
    ] = None
    max_loss: Annotated[
        float | None,
        typer.Option(
            "--max-loss",
            help="Instead of --keep: find the smallest plan that raises the loss by at most this, "
            "in nats per token.",
        ),
    ] = None
    streaming: Annotated[
        list[str] | None,
        typer.Option(
            "--streaming",
            metavar="FIRST,RECENT",
            help="Let a head keep only the FIRST first and the RECENT newest keys (streaming); "
            "repeat for more choices. Rounding is then not tried. Default: 4 first and 124, 252 or "
            "508 newest keys, or all keys and values in 8 or 4 bits, or keys in 4 and values in 2.",
        ),
    ] = None
    length: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N",
            help="Length of the windows in tokens; the plan and its size are for a text of this "
            "length. Default: the model's maximum length, at most 512.",
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option("--windows", min=0, help="Number of windows, spread over the text; 0: all."),
    ] = 16
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the windows' positions.")] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Save the state to this file (and FILE.costs, FILE.reach) after every window, for "
            "--resume.",
        ),
    ] = None
    resume: Resume = False
    overwrite: Overwrite = False
    json: JsonTo = None
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            metavar="FILE",
            help="Draw loss against bytes as .png or .svg (needs acutance\\[plots]).",
        ),
    ] = None
    dark: Dark = False
    tokenizer: Tokenizer = None
    attention: AttentionName = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False


@command(
    BudgetOptions,
    {
        READ: "text length tokenizer attention device trust_remote_code allow_pickle allow_missing",
        PLAN: "keep max_loss streaming",
        LESS: "windows seed",
        WRITE: "out json figure dark save overwrite",
        LONG: "resume",
    },
)
def budget(options: BudgetOptions) -> None:
    """Find what each key-value head must keep in the cache, for a given size or loss."""
    check_outputs(
        {
            "--out": options.out,
            "--json": options.json,
            "--figure": options.figure,
            "--save": options.save,
        },
        {"MODEL": options.model, "--text": options.text},
        state="--save",
        parts=("", ".costs", ".reach"),
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_figure("--figure", options.figure)
    check_resume(options.resume, options.save)
    lengths = None if options.length is None else read_lengths(options.length)
    if lengths is not None and len(lengths) > 1:
        raise typer.BadParameter("a plan is for one length", param_hint="--lengths")
    with plain_errors():
        from acutance.caching.figure import draw
        from acutance.files import as_json, put_text
        from acutance.report.plot_style import DARK, LIGHT

        with resumable("before a plan was chosen", options.save):
            result = _search(options, lengths)
        write_and_show(
            {
                "plan": result.plan.save,
                "json": lambda path: put_text(as_json(result.to_dict()) + "\n", path),
                "figure": lambda path: draw(result, path, theme=DARK if options.dark else LIGHT),
            },
            {"plan": options.out, "json": options.json, "figure": options.figure},
            lambda screen: screen.print(result.table()),
        )


def _search(options: BudgetOptions, lengths: tuple[int, ...] | None) -> "Budget":
    """Load the model, read the texts, and search; progress is shown on standard error."""
    from acutance.caching.find_plan import budget as search
    from acutance.caching.layer_shapes import check_model
    from acutance.judging.text_windows import loss_of, text_windows

    plans = [_plan(text) for text in options.streaming] if options.streaming else None
    texts = read_texts(options.text)
    with console().status("loading the model"):
        loaded = load_model(options, options.device, head=True)
    check_model(loaded.model)
    length = loaded.window(None) if lengths is None else lengths[0]
    with reading(texts) as texts:
        windows = text_windows(loaded, texts, [length], options.windows, options.seed)
    batches: list[Any] = [turn.batch for turn in windows.turns]
    if len(batches) < _LEAST:
        raise ValueError(
            f"a search needs at least {_LEAST} windows of {length} tokens, half to propose plans "
            f"and half to decide, got {len(batches)}: give more text, or more or shorter windows"
        )
    with pass_progress(windows.tokens // 2, console()) as advance:
        return search(
            loaded.model,
            batches,
            keep=options.keep,
            max_loss=options.max_loss,
            plans=plans,
            loss=loss_of(loaded),
            save=options.save,
            resume=options.resume,
            overwrite=options.overwrite,
            advance=advance,
        )


def _plan(text: str) -> "HeadPlan":
    """Parse ``FIRST,RECENT``."""
    from acutance.caching import HeadPlan

    first, _, recent = text.partition(",")
    try:
        return HeadPlan("streaming", first=int(first), recent=int(recent))
    except ValueError as error:
        raise typer.BadParameter(
            f"it must be FIRST,RECENT, as in 4,124, got {text!r}", param_hint="--streaming"
        ) from error
