"""acutance.calibrate: fit the scale of every head that keeps a target constant in n."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.gradients import calibrate_by_loss
from acutance.calibration.law import Identity, Law
from acutance.calibration.losses import AnyLoss
from acutance.calibration.measured import (
    TARGETS,
    LayerValues,
    check_target,
    knots_of,
    no_layer,
    read_layers,
)
from acutance.calibration.result import HELD, Calibration, HeadCalibration
from acutance.calibration.windows import AnyBatches, Turn, cut_windows
from acutance.capture.find_layers import layer_numbers
from acutance.probing.causes import is_untrained
from acutance.scaling import ClipLogN, HeadTable, LogN, Scaling, SqrtLogN, SSMax, Window
from acutance.shapes import check_count, check_flag, check_number, did_you_mean

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
        law: ``"table"``, a factor at every length; or a family fitted to it: ``"constant"``,
            ``"ssmax"`` (s log n + b), ``"log_n"``, ``"sqrt_log_n"``, ``"clip_log_n"``. For the
            loss ``"table"``, ``"constant"``, or with a window ``"none"`` for windows alone.
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
        The law with what was measured for each head: values before and after with standard errors,
        predicted effect and factors. Rows shorter than the first length have its factor; beyond the
        last each head goes on as √(a + b log n), fitted to its last two octaves. For the
        loss a :class:`LossCalibration` with the derivatives, constant beyond the last length.

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
    name, reference = check_request(target, value, places, reference, law)
    knots = knots_of(places, reference)

    def read(
        factors: Mapping[Any, Scaling] | None, number: int
    ) -> tuple[dict[str, LayerValues], dict[str, str]]:
        def after(turn: Turn) -> None:
            if advance is not None:
                advance(turn.tokens, number, passes)

        return read_layers(model, turns, name, knots, factors, windowed=windowed, after=after)

    first, skipped = read(None, 1)
    few = f"no row sees more than {knots[0] // 2} keys"
    skipped |= {module: few for module, values in first.items() if not values.knots}
    numbers = layer_numbers(model, list(first))
    at = knots.index(reference)
    fits = {
        module: LayerFit(first[module], name, value, at, limit)
        for module in sorted(first, key=lambda module: numbers.get(module, len(numbers)))
        if first[module].knots
    }
    if not fits:
        raise ValueError(no_layer(skipped))
    used = 1
    for number in range(2, passes + 1):
        settled = [fit.propose() for fit in fits.values()]
        as_family = law != "table" and (number == passes or (number > 2 and all(settled)))
        if number > 2 and all(settled) and not as_family:
            break
        applied: dict[Any, Scaling] = {}
        for module, fit in fits.items():
            applied |= fit.law(module, law if as_family else "table", reference)
        values, _ = read(applied, number)
        for module, fit in fits.items():
            fit.values = values[module]
        used = number
        if as_family:
            break
    scalings: dict[Any, Scaling] = {}
    heads: list[HeadCalibration] = []
    for index, (module, fit) in enumerate(fits.items()):
        scalings |= fit.scalings(module)
        heads += fit.heads(numbers.get(module, index), module)
    bins = {k for fit in fits.values() for k in fit.first.bins}
    return Calibration(
        model=Identity.of(model),
        layers=Law.of(model, scalings).layers,
        lengths=tuple(knots[k] for k in sorted(bins)),
        heads=tuple(heads),
        target=name if value is None else f"{name}={value:g}",
        metric=name,
        value=value,
        reference=reference,
        family=law,
        passes=used,
        windows=windows,
        skipped=skipped,
        untrained=is_untrained(model),
    )


def check_request(
    target: str,
    value: float | None,
    lengths: Sequence[int],
    reference: int | None,
    law: str,
) -> tuple[str, int]:
    """Check everything that can be refused without running the model.

    Args:
        target: as for :func:`acutance.calibrate`.
        value: likewise.
        lengths: of windows.
        reference: likewise.
        law: likewise.

    Returns:
        The metric's name and the reference length.

    Raises:
        TypeError: if something is of the wrong kind.
        ValueError: if something is out of range, or does not go together.
    """
    name, at = check_target(target, reference, lengths)
    if law not in FITTED:
        hint = did_you_mean(law, FITTED)
        raise ValueError(f"law={law!r:.40} is not one of {', '.join(FITTED)}{hint}")
    if value is None:
        return name, at
    value, n = check_number("value", value), lengths[-1]
    low, high = TARGETS[name].limits(n)
    if not low < value < high:
        least = f" (1/{n})" if name == "top_weight" else ""
        most = f" (log {n})" if name == "entropy" else ""
        unit = "" if TARGETS[name].unit == "1" else f" {TARGETS[name].unit}"
        raise ValueError(
            f"value: {name} of rows with {n} keys must be between {low:.4g}{least} and "
            f"{high:.4g}{most}, got {value:g}{unit}"
        )
    if law in ("sqrt_log_n", "clip_log_n"):
        raise ValueError(f"law={law!r} is 1 at the reference, so value cannot be given")
    return name, at


#: Factors that change by less than this between passes are found.
_SETTLED = 0.002
#: A step multiplies a factor by at most this, and divides it by at most 2.
_FARTHEST = 4.0
#: What came counts where it is within this of what the slopes promised, either way.
_TRUSTED = 8.0
#: A change is worth making where it is more than this share of the target, and beyond noise.
_WORTH = 0.01


class LayerFit:
    r"""The factors of one layer's heads, and what was measured under them.

    The entropy of normal logits falls as a straight line in λ², so the step is Newton's there:
    :math:`\lambda \leftarrow \lambda \sqrt{1 + 2 (y^* - y) / y'}` with :math:`y' = dy/d\log\lambda`
    measured. From the second step on y' is corrected by what the last step did, over what the
    slopes at both ends of it promised: that holds what other layers do to this one's input, and
    errors of slopes that are not exact.

    Args:
        first: what was measured without a law.
        target: name of the metric.
        value: what is wanted of every head; None is each head's own at the reference.
        reference: index of the bin of the reference length; a layer without rows there takes its
            first bin with rows.
        limit: factors stay between 1/limit and limit.

    Attributes:
        first: what was measured without a law.
        values: what was measured last.
        factors: in force there, (knots, heads).
        predicted: values that were expected there under a table.
        wanted: the metric's desired value, (knots, heads).
        possible: whether rows of that many keys can reach it, boolean (knots, heads).
        reference: index of the knot that is its own target; None if a value was given.
    """

    def __init__(
        self, first: LayerValues, target: str, value: float | None, reference: int, limit: float
    ) -> None:
        self._target, self._limit = TARGETS[target], limit
        self.first = self.values = first
        self.factors, self.predicted = torch.ones_like(first.value), first.value
        at = first.bins.index(reference) if reference in first.bins else 0
        self.reference = at if value is None else None
        wanted = first.value[at] if value is None else torch.full_like(first.value[0], value)
        self.wanted = wanted.expand_as(first.value).clone()
        limits = torch.tensor([self._target.limits(n) for n in first.knots], dtype=torch.float64)
        low, high = limits.T.unsqueeze(2)
        # the far ends are only reached by rows that are exactly flat, or exactly one-hot
        self.possible: Tensor = (self.wanted >= low) & (self.wanted < high)
        if target == "top_weight":
            self.possible = (self.wanted > low) & (self.wanted <= high)
        if value is None:
            self.possible[at] = True
        self._active = torch.zeros(first.value.shape[1], dtype=torch.bool)
        self._before: tuple[Tensor, Tensor, Tensor] | None = None  # λ, y and y' of the last step
        self._proposed, self._expected = self.factors, self.predicted
        self._family: dict[Any, Scaling] = {}

    # -- steps -------------------------------------------------------------------------------------

    def propose(self) -> bool:
        """Choose the next factors; returns whether they hardly differ from those in force.

        The factor is 1 where the target is impossible, at the knot that is its own target, and for
        heads that were never significantly away from it.
        """
        factors, value = self.factors, self.values.value
        y, slope, wanted = value, self.values.slope, self.wanted
        if self._target.by_ratio:
            y, slope, wanted = value.log(), slope / value, wanted.log()
        measured = factors, y, slope
        slope = self._corrected(y, slope)
        self._before = measured
        step = (1 + (2 * (wanted - y) / slope).clamp(-0.75, _FARTHEST**2 - 1)).sqrt()
        moved = (factors * step).clamp(1 / self._limit, self._limit)
        moved = torch.where(moved.isfinite() & (slope.abs() > 1e-9), moved, factors)
        near = (value - self.wanted).abs() <= 0.001 * self.wanted.abs()
        self._active |= self._matters(self.values).any(0)
        free = self._active & self.possible
        if self.reference is not None:
            free[self.reference] = False
        self._proposed = torch.where(free, torch.where(near, factors, moved), 1.0)
        expected = y + slope * ((self._proposed / factors).square() - 1) / 2
        self._expected = expected.exp() if self._target.by_ratio else expected
        return bool(((self._proposed / factors).log().abs() <= _SETTLED).all())

    def _corrected(self, y: Tensor, slope: Tensor) -> Tensor:
        """The slope dy/d log λ, corrected by the change of y since the previous pass.

        It is unchanged where there was no previous pass, λ hardly moved, or the change is
        implausible.
        """
        if self._before is None:
            return slope
        factors, y_before, slope_before = self._before
        # the change that the slopes at both ends promise, each as dy/d(λ²)
        ends = slope / self.factors.square() + slope_before / factors.square()
        ratio = (y - y_before) / ((self.factors.square() - factors.square()) * ends / 4)
        moved = (self.factors / factors).log().abs() > 0.02
        plausible = (ratio > 1 / _TRUSTED) & (ratio < _TRUSTED)
        return torch.where(moved & plausible, slope * ratio, slope)

    def law(self, module: str, law: str, reference: int) -> dict[Any, Scaling]:
        """What to apply for the proposed factors: their table, or the family fitted to them.

        Args:
            module: name of the layer.
            law: ``"table"`` or the name of the family.
            reference: length at which the family is 1 where a value was given.
        """
        knots, self.factors, self.predicted = self.values.knots, self._proposed, self._expected
        if law == "table":
            return {module: HeadTable(self.factors.T.contiguous(), lengths=knots)}
        at = reference if self.reference is None else knots[self.reference]
        self._family = family_scalings(law, module, knots, self.factors, self.errors(), at)
        n, heads = torch.tensor(knots), self.factors.shape[1]
        rows = [one.factor(n, dtype=torch.float64) for one in self._family.values()]
        self.factors = torch.cat([row.view(-1, len(n)) for row in rows]).expand(heads, -1).T
        return self._family

    def errors(self) -> Tensor:
        """Standard errors of the factors, (knots, heads): those of the values over their slopes."""
        error = self.values.error(self.reference)
        return self.factors * error / self.values.slope.abs().clamp(min=1e-9)

    def _matters(self, values: LayerValues) -> Tensor:
        """Whether a value differs from its target by more than noise and enough to be corrected.

        Enough is 1 % of the target, or ``target.floor`` if that is more. Noise is a two-sided test
        at 5 %; a stricter one leaves heads alone that are far off where the text has few parts.
        """
        away = (values.value - self.wanted).abs()
        worth = (_WORTH * self.wanted.abs()).clamp(min=self._target.floor)
        noise = values.error(self.reference) * values.widening()
        return (away > noise) & (away > worth) & self.possible

    # -- the result --------------------------------------------------------------------------------

    def statuses(self) -> list[list[str]]:
        """For each head, the outcome at each knot, a key of ``STATUSES``."""
        allowed = (HELD * self.wanted.abs()).clamp(min=self._target.floor)
        held = (self.values.value - self.wanted).abs() <= allowed
        kept = (self.factors == 1.0).all(0) & ~self._matters(self.first).any(0)
        near = 1 - 1e-9
        edge = (self.factors >= self._limit * near) | (self.factors * near <= 1 / self._limit)
        numbers = torch.where(edge, 3, 4)
        for number, those in ((2, held), (1, kept.expand_as(held)), (0, ~self.possible)):
            numbers = torch.where(those, number, numbers)
        names = ("impossible", "kept", "held", "limited", "missed")
        return [[names[number] for number in row] for row in numbers.T.tolist()]

    def scalings(self, module: str) -> dict[Any, Scaling]:
        """The layer's part of the law: the fitted family, or a table that is continued beyond."""
        if self._family:
            return self._family
        errors = self.errors().masked_fill(~self.possible, math.inf)
        return {module: continued_table(self.first.knots, self.factors, errors, self._limit)}

    def heads(self, layer: int, module: str) -> list[HeadCalibration]:
        """The record of each head, for the layer of this number and name."""
        columns = {
            "target": self.wanted,
            "before": self.first.value,
            "before_error": self.first.error(),
            "predicted": self.predicted,
            "after": self.values.value,
            "after_error": self.values.error(),
            "factors": self.factors,
            "factor_errors": self.errors(),
        }
        return [
            HeadCalibration(
                layer=layer,
                head=head,
                module=module,
                lengths=self.first.knots,
                status=tuple(status),
                **{name: tuple(column[:, head].tolist()) for name, column in columns.items()},
            )
            for head, status in enumerate(self.statuses())
        ]


