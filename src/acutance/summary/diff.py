"""Standard errors of a summary's means, and the comparison of two summaries, head by head.

The rows of a sequence are correlated, so a standard error that treats them as independent is often
several times too small. Sequences are treated as the independent unit. A profile records how much
they differ; without one only an upper bound is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from acutance.escapes import ranges
from acutance.files import finite
from acutance.summary.cells import Cells, array
from acutance.summary.head_summary import Columns, HeadSummary
from acutance.summary.layer import Layer
from acutance.summary.readouts.by_octave import Profile, Slope
from acutance.summary.readouts.moments import Moments
from acutance.summary.state import Run, State, brief

SCHEMA = "acutance.diff/1"
Verdict = Literal["moved", "unclear", "within noise", "equal"]
VERDICTS: dict[Verdict, str] = {
    "moved": "the change is larger than that from choosing another text of the same kind",
    "unclear": (
        "larger than for independent rows, but the variation between sequences is not known "
        "well enough to say more"
    ),
    "within noise": "no larger than the change from choosing another text of the same kind",
    "equal": "no change except rounding",
}
#: Verdicts by what ``Diff.verdicts`` holds.
ORDER = tuple(reversed(VERDICTS))
#: The intervals of all heads of one metric hold together with this probability, or more.
CONFIDENCE = 0.95


#: Two float32 means that differ by less, relative to their size, are the same.
ROUNDING = 2.0**-20
#: Rows of an octave see as many keys in both states if the means of log n differ by no more.
ALIKE = math.log(1.1)
#: Mean numbers of keys that differ by less, relative to the larger, are not mentioned.
_SAME_KEYS = 0.01
#: Other facts that a change may be due to, with what they are called.
_SETTINGS = {
    "attention": "attention implementations",
    "dtype": "dtypes",
    "torch": "releases of torch",
    "transformers": "releases of transformers",
    "acutance": "releases of acutance",
}


How = Literal["sequences", "bound", "unknown"]


#: What each way to a standard error means, for reports; the most reliable first.
HOW: dict[How, str] = {
    "sequences": (
        "Standard errors come from the variation between sequences, which are assumed "
        "independent; rows of one sequence need not be."
    ),
    "bound": (
        "Standard errors are upper bounds: all rows of a sequence count as one observation, "
        "since the state does not record how its sequences differ."
    ),
    "unknown": (
        "Standard errors are unknown, because a state does not record its number of sequences."
    ),
}


@dataclass(frozen=True)
class Uncertainty(Cells):
    """Standard errors of the means of a summary.

    Attributes:
        error: (heads, metrics), from differences between sequences, or an upper bound; NaN if
            unknown.
        floor: (heads, metrics), the standard error if all rows were independent.
        dof: (heads, metrics), degrees of freedom of ``error``; NaN if unknown.
        how: which of the two ``error`` is, see :data:`HOW`.
    """

    error: Tensor = array("heads metrics")
    floor: Tensor = array("heads metrics")
    dof: Tensor = array("heads metrics")
    how: How = "unknown"


def worst(*ways: How) -> How:
    """The least reliable of several sources of a standard error."""
    return max(ways, key=list(HOW).index)


def uncertainty(summary: HeadSummary, run: Run | None = None) -> Uncertainty:
    r"""Standard errors of every head's mean of every metric.

    With a profile, the mean is the weighted mean over octaves of n, so its error is at most the
    weighted sum of the octaves' errors between sequences:

    .. math:: \mathrm{SE} \le \sum_k \frac{N_k}{N} \mathrm{SE}_k

    with equality if a sequence that is high in one octave is high in all. Without a profile, the
    upper bound for G sequences of equal length is :math:`\sigma / \sqrt{G - 1}`, with
    :math:`\sigma` the deviation over rows; it is reached if the rows of each sequence are equal.

    Args:
        summary: any head summary.
        run: its run, which states the number of sequences; without it, the smallest number
            consistent with ``summary`` is used.

    Returns:
        Standard errors, their degrees of freedom and their source.

    Example:
        Two sequences of ten equal rows each are two observations, not twenty:

        >>> import acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     for _ in range(2):
        ...         _ = layer(*[torch.randn(1, 1, 8).expand(1, 10, 8)] * 3)
        >>> found = uncertainty(probe.summary())
        >>> column = probe.metrics.index("logit_mean")
        >>> (found.error / found.floor)[:, column].round(decimals=3)  # √19
        tensor([4.3590, 4.3590], dtype=torch.float64)
    """
    std, count = summary.moments.std, summary.moments.count.to(torch.float64)
    rows = count.masked_fill(count < 2, math.nan)
    floor = std / (rows - 1).sqrt()  # the sample's deviation over √rows
    if summary.profile is not None:
        error, dof = between(summary.profile)
        if bool(error.isfinite().any()):
            return Uncertainty(error, floor, dof, "sequences")
    # without windows of a run, each call has at least one sequence
    calls = [layer.calls for layer in summary.layers for _ in layer.numbers]
    sequences = torch.tensor(calls, dtype=torch.float64)
    if run is not None and run.windows:
        windows, length = float(run.windows), run.settings.get("length")
        if isinstance(length, int) and length > 0 and run.tokens:
            windows = min(windows, run.tokens / length)  # a short last window counts less than one
        sequences = torch.full_like(sequences, windows)
    if not bool((sequences > 0).any()):
        unknown = torch.full_like(floor, math.nan)
        return Uncertainty(unknown, floor, unknown, "unknown")
    sequences_with_rows = torch.minimum(sequences[:, None].expand_as(rows), rows)
    dof = (sequences_with_rows - 1).masked_fill(~(sequences_with_rows > 1), math.nan)
    error = std / dof.sqrt()  # σ of the sequences' means, corrected for their own mean, over √G
    return Uncertainty(torch.maximum(error, floor), floor, dof, "bound")


def between(profile: Profile, share: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Standard error of a weighted mean over octaves of n, as an upper bound, and its reliability.

    Octave k holds the rows with 2^k to 2^(k+1) − 1 visible keys; its standard error comes from how
    much the means of its sequences differ. The octaves' errors, times their weights, are added
    without squaring: the true error is at most this sum, and equal to it if a sequence that is high
    in one octave is high in all. An octave that only one sequence reaches has no error of its own
    and is given the largest deviation between sequences of any octave.

    Args:
        profile: profile of some heads and metrics.
        share: (heads, metrics, octaves), weight of each octave; None for its share of the rows.

    Returns:
        The error, in the unit of the metric, and its degrees of freedom: the number of sequences
        less one in the octave that contributes most to the error. Both (heads, metrics); NaN if no
        octave has two sequences.
    """
    if not profile.octaves:
        nothing = profile.count.sum(-1) * math.nan
        return nothing, nothing
    count, groups = profile.count.double(), profile.groups.double()
    reached, known = count > 0, (count > 0) & (groups > 1)
    per_row = profile.between / count.clamp(min=1.0)
    error = (per_row / (groups - 1).clamp(min=1.0)).sqrt()
    spread = torch.where(known, error * groups.sqrt(), 0.0).amax(-1, keepdim=True)
    error = torch.where(known, error, spread / groups.clamp(min=1.0).sqrt())
    if share is None:
        share = count / count.sum(-1, keepdim=True).clamp(min=1.0)
    parts = torch.where(reached, share * error, 0.0)
    lead = torch.where(known, parts, -1.0).argmax(-1, keepdim=True)
    dof, none = (groups.gather(-1, lead) - 1).squeeze(-1), ~known.any(-1)
    return parts.sum(-1).masked_fill(none, math.nan), dof.masked_fill(none, math.nan)


