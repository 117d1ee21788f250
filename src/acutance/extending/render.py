"""A search in words: sentences, the table of the final windows, and that of what was tried."""

from __future__ import annotations

from collections.abc import Iterator

from acutance.extending.record import Extension
from acutance.extending.search import AS_IS
from acutance.judging.paired import Part
from acutance.report.table import Column, Table, styled

__all__ = ["final_table", "sentences", "tried_table"]


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


def final_table(result: Extension) -> Table:
    """Losses on the final windows, of the model as it is and of the best changes."""
    names = ("loss up to", "loss beyond", "Δ up to", "Δ beyond")
    rows = []
    for final in result.finals:
        parts = (final.within, final.beyond)
        changes = [f"{part.delta:+.4f} ± {part.error:.4f}" for part in parts]
        rows.append(
            (
                final.name,
                *(part.loss + part.delta for part in parts),
                *(changes if final.name != AS_IS else (None, None)),
            )
        )
    return Table(
        f"Reading {result.to:,} tokens: loss in nats a token, and its difference Δ from the model "
        "as it is",
        (
            Column("final windows", "words"),
            *(Column(f"{name} {result.train_length:,}", format=".4f") for name in names),
        ),
        rows,
    )


def tried_table(result: Extension) -> Table:
    """The changes that the search tried, with the difference of the loss from the model as it is.

    Columns are the change, the windows it was measured on, and the difference up to and beyond the
    trained length, in nats a token. A star marks a change that costs too much up to the trained
    length to be chosen.
    """
    rows = []
    for tried in result.tried:
        error = "" if tried.error is None else f" ± {tried.error:.3f}"
        within = f"{'' if tried.allowed else '*'}{tried.within:+.4f}"
        row = (tried.name, tried.windows, within, f"{tried.beyond:+.4f}{error}")
        rows.append(row if tried.allowed else styled(row, "dim"))
    star = (
        f"* not chosen: it raises the loss up to {result.train_length:,} tokens by more than "
        f"{result.max_cost:g} nat"
    )
    return Table(
        "Tried in the search: Δ in nats a token",
        (
            Column("change", "words"),
            Column("windows"),
            Column(f"up to {result.train_length:,}"),
            Column(f"beyond {result.train_length:,}"),
        ),
        rows,
        [*sentences(result)],
        notes=[] if all(tried.allowed for tried in result.tried) else [star],
    )


def _change(part: Part) -> str:
    """A difference of the loss with its standard error and its 95 % interval."""
    return (
        f"{part.delta:+.4f} ± {part.error:.4f} nat (between {part.low:+.3f} and {part.high:+.3f})"
    )
