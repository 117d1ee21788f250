"""Choose alarms on half of the trainings, and report them on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.instability.analysis import (
    LATE,
    Alarm,
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

    ``error`` is the standard error of the median lead of slow faults, from 1000 resamples.
    """
    trainings = list(trainings)
    healthy = [one for one in trainings if one.run.healthy]
    diverged = [one for one in trainings if one.diverged]
    late = [one for one in diverged if one.time > LATE]
    leads = np.array([lead(one, which, threshold) for one in diverged])
    late_leads = np.array([lead(one, which, threshold) for one in late])
    shares = np.array([share(one, which, threshold) for one in late])
    steps = sum(one.steps for one in healthy)
    draws = np.random.default_rng(0).integers(0, max(1, len(late)), (1000, len(late)))
    return {
        "alarm": which._asdict(),
        "threshold": round(float(threshold), 3),
        "lead": float(np.median(leads)) if len(leads) else 0.0,
        "seen": float((leads > 0).mean()) if len(leads) else 0.0,
        "lead_late": float(np.median(late_leads)) if len(late) else 0.0,
        "error_late": float(np.median(late_leads[draws], 1).std()) if len(late) else 0.0,
        "share_late": float(np.median(shares)) if len(late) else 0.0,
        "seen_late": float((late_leads > 0).mean()) if len(late) else 0.0,
        "false_alarms_per_10000": 1e4 * false_alarms(healthy, which, threshold) / max(1, steps),
    }


def by_signal(trainings: Iterable[Judged], relative: bool = False) -> list[dict[str, Any]]:
    """For each signal, the alarm chosen on one half of the trainings, reported on the other."""
    trainings = list(trainings)
    first = [one for one in trainings if one.chosen_on]
    second = [one for one in trainings if not one.chosen_on]
    rows = []
    for signal in dict.fromkeys(which.signal for which in trainings[0].scores):
        which, threshold = choose(
            first,
            lambda alarm, signal=signal: alarm.signal == signal and alarm.relative >= relative,  # type: ignore[misc]
        )
        rows.append(row(second, which, threshold))
    return sorted(rows, key=lambda one: -one["lead_late"])


def by_group(trainings: Iterable[Judged], relative: bool) -> dict[str, Any]:
    """The best alarm of each group of signals, chosen on one half, reported on the other."""
    trainings = list(trainings)
    first = [one for one in trainings if one.chosen_on]
    second = [one for one in trainings if not one.chosen_on]
    found = {}
    for group in GROUPS:
        which, threshold = choose(first, in_group(group, relative))
        found[group] = row(second, which, threshold)
    return found


def on_all_controls(trainings: Iterable[Judged]) -> dict[str, Any]:
    """Leads on all trainings with the limit set on all controls, so that its rate is exact."""
    trainings = list(trainings)
    first = [one for one in trainings if one.chosen_on]
    healthy = [one for one in trainings if one.run.healthy]
    found = {}
    for group in GROUPS:
        which, _ = choose(first, in_group(group))
        found[group] = row(trainings, which, threshold_for(healthy, which, RATE))
    return found


def curve(trainings: Iterable[Judged], which: Alarm) -> list[dict[str, float]]:
    """Operating points: thresholds from one half of the trainings, outcomes on the other."""
    trainings = list(trainings)
    healthy = [one for one in trainings if one.chosen_on and one.run.healthy]
    second = [one for one in trainings if not one.chosen_on]
    points = []
    for rate in RATES:
        found = row(second, which, threshold_for(healthy, which, rate))
        points.append({"rate": rate} | {name: found[name] for name in found if name != "alarm"})
    return points


def held_out_families(
    trainings: Iterable[Judged], groups: Sequence[str], relative: bool
) -> dict[str, dict[str, Any]]:
    """Each kind of fault reported with alarms chosen on the trainings with other faults."""
    trainings = list(trainings)
    kinds = {one.run.kind for one in trainings if one.diverged and one.time > LATE}
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted(kinds):
        family = [one for one in trainings if one.run.kind == kind]
        others = [one for one in trainings if one.run.kind != kind]
        found[kind] = {
            group: row(family, *choose(others, in_group(group, relative))) for group in groups
        }
        found[kind]["diverged"] = sum(one.diverged for one in family)
    return found


def limits(trainings: Iterable[Judged], which: Alarm) -> list[tuple[float, float]]:
    """False alarms per million steps and thresholds, from the half that is chosen on."""
    healthy = [one for one in trainings if one.chosen_on and one.run.healthy]
    return [
        (round(1e6 * rate, 1), round(threshold_for(healthy, which, rate), 2))
        for rate in LIMIT_RATES
    ]


