"""The laboratory of failing trainings: outcomes, detectors and records on small examples."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.instability import analysis, remedies, report
from benchmarks.instability.analysis import Alarm
from benchmarks.instability.decoder import MEANS, Decoder, Shape
from benchmarks.instability.runs import Run, catalogue, faulty, healthy
from benchmarks.instability.training import path_of, record_of, train

TINY = Run("rate", 64.0, 12, shape=Shape(width=16, layers=1, heads=2, length=16, norm=False),
           factor=64.0, batch=2, steps=40, clip=None)  # fmt: skip


def test_every_training_has_a_name_of_its_own() -> None:
    runs = catalogue()
    assert len(faulty()) >= 200
    assert len(healthy()) >= 80
    assert len({run.key for run in runs}) == len(runs)


def test_a_record_is_written_once_and_has_every_signal(tmp_path: Path) -> None:
    record = record_of(TINY, tmp_path)
    assert record["means"].shape[1:] == (1, 2, len(MEANS))
    assert len(record["loss"]) == len(record["grad_norm"])
    path_of(TINY, tmp_path).touch()
    again = record_of(TINY, tmp_path)
    assert all(np.array_equal(record[name], again[name], equal_nan=True) for name in record)
    assert set(analysis.signals(record)) >= {"entropy", "max_logit", "grad_norm", "qk_entropy"}


def test_the_same_training_gives_the_same_record() -> None:
    first, second = train(TINY), train(TINY)
    assert np.array_equal(first["loss"], second["loss"])


def test_a_fault_changes_nothing_before_its_first_step() -> None:
    with_fault = train(TINY)["loss"]
    without = train(replace(TINY, factor=1.0))["loss"]
    assert np.array_equal(with_fault[: TINY.start + 1], without[: TINY.start + 1])
    assert not np.array_equal(with_fault, without)


@pytest.mark.parametrize("fault", ["mask_future", "mask_first", "window"])
def test_faults_of_masks(fault: str) -> None:
    model = Decoder(Shape(width=16, layers=1, heads=2, window=4))
    before = model.attention[0].visible(8)
    model.set_fault(fault)  # type: ignore[arg-type]
    after = model.attention[0].visible(8)
    changed = {"mask_future": (0, 1), "mask_first": (2, 0), "window": (5, 2)}[fault]
    assert not torch.equal(before, after)
    assert bool(before[changed]) != bool(after[changed])


@pytest.mark.parametrize(
    "fault",
    [
        {"scale_growth": 1.5},
        {"bad_steps": 1, "bad_every": 4},
        {"noise_growth": 0.1},
        {"repeat_growth": 0.5},
        {"rounded": "weights"},
        {"rounded": "moments"},
        {"head_growth": 1.5},
        {"value_growth": 1.5},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_slow_fault_acts_from_its_first_step_on(fault: dict[str, Any]) -> None:
    plain = replace(TINY, factor=1.0)
    before, after = train(plain)["loss"], train(replace(plain, **fault))["loss"]
    assert np.array_equal(before[: TINY.start], after[: TINY.start])
    assert not np.array_equal(before, after)


def test_an_event_is_a_loss_that_stays_high() -> None:
    loss = np.full(100, 2.0)
    norm = np.ones(100)
    assert analysis.event({"loss": loss, "grad_norm": norm}) is None
    spike, gone = loss.copy(), loss.copy()
    spike[50:53] = 4.0  # comes back
    gone[50:] = 4.0
    assert analysis.event({"loss": spike, "grad_norm": norm}) is None
    assert analysis.event({"loss": gone, "grad_norm": norm}) == 51  # the running mean is 0.4, 0.72
    gone[60] = np.nan
    assert analysis.event({"loss": gone, "grad_norm": norm}) == 51


def test_detectors_of_changes() -> None:
    noise = np.random.default_rng(0).normal(size=(200, 1))
    stepped = noise + 8.0 * (np.arange(200)[:, None] >= 120)
    bent = noise + 0.5 * np.maximum(np.arange(200) - 120, 0)[:, None]
    for detector in (analysis.distance, analysis.drift, analysis.trend):
        assert detector(noise)[: analysis.FEWEST].max() == 0.0
        # only the past counts
        assert np.array_equal(detector(noise)[:120], detector(stepped)[:120])
    assert analysis.distance(stepped)[120, 0] > 1.5 * analysis.distance(noise).max()
    assert analysis.drift(bent)[160:, 0].max() > 2 * analysis.drift(noise).max()


def test_a_distance_is_in_robust_deviations_of_the_past() -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    past = x[80 - 1 - analysis.GAP - analysis.PAST : 80 - 1 - analysis.GAP, 1]
    spread = 1.4826 * np.median(np.abs(past - np.median(past)))
    expected = (x[-1, 1] - np.median(past)) / spread
    assert analysis.distance(x)[-1, 1] == pytest.approx(expected, rel=2e-3)


WHICH = Alarm("max_logit", "drift", "above", "any")


def judged(run: Run, score: np.ndarray, event: int | None = None) -> analysis.Judged:
    return analysis.Judged(run, len(score), event, 2.0, {WHICH: (np.arange(len(score)), score)})


def test_thresholds_allow_the_false_alarms_asked_for() -> None:
    generator = np.random.default_rng(1)
    runs = [judged(Run("plain", healthy=True), generator.normal(size=1000)) for _ in range(20)]
    threshold = analysis.threshold_for(runs, WHICH, 5e-4)  # 10 of 20,000 steps
    assert 8 <= analysis.false_alarms(runs, WHICH, threshold) <= 10


def rising_and_quiet(seed: int, count: int) -> list[analysis.Judged]:
    """Controls, and trainings that diverge 80 steps after their score rises."""
    generator = np.random.default_rng(seed)
    runs = []
    for number in range(count):
        quiet = generator.normal(size=400)
        runs.append(judged(Run("plain", healthy=True, seed=number), quiet))
        rising = generator.normal(size=400) + 50.0 * (np.arange(400) >= 220)
        runs.append(judged(Run("rate", 2.0, 100, seed=number), rising, event=300))
    return runs


def test_leads_are_reported_on_trainings_that_were_not_chosen_on() -> None:
    first, second = rising_and_quiet(2, 30), rising_and_quiet(3, 20)
    chosen, threshold = report.choose(first, report.in_group("attention"), 1e-4)
    assert chosen == WHICH
    assert report.false_alarms([one for one in first if one.run.healthy], chosen, threshold) == 1
    row = report.row(second, chosen, threshold)
    assert row["lead_late"] == 80.0
    assert row["error_late"] == 0.0
    assert row["share_late"] == pytest.approx(0.4)
    assert row["seen_late"] == 1.0
    assert row["false_alarms_per_10000"] == 1e4 * row["false_alarms"] / (20 * 400)
    points = report.curve(first, second, chosen)
    assert [point["rate"] for point in points] == list(report.RATES)
    assert points[0]["threshold"] >= points[-1]["threshold"]


def test_two_alarms_are_compared_on_the_same_trainings() -> None:
    runs = rising_and_quiet(4, 20)
    same = report.compared(runs, (WHICH, 25.0), (WHICH, 25.0))
    assert same["difference_interval"] == [0.0, 0.0]
    assert same["ratio_interval"] == [1.0, 1.0]
    assert same["earlier"] == same["later"] == same["twice"] == 0.0
    never = report.compared(runs, (WHICH, 25.0), (WHICH, 1e9))
    assert never["difference_interval"] == [80.0, 80.0]
    assert never["ratio"] is None
    assert never["twice"] == never["earlier"] == 1.0


def test_a_repetition_has_the_same_trainings_with_other_seeds() -> None:
    first, second = catalogue(0), catalogue(1)
    assert [replace(run, seed=0) for run in first] == [replace(run, seed=0) for run in second]
    assert not {run.key for run in first} & {run.key for run in second}


def test_a_remedy_continues_the_training_of_the_alarm() -> None:
    run = replace(remedies.FAULTS["scale of scores × 1.02 a step"], start=140, steps=170, batch=2)
    run = replace(run, scale_growth=1.1, shape=TINY.shape)
    training = remedies.Training(run)
    alarm = training.until_alarm()
    assert alarm is not None
    assert run.start <= alarm < run.steps
    assert alarm % remedies.BETWEEN == 0
    assert training.step == alarm + 1
    plain = copy.deepcopy(training).finish("none")
    assert plain == remedies.Training(run).finish("none")
    assert copy.deepcopy(training).finish("learning rate / 4") != plain
    last = remedies.outcomes(replace(run, start=run.steps - 1))  # not measured any more
    assert last["alarm"] is None
    assert list(last["held_out"]) == [remedies.NO_FAULT, "none"]


FOLDER = Path(remedies.__file__).parent
GUIDE = (FOLDER.parents[1] / "docs" / "guide" / "loss-spikes.md").read_text(encoding="utf-8")


def test_the_guide_has_the_figures_of_the_recorded_report() -> None:
    recorded = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
    for row in (*recorded["relative"].values(), *recorded["monitor"].values()):
        lead = f"| {row['lead_late']:.0f} ± {row['error_late']:.0f} | {row['seen_late']:.2f} "
        wrong = f"| {row['false_alarms_per_10000']:.1f} ± {row['error_false']:.1f} |"
        assert lead + wrong in GUIDE
    rows = [line for line in GUIDE.splitlines() if line.startswith("|")]
    for kind in recorded["families"].values():
        leads = [kind[group]["lead_late"] for group in ("attention", "gradient norm", "loss")]
        end = f"({kind['late']}) | {' | '.join(f'{lead:.0f}' for lead in leads)} |"
        assert any(row.endswith(end) for row in rows)
    assert f"{recorded['reported']['trainings']} trainings" in GUIDE
    assert f"{recorded['reported']['healthy_steps']:,} healthy steps" in GUIDE


def test_the_guide_has_the_recorded_remedies() -> None:
    lines = remedies.table(FOLDER / "remedies.jsonl").splitlines()
    for line in lines[2 : 4 + len(remedies.REMEDIES) - 1]:
        assert line.partition("|")[2].partition("|")[2] in GUIDE
