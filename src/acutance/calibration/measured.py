"""A metric of every head by number of visible keys, with standard errors by the jackknife."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from scipy.stats import t as student
from torch import Tensor

from acutance.calibration.apply_law import apply
from acutance.calibration.law import AnyLaw
from acutance.calibration.windows import AnyBatches, Turn, cut_windows, evaluating
from acutance.capture.attention_call import AttentionCall, observe_scores
from acutance.capture.find_layers import layer_numbers, windowed_layers
from acutance.capture.listener import Listener, ProbeError
from acutance.rowstats import RowStatistics
from acutance.scaling import SCALINGS
from acutance.shapes import check_count, check_number, did_you_mean

__all__ = ["Measured", "measure"]

#: Spread of log n within a bin (its variance) below which all rows count as one length.
_ONE_LENGTH = 1e-3


@dataclass(frozen=True)
class Target:
    """A metric that a law can hold constant.

    Attributes:
        unit: unit of its values.
        slope: of rows, the derivative of the metric by log λ, λ being the factor on the logits.
        limits: smallest and largest value that rows with n keys can have.
        floor: smallest change of the metric that is of interest.
        by_ratio: whether log y is closer to a straight line in λ² than y.
    """

    unit: str
    slope: Callable[[RowStatistics], Tensor]
    limits: Callable[[float], tuple[float, float]]
    floor: float
    by_ratio: bool = False


#: What can be held constant. The slope of effective keys is that of normal logits, log N falling
#: twice as fast as H; the others follow from the row's own sums.
TARGETS = {
    "entropy": Target("nat", lambda rows: -rows["varentropy"], lambda n: (0.0, math.log(n)), 0.01),
    "normalized_entropy": Target(
        "1",
        lambda rows: -rows["varentropy"] / rows["n_keys"].clamp(min=2).double().log(),
        lambda n: (0.0, 1.0),
        0.002,
    ),
    "effective_keys": Target(
        "keys",
        lambda rows: -2 * rows["varentropy"] * rows["effective_keys"],
        lambda n: (1.0, float(n)),
        0.02,
        by_ratio=True,
    ),
    "top_weight": Target(
        "1",
        lambda rows: rows["top_weight"] * rows["max_gap"],
        lambda n: (1.0 / n, 1.0),
        0.002,
        by_ratio=True,
    ),
}
#: What ``law=`` may be for them: factors at every length, or one for all lengths.
FORMS = ("table", "constant")


def check_request(
    target: str,
    lengths: Sequence[int],
    reference: int | None = None,
    value: float | None = None,
    law: str = "table",
) -> int:
    """Check what can be refused without running the model; returns the reference length.

    Raises:
        TypeError: if an argument of :func:`acutance.calibrate` is of the wrong kind.
        ValueError: if one is out of range, or not a name; the message has the nearest.
    """
    if not isinstance(target, str):
        raise TypeError(f"target must be the name of a metric, got {type(target).__name__}")
    for option, name, known in (("target", target, [*TARGETS]), ("law", law, [*FORMS])):
        if name not in known:
            known += ["loss"] if option == "target" else []
            hint = did_you_mean(name, known)
            if option == "law" and name in SCALINGS:
                hint = f"; acutance.apply takes {name} by name, without a fit"
            raise ValueError(f"{option}={name!r:.40} is not one of {', '.join(known)}{hint}")
    reference = lengths[0] if reference is None else check_count("reference", reference, 2)
    if reference not in lengths:
        raise ValueError(f"reference must be one of the lengths {list(lengths)}, got {reference}")
    if value is not None:
        n, unit = lengths[-1], unit_of(target)
        low, high = TARGETS[target].limits(n)
        if not low < check_number("value", value) < high:
            least = f" (1/{n})" if target == "top_weight" else ""
            most = f" (log {n})" if target == "entropy" else ""
            raise ValueError(
                f"value: {target} of rows with {n} keys must be between {low:.4g}{least} and "
                f"{high:.4g}{most}, got {value:g}{unit}"
            )
    return reference


def unit_of(target: str) -> str:
    """Unit of a target with a space before it; empty for pure numbers."""
    unit = TARGETS[target].unit
    return "" if unit == "1" else f" {unit}"


def knots_of(lengths: Sequence[int], reference: int | None = None) -> tuple[int, ...]:
    """The knots of a calibration: numbers n of visible keys at which factors are fitted.

    They are the lengths of the windows and octaves between them, since a causal model has rows of
    every n.

    Args:
        lengths: lengths of the windows, ascending.
        reference: one of them, which half an octave later is followed by a further knot: beyond
            its training length a model's entropy can rise faster than log n, which a line over a
            whole octave would miss. None adds no such knot.

    Example:
        >>> knots_of([64, 512, 768])
        (64, 128, 256, 512, 768)
        >>> knots_of([64, 128, 256], reference=64)
        (64, 91, 128, 256)
    """
    knots = [lengths[0]]
    for length in lengths[1:]:
        while knots[-1] * 2 * 2**0.5 < length:
            knots.append(knots[-1] * 2)
        knots.append(length)
    if reference is not None and reference in knots[:-1]:
        after, half = knots.index(reference) + 1, round(reference * 2**0.5)
        if knots[after] > half * 1.2:
            knots.insert(after, half)
    return tuple(knots)


# -- one pass over the windows ---------------------------------------------------------------------


class Collector(Listener):
    """Sums the rows of every attention layer by group of windows, bin of n, and head.

    A bin holds the rows whose number n of visible keys is at most a knot and above the previous
    knot, and above half the knot. Groups are parts of the text, for the jackknife.

    Args:
        model: any module.
        target: name of the metric.
        knots: lengths, ascending.
        groups: number of groups of windows.
        windowed: also collect layers with a sliding window.

    Attributes:
        group: group of each window of the next run, (windows,) int64.
        sums: by module name, (groups, bins, heads, 6) float64: number of rows and their sums of
            log n, log² n, y, y log n and dy/d log λ, with y the metric.
        longest: by module name, the largest n of a row in each bin, (bins,) int64.
        mixed: sentences about layers with another number of heads in an earlier batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        target: str,
        knots: Sequence[int],
        groups: int,
        *,
        windowed: bool = False,
    ) -> None:
        super().__init__(model, self, listed_errors=(ValueError,))
        self._target, self._knots, self._groups = target, tuple(knots), groups
        self._narrow = {} if windowed else windowed_layers(model)
        self._windowed = windowed
        self._adding = threading.Lock()
        self.group = torch.zeros(0, dtype=torch.int64)
        self.sums: dict[str, Tensor] = {}
        self.longest: dict[str, Tensor] = {}
        self.mixed: list[str] = []

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Add the rows of a call."""
        name = call.module.partition("#")[0]
        if not self._leaves_out(name, call.window):
            self._add(name, call.statistics(False), self.rows.real(call).rows)

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None]) -> None:
        """Add the rows of a hand-written softmax.

        Args:
            scores: (B, H, L, S).
            name: name of the module.
            doubt: returns why the softmax may not be attention's, or None.

        Raises:
            ValueError: with that reason.
        """
        module = name.partition("#")[0]
        if self._leaves_out(module, None):
            return
        if (why := doubt()) is not None:
            raise ValueError(why)
        rows, seen = observe_scores(scores)
        real = self.rows.real_of_scores(scores, name, rows.state.n, seen)
        self._add(module, rows, real.rows)

    def _leaves_out(self, name: str, window: int | None) -> bool:
        """Whether a call is skipped because its rows see only a window; it is then listed."""
        if self._windowed or not (self._narrow.get(name, False) or window is not None):
            return False
        self.unreadable(name, "its rows see only a window (windowed=True fits it too)")
        return True

    def _add(self, name: str, rows: RowStatistics, real: Tensor | None) -> None:
        """Add rows (B, H, L) to the sums of a layer; ``real`` (B, L) is False for padding."""
        n, y = rows.n_keys, rows[self._target].double()
        batch, heads = n.shape[:2]
        bins = len(self._knots)
        # a batch of another size (a vision tower's) cannot be distinguished by window
        group = self.group if self.group.shape[0] == batch else torch.zeros(batch).long()
        edges = torch.tensor([*self._knots, 0], device=n.device)
        bin_of = torch.bucketize(n, edges[:-1])
        kept = (bin_of < bins) & (2 * n > edges[bin_of]) & y.isfinite()
        if real is not None:
            kept &= real[:, None, :]
        window, head, _ = kept.nonzero(as_tuple=True)
        x, y, slope = (
            part[kept].double() for part in (n.double().log(), y, TARGETS[self._target].slope(rows))
        )
        columns = torch.stack([torch.ones_like(x), x, x * x, y, x * y, slope], 1)
        cell = (group.to(n.device)[window] * bins + bin_of[kept]) * heads + head
        sums = columns.new_zeros(self._groups * bins * heads, columns.shape[1])
        added = sums.index_add_(0, cell, columns).view(self._groups, bins, heads, -1).cpu()
        longest = torch.zeros(bins, dtype=torch.int64, device=n.device)
        longest = longest.scatter_reduce_(0, bin_of[kept], n[kept].long(), "amax").cpu()
        with self._adding:
            before = self.sums.setdefault(name, torch.zeros_like(added))
            if before.shape != added.shape:
                self.mixed.append(
                    f"{name} has {heads} heads in this batch, but had {before.shape[2]} in earlier "
                    "ones: the heads must be the same in every batch"
                )
                return
            self.sums[name] = before + added
            self.longest[name] = longest.maximum(self.longest.get(name, longest))


def read_layers(
    model: torch.nn.Module,
    turns: Sequence[Turn],
    target: str,
    knots: Sequence[int],
    law: AnyLaw | None = None,
    *,
    windowed: bool = False,
    after: Callable[[Turn], object] = lambda _: None,
) -> tuple[Measured, dict[str, str]]:
    """Run a model over windows under a law, and read a metric of every layer.

    Args:
        model: any module; it is in evaluation mode meanwhile.
        turns: the windows in batches.
        target: name of the metric.
        knots: numbers n of visible keys at which it is read.
        law: in force; None leaves the model as it is.
        windowed: also read, and scale, layers with a sliding window.
        after: called after each batch.

    Returns:
        What was measured, at the knots at which a layer has rows, and why other layers were not
        read, by module name.

    Raises:
        ApplyError: if the law cannot be applied.
        ProbeError: if the model ran no attention that can be read.
        ValueError: if no layer can be read, or one does not have the same heads in all batches.
    """
    groups = int(max(int(turn.groups.max()) for turn in turns)) + 1
    device = next((parameter.device for parameter in model.parameters()), None)
    collector = Collector(model, target, knots, groups, windowed=windowed)
    scaled = nullcontext() if law is None else apply(model, law, windowed=windowed)
    with evaluating(model), torch.no_grad(), scaled:
        with collector:
            for turn in turns:
                collector.group = turn.groups
                turn.run(model, device)
                after(turn)
        if not collector.calls:
            raise ProbeError(collector.nothing_captured())
    if collector.mixed:
        raise ValueError(collector.mixed[0])
    unread = {}
    for text in collector.unread:
        name, _, unread[name] = text.partition(": ")
    if not collector.sums:
        raise ValueError(no_layer(unread))
    numbers = layer_numbers(model, sorted(collector.sums))
    names = sorted(collector.sums, key=lambda name: numbers.get(name, len(numbers)))
    sums = torch.cat([collector.sums[name] for name in names], 2)
    longest = []
    for name in names:
        seen = (collector.sums[name][..., 0].sum(0) > 0).all(1, keepdim=True)
        heads = collector.sums[name].shape[2]
        longest.append(torch.where(seen, collector.longest[name][:, None], 0).expand(-1, heads))
    n = torch.cat(longest, 1)
    used = n.any(1)
    n, sums = n[used], sums[:, used]
    total = sums.sum(0)
    measured = Measured(
        metric=target,
        lengths=tuple(torch.tensor(knots)[used].tolist()),
        heads={name: collector.sums[name].shape[2] for name in names},
        n=n,
        value=_at(total, n),
        slope=total[..., 5] / total[..., 0],
        leave_one_out=torch.where(sums[..., 0] > 0, _at(total - sums, n), torch.nan),
    )
    return measured, unread


def no_layer(skipped: Mapping[str, str]) -> str:
    """The sentence that nothing can be calibrated, with why each layer is left out."""
    why = "; ".join(f"{module}: {reason}" for module, reason in skipped.items())
    return f"there is no layer to calibrate{': ' if why else ''}{why}"


def _at(sums: Tensor, n: Tensor) -> Tensor:
    """Value of each bin's line in log n, fitted to its rows and read at the longest.

    If all rows are equally long, it is their mean.

    Args:
        sums: (..., knots, heads, 6), as in :class:`Collector`.
        n: at which each line is read, (knots, heads); 0 reads none.

    Returns:
        (..., knots, heads); NaN without rows.
    """
    count = sums[..., 0].clamp(min=1e-300)
    x, y = sums[..., 1] / count, sums[..., 3] / count
    spread = (sums[..., 2] / count - x * x).clamp(min=0.0)
    joint = sums[..., 4] / count - x * y
    line = torch.where(spread > _ONE_LENGTH, joint / spread.clamp(min=_ONE_LENGTH), 0.0)
    values = y + line * (n.clamp(min=1).double().log() - x)
    return torch.where((sums[..., 0] > 0) & (n > 0), values, torch.nan)


def student_t_quantile(degrees: int, level: float = 0.975) -> float:
    """Quantile of Student's t distribution; infinite for 0 degrees of freedom.

    Example:
        >>> student_t_quantile(7)
        2.3646
    """
    return float(student.ppf(level, degrees)) if degrees > 0 else float("inf")


# -- for users -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The result of :func:`measure`: a metric of all heads, in model order.

    Attributes:
        metric: what was measured.
        lengths: numbers n of visible keys at which it is reported.
        heads: number of heads by module name, in model order.
        n: of each value, the largest n among its rows, (lengths, heads) int64; 0 where a head of
            the layer has no rows.
        value: the metric there, (lengths, heads); NaN without rows.
        slope: its derivative with respect to log λ, (lengths, heads).
        leave_one_out: :attr:`value` with one part of the text left out at a time, (parts, lengths,
            heads); NaN for parts without rows there.
    """

    metric: str
    lengths: tuple[int, ...]
    heads: dict[str, int]
    n: Tensor
    value: Tensor
    slope: Tensor
    leave_one_out: Tensor

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers' names, in model order."""
        return tuple(self.heads)

    def by_layer(self, numbers: Tensor) -> dict[str, Tensor]:
        """Numbers (lengths, heads) of all heads as those of each layer, by module name."""
        return dict(zip(self.heads, numbers.split([*self.heads.values()], 1), strict=True))

    def values(self, module: str) -> Tensor:
        """Value for each of :attr:`lengths` and each head; NaN where no row was so long."""
        return self.by_layer(self.value)[module]

    def errors(self, module: str) -> Tensor:
        """Standard errors over parts of the text, likewise."""
        return self.by_layer(self.error())[module]

    def flat(self) -> Tensor:
        """Values of all heads of all layers in model order, (heads, lengths)."""
        return self.value.T

    def error(self, relative_to: Tensor | None = None) -> Tensor:
        """Standard error of all values over parts of the text, by the jackknife.

        Args:
            relative_to: of the value minus that at this index of :attr:`lengths`, (heads,), which
                is usually smaller: both are measured on the same parts of the text.

        Returns:
            (lengths, heads); NaN where only one part has rows.
        """
        left = self.leave_one_out
        if relative_to is not None:
            left = left - left.gather(1, relative_to.expand(len(left), 1, -1))
        count = left.isfinite().sum(0)
        away = (left - left.nanmean(0)).square().nansum(0)
        return torch.where(count > 1, (away * (count - 1) / count).sqrt(), torch.nan)

    def interval(self, relative_to: Tensor | None = None) -> Tensor:
        """Half of the 95 % interval by Student's t, as :meth:`error`."""
        degrees = self.leave_one_out.isfinite().sum(0) - 1
        return self.error(relative_to) * torch.as_tensor(student.ppf(0.975, degrees))


