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
from acutance.shapes import check_count, did_you_mean

__all__ = ["Measured", "measure"]

#: Sums kept of each row: one, x = log n, x², the value y, x·y, and dy/dlog λ.
_SUMS = 6
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
#: Other names that a target is known by.
_ALIASES = {"information_fraction": "normalized_entropy"}


def check_target(target: str, reference: int | None, lengths: Sequence[int]) -> tuple[str, int]:
    """The name of a target in :data:`TARGETS`, and the reference length: of None, the first one.

    Raises:
        TypeError: if the name is not a string, or the length not a whole number.
        ValueError: if the name is unknown, whose nearest the message says, or the length is none of
            ``lengths``.
    """
    if not isinstance(target, str):
        raise TypeError(f"target must be the name of a metric, got {type(target).__name__}")
    name = _ALIASES.get(target, target)
    if name not in TARGETS:
        hint = did_you_mean(name, [*TARGETS, "loss"])
        raise ValueError(f"target={target!r:.40} is not one of {', '.join(TARGETS)}, loss{hint}")
    at = lengths[0] if reference is None else check_count("reference", reference, 2)
    if at not in lengths:
        raise ValueError(f"reference must be one of the lengths {list(lengths)}, got {at}")
    return name, at


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
        mixed: layers whose number of heads is not the same in all runs.
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
        self.mixed: dict[str, tuple[int, int]] = {}

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Add the rows of a call."""
        name = call.module.partition("#")[0]
        if not self._leaves_out(name, call.window):
            real = self.rows.real(call).rows
            self._add(name, call.statistics(False), real)

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Add the rows of a hand-written softmax.

        Args:
            scores: (B, H, L, S).
            name: name of the module.
            doubt: returns why the softmax may not be attention's, or None; None needs no check.

        Raises:
            ValueError: with that reason.
        """
        module = name.partition("#")[0]
        if self._leaves_out(module, None):
            return
        if doubt is not None and (why := doubt()) is not None:
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
        """Add rows to the sums of a layer.

        Args:
            name: name of the module.
            rows: statistics of the rows, (B, H, L).
            real: boolean (B, L), False for padding; None if there is none.
        """
        n = rows.n_keys
        batch, heads = n.shape[:2]
        bins, device = len(self._knots), n.device
        # a batch of another size (a vision tower's) cannot be distinguished by window
        group = self.group if self.group.shape[0] == batch else torch.zeros(batch).long()
        edges = torch.tensor(self._knots, device=device)
        place = torch.bucketize(n, edges)
        y = rows[self._target].double()
        kept = (n > 0) & (place < bins) & (2 * n > edges[place.clamp(max=bins - 1)])
        kept &= y.isfinite()
        if real is not None:
            kept &= real[:, None, :]
        x = n.clamp(min=1).double().log()
        slope = TARGETS[self._target].slope(rows).double()
        columns = torch.stack([torch.ones_like(x), x, x * x, y, x * y, slope])
        columns = torch.where(kept, columns, 0.0).transpose(1, 2).flatten(2)  # (6, H, B · L)
        cell = torch.where(kept, group.to(device)[:, None, None] * bins + place, 0)
        sums = torch.zeros(_SUMS, heads, self._groups * bins, dtype=torch.float64, device=device)
        sums.scatter_add_(2, cell.transpose(0, 1).flatten(1).expand_as(columns), columns)
        added = sums.unflatten(2, (self._groups, bins)).permute(2, 3, 1, 0).cpu()
        longest = torch.zeros(bins, dtype=torch.int64, device=device)
        longest.scatter_reduce_(0, place[kept], n[kept].long(), "amax")
        with self._adding:
            before = self.sums.get(name)
            if before is None:
                self.sums[name], self.longest[name] = added, longest.cpu()
            elif before.shape != added.shape:
                self.mixed[name] = before.shape[2], heads
            else:
                self.sums[name] = before + added
                self.longest[name] = torch.maximum(self.longest[name], longest.cpu())


