"""AttentionMonitor in litgpt's own pretraining loop."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.training import AttentionMonitor

litgpt = pytest.importorskip(
    "litgpt", reason="litgpt needs an environment of its own: make integrations"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # what litgpt and Lightning warn of is theirs
STEPS = pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
MODELS = {
    "Llama": {},
    "Gemma 2": {"attention_logit_softcapping": 50.0, "sliding_window_size": 4},
}


def pretrain(
    folder: Path, steps: int, given: dict[str, Any], monitor: dict[str, Any] | None
) -> tuple[AttentionMonitor | None, Any, list[float]]:
    """Run ``litgpt.pretrain.fit`` for some steps of two batches; monitor, weights, losses."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.pretrain import fit

    logger = CSVLogger(str(folder), name="run")
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger])
    fabric.seed_everything(3)
    config = litgpt.Config(
        block_size=12, vocab_size=40, padded_vocab_size=40, n_layer=2, n_head=4, n_embd=16,
        n_query_groups=2, rotary_percentage=1.0, norm_class_name="RMSNorm", bias=False,
        mlp_class_name="LLaMAMLP", intermediate_size=32, **given,
    )  # fmt: skip
    model = fabric.setup(litgpt.GPT(config))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))
    attached = None
    if monitor is not None:
        attached = AttentionMonitor(log=fabric.log_dict, **monitor).attach(model, optimizer)
    rows = torch.randint(0, 40, (8, 13), generator=torch.Generator().manual_seed(1))
    batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=2))
    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    train = TrainArgs(
        global_batch_size=4,
        micro_batch_size=2,
        max_tokens=steps * 2 * 2 * 12,
        max_norm=1.0,
        save_interval=None,
        lr_warmup_steps=2,
        log_interval=1,
    )
    fit(
        fabric=fabric,
        devices=1,
        state=state,
        train_dataloader=batches,
        val_dataloader=batches,
        out_dir=folder,
        tokenizer_dir=None,
        train=train,
        eval=EvalArgs(interval=2, max_iters=1, initial_validation=False),
    )
    logger.save()
    if attached is not None:
        attached.close()
    losses = [float(row["loss"]) for row in stored(folder) if row.get("loss")]
    return attached, model.state_dict(), losses


def stored(folder: Path) -> list[dict[str, str]]:
    """Rows of the CSV file that Fabric's logger wrote."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@STEPS
@pytest.mark.parametrize("name", MODELS)
def test_its_losses_are_equal_and_its_logger_has_the_numbers(
    name: str, steps: int, tmp_path: Path
) -> None:
    quiet = {"every": 2, "false_alarms": None}
    _, weights, losses = pretrain(tmp_path / "plain", steps, MODELS[name], None)
    monitor, others, same = pretrain(tmp_path / "watched", steps, MODELS[name], quiet)
    assert len(losses) == steps
    assert losses == same
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())
    tag = "attention/transformer.h.0.attn/entropy"
    entropy = {
        int(row["step"]): float(row[tag]) for row in stored(tmp_path / "watched") if row[tag]
    }
    assert sorted(entropy) == [1, *range(2, steps + 1, 2)]
    assert monitor is not None
    assert monitor.last is not None
    assert entropy[steps] == pytest.approx(monitor.last.scalars[tag], rel=1e-12)
    layer = monitor.last.summary.layers[0]
    assert (layer.calls, layer.rows) == (2, 48), "two accumulated batches, no validation"
