"""``acutance extend``: find how a model reads texts longer than those it was trained on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli import options as cli
from acutance.cli.inputs import about_run, lengths_noted, read_laws, read_windows
from acutance.cli.shared import console, progress, refuse, tell

if TYPE_CHECKING:
    import torch

    from acutance.extending.record import Extension


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExtendOptions(cli.RunOptions):
    """The options of ``acutance extend``.

    Attributes:
        text: Text for the search and for the final comparison; repeat for more. Default: the
            included text.
        to: Number of tokens that the model should read.
        train_length: Context length in training, in tokens; changes are tried beyond it. Default:
            the configuration's.
        law: Try this instead of acutance's proposals, named as for 'judge'; repeat for more.
        max_cost: Largest allowed rise of the loss at lengths up to the trained one, in nats per
            token.
        out: Directory for the results: page.html, extend.json and, if a change helps, config.json
            (RoPE settings) or law.json (any other law).
        windows: Number of windows of --to tokens, spread over the text; 0: all.
        final: How many of --windows are held out for the final comparison. Default: half.
        budget: Time limit: the search stops early enough for the final comparison to finish.
        dtype: Data type of the weights; bfloat16 is several times faster on many processors.
            Default: as saved.
        by_head: If an attention window is best, also try other windows and temperatures for each
            head.
        entropy: Also measure the entropy of all heads, on one window of text.
        save: Save the state after every run, for --resume.
    """

    model: cli.LanguageModel
    to: Annotated[int | None, typer.Option(metavar="N", min=4)] = None
    train_length: cli.Tokens = None
    law: cli.Changes = None
    max_cost: Annotated[float, typer.Option(metavar="NAT", min=0.0)] = 0.005
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR")] = None
    windows: cli.Count = 8
    final: Annotated[int | None, typer.Option(metavar="WINDOWS", min=2)] = None
    budget: Annotated[float | None, typer.Option(metavar="MINUTES", min=0.01)] = None
    dtype: Annotated[str | None, cli.Role(choices=("float32", "bfloat16", "float16"))] = None
    by_head: Annotated[bool, typer.Option("--by-head/--one-for-all")] = True
    entropy: Annotated[bool, typer.Option("--entropy/--no-entropy")] = True


@cli.command(
    ExtendOptions,
    {cli.READ: "to train_length max_cost dtype", cli.LESS: "final budget by_head entropy"},
    interrupted="before the search ended",
)
def extend(options: ExtendOptions) -> None:
    """Find the best way for a model to read beyond its trained length, judged by held-out loss."""
    if options.to is None:
        refuse("--to", "name the number of tokens that the model should read")
    if options.out is not None:
        _check_folder(options.out, options.model)
    found, model = _search(options, options.to)
    if options.out is not None:
        _write(options.out, found, model)
    options.write_and_show(found.table, found.to_dict)


def _check_folder(out: Path, model: str) -> None:
    """Refuse a directory that cannot be made, is the model's, or has files of something else."""
    source = Path(model).expanduser()
    if not out.is_dir() and (out.exists() or not out.absolute().parent.is_dir()):
        reason = f"{out} cannot be a directory"
    elif source.exists() and out.exists() and out.samefile(source):
        reason = f"{out} is the model's directory"
    elif out.is_dir() and any(out.iterdir()) and not (out / "extend.json").is_file():
        reason = (
            f"{out} has other files than those of an earlier 'acutance extend'; choose a new or "
            "empty directory"
        )
    else:
        return
    refuse("--out", reason)


def _search(options: ExtendOptions, to: int) -> "tuple[Extension, torch.nn.Module]":
    """Load the model, read the texts, and search; progress is shown on standard error."""
    import torch

    from acutance.extending.extend_model import extend, proposals, trained_length
    from acutance.extending.search import planned_runs
    from acutance.judging.judge_model import loss_of

    laws = None if options.law is None else read_laws(options.law)
    texts = options.texts()
    loaded = options.load(head=True)
    trained = trained_length(loaded.model, options.train_length)
    batches: list[Any] = [turn.batch for turn in read_windows(options, loaded, texts, (to,)).turns]
    windows = torch.cat([batch["input_ids"] for batch in batches])
    if laws is None:
        laws = proposals(loaded.model, trained, to)
    final = max(2, len(windows) // 2) if options.final is None else options.final
    runs = planned_runs(len(laws), max(1, len(windows) - final), final)
    bar = progress("extending", runs, runs * to, console())
    with bar as advance, lengths_noted():  # they are what the command is for
        result = extend(
            **cli.keywords(
                extend, options, model=loaded.model, windows=windows, laws=laws, final=final,
                loss=loss_of(loaded), advance=advance,
            )
        )  # fmt: skip
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    return replace(result, about=about_run(loaded, texts) | {"dtype": dtype}), loaded.model


def _write(folder: Path, found: "Extension", model: "torch.nn.Module") -> None:
    """What was chosen, the record and the page, and how to use them."""
    from acutance.extending.page import page
    from acutance.files import write_text

    folder.mkdir(exist_ok=True)
    for stale in ("config.json", "law.json"):  # of an earlier search
        (folder / stale).unlink(missing_ok=True)
    name = found.save(folder, model)
    found.to_json(folder / "extend.json")
    write_text(folder / "page.html", page(found))
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
    tell(("written to", "dim"), f" {folder}: {use}")