def slope(
    summary: HeadSummary, metric: str, head: int, *, least_n: float = 0.0, fewest: int = 3
) -> Slope | None:
    """Slope of a head's metric against log n, by :meth:`Profile.slope` on the summary's profile.

    Args:
        summary: any head summary.
        metric: a recorded metric.
        head: index in :attr:`HeadSummary.places`.
        least_n: ignore octaves with fewer keys.
        fewest: number of octaves needed, at least three.

    Returns:
        The slope; None without a profile, or if too few octaves have rows of two sequences.

    Raises:
        ValueError: if the metric was not recorded.

    Example:
        Causal rows that weigh their keys alike have entropy log n:

        >>> import acutance, torch
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(2, 64, 8)] * 3, attn_mask=hidden)
        >>> round(slope(probe.summary(), "entropy", 0).value, 6)
        1.0
    """
    column = summary.column(metric)
    if summary.profile is None:
        return None
    return summary.profile.slope(head, column, least_n=least_n, fewest=fewest)


class Place(NamedTuple):
    """One head that both summaries have.

    Attributes:
        layer: index of its layer in the first summary.
        head: its number in the layer.
        module: qualified name of the layer's module in the first summary.
    """

    layer: int
    head: int
    module: str


@dataclass(frozen=True)
class Matched:
    """The heads that two summaries share, and what only one of them has.

    Attributes:
        places: the shared heads, in the first summary's order.
        rows: for each side, indices of the shared heads in its arrays, (heads,) int64.
        only: for each side, descriptions of layers, heads and metrics that only it has.
        by_order: True if layers were matched by order, since no module name is shared.
    """

    places: tuple[Place, ...]
    rows: tuple[Tensor, Tensor]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    by_order: bool = False


