"""The terminal report of a search for a cache plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from acutance.caching.exchange.plan_record import Costs
from acutance.caching.frontier import Budget
from acutance.caching.plan import CachePlan
from acutance.report.screen import NumberTable, Wrapped
from acutance.summary.layer import UNTRAINED

__all__ = ["sentences", "show", "show_plan"]


def show(found: Budget) -> RenderableType:
    """A search for a rich console: loss against bytes, then sentences."""
    title = Text(
        f"Loss ({found.loss}) under each plan minus loss with the full cache, in nats a token, at "
        f"{found.n} tokens",
        style="bold",
    )
    table = NumberTable(keys=2, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("share", "bytes", "Δ loss", "proposed by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("heads")
    table.add_column("", no_wrap=True)
    frontier = found.frontier
    for one in sorted(found.points, key=lambda point: (-point.bytes, point.delta)):
        mark = "chosen" if one == found.chosen else "frontier" if one in frontier else ""
        table.add_row(
            f"{one.share:.3f}",
            f"{one.bytes:,}",
            f"{one.delta:+.4f} ± {one.error:.4f}",
            one.rule,
            one.plan.name.removeprefix("cache plan (").removesuffix(")"),
            Text(mark, style="cyan"),
        )
    lines = [Wrapped(line, bullet=" • ") for line in sentences(found)]
    return Group(title, "", table, "", *lines)


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


def show_plan(
    plan: CachePlan, lengths: Sequence[int], costs: Costs | None = None
) -> RenderableType:
    """A plan for a rich console: one line for each layer, then sentences.

    Args:
        plan: to show.
        lengths: tokens at which the cache is counted; the table's shares are at the last one.
        costs: expected costs of the search for it, if they are known.
    """
    model, n = plan.model, lengths[-1]
    table = NumberTable(keys=1, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if costs is not None:
        table.add_column("cost, nat", justify="right", no_wrap=True)
    table.add_column("key heads")
    for layer, (module, heads) in enumerate(plan.layers.items()):
        share = sum(plan.head_share(module, one, n) for one in heads) / len(heads)
        cells = [str(layer), f"{share:.3f}"]
        if costs is not None:
            known = [costs.of(module, head, one) for head, one in enumerate(heads)]
            total = None if None in known else sum(one.total for one in known if one is not None)
            cells.append("" if total is None else f"{total:+.4f}")
        table.add_row(*cells, _symbols([one.symbol for one in heads]))
    lines = [Wrapped(line, bullet=" • ") for line in _plan_sentences(plan, lengths, costs)]
    count = sum(len(one) for one in plan.layers.values())
    title = f"{model.architecture}: what {count} key heads in {len(plan.layers)} layers keep"
    return Group(Text(title, style="bold"), "", table, "", *lines)


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
