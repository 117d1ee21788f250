"""Choose alarms on the trainings of one repetition, and report them on those of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.instability.analysis import (
    LATE,
    Alarm,
    Array,
    Judged,
    false_alarms,
    lead,
    share,
    threshold_for,
)

#: False alarms a healthy step at which alarms are compared.
RATE = 1e-4
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
#: False alarms a step at which the limits of a monitor are measured.
LIMIT_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
#: What a monitor watches.
MONITOR = Alarm("logit_std", "growth", "above", "any")
#: The same on rows drawn at random.
SAMPLED = MONITOR._replace(signal="logit_std_sampled")
#: Its limit with ``false_alarms=100`` before the second repetition was seen: the logarithm of 1.48.
EARLIER_LIMIT = 0.39
#: What is compared: groups of signals by the beginnings of their names.
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("entropy", "normalized", "effective", "logit", "jacobian", "noise", "first",
                  "max"),
    "query-key weights": ("qk",),
    "gradient norm": ("grad_norm",),
    "loss": ("loss",),
    "curvature": ("curvature",),
}  # fmt: skip


def in_group(group: str, relative: bool = True) -> Callable[[Alarm], bool]:
    """Whether an alarm watches a signal of a group, and compares a run with its past.

    An alarm of a monitor names a layer, so alarms of half of the layers are left out.
    """
    return lambda which: (
        which.signal.startswith(GROUPS[group])
        and which.relative >= relative
        and which.layers == "any"
    )


def merit(diverged: Sequence[Judged], which: Alarm, threshold: float) -> float:
    """Mean lead as a share of the time from the fault to the event."""
    return float(np.mean([share(one, which, threshold) for one in diverged]))


def choose(
    trainings: Iterable[Judged], allowed: Callable[[Alarm], bool], rate: float = RATE
) -> tuple[Alarm, float]:
    """The allowed alarm with the largest mean share of lead on slow faults, and its threshold.

    A training that diverges within :data:`LATE` steps leaves nothing to choose by.
    """
    trainings = list(trainings)
    healthy = [one for one in trainings if one.run.healthy]
    diverged = [one for one in trainings if one.diverged and one.time > LATE]
    best: tuple[float, Alarm, float] | None = None
    for which in healthy[0].scores:
        if allowed(which):
            threshold = threshold_for(healthy, which, rate)
            found = merit(diverged, which, threshold), which, threshold
            best = found if best is None or found[0] > best[0] else best
    assert best is not None
    return best[1:]


def row(trainings: Iterable[Judged], which: Alarm, threshold: float) -> dict[str, Any]:
    """Leads and false alarms of an alarm with a given threshold.

    Errors are standard errors from 1000 resamples: ``error_late`` of the median lead of late
    divergences, ``error_false`` of the rate of false alarms, for which controls are resampled.
    """
    trainings = list(trainings)
    healthy = [one for one in trainings if one.run.healthy]
    diverged = [one for one in trainings if one.diverged]
    late = [one for one in diverged if one.time > LATE]
    leads = np.array([lead(one, which, threshold) for one in diverged])
    late_leads = late_leads_of(trainings, which, threshold)
    shares = np.array([share(one, which, threshold) for one in late])
    steps = np.array([one.steps for one in healthy])
    wrong = np.array([false_alarms([one], which, threshold) for one in healthy])
    draws = resamples(len(healthy))
    return {
        "alarm": which._asdict(),
        "threshold": round(float(threshold), 3),
        "lead": float(np.median(leads)) if len(leads) else 0.0,
        "seen": float((leads > 0).mean()) if len(leads) else 0.0,
        "lead_late": float(np.median(late_leads)) if len(late) else 0.0,
        "error_late": float(np.median(late_leads[resamples(len(late))], 1).std()) if late else 0.0,
        "share_late": float(np.median(shares)) if len(late) else 0.0,
        "seen_late": float((late_leads > 0).mean()) if len(late) else 0.0,
        "false_alarms": int(wrong.sum()),
        "false_alarms_per_10000": 1e4 * float(wrong.sum()) / max(1, int(steps.sum())),
        "error_false": float((1e4 * wrong[draws].sum(1) / steps[draws].sum(1)).std())
        if healthy
        else 0.0,
    }


def late_leads_of(trainings: Iterable[Judged], which: Alarm, threshold: float) -> Array:
    """The leads before late divergences, in steps."""
    late = (one for one in trainings if one.diverged and one.time > LATE)
    return np.array([lead(one, which, threshold) for one in late], np.float64)


def resamples(count: int) -> NDArray[np.int64]:
    """Indices of 1000 resamples of so many trainings, (1000, count)."""
    return np.random.default_rng(0).integers(0, max(1, count), (1000, count))


def compared(
    trainings: Iterable[Judged], first: tuple[Alarm, float], second: tuple[Alarm, float]
) -> dict[str, Any]:
    """Median leads of two alarms on the same late divergences, with 95 % intervals.

    Both medians are of the same resample of trainings. ``twice`` is the share of resamples in which
    the first is at least twice the second and above 0; ratios over 0 are None.
    """
    trainings = list(trainings)
    leads = np.stack([late_leads_of(trainings, *alarm) for alarm in (first, second)])
    medians = np.median(leads, 1)
    resampled = np.median(leads[:, resamples(leads.shape[1])], 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(resampled[0] / resampled[1], nan=0.0, posinf=np.inf)
        ratio = medians[0] / medians[1]
    interval = np.percentile(resampled[0] - resampled[1], [2.5, 97.5])
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")
    return {
        "difference": float(medians[0] - medians[1]),
        "difference_interval": interval.tolist(),
        "ratio": float(ratio) if np.isfinite(ratio) else None,
        "ratio_interval": [float(one) if np.isfinite(one) else None for one in (low, high)],
        "twice": float((ratios >= 2).mean()),
        "earlier": float((leads[0] > leads[1]).mean()),
        "later": float((leads[0] < leads[1]).mean()),
    }


def by_signal(first: Sequence[Judged], second: Sequence[Judged]) -> list[dict[str, Any]]:
    """For each signal, the alarm chosen on the first trainings, reported on the second."""
    rows = []
    for signal in dict.fromkeys(which.signal for which in first[0].scores):
        which, threshold = choose(first, lambda alarm, signal=signal: alarm.signal == signal)  # type: ignore[misc]
        rows.append(row(second, which, threshold))
    return sorted(rows, key=lambda one: -one["lead_late"])


def by_group(
    first: Sequence[Judged], second: Sequence[Judged], relative: bool = True
) -> dict[str, Any]:
    """The best alarm of each group of signals, chosen on the first, reported on the second."""
    chosen = {group: choose(first, in_group(group, relative)) for group in GROUPS}
    return {group: row(second, *alarm) for group, alarm in chosen.items()}


def at_equal_rates(first: Sequence[Judged], second: Sequence[Judged]) -> dict[str, Any]:
    """The same alarms with limits at which each is wrong once in 10,000 steps of the second.

    These limits were set on the trainings that are reported.
    """
    healthy = [one for one in second if one.run.healthy]
    rows, alarms = {}, {}
    for group in GROUPS:
        which, _ = choose(first, in_group(group))
        alarms[group] = which, threshold_for(healthy, which, RATE)
        rows[group] = row(second, *alarms[group])
    versus = compared(second, alarms["attention"], alarms["gradient norm"])
    return {"groups": rows, "against_gradient_norm": versus}


def curve(
    first: Sequence[Judged], second: Sequence[Judged], which: Alarm
) -> list[dict[str, float]]:
    """Operating points: thresholds from the first trainings, outcomes on the second."""
    healthy = [one for one in first if one.run.healthy]
    points = []
    for rate in RATES:
        found = row(second, which, threshold_for(healthy, which, rate))
        points.append({"rate": rate} | {name: found[name] for name in found if name != "alarm"})
    return points


def held_out_families(
    first: Sequence[Judged], second: Sequence[Judged], groups: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Each kind of fault of the second, with alarms chosen on other kinds of faults of the first.

    ``late`` is the number of late divergences of the kind.
    """
    found: dict[str, dict[str, Any]] = {}
    late = [one.run.kind for one in second if one.diverged and one.time > LATE]
    for kind in sorted(set(late)):
        family = [one for one in second if one.run.kind == kind]
        others = [one for one in first if one.run.kind != kind]
        found[kind] = {group: row(family, *choose(others, in_group(group))) for group in groups}
        found[kind] |= {"diverged": sum(one.diverged for one in family), "late": late.count(kind)}
    return found


