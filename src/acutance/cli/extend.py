"""``acutance extend``: find how a model reads texts longer than those it was trained on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.inputs import about_run, lengths_noted, read_laws, read_texts, reading
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
    Tokenizer,
    TrainLength,
    TrustRemoteCode,
    check_choice,
    check_resume,
    command,
    load_model,
)
from acutance.cli.outputs import Overwrite, check_outputs, write_and_show
from acutance.cli.shared import console, plain_errors, progress, resumable

if TYPE_CHECKING:
    import torch

    from acutance.extending.record import Extension

#: Types of floats that --dtype knows.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, repr=False, eq=False)
class ExtendOptions:
    """The options of ``acutance extend``."""

    model: LanguageModel
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text for the search and for the final comparison; repeat for more. Default: the "
            "included text.",
        ),
    ] = None
    to: Annotated[
        int | None,
        typer.Option(
            "--to", metavar="N", min=4, help="Number of tokens that the model should read."
        ),
    ] = None
    train_length: TrainLength = None
    law: Annotated[
        list[str] | None,
        typer.Option(
            "--law",
            metavar="LAW",
            help="Try this instead of acutance's proposals, named as for 'judge'; repeat for more.",
        ),
    ] = None
    max_cost: Annotated[
        float,
        typer.Option(
            "--max-cost",
            metavar="NAT",
            min=0.0,
            help="Largest allowed rise of the loss at lengths up to the trained one, in nats per "
            "token.",
        ),
    ] = 0.005
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Directory for the results: page.html, extend.json and, if a change helps, "
            "config.json (RoPE settings) or law.json (any other law).",
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            min=0,
            help="Number of windows of --to tokens, spread over the text; 0: all.",
        ),
    ] = 8
    final: Annotated[
        int | None,
        typer.Option(
            "--final",
            metavar="WINDOWS",
            min=2,
            help="How many of --windows are held out for the final comparison. Default: half.",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="MINUTES",
            min=0.01,
            help="Time limit: the search stops early enough for the final comparison to finish.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="|".join(DTYPES),
            help="Data type of the weights; bfloat16 is several times faster on many processors. "
            "Default: as saved.",
        ),
    ] = None
    by_head: Annotated[
        bool,
        typer.Option(
            "--by-head/--one-for-all",
            help="If an attention window is best, also try other windows and temperatures for each "
            "head.",
        ),
    ] = True
    entropy: Annotated[
        bool,
        typer.Option(
            "--entropy/--no-entropy",
            help="Also measure the entropy of all heads, on one window of text.",
        ),
    ] = True
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the windows' positions.")] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Save the state after every run, for --resume."
        ),
    ] = None
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
    ExtendOptions,
    {
        READ: "text to train_length law max_cost tokenizer attention dtype device "
        "trust_remote_code allow_pickle allow_missing",
        LESS: "windows final budget by_head entropy seed",
        WRITE: "out json save overwrite",
        LONG: "resume",
    },
)
def extend(options: ExtendOptions) -> None:
    """Find the best way for a model to read beyond its trained length, judged by held-out loss."""
    check_outputs(
        {"--json": options.json, "--save": options.save},
        {"MODEL": options.model, "--text": options.text, "--law": options.law},
        state="--save",
        resume=options.resume,
        overwrite=options.overwrite,
    )
    check_resume(options.resume, options.save)
    if options.dtype is not None:
        check_choice("--dtype", options.dtype, dict.fromkeys(DTYPES))
    if options.to is None:
        raise typer.BadParameter(
            "name the number of tokens that the model should read", param_hint="--to"
        )
    if options.out is not None:
        _check_folder(options.out, options.model)
    with plain_errors():
        from acutance.files import as_json, put_text

        with resumable("before the search ended", options.save):
            found, model = _search(options, options.to)
        if options.out is not None:
            _write(options.out, found, model)
        write_and_show(
            {"--json": lambda path: put_text(as_json(found.to_dict()) + "\n", path)},
            {"--json": options.json},
            lambda screen: screen.print(found.table()),
        )


def _check_folder(out: Path, model: str) -> None:
    """Refuse a directory that cannot be made, is the model's, or has files of something else."""
    if not out.is_dir() and (out.exists() or not out.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{out} cannot be a directory", param_hint="--out")
    source = Path(model).expanduser()
    if source.exists() and out.exists() and out.samefile(source):
        raise typer.BadParameter(f"{out} is the model's directory", param_hint="--out")
    if out.is_dir() and any(out.iterdir()) and not (out / "extend.json").is_file():
        raise typer.BadParameter(
            f"{out} has other files than those of an earlier 'acutance extend'; choose a new or "
            "empty directory",
            param_hint="--out",
        )


def _search(options: ExtendOptions, to: int) -> "tuple[Extension, torch.nn.Module]":
    """Load the model, read the texts, and search; progress is shown on standard error."""
    import torch

    from acutance.extending.candidates import proposals
    from acutance.extending.extend_model import extend, trained_length
    from acutance.extending.search import planned_runs
    from acutance.judging.remedies import for_train_length
    from acutance.judging.text_windows import loss_of, text_windows

    laws = None if options.law is None else read_laws(options.law)
    texts = read_texts(options.text)
    with console().status("loading the model"):
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        loaded = load_model(options, options.device, head=True, dtype=dtype)
    trained = trained_length(loaded.model, options.train_length)
    with reading(texts) as texts:
        found = text_windows(loaded, texts, [to], options.windows, options.seed)
    batches: list[Any] = [turn.batch for turn in found.turns]
    windows = torch.cat([batch["input_ids"] for batch in batches])
    if laws is None:
        laws = proposals(loaded.model, trained, to)
    else:
        laws = for_train_length(loaded.model, laws, options.train_length)
    final = max(2, len(windows) // 2) if options.final is None else options.final
    runs = planned_runs(len(laws), max(1, len(windows) - final), final)
    bar = progress("extending", runs, runs * to, console())
    with bar as advance, lengths_noted():  # they are what the command is for
        result = extend(
            loaded.model,
            to,
            windows,
            train_length=options.train_length,
            laws=laws,
            final=final,
            max_cost=options.max_cost,
            budget=options.budget,
            loss=loss_of(loaded),
            by_head=options.by_head,
            entropy=options.entropy,
            save=options.save,
            resume=options.resume,
            overwrite=options.overwrite,
            advance=advance,
        )
    dtype_name = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    about = about_run(loaded, texts) | {"dtype": dtype_name}
    return replace(result, about=about), loaded.model


def _write(folder: Path, found: "Extension", model: "torch.nn.Module") -> None:
    """What was chosen, the record and the page, and how to use them."""
    from acutance.extending.page import write_page
    from acutance.report.screen import note

    folder.mkdir(exist_ok=True)
    for stale in ("config.json", "law.json"):  # of an earlier search
        (folder / stale).unlink(missing_ok=True)
    name = found.save(folder, model)
    found.to_json(folder / "extend.json")
    write_page(found, folder / "page.html")
    use = "nothing to apply: no change lowers the loss beyond noise"
    if name == "config.json":
        use = (
            f"load it with: AutoModelForCausalLM.from_pretrained(MODEL, "
            f'config=AutoConfig.from_pretrained("{folder}"))'
        )
    elif name == "law.json":
        use = f'apply it with: acutance.apply(model, "{folder / name}")'
    elif found.helps and found.chosen is not None:  # heads that are off
        use = f'apply it with: acutance.apply(model, "{found.chosen.name}")'
    console().print(note(("written to", "dim"), f" {folder}: {use}"), soft_wrap=True)
