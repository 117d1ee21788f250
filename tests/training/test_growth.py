"""LogitGrowth: the last quarter of a training, limits by rate, and alarms of a monitor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from acutance.training import Alarm, AttentionMonitor, AttentionWarning
from acutance.training.alarms import FEWEST, LIMITS, SETTLING, STORED, LogitGrowth, growth_limit
from acutance.training.replay import read_log, replay
from benchmarks.instability.analysis import growth


def test_growth_is_the_one_that_the_laboratory_measured() -> None:
    values = np.exp(np.random.default_rng(0).normal(size=(300, 2)).cumsum(0) / 10)
    alarm = LogitGrowth()
    expected = np.exp(growth(np.log(values)))
    for index, (first, second) in enumerate(values):
        grown = alarm.update(8 * index, {"a": first, "b": second})
        if index < FEWEST:
            assert grown == {}
        else:
            assert list(grown.values()) == pytest.approx(list(expected[index]))


def test_a_long_training_stores_a_limited_number_of_values() -> None:
    alarm = LogitGrowth()
    for step in range(20 * STORED):
        grown = alarm.update(step, {"a": math.exp(step / 1e4)})
        state = alarm.state_dict()["layers"]["a"]
        assert len(state["values"]) == len(state["steps"]) <= STORED
        if step > 100:  # a quarter of the training, within the values that are left out
            room = 2 * int(np.diff(state["steps"]).max()) + 1
            assert 1e4 * math.log(grown["a"]) == pytest.approx(step / 4, abs=room)


def test_growth_is_over_steps_whatever_the_distance_of_measurements() -> None:
    """Every 10 steps up to 1000, then every 100, as a monitor measures by default."""
    alarm = LogitGrowth()
    for step in (*range(0, 1000, 10), *range(1000, 20_001, 100)):
        grown = alarm.update(step, {"a": math.exp(step / 1e4)})
        if step >= 200:
            assert 1e4 * math.log(grown["a"]) == pytest.approx(step / 4, abs=101)


@pytest.mark.parametrize("warmup", [0, 30, 500])
def test_growth_is_not_judged_in_a_warm_up_and_the_hundred_steps_after(warmup: int) -> None:
    alarm, judged = LogitGrowth(), []
    for step in range(0, 1000, 5):
        rate = 1e-3 * min(1.0, (step + 1) / (warmup + 1))
        if alarm.update(step, {"a": 1.0 + step}, rate):
            judged.append(step)
    assert judged == list(range(warmup + 100, 1000, 5))


def test_a_rate_that_rises_again_is_no_warm_up() -> None:
    alarm = LogitGrowth()
    for step in range(0, 1000, 5):
        grown = alarm.update(step, {"a": 1.0 + step}, 1e-3 * 1.01 ** max(0, step - 200))
        assert bool(grown) == (step >= 100)


def test_values_that_are_not_finite_are_left_out() -> None:
    one, other = LogitGrowth(), LogitGrowth()
    for step in range(0, 400, 10):
        grown = one.update(step, {"a": 1.0 + step})
        assert other.update(step, {"a": math.nan, "b": math.inf, "c": 0.0}) == {}
        assert other.update(step, {"a": 1.0 + step}) == grown


def test_state_goes_through_json() -> None:
    values = np.exp(np.random.default_rng(1).normal(size=4 * STORED).cumsum() / 100)
    alarm = LogitGrowth()
    for number, value in enumerate(values[:-50]):
        alarm.update(number, {"a": value}, rate=min(number, 200) / 1e5)
        if number == 10:
            assert alarm.update(number, {}) == {}
    again = LogitGrowth()
    again.load_state_dict(json.loads(json.dumps(alarm.state_dict(), allow_nan=False)))
    for number, value in enumerate(values[-50:], len(values) - 50):
        both = [one.update(number, {"a": value}, rate=1.0) for one in (again, alarm)]
        assert both[0] == both[1] != {}
    state = alarm.state_dict()
    with pytest.raises(ValueError, match="the state of growing logits lacks the field 'warmup'"):
        again.load_state_dict({"layers": {}})
    with pytest.raises(ValueError, match=r"'a' of layers of .* lacks the field 'first'"):
        again.load_state_dict({**state, "layers": {"a": {"count": 3}}})
    state["layers"]["a"]["steps"].pop()
    with pytest.raises(ValueError, match=r"must have a value at each step, got .* steps and"):
        again.load_state_dict(state)


def test_limits_pass_through_the_measured_points_and_fall_with_the_rate() -> None:
    for rate, limit in LIMITS:
        assert growth_limit(rate) == pytest.approx(math.exp(limit))
    limits = [growth_limit(rate) for rate in np.geomspace(1, 1e5, 60)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > math.exp(LIMITS[0][1])
    assert min(limits) >= 1.0


class Growing(nn.Module):
    """Attention whose logits have a given size at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.logit = 1.0

    def forward(self) -> torch.Tensor:
        scale = math.sqrt(self.logit * math.sqrt(4))
        eye = scale * torch.eye(8)
        eye[:4] = 0  # head 1 alone
        with torch.no_grad():
            self.attend.in_proj_weight[:8] = self.attend.in_proj_weight[8:16] = eye
        x = nn.functional.one_hot(torch.arange(8), 8).float()[None]
        return self.attend(x, x, x)[0]


