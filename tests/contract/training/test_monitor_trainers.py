"""AttentionMonitor as a callback of the real trainers, their logs and event files read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from acutance.training import Alarm, AttentionMonitor, AttentionWarning
from tests.versions import any_global_hook

# what the trainers warn of is theirs; of ours, none is expected but where a test says so
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::acutance.training.AttentionWarning"),
]
FIRST = "attention/model.layers.0.self_attn"
QUIET = {"false_alarms": None}


def events(folder: Path) -> Any:
    """The one TensorBoard file below a folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = folder.rglob("events.out.tfevents*")
    found = EventAccumulator(str(path), size_guidance={"histograms": 0})
    return found.Reload()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, 50, (32, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(
    folder: Path, monitor: AttentionMonitor | None = None, lora: bool = False, **given: Any
) -> Any:
    """A Trainer of a two-layer Llama, four rows a batch."""
    pytest.importorskip("accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, **heads))
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    usual = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**(usual | given)),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[] if monitor is None else [monitor],
    )


def logged(trained: Any, name: str) -> list[tuple[int, float]]:
    """Steps and values of one name in the history."""
    return [(entry["step"], entry[name]) for entry in trained.state.log_history if name in entry]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"bf16": True},
        {"max_steps": 20},
        {"max_steps": 20, "lora": True},
    ],
    ids=lambda given: "-".join(given) or "plain",
)
def test_a_trainer_logs_it_and_trains_the_same(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = AttentionMonitor(every=3, **QUIET)
    plain, watched = trainer(tmp_path, **given), trainer(tmp_path, monitor, **given)
    plain.train()
    watched.train()
    assert logged(plain, "loss") == logged(watched, "loss")
    for left, right in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(left, right)
    entropy = logged(watched, f"{FIRST}/entropy")
    last = given.get("max_steps", 6)
    assert [step for step, _ in entropy] == [1, *range(3, last + 1, 3)]
    rates = logged(watched, "attention/learning_rate")
    assert [step for step, _ in rates] == [step for step, _ in entropy]
    assert 1e-2 > rates[0][1] > rates[-1][1]  # it falls linearly
    assert monitor.last is not None
    assert entropy[-1][1] == monitor.last.scalars[f"{FIRST}/entropy"]
    passes = given.get("gradient_accumulation_steps", 1)
    assert [layer.calls for layer in monitor.last.summary.layers] == [passes] * 2
    assert monitor.last.summary.layers[0].rows == 48 * passes
    assert "attention/" not in capsys.readouterr().out, "the terminal is not flooded"
    assert "training_step" not in vars(watched)


def test_names_under_lora_are_those_without(tmp_path: Path) -> None:
    trained = trainer(tmp_path, AttentionMonitor(**QUIET), lora=True, max_steps=1)
    trained.train()
    assert [step for step, _ in logged(trained, f"{FIRST}/entropy")] == [1]


def test_a_trainer_writes_it_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    monitor = AttentionMonitor(every=3, **QUIET)
    trained = trainer(tmp_path, monitor, report_to="tensorboard")
    trained.train()
    found = events(tmp_path)
    scalars = found.Scalars(f"train/{FIRST}/entropy")
    assert [(event.step, event.value) for event in scalars] == [
        (step, pytest.approx(value, rel=1e-6))
        for step, value in logged(trained, f"{FIRST}/entropy")
    ]
    histograms = found.Histograms(f"{FIRST}/entropy")
    assert [event.step for event in histograms] == [1, 3, 6]
    last = histograms[-1].histogram_value
    assert last.num == 4 * 48
    assert last.sum / last.num == pytest.approx(scalars[-1].value, rel=1e-6)


def test_a_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = AttentionMonitor(every=3, max_logit=-1e9)
    whole = trainer(tmp_path, first, save_strategy="steps", save_steps=4)
    with pytest.warns(AttentionWarning, match="large logit in 8 heads"):
        whole.train()
    seen: list[Alarm] = []
    monitor = AttentionMonitor(every=3, max_logit=-1e9, on_alarm=seen.append)
    again = trainer(tmp_path, monitor)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for name in (f"{FIRST}/entropy", "loss"):
        assert logged(again, name) == logged(whole, name)
    assert seen == [], "its heads were told of before"
    assert monitor.state_dict() == first.state_dict()


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [ValueError("came off"), KeyboardInterrupt("came off")])
def test_an_exception_in_a_trainer_restores_everything(
    error: BaseException, tmp_path: Path
) -> None:
    trained = trainer(tmp_path, AttentionMonitor(every=1, **QUIET))
    before = F.scaled_dot_product_attention
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error

    trained.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(type(error), match="came off"):
        trained.train()
    assert "training_step" not in vars(trained)
    assert F.scaled_dot_product_attention is before
    assert not any_global_hook()
    assert not _get_current_function_mode_stack()
    trained.train()
    assert logged(trained, f"{FIRST}/entropy")


