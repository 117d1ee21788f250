"""Plans of given sizes with the least sum of heads' costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from acutance.caching.layer_shapes import LayerShape
from acutance.caching.plan import HeadPlan

__all__ = ["Option", "Place", "cheapest", "hull", "options_of"]

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
            for plan, cost in zip([HeadPlan(), *plans], [0.0, *some], strict=True)
        ]
        for place, some in costs.items()
    }
