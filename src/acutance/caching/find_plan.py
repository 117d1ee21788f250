"""acutance.budget: a cache plan of a given size, or loss, chosen by held-out loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.caching.frontier import Budget, Point
from acutance.caching.head_plan import FULL, HeadPlan, value_groups
from acutance.caching.plan import CachePlan
from acutance.caching.planted import recall
from acutance.caching.rules import options_of, propose, read_reach
from acutance.calibration.apply_law import apply
from acutance.calibration.gradients import Alternative, gate_slopes
from acutance.calibration.loss_table import (
    Advance,
    LossTable,
    Reading,
    Saving,
    Unit,
    Windows,
    difference,
    margin,
    mean_loss,
    read_units,
    read_windows,
)
from acutance.calibration.losses import AnyLoss
from acutance.calibration.windows import AnyBatches, evaluating
from acutance.capture.attention_call import AttentionCall
from acutance.files import finite
from acutance.probing.causes import is_untrained
from acutance.scaling import Window
from acutance.shapes import check_number

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
#: Ends of the names of the files that keep derivatives and statistics, beside that of the losses.
_COSTS, _REACH = ".costs", ".reach"
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
        save: file that keeps the measured losses, to continue from. Derivatives are in the same
            file with ``.costs`` at the end, statistics in that with ``.reach``.
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
    saving = Saving.to(save, resume=resume, overwrite=overwrite, endings=("", _COSTS, _REACH))
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

    costs = gate_slopes(
        model,
        [turn.batch for unit in fitting for turn in unit.turns],
        [_alternative(plan) for plan in plans],
        key_heads=True,
        loss=loss,
        save=saving.beside(_COSTS).path,
        resume=resume,
        overwrite=overwrite,
        advance=lambda tokens, *_: told(tokens, 1),
    )
    reach = read_reach(
        read, fitting, whole.shapes, saving.beside(_REACH), lambda tokens: told(tokens, 2)
    )
    by_head = {
        (one.module, one.head): tuple(map(sum, zip(one.slope, one.curvature, strict=True)))
        for one in costs
    }
    options = options_of(whole.shapes, plans, by_head, n)
    targets = [int(share * whole.full_bytes(n)) for share in shares]
    proposals = []
    for rule, heads in propose(options, reach, targets):
        layers = {
            name: tuple(heads[name, head] for head in range(shape.heads))
            for name, shape in whole.shapes.items()
        }
        proposals.append((rule, replace(whole, layers=layers)))
    asked = "0.5 (default)" if keep is None else f"{keep:g}"
    points, before = _measure(
        read, deciding, proposals, asked, saving, lambda tokens: told(tokens, 3)
    )
    plan = _choose(points, n, keep, max_loss, len(deciding), whole)
    found = next((one for one in points if one.plan == plan), None)
    recalled = _recall(model, deciding, n, plan, HeadPlan(key_bits=4, value_bits=4) in plans)
    search = {
        "n": n,
        "mean_loss": before,
        "delta": 0.0 if found is None else found.delta,
        "error": 0.0 if found is None else found.error,
        "recall": {name: mean for name, (mean, _) in recalled.items()},
    }
    return Budget(
        plan=replace(plan, search=finite(search)),
        points=tuple(points),
        n=n,
        windows=len(deciding),
        mean_loss=before,
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
    rows = [one if isinstance(one, Tensor) else one.get("input_ids") for one in batches]
    if n < _LEAST_RECALLED or any(one is None for one in rows):
        return {}
    windows = torch.cat([one[:, :n] for one in rows if one is not None])
    windows = windows.to(next(model.parameters()).device)
    kept: dict[str, CachePlan | None] = {"plan": plan, "full": None}
    if four_bits:
        kept["4 bits"] = CachePlan.of(model, HeadPlan(key_bits=4, value_bits=4))
    found = {name: recall(model, windows, one) for name, one in kept.items()}
    return {name: (one.mean, one.error) for name, one in found.items()}


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
    short = [one.kind != "streaming" or one.first + one.recent < n for one in plans or PLANS]
    if plans is None:
        return tuple(one for one, fits in zip(PLANS, short, strict=True) if fits)
    for plan, fits in zip(plans, short, strict=True):
        if not fits:
            raise ValueError(
                f"plans must keep fewer keys than a window has, got first={plan.first} and "
                f"recent={plan.recent} for windows of {n} tokens"
            )
    return tuple(plans)


def _alternative(plan: HeadPlan) -> Window | Alternative:
    """What a head computes under a plan, for the gates."""
    if plan.kind == "streaming":
        return Window(plan.recent, sinks=plan.first)
    if plan.kind == "dropped":
        return Dropped()
    return Rounded(plan.key_bits, plan.value_bits)


# -- the losses of plans ---------------------------------------------------------------------------


def _applied(model: torch.nn.Module, plan: CachePlan | None) -> AbstractContextManager[Any]:
    """Context in which a model runs under a plan, as a mask where a mask expresses it."""
    if plan is None:
        return nullcontext()
    kept = {head for heads in plan.layers.values() for head in heads}
    if kept == {FULL}:
        return nullcontext()
    if any(head.kind == "dropped" or head.quantised for head in kept):
        return plan.applied(model)
    return apply(model, plan.law())


def _measure(
    read: Windows,
    deciding: Sequence[Unit],
    proposals: Sequence[tuple[str, CachePlan]],
    asked: str,
    saving: Saving,
    advance: Callable[[int], object],
) -> tuple[list[Point], float]:
    """The loss of every proposal on the deciding windows, and the mean loss without a plan."""
    different: dict[str, CachePlan | None] = {"": None}
    different |= {plan.words: plan for _, plan in proposals}
    settings = {**read.settings, "plans": [*different][1:], "shown": {"plans": asked}}
    measured: dict[str, list[Reading]] = {}
    with LossTable(settings, saving, "search for a plan to resume") as table:
        for words, plan in different.items():

            def loss(batch: dict[str, Any], plan: CachePlan | None = plan) -> Reading:
                with evaluating(read.model), torch.no_grad(), _applied(read.model, plan):
                    return Reading.of(read.loss.score(read.model, batch))

            measured[words] = read_units(read, deciding, table, words, loss, advance)
    n, before = read.lengths[-1], measured[""]
    points = []
    for rule, plan in proposals:
        delta, error = difference(before, measured[plan.words])
        points.append(Point(rule, plan, plan.bytes(n), plan.share(n), delta, error))
    return points, mean_loss(before)


def _choose(
    points: Sequence[Point],
    n: int,
    keep: float | None,
    max_loss: float | None,
    windows: int,
    whole: CachePlan,
) -> CachePlan:
    """The plan that was asked for: the least loss at a share, or the fewest bytes at a loss."""
    if max_loss is None:
        share = 0.5 if keep is None else keep
        fitting = [one for one in points if one.share <= share]
        least = min((one.share for one in points), default=1.0)
        if not fitting:
            raise ValueError(
                f"keep={share!r} is not reached: the smallest plan of these heads takes "
                f"{least:.3f} of the cache at {n} tokens; allow plans that keep less"
            )
        return min(fitting, key=lambda one: one.delta).plan
    within = [one for one in points if one.delta + margin(one.error, windows) <= max_loss]
    return min(within, key=lambda one: one.bytes).plan if within else whole


def rounded(x: Tensor, bits: int, *, along: str, group: int = 32) -> Tensor:
    r"""Round keys or values to :math:`2^b` levels between the least and the largest of each group.

    Args:
        x: (..., S, D).
        bits: b; 16 changes nothing.
        along: ``"tokens"``, where ``group`` tokens share a scale for each channel, or
            ``"channels"``, where ``group`` channels of a token do. A last group may be smaller.
        group: numbers that share a scale.

    Returns:
        The rounded numbers, shaped as ``x``; an error is at most half a step.

    Example:
        >>> rounded(torch.tensor([[0.0, 1.0, 2.4, 3.0]]), 2, along="channels")
        tensor([[0., 1., 2., 3.]])
    """
    if bits == 16:
        return x
    dim = -2 if along == "tokens" else -1
    parts = [_levels(part, 2**bits - 1, dim) for part in x.split(group, dim)]
    return torch.cat(parts, dim)


def _levels(x: Tensor, steps: int, dim: int) -> Tensor:
    """The nearest of steps + 1 evenly spaced levels between the extremes along a dimension."""
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (most - least) / steps
    safe = torch.where(step > 0, step, 1.0)
    return least + ((x - least) / safe).round() * step


@dataclass(frozen=True)
class Rounded:
    """All keys and values rounded, keys by channel and values by token.

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
        key = rounded(call.key, self.key_bits, along="tokens", group=self.group)
        width = call.value.shape[3]
        channels = width // value_groups(width, self.group)
        value = rounded(call.value, self.value_bits, along="channels", group=channels)
        output: Tensor = replace(call, key=key, value=value).rebuild(False)[0]
        return output


@dataclass(frozen=True)
class Dropped:
    """No keys and values: the output is zero."""

    words = "dropped"

    def output(self, call: AttentionCall) -> Tensor:
        """Zeros, (B, Hq, L, Ev)."""
        return call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])