def limits(trainings: Iterable[Judged], which: Alarm) -> list[tuple[float, float]]:
    """False alarms per million steps and thresholds, from all controls."""
    healthy = [one for one in trainings if one.run.healthy]
    return [
        (round(1e6 * rate, 1), round(threshold_for(healthy, which, rate), 2))
        for rate in LIMIT_RATES
    ]


#: Fixed thresholds of monitors: 0.05 of log n, a convention, and QK-clip's 100.
FIXED = {
    Alarm("max_logit_max", "level", "above", "any"): 100.0,
    Alarm("normalized_entropy_min", "level", "below", "any"): -0.05,
}


def with_parts_before_faults(trainings: Iterable[Judged]) -> list[Judged]:
    """The trainings, and as further controls what was healthy of those with a fault."""
    trainings = list(trainings)
    parts = (one.before_fault for one in trainings)
    return trainings + [part for part in parts if part is not None]


def counts(runs: Sequence[Judged]) -> dict[str, int]:
    """How many trainings there are of each sort."""
    diverged = [one for one in runs if one.diverged]
    healthy = [one for one in with_parts_before_faults(runs) if one.run.healthy]
    return {
        "trainings": len(runs),
        "controls": sum(one.run.healthy for one in runs),
        "faulty": sum(not one.run.healthy for one in runs),
        "diverged": len(diverged),
        "diverged_late": sum(one.time > LATE for one in diverged),
        "healthy_steps": sum(one.steps for one in healthy),
    }


