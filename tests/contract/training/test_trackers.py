"""What trackers have on disk after a monitored run, read back with their own readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from acutance.training import AttentionMonitor
from tests.contract.training.test_monitor_trainers import FIRST, QUIET, logged, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # what the trackers warn of is theirs
MEASURED = [1, 3, 6]
NAME = "attention/layers.0.self_attn/entropy"
_BLOCK, _HEADER = 32768, 7  # of the log format that LevelDB and .wandb files share


def installed(name: str) -> Any:
    """A tracker's package, of those that are in an environment of their own."""
    return pytest.importorskip(name, reason=f"{name} is in integrations: make integrations")


def train(log: Any) -> dict[int, dict[str, float]]:
    """Scalars by step of a loop of six steps, two layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sent: dict[int, dict[str, float]] = {}
    logs = [log, lambda scalars, step: sent.update({step: scalars})]
    with AttentionMonitor(every=3, log=logs, **QUIET).attach(model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 16)).square().mean().backward()
            optimizer.step()
    assert list(sent) == MEASURED
    assert NAME in sent[1]
    return sent


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: blocks of 32 KiB that hold pieces, 1 whole or 2, 3 and 4."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = path.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        rest = _BLOCK - position % _BLOCK
        if rest < _HEADER:
            position += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_scalars(folder: Path) -> dict[int, dict[str, float]]:
    """Scalars by step of the one offline run below a folder."""
    (path,) = folder.rglob("*.wandb")
    scalars: dict[int, dict[str, float]] = {}
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            scalars.setdefault(record.history.step.num, {}).update(items)
    return scalars


@contextmanager
def wandb_run(folder: Path) -> Iterator[ModuleType]:
    wandb = installed("wandb")
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True)
    run = wandb.init(project="tests", dir=folder, settings=settings)
    yield wandb
    run.finish()
    wandb.teardown()  # the next one reads the environment again


def test_weights_and_biases_has_them_offline(tmp_path: Path) -> None:
    with wandb_run(tmp_path) as wandb:
        sent = train(wandb.log)
    stored = wandb_scalars(tmp_path)
    assert {step: {name: stored[step][name] for name in sent[step]} for step in MEASURED} == sent


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = installed("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    yield module
    while module.active_run() is not None:
        module.end_run()


def mlflow_scalars(mlflow: Any, name: str) -> dict[int, float]:
    """Values of one metric by step, in the newest run of the store."""
    client = mlflow.MlflowClient()
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    return {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)}


def test_mlflow_has_them_in_its_files(mlflow: Any) -> None:
    with mlflow.start_run():
        sent = train(mlflow.log_metrics)
    for name in sent[1]:
        assert mlflow_scalars(mlflow, name) == {step: sent[step][name] for step in MEASURED}


class Twice(nn.Module):
    """Runs one attention module twice: the second call's name ends in #1."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.attend(x, x, x)[0]
        return self.attend(x, first[:, :3], first[:, :3])[0]


def test_names_are_ones_that_mlflow_accepts(mlflow: Any) -> None:
    monitor = AttentionMonitor(log=mlflow.log_metrics, **QUIET)
    model = Twice()
    with mlflow.start_run(), monitor.watch(model):
        model(torch.randn(1, 4, 8))
    with mlflow.start_run():
        record = monitor.step()
    assert record is not None
    assert any("#" in layer.module for layer in record.summary.layers)
    assert "attention/attend_1/entropy" in record.scalars
    assert not any("#" in name for name in record.scalars)


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = installed("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    return module


def trackio_scalars(project: str) -> dict[int, dict[str, float]]:
    """Scalars by step of the one run of a project."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs(project)
    scalars: dict[int, dict[str, float]] = {}
    for entry in SQLiteStorage.get_logs(project, run):
        scalars.setdefault(entry["step"], {}).update(entry)
    return scalars


def test_trackio_has_them_in_its_database(trackio: Any) -> None:
    trackio.init(project="tests", name="one", embed=False, auto_log_cpu=False)
    sent = train(trackio.log)
    trackio.finish()
    stored = trackio_scalars("tests")
    assert {step: {name: stored[step][name] for name in sent[step]} for step in MEASURED} == sent


def test_a_summary_writer_has_them_and_histograms(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sent = train(writer)
    events = tensorboard.EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    for name in sent[1]:
        values = [(event.step, event.value) for event in events.Scalars(name)]
        assert values == [(step, pytest.approx(sent[step][name], rel=1e-6)) for step in MEASURED]
    assert [event.step for event in events.Histograms(NAME)] == MEASURED


def test_what_accelerate_tracks_has_them(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(log_with="tensorboard", project_dir=tmp_path, cpu=True)
    accelerator.init_trackers("tests")
    sent = train(accelerator.log)
    accelerator.end_training()
    events = tensorboard.EventAccumulator(str(tmp_path / "tests")).Reload()
    for name in sent[1]:
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == {step: pytest.approx(sent[step][name], rel=1e-6) for step in MEASURED}


def test_json_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    sent = train(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": step, **sent[step]} for step in MEASURED]
    train(str(path))
    assert len(path.read_text().splitlines()) == 6


def read_wandb(folder: Path, name: str) -> dict[int, float]:
    return {
        int(scalars["train/global_step"]): scalars[f"train/{name}"]
        for scalars in wandb_scalars(folder).values()
        if f"train/{name}" in scalars
    }


def read_trackio(folder: Path, name: str) -> dict[int, float]:
    return {
        int(scalars["train/global_step"]): scalars[f"train/{name}"]
        for scalars in trackio_scalars("tests").values()
        if f"train/{name}" in scalars
    }


def read_mlflow(folder: Path, name: str) -> dict[int, float]:
    return mlflow_scalars(installed("mlflow"), name)


@pytest.mark.parametrize(
    ("tracker", "read"),
    [("wandb", read_wandb), ("mlflow", read_mlflow), ("trackio", read_trackio)],
)
def test_the_trainer_sends_them_to_its_trackers(
    tracker: str,
    read: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if tracker != "wandb":
        request.getfixturevalue(tracker)
    installed(tracker)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_PROJECT": "tests",
        "WANDB_SILENT": "true",
        "TRACKIO_PROJECT": "tests",
    }.items():
        monkeypatch.setenv(name, value)
    options = {"project": "tests"} if tracker == "trackio" else {}
    trained = trainer(tmp_path, AttentionMonitor(every=3, **QUIET), report_to=tracker, **options)
    trained.train()
    if tracker == "wandb":
        installed("wandb").teardown()
    entropy = dict(logged(trained, f"{FIRST}/entropy"))
    assert list(entropy) == MEASURED
    assert read(tmp_path, f"{FIRST}/entropy") == entropy
    assert read(tmp_path, "loss") == dict(logged(trained, "loss")), "the reader sees all"