def read_layers(
    model: torch.nn.Module,
    turns: Sequence[Turn],
    target: str,
    knots: Sequence[int],
    law: AnyLaw | None = None,
    *,
    windowed: bool = False,
    after: Callable[[Turn], object] = lambda _: None,
) -> tuple[dict[str, LayerValues], dict[str, str]]:
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
        The values of the layers that were read, and why others were not, by module name.

    Raises:
        ApplyError: if the law cannot be applied.
        ProbeError: if the model ran no attention that can be read.
        ValueError: if a layer does not have the same number of heads in all batches.
    """
    groups = int(max(int(turn.groups.max()) for turn in turns)) + 1
    device = next((part.device for part in model.parameters()), None)
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
    for name, (before, now) in collector.mixed.items():
        raise ValueError(
            f"{name} has {now} heads in this batch, but had {before} in earlier ones: the heads "
            "must be the same in every batch"
        )
    layers = {
        name: LayerValues.of(collector.sums[name], collector.longest[name])
        for name in sorted(collector.sums)
    }
    unread = {}
    for text in collector.unread:
        name, _, unread[name] = text.partition(": ")
    return layers, unread


def no_layer(skipped: Mapping[str, str]) -> str:
    """The sentence that nothing can be calibrated, with why each layer is left out."""
    why = "; ".join(f"{module}: {reason}" for module, reason in skipped.items())
    return f"there is no layer to calibrate{': ' if why else ''}{why}"


@dataclass(frozen=True)
class LayerValues:
    """The metric of one layer at each knot, as measured in one pass.

    Attributes:
        knots: the n of each value, ascending: the largest n among the rows of its bin.
        bins: index of each knot's bin.
        value: the metric at n = knot, (knots, heads).
        slope: its derivative with respect to log λ, (knots, heads).
        leave_one_out: :attr:`value` with one group left out at a time, (groups, knots, heads).
        present: whether a group has rows in a bin, (groups, knots).
    """

    knots: tuple[int, ...]
    bins: tuple[int, ...]
    value: Tensor
    slope: Tensor
    leave_one_out: Tensor
    present: Tensor

    @classmethod
    def of(cls, sums: Tensor, longest: Tensor) -> LayerValues:
        """Values at the bins that have rows, from the sums of a :class:`Collector`.

        Within a bin the value is a line in log n, fitted to its rows and read at the longest. If
        all rows are equally long, it is their mean.
        """
        bins = (sums[..., 0].sum(0) > 0).all(1).nonzero().squeeze(1).tolist()
        chosen = sums[:, bins]
        knots = tuple(longest[bins].tolist())
        total = chosen.sum(0)
        return cls(
            knots=knots,
            bins=tuple(bins),
            value=_at(total, knots),
            slope=total[..., 5] / total[..., 0],
            leave_one_out=_at(total - chosen, knots),
            present=(chosen[..., 0] > 0).any(-1),
        )

    def error(self, from_knot: int | None = None) -> Tensor:
        """Standard error of the value over parts of the text, (knots, heads), by the jackknife.

        Args:
            from_knot: of the value minus that at this knot, which is usually smaller: both are
                measured on the same parts of the text.

        Returns:
            NaN where only one part has rows.
        """
        left, present = self.leave_one_out, self.present
        if from_knot is not None:
            at = slice(from_knot, from_knot + 1)
            left, present = left - left[:, at], present & present[:, at]
        there = present.unsqueeze(-1).expand_as(left) & left.isfinite()
        count = there.sum(0)
        mean = torch.where(there, left, 0.0).sum(0) / count.clamp(min=1)
        away = torch.where(there, left - mean, 0.0).square().sum(0)
        error = (away * (count - 1) / count.clamp(min=1)).sqrt()
        return torch.where(count > 1, error, torch.nan)

    def widening(self) -> Tensor:
        """Student's two-sided 5 % quantile for the groups at each knot, (knots, 1)."""
        quantiles = map(student_t_quantile, (self.present.sum(0) - 1).tolist())
        return torch.tensor([*quantiles], dtype=torch.float64).unsqueeze(1)


def _at(sums: Tensor, knots: tuple[int, ...]) -> Tensor:
    """Value of each bin's line in log n at its knot.

    Args:
        sums: (..., knots, heads, 6), as in :class:`Collector`.
        knots: n at which each line is read.

    Returns:
        (..., knots, heads); NaN without rows.
    """
    count = sums[..., 0].clamp(min=1e-300)
    x, y = sums[..., 1] / count, sums[..., 3] / count
    spread = (sums[..., 2] / count - x * x).clamp(min=0.0)
    joint = sums[..., 4] / count - x * y
    line = torch.where(spread > _ONE_LENGTH, joint / spread.clamp(min=_ONE_LENGTH), 0.0)
    place = torch.tensor(knots, dtype=torch.float64).log().unsqueeze(-1)
    return torch.where(sums[..., 0] > 0, y + line * (place - x), torch.nan)


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
    """The result of :func:`measure`.

    Attributes:
        metric: what was measured.
        lengths: numbers n of visible keys at which it is reported.
        layers: by module name, in model order.
        bins: of :attr:`lengths`, in the sums of the layers.
    """

    metric: str
    lengths: tuple[int, ...]
    layers: dict[str, LayerValues]
    bins: tuple[int, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers' names, in model order."""
        return tuple(self.layers)

    def values(self, module: str) -> Tensor:
        """Value for each of :attr:`lengths` and each head; NaN where no row was so long."""
        return self._spread(self.layers[module], self.layers[module].value)

    def errors(self, module: str) -> Tensor:
        """Standard errors over parts of the text, likewise."""
        return self._spread(self.layers[module], self.layers[module].error())

    def flat(self) -> Tensor:
        """Values of all heads of all layers in model order, (heads, lengths)."""
        return torch.cat([self.values(module).T for module in self.layers])

    def _spread(self, layer: LayerValues, numbers: Tensor) -> Tensor:
        """Numbers (knots, heads) of a layer in rows of all lengths; NaN at those it lacks."""
        rows = numbers.new_full((len(self.lengths), numbers.shape[1]), torch.nan)
        rows[[self.bins.index(k) for k in layer.bins]] = numbers
        return rows


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
    name, reference = check_target(target, reference, places)
    knots = knots_of(places, reference)
    layers, _ = read_layers(model, turns, name, knots, law, windowed=windowed)
    numbers = layer_numbers(model, layers)
    layers = dict(sorted(layers.items(), key=lambda item: numbers.get(item[0], len(numbers))))
    bins = tuple(sorted({k for values in layers.values() for k in values.bins}))
    return Measured(name, tuple(knots[k] for k in bins), layers, bins)