def measured(monitor: AttentionMonitor, model: Growing, logit: float) -> list[Alarm]:
    model.logit = logit
    with monitor.watch(model):
        model()
    record = monitor.step()
    assert record is not None
    return list(record.alarms)


def test_a_monitor_warns_once_of_a_layer_whose_logits_grow() -> None:
    seen: list[Alarm] = []
    monitor, model = AttentionMonitor(every=1, on_alarm=seen.append), Growing()
    limit = growth_limit(100.0)
    for _ in range(SETTLING + 20):  # large, and steady
        assert measured(monitor, model, 300.0) == []
    assert measured(monitor, model, 300.0 * limit * 0.98) == []
    with pytest.warns(AttentionWarning, match=r"logit growth in one head: head 1 of attend has"):
        (alarm,) = measured(monitor, model, 300.0 * limit * 1.02)
    assert alarm.kind == "logit_growth"
    assert (alarm.module, alarm.head) == ("attend", 1)
    assert alarm.value == pytest.approx(1.02 * limit, rel=1e-3)
    assert alarm.threshold == limit
    assert seen == [alarm]
    (again,) = measured(monitor, model, 300.0 * 2 * limit)
    assert again.value > alarm.value
    assert seen == [alarm]
    assert monitor.last is not None
    assert monitor.last.scalars["attention/alarms/logit_growth"] == 1.0
    assert monitor.last.scalars["attention/attend/logit_std"] > 0


def test_fewer_false_alarms_need_more_growth_and_none_turns_them_off() -> None:
    limit = growth_limit(100.0)
    for rate, alarms in ((1000.0, 1), (10.0, 0), (None, 0)):
        monitor, model = AttentionMonitor(every=1, false_alarms=rate), Growing()
        for _ in range(SETTLING):
            assert measured(monitor, model, 10.0) == []
        if alarms:
            with pytest.warns(AttentionWarning, match="logit growth"):
                assert len(measured(monitor, model, 10.0 * limit)) == 1
        else:
            assert measured(monitor, model, 10.0 * limit) == []


def test_a_resumed_monitor_goes_on_with_the_same_measurements() -> None:
    monitor, model = AttentionMonitor(every=1), Growing()
    for _ in range(SETTLING):
        measured(monitor, model, 10.0)
    again = AttentionMonitor(every=1)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    with pytest.warns(AttentionWarning, match="logit growth"):
        (alarm,) = measured(again, model, 60.0)
    assert alarm.value == pytest.approx(6.0)
    before = {name: value for name, value in monitor.state_dict().items() if name != "growth"}
    counted = {"attend": {"count": 3, "stride": 1, "values": [1.0, 1.0, 1.0]}}
    for state in (before, before | {"growth": counted}):  # as earlier versions wrote it
        old = AttentionMonitor(every=1)
        old.load_state_dict(state)
        assert measured(old, model, 60.0) == []


@pytest.mark.filterwarnings("ignore:attention at step")
@pytest.mark.parametrize("warmup", [1, 220])
def test_a_default_monitor_sees_the_first_thousand_steps(tmp_path: Path, warmup: int) -> None:
    """Logits grow from step 1 on: the alarm comes soon after the warm-up, and so in a replay."""
    model, log = Growing(), tmp_path / "run.jsonl"
    optimizer = torch.optim.SGD([model.attend.in_proj_bias], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1, (at + 1) / warmup))
    seen: list[Alarm] = []
    with AttentionMonitor(log=log, on_alarm=seen.append).attach(model, optimizer) as monitor:
        for step in range(1, 401):
            model.logit = 1.02**step
            if monitor.due:
                model().sum().backward()
            optimizer.step()
            schedule.step()
    records = read_log(log)
    assert [one["step"] for one in records] == [1, *range(10, 401, 10)]
    assert records[-1]["attention/learning_rate"] == 0.1
    assert [one.step for one in seen] == [160 if warmup == 1 else 320]
    assert [one.step for one in replay(records).alarms] == [seen[0].step]


def test_limits_are_those_of_the_recorded_report() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "instability" / "report.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))["limits"]
    assert [tuple(point) for point in recorded] == list(LIMITS)