#: What ``law=`` may be.
FITTED = ("table", "constant", "ssmax", "log_n", "sqrt_log_n", "clip_log_n")
#: Octaves beyond the largest calibrated length that a table holds.
_BEYOND = 6


def lines(knots: Sequence[int], factors: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares lines of each head's factors in log n: their slopes, and their values at n = 1.

    Args:
        knots: n of the factors.
        factors: (knots, heads).
        errors: their standard errors, at least 0.5 % of a factor; infinite leaves a factor out.
    """
    x = torch.tensor(knots, dtype=torch.float64).log().unsqueeze(1)
    weight = torch.hypot(torch.nan_to_num(errors, nan=0.0), 0.005 * factors) ** -2
    x_mean, mean = ((weight * part).sum(0) / weight.sum(0) for part in (x, factors))
    total = (weight * (x - x_mean) ** 2).sum(0).clamp(min=1e-12)  # 0 at a single length
    slope = (weight * (x - x_mean) * (factors - mean)).sum(0) / total
    return slope, mean - slope * x_mean


def continued_table(
    knots: Sequence[int], factors: Tensor, errors: Tensor, limit: float
) -> HeadTable:
    r"""The factors (knots, heads) as a table, which goes on as :math:`\sqrt{a + b \log n}`.

    That is the growth under which normal logits keep their entropy. The line is fitted to the
    squares of the last two octaves and passes through the last factor. The table goes up to 64
    times the last knot, with factors between 1/``limit`` and ``limit``. ``errors`` are as in
    :func:`lines`.
    """
    last = knots[-1]
    near = [place for place, n in enumerate(knots) if 4 * n >= last]
    factor = factors[near]
    slope, _ = lines([knots[place] for place in near], factor**2, 2 * factor * errors[near])
    octaves = torch.arange(1, _BEYOND + 1, dtype=torch.float64).unsqueeze(1)
    squares = factors[-1] ** 2 + slope.nan_to_num() * math.log(2) * octaves
    rows = torch.cat([factors, squares.clamp(limit**-2, limit**2).sqrt()]).T.contiguous()
    return HeadTable(rows, lengths=(*knots, *(last << step for step in range(1, _BEYOND + 1))))


def family_scalings(
    law: str, module: str, knots: Sequence[int], factors: Tensor, errors: Tensor, reference: int
) -> dict[Any, Scaling]:
    """Fit the law of a given name to one layer's factors, (knots, heads).

    The law is one of :data:`FITTED` but "table". ``errors`` are the factors' standard errors, and
    ``reference`` is the length at which "sqrt_log_n" and "clip_log_n" have the factor 1.

    Returns:
        One scaling for the module or, for "log_n", one for each (module, head).
    """
    x = torch.tensor(knots, dtype=torch.float64).log().unsqueeze(1)
    weight = torch.hypot(torch.nan_to_num(errors, nan=0.0), 0.005 * factors) ** -2
    if law == "clip_log_n":
        return {module: ClipLogN(train_length=reference)}
    if law == "constant":
        return {module: HeadTable((weight * factors).sum(0) / weight.sum(0))}
    if law == "log_n":
        slopes = (weight * x * factors).sum(0) / (weight * x * x).sum(0)
        return {
            (module, head): LogN(base=math.exp(1 / slope), n_min=knots[0])
            for head, slope in enumerate(slopes.tolist())
        }
    if law == "sqrt_log_n":
        x, weight = x - math.log(reference), weight / (4 * factors**2)
        total = (weight * x**2).sum(0).clamp(min=1e-300)
        slope = (weight * x * (factors**2 - 1)).sum(0) / total
        gamma = (2 / slope.clamp(min=2e-6)).sqrt()
        return {module: SqrtLogN(train_length=reference, gamma=gamma.tolist())}
    s, bias = lines(knots, factors, errors)
    return {module: SSMax(s=s.tolist(), bias=bias.tolist())}
