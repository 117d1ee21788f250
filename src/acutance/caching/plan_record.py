"""A cache plan as a record for tables and the report: what each head keeps, and what it costs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from acutance.caching.head_plan import FULL, HeadPlan, PlanError
from acutance.caching.plan import CachePlan
from acutance.from_json import checked, read_json
from acutance.report.table import Column, Table


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
        shape = planned.get(_short(module))
        if shape is None or max(numbers, default=0) >= shape.query_heads:
            has = "no such layer" if shape is None else f"{shape.query_heads} query heads there"
            raise PlanError(
                f"{name} is for another model, {plan.model.architecture}, than the probed {model}: "
                f"the probe read head {max(numbers, default=0)} of {module}, and the plan has {has}"
            )
    first_of: dict[str, int] = {}
    key_heads: list[dict[str, Any]] = []
    for module, heads in plan.layers.items():
        first_of[_short(module)] = len(key_heads)
        group = plan.shapes[module].queries_per_key
        for head, kept in enumerate(heads):
            known = {} if costs is None else costs.heads.get((module, head), {})
            cost = None if costs is None else costs.of(module, head, kept)
            key_heads.append(
                {
                    "head": head,
                    "queries": [head * group, (head + 1) * group - 1],
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
                        for option, (first, second) in known.items()
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
            first_of[_short(module)] + number // planned[_short(module)].queries_per_key
            for module, numbers in layers
            for number in numbers
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
            row.insert(2, None if None in known else sum(sum(cost) for cost in known if cost))
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
