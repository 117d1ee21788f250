"""acutance.budget: a cache plan of a given size, or loss, chosen by held-out loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from acutance.caching.frontier import Budget, Point
from acutance.caching.head_plan import FULL, HeadPlan, LayerShape, value_groups
from acutance.caching.plan import CachePlan
from acutance.caching.planted import recall
from acutance.caching.stores import dequantise, quantise
from acutance.calibration.apply_law import apply
from acutance.calibration.gradients import Alternative, read_gates
from acutance.calibration.loss_table import (
    FIT,
    Advance,
    LossTable,
    Reader,
    Reading,
    Saving,
    Unit,
    difference,
    margin,
    mean_loss,
    read_windows,
)
from acutance.calibration.losses import AnyLoss
from acutance.calibration.windows import AnyBatches, evaluating
from acutance.capture.attention_call import AttentionCall
from acutance.files import finite
from acutance.probing.causes import is_untrained
from acutance.probing.probe import probe
from acutance.scaling import Window
from acutance.shapes import check_number
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
    read: Reader,
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
    nothing = torch.zeros((), dtype=torch.float64)

    def statistics(unit: Unit) -> Reading:
        watch = probe(
            read.model, metrics=["first_weight", "keys_95"], verify=False, gaps=True,
            structure=True, max_rows=_ROWS, profile=False,
        )  # fmt: skip
        with evaluating(read.model), torch.no_grad(), watch:
            for turn in unit.turns:
                read.model(**turn.inputs(read.device))
        return Reading(nothing, nothing, _by_key_head(watch.summary(), shapes, octaves).flatten())

    settings = {**read.settings, "statistics": f"{_ROWS} rows"}
    numbers = []
    with LossTable(settings, saving or Saving(tables=_TABLES), name=_REACH) as table:
        for unit in units:
            make = partial(statistics, unit)
            numbers.append(table.get("statistics", unit.number, make).values)
            advance(unit.tokens)
    mean = torch.stack(numbers).mean(0).view(-1, octaves + 2).tolist()
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
    of_queries = torch.cat([column.double() for column in columns], 1).nan_to_num(0.0)
    first = {
        summary.layers[layer].module: row
        for row, (layer, head) in enumerate(summary.places)
        if head == 0
    }
    rows = []
    for name, shape in shapes.items():
        layer = of_queries[first[name] : first[name] + shape.query_heads]
        by_key = layer.unflatten(0, (shape.heads, -1))
        rows.append(torch.cat([by_key[..., :-1].mean(1), by_key[..., -1:].amax(1)], 1))
    return torch.cat(rows)


def propose(
    options: Mapping[Place, Sequence[Option]],
    reach: Mapping[Place, HeadReach],
    targets: Sequence[int],
) -> list[tuple[str, dict[Place, HeadPlan]]]:
    """Plans of at most these bytes by each rule, without repetition.

    Args:
        options: of each key head, with what the derivatives say that they cost.
        reach: how far back each key head reads.
        targets: bytes of whole caches, falling.

    Returns:
        For each plan the rule and what every key head keeps.
    """

    def order(heads: Mapping[Place, HeadPlan], target: int) -> tuple[bool, float]:
        """Plans within the target come first, by their costs, then larger ones."""
        chosen = [
            option
            for place, choices in options.items()
            for option in choices
            if option.plan == heads[place]
        ]
        size = sum(option.bytes for option in chosen)
        return (True, size) if size > target else (False, sum(option.cost for option in chosen))

    proposals = [("gradient", heads) for heads in cheapest(options, targets)]
    plans = [option.plan for option in next(iter(options.values()))]
    rests = [plan for plan in plans if plan.kind == "full"]  # what heads keep that do not stream
    for rule in RULES if any(plan.kind == "streaming" for plan in plans) else ():
        by_rest = []
        for rest in rests:
            by_rule = {
                place: [
                    replace(option, cost=_cost(rule, reach[place], option.plan))
                    for option in choices
                    if option.plan == rest or option.plan.kind == "streaming"
                ]
                for place, choices in options.items()
            }
            by_rest.append(cheapest(by_rule, targets))
        for target, *candidates in zip(targets, *by_rest, strict=True):
            proposals.append((rule, min(candidates, key=partial(order, target=target))))
    return [pair for index, pair in enumerate(proposals) if pair not in proposals[:index]]


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
    for option in options:
        if option.bytes not in best or option.cost < best[option.bytes].cost:
            best[option.bytes] = option
    for option in sorted(best.values(), key=lambda option: -option.bytes):
        while lower and lower[-1].cost >= option.cost:
            lower.pop()
        while len(lower) > 1 and _rate(lower[-2], lower[-1]) >= _rate(lower[-1], option):
            lower.pop()
        lower.append(option)
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
        targets: bytes of whole caches, falling.

    Returns:
        For each target what every key head keeps; the smallest plan if the target is below it.
    """
    hulls = {place: hull(choices) for place, choices in options.items()}
    kept = {place: along[0] for place, along in hulls.items()}
    total = sum(option.bytes for option in kept.values())
    steps = [
        (_rate(more, fewer), place, fewer)
        for place, along in hulls.items()
        for more, fewer in pairwise(along)
    ]
    steps.sort(key=itemgetter(0))
    plans = []
    for target in targets:
        while total > target and steps:
            _, place, fewer = steps.pop(0)
            total -= kept[place].bytes - fewer.bytes
            kept[place] = fewer
        plans.append({place: option.plan for place, option in kept.items()})
    return plans


