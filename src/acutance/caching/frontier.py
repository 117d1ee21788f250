"""The result of a search for a cache plan, and a plan with its costs in tables and the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from acutance.caching.head_plan import FULL, HeadPlan, PlanError
from acutance.caching.plan import BUDGET_SCHEMA, CachePlan
from acutance.calibration.result import GateSlope
from acutance.files import as_json, finite, write_text
from acutance.from_json import checked, read_json
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
        best: list[Point] = []
        for point in sorted(self.points, key=lambda point: (point.bytes, point.delta)):
            if not best or point.delta < best[-1].delta:
                best.append(point)
        return tuple(reversed(best))

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


# -- a plan with its costs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What a search for a plan expects of what heads may keep.

    Attributes:
        n: tokens of the windows that it was measured on.
        heads: for each key head, by module name of its layer and number: what it may keep instead
            of everything, and what that adds to the loss to first and to second order, in nats a
            token.
    """

    n: int
    heads: Mapping[tuple[str, int], Mapping[HeadPlan, tuple[float, float]]]

    def of(self, module: str, head: int, plan: HeadPlan) -> tuple[float, float] | None:
        """The costs of a plan of one head to both orders; None if they were not measured."""
        return (0.0, 0.0) if plan == FULL else self.heads.get((module, head), {}).get(plan)


def read_costs(path: str | os.PathLike[str]) -> Costs | None:
    """The costs that ``acutance budget --json`` wrote; None if the file holds a plan alone.

    Raises:
        OSError: if it cannot be opened.
        PlanError: if it cannot be read.
    """
    try:
        record = read_json(path)
        if "costs" not in record:
            return None
        options = [checked(HeadPlan, option) for option in record["options"]]
        heads = {}
        for head in record["costs"]:
            orders = zip(map(float, head["slope"]), map(float, head["curvature"]), strict=True)
            heads[str(head["module"]), int(head["head"])] = dict(zip(options, orders, strict=True))
        return Costs(int(record["n"]), heads)
    except (KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else f"its costs cannot be read: {error!r}"
        raise PlanError(f"{os.fspath(path)} contains no costs of a plan: {reason}") from error


def plan_record(
    plan: CachePlan,
    layers: Sequence[tuple[str, Sequence[int]]],
    n: int,
    costs: Costs | None = None,
    *,
    name: str = "the plan",
    model: str = "the model",
) -> dict[str, Any]:
    """A plan beside a probed model, as plain JSON values for the report.

    Args:
        plan: to show.
        layers: module name and numbers of the query heads of each probed layer.
        n: tokens in the cache, for shares and bytes.
        costs: of the search for it, if they are known.
        name: of the plan, in messages.
        model: name of the probed model, in messages.

    Returns:
        ``name``, ``n``, ``share``, ``bytes``, ``costs_at`` (tokens of the windows that gave the
        costs, or None), ``key_heads`` (what each keeps, its share of the bytes, its cost, and the
        costs of all alternatives) and ``heads``: for each query head of ``layers`` the index of its
        key head.

    Raises:
        PlanError: if the plan is of another model.
    """
    planned = {_short(module): shape for module, shape in plan.shapes.items()}
    for module, numbers in layers:
        shape, last = planned.get(_short(module)), max(numbers, default=0)
        if shape is None or last >= shape.query_heads:
            has = "no such layer" if shape is None else f"{shape.query_heads} query heads there"
            raise PlanError(
                f"{name} is for another model, {plan.model.architecture}, than the probed {model}: "
                f"the probe read head {last} of {module}, and the plan has {has}"
            )
    key_heads: list[dict[str, Any]] = []
    numbers_of: dict[tuple[str, int], int] = {}  # of key heads, by layer and query head
    for module, heads in plan.layers.items():
        group = plan.shapes[module].queries_per_key
        for head, kept in enumerate(heads):
            queries = range(head * group, (head + 1) * group)
            numbers_of |= dict.fromkeys(
                ((_short(module), query) for query in queries), len(key_heads)
            )
            cost = None if costs is None else costs.of(module, head, kept)
            options = {} if costs is None else costs.heads.get((module, head), {})
            key_heads.append(
                {
                    "head": head,
                    "queries": [queries[0], queries[-1]],
                    "keeps": kept.words,
                    "share": plan.head_share(module, kept, n),
                    "cost": None if cost is None else list(cost),
                    "options": [
                        {
                            "keeps": option.words,
                            "share": plan.head_share(module, option, n),
                            "first": first,
                            "second": second,
                            "chosen": option == kept,
                        }
                        for option, (first, second) in options.items()
                    ],
                }
            )
    return {
        "name": plan.name,
        "n": n,
        "share": plan.share(n),
        "bytes": plan.bytes(n),
        "costs_at": None if costs is None else costs.n,
        "key_heads": key_heads,
        "heads": [
            numbers_of[_short(module), query] for module, numbers in layers for query in numbers
        ],
    }


def _short(module: str) -> str:
    """A module's name without the prefix that a head on the model gives it."""
    return module.removeprefix("model.").removeprefix("transformer.")


def plan_table(plan: CachePlan, lengths: Sequence[int], costs: Costs | None = None) -> Table:
    """What each layer keeps as a table and sentences, which ``print`` shows.

    Args:
        plan: to show.
        lengths: tokens at which the cache is counted; the table's shares are at the last one.
        costs: expected costs of the search for it, if they are known.
    """
    rows = []
    for layer, (module, heads) in enumerate(plan.layers.items()):
        share = sum(plan.head_share(module, kept, lengths[-1]) for kept in heads) / len(heads)
        row = [layer, share, _symbols([kept.symbol for kept in heads])]
        if costs is not None:
            known = [costs.of(module, head, kept) for head, kept in enumerate(heads)]
            row.insert(2, None if None in known else sum(sum(cost) for cost in known if cost))
        rows.append(row)
    columns = [Column("layer"), Column("share", format=".3f"), Column("key heads", "words")]
    said = [
        "full: all keys. F+R: the first F and the most recent R. N bit: all keys and values in N "
        "bits. none: nothing. In their order; ×: so many neighbours.",
        *(
            f"After {n:,} tokens: {plan.bytes(n):,} bytes, {100 * plan.share(n):.1f} % of the full "
            "16-bit cache."
            for n in lengths
        ),
    ]
    if costs is not None:
        columns.insert(2, Column("cost, nat", format="+.4f"))
        said.append(
            "cost: what the layer's heads are expected to add to the loss, from derivatives to "
            f"second order at {costs.n} tokens; the loss itself is measured with 'acutance judge'."
        )
    count = sum(len(heads) for heads in plan.layers.values())
    title = f"{plan.model.architecture}: what {count} key heads in {len(rows)} layers keep"
    return Table(title, columns, rows, said)


def _symbols(symbols: Sequence[str]) -> str:
    """Key heads in their order, equal neighbours once with their number.

    Example:
        >>> _symbols(["full", "full", "4+124", "none"])
        'full ×2 · 4+124 · none'
    """
    runs = [(symbol, len(list(run))) for symbol, run in groupby(symbols)]
    return " · ".join(symbol if count == 1 else f"{symbol} ×{count}" for symbol, count in runs)