def test_what_on_alarm_raises_ends_a_trainer(tmp_path: Path) -> None:
    def stop(alarm: Alarm) -> None:
        raise RuntimeError(f"stopped: {alarm}")

    monitor = AttentionMonitor(max_logit=-1e9, on_alarm=stop)
    with (
        pytest.warns(AttentionWarning, match="large logit in 8 heads"),
        pytest.raises(RuntimeError, match=r"stopped: head 0 of model\.layers\.0"),
    ):
        trainer(tmp_path, monitor).train()


@pytest.fixture
def lightning() -> Any:
    """Lightning; the package pytorch_lightning has the same code under another name."""
    return pytest.importorskip("lightning.pytorch")


def fitted(
    lightning: Any, monitor: AttentionMonitor | None = None, fail: Any = None, **given: Any
) -> tuple[Any, Any]:
    """A Lightning Trainer that has fitted a two-layer encoder, and its module."""

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            if fail is not None and index == 1:
                raise fail
            loss = (self.encoder(batch[0]) - 1).square().mean()
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.encoder(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    torch.manual_seed(0)
    module = Module()
    rows = torch.randn(24, 10, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    path = given.pop("ckpt_path", None)
    usual = {
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "callbacks": [] if monitor is None else [monitor],
    }
    trained = lightning.Trainer(**(usual | given))
    trained.fit(module, loader, loader, ckpt_path=path)
    return trained, module


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 2},
        {"precision": "bf16-mixed"},
        pytest.param({"max_steps": 20}, marks=pytest.mark.slow),
    ],
    ids=lambda given: "-".join(given) or "plain",
)
def test_lightning_trains_the_same(lightning: Any, given: dict[str, Any]) -> None:
    monitor = AttentionMonitor(every=3, **QUIET)
    _, plain = fitted(lightning, **given)
    trained, watched = fitted(lightning, monitor, **given)
    assert plain.losses == watched.losses
    for left, right in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)
    assert monitor.last is not None
    steps = given.get("max_steps", 6)
    assert (monitor.last.step, monitor.steps) == (steps - steps % 3, steps)
    passes = given.get("accumulate_grad_batches", 1)
    assert [layer.calls for layer in monitor.last.summary.layers] == [passes] * 2
    assert monitor.last.scalars["attention/learning_rate"] == 1e-2
    name = "attention/encoder.layers.0.self_attn/entropy"
    assert float(trained.callback_metrics[name]) == pytest.approx(monitor.last.scalars[name])


def test_lightning_writes_it_to_tensorboard(lightning: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = lightning.loggers.TensorBoardLogger(str(tmp_path))
    monitor = AttentionMonitor(every=3, **QUIET)
    fitted(lightning, monitor, logger=writer)
    found = events(tmp_path)
    name = "attention/encoder.layers.0.self_attn/entropy"
    assert [event.step for event in found.Scalars(name)] == [1, 3, 6]
    (*_, last) = found.Histograms(name)
    assert last.histogram_value.num == 2 * 40


def test_lightning_goes_on_from_a_checkpoint(lightning: Any, tmp_path: Path) -> None:
    given = {"max_logit": -1e9}
    first = AttentionMonitor(every=3, **given)
    with pytest.warns(AttentionWarning, match="large logit in 4 heads"):
        trained, _ = fitted(lightning, first, max_steps=4)
    trained.save_checkpoint(tmp_path / "four.ckpt")
    seen: list[Alarm] = []
    monitor = AttentionMonitor(every=3, **given, on_alarm=seen.append)
    fitted(lightning, monitor, ckpt_path=str(tmp_path / "four.ckpt"))
    assert monitor.last is not None
    assert monitor.last.step == 6
    assert seen == []


def test_an_exception_in_lightning_restores_everything(lightning: Any) -> None:
    before = F.scaled_dot_product_attention
    monitor = AttentionMonitor(every=1, **QUIET)
    with pytest.raises(ValueError, match="came off"):
        fitted(lightning, monitor, ValueError("came off"))
    assert F.scaled_dot_product_attention is before
    assert not _get_current_function_mode_stack()
    assert monitor.last is not None
    assert monitor.last.step == 1
