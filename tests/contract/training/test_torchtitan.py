"""AttentionMonitor in torchtitan's step, with its Llama, optimisers, loss, checkpoints and logger.

Its ``Trainer`` needs a GPU. The step here does what its ``train_step`` does, with the attention of
torchtitan that has a backward pass on a CPU, which is scaled dot-product attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.training import AttentionMonitor

pytest.importorskip(
    "torchtitan", reason="torchtitan is in the extra integrations: make integrations"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # what torchtitan warns of is its own
STEPS = pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
TAG = "attention/layers.0.attention.inner_attention/entropy"


def llama() -> Any:
    """Two layers of torchtitan's Llama 3, activations of each block checkpointed."""
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    FullAC.Config().build().apply(model)
    return model.train()


def train(steps: int, folder: Path, monitor: dict[str, Any] | None) -> Any:
    """Losses, weights and the monitor after some steps of two accumulated batches."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import TensorBoardLogger
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed.utils import clip_grad_norm_

    model = llama()
    optimizers = default_adamw(lr=8e-4).build(model_parts=[model])
    criterion = CrossEntropyLoss.Config().build()
    logger = TensorBoardLogger(str(folder))
    attached = None
    if monitor is not None:
        attached = AttentionMonitor(log=logger.log, **monitor).attach(model, optimizers)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizers.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 2048, (2, 17), generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                pred = model(tokens[:, :-1])
            loss, _ = criterion(pred, tokens[:, 1:], torch.tensor(4 * 16))
            loss.backward()
            losses.append(loss.item())
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        with torch.no_grad():  # validation
            model(tokens[:, :-1])
    logger.close()
    if attached is not None:
        attached.close()
    return losses, model.state_dict(), attached


@STEPS
def test_its_losses_are_equal_and_its_logger_has_the_numbers(steps: int, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    quiet = {"every": 2, "false_alarms": None}
    losses, weights, _ = train(steps, tmp_path / "plain", None)
    same, others, monitor = train(steps, tmp_path / "watched", quiet)
    assert losses == same
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())
    layer = monitor.last.summary.layers[0]
    assert (layer.calls, layer.rows) == (2, 64), "no validation and nothing recomputed"
    stored = events.EventAccumulator(str(tmp_path / "watched")).Reload().Scalars(TAG)
    assert [event.step for event in stored] == [1, *range(2, steps + 1, 2)]
    assert stored[-1].value == pytest.approx(monitor.last.scalars[TAG], rel=1e-6)