#: What key heads may keep instead of everything, unless the caller says otherwise.
PLANS = (
    HeadPlan("streaming", first=4, recent=124),
    HeadPlan("streaming", first=4, recent=252),
    HeadPlan("streaming", first=4, recent=508),
    HeadPlan(key_bits=8, value_bits=8),
    HeadPlan(key_bits=4, value_bits=4),
    HeadPlan(key_bits=4, value_bits=2),
)
#: Shares of the full cache at which the frontier is measured.
SHARES = (0.75, 0.5, 0.35, 0.25)
#: Names of the tables of derivatives and of statistics, in the file of the losses.
_COSTS, _REACH = ".costs", ".reach"
_TABLES = {"": "search for a plan to resume", _COSTS: FIT, _REACH: FIT}
#: Windows in which spans are planted, at most, and their tokens, at least: eight spans of 24 and
#: their repetitions.
_MOST_RECALLED, _LEAST_RECALLED = 4, 452
#: Windows whose derivatives are read, and that decide, at least.
_LEAST = (2, 2)


def budget(
    model: torch.nn.Module,
    windows: AnyBatches | Tensor,
    *,
    keep: float | None = None,
    max_loss: float | None = None,
    plans: Sequence[HeadPlan] | None = None,
    shares: Sequence[float] = SHARES,
    loss: AnyLoss | None = None,
    save: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> Budget:
    r"""Find what each key head must keep in the cache, at a given size or a given loss.

    Every second window proposes plans at each share of the full cache, by three rules:

    * ``"gradient"``: the derivative of the loss by a gate to the head's output under each of
      ``plans``, plus its second-order cost, from one backward pass (see
      :func:`acutance.calibration.gate_slopes`). The costs of all heads have the least sum.
    * ``"distant weight"``: heads stream that lose least weight by it.
    * ``"keys_95"``: heads stream that need fewest keys for 95 % of a row's weight.

    By the last two, all other heads keep the same precision, the one with the least sum of costs.
    The other windows decide: the loss of every proposal is measured on them. The loss hardly sees
    what a plan forgets, so recall of spans planted in four of them is measured too, under the plan
    that was chosen; the search does not use it.

    Args:
        model: a causal language model of transformers with its head.
        windows: tokens (B, L), read one window at a time, or batches as for
            :func:`acutance.calibrate`; at least 4. The size of a cache is that after L tokens.
        keep: share of the full 16-bit cache that the plan may take; 0.5 if neither this nor
            ``max_loss`` is given.
        max_loss: largest rise of the mean loss, in nats a token: the smallest plan is returned
            whose rise is below it with 95 % confidence.
        plans: what a key head may keep instead of everything. None: 4 first and 124, 252 or 508
            recent keys, as far as windows are longer; all keys and values in 8 bits or in 4; or
            keys in 4 bits and values in 2.
        shares: shares at which the frontier is measured; ``keep`` is added.
        loss: as for :func:`acutance.judge`.
        save: file that keeps what was measured, to continue from.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: called after each run of the model with its tokens, the pass (1 for derivatives, 2
            for statistics, 3 for losses) and 3.

    Returns:
        The plan, and the frontier of loss against bytes that it was chosen from.

    Raises:
        LossError: if the model has no such loss.
        PlanError: if the model has no cache that a plan can describe.
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of range, there are fewer than 4 windows, or a plan keeps
            more keys than a window has.

    Example:
        >>> from acutance.caching import HeadPlan, budget
        >>> from acutance.reproduce import decoder, texts
        >>> code = texts.read(texts.files("held out")).long()
        >>> streaming = [HeadPlan("streaming", first=2, recent=30)]
        >>> found = budget(decoder(), code[: 4 * 128].view(4, 128), keep=0.6, plans=streaming)
        >>> found.plan.share(128) <= 0.6
        True
    """
    shares = _check(keep, max_loss, shares, plans)
    asked = "0.5 (default)" if keep is None else f"{keep:g}"
    saving = Saving.to(save, resume=resume, overwrite=overwrite, tables=_TABLES)
    whole = CachePlan.of(model)
    read = read_windows(model, windows, None, loss)
    n = read.lengths[-1]
    plans = _fitting(plans, n)
    units = read.units
    if len(units) < sum(_LEAST):
        raise ValueError(
            f"windows must be at least {sum(_LEAST)}, half for derivatives and half to decide, got "
            f"{len(units)}"
        )
    fitting, deciding = units[::2], units[1::2]

    def told(tokens: int, part: int) -> None:
        if advance is not None:
            advance(tokens, part, 3)

    costs = read_gates(
        read_windows(model, [turn.batch for unit in fitting for turn in unit.turns], None, loss),
        saving,
        [_alternative(plan) for plan in plans],
        key_heads=True,
        name=_COSTS,
        advance=lambda tokens, *_: told(tokens, 1),
    )
    reach = read_reach(read, fitting, whole.shapes, saving, lambda tokens: told(tokens, 2))
    options: dict[Place, list[Option]] = {}
    for gate in costs:
        shape = whole.shapes[gate.module]
        options[gate.module, gate.head] = [Option(FULL, FULL.bytes(n, shape), 0.0)] + [
            Option(plan, plan.bytes(n, shape), slope + curvature)
            for plan, slope, curvature in zip(plans, gate.slope, gate.curvature, strict=True)
        ]
    proposals = []
    for rule, heads in propose(options, reach, [int(s * whole.full_bytes(n)) for s in shares]):
        layers = {
            name: tuple(heads[name, head] for head in range(shape.heads))
            for name, shape in whole.shapes.items()
        }
        proposed = replace(whole, layers=layers)
        proposals.append((rule, proposed.words, proposed))
    different = {words: proposed for _, words, proposed in proposals}
    settings = {**read.settings, "plans": list(different), "shown": {"plans": asked}}
    measured = {}
    with LossTable(settings, saving) as table:
        for words, candidate in {"": None, **different}.items():
            measured[words] = read.read(
                deciding, table, words, partial(_loss, read, candidate),
                lambda tokens: told(tokens, 3),
            )  # fmt: skip
    points = []
    for rule, words, proposed in proposals:
        delta, error = difference(measured[""], measured[words])
        points.append(Point(rule, proposed, proposed.bytes(n), proposed.share(n), delta, error))
    chosen = _choose(points, keep, max_loss, n, len(deciding))
    plan = whole if chosen is None else chosen.plan
    recalled = _recall(model, deciding, n, plan, HeadPlan(key_bits=4, value_bits=4) in plans)
    search: dict[str, Any] = {
        "n": n,
        "mean_loss": mean_loss(measured[""]),
        "delta": 0.0 if chosen is None else chosen.delta,
        "error": 0.0 if chosen is None else chosen.error,
        "recall": {name: mean for name, (mean, _) in recalled.items()},
    }
    return Budget(
        plan=replace(plan, search=finite(search)),
        points=tuple(points),
        n=n,
        windows=len(deciding),
        mean_loss=search["mean_loss"],
        loss=read.loss.words,
        costs=costs,
        options=tuple(plans),
        untrained=is_untrained(model),
        recall=recalled,
    )


def _recall(
    model: torch.nn.Module, deciding: Sequence[Any], n: int, plan: CachePlan, four_bits: bool
) -> dict[str, tuple[float, float]]:
    """Recall of spans planted in windows under a plan, with the full cache and in 4 bits."""
    batches = [turn.batch for unit in deciding[:_MOST_RECALLED] for turn in unit.turns]
    ids = [batch if isinstance(batch, Tensor) else batch.get("input_ids") for batch in batches]
    if n < _LEAST_RECALLED or any(rows is None for rows in ids):
        return {}
    windows = torch.cat([rows[:, :n] for rows in ids]).to(next(model.parameters()).device)
    kept: dict[str, CachePlan | None] = {"plan": plan, "full": None}
    if four_bits:
        kept["4 bits"] = CachePlan.of(model, HeadPlan(key_bits=4, value_bits=4))
    results = {name: recall(model, windows, keeping) for name, keeping in kept.items()}
    return {name: (result.mean, result.error) for name, result in results.items()}


def _check(
    keep: float | None,
    max_loss: float | None,
    shares: Sequence[float],
    plans: Sequence[HeadPlan] | None,
) -> list[float]:
    """Check the arguments that do not depend on the model; returns the shares, falling."""
    if keep is not None and max_loss is not None:
        raise ValueError(f"give keep or max_loss, got keep={keep!r} and max_loss={max_loss!r}")
    if max_loss is not None:
        check_number("max_loss", max_loss, above=0.0)
    if keep is None and max_loss is None:
        keep = 0.5
    named = [("shares", share) for share in shares] + ([] if keep is None else [("keep", keep)])
    for name, share in named:
        if check_number(name, share, above=0.0) > 1.0:
            raise ValueError(f"{name} must be at most 1, got {share!r}")
    if plans is not None and not (plans and all(isinstance(one, HeadPlan) for one in plans)):
        raise TypeError(f"plans must be a sequence of HeadPlan, got {plans!r:.80}")
    return sorted({share for _, share in named}, reverse=True)


def _fitting(plans: Sequence[HeadPlan] | None, n: int) -> tuple[HeadPlan, ...]:
    """The plans, or those of :data:`PLANS` that keep less than n keys or round them."""
    choices = PLANS if plans is None else tuple(plans)
    longer = [plan for plan in choices if plan.kind == "streaming" and plan.keys(n) == n]
    if plans is not None and longer:
        raise ValueError(
            f"plans must keep fewer keys than a window has, got first={longer[0].first} and "
            f"recent={longer[0].recent} for windows of {n} tokens"
        )
    return tuple(plan for plan in choices if plan not in longer)


def _alternative(plan: HeadPlan) -> Window | Alternative:
    """What a head computes under a plan, for the gates."""
    if plan.kind == "streaming":
        return Window(plan.recent, sinks=plan.first)
    if plan.kind == "dropped":
        return Dropped()
    return Rounded(plan.key_bits, plan.value_bits)


# -- the losses of plans ---------------------------------------------------------------------------


def _loss(read: Reader, plan: CachePlan | None, batch: dict[str, Any]) -> Reading:
    """The loss of a batch under a plan, as a mask where a mask expresses it."""
    kept = set() if plan is None else {head for heads in plan.layers.values() for head in heads}
    context: AbstractContextManager[Any] = nullcontext()
    if plan is not None and any(head.kind == "dropped" or head.quantised for head in kept):
        from acutance.caching.run_plan import AppliedPlan

        context = AppliedPlan(read.model, plan)  # a plan that was made for this model
    elif plan is not None and kept != {FULL}:
        context = apply(read.model, plan.law())
    with evaluating(read.model), torch.no_grad(), context:
        return Reading.of(read.loss.score(read.model, batch))


def _choose(
    points: Sequence[Point], keep: float | None, max_loss: float | None, n: int, windows: int
) -> Point | None:
    """The least loss at a share, or the fewest bytes at a loss; None if that is the full cache."""
    if max_loss is not None:
        within = [one for one in points if one.delta + margin(one.error, windows) <= max_loss]
        return min(within, key=lambda point: point.bytes, default=None)
    share = 0.5 if keep is None else keep
    fitting = [point for point in points if point.share <= share]
    if not fitting:
        least = min((point.share for point in points), default=1.0)
        raise ValueError(
            f"keep={share!r} is not reached: the smallest plan of these heads takes "
            f"{least:.3f} of the cache at {n} tokens; allow plans that keep less"
        )
    return min(fitting, key=lambda point: point.delta)


@dataclass(frozen=True)
class Rounded:
    """All keys and values rounded as the cache rounds them, keys by channel and values by token.

    The newest tokens are rounded too, which a cache leaves as they are, so the cost is a little
    too high.

    Attributes:
        key_bits: of keys.
        value_bits: of values.
        group: tokens that share the scale of a key channel, channels that share that of a value; if
            it does not divide the width of values, all of them do.
    """

    key_bits: int = 16
    value_bits: int = 16
    group: int = 32

    @property
    def words(self) -> str:
        """The precisions and the group."""
        return f"keys in {self.key_bits} bits, values in {self.value_bits}, groups of {self.group}"

    def output(self, call: AttentionCall) -> Tensor:
        """The output of a call with rounded keys and values, (B, Hq, L, Ev)."""
        width = call.value.shape[3]
        key = self._rounded(call.key, self.key_bits, None)
        value = self._rounded(call.value, self.value_bits, width // value_groups(width, self.group))
        output: Tensor = replace(call, key=key, value=value).rebuild(False)[0]
        return output

    def _rounded(self, x: Tensor, bits: int, channels: int | None) -> Tensor:
        """Keys or values (B, H, S, D), ``channels`` as in :func:`quantise`."""
        if bits == 16:
            return x
        tokens = x.shape[2]
        more = -tokens % self.group  # the last one again fills the last group
        groups = torch.cat([x, x[:, :, -1:].expand(-1, -1, more, -1)], 2).unflatten(
            2, (-1, self.group)
        )
        return dequantise(*quantise(groups, bits, channels), bits, x.dtype)[:, :, :tokens]


@dataclass(frozen=True)
class Dropped:
    """No keys and values: the output is zero."""

    words = "dropped"

    def output(self, call: AttentionCall) -> Tensor:
        """Zeros, (B, Hq, L, Ev)."""
        return call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])
