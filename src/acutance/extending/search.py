"""Successive halving: many changes on few windows, the better ones on more; then laws by head."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from acutance.calibration.apply_law import Change, LawChange, query_factor
from acutance.calibration.gradients import backward_by_outputs, prepared
from acutance.calibration.law import HeadLaws, Law, LawPart, by_layer, scaling_and_window
from acutance.calibration.loss_table import LossTable, Reading, measure_batch, ratio
from acutance.calibration.losses import Loss, NextToken, call_model, logits_of
from acutance.calibration.read_window import VisibleKeys, WindowedCall
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import attention_layers, cache_argument, uses_interface
from acutance.capture.rotary import Rotary, find_rotary
from acutance.extending.record import AS_IS, Final, Tried
from acutance.judging.paired import Part, compare_losses
from acutance.judging.rope import RopeChange
from acutance.scaling import HeadTable, Window

#: Temperatures that are tried: 1 ± this times ln(n / T), as YaRN's 1 + 0.1 ln factor.
_TEMPERATURE = 0.1
#: Parts of the rows; from part to part a derivative has its error.
_PIECES = 16


def law_part(change: Change | None) -> LawPart | None:
    """The window of a change, or its pair of scaling and window, for all heads; else None."""
    if not isinstance(change, LawChange) or change.windowed:
        return None
    law: Any = change.law
    is_pair = isinstance(law, tuple) and len(law) == 2 and isinstance(law[1], Window)
    return law if is_pair or isinstance(law, Window) else None


def head_slopes(
    model: torch.nn.Module,
    loss: Loss,
    batch: Mapping[str, Any],
    best: LawPart,
    others: Sequence[LawPart],
) -> dict[str, Tensor]:
    r"""Change of the mean loss to first order, if one head has another law than all the others.

    With :math:`o` the output of a head under ``best``, :math:`o'` that under another law and
    :math:`g` the derivative of the loss by :math:`o`, it is :math:`g \cdot (o' - o)`, summed over
    rows. One backward pass gives :math:`g` for all heads.

    Args:
        model: the model, without a law.
        loss: the loss.
        batch: a window, as for the loss.
        best: the window, or scaling and window, of all heads.
        others: what each head may have instead.

    Returns:
        For each layer (others, heads, 16 parts of the rows) float64, nats a token.

    Raises:
        ValueError: if a layer does not use transformers' attention interface.

    Example:
        >>> from acutance.calibration.losses import NextToken
        >>> from acutance.reproduce import decoder
        >>> batch = {"input_ids": torch.arange(256)[None]}
        >>> windows = Window(64, beyond=128), Window(96, beyond=128)
        >>> slopes = head_slopes(decoder(), NextToken(), batch, windows[0], windows[1:])
        >>> [part.shape for part in slopes.values()]
        [torch.Size([1, 4, 16]), torch.Size([1, 4, 16]), torch.Size([1, 4, 16])]
    """
    layers = attention_layers(model)
    if wrong := next((name for name, one in layers.items() if not uses_interface(one)), None):
        raise ValueError(f"{wrong} does not run through transformers' attention interface")
    windows = [scaling_and_window(one)[1] for one in (best, *others)]
    moving = any(window is not None and window.moves for window in windows)
    rotary = find_rotary(model, layers.values()) if moving else [None] * len(layers)
    of_layer = dict(zip(layers, rotary, strict=True))
    sums: dict[str, Tensor] = {}
    known: Any = None  # the mask and shapes of the last call: those of most layers are the same
    keys: Any = None  # what its rows see

    def add(call: AttentionCall, output: Tensor, gradient: Tensor) -> None:
        """Add the derivatives of one call, whose output and gradient are (B, H, L, E)."""
        nonlocal known, keys
        own = call.attn_mask, call.query.shape, call.key.shape
        if known is None or known[0] is not own[0] or known[1:] != own[1:]:
            known, keys = own, VisibleKeys.of(call)
        parts = []
        for other in others:
            away = _through(call, other, of_layer[call.module], keys) - output
            by_row = (gradient.float() * away.float()).sum((0, 3))  # (H, L)
            pieces = by_row.double().tensor_split(_PIECES, 1)
            parts.append(torch.stack([piece.sum(1) for piece in pieces], 1))
        sums[call.module] = sums.get(call.module, 0.0) + torch.stack(parts).cpu()

    with torch.inference_mode(False), torch.enable_grad(), prepared(model):
        scored = backward_by_outputs(model, loss, batch, best, layers, add)
    count = int((~scored.loss.isnan()).sum())
    return {name: sums[name] / count for name in layers}


def _through(
    call: AttentionCall, part: LawPart, rotary: Rotary | None, keys: VisibleKeys
) -> Tensor:
    """The output of a call whose heads all have one law, (B, H, L, E)."""
    scaling, window = scaling_and_window(part)
    heads = call.query.shape[1]
    if scaling is not None:
        laws = HeadLaws(scaling, window=window)
        factor = query_factor(laws, keys.count, heads, call.query.dtype)
        call = replace(call, query=call.query * factor.unsqueeze(-1))
    windowed = WindowedCall.of(call, [window] * heads, rotary, keys)
    return windowed.through(lambda: call.rebuild(False)[0])


def with_temperature(best: LawPart, train_length: int, to: int) -> LawPart | None:
    """A window with factors of 1 up to the trained length, and 1 + 0.1 ln(n / T) beyond.

    None if ``best`` has a scaling already, or drops keys: factors count the keys that a row reads.
    """
    return _warm(best, 1.0, train_length, to) if _is_whole(best) else None


def mixed(
    model: torch.nn.Module,
    best: LawPart,
    others: Sequence[LawPart],
    slopes: Mapping[str, Tensor],
    away: Sequence[float],
    train_length: int,
    to: int,
) -> list[LawChange]:
    """Laws that give each head what should lower the loss.

    Derivatives are drawn towards the mean of all heads, the more the larger their errors are, and
    those of a window are shifted so that their sum is what it was measured to do in all heads. The
    first law gives each head the window with the lowest one, the second also a temperature where
    its derivative is beyond its error and the window drops no keys.

    Args:
        model: the model.
        best: as in :func:`head_slopes`.
        others: as in :func:`head_slopes`; the last one is that of :func:`with_temperature` where
            there is one.
        slopes: what :func:`head_slopes` returned.
        away: measured differences of the loss, if all heads have one of the other windows.
        train_length: tokens of the windows that it was trained on.
        to: tokens that it is to read.

    Returns:
        The laws that differ from ``best``: none, one or two.
    """
    places = [(name, head) for name, part in slopes.items() for head in range(part.shape[1])]
    value, error = _shrunk(torch.cat(list(slopes.values()), 1))
    warm = with_temperature(best, train_length, to)
    windows = [one for one in others if one != warm]
    own, sums = value[: len(windows)], torch.tensor(away, dtype=value.dtype)
    own = own + ((sums - own.sum(1)) / len(places))[:, None]
    least = torch.cat([torch.zeros_like(value[:1]), own]).argmin(0).tolist()
    chosen = dict(zip(places, ([best, *windows][index] for index in least), strict=True))
    counts = {_in_words([best, *windows][index]): least.count(index) for index in sorted({*least})}
    name = "by head: " + ", ".join(f"{one} in {count} heads" for one, count in counts.items())
    laws = {name: chosen} if any(least) else {}
    if warm is not None:
        known = torch.tensor([_is_whole(part) for part in chosen.values()])
        signs = torch.where(known & (value[-1].abs() > error[-1]), -value[-1].sign(), 0.0).tolist()
        if any(signs):
            name += f"; sharper in {signs.count(1.0)}, softer in {signs.count(-1.0)}"
            laws[name] = {
                place: _warm(part, sign, train_length, to) if sign and _is_whole(part) else part
                for (place, part), sign in zip(chosen.items(), signs, strict=True)
            }
    return [LawChange(name, Law.of(model, law)) for name, law in laws.items()]


def _is_whole(part: LawPart) -> TypeGuard[Window]:
    """Whether it is a window, without a scaling, through which rows read all visible keys."""
    return isinstance(part, Window) and part.far != "drop"


def _warm(window: Window, sign: float, train_length: int, to: int) -> LawPart:
    """A window with factors of 1 ± 0.1 ln(n / T) beyond the trained length T."""
    last = 1 + sign * _TEMPERATURE * math.log(to / train_length)
    return HeadTable([[1.0, last]], lengths=[train_length, to]), window


def _in_words(part: LawPart) -> str:
    """A window in words, with what differs from the defaults."""
    if not isinstance(part, Window):
        return str(part)
    group = part.group if part.far != "group" else None
    plain = Window(part.size).to_dict() | {"size": None, "group": group}
    own = part.to_dict().items()
    return ",".join(f"{name}={value}" for name, value in own if value != plain[name])


def _shrunk(slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over parts of the rows, (others, heads), drawn towards their mean, and their errors.

    The sums are taken for normally distributed around a true value, and that around the mean.
    """
    parts = slopes.shape[-1]
    value, noise = slopes.sum(-1), parts * slopes.var(-1)
    mean = value.mean(-1, keepdim=True)
    spread = (value.var(-1, keepdim=True) - noise.mean(-1, keepdim=True)).clamp(min=0)
    weight = spread / (spread + noise).clamp(min=torch.finfo(slopes.dtype).tiny)
    return mean + weight * (value - mean), (weight * noise).sqrt()


