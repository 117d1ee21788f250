"""AttentionMonitor in a loop of one's own: what it measures, and that nothing else changes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import acutance
from acutance import training
from acutance.probing import edges
from acutance.training import Alarm, AttentionMonitor, AttentionWarning
from tests.versions import any_global_hook

QUIET = {"false_alarms": None}


def encoder(layers: int = 2, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **given)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def batch(index: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 9, 16, generator=torch.Generator().manual_seed(index))


def train(model: nn.Module, steps: int, monitor: AttentionMonitor | None = None) -> list[float]:
    """Losses of a run with dropout, two batches of accumulated gradients a step."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        for part in range(2):
            if monitor is None:
                loss = (model(batch(2 * step + part)) - 1).square().mean()
            else:
                with monitor.watch(model):
                    loss = (model(batch(2 * step + part)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
    return losses


class Writer:
    """What a SummaryWriter is told."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.histograms: list[tuple[str, int, dict[str, Any]]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_histogram_raw(self, tag: str, *, global_step: int, **given: Any) -> None:
        self.histograms.append((tag, global_step, given))


def test_losses_and_weights_are_those_of_a_run_without_it_and_all_is_restored() -> None:
    plain, watched = encoder(dropout=0.2), encoder(dropout=0.2)
    before = F.scaled_dot_product_attention
    monitor = AttentionMonitor(every=2, **QUIET)
    assert train(plain, 5) == train(watched, 5, monitor)
    for left, right in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)
    assert F.scaled_dot_product_attention is before
    assert not any_global_hook()
    assert not _get_current_function_mode_stack()


def test_measures_the_first_step_and_every_multiple() -> None:
    monitor, seen = AttentionMonitor(every=3, **QUIET), []
    model = encoder(1)
    for _ in range(10):
        with monitor.watch(model):
            model(batch())
        record = monitor.step()
        seen.append(record.step if record else None)
    assert [step for step in seen if step] == [1, 3, 6, 9]
    assert seen.count(None) == 6
    assert monitor.steps == 10
    assert monitor.last is not None
    assert monitor.last.step == 9


def test_the_first_thousand_steps_are_measured_at_least_every_ten() -> None:
    monitor, model, seen = AttentionMonitor(**QUIET), encoder(1), []
    monitor.steps = 989
    while monitor.steps < 1200:
        with monitor.watch(model):
            if monitor.due:
                model(batch())
        record = monitor.step()
        seen += [] if record is None else [record.step]
    assert seen == [990, 1000, 1100, 1200]


def test_a_loop_that_counts_two_steps_at_once_is_measured_all_the_same() -> None:
    monitor, model, seen = AttentionMonitor(every=4, **QUIET), encoder(1), []
    for step in range(0, 20, 2):  # numbers 1, 3, 5, ...: none is a multiple of 4
        monitor.steps = step
        with monitor.watch(model):
            model(batch())
        if monitor.step() is not None:
            seen.append(step + 1)
    assert seen == [1, 5, 9, 13, 17]


def test_accumulated_passes_are_one_record_that_a_probe_confirms() -> None:
    model = encoder(dropout=0.0)
    monitor = AttentionMonitor(metrics=["entropy", "top_weight", "max_logit"], **QUIET)
    for index in range(3):
        with monitor.watch(model):
            model(batch(index))
    record = monitor.step()
    with acutance.probe(model) as probe:
        for index in range(3):
            model(batch(index))
    expected = probe.summary()
    assert record is not None
    assert [layer.calls for layer in record.summary.layers] == [3, 3]
    for name in ("entropy", "top_weight", "max_logit"):
        torch.testing.assert_close(record.summary.mean(name), expected.mean(name))
    heads = expected.mean("entropy")[2:]  # the second layer's, all of as many rows
    tag = "attention/layers.1.self_attn/entropy"
    assert record.scalars[tag] == pytest.approx(float(heads.mean()), rel=1e-12)
    assert record.scalars[f"{tag}_min"] == pytest.approx(float(heads.min()), rel=1e-12)
    assert record.scalars[f"{tag}_max"] == pytest.approx(float(heads.max()), rel=1e-12)
    logits = expected.moments.high[2:, expected.metrics.index("max_logit")]
    assert record.scalars["attention/layers.1.self_attn/max_logit_max"] == float(logits.max())
    assert "attention/layers.1.self_attn/max_logit_min" not in record.scalars


def attention(scale: float) -> nn.MultiheadAttention:
    """Head 0 has logits in proportion to scale², head 1 none."""
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        attend.in_proj_weight.zero_()
        eye = scale * torch.eye(8)
        eye[4:] = 0
        attend.in_proj_weight[:8], attend.in_proj_weight[8:16] = eye, eye
    return attend


def looked_at(monitor: AttentionMonitor, model: nn.Module, x: torch.Tensor) -> Any:
    with monitor.watch(model):
        model(x, x, x)
    return monitor.step()


def test_a_large_logit_is_told_once_for_each_head() -> None:
    seen: list[Alarm] = []
    monitor = AttentionMonitor(every=1, max_logit=50.0, on_alarm=seen.append)
    x = torch.nn.functional.one_hot(torch.arange(4), 8).float()[None]
    scale = 11.0  # logits of head 0 on the diagonal: 121 / sqrt(4) = 60.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looked_at(monitor, attention(9.9), x)  # 49.005
    with pytest.warns(AttentionWarning, match="step 2, large logit in one head: head 0 of Multi"):
        record = looked_at(monitor, attention(scale), x)
    assert [alarm.place for alarm in seen] == [("large_logit", "MultiheadAttention", 0)]
    assert seen[0].value == pytest.approx(60.5, rel=1e-6)
    assert seen[0].step == 2
    assert record.scalars["attention/alarms/large_logit"] == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = looked_at(monitor, attention(scale), x)
    assert len(seen) == 1
    assert record.scalars["attention/alarms/large_logit"] == 1.0, "still beyond it, and logged"


def test_entropy_collapse_is_a_share_of_log_n() -> None:
    x = torch.nn.functional.one_hot(torch.arange(4), 8).float()[None]
    attend = attention(scale=3.5)
    logit = 3.5**2 / 2
    weight = math.exp(logit) / (math.exp(logit) + 3)
    entropy = -weight * math.log(weight) - (1 - weight) * math.log((1 - weight) / 3)
    share = entropy / math.log(4)
    low = AttentionMonitor(collapse=share * 0.999)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert looked_at(low, attend, x).alarms == ()
    high = AttentionMonitor(collapse=share * 1.001)
    with pytest.warns(AttentionWarning, match="entropy collapse in one head: head 0 of"):
        (alarm,) = looked_at(high, attend, x).alarms
    assert alarm.value == pytest.approx(share, rel=1e-5)


def test_scores_that_are_no_numbers_raise_an_alarm() -> None:
    attend, x = attention(1.0), batch(rows=2)[..., :8].clone()
    x[1, 2, 0] = math.nan
    monitor = AttentionMonitor()
    with pytest.warns(AttentionWarning, match="rows whose scores are not finite"):
        record = looked_at(monitor, attend, x)
    found = {alarm.head: alarm for alarm in record.alarms if alarm.kind == "not_finite"}
    assert found[0].value == 9.0  # every row of the second sequence sees that key
    assert record.scalars["attention/alarms/not_finite"] >= 1.0


def test_what_on_alarm_raises_ends_the_training() -> None:
    def stop(alarm: Alarm) -> None:
        raise RuntimeError(f"stopped: {alarm}")

    monitor = AttentionMonitor(max_logit=1e-6, on_alarm=stop)
    with (
        pytest.warns(AttentionWarning, match="large logit"),
        pytest.raises(RuntimeError, match=r"stopped: head 0 of layers\.0\.self_attn has"),
    ):
        train(encoder(), 1, monitor)


def test_many_heads_are_one_warning() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(encoder(4), 1, AttentionMonitor(max_logit=-1e9))
    assert len(said) == 1
    assert "in 8 heads" in str(said[0].message)
    assert "and 5 more" in str(said[0].message)


@pytest.mark.parametrize("error", [ValueError("came off"), KeyboardInterrupt("came off")])
def test_an_exception_in_the_model_restores_everything(error: BaseException) -> None:
    model, monitor = encoder(), AttentionMonitor(**QUIET)

    def fail(*_: Any) -> None:
        raise error

    handle = model.layers[1].register_forward_hook(fail)
    before = F.scaled_dot_product_attention
    with pytest.raises(type(error), match="came off"), monitor.watch(model):
        model(batch())
    assert F.scaled_dot_product_attention is before
    assert not any_global_hook()
    assert not _get_current_function_mode_stack()
    handle.remove()
    with monitor.watch(model):
        model(batch())
    record = monitor.step()
    assert record is not None
    assert [layer.calls for layer in record.summary.layers] == [1, 1], "the half pass is forgotten"


def test_checkpointed_passes_count_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder(dropout=0.1)

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.inner.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    monitor, model = AttentionMonitor(every=1, **QUIET), Checkpointed()
    with monitor.watch(model):
        model(batch()).sum().backward()  # the backward pass too is inside
    record = monitor.step()
    assert record is not None
    assert [layer.calls for layer in record.summary.layers] == [1, 1]


def test_a_compiled_model_is_measured_and_runs_compiled_again() -> None:
    model = encoder(1)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    monitor = AttentionMonitor(every=2, **QUIET)
    for _ in range(4):
        with monitor.watch(compiled):
            compiled(batch())
        monitor.step()
    assert monitor.last is not None
    assert monitor.last.summary.layers[0].module == "layers.0.self_attn"
    torch._dynamo.utils.counters.clear()
    compiled(batch())
    assert not torch._dynamo.utils.counters["frames"]["total"], "no graph was made anew"


def test_histograms_hold_every_row() -> None:
    writer = Writer()
    model = encoder()
    monitor = AttentionMonitor(histograms="head", log=writer, **QUIET)
    with monitor.watch(model):
        model(batch())
    record = monitor.step()
    assert record is not None
    assert {tag: value for tag, value, _ in writer.scalars} == record.scalars
    tags = [tag for tag, _, _ in writer.histograms]
    assert len(tags) == 2 * 2 * 2
    assert tags[:2] == [
        "attention/layers.0.self_attn/entropy/head0",
        "attention/layers.0.self_attn/max_logit/head0",
    ]
    column = record.summary.metrics.index("entropy")
    for index, (_, step, given) in enumerate(writer.histograms[::2]):
        moments = record.summary.moments
        assert step == 1
        assert given["num"] == sum(given["bucket_counts"]) == 27
        assert given["min"] == float(moments.low[index, column])
        mean, std = moments.mean[index, column], moments.std[index, column]
        assert given["sum"] == pytest.approx(27 * float(mean), rel=1e-12)
        squares = 27 * float(std.square() + mean.square())
        assert given["sum_squares"] == pytest.approx(squares, rel=1e-12)
        limits = given["bucket_limits"]
        assert len(limits) == len(given["bucket_counts"])
        assert limits == sorted(set(limits))
        assert set(limits[:-1]) <= set(edges("entropy"))
        assert limits[0] <= given["min"] <= given["max"] < limits[-1]
    other = Writer()
    AttentionMonitor(histograms="none").write_histograms(other, record)
    assert other.histograms == []
    AttentionMonitor().write_histograms(other, record)
    assert [(tag, given["num"]) for tag, _, given in other.histograms][:2] == [
        ("attention/layers.0.self_attn/entropy", 54),
        ("attention/layers.0.self_attn/max_logit", 54),
    ]


def test_state_goes_through_json_and_warns_of_no_head_again() -> None:
    monitor = AttentionMonitor(every=5, max_logit=-1e9)
    with pytest.warns(AttentionWarning, match="large logit in 4 heads"):
        train(encoder(), 7, monitor)
    seen: list[Alarm] = []
    again = AttentionMonitor(every=5, max_logit=-1e9, on_alarm=seen.append)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.state_dict() == monitor.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(encoder(), 3, again)
    assert again.last is not None
    assert again.last.step == 10
    assert seen == []
    with pytest.raises(
        ValueError, match="the state of an AttentionMonitor must have growth, measured, steps"
    ):
        again.load_state_dict({"steps": 3})
    with pytest.raises(
        ValueError, match=r"'told' of the state must be a list of \(kind, module, head\), got 5"
    ):
        again.load_state_dict({"steps": 3, "measured": 1, "told": [5]})


def test_nothing_to_measure_is_an_error_at_first_and_a_warning_later() -> None:
    model = encoder(1)
    with pytest.raises(acutance.ProbeError, match="no forward pass was watched in this step"):
        AttentionMonitor().step()
    monitor = AttentionMonitor(every=1, **QUIET)
    linear = nn.Linear(16, 2)
    with monitor.watch(linear):
        linear(batch())
    with pytest.raises(
        acutance.ProbeError, match="measured nothing: the probe captured no attention"
    ):
        monitor.step()
    with monitor.watch(model):
        model(batch())
    assert monitor.step() is not None
    with pytest.warns(AttentionWarning, match="at step 3 was not measured: no forward pass"):
        assert monitor.step() is None


def test_layers_heads_and_rows_are_chosen() -> None:
    model = encoder(3)
    monitor = AttentionMonitor(layers=[2], heads=[1], max_rows=5, **QUIET)
    with monitor.watch(model):
        model(batch())
    record = monitor.step()
    assert record is not None
    (layer,) = record.summary.layers
    assert (layer.module, layer.numbers) == ("layers.2.self_attn", (1,))
    assert 0 < record.summary.moments.count.max() <= 5


def test_provided_attention_is_equal_to_rounding() -> None:
    plain, provided = encoder(dropout=0.0), encoder(dropout=0.0)
    monitor = AttentionMonitor(every=1, provide=True, **QUIET)
    with monitor.watch(provided):
        out = provided(batch())
    record = monitor.step()
    assert record is not None
    assert record.summary.layers[0].provided == 1
    torch.testing.assert_close(out, plain(batch()))


def test_the_profile_by_n_is_kept_on_request_and_changes_no_number() -> None:
    found = {}
    for profile in (False, True):
        monitor, model = AttentionMonitor(every=1, profile=profile, **QUIET), encoder(1)
        with monitor.watch(model):
            model(batch())
        found[profile] = monitor.step()
    plain, full = found[False], found[True]
    assert plain is not None
    assert full is not None
    assert plain.scalars == full.scalars
    assert plain.summary.profile is None
    assert full.summary.profile is not None
    assert int(full.summary.profile.rows.sum()) == 2 * 3 * 9  # heads, sequences, rows


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every must be an integer, got 1.5"),
        ({"metrics": "entropy"}, TypeError, "metrics must be a sequence of names, got the string"),
        ({"metrics": ["entropie"]}, ValueError, "entropy"),
        ({"collapse": 1.0}, ValueError, "collapse must be a fraction of log n below 1, got 1.0"),
        ({"collapse": -0.1}, ValueError, "collapse must be a finite number above 0"),
        ({"max_logit": math.inf}, ValueError, "max_logit must be a finite number"),
        ({"false_alarms": 0}, ValueError, "false_alarms must be a finite number above 0, got 0"),
        ({"on_alarm": 3}, TypeError, "on_alarm must be a function of an Alarm, got 3"),
        ({"histograms": "heads"}, ValueError, "histograms must be one of 'layer', 'head', 'none'"),
        ({"max_rows": 1}, ValueError, "max_rows must be at least 2, got 1"),
        ({"provide": 1}, TypeError, "provide must be True or False, got 1"),
        ({"profile": 1}, TypeError, "profile must be True or False, got 1"),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        AttentionMonitor(**given)


def test_one_monitor_watches_one_model() -> None:
    monitor, one, two = AttentionMonitor(), encoder(1), encoder(1)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        monitor.watch("model")  # type: ignore[arg-type]
    with monitor.watch(one):
        one(batch())
    with (
        pytest.raises(ValueError, match="a monitor can watch only one model"),
        monitor.watch(two),
    ):
        two(batch())


def test_events_of_a_loop_that_is_no_trainer() -> None:
    model, monitor = encoder(1), AttentionMonitor(every=2, **QUIET)
    state = SimpleNamespace(global_step=0, epoch=None, log_history=[], stateful_callbacks={})
    monitor.on_train_begin(None, state, None, model=model)
    for _ in range(4):
        monitor.on_step_begin(None, state, None, model=model)
        model(batch())
        state.global_step += 1
        monitor.on_step_end(None, state, None, model=model)
    assert [entry["step"] for entry in state.log_history] == [1, 2, 4]
    assert monitor.last is not None
    assert state.log_history[-1] == {**monitor.last.scalars, "step": 4}
    assert state.stateful_callbacks == {"acutance.AttentionMonitor": monitor.state_dict()}
    monitor.on_step_begin(None, state, None, model=model)
    state.global_step += 1
    monitor.on_step_begin(None, state, None, model=model)  # 6 is due
    monitor.on_train_end(None, state, None)
    assert not any_global_hook()
    assert not _get_current_function_mode_stack()


def transformers_step(monitor: AttentionMonitor, model: nn.Module) -> None:
    state = SimpleNamespace(global_step=0, epoch=None, log_history=[], stateful_callbacks={})
    monitor.on_train_begin(None, state, None, model=model)
    monitor.on_step_begin(None, state, None, model=model)
    model(batch())
    state.global_step += 1
    monitor.on_step_end(None, state, None, model=model)


def lightning_step(monitor: AttentionMonitor, model: nn.Module) -> None:
    loop = SimpleNamespace(global_step=0, loggers=[], optimizers=[], is_global_zero=True)
    model.log_dict = lambda *_, **__: None  # type: ignore[assignment]
    monitor.on_train_start(loop, model)
    monitor.on_train_batch_start(loop, model, None, 0)
    model(batch())
    loop.global_step += 1
    monitor.on_train_batch_end(loop, model, None, None, 0)


@pytest.mark.parametrize("begin", [transformers_step, lightning_step])
def test_a_run_that_begins_anew_is_warned_of_its_own_heads(begin: Any) -> None:
    monitor = AttentionMonitor(every=1, max_logit=1e-6)
    for _ in range(2):  # two runs of one monitor, as in a sweep
        with pytest.warns(AttentionWarning, match="at step 1, large logit in 2 heads"):
            begin(monitor, encoder(1))
        monitor.on_train_end()
    went_on = SimpleNamespace(global_step=1, stateful_callbacks={})
    monitor.on_train_begin(None, went_on, None)
    monitor.on_train_start(went_on, None)
    assert len(monitor.state_dict()["told"]) == 2  # what goes on is told nothing twice


def test_only_events_are_answered_with_nothing() -> None:
    monitor = AttentionMonitor()
    monitor.on_push_begin(None, None, None)
    monitor.setup(None, None, stage="fit")
    with pytest.raises(AttributeError, match="has no attribute 'onset'"):
        monitor.onset  # noqa: B018


RANKS = """
import os, sys
sys.modules["transformers"] = None  # none is run here, and its import takes seconds
import warnings, torch, torch.distributed as dist
from acutance.training import AttentionMonitor
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 2,
    enable_nested_tensor=False,
)
x = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(3))
seen = []
monitor = AttentionMonitor(every=1, max_logit=-1e9, on_alarm=seen.append)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with monitor.watch(model):
        model(x[2 * rank : 2 * rank + 2])
    record = monitor.step()
    if rank == 0:  # a step that one rank alone sees
        with monitor.watch(model):
            model(x)
    second = monitor.step()
