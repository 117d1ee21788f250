"""``acutance budget``: what each key head must keep in the cache, at a given size or loss."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli import options as cli
from acutance.cli.inputs import read_windows
from acutance.cli.shared import pass_progress, refuse

if TYPE_CHECKING:
    from acutance.caching import Budget

#: Windows that a search needs.
_LEAST = 4


def _streaming(text: str) -> list[int]:
    """Parse ``FIRST,RECENT``."""
    return cli.read_pair(text, "FIRST,RECENT, as in 4,124", 2, (0, 1))


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class BudgetOptions(cli.OutputOptions, cli.RunOptions):
    """The options of ``acutance budget``.

    Attributes:
        out: Write the plan to this file.
        keep: Share of the full cache (all keys and values, not quantised) that the plan may take.
            Default: 0.5.
        max_loss: Instead of --keep: find the smallest plan that raises the loss by at most this, in
            nats per token.
        streaming: Let a head keep only the FIRST first and the RECENT newest keys (streaming);
            repeat for more choices. Rounding is then not tried. Default: 4 first and 124, 252 or
            508 newest keys, or all keys and values in 8 or 4 bits, or keys in 4 and values in 2.
        lengths: Length of the windows in tokens; the plan and its size are for a text of this
            length. Default: the model's maximum length, at most 512.
        windows: Number of windows, spread over the text; 0: all.
        save: Save the state to this file after every window, for --resume.
        figure: Draw loss against bytes as .png or .svg (needs matplotlib).
    """

    model: cli.LanguageModel
    out: cli.Out = None
    keep: float | None = None
    max_loss: float | None = None
    streaming: Annotated[
        list[list[int]] | None, typer.Option(metavar="FIRST,RECENT"), cli.Role(read=_streaming)
    ] = None
    lengths: cli.Lengths = None
    windows: cli.Count = 16

    parts = ("", ".costs", ".reach")  # the last two are of earlier versions


@cli.command(
    BudgetOptions,
    {"What heads may keep": "keep max_loss streaming"},
    interrupted="before a plan was chosen",
)
def budget(options: BudgetOptions) -> None:
    """Find what each key-value head must keep in the cache, for a given size or loss."""
    if options.lengths is not None and len(options.lengths) > 1:
        refuse("--lengths", "a plan is for one length")
    from acutance.caching.frontier import draw

    result = _search(options)
    plan = options.out, result.plan.save
    options.write_and_show(result.table, result.to_dict, partial(draw, result), plan=plan)


def _search(options: BudgetOptions) -> "Budget":
    """Load the model, read the texts, and search; progress is shown on standard error."""
    from acutance.caching import HeadPlan
    from acutance.caching.find_plan import budget as search
    from acutance.caching.head_plan import check_model
    from acutance.judging.judge_model import loss_of

    pairs = options.streaming or []
    plans = [HeadPlan("streaming", first=first, recent=recent) for first, recent in pairs]
    texts = options.texts()
    loaded = options.load(head=True)
    check_model(loaded.model)
    length = loaded.window(None) if options.lengths is None else options.lengths[0]
    windows = read_windows(options, loaded, texts, (length,))
    batches: list[Any] = [turn.batch for turn in windows.turns]
    if len(batches) < _LEAST:
        raise ValueError(
            f"a search needs at least {_LEAST} windows of {length} tokens, half to propose plans "
            f"and half to decide, got {len(batches)}: give more text, or more or shorter windows"
        )
    with pass_progress(windows.tokens // 2) as advance:
        return search(
            **cli.keywords(
                search, options, model=loaded.model, windows=batches, plans=plans or None,
                loss=loss_of(loaded), advance=advance,
            )
        )  # fmt: skip
