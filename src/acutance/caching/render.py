"""The terminal report of a search for a cache plan."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from acutance.caching.frontier import Budget
from acutance.report.screen import NumberTable

__all__ = ["sentences", "show"]


def show(found: Budget) -> RenderableType:
    """A search for a rich console: loss against bytes, then sentences."""
    title = Text(
        f"Loss ({found.loss}) under each plan minus loss with the full cache, in nats a token, at "
        f"{found.n} tokens",
        style="bold",
    )
    table = NumberTable(keys=2, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("share", "bytes", "Δ loss", "proposed by", "heads", ""):
        table.add_column(name, justify="right", no_wrap=True)
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
    lines = [Padding(Text(f"• {line}"), (0, 0, 0, 1)) for line in sentences(found)]
    return Group(title, "", table, "", *lines)


def sentences(found: Budget) -> Iterator[str]:
    """What was chosen and how sure it is, one sentence for each point."""
    chosen = found.chosen
    if chosen is None:
        yield "No smaller plan keeps the loss within the limit: the plan is the full cache."
    else:
        yield (
            f"The plan takes {100 * chosen.share:.0f} % of the full cache, {chosen.bytes:,} bytes "
            f"after {found.n} tokens, and changes the loss by {chosen.delta:+.4f} ± "
            f"{chosen.error:.4f} nat, from {found.mean_loss:.3f}."
        )
    yield (
        f"± is a standard error over {found.windows} windows, whose derivatives were not read. "
        "They chose among the plans: judge the plan on other text."
    )
