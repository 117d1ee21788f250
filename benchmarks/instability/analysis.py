"""What each signal says before a divergence, and how often it is wrong.

An *event* is the step at which a training diverges: the loss becomes infinite, or its running mean
stays :data:`~benchmarks.instability.training.EXCESS` nats above its least value for
:data:`SUSTAINED` steps. A *detector* turns a signal into a score; an *alarm* is the first step at
which the score exceeds a threshold. The lead is the number of steps from the alarm to the event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from benchmarks.instability.decoder import LARGEST, MEANS
from benchmarks.instability.runs import RATE, Run
from benchmarks.instability.training import EVERY, EXCESS

Array = NDArray[np.float64]

#: The highest learning rate at which a training without a fault counts as healthy.
HEALTHY_RATE = 4 * RATE
#: Steps for which the loss must stay high.
SUSTAINED = 10
#: Alarms of one run within so many steps count once.
REPEAT = 50
#: A fault is slow in a run that diverges later than so many steps after the fault's first.
LATE = 50
#: Values of a signal that a value is compared with, and how many of the newest are left out.
PAST, GAP = 30, 5
#: Values of a signal before a detector of changes says anything.
FEWEST = 10
#: Values before there is a growth.
FEWEST_OF_GROWTH = 16
#: Distances are at most so many deviations, and sums grow by what exceeds the slack.
LARGEST_DISTANCE, SLACK = 4.0, 1.0
#: The same for sums of differences.
SLACK_OF_DIFFERENCES = 0.25


def event(record: Mapping[str, Any]) -> int | None:
    """The step at which a training diverged; None if it did not."""
    least, smooth, above = np.inf, None, 0
    loss, norm = record["loss"], record["grad_norm"]
    for step, value in enumerate(loss):
        if not (np.isfinite(value) and np.isfinite(norm[step])):
            return step - above
        smooth = value if smooth is None else 0.8 * smooth + 0.2 * value
        least = min(least, smooth)
        above = above + 1 if smooth > least + EXCESS else 0
        if above >= SUSTAINED:
            return step - above + 1
    return None


# -- signals --------------------------------------------------------------------------------------


def signals(record: Mapping[str, Any]) -> dict[str, tuple[Array, Array]]:
    """Steps (R,) and values (R, series) of every signal: one series a layer, or one for the run.

    Statistics of heads are the mean, the least (``_min``) and the largest (``_max``) over the heads
    of a layer. ``logit_std_sampled`` is ``logit_std`` of some rows drawn at random. Loss and
    gradient norm are those of every step; the same with ``_mean`` are means over the steps from one
    measurement of the others to the next.
    """
    every = np.arange(len(record["loss"]))
    step = record["step"].astype(int)
    signals: dict[str, tuple[Array, Array]] = {
        "curvature": (step, record["curvature"][:, None]),
    }
    for name in ("loss", "grad_norm"):
        values = record[name]
        means = [values[max(0, at - EVERY + 1) : at + 1].mean() for at in step]
        signals[name] = every, values[:, None]
        signals[f"{name}_mean"] = step, np.array(means)[:, None]
    for index, name in enumerate(MEANS):
        over_rows = record["means"][..., index]
        signals[name] = step, over_rows.mean(2)
        if name != "max_logit":
            signals[f"{name}_min"] = step, over_rows.min(2)
            signals[f"{name}_max"] = step, over_rows.max(2)
    for index, name in enumerate(LARGEST):
        signals[f"{name}_max"] = step, record["largest"][..., index].max(2)
    if "sampled" in record:  # records of the first repetition have none
        signals["logit_std_sampled"] = step, record["sampled"]
    for index, name in enumerate(("qk_entropy", "qk_update_entropy", "qk_update_norm")):
        signals[name] = step, record["spectral"][..., index].mean(2)
    return {name: (at, np.asarray(x, np.float64)) for name, (at, x) in signals.items()}


#: Signals that are positive and vary by factors: their logarithm is followed.
_LOGARITHMIC = ("grad_norm", "effective_keys", "logit_std", "noise_gain", "max_gap", "qk_update_n")


def _levels(name: str, x: Array) -> Array:
    x = np.clip(np.nan_to_num(x, nan=1e6, posinf=1e6, neginf=-1e6), -1e6, 1e6)
    return np.log(np.maximum(x, 1e-12)) if name.startswith(_LOGARITHMIC) else x


# -- detectors ------------------------------------------------------------------------------------


def level(x: Array) -> Array:
    """The value itself: a fixed threshold on the signal."""
    return x


def distance(x: Array, gap: int = GAP) -> Array:
    """Distance from the median of the past, in robust deviations of the past.

    The past of a value is the :data:`PAST` values before the newest ``gap``. A robust deviation is
    1.4826 times the median absolute deviation.
    """
    middle, spread = np.zeros_like(x), np.full_like(x, np.inf)
    for end in range(FEWEST // 2, min(PAST, len(x))):
        middle[end] = np.median(x[:end], 0)
        spread[end] = np.median(np.abs(x[:end] - middle[end]), 0)
    if len(x) > PAST:
        past = sliding_window_view(x, PAST, axis=0)[:-1]
        middle[PAST:] = np.median(past, -1)
        spread[PAST:] = np.median(np.abs(past - middle[PAST:, :, None]), -1)
    middle, spread = middle[: len(x) - gap], spread[: len(x) - gap]
    score = np.zeros_like(x)
    unit = 1.4826 * spread + 1e-3 * np.abs(middle) + 1e-6
    score[gap:] = (x[gap:] - middle) / unit
    score[: FEWEST + gap] = 0
    return score


def summed(distances: Array, slack: float) -> Array:
    """Cumulative sum of what distances, limited to 4 deviations, exceed the slack by (CUSUM)."""
    score = np.zeros_like(distances)
    for t in range(1, len(distances)):
        unit = np.clip(distances[t], -LARGEST_DISTANCE, LARGEST_DISTANCE)
        score[t] = np.maximum(0, score[t - 1] + unit - slack)
    return score


def drift(x: Array) -> Array:
    """Summed distances from the past."""
    return summed(distance(x), SLACK)


def trend(x: Array) -> Array:
    """Summed distances of differences between values from the past's differences."""
    return summed(distance(np.diff(x, axis=0, prepend=x[:1]), gap=0), SLACK_OF_DIFFERENCES)


