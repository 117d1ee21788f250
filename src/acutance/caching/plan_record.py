"""A cache plan as a record for tables and the report: what each head keeps, and what it costs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from acutance.caching.head_plan import HeadPlan
from acutance.caching.layer_shapes import PlanError
from acutance.caching.plan import CachePlan
from acutance.from_json import checked, read_json
from acutance.report.table import Column, Table


@dataclass(frozen=True)
class Cost:
    """What taking something away from a key head is expected to add to the loss.

    Attributes:
        plan: what the head keeps.
        first: derivative of the loss by a gate to the head's output under it, in nats a token.
        second: second-order cost, in nats a token.
    """

    plan: HeadPlan
    first: float
    second: float

    @property
    def total(self) -> float:
        """Both orders together, in nats a token."""
        return self.first + self.second


@dataclass(frozen=True)
class Costs:
    """The expected costs of a search for a plan.

    Attributes:
        n: tokens of the windows that they were measured on.
        heads: of each key head, by module name of its layer and number.
    """

    n: int
    heads: Mapping[tuple[str, int], tuple[Cost, ...]]

    def of(self, module: str, head: int, plan: HeadPlan) -> Cost | None:
        """The expected cost of a plan of one head; None if it was not measured."""
        if plan == HeadPlan():
            return Cost(plan, 0.0, 0.0)
        return next((one for one in self.heads.get((module, head), ()) if one.plan == plan), None)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Costs:
        """The costs in the record of :meth:`acutance.caching.Budget.to_dict`.

        Raises:
            ValueError: if a field is missing or does not fit.
        """
        try:
            n, options = int(record["n"]), [checked(HeadPlan, one) for one in record["options"]]
            heads = {
                (str(one["module"]), int(one["head"])): tuple(
                    Cost(plan, float(first), float(second))
                    for plan, first, second in zip(
                        options, one["slope"], one["curvature"], strict=True
                    )
                )
                for one in record["costs"]
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"its costs cannot be read: {error!r}") from error
        return cls(n, heads)


def read_costs(path: str | os.PathLike[str]) -> Costs | None:
    """The costs that ``acutance budget --json`` wrote; None if the file holds a plan alone.

    Raises:
        OSError: if it cannot be opened.
        PlanError: if it cannot be read.
    """
    try:
        record = read_json(path)
        return Costs.from_record(record) if "costs" in record else None
    except ValueError as error:
        raise PlanError(f"{os.fspath(path)} contains no costs of a plan: {error}") from error


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
        shape = planned.get(_short(module))
        if shape is None or max(numbers, default=0) >= shape.query_heads:
            has = "no such layer" if shape is None else f"{shape.query_heads} query heads there"
            raise PlanError(
                f"{name} is for another model, {plan.model.architecture}, than the probed {model}: "
                f"the probe read head {max(numbers, default=0)} of {module}, and the plan has {has}"
            )
    first_of: dict[str, int] = {}
    key_heads: list[dict[str, Any]] = []
    for module, kept in plan.layers.items():
        first_of[_short(module)] = len(key_heads)
        key_heads += [_key_head(plan, module, head, n, costs) for head in range(len(kept))]
    return {
        "name": plan.name,
        "n": n,
        "share": plan.share(n),
        "bytes": plan.bytes(n),
        "costs_at": None if costs is None else costs.n,
        "key_heads": key_heads,
        "heads": [
            first_of[_short(module)] + number // planned[_short(module)].queries_per_key
            for module, numbers in layers
            for number in numbers
        ],
    }


def _key_head(
    plan: CachePlan, module: str, head: int, n: int, costs: Costs | None
) -> dict[str, Any]:
    """What one key head keeps, its share of its full bytes, and its costs."""
    kept, shape = plan.layers[module][head], plan.shapes[module]
    known = () if costs is None else costs.heads.get((module, head), ())
    cost = None if costs is None else costs.of(module, head, kept)
    return {
        "head": head,
        "queries": [head * shape.queries_per_key, (head + 1) * shape.queries_per_key - 1],
        "keeps": kept.words,
        "share": plan.head_share(module, kept, n),
        "cost": None if cost is None else [cost.first, cost.second],
        "options": [
            {
                "keeps": one.plan.words,
                "share": plan.head_share(module, one.plan, n),
                "first": one.first,
                "second": one.second,
                "chosen": one.plan == kept,
            }
            for one in known
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
        [*_sentences(plan, lengths, costs)],
    )


def _symbols(symbols: Sequence[str]) -> str:
    """Key heads in their order, equal neighbours once with their number.

    Example:
        >>> _symbols(["full", "full", "4+124", "none"])
        'full ×2 · 4+124 · none'
    """
    runs = [(symbol, len(list(run))) for symbol, run in groupby(symbols)]
    return " · ".join(symbol if count == 1 else f"{symbol} ×{count}" for symbol, count in runs)


def _sentences(plan: CachePlan, lengths: Sequence[int], costs: Costs | None) -> Iterator[str]:
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
