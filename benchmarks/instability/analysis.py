"""What each signal says before a divergence, and how often it is wrong.

An *event* is the step at which a training diverges: the loss becomes infinite, or its running mean
stays :data:`~benchmarks.instability.training.EXCESS` nats above its least value for
:data:`SUSTAINED` steps. A *detector* turns a signal into a score; an *alarm* is the first step at
which the score exceeds a threshold. The lead is the number of steps from the alarm to the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.instability.decoder import LARGEST, MEANS
from benchmarks.instability.runs import Run
from benchmarks.instability.training import EXCESS

Array = NDArray[np.float64]

#: Steps for which the loss must stay high.
SUSTAINED = 10
#: Nats of held-out loss above the controls from which a run that did not diverge is damaged.
DAMAGE = 0.2
#: Alarms of one run within so many steps count once.
REPEAT = 50
#: Values of a signal before a detector of changes says anything.
PAST = 10


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


def signals(record: Mapping[str, Any]) -> dict[str, tuple[Array, Array]]:
    """Steps (R,) and values (R, series) of every signal: one series a head, or one for the run."""
    every = np.arange(len(record["loss"]))
    step = record["step"].astype(int)
    found = {
        "loss": (every, record["loss"][:, None]),
        "grad_norm": (every, record["grad_norm"][:, None]),
        "curvature": (step, record["curvature"][:, None]),
    }
    count = len(step)
    for index, name in enumerate(MEANS):
        if name != "max_logit":
            found[name] = step, record["means"][..., index].reshape(count, -1)
    for index, name in enumerate(LARGEST):
        found[name] = step, record["largest"][..., index].reshape(count, -1)
    for index, name in enumerate(("qk_entropy", "qk_update_entropy", "qk_update_norm")):
        found[name] = step, record["spectral"][..., index].reshape(count, -1)
    return {name: (at, np.asarray(x, np.float64)) for name, (at, x) in found.items()}


#: Signals that are positive and vary by factors: their logarithm is followed.
_LOGARITHMIC = {
    "grad_norm", "effective_keys", "logit_std", "max_gap", "noise_gain", "qk_update_norm",
}  # fmt: skip


def _levels(name: str, x: Array) -> Array:
    return np.log(np.maximum(x, 1e-12)) if name in _LOGARITHMIC else x


def high(x: Array) -> Array:
    """The value itself."""
    return x


def low(x: Array) -> Array:
    """The negative value."""
    return -x


def jump(x: Array, memory: float = 0.9) -> Array:
    """Distance of a value from the running mean of the past, in its running deviations."""
    mean, square = x[0].copy(), np.zeros_like(x[0])
    score = np.zeros_like(x)
    for t in range(1, len(x)):
        step = x[t] - mean
        if t >= PAST:
            score[t] = np.abs(step) / np.sqrt(square + 1e-12)
        square = memory * (square + (1 - memory) * step**2)
        mean = mean + (1 - memory) * step
    return score


def drift(x: Array, memory: float = 0.97, slack: float = 0.5) -> Array:
    """Cumulative sums, both ways, of distances from the past's running mean beyond ``slack``.

    Distances are in running deviations and at most 4 (CUSUM).
    """
    mean, square = x[0].copy(), np.zeros_like(x[0])
    up, down, score = np.zeros_like(x[0]), np.zeros_like(x[0]), np.zeros_like(x)
    for t in range(1, len(x)):
        step = x[t] - mean
        if t >= PAST:
            unit = np.clip(step / np.sqrt(square + 1e-12), -4, 4)
            up = np.maximum(0, up + unit - slack)
            down = np.maximum(0, down - unit - slack)
            score[t] = np.maximum(up, down)
        square = memory * (square + (1 - memory) * step**2)
        mean = mean + (1 - memory) * step
    return score


DETECTORS: dict[str, Callable[[Array], Array]] = {
    "high": high, "low": low, "jump": jump, "drift": drift,
}  # fmt: skip
#: How the scores of heads become one: the largest, or the largest that half of them exceed.
OVER_HEADS: dict[str, Callable[[Array], Array]] = {
    "any": lambda score: score.max(1),
    "half": lambda score: np.median(score, 1),
}


def scores(record: Mapping[str, Any]) -> dict[tuple[str, str, str], tuple[Array, Array]]:
    """Steps and score by signal, detector and rule over heads."""
    found = {}
    for name, (at, x) in signals(record).items():
        level = _levels(name, np.nan_to_num(x, nan=1e6, posinf=1e6, neginf=-1e6))
        for kind, detector in DETECTORS.items():
            score = detector(level)
            for rule, over in OVER_HEADS.items():
                if level.shape[1] > 1 or rule == "any":
                    found[name, kind, rule] = at, over(score)
    return found


@dataclass(frozen=True)
class Judged:
    """One training with its outcome and scores."""

    run: Run
    steps: int
    event: int | None
    held_out: float
    scores: dict[tuple[str, str, str], tuple[Array, Array]]


def alarms(at: Array, score: Array, threshold: float) -> list[int]:
    """Steps of alarms, those within :data:`REPEAT` steps of the last one left out."""
    found: list[int] = []
    for step in at[score > threshold]:
        if not found or step - found[-1] >= REPEAT:
            found.append(int(step))
    return found


def threshold_for(healthy: Iterable[Judged], which: tuple[str, str, str], rate: float) -> float:
    """The least threshold with at most ``rate`` false alarms a healthy step."""
    healthy = list(healthy)
    allowed = rate * sum(one.steps for one in healthy)
    peaks: list[float] = []
    for one in healthy:
        at, score = one.scores[which]
        rest = score.copy()
        while len(rest) and np.isfinite(top := rest.max()):  # the peaks, REPEAT steps apart
            peaks.append(float(top))
            rest[np.abs(at - at[rest.argmax()]) < REPEAT] = -np.inf
    ordered = sorted(peaks, reverse=True)
    return ordered[min(int(allowed), len(ordered) - 1)]


def lead(one: Judged, which: tuple[str, str, str], threshold: float) -> int:
    """Steps from the first alarm after the fault's start to the event; 0 if there is none."""
    assert one.event is not None
    at, score = one.scores[which]
    usable = (at >= one.run.start) & (at <= one.event)
    first = alarms(at[usable], score[usable], threshold)
    return one.event - first[0] if first else 0


def judged(run: Run, record: Mapping[str, Any]) -> Judged:
    """A training with its outcome and scores."""
    return Judged(
        run, len(record["loss"]), event(record), float(record["held_out"]), scores(record)
    )


def leads(trainings: Iterable[Judged], rate: float) -> list[tuple[tuple[str, str, str], list[int]]]:
    """Leads before every divergence, by signal, detector and rule, longest median first.

    Args:
        trainings: faulty ones and controls.
        rate: false alarms a healthy step, from which thresholds follow.
    """
    trainings = list(trainings)
    healthy = [one for one in trainings if one.run.healthy]
    diverged = [one for one in trainings if one.event is not None and one.event > one.run.start]
    found = []
    for which in healthy[0].scores if healthy else ():
        threshold = threshold_for(healthy, which, rate)
        found.append((which, [lead(one, which, threshold) for one in diverged]))
    return sorted(found, key=lambda pair: -float(np.median(pair[1] or [0])))