def everything(
    first: Sequence[Judged], second: Sequence[Judged], sparse: Mapping[int, Sequence[Judged]]
) -> dict[str, Any]:
    """The whole report.

    Args:
        first: the trainings on which alarms and limits are chosen.
        second: those that are reported.
        sparse: the second with other cadences, by steps from one measurement to the next.
    """
    chosen_on, reported = counts(first), counts(second)
    first, second = with_parts_before_faults(first), with_parts_before_faults(second)
    best = {group: choose(first, in_group(group)) for group in ("attention", "gradient norm")}
    watched = {"all rows": MONITOR, "64 rows": SAMPLED}
    return {
        "chosen_on": chosen_on,
        "reported": reported,
        "relative": by_group(first, second),
        "against_gradient_norm": compared(second, best["attention"], best["gradient norm"]),
        "any": by_group(first, second, relative=False),
        "equal_rates": at_equal_rates(first, second),
        "monitor": {
            rows: row(second, which, EARLIER_LIMIT)
            for rows, which in watched.items()
            if all(which in one.scores for one in second)
        },
        "signals": by_signal(first, second),
        "curve": curve(first, second, MONITOR),
        "fixed": [row(second, which, threshold) for which, threshold in FIXED.items()],
        "cadence": {
            str(steps): row(with_parts_before_faults(trainings), MONITOR, EARLIER_LIMIT)
            for steps, trainings in sparse.items()
        },
        "families": held_out_families(first, second, list(GROUPS)[:4]),
        "limits": limits(first + second, MONITOR),
    }


def text(results: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [f"{what}: {results[what]}" for what in ("chosen_on", "reported")] + [_HEADER]
    for title in ("relative", "any"):
        lines += [f"-- best of each group, {title}"]
        lines += [_line(one, group) for group, one in results[title].items()]
    lines += [f"-- attention against gradient norm: {results['against_gradient_norm']}"]
    lines += ["-- limits at which each is wrong once in 10,000 steps of the trainings reported"]
    lines += [_line(one, group) for group, one in results["equal_rates"]["groups"].items()]
    lines += [str(results["equal_rates"]["against_gradient_norm"])]
    lines += ["-- the monitor's alarm and limit"]
    lines += [_line(one, rows) for rows, one in results["monitor"].items()]
    lines += ["-- each signal", *(_line(one) for one in results["signals"])]
    lines += ["-- fixed thresholds", *(_line(one) for one in results["fixed"])]
    lines += ["-- the monitor's alarm by steps from one measurement to the next"]
    lines += [_line(one, steps) for steps, one in results["cadence"].items()]
    lines += [f"-- limits of a monitor by false alarms per million steps: {results['limits']}"]
    lines += ["-- false alarms and leads of the monitor's alarm"]
    lines += [str(point) for point in results["curve"]]
    for kind, groups in results["families"].items():
        lines += [f"-- {kind}, not used in the choice, {groups['late']} diverged late"]
        lines += [_line(one, group) for group, one in groups.items() if isinstance(one, dict)]
    return "\n".join(lines)


_HEADER = "median lead of slow faults ± error, share, seen | all: lead, seen | false per 10,000"


def _line(one: dict[str, Any], group: str = "") -> str:
    return (
        f"{one['lead_late']:6.1f} ± {one['error_late']:4.1f} {one['share_late']:.2f} "
        f"{one['seen_late']:.2f} | {one['lead']:5.1f} {one['seen']:.2f} | "
        f"{one['false_alarms_per_10000']:.2f} ± {one['error_false']:.2f}  {group:18} "
        f"{' '.join(one['alarm'].values())}"
    )
