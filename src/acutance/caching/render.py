"""A search for a cache plan, and a plan, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from acutance.caching.exchange.plan_record import Costs
from acutance.caching.frontier import Budget
from acutance.caching.plan import CachePlan
from acutance.report.table import Cell, Column, Table
from acutance.summary.layer import UNTRAINED

__all__ = ["plan_table", "sentences", "table"]


def table(found: Budget) -> Table:
    """A search: loss against bytes, then sentences."""
    frontier = found.frontier
    rows = []
    for point in sorted(found.points, key=lambda point: (-point.bytes, point.delta)):
        mark = "chosen" if point == found.chosen else "frontier" if point in frontier else ""
        change = f"{point.delta:+.4f} ± {point.error:.4f}"
        heads = point.plan.name.removeprefix("cache plan (").removesuffix(")")
        rows.append((point.share, point.bytes, change, point.rule, heads, Cell(mark, "cyan")))
    return Table(
        f"Loss ({found.loss}) under each plan minus loss with the full cache, in nats a token, at "
        f"{found.n} tokens",
        [
            *(Column("share", format=".3f"), Column("bytes", format=",")),
            *(Column("Δ loss"), Column("proposed by")),
            *(Column("heads", "words"), Column("", "name")),
        ],
        rows,
        [*sentences(found)],
        keys=2,
    )


def sentences(found: Budget) -> Iterator[str]:
    """What was chosen and how sure it is, one sentence for each point."""
    if found.untrained:
        yield UNTRAINED
    chosen = found.chosen
    if chosen is None:
        yield "No smaller plan keeps the loss within the limit: the plan is the full cache."
    else:
        yield (
            f"The plan takes {100 * chosen.share:.0f} % of the full cache, {chosen.bytes:,} bytes "
            f"after {found.n} tokens, and changes the loss by {chosen.delta:+.4f} ± "
            f"{chosen.error:.4f} nat, from {found.mean_loss:.3f}."
        )
    if found.recall:
        words = {"plan": "with the plan", "full": "with the full cache", "4 bits": "all in 4 bits"}
        shares = (
            f"{mean:.2f} ± {error:.2f} {words[name]}"
            for name, (mean, error) in found.recall.items()
        )
        yield (
            f"Recall of spans planted in these windows: {', '.join(shares)}. The loss hardly sees "
            "what a plan forgets, and the search did not use it."
        )
    else:
        yield "Recall was not measured: the windows are too short for planted spans."
    yield (
        f"± is a standard error over {found.windows} windows, whose derivatives were not read. "
        "They chose among the plans: judge the plan on other text."
    )


def plan_table(plan: CachePlan, lengths: Sequence[int], costs: Costs | None = None) -> Table:
    """A plan: one line for each layer, then sentences.

    Args:
        plan: to show.
        lengths: tokens at which the cache is counted; the table's shares are at the last one.
        costs: expected costs of the search for it, if they are known.
    """
    model, n = plan.model, lengths[-1]
    rows = []
    for layer, (module, heads) in enumerate(plan.layers.items()):
        share = sum(plan.head_share(module, kept, n) for kept in heads) / len(heads)
        row = [layer, share, _symbols([kept.symbol for kept in heads])]
        if costs is not None:
            known = [costs.of(module, head, kept) for head, kept in enumerate(heads)]
            total = None if None in known else sum(cost.total for cost in known if cost is not None)
            row.insert(2, total)
        rows.append(row)
    count = sum(len(heads) for heads in plan.layers.values())
    return Table(
        f"{model.architecture}: what {count} key heads in {len(plan.layers)} layers keep",
        (
            Column("layer"),
            Column("share", format=".3f"),
            *([] if costs is None else [Column("cost, nat", format="+.4f")]),
            Column("key heads", "words"),
        ),
        rows,
        [*_plan_sentences(plan, lengths, costs)],
    )


def _symbols(symbols: Sequence[str]) -> str:
    """Key heads in their order, equal neighbours once with their number.

    Example:
        >>> _symbols(["full", "full", "4+124", "none"])
        'full ×2 · 4+124 · none'
    """
    runs = [(symbol, len(list(run))) for symbol, run in groupby(symbols)]
    return " · ".join(symbol if count == 1 else f"{symbol} ×{count}" for symbol, count in runs)


def _plan_sentences(plan: CachePlan, lengths: Sequence[int], costs: Costs | None) -> Iterator[str]:
    """How the table reads, and the size of the cache."""
    yield (
        "full: all keys. F+R: the first F and the most recent R. N bit: all keys and values in N "
        "bits. none: nothing. In their order; ×: so many neighbours."
    )
    for n in lengths:
        yield (
            f"After {n:,} tokens: {plan.bytes(n):,} bytes, {100 * plan.share(n):.1f} % of the full "
            "16-bit cache."
        )
    if costs is not None:
        yield (
            "cost: what the layer's heads are expected to add to the loss, from derivatives to "
            f"second order at {costs.n} tokens; the loss itself is measured with 'acutance judge'."
        )
