"""A search in words: sentences, and the table of what was tried."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from acutance.extending.record import Extension, Final
from acutance.extending.search import AS_IS
from acutance.judging.paired import Part
from acutance.report.screen import NumberTable, Wrapped

__all__ = ["sentences", "show", "tried_rows"]


def sentences(result: Extension) -> Iterator[str]:
    """The results of :func:`acutance.extend` as sentences, the most important first.

    Example:
        >>> import acutance
        >>> from acutance.reproduce import decoder, texts
        >>> windows = texts.read(texts.files("held out"))[: 4 * 256].long().view(4, 256)
        >>> law = "rope:linear,factor=2"
        >>> result = acutance.extend(decoder(), 256, windows, train_length=128, laws=law)
        >>> next(sentences(result))
        'Nothing that was tried lowers the loss beyond 128 tokens at a cost of at most 0.005 nat.'
    """
    if result.chosen is None:
        yield (
            f"Nothing that was tried lowers the loss beyond {result.train_length:,} tokens at a "
            f"cost of at most {result.max_cost:g} nat."
        )
    else:
        one = result[result.chosen.name]
        beyond = "It lowers the loss" if result.helps else "It is not shown to lower the loss"
        yield (
            f"Best: {one.name}. {beyond} beyond {result.train_length:,} tokens: "
            f"{_change(one.beyond)}, from {one.beyond.loss:.3f} nats a token."
        )
        cost = f"changes by {_change(one.within)}" if one.within.most > 2e-5 else "stays as it is"
        yield f"Up to {result.train_length:,} tokens the loss {cost}."
    if result.gain is not None:
        yield (
            f"Against {result.finals[-1].name}, the best RoPE setting of the search, it changes "
            f"the loss beyond {result.train_length:,} tokens by {_change(result.gain)}."
        )
    yield (
        f"These numbers are from {result.final_windows} windows of {result.to:,} tokens that no "
        f"choice was made on; the search had {result.search_windows} others. ± is a standard error "
        "from window to window, with an interval of 95 % by Student's t."
    )
    if not result.complete:
        yield "The budget ended the search before all rounds."


def tried_rows(result: Extension) -> list[list[str]]:
    """The table of the changes that the search tried: its heading, then one row for each, as text.

    Columns are the change, the windows it was measured on, and the difference of the loss from the
    unchanged model up to and beyond the trained length, in nats a token. A star marks a change that
    costs too much up to the trained length to be chosen.
    """
    rows = [
        ["change", "windows", f"up to {result.train_length:,}", f"beyond {result.train_length:,}"]
    ]
    for one in result.tried:
        error = "" if one.error is None else f" ± {one.error:.3f}"
        mark = "" if one.allowed else "*"
        within, beyond = f"{mark}{one.within:+.4f}", f"{one.beyond:+.4f}{error}"
        rows.append([one.name, str(one.windows), within, beyond])
    return rows


def show(result: Extension) -> RenderableType:
    """The results of :func:`acutance.extend` for a rich console: two tables, then the sentences.

    The first table has the losses on the final windows, of the model as it is and of the best
    changes; the second, the differences of the loss for every change that the search tried.
    """
    final = NumberTable(keys=1, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    final.add_column("final windows")
    for name in ("loss up to", "loss beyond", "Δ up to", "Δ beyond"):
        final.add_column(f"{name} {result.train_length:,}", justify="right", no_wrap=True)
    for shown in result.finals:
        final.add_row(Wrapped(shown.name), *_cells(shown))
    table = NumberTable(keys=1, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    head, *rows = tried_rows(result)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    for one, row in zip(result.tried, rows, strict=True):
        table.add_row(Wrapped(row[0]), *row[1:], style="" if one.allowed else "dim")
    lines = [Wrapped(line, bullet=" • ") for line in sentences(result)]
    title = Text(
        f"Reading {result.to:,} tokens: loss in nats a token, and its difference Δ from the model "
        "as it is",
        style="bold",
    )
    note = Text("Tried in the search: Δ in nats a token", style="bold")
    costly: list[RenderableType] = []
    if not all(one.allowed for one in result.tried):
        costly = ["", _costly(result)]
    return Group(title, "", final, "", note, "", table, *costly, "", *lines)


def _costly(result: Extension) -> Wrapped:
    """What the star in the table of changes means."""
    return Wrapped(
        f"* not chosen: it raises the loss up to {result.train_length:,} tokens by more than "
        f"{result.max_cost:g} nat"
    )


def _cells(final: Final) -> list[str]:
    """Cells of the first table: loss up to and beyond the trained length, then both differences.

    The model as it is has no differences.
    """
    differences = [
        f"{part.delta:+.4f} ± {part.error:.4f}" if final.name != AS_IS else ""
        for part in (final.within, final.beyond)
    ]
    return [
        f"{final.within.loss + final.within.delta:.4f}",
        f"{final.beyond.loss + final.beyond.delta:.4f}",
        *differences,
    ]


def _change(part: Part) -> str:
    """A difference of the loss with its standard error and its 95 % interval."""
    return (
        f"{part.delta:+.4f} ± {part.error:.4f} nat (between {part.low:+.3f} and {part.high:+.3f})"
    )