@dataclass(frozen=True)
class HeadChange:
    """The change of one metric of one head.

    Attributes:
        metric: its name.
        layer: index of the layer in the first state.
        head: number of the head in its layer.
        module: qualified name of the layer's module in the first state.
        before: mean over rows in the first state, NaN where no row counts.
        after: the same in the second.
        change: ``after − before``.
        error: standard error of the change, between sequences; NaN where it is not known.
        low: lower end of the interval of the change; see :class:`Diff`.
        high: upper end.
        size: the change in units of the rows' standard deviation.
        rows: rows of both states that count.
        verdict: one of :data:`VERDICTS`; None where a side has no row.
    """

    metric: str
    layer: int
    head: int
    module: str
    before: float
    after: float
    change: float
    error: float
    low: float
    high: float
    size: float
    rows: tuple[int, ...]
    verdict: Verdict | None


@dataclass(frozen=True)
class LayerChange:
    """The change of one metric over the shared heads of a layer.

    Attributes:
        metric: name of the metric.
        layer: index of the layer in the first summary.
        module: qualified name of its module there.
        before: mean over heads in the first summary.
        after: the same in the second.
        change: mean change of a head.
        error: upper bound on the standard error of ``change``, since heads may err in common.
        heads: number of heads that both summaries have.
        moved: number of heads whose verdict is "moved".
        most: number, in the layer of the first summary, of the head with the largest absolute
            change; None if no head has rows on both sides.
    """

    metric: str
    layer: int
    module: str
    before: float
    after: float
    change: float
    error: float
    heads: int
    moved: int
    most: int | None


