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
from acutance.training.growth import FEWEST, LIMITS, STORED, LogitGrowth, growth_limit
from benchmarks.instability.analysis import growth


def test_growth_is_the_one_that_the_laboratory_measured() -> None:
    values = np.exp(np.random.default_rng(0).normal(size=(300, 2)).cumsum(0) / 10)
    alarm = LogitGrowth()
    expected = np.exp(growth(np.log(values)))
    for index, (first, second) in enumerate(values):
        grown = alarm.update({"a": first, "b": second})
        if index < FEWEST:
            assert grown == {}
        else:
            assert list(grown.values()) == pytest.approx(list(expected[index]))


def test_a_long_training_stores_a_limited_number_of_values() -> None:
    alarm = LogitGrowth()
    for step in range(20 * STORED):
        grown = alarm.update({"a": math.exp(step / 1e4)})
        state = alarm.state_dict()["a"]
        assert len(state["values"]) <= STORED
        if step > 100:  # a quarter of the training, within the values that are left out
            expected, room = step / 4, 4 * state["stride"] + 1
            assert 1e4 * math.log(grown["a"]) == pytest.approx(expected, abs=room)


def test_values_that_are_not_finite_are_left_out() -> None:
    one, other = LogitGrowth(), LogitGrowth()
    for step in range(40):
        grown = one.update({"a": 1.0 + step})
        assert other.update({"a": math.nan, "b": math.inf, "c": 0.0}) == {}
        assert other.update({"a": 1.0 + step}) == grown


def test_state_goes_through_json() -> None:
    values = np.exp(np.random.default_rng(1).normal(size=4 * STORED).cumsum() / 100)
    alarm = LogitGrowth()
    for number, value in enumerate(values[:-50]):
        alarm.update({"a": value})
        if number == 10:
            assert alarm.update({}) == {}
    again = LogitGrowth()
    again.load_state_dict(json.loads(json.dumps(alarm.state_dict())))
    for value in values[-50:]:
        assert again.update({"a": value}) == alarm.update({"a": value})
    with pytest.raises(ValueError, match="the logits of 'a' must have count, stride and values"):
        again.load_state_dict({"a": {"count": 3}})


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
    for _ in range(40):  # large, and steady
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
        for _ in range(20):
            assert measured(monitor, model, 10.0) == []
        if alarms:
            with pytest.warns(AttentionWarning, match="logit growth"):
                assert len(measured(monitor, model, 10.0 * limit)) == 1
        else:
            assert measured(monitor, model, 10.0 * limit) == []


def test_a_resumed_monitor_goes_on_with_the_same_measurements() -> None:
    monitor, model = AttentionMonitor(every=1), Growing()
    for _ in range(20):
        measured(monitor, model, 10.0)
    again = AttentionMonitor(every=1)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    with pytest.warns(AttentionWarning, match="logit growth"):
        (alarm,) = measured(again, model, 60.0)
    assert alarm.value == pytest.approx(6.0)
    before = {name: value for name, value in monitor.state_dict().items() if name != "growth"}
    old = AttentionMonitor(every=1)
    old.load_state_dict(before)  # as written by version 0.1.0
    assert measured(old, model, 60.0) == []


def test_limits_are_those_of_the_recorded_report() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "instability" / "report.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))["limits"]
    assert [tuple(point) for point in recorded] == list(LIMITS)