#: Called after each run of the model: tokens, windows that are now done, and whether it ran now
#: rather than in the run that is resumed.
Advance = Callable[[int, int, bool], None]
#: Of the changes tried, one in so many goes on to the next round.
_KEEP = 3
#: Other windows that a head may have in place of the best one.
_OTHERS = 2
#: Standard errors by which a law by head must be better than a simpler law.
_ERRORS = 2.0
#: Time of a backward pass with these, in runs of the model.
_BACKWARD = 8


@dataclass(eq=False, kw_only=True)
class Search:
    """A search by successive halving, and the measurement of its winners on other windows.

    Attributes:
        model: the model.
        windows: tokens, (windows, L) int64; those of the search come first.
        loss: the loss.
        table: where losses are kept, by change and window.
        changes: the changes of the model to try.
        ranges: first and last n, the tokens that a prediction could read, of each range; one ends
            at the trained length.
        train_length: n up to which a change should not raise the loss; changes that begin beyond
            it are run from there on.
        finals: number of windows for the final numbers.
        max_cost: largest accepted rise of the mean loss up to ``train_length``, nats a token.
        budget: seconds of all runs after which the search stops; None is no limit.
        by_head: whether to go on from the best window to windows and temperatures by head.
        advance: progress callback, called after each run.
        chosen: the best accepted change after :meth:`run`; None if none is better than the model
            as it is.
        complete: whether the search ended before its budget.
    """

    model: torch.nn.Module
    windows: Tensor
    loss: Loss
    table: LossTable
    changes: list[Change]
    ranges: Sequence[tuple[int, int]]
    train_length: int
    finals: int
    max_cost: float
    budget: float | None
    by_head: bool
    advance: Advance | None
    chosen: Change | None = None
    complete: bool = True

    def __post_init__(self) -> None:
        self._prefix = Prefix(self.model, self.loss, self.train_length)
        #: how many of the ranges are up to the trained length
        self._trained = sum(last <= self.train_length for _, last in self.ranges)
        self._search = len(self.windows) - self.finals
        self._finals = range(self._search, len(self.windows))
        self._reached: dict[str, int] = {}  # windows of the search, by the words of a change

    # -- losses of windows -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Time of all runs so far, including those of the run that is resumed."""
        return sum(one.seconds for one in self.table.readings.values())

    def _longest(self, words: str | None = None) -> float:
        """Seconds of the longest run under the change of these words, or any; 0 before a run."""
        seconds = (
            reading.seconds
            for (change, window), reading in self.table.readings.items()
            if words in (None, change) and window >= 0
        )
        return max(seconds, default=0.0)

    def _measure(self, change: Change | None, window: int) -> None:
        """Run the model on a window under a change, unless that is done, and report progress.

        Tokens up to the trained length are not run under a change that begins beyond it: their
        losses are those of the unchanged model, which is measured first.
        """

        def read() -> Reading:
            ids, before, past = self._ids(window), None, 0
            batch: dict[str, Any] = {"input_ids": ids}
            if change is not None:
                before = self.table.readings["", window]
                if self._prefix.serves(change, ids):
                    batch, past = self._prefix.after(window, ids), self.train_length
            return measure_batch(self.model, self.loss, batch, change, self.ranges, before, past)

        known = self._is_known(change, window)
        self.table.get(_words(change), window, read)
        if change is not None and window < self._search:
            self._reached[change.words] = max(window + 1, self._windows(change))
        if self.advance is not None:
            self.advance(self.windows.shape[1], 1, not known)

    def _is_known(self, change: Change | None, window: int) -> bool:
        """Whether a window was read under a change, now or in the run that is resumed."""
        return (_words(change), window) in self.table.readings

    def _ids(self, window: int) -> Tensor:
        """The tokens of a window, (1, L), on the model's device."""
        device = next((part.device for part in self.model.parameters()), None)
        return self.windows[window : window + 1].to(device)

    def _losses(self, change: Change | None, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sums of the losses of measured windows and numbers of predictions, (windows, ranges)."""
        readings = [self.table.readings[_words(change), window] for window in windows]
        return torch.cat([one.loss for one in readings]), torch.cat([one.count for one in readings])

    # -- the search -------------------------------------------------------------------------------

    def run(self) -> None:
        """Try all changes on one window, then repeatedly the best third on twice the windows."""
        left, before, used = list(self.changes), 0, 1
        while True:
            for window in range(before, used):  # what changes share in a window is read once
                for change in (None, *left):
                    if self.complete and not self._has_time(change, window):
                        self.complete = False
                    if self.complete or change is None:
                        self._measure(change, window)
            known = [one for one in left if self._windows(one) >= used]
            left = sorted(known or [one for one in left if self._windows(one)], key=self._rank)
            if not self.complete or len(left) <= 1 or used == self._search:
                break
            left, before, used = left[: _kept(len(left))], used, min(2 * used, self._search)
        if left:
            best = self._tried(left[0])
            self.chosen = left[0] if best.allowed and best.beyond < 0 else None
        if self.by_head and self.complete:
            self._choose_by_head()

    def _choose_by_head(self) -> None:
        """Try laws by head, derived from the last window of the search and decided on the others.

        They come from one backward pass, unless that was done before. A law replaces a simpler one
        only if its loss is lower there by more than twice the standard error of the difference.
        With less than two windows to decide on, or nothing for heads to choose from, there is none.

        Raises:
            ValueError: if the model's attention does not allow it.
        """
        best, last = self.chosen, self._search - 1
        own = law_part(best)
        if best is None or own is None or last < 2:
            return
        tried = [one for one in self.changes if self._windows(one) and one is not best]
        others = sorted(filter(law_part, tried), key=self._rank)[:_OTHERS]
        if not self._has_time(best, 0, more=_BACKWARD * self._longest(best.words)):
            self.complete = False
            return
        train_length, to = self.train_length, self.windows.shape[1]
        proposed = (*map(law_part, others), with_temperature(own, train_length, to))
        parts = [part for part in proposed if part is not None]
        if not parts:
            return
        key = json.dumps([str(own), [str(part) for part in parts], last])
        read: dict[str, Tensor] = {}

        def slopes_of(name: str) -> Reading:
            if not read:
                ids = self._ids(last)
                batch = {"input_ids": ids}
                if all(self._prefix.serves(one, ids) for one in (best, *others)):
                    batch = self._prefix.after(last, ids)
                read.update(head_slopes(self.model, self.loss, batch, own, parts))
            return Reading(torch.empty(0), torch.empty(0), read[name])

        slopes = {
            name: self.table.get(key, -place, functools.partial(slopes_of, name), 0).values
            for place, name in enumerate(attention_layers(self.model), 1)
        }
        self.table.write()
        away = [self._parts(best, one, range(1))[1].delta for one in others]
        found = mixed(self.model, own, parts, slopes, away, train_length, to)
        self.changes += found
        for window in range(last) if found else ():
            for change in (None, best, *found):
                if not self._has_time(change, window):
                    self.complete = False
                    return
                self._measure(change, window)
        for change in found:  # the simpler ones come first
            _, gain = self._parts(self.chosen, change, range(last))
            if -gain.delta > _ERRORS * gain.error:
                self.chosen = change

    def _has_time(self, change: Change | None, window: int, more: float = 0.0) -> bool:
        """Whether the budget allows a run under this change on a window, or ``more`` seconds."""
        if self.budget is None or (self._is_known(change, window) and not more):
            return True
        reserved = (3 * len(self._finals) + 1) * self._longest() + more
        return self.seconds + reserved <= self.budget

    def _windows(self, change: Change) -> int:
        """Number of windows of the search that a change was measured on."""
        return self._reached.get(change.words, 0)

    def _tried(self, change: Change) -> Tried:
        """What the search saw of a change: differences from the unchanged model."""
        windows = self._windows(change)
        within, beyond = self._parts(None, change, range(windows))
        return Tried(
            name=change.name,
            windows=windows,
            within=within.delta,
            beyond=beyond.delta,
            error=beyond.error if math.isfinite(beyond.error) else None,
            allowed=within.delta <= self.max_cost,
            seconds=self._longest(change.words),
        )

    def _rank(self, change: Change) -> tuple[bool, float]:
        """Sort key of a change: accepted ones first, then by the loss beyond the trained length."""
        tried = self._tried(change)
        return not tried.allowed, tried.beyond

    def tried(self) -> list[Tried]:
        """All changes that were measured: those on most windows first, and of them the best."""
        found = [self._tried(change) for change in self.changes if self._windows(change)]
        return sorted(found, key=lambda one: (-one.windows, not one.allowed, one.beyond))

    # -- the final windows ------------------------------------------------------------------------

    def measure_finals(self) -> list[Change | None]:
        """Run the final windows under the changes that are reported.

        Returns:
            None for the unchanged model, then the chosen change and the best RoPE setting, if any.
        """
        rope = [one for one in self.changes if isinstance(one, RopeChange) and self._windows(one)]
        best = min(rope, key=lambda one: self._tried(one).beyond, default=None)
        shown: list[Change | None] = [None]
        for one in (self.chosen, best):
            if one is not None and one not in shown:
                shown.append(one)
        for window in self._finals:
            for one in shown:
                self._measure(one, window)
        return shown

    def final(
        self, change: Change | None, entropy: Sequence[tuple[float, float, float]] = ()
    ) -> Final:
        """The record of one change on the final windows.

        Args:
            change: the change; None is the unchanged model.
            entropy: as in :attr:`Final.entropy`.
        """
        mean, error = ratio(*self._losses(change, self._finals))
        return Final(
            AS_IS if change is None else change.name,
            *self._parts(None, change, self._finals),
            tuple(mean.tolist()),
            tuple(error.tolist()),
            tuple(entropy),
        )

    def gain(self, shown: Sequence[Change | None]) -> Part | None:
        """Difference of the loss beyond the trained length, chosen change minus best RoPE setting.

        Args:
            shown: what :meth:`measure_finals` returned.

        Returns:
            The difference on the final windows; None if the chosen change is a RoPE setting itself.
        """
        rope = [one for one in shown if isinstance(one, RopeChange)]
        if self.chosen is None or isinstance(self.chosen, RopeChange) or not rope:
            return None
        return self._parts(rope[0], self.chosen, self._finals)[1]

    def _parts(
        self, before: Change | None, after: Change | None, windows: Sequence[int]
    ) -> tuple[Part, Part]:
        """The mean loss under ``after`` minus that under ``before``, on the same windows.

        Args:
            before: a change; None is the unchanged model.
            after: likewise.
            windows: indices of the windows.

        Returns:
            The difference up to the trained length, and that beyond it.
        """
        (first, counts), (second, _) = (self._losses(one, windows) for one in (before, after))
        sums, groups, cut = torch.stack([first, second]), torch.arange(len(windows)), self._trained

        def part(ranges: slice) -> Part:
            ends = [(self.ranges[ranges][0][0], self.ranges[ranges][-1][1])]
            loss, count = (tensor[..., ranges].sum(-1, keepdim=True) for tensor in (sums, counts))
            return compare_losses(["after"], loss, count, groups, ends)[0].overall

        return part(slice(cut)), part(slice(cut, None))


def planned_runs(candidates: int, search: int, final: int) -> int:
    """Runs of the model that a search makes without a budget.

    Example:
        >>> planned_runs(9, 3, 3)  # 10 on the first window, 4 on the second, 2 on the third; finals
        25
    """
    runs, used, target = 3 * final, 0, 1
    while True:
        runs += (target - used) * (candidates + 1)
        if candidates == 1 or target == search:
            return runs
        used, target, candidates = target, min(2 * target, search), _kept(candidates)


def _kept(count: int) -> int:
    """Number of ``count`` changes that go on to the next round."""
    return max(1, math.ceil(count / _KEEP))


def _words(change: Change | None) -> str:
    """What identifies a change in the table; None stands for the unchanged model."""
    return "" if change is None else change.words


_COMPARED = 64  # tokens on which a run with kept keys is compared with one without


class Prefix:
    """The keys and values of the first ``length`` tokens of one window, under no change.

    Args:
        model: the model.
        loss: the loss.
        length: tokens that are read once.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, length: int) -> None:
        self._model, self.length = model, length
        self._usable: bool | None = None if isinstance(loss, NextToken) else False
        self._window: int | None = None
        self._cache: Any = None

    def serves(self, change: Change, ids: Tensor) -> bool:
        """Whether a window (1, L) under a change need only be read from ``length`` on."""
        if self._usable is None:
            self._usable = _can_continue(self._model, ids)
        return self._usable and begins_beyond(self._model, change, self.length)

    @torch.no_grad()
    def after(self, window: int, ids: Tensor) -> dict[str, Any]:
        """The rest of a window as a batch, which continues the kept keys and values.

        Args:
            window: index of the window; those of the last one are kept.
            ids: its tokens, (1, L).
        """
        if window != self._window:
            self._cache = _read(self._model, ids[:, : self.length])
            self._window = window
        return {"input_ids": ids[:, self.length :], **_cached(self._model, self._cache)}