def measure(
    model: torch.nn.Module,
    batches: AnyBatches,
    *,
    target: str = "entropy",
    lengths: Sequence[int] | None = None,
    reference: int | None = None,
    law: AnyLaw | None = None,
    windowed: bool = False,
) -> Measured:
    """Measure a target at several n, on windows of several lengths, under a law or none.

    Rows count as in :func:`acutance.calibrate`, so that a law can be judged on text that it was not
    fitted to, and laws against each other.

    Args:
        model: any module; it is in evaluation mode meanwhile.
        batches: as in :func:`acutance.calibrate`.
        target: likewise.
        lengths: likewise.
        reference: likewise, one of them; rows beyond it are read in the same parts as there.
        law: in force, as in :func:`acutance.apply`; None leaves the model as it is.
        windowed: also measure, and scale, layers with a sliding window.

    Raises:
        ValueError: as :func:`acutance.calibrate` does.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> found = measure(model, [torch.zeros(4, 64, 8)], lengths=[16, 64])
        >>> found.values("self_attn").exp()
        tensor([[16., 16.],
                [64., 64.]], dtype=torch.float64)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    turns, places, _ = cut_windows(model, batches, lengths)
    knots = knots_of(places, check_request(target, places, reference))
    return read_layers(model, turns, target, knots, law, windowed=windowed)[0]