#: Fixed thresholds of monitors: 0.05 of log n, a convention, and QK-clip's 100.
FIXED = {
    Alarm("max_logit_max", "level", "above", "any"): 100.0,
    Alarm("normalized_entropy_min", "level", "below", "any"): -0.05,
}


def by_cadence(
    sparse: Mapping[int, Sequence[Judged]], which: Alarm, threshold: float
) -> dict[str, dict[str, Any]]:
    """An alarm with fewer measurements, by steps from one to the next."""
    return {
        str(steps): row(
            [one for one in with_parts_before_faults(trainings) if not one.chosen_on],
            which,
            threshold,
        )
        for steps, trainings in sparse.items()
    }


def with_parts_before_faults(trainings: Iterable[Judged]) -> list[Judged]:
    """The trainings, and as further controls what was healthy of those with a fault."""
    trainings = list(trainings)
    parts = (one.before_fault for one in trainings)
    return trainings + [part for part in parts if part is not None]


def everything(
    trainings: Iterable[Judged], sparse: Mapping[int, Sequence[Judged]] | None = None
) -> dict[str, Any]:
    """The whole report.

    Args:
        trainings: all trainings.
        sparse: the same with fewer measurements, by steps from one to the next.
    """
    runs = list(trainings)
    trainings = with_parts_before_faults(runs)
    diverged = [one for one in trainings if one.diverged]
    healthy = [one for one in trainings if one.run.healthy]
    controls = [one for one in healthy if one.chosen_on]
    return {
        "trainings": len(runs),
        "controls": sum(one.run.healthy for one in runs),
        "faulty": sum(not one.run.healthy for one in runs),
        "diverged": len(diverged),
        "diverged_late": sum(one.time > LATE for one in diverged),
        "reported_late": sum(one.time > LATE for one in diverged if not one.chosen_on),
        "healthy_steps": sum(one.steps for one in healthy),
        "relative": by_group(trainings, relative=True),
        "any": by_group(trainings, relative=False),
        "signals": by_signal(trainings),
        "all_controls": on_all_controls(trainings),
        "curve": curve(trainings, MONITOR),
        "limits": limits(trainings, MONITOR),
        "fixed": [
            row([one for one in trainings if not one.chosen_on], which, threshold)
            for which, threshold in FIXED.items()
        ],
        "cadence": by_cadence(sparse or {}, MONITOR, threshold_for(controls, MONITOR, RATE)),
        "families": held_out_families(trainings, list(GROUPS)[:4], relative=True),
    }


def text(results: dict[str, Any]) -> str:
    """The report as a table."""
    head = (
        f"{results['trainings']} trainings, {results['faulty']} with a fault, "
        f"{results['diverged']} diverged, {results['diverged_late']} of them later than {LATE} "
        f"steps after the fault's first; {results['healthy_steps']:,} healthy steps"
    )
    lines = [head, _HEADER]
    for title in ("relative", "any"):
        lines += [f"-- best of each group, {title}"]
        lines += [_line(one, group) for group, one in results[title].items()]
    lines += ["-- limits set on all controls"]
    lines += [_line(one, group) for group, one in results["all_controls"].items()]
    lines += ["-- each signal", *(_line(one) for one in results["signals"])]
    lines += ["-- fixed thresholds", *(_line(one) for one in results["fixed"])]
    lines += ["-- the monitor's alarm by steps from one measurement to the next"]
    lines += [_line(one, steps) for steps, one in results["cadence"].items()]
    lines += [f"-- limits of a monitor by false alarms per million steps: {results['limits']}"]
    lines += ["-- false alarms and leads of the monitor's alarm"]
    lines += [str(point) for point in results["curve"]]
    for kind, groups in results["families"].items():
        lines += [f"-- {kind}, not used in the choice, {groups['diverged']} diverged"]
        lines += [_line(one, group) for group, one in groups.items() if group != "diverged"]
    return "\n".join(lines)


_HEADER = "median lead of slow faults ± error, share, seen | all: lead, seen | false per 10,000"


def _line(one: dict[str, Any], group: str = "") -> str:
    return (
        f"{one['lead_late']:6.1f} ± {one['error_late']:4.1f} {one['share_late']:.2f} "
        f"{one['seen_late']:.2f} | {one['lead']:5.1f} {one['seen']:.2f} | "
        f"{one['false_alarms_per_10000']:.2f}  {group:18} {' '.join(one['alarm'].values())}"
    )