def growth(x: Array) -> Array:
    """Growth over the last quarter of the training so far.

    A value is compared with the median of the three values around three quarters of the training.
    """
    score = np.zeros_like(x)
    for t in range(FEWEST_OF_GROWTH, len(x)):
        middle = 3 * t // 4
        score[t] = x[t] - np.median(x[middle - 1 : middle + 2], 0)
    return score


DETECTORS: dict[str, Callable[[Array], Array]] = {
    "level": level, "growth": growth, "distance": distance, "drift": drift, "trend": trend,
}  # fmt: skip
#: How scores of layers become one: the largest, or the largest that half of the layers reach.
OVER_LAYERS: dict[str, Callable[[Array], Array]] = {
    "any": lambda score: score.max(1),
    "half": lambda score: np.sort(score, 1)[:, score.shape[1] // 2],
}


class Alarm(NamedTuple):
    """What an alarm watches."""

    signal: str
    detector: str
    side: str
    layers: str

    @property
    def relative(self) -> bool:
        """Whether it compares a run only with its past."""
        return self.detector != "level"


def scores(
    record: Mapping[str, Any], every: int = 1, detectors: Sequence[str] = tuple(DETECTORS)
) -> dict[Alarm, tuple[Array, Array]]:
    """Steps and score of every alarm; ``every`` leaves out measurements of attention."""
    groups: dict[int, list[str]] = {}
    all_signals = signals(record)
    for name, (at, _) in all_signals.items():
        groups.setdefault(len(at), []).append(name)
    found: dict[Alarm, tuple[Array, Array]] = {}
    for names in groups.values():
        sparse = slice(None, None, 1 if "loss" in names else every)
        at = all_signals[names[0]][0][sparse]
        parts = [_levels(name, all_signals[name][1][sparse]) for name in names]
        starts = np.cumsum([0, *(part.shape[1] for part in parts)])
        together = np.concatenate(parts, 1)
        for kind in detectors:
            for side, sign in (("above", 1), ("below", -1)):
                score = DETECTORS[kind](sign * together).astype(np.float32)
                for index, name in enumerate(names):
                    one = score[:, starts[index] : starts[index + 1]]
                    for layers, over in OVER_LAYERS.items():
                        if one.shape[1] > 1 or layers == "any":
                            found[Alarm(name, kind, side, layers)] = at, over(one)
    return found


# -- outcomes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """One training with its outcome and scores."""

    run: Run
    steps: int
    event: int | None
    held_out: float
    scores: dict[Alarm, tuple[Array, Array]]
    _peaks: dict[Alarm, list[float]] = field(default_factory=dict, compare=False)

    def peaks(self, which: Alarm) -> list[float]:
        """The largest scores, :data:`REPEAT` steps apart, largest first."""
        if which not in self._peaks:
            at, score = self.scores[which]
            rest, found = score.copy(), []
            while len(rest) and np.isfinite(top := rest.max()):
                found.append(float(top))
                rest[np.abs(at - at[rest.argmax()]) < REPEAT] = -np.inf
            self._peaks[which] = found
        return self._peaks[which]

    @property
    def diverged(self) -> bool:
        """Whether it diverged after its fault began."""
        return self.event is not None and self.event > self.run.start and not self.run.healthy

    @property
    def time(self) -> int:
        """Steps from the fault's first to the event."""
        assert self.event is not None
        return self.event - self.run.start

    @property
    def before_fault(self) -> Judged | None:
        """What was healthy of a training: the steps before its fault's first, as a control.

        None if there are none, or the learning rate was too high even without the fault.
        """
        if self.run.healthy or self.run.start == 0 or self.run.rate > HEALTHY_RATE:
            return None
        parts = {
            which: (at[at < self.run.start], score[at < self.run.start])
            for which, (at, score) in self.scores.items()
        }
        steps = min(self.steps, self.run.start)
        return Judged(replace(self.run, healthy=True), steps, None, math.nan, parts)


def judged(
    run: Run,
    record: Mapping[str, Any],
    every: int = 1,
    detectors: Sequence[str] = tuple(DETECTORS),
) -> Judged:
    """A training with its outcome and scores."""
    found = scores(record, every, detectors)
    return Judged(run, len(record["loss"]), event(record), float(record["held_out"]), found)


def alarms(at: Array, score: Array, threshold: float) -> list[int]:
    """Steps of alarms, those within :data:`REPEAT` steps of the last one left out."""
    found: list[int] = []
    for step in at[score > threshold]:
        if not found or step - found[-1] >= REPEAT:
            found.append(int(step))
    return found


def peaks(healthy: Iterable[Judged], which: Alarm) -> list[float]:
    """The largest scores of healthy runs, :data:`REPEAT` steps apart, largest first."""
    return sorted((peak for one in healthy for peak in one.peaks(which)), reverse=True)


def threshold_for(healthy: Iterable[Judged], which: Alarm, rate: float) -> float:
    """The least threshold with at most ``rate`` false alarms a healthy step."""
    healthy = list(healthy)
    ordered = peaks(healthy, which)
    allowed = rate * sum(one.steps for one in healthy)
    return ordered[min(int(allowed), len(ordered) - 1)]


def false_alarms(healthy: Iterable[Judged], which: Alarm, threshold: float) -> int:
    """Number of alarms of healthy runs."""
    return sum(len(alarms(*one.scores[which], threshold)) for one in healthy)


def lead(one: Judged, which: Alarm, threshold: float) -> int:
    """Steps from the first alarm after the fault's start to the event; 0 if there is none.

    An alarm begins at the fault's start or later: a score that was beyond the threshold before, and
    stays there, is none.
    """
    assert one.event is not None
    at, score = one.scores[which]
    beyond = score > threshold
    begins = beyond & ~np.concatenate([[False], beyond[:-1]])
    steps = at[begins & (at >= one.run.start) & (at <= one.event)]
    return one.event - int(steps[0]) if len(steps) else 0


def share(one: Judged, which: Alarm, threshold: float) -> float:
    """Lead as a share of the time from the fault to the event."""
    return lead(one, which, threshold) / one.time
