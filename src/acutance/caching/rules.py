"""Plans of given sizes: with the least sum of heads' costs, and by rules of thumb for streaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acutance.caching.head_plan import FULL, HeadPlan
from acutance.caching.layer_shapes import LayerShape
from acutance.calibration.loss_table import LossTable, Reading, Saving, Unit, Windows
from acutance.calibration.windows import evaluating
from acutance.probing.probe import probe
from acutance.summary.head_summary import HeadSummary

#: Rows of each window that are read, drawn at random.
_ROWS = 256
#: The rules, as reports name them.
RULES = ("distant weight", "keys_95")


@dataclass(frozen=True)
class HeadReach:
    """How far back the query heads of one key head read, means over rows.

    Attributes:
        octaves: mean weight by octave of distance, of all query heads: octave 0 is the row's own
            position, octave k are distances of 2^(k−1) to 2^k − 1.
        first: mean weight on the first visible key.
        keys_95: keys that hold 95 % of a row's weight, in each window for the query head that needs
            most there.
        n: tokens of the windows.
    """

    octaves: tuple[float, ...]
    first: float
    keys_95: float
    n: int

    def beyond(self, recent: int) -> float:
        """Mean weight on keys at distances of ``recent`` and more, without the first key.

        The weight of an octave is spread evenly over its distances, that on the first key evenly
        over rows.

        Example:
            >>> head = HeadReach((0.4, 0.1, 0.2, 0.3), first=0.1, keys_95=5.0, n=8)
            >>> [head.beyond(recent) for recent in (1, 2, 6)]
            [0.5125, 0.425, 0.125]
        """
        total = 0.0
        for octave, mass in enumerate(self.octaves):
            start, stop = (2**octave) // 2, 2**octave
            total += mass * min(1.0, max(0.0, (stop - recent) / (stop - start)))
        return max(0.0, total - self.first * max(0.0, 1 - recent / self.n))


def read_reach(
    read: Windows,
    units: Sequence[Unit],
    shapes: Mapping[str, LayerShape],
    saving: Saving | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> dict[Place, HeadReach]:
    """How far back each key head reads, from one pass over some windows.

    Args:
        read: the model and its windows.
        units: those that are read.
        shapes: of the layers, by module name.
        saving: where what was read is kept.
        advance: called after each window with its tokens.
    """
    octaves = read.lengths[-1].bit_length() + 1
    options: dict[str, Any] = {"gaps": True, "structure": True, "max_rows": _ROWS, "profile": False}

    def statistics(unit: Unit) -> Reading:
        with (
            evaluating(read.model),
            torch.no_grad(),
            probe(
                read.model,
                metrics=["first_weight", "keys_95"],
                verify=False,
                **options,
            ) as watch,
        ):
            for turn in unit.turns:
                read.model(**turn.inputs(read.device))
        numbers = _by_key_head(watch.summary(), shapes, octaves)
        nothing = torch.zeros((), dtype=torch.float64)
        return Reading(nothing, nothing, numbers.flatten())

    settings = {**read.settings, "statistics": f"{_ROWS} rows"}
    with LossTable(settings, saving or Saving()) as table:
        windows = []
        for unit in units:
            windows.append(table.get("statistics", unit.number, partial(statistics, unit)))
            advance(unit.tokens)
    mean = torch.stack([one.gradient for one in windows]).mean(0).view(-1, octaves + 2).tolist()
    places = [(name, head) for name, shape in shapes.items() for head in range(shape.heads)]
    return {
        place: HeadReach(tuple(row[:-2]), row[-2], row[-1], read.lengths[-1])
        for place, row in zip(places, mean, strict=True)
    }


def _by_key_head(summary: HeadSummary, shapes: Mapping[str, LayerShape], octaves: int) -> Tensor:
    """Weight by octave, weight on the first key, and keys_95, (key heads, octaves + 2)."""
    assert summary.distances is not None
    behind = summary.distances.padded(octaves).mass[:, 0, :octaves]
    columns = [behind, summary.mean("first_weight")[:, None], summary.mean("keys_95")[:, None]]
    every = torch.cat([column.double() for column in columns], 1).nan_to_num(0.0)
    index = {
        (summary.layers[layer].module, head): at for at, (layer, head) in enumerate(summary.places)
    }
    rows = []
    for name, shape in shapes.items():
        group = shape.queries_per_key
        for head in range(shape.heads):
            some = every[[index[name, head * group + i] for i in range(group)]]
            rows.append(torch.cat([some[:, :-1].mean(0), some[:, -1:].amax(0)]))
    return torch.stack(rows)


def propose(
    options: Mapping[Place, Sequence[Option]],
    reach: Mapping[Place, HeadReach],
    targets: Sequence[int],
) -> list[tuple[str, dict[Place, HeadPlan]]]:
    """Plans of at most these bytes by each rule, without repetition.

    Args:
        options: of each key head, with what the derivatives say that they cost.
        reach: how far back each key head reads.
        targets: bytes of whole caches.

    Returns:
        For each plan the rule and what every key head keeps.
    """
    proposals = [("gradient", heads) for heads in cheapest(options, targets)]
    first = [one.plan for one in next(iter(options.values()))]
    if any(plan.kind == "streaming" for plan in first):
        rests = [plan for plan in first if plan.kind == "full"]
        for rule in RULES:
            by_rest = [cheapest(_by_rule(rule, reach, options, rest), targets) for rest in rests]
            for target, plans in zip(targets, zip(*by_rest, strict=True), strict=True):
                proposals.append((rule, _best_rest(plans, options, target)))
    different = []
    for one in proposals:
        if one not in different:
            different.append(one)
    return different


def _best_rest(
    plans: Sequence[dict[Place, HeadPlan]],
    options: Mapping[Place, Sequence[Option]],
    target: int,
) -> dict[Place, HeadPlan]:
    """Of the plans within a target the one with the least sum of costs, else the smallest."""

    def totals(plan: Mapping[Place, HeadPlan]) -> tuple[int, float]:
        chosen = [one for place, some in options.items() for one in some if one.plan == plan[place]]
        return sum(one.bytes for one in chosen), sum(one.cost for one in chosen)

    sizes = [totals(plan) for plan in plans]

    def order(index: int) -> tuple[bool, float]:
        size, cost = sizes[index]
        return (False, cost) if size <= target else (True, size)

    return plans[min(range(len(plans)), key=order)]


def _by_rule(
    rule: str,
    reach: Mapping[Place, HeadReach],
    options: Mapping[Place, Sequence[Option]],
    rest: HeadPlan,
) -> dict[Place, list[Option]]:
    """The options of every key head by a rule: ``rest`` for nothing, and streaming."""
    return {
        place: [
            Option(one.plan, one.bytes, _cost(rule, reach[place], one.plan))
            for one in some
            if one.plan == rest or one.plan.kind == "streaming"
        ]
        for place, some in options.items()
    }


def _cost(rule: str, head: HeadReach, plan: HeadPlan) -> float:
    """What a plan costs a key head by a rule: lost weight, or needed keys for each one kept."""
    if plan.kind != "streaming":
        return 0.0
    if rule == "keys_95":
        return head.keys_95 / (plan.first + plan.recent)
    return head.beyond(plan.recent)


#: A key head: module name of its layer, and its number.
Place = tuple[str, int]


@dataclass(frozen=True)
class Option:
    """One thing that a key head may keep.

    Attributes:
        plan: what it keeps.
        bytes: of its cache.
        cost: what that is expected to add to the loss, in any unit that is the same for all heads.
    """

    plan: HeadPlan
    bytes: int
    cost: float


def hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of cost against bytes, from the most bytes to the least.

    Along it each further byte saved costs more than the one before.

    Example:
        >>> some = [
        ...     Option(HeadPlan(), size, cost) for size, cost in ((8, 0), (4, 1), (3, 4), (2, 3))
        ... ]
        >>> [one.bytes for one in hull(some)]
        [8, 4, 2]
    """
    lower: list[Option] = []
    best: dict[int, Option] = {}
    for one in options:
        if one.bytes not in best or one.cost < best[one.bytes].cost:
            best[one.bytes] = one
    for one in sorted(best.values(), key=lambda option: -option.bytes):
        while lower and lower[-1].cost >= one.cost:
            lower.pop()
        while len(lower) > 1 and _rate(lower[-2], lower[-1]) >= _rate(lower[-1], one):
            lower.pop()
        lower.append(one)
    return lower


