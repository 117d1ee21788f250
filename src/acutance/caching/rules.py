"""Rules of thumb for streaming heads, from statistics of one probed pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.caching.head_plan import HeadPlan
from acutance.caching.layer_shapes import LayerShape
from acutance.caching.proposals import Option, Place, cheapest
from acutance.calibration.fit.windows import evaluating
from acutance.calibration.loss_table import LossTable, Reading, Saving, Unit, Windows, read_units
from acutance.probing.open_probe import probe
from acutance.summary.head_summary import HeadSummary

__all__ = ["HeadReach", "propose", "read_reach"]

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

    def statistics(batch: dict[str, Any]) -> Reading:
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
            read.model(**batch)
        numbers = _by_key_head(watch.summary(), shapes, octaves)
        nothing = torch.zeros((), dtype=torch.float64)
        return Reading(nothing, nothing, numbers.flatten())

    settings = {**read.settings(), "statistics": f"{_ROWS} rows"}
    with LossTable(settings, saving or Saving()) as table:
        windows = read_units(read, units, table, "statistics", statistics, advance)
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