@dataclass(frozen=True)
class Diff(Columns):
    """The result of :func:`diff`: (heads, metrics) arrays over the shared heads, in model order.

    The interval of a change, ``low`` to ``high``, is t-distributed with Welch's degrees of freedom
    and widened (Bonferroni), so that the intervals of all heads of a metric hold together with
    probability :data:`CONFIDENCE`. A head whose interval excludes 0 has moved.

    Attributes:
        about: the facts stored in both summaries.
        matched: which layers and heads both have, and what only one of them has.
        metrics: the metrics that both recorded.
        before: means of the first.
        after: means of the second.
        error: standard error of ``after − before``; NaN if not known.
        floor: the standard error if rows were independent.
        low: lower end of the interval.
        high: upper end.
        verdicts: int8, index in ("equal", "within noise", "unclear", "moved"); −1 if a side has no
            rows.
        rows: (2, heads, metrics) int64, number of rows.
        deviation: standard deviation over the rows of both.
        shift: total variation distance of the two histograms, from 0 (equal) to 1 (disjoint); it
            also shows changes that leave the mean unchanged, and is larger for few rows. NaN at
            equal n.
        how: source of ``error``: a key of :data:`acutance.summary.diff.HOW`.
        keys: smallest and largest mean number of keys of the compared octaves; None for all rows.
        warnings: sentences on what makes the two hard to compare.
    """

    about: tuple[Mapping[str, Any], Mapping[str, Any]]
    matched: Matched
    metrics: tuple[str, ...]
    before: Tensor
    after: Tensor
    error: Tensor
    floor: Tensor
    low: Tensor
    high: Tensor
    verdicts: Tensor
    rows: Tensor
    deviation: Tensor
    shift: Tensor
    how: How
    keys: tuple[float, float] | None
    warnings: tuple[str, ...]

    @property
    def change(self) -> Tensor:
        """``after − before``."""
        return self.after - self.before

    @property
    def assumes(self) -> str:
        """What the standard errors assume, as a sentence."""
        return HOW[self.how]

    def _column(self, metric: str) -> int:
        """Index of a shared metric.

        Raises:
            ValueError: if the two do not share it.
        """
        if metric not in self.metrics:
            raise ValueError(
                f"{metric!r} is not in both states; they share {', '.join(self.metrics)}"
            )
        return self.metrics.index(metric)

    def of(self, metric: str) -> list[HeadChange]:
        """The change of a metric in every shared head, in model order.

        Raises:
            ValueError: if the two do not share the metric.
        """
        column = self._column(metric)
        size = self.change / self.deviation.masked_fill(self.deviation == 0, math.nan)
        arrays = (self.before, self.after, self.change, self.error, self.low, self.high, size)
        numbers = torch.stack([array[:, column] for array in arrays], 1).tolist()
        rows = map(tuple, self.rows[:, :, column].T.tolist())
        verdicts = [ORDER[v] if v >= 0 else None for v in self.verdicts[:, column].tolist()]
        heads = zip(self.matched.places, numbers, rows, verdicts, strict=True)
        return [HeadChange(metric, *place, *values, *others) for place, values, *others in heads]

    def moved(self, metric: str, limit: int | None = None) -> list[HeadChange]:
        """Heads whose change is significant first, then the others, each group by size of change.

        Args:
            metric: a shared metric.
            limit: largest number of heads to return; None for all.
        """
        judged = [head for head in self.of(metric) if head.verdict is not None]
        judged.sort(key=lambda head: (head.verdict != "moved", -abs(head.change)))
        return judged[:limit]

    def count(self, metric: str, verdict: Verdict) -> int:
        """Number of heads with a given verdict."""
        return int((self.verdicts[:, self._column(metric)] == ORDER.index(verdict)).sum())

    def layers(self, metric: str) -> list[LayerChange]:
        """The change of each shared layer, in model order.

        Raises:
            ValueError: if the two do not share the metric.
        """
        of_layer: dict[tuple[int, str], list[HeadChange]] = {}
        for head in self.of(metric):
            of_layer.setdefault((head.layer, head.module), []).append(head)
        layers = []
        for layer, heads in of_layer.items():
            judged = [head for head in heads if head.verdict is not None]
            numbers: list[Any] = [
                math.fsum(getattr(head, name) for head in judged) / (len(judged) or math.nan)
                for name in ("before", "after", "change", "error")
            ]
            moved = sum(head.verdict == "moved" for head in judged)
            most = max(judged, key=lambda head: abs(head.change)).head if judged else None
            numbers += [len(heads), moved, most]
            layers.append(LayerChange(metric, *layer, *numbers))
        return layers

    def columns(self) -> dict[str, list[Any]]:
        """One row for each metric and shared head, as columns: the fields of :class:`HeadChange`.

        ``rows`` becomes two columns, ``floor`` and ``shift`` are added, and unknown values are
        None.
        """
        table: dict[str, list[Any]] = {}
        for column, metric in enumerate(self.metrics):
            floors, shifts = self.floor[:, column].tolist(), self.shift[:, column].tolist()
            for head, floor, shift in zip(self.of(metric), floors, shifts, strict=True):
                record = dict(vars(head))
                record["rows_before"], record["rows_after"] = record.pop("rows")
                record |= {"floor": floor, "shift": shift, "verdict": record.pop("verdict")}
                for name, value in record.items():
                    table.setdefault(name, []).append(finite(value))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; unknown values are None."""
        columns = self.columns()
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        record = {
            "schema": SCHEMA,
            "before": dict(self.about[0]),
            "after": dict(self.about[1]),
            "warnings": self.warnings,
            "only_before": self.matched.only[0],
            "only_after": self.matched.only[1],
            "equal_n": self.keys,
            "errors": self.how,
            "assumes": self.assumes,
            "confidence": CONFIDENCE,
            "verdicts": VERDICTS,
            "layers": [asdict(layer) for name in self.metrics for layer in self.layers(name)],
            "heads": rows,
        }
        return {name: finite(value) for name, value in record.items()}


def diff(before: HeadSummary | State, after: HeadSummary | State, *, equal_n: bool = False) -> Diff:
    """Compare two summaries head by head.

    Layers are matched by module name. If no name is shared and both have the same layers and heads,
    they are matched by order, with a warning. The summaries are treated as independent: if both
    read the same text, a change is more certain than its interval says.

    Args:
        before: a summary, or a state, which also knows the windows it covers.
        after: another one.
        equal_n: compare only rows with similar numbers of visible keys, octave by octave, each
            octave weighted equally in both. This separates a change from the effect of a different
            length.

    Returns:
        The changes, what only one of the two has, and warnings about their comparability.

    Raises:
        ValueError: if they share no head or no metric; with ``equal_n``, if they share no octave of
            n or one of them has no profile.

    Example:
        >>> import torch, acutance
        >>> def state(factor):
        ...     torch.manual_seed(0)
        ...     layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        ...     layer.in_proj_weight.data[:4].mul_(factor)  # the first head's queries
        ...     with acutance.probe(layer) as probe:
        ...         _ = [layer(*[torch.randn(4, 10, 8)] * 3) for _ in range(6)]
        ...     return probe.summary()
        >>> changes = diff(state(1.0), state(9.0))
        >>> [(head.head, head.verdict) for head in changes.moved("logit_std")]
        [(0, 'moved'), (1, 'equal')]
    """
    states = []
    for source in (before, after):
        if not isinstance(source, HeadSummary | State):
            raise TypeError(f"diff needs summaries or states, got {type(source).__name__}")
        states.append(source if isinstance(source, State) else State(source, Run({}, 0)))
    summaries = [state.summary for state in states]
    matched = match(*summaries)
    metrics = tuple(name for name in summaries[0].metrics if name in summaries[1].metrics)
    if not metrics:
        raise ValueError(
            "the two states have no metric in common: one has "
            f"{', '.join(summaries[0].metrics)}, the other {', '.join(summaries[1].metrics)}"
        )
    cells = [
        (rows, [summary.metrics.index(name) for name in metrics])
        for summary, rows in zip(summaries, matched.rows, strict=True)
    ]
    keys = None
    if equal_n:
        sides, keys = _at_equal_n(summaries, cells)
    else:
        sides = [
            (
                state.summary.moments.select(*cell),
                uncertainty(state.summary, state.run).select(*cell),
            )
            for state, cell in zip(states, cells, strict=True)
        ]
    (first, errors), (second, other_errors) = sides
    error = (errors.error.square() + other_errors.error.square()).sqrt()
    floor = (errors.floor.square() + other_errors.floor.square()).sqrt()
    how = worst(errors.how, other_errors.how)
    means = [side.mean.masked_fill(side.count == 0, math.nan) for side in (first, second)]
    change = means[1] - means[0]
    reach = _quantile(_welch(errors, other_errors), len(matched.places)) * error
    rounding = ROUNDING * torch.maximum(means[0].abs(), means[1].abs())
    fewest = torch.minimum(first.count, second.count).to(torch.float64) - 1
    least = _quantile(fewest, len(matched.places)) * floor
    verdicts = torch.full(change.shape, ORDER.index("within noise"), dtype=torch.int8)
    guessed = error.isnan() if how == "sequences" else torch.ones_like(error, dtype=torch.bool)
    verdicts[guessed & (change.abs() > least)] = ORDER.index("unclear")
    verdicts[change.abs() > reach] = ORDER.index("moved")
    verdicts[change.abs() <= rounding] = ORDER.index("equal")
    verdicts[change.isnan()] = -1
    rows = torch.stack([first.count, second.count])
    return Diff(
        about=(summaries[0].about, summaries[1].about),
        matched=matched,
        metrics=metrics,
        before=means[0],
        after=means[1],
        error=error,
        floor=floor,
        low=change - reach,
        high=change + reach,
        verdicts=verdicts,
        rows=rows,
        deviation=((first.M2 + second.M2) / rows.sum(0).clamp(min=1)).sqrt(),
        shift=_distance(first, second),
        how=how,
        keys=keys,
        warnings=tuple(warnings(states, matched, equal_n=equal_n)),
    )


def _welch(first: Uncertainty, second: Uncertainty) -> Tensor:
    """Degrees of freedom of the difference of two means (Welch 1947)."""
    a, b = first.error.square(), second.error.square()
    total = (a + b).square() / (a.square() / first.dof + b.square() / second.dof)
    return torch.where((a + b) == 0, torch.minimum(first.dof, second.dof), total)


def _quantile(dof: Tensor, heads: int) -> Tensor:
    """Half width of a confidence interval for ``heads`` comparisons, in standard errors."""
    tail = (1 - CONFIDENCE) / (2 * max(1, heads))
    return torch.from_numpy(stdtrit(dof.numpy(), 1 - tail))


def _distance(first: Moments, second: Moments) -> Tensor:
    """Total variation distance between two histograms; NaN where one is empty or unknown."""
    shares = []
    for histogram in (first.histogram, second.histogram):
        rows = histogram.sum(-1, keepdim=True).to(torch.float64)
        shares.append(histogram / rows.masked_fill(rows == 0, math.nan))
    return (shares[0] - shares[1]).abs().sum(-1) / 2


def _at_equal_n(
    summaries: Sequence[HeadSummary], cells: Sequence[tuple[Tensor, list[int]]]
) -> tuple[list[tuple[Moments, Uncertainty]], tuple[float, float]]:
    """Statistics of both sides over their common octaves of n, each octave weighted equally.

    Args:
        summaries: the two summaries.
        cells: for each side, indices of the heads and metrics.

    Returns:
        The moments of both sides, without histograms, and their standard errors; the smallest and
        largest mean number of keys of the compared octaves.

    Raises:
        ValueError: if a side has no profile, or they share no octave.
    """
    profiles = []
    for which, summary, cell in zip(("first", "second"), summaries, cells, strict=True):
        if summary.profile is None:
            raise ValueError(
                f"the {which} state does not record how metrics depend on n, because an older "
                "version wrote it: probe the model again"
            )
        profiles.append(summary.profile.select(*cell))
    octaves = max(profile.octaves for profile in profiles)
    first, second = (profile.padded(octaves) for profile in profiles)
    both = (first.rows > 0) & (second.rows > 0)
    near = both & ((first.log_n - second.log_n).abs() <= ALIKE)
    if not bool(near.any()):
        seen = [profile.log_n[profile.rows > 0].exp() for profile in profiles]
        one, other = (f"{n.min():.0f} to {n.max():.0f}" if n.numel() else "no" for n in seen)
        raise ValueError(
            f"the two states have no number of keys in common: by octaves, rows see {one} keys in "
            f"one and {other} in the other"
        )
    shared = near[:, None] & (first.count > 0) & (second.count > 0)
    weight = torch.where(shared, torch.minimum(first.count, second.count), 0).double()
    share = weight / weight.sum(-1, keepdim=True).masked_fill(~shared.any(-1, keepdim=True), 1.0)
    n = torch.stack([first.log_n[near], second.log_n[near]]).exp()
    sides = [_weighted_octaves(profile, share, shared) for profile in (first, second)]
    return sides, (float(n.min()), float(n.max()))


def _weighted_octaves(
    profile: Profile, share: Tensor, shared: Tensor
) -> tuple[Moments, Uncertainty]:
    """Moments over the octaves of n of one side, weighted so that both sides have equal n.

    Args:
        profile: metrics by octave.
        share: weight of each octave, summing to 1, (heads, 1 or metrics, octaves).
        shared: whether both sides have rows in the octave, same shape.
    """
    rows = profile.count.double()
    variance = profile.M2 / rows.clamp(min=1) / (rows - 1).clamp(min=1)
    error, dof = between(profile, share)
    floor = (share.square() * variance).sum(-1).sqrt()
    moments = replace(
        Moments.none(*error.shape),
        count=torch.where(shared, profile.count, 0).sum(-1),
        mean=(share * profile.mean).sum(-1),
        M2=torch.where(shared, profile.M2, 0.0).sum(-1),
    )
    floor = floor.masked_fill(moments.count == 0, math.nan)
    return moments, Uncertainty(error, floor, dof, "sequences")


def match(first: HeadSummary, second: HeadSummary) -> Matched:
    """Match the heads of two summaries by module name and head number, else by layer order.

    Raises:
        ValueError: if no heads can be matched.
    """
    summaries = first, second
    names = [[layer.module for layer in summary.layers] for summary in summaries]
    by_order = set(names[0]).isdisjoint(names[1]) and (
        [layer.numbers for layer in first.layers] == [layer.numbers for layer in second.layers]
    )
    if by_order:
        names[1] = names[0]
    rows = [
        {(of_layer[layer], head): row for row, (layer, head) in enumerate(summary.places)}
        for of_layer, summary in zip(names, summaries, strict=True)
    ]
    shared = [head for head in rows[0] if head in rows[1]]
    if not shared:
        raise ValueError(
            f"the two states have no head in common: one has {_layers_of(first.layers)}, the other "
            f"{_layers_of(second.layers)}"
        )
    places = tuple(Place(names[0].index(module), head, module) for module, head in shared)
    before, after = (torch.tensor([of_side[head] for head in shared]) for of_side in rows)
    only_before = tuple(_only_in_first(first, second, *names))
    only_after = tuple(_only_in_first(second, first, *reversed(names)))
    return Matched(places, (before, after), (only_before, only_after), by_order)


def _only_in_first(
    first: HeadSummary, second: HeadSummary, names: list[str], other_names: list[str]
) -> Iterator[str]:
    """Descriptions of the layers, heads and metrics that only the first summary has."""
    others = dict(zip(other_names, second.layers, strict=True))
    for index, (name, layer) in enumerate(zip(names, first.layers, strict=True)):
        if name not in others:
            yield f"layer {index}, {layer.module} ({ranges(layer.numbers, 'head')})"
        elif heads := [head for head in layer.numbers if head not in others[name].numbers]:
            yield f"{ranges(heads, 'head')} of layer {index}, {layer.module}"
    metrics = [name for name in first.metrics if name not in second.metrics]
    if metrics:
        yield f"the metric{'s' * (len(metrics) > 1)} {', '.join(metrics)}"


def _layers_of(layers: tuple[Layer, ...]) -> str:
    """Number and first names of layers, as text."""
    names = [layer.module for layer in layers]
    text = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} layers ({text})" if names else "no layer"


def warnings(states: Sequence[State], matched: Matched, *, equal_n: bool = False) -> Iterator[str]:
    """Sentences on everything that makes two summaries hard to compare."""
    abouts = [state.summary.about for state in states]
    settings = [state.run.settings for state in states]

    def differing(name: str, setting: str = "") -> list[Any]:
        """A fact of both, if it is known and differs; else an empty list."""
        pairs = zip(abouts, settings, strict=True)
        values = [known.get(setting, about.get(name)) for about, known in pairs]
        return values if None not in values and values[0] != values[1] else []

    abouts = [{"architecture": about.get("model"), **about} for about in abouts]
    if kinds := differing("architecture"):
        yield (
            f"The models are of different kinds, {brief(kinds[0])} and {brief(kinds[1])}: heads "
            "with the same number need not correspond."
        )
    if matched.by_order:
        yield (
            "No module has the same name in both, so layers are matched by order, which may "
            "be wrong."
        )
    texts, lengths = differing("text"), differing("window_length", "length")
    same_cut = settings[0].get("length") == settings[1].get("length")
    other_tokens = same_cut and differing("", "text")
    if texts:
        yield (
            f"They read different texts, {brief(texts[0])} and {brief(texts[1])}: part "
            "of each change may be due to the text."
        )
    elif other_tokens:
        yield (
            "They read different texts or different tokens of the same text: part of each "
            "change may be due to that."
        )
    if lengths and equal_n:
        yield (
            f"The window lengths differ ({lengths[0]} and {lengths[1]} tokens); rows with the "
            "same number of keys are comparable."
        )
    elif lengths:
        profiles = [state.summary.profile for state in states]
        wide = [profile and int((profile.rows > 0).any(0).sum()) > 2 for profile in profiles]
        hint = ", or rows at equal n (--equal-n)" if all(wide) else ""
        yield (
            f"The window lengths differ ({lengths[0]} and {lengths[1]} tokens): entropy, "
            "information and effective keys change with the number of keys even if a head "
            f"does not. Compare normalized_entropy{hint}."
        )
    elif not equal_n and all("n_keys" in state.summary.metrics for state in states):
        keys = [
            float(state.summary.mean("n_keys")[rows].nanmean())
            for state, rows in zip(states, matched.rows, strict=True)
        ]
        if abs(keys[0] - keys[1]) > _SAME_KEYS * max(keys):
            yield (
                f"Rows see {keys[0]:.4g} and {keys[1]:.4g} keys on average: metrics that depend on "
                "n differ even if a head does not."
            )
    if differing("model", "model") and (other_tokens or texts or lengths):
        difference = "text" if other_tokens or texts else "length"
        yield f"Model and {difference} differ, so changes cannot be attributed to one of them."
    for name, label in _SETTINGS.items():
        if values := differing(name):
            yield f"The {label} differ: {brief(values[0])} and {brief(values[1])}."
    before, after = (state.run for state in states)
    both = sum(
        max(0, min(stop, other_stop) - max(start, other_start))
        for start, stop in before.done
        for other_start, other_stop in after.done
    )
    if both and before.difference(after, "", "") is None:
        yield f"Both belong to one run and share {both} windows, which show no change."
    for which, about, state in zip(("first", "second"), abouts, states, strict=True):
        layers = enumerate(state.summary.layers)
        if wrong := [str(index) for index, layer in layers if layer.status == "mismatch"]:
            names = ", ".join(wrong[:8]) + (", …" if len(wrong) > 8 else "")
            yield (
                f"In the {which} state layer{'s' * (len(wrong) > 1)} {names} did not pass "
                "verification: do not trust changes there."
            )
        if about.get("complete") is False:
            done = f"{about.get('windows')} of {about.get('windows_in_all')} windows"
            shard = f", shard {about['shard']}" if "shard" in about else ""
            yield f"The {which} state holds {done}{shard}."
        if count := len(state.summary.unread):
            pieces = f"{count} piece{'s' * (count > 1)}"
            yield f"The {which} state lists {pieces} of attention as unread."