def _rate(more: Option, fewer: Option) -> float:
    """Cost of each byte saved by going from one option to another with fewer bytes."""
    return (fewer.cost - more.cost) / (more.bytes - fewer.bytes)


def cheapest(
    options: Mapping[Place, Sequence[Option]], targets: Sequence[int]
) -> list[dict[Place, HeadPlan]]:
    """Plans of at most these sizes whose heads' costs sum to least.

    Every head goes along the hull of its options, and of all heads the step comes first that costs
    least for each byte. The sum is the least possible at every size that this reaches; between
    two such sizes one step may leave some bytes unused.

    Args:
        options: those of each key head.
        targets: bytes of whole caches.

    Returns:
        For each target what every key head keeps; the smallest plan if the target is below it.
    """
    hulls = {place: hull(some) for place, some in options.items()}
    now = dict.fromkeys(hulls, 0)
    total = sum(some[0].bytes for some in hulls.values())
    steps = sorted(
        (_rate(some[at], some[at + 1]), index, at)
        for index, some in enumerate(hulls.values())
        for at in range(len(some) - 1)
    )
    places, order = list(hulls), sorted(set(targets), reverse=True)
    plans: dict[int, dict[Place, HeadPlan]] = {}
    for target in order:
        while total > target and steps:
            _, index, at = steps.pop(0)
            place = places[index]
            some = hulls[place]
            total -= some[at].bytes - some[at + 1].bytes
            now[place] = at + 1
        plans[target] = {place: hulls[place][at].plan for place, at in now.items()}
    return [plans[target] for target in targets]


def options_of(
    shapes: Mapping[str, LayerShape],
    plans: Sequence[HeadPlan],
    costs: Mapping[Place, Sequence[float]],
    n: int,
) -> dict[Place, list[Option]]:
    """The options of every key head: all of its cache for nothing, and each of ``plans``.

    Args:
        shapes: of the layers, by module name.
        plans: what heads may keep instead of everything.
        costs: of these plans, for each key head.
        n: tokens in the cache.
    """
    return {
        place: [
            Option(plan, plan.bytes(n, shapes[place[0]]), cost)
            for plan, cost in zip([FULL, *plans], [0.0, *some], strict=True)
        ]
        for place, some in costs.items()
    }
