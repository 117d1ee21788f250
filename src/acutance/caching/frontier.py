"""The result of a search for a cache plan: the plan, and loss against bytes of all candidates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from acutance.caching.head_plan import HeadPlan
from acutance.caching.plan import BUDGET_SCHEMA, CachePlan
from acutance.calibration.result import GateSlope
from acutance.files import as_json, finite, write_text
from acutance.report.plot_style import (
    LIGHT,
    Theme,
    curves,
    draw_line,
    draw_marks,
    label,
    legend,
    new_figure,
    reference,
    save,
)
from acutance.report.table import Cell, Column, Table
from acutance.summary.layer import UNTRAINED


@dataclass(frozen=True)
class Point:
    """A measured plan.

    Attributes:
        rule: how it was proposed.
        plan: the plan.
        bytes: of its cache, scales included, in 16-bit numbers.
        share: of the full cache.
        delta: mean loss under the plan minus that without, in nats a token.
        error: standard error of ``delta`` from window to window.
    """

    rule: str
    plan: CachePlan
    bytes: int
    share: float
    delta: float
    error: float


@dataclass(frozen=True, repr=False)
class Budget:
    """The result of :func:`acutance.budget`.

    Attributes:
        plan: the plan that was chosen.
        points: every plan whose loss was measured.
        n: tokens for which caches are counted and losses measured.
        windows: windows that decided.
        mean_loss: of them without a plan, in nats a token.
        loss: what was measured, in words.
        costs: for every key head, derivatives by gates to each of ``options``.
        options: what heads could keep instead of everything.
        untrained: whether the model's weights look untrained.
        recall: share of the tokens of planted spans that the model repeats (:func:`recall`), with
            its standard error, by what the cache keeps: ``"plan"``, ``"full"`` and, if rounding to
            4 bits was tried, ``"4 bits"``. Empty if windows are too short for it.
    """

    plan: CachePlan
    points: tuple[Point, ...]
    n: int
    windows: int
    mean_loss: float
    loss: str
    costs: tuple[GateSlope, ...]
    options: tuple[HeadPlan, ...]
    untrained: bool = False
    recall: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        chosen = self.chosen
        change = "" if chosen is None else f", Δ loss {chosen.delta:+.4f} ± {chosen.error:.4f}"
        return (
            f"<Budget: {len(self.points)} plans measured on {self.windows} windows of {self.n} "
            f"tokens; chosen: {self.plan.share(self.n):.0%} of the cache{change}>"
        )

    @property
    def frontier(self) -> tuple[Point, ...]:
        """Points with less loss than every other one of as many bytes or fewer, largest first."""
        found: list[Point] = []
        for one in sorted(self.points, key=lambda point: (point.bytes, point.delta)):
            if not found or one.delta < found[-1].delta:
                found.append(one)
        return tuple(reversed(found))

    @property
    def chosen(self) -> Point | None:
        """The measured point of :attr:`plan`; None if it is the full cache."""
        return next((one for one in self.points if one.plan == self.plan), None)

    def table(self) -> Table:
        """A search: loss against bytes, then sentences."""
        frontier = self.frontier
        rows = []
        for point in sorted(self.points, key=lambda point: (-point.bytes, point.delta)):
            mark = "chosen" if point == self.chosen else "frontier" if point in frontier else ""
            change = f"{point.delta:+.4f} ± {point.error:.4f}"
            heads = point.plan.name.removeprefix("cache plan (").removesuffix(")")
            rows.append((point.share, point.bytes, change, point.rule, heads, Cell(mark, "cyan")))
        return Table(
            f"Loss ({self.loss}) under each plan minus loss with the full cache, in nats a "
            f"token, at {self.n} tokens",
            [
                *(Column("share", format=".3f"), Column("bytes", format=",")),
                *(Column("Δ loss"), Column("proposed by")),
                *(Column("heads", "words"), Column("", "name")),
            ],
            rows,
            [*sentences(self)],
            keys=2,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the plans of other points as plain JSON values."""
        chosen, frontier = self.chosen, self.frontier
        return {
            "schema": BUDGET_SCHEMA,
            "loss": self.loss,
            "n": self.n,
            "windows": self.windows,
            "mean_loss": self.mean_loss,
            "untrained": self.untrained,
            "recall": finite({name: list(one) for name, one in self.recall.items()}),
            "full_bytes": self.plan.full_bytes(self.n),
            "points": [
                finite(vars(point) | {"plan": point.plan.name})
                | {"frontier": point in frontier, "chosen": point == chosen}
                for point in self.points
            ],
            "options": [asdict(one) for one in self.options],
            "costs": [finite(asdict(one)) for one in self.costs],
            "plan": self.plan.record(),
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` as JSON, whole or not at all."""
        write_text(path, as_json(self.to_dict(), indent=1) + "\n")


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


def draw(found: Budget, path: str | os.PathLike[str], *, theme: Theme = LIGHT) -> None:
    """Draw loss against bytes: every measured plan by its rule, and a line along the frontier.

    Args:
        found: a search.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: for another ending.
    """
    rules = list(dict.fromkeys(one.rule for one in found.points))
    figure, [axes] = new_figure(
        "Loss against bytes of the key-value cache",
        f"Each mark is a plan, with its standard error over {found.windows} windows of {found.n:,} "
        f"tokens. Mean loss with the full cache: {found.mean_loss:.3f} nat.",
        theme=theme,
    )
    styles = curves(len(rules) + 1, theme)
    front = [(100.0, 0.0)] + [(100 * one.share, one.delta) for one in found.frontier]
    draw_line(axes, [x for x, _ in front], [y for _, y in front], styles[-1], "frontier")
    for rule, style in zip(rules, styles, strict=False):
        some = [one for one in found.points if one.rule == rule]
        draw_marks(
            axes, [100 * one.share for one in some], [one.delta for one in some], style, rule,
            error=[one.error for one in some],
        )  # fmt: skip
    if (chosen := found.chosen) is not None:
        axes.annotate(
            "chosen", (100 * chosen.share, chosen.delta), xytext=(-10, 0), ha="right", va="center",
            textcoords="offset points", color=theme.ink, fontsize=9,
        )  # fmt: skip
    reference(axes, theme, y=0.0)
    axes.set_xlim(0, 103)
    label(axes, x="bytes, % of the full 16-bit cache", y="rise of the loss, nat a token")
    legend(axes, theme, where="upper right")
    save(figure, path)
