"""acutance.calibrate: fit the scale of every head that keeps a target constant in n."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.gradients import calibrate_by_loss
from acutance.calibration.law import Identity, Law
from acutance.calibration.losses import AnyLoss
from acutance.calibration.measured import (
    TARGETS,
    Measured,
    check_request,
    knots_of,
    no_layer,
    read_layers,
)
from acutance.calibration.result import HELD, Calibration, HeadCalibration
from acutance.calibration.windows import AnyBatches, cut_windows
from acutance.capture.find_layers import layer_numbers
from acutance.probing.causes import is_untrained
from acutance.scaling import HeadTable, Window
from acutance.shapes import check_count, check_flag, check_number

#: Told after each run of the model: tokens just read, the pass from 1, and passes at most.
Advance = Callable[[int, int, int], None]


def calibrate(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    *,
    target: str = "entropy",
    value: float | None = None,
    loss: AnyLoss | None = None,
    lengths: Sequence[int] | None = None,
    reference: int | None = None,
    law: str = "table",
    window: Window | Iterable[Window] | None = None,
    passes: int = 6,
    limit: float = 16.0,
    windowed: bool = False,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> Calibration:
    r"""Fit, for every head, a factor that depends on the number of keys n.

    The factor keeps a target constant in n, or with ``target="loss"`` lowers the model's loss.

    The model runs over all windows without a law, then a few times under a law that Newton's steps
    improve with the slope of the same run, :math:`dH/d\log\lambda = -\mathrm{Var}_p(\lambda s)`.
    The last run measures the law that is returned.

    For the loss, the model runs with a backward pass over every window, which gives the derivative
    of the loss by all factors at once. Two windows of three are fitted to, by Adam's steps in log
    λ; the third ones decide when to stop, and return to the best so far. Heads and lengths whose
    derivative is not beyond noise (at most one in ten of those changed by chance, Benjamini and
    Hochberg) have the factor 1, as all have if the loss of the deciding windows does not fall
    beyond noise (Student's one-sided test at 5 %).

    Rows count by the keys that they see: a causal
    model has rows of every n up to its window's length, which are read at the lengths by a line in
    log n over the octave below.

    Args:
        model: any module whose attention :func:`acutance.apply` can scale; it is put into
            evaluation mode meanwhile.
        batches: tensors (B, L) of tokens or (B, L, E), which the model is called with, or mappings
            of its keywords; windows first, tokens second. They are cut into windows of every
            length. Or a mapping from each length to such batches that have it, as where every
            window has special tokens of its own. At least 2 windows of each length; errors are
            rough below some 10.
        target: ``"entropy"`` in nats, ``"normalized_entropy"`` H / log n, ``"effective_keys"`` or
            ``"top_weight"``, means over rows; or ``"loss"``.
        value: what is wanted of every head; None is each head's own at the reference length,
            without a law.
        loss: which to lower with ``target="loss"``, as for :func:`acutance.judge`.
        lengths: of windows, rising; None is that of the longest batch and its halves down to an
            eighth.
        reference: the training length, one of the lengths; None is the shortest.
        law: ``"table"``, a factor at every length; ``"constant"``, one for all lengths; or for the
            loss with a window ``"none"``, windows alone.
        window: with ``target="loss"``, let those heads read through it for which that lowers the
            loss, before factors are fitted; of several, each head chooses its own.
        passes: runs over all windows at most, the first without a law.
        limit: factors stay between 1/limit and limit.
        windowed: also fit layers with a sliding window.
        save: with ``target="loss"``, file that keeps the state as it grows, to continue from.
        save_every: windows between two writes, at least.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: told after each run of the model how many tokens it read, which pass this is, and
            how many there are at most.

    Returns:
        The law with what was measured for each head: values before and after, and factors, with
        standard errors. Rows shorter than the first length have its factor; beyond the last each
        head goes on as √(a + b log n), fitted to its last two octaves. For the loss a
        :class:`LossCalibration` with the derivatives, constant beyond the last length.

    Raises:
        ApplyError: if attention that was seen cannot be scaled.
        FileExistsError: if the file of ``save`` is there, and is neither resumed nor overwritten.
        LossError: if the model has no such loss.
        ProbeError: if no attention was seen.
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, the text too short, lengths are beyond the model's
            learned positions, or the state to resume is of another run.

    Warns:
        UserWarning: if lengths are beyond positions that are not learned.

    Example:
        >>> import acutance
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> text = [2 * torch.randn(8, 256, 32)]
        >>> law = acutance.calibrate(model, text, lengths=[64, 128, 256])
        >>> for numbers in (law.heads[0].before, law.heads[0].factors, law.heads[0].after):
        ...     [f"{number:.1f}" for number in numbers]
        ['2.7', '3.2', '3.8']
        ['1.0', '1.3', '1.5']
        ['2.7', '2.7', '2.7']
        >>> with acutance.apply(model, law):
        ...     _ = model(text[0])

    Source:
        Su (2021), https://kexue.fm/archives/8823 (keep the entropy as n grows).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_count("passes", passes, 2)
    check_number("limit", limit, above=1.0)
    check_flag("windowed", windowed)
    if target == "loss":
        if value is not None or reference is not None:
            raise ValueError(
                "target='loss' holds nothing constant: value and reference cannot be given"
            )
        by_loss = calibrate_by_loss(
            model, batches, lengths=lengths, loss=loss, law=law, window=window, passes=passes,
            limit=limit, windowed=windowed, advance=advance,
            save=save, save_every=save_every, resume=resume, overwrite=overwrite,
        )  # fmt: skip
        return replace(by_loss, untrained=is_untrained(model))
    only_loss = {"loss": loss, "window": window, "save": save, "resume": resume or None}
    for option, given in only_loss.items():
        if given is not None:
            raise ValueError(f"{option} is for target='loss', got target={target!r:.40}")
    turns, places, windows = cut_windows(model, batches, lengths)
    reference = check_request(target, places, reference, value, law)
    knots = knots_of(places, reference)

    def read(
        number: int, scalings: Mapping[Any, HeadTable] | None = None
    ) -> tuple[Measured, dict[str, str]]:
        return read_layers(
            model, turns, target, knots, scalings, windowed=windowed,
            after=lambda turn: advance and advance(turn.tokens, number, passes),
        )  # fmt: skip

    first, skipped = read(1)
    for module, n in first.by_layer(first.n).items():
        if not n.any():
            skipped[module] = f"no row sees more than {knots[0] // 2} keys"
    if not first.lengths:
        raise ValueError(no_layer(skipped))
    fit = Fit(first, value, reference, limit)
    used = 1
    for number in range(2, passes + 1):
        settled = fit.propose() and number > 2
        constant = law == "constant" and (settled or number == passes)
        if settled and not constant:
            break
        fit.take(constant=constant)
        fit.values, _ = read(number, fit.scalings())
        used = number
        if constant:
            break
    return Calibration(
        model=Identity.of(model),
        layers=Law.of(model, fit.scalings(beyond=True)).layers,
        lengths=first.lengths,
        heads=tuple(fit.heads(layer_numbers(model, list(first.heads)))),
        target=target if value is None else f"{target}={value:g}",
        metric=target,
        value=value,
        reference=reference,
        family=law,
        passes=used,
        windows=windows,
        skipped=skipped,
        untrained=is_untrained(model),
    )


#: Factors that change by less than this between passes are found.
_SETTLED = 0.002
#: A step multiplies a factor by at most this, and divides it by at most 2.
_FARTHEST = 4.0
#: What came counts where it is within this of what the slopes promised, either way.
_TRUSTED = 8.0
#: A change is worth making where it is more than this share of the target, and beyond noise.
_WORTH = 0.01
#: Octaves beyond the largest calibrated length that a table holds.
_BEYOND = 6


class Fit:
    r"""The factors of all heads, and what was measured under them.

    The entropy of normal logits falls as a straight line in λ², so the step is Newton's there:
    :math:`\lambda \leftarrow \lambda \sqrt{1 + 2 (y^* - y) / y'}` with :math:`y' = dy/d\log\lambda`
    measured. From the second step on y' is corrected by what the last step did, over what the
    slopes at both ends of it promised: that holds what other layers do to this one's input, and
    errors of slopes that are not exact.

    Args:
        first: what was measured without a law.
        value: what is wanted of every head; None is each head's own at the reference.
        reference: the reference length; layers without rows there take the first that they have.
        limit: factors stay between 1/limit and limit.

    Attributes:
        first: what was measured without a law.
        values: what was measured last.
        factors: in force there, (lengths, heads).
        constant: whether each head has one factor for all lengths.
        wanted: the metric's desired value, (lengths, heads).
        possible: whether there are rows of that many keys and they can reach it, boolean.
        reference: index of the length that is a head's own target, (heads,); None if a value was
            given.
    """

    def __init__(self, first: Measured, value: float | None, reference: int, limit: float) -> None:
        self._target, self._limit = TARGETS[first.metric], limit
        self.first = self.values = first
        self.factors = self._next = torch.ones_like(first.value)
        self.constant = False
        rows = first.n.clamp(min=1).tolist()
        limits = [[self._target.limits(n) for n in row] for row in rows]
        low, high = torch.tensor(limits, dtype=torch.float64).unbind(-1)
        there = first.n > 0
        self.reference = None
        self.wanted = torch.full_like(first.value, value or 0.0)
        if value is None:
            known = torch.tensor(first.lengths)[:, None] == reference
            self.reference = (there.int() + (there & known)).argmax(0)
            self.wanted = first.value.gather(0, self.reference[None]).expand_as(first.value)
        flat = low if first.metric == "top_weight" else high  # only rows of equal scores have it
        self.possible: Tensor = (low <= self.wanted) & (self.wanted <= high) & there
        self.possible &= self.wanted != flat
        self._own = torch.zeros_like(there)  # where the target is a head's own value
        if self.reference is not None:
            self._own.scatter_(0, self.reference[None], True)
            self.possible |= self._own & there
        self._active = torch.zeros(there.shape[1], dtype=torch.bool)
        self._before: tuple[Tensor, Tensor, Tensor] | None = None  # λ, y and y' of the last step

    def propose(self) -> bool:
        """Choose the next factors; returns whether they hardly differ from those in force.

        The factor is 1 where the target is impossible, at the knot that is its own target, and for
        heads that were never significantly away from it.
        """
        factors, y, slope, wanted = self.factors, self.values.value, self.values.slope, self.wanted
        near = (y - wanted).abs() <= 0.001 * wanted.abs()
        if self._target.by_ratio:
            y, slope, wanted = y.log(), slope / y, wanted.log()
        before, self._before = self._before, (factors, y, slope)
        if before is not None:
            slope = _corrected(self._before, before)
        newton = (1 + (2 * (wanted - y) / slope).clamp(-0.75, _FARTHEST**2 - 1)).sqrt()
        moved = (factors * newton).clamp(1 / self._limit, self._limit)
        moved = torch.where(moved.isfinite() & (slope.abs() > 1e-9) & ~near, moved, factors)
        self._active |= self.matters(self.values).any(0)
        free = self._active & self.possible & ~self._own
        self._next = torch.where(free, moved, 1.0)
        return bool(((self._next / factors).log().abs() <= _SETTLED).all())

    def take(self, *, constant: bool) -> None:
        """Use the proposed factors; ``constant`` is each head's mean of them, weighted by error."""
        self.factors, self.constant = self._next, constant
        if constant:
            weight = torch.hypot(self.errors().nan_to_num(), 0.005 * self.factors) ** -2
            weight = weight * (self.first.n > 0)
            self.factors = (weight * self.factors).sum(0) / weight.sum(0)
            self.factors = self.factors.expand_as(self.wanted)

    def errors(self) -> Tensor:
        """Standard errors of the factors, (knots, heads): those of the values over their slopes."""
        error = self.values.error(self.reference)
        return self.factors * error / self.values.slope.abs().clamp(min=1e-9)

    def matters(self, values: Measured) -> Tensor:
        """Whether a value differs from its target by more than noise and enough to be corrected.

        Enough is 1 % of the target, or ``target.floor`` if that is more. Noise is a two-sided test
        at 5 %; a stricter one leaves heads alone that are far off where the text has few parts.
        """
        away = (values.value - self.wanted).abs()
        worth = (_WORTH * self.wanted.abs()).clamp(min=self._target.floor)
        return (away > values.interval(self.reference)) & (away > worth) & self.possible

    def scalings(self, *, beyond: bool = False) -> dict[Any, HeadTable]:
        r"""The factors in force as a scaling of each layer.

        Args:
            beyond: beyond its last length a table goes on as :math:`\sqrt{a + b \log n}`, the
                growth under which normal logits keep their entropy. The line is fitted to the
                squares of the last two octaves and passes through the last factor. It goes up to 64
                times the last length, with factors between 1/limit and limit.
        """
        scalings: dict[Any, HeadTable] = {}
        factors, possible = map(self.first.by_layer, (self.factors, self.possible))
        for module, of_heads in self.first.by_layer(self.first.n).items():
            there = of_heads[:, 0] > 0
            n, rows = of_heads[there, 0], factors[module][there]
            if self.constant and n.numel():
                scalings[module] = HeadTable(rows[0])
            elif n.numel():
                if beyond:
                    octaves, squares = torch.arange(1, _BEYOND + 1), rows.square()
                    x = (n / n[-1]).double().log()[:, None]
                    weight = x * (possible[module][there] & (4 * n >= n[-1])[:, None])
                    slope = (weight * (squares - squares[-1])).sum(0) / (weight * x).sum(0)
                    further = squares[-1] + slope.nan_to_num() * math.log(2) * octaves[:, None]
                    further = further.clamp(self._limit**-2, self._limit**2).sqrt()
                    n, rows = torch.cat([n, n[-1] << octaves]), torch.cat([rows, further])
                scalings[module] = HeadTable(rows.T.contiguous(), n.tolist())
        return scalings

    def heads(self, numbers: Mapping[str, int]) -> Iterator[HeadCalibration]:
        """The record of each head that was fitted; ``numbers`` are those of the layers."""
        off, size = (self.values.value - self.wanted).abs(), self.wanted.abs()
        held = off <= (HELD * size).clamp(min=self._target.floor)
        kept = (self.factors == 1.0).all(0) & ~self.matters(self.first).any(0)
        edge = self.factors.log().abs() >= math.log(self._limit) - 1e-9
        status = torch.where(edge, 3, 4)
        for number, those in ((2, held), (1, kept.expand_as(held)), (0, ~self.possible)):
            status = torch.where(those, number, status)
        names = ("impossible", "kept", "held", "limited", "missed")
        columns = {
            "target": self.wanted,
            "before": self.first.value,
            "before_error": self.first.error(),
            "after": self.values.value,
            "after_error": self.values.error(),
            "factors": self.factors,
            "factor_errors": self.errors(),
        }
        places = [(name, head) for name, heads in self.first.heads.items() for head in range(heads)]
        for column, (module, head) in enumerate(places):
            n = self.first.n[:, column]
            there = n > 0
            if there.any():
                yield HeadCalibration(
                    layer=numbers.get(module, list(self.first.heads).index(module)),
                    head=head,
                    module=module,
                    lengths=tuple(n[there].tolist()),
                    status=tuple(names[code] for code in status[there, column].tolist()),
                    **{name: tuple(of[there, column].tolist()) for name, of in columns.items()},
                )


def _corrected(now: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> Tensor:
    """The slope dy/d log λ, corrected by what the last step did.

    It is unchanged where λ hardly moved or the change is implausible. ``now`` and ``before`` are λ,
    y and the measured slope in the last two passes.
    """
    (factors, y, slope), (factors_before, y_before, slope_before) = now, before
    # the change that the slopes at both ends promise, each as dy/d(λ²)
    ends = slope / factors.square() + slope_before / factors_before.square()
    ratio = (y - y_before) / ((factors.square() - factors_before.square()) * ends / 4)
    moved = (factors / factors_before).log().abs() > 0.02
    plausible = (ratio > 1 / _TRUSTED) & (ratio < _TRUSTED)
    return torch.where(moved & plausible, slope * ratio, slope)