torch.save((record.scalars, second.scalars, len(seen), len(said)), sys.argv[2] + f".{rank}")
try:
    AttentionMonitor().step()
except Exception as error:
    assert "no rank has a summary" in str(error) or "no forward pass" in str(error), error
else:
    raise AssertionError
dist.destroy_process_group()
os._exit(0)  # an object that holds gloo's threads past shutdown would abort it
"""


def test_two_ranks_have_one_record(tmp_path: Any) -> None:
    where = tmp_path / "meet"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", RANKS]
    processes = [
        subprocess.Popen([*command, str(rank), str(where)], env=environment) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    left, right = (torch.load(f"{where}.{rank}", weights_only=False) for rank in range(2))
    assert left[:3] == right[:3]
    assert (left[3], right[3]) == (1, 0), "the first rank warns, both call on_alarm"
    assert left[2] == 4

    torch.manual_seed(0)  # one process with both ranks' rows
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
        2,
        enable_nested_tensor=False,
    )
    x = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(3))
    monitor = AttentionMonitor(every=1, max_logit=-1e9)
    with monitor.watch(model):
        model(x)
    with pytest.warns(AttentionWarning, match="large logit in 4 heads"):
        alone = monitor.step()
    assert alone is not None
    # batches of another size may be multiplied in another order: a few roundings of float32
    for found in (left[0], left[1]):
        assert found == pytest.approx(alone.scalars, rel=1e-5)


def test_the_names_are_public() -> None:
    for name in ("Alarm", "AttentionMonitor", "AttentionWarning", "MonitorRecord"):
        assert name in training.__all__
        assert hasattr(training, name)