def begins_beyond(model: torch.nn.Module, change: Change, length: int) -> bool:
    """Whether a change leaves rows with at most ``length`` keys as they are.

    Example:
        >>> from acutance.reproduce import decoder
        >>> from acutance.judging.changes import as_changes
        >>> names = ["window:size=64,beyond=128", "window:size=64", "rope:linear,factor=2"]
        >>> [begins_beyond(decoder(), one, 128) for one in as_changes(names)]
        [True, False, False]
    """
    if not isinstance(change, LawChange):
        return False
    rest, layers = by_layer(model, change.law)
    n = torch.arange(1, length + 1)
    return not any(
        any(window.unchanged < length for window in laws.all_windows)
        or any(one.needs_entropy or bool((one.factor(n) != 1).any()) for one in laws.scalings)
        for laws in [*layers.values(), *([] if rest is None else [rest])]
    )


def _can_continue(model: Any, ids: Tensor) -> bool:
    """Whether a model with all keys of its first tokens kept reads the next ones as without."""
    kinds = getattr(getattr(model, "config", None), "layer_types", None) or ["full_attention"]
    if _cache_name(model) is None or set(kinds) != {"full_attention"}:
        return False
    few = ids[:, :_COMPARED]
    half = few.shape[1] // 2
    try:
        with torch.no_grad():
            whole = logits_of(model, call_model(model, {"input_ids": few}))[:, half:]
            rest = {"input_ids": few[:, half:], **_cached(model, _read(model, few[:, :half]))}
            parts = logits_of(model, call_model(model, rest))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return False
    scale = float(whole.abs().amax()) * torch.finfo(whole.dtype).eps
    return bool(((parts - whole).abs() <= max(1e-4, 8 * scale)).all())


def _cache_name(model: Any) -> str | None:
    """The argument of a model's forward method that takes a cache."""
    return cache_argument(inspect.signature(model.forward).parameters)


def _cached(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as an argument of a model that takes one."""
    return {_cache_name(model) or "past_key_values": cache}


def _read(model: Any, ids: Tensor) -> Any:
    """The keys and values of tokens (1, L), as a cache that does not grow when it is continued."""
    from transformers import DynamicCache

    class Fixed(DynamicCache):  # type: ignore[misc]
        """Keys and values that calls continue, each from the same tokens on."""

        full = False

        def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kw: Any) -> Any:
            if not self.full:
                return super().update(key, value, layer, *args, **kw)
            own: Any = self.layers[layer]
            return torch.cat([own.keys, key], -2), torch.cat([own.values, value], -2)

    cache = Fixed()
    base = getattr(model, "base_model", model)
    call_model(base, {"input_ids": ids, **_cached(base, cache)})
    cache.full = True
    return cache
