"""Position-free global layers: which layers a law reaches, and how differences become verdicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import acutance
from acutance.scaling import ClipLogN, Window
from acutance_lab import experiment, trained
from acutance_lab.experiments import text_models as swan
from acutance_lab.record import judge

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hybrid_model() -> PreTrainedModel:
    text = torch.randint(256, (400,), dtype=torch.uint8)
    configuration = trained.hybrid_configuration(16, 32, position_free=True)
    return trained.train("hybrid", configuration, 0, text, length=16, steps=2, batch=2)


@pytest.mark.parametrize("law", [ClipLogN(train_length=16), Window(16)])
def test_laws_change_the_position_free_layer_only(law: ClipLogN | Window) -> None:
    model = hybrid_model()
    ids = torch.randint(256, (1, 64))
    with torch.no_grad(), acutance.apply(model, law) as applied:
        model(input_ids=ids)
    assert list(applied.calls) == ["model.layers.3.self_attn"]


def test_only_the_global_layer_has_no_positions() -> None:
    model = hybrid_model()
    rotating = [layer.self_attn.use_rope for layer in model.model.layers]
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert rotating == [1, 1, 1, 0]
    assert windows == [16 // 4] * 3 + [None]
    everywhere = trained.hybrid_configuration(16, 32, position_free=False)
    assert everywhere.no_rope_layers == [1] * 4
    assert set(everywhere.layer_types) == {"full_attention"}


def test_a_law_with_one_coefficient_is_one_plus_c_log_n() -> None:
    factor = swan.growing([64, 128, 256], 0.3).factor(torch.tensor([5, 64, 128, 256]))
    expected = [1.0, 1.0, 1 + 0.3 * math.log(2), 1 + 0.3 * math.log(4)]
    torch.testing.assert_close(factor, torch.tensor([expected] * 4))


def losses(change: float, seed: int) -> Tensor:
    """(3 lengths, 40 windows) around 1, changed beyond the first length."""
    noise = torch.randn(40, generator=torch.Generator().manual_seed(seed)).double()
    base = 1 + 0.1 * noise.expand(3, 40)
    return base + torch.tensor([0.0, change, 2 * change])[:, None]


def test_verdicts_follow_the_sign_of_paired_differences() -> None:
    changes = {
        swan.NONE: 0.1, swan.CLIPPED: 0.05, swan.LLAMA: 0.2, swan.ENTROPY: 0.08, swan.LOSS: 0.01,
        swan.WINDOW: 0.0,
    }  # fmt: skip
    found = {
        (swan.HYBRID, law): [losses(change, 0), losses(change + 1e-4, 1)]
        for law, change in changes.items()
    }
    found[swan.ROPE, swan.NONE] = [losses(0.5, 0)]
    claims = {claim.key: claim for claim in swan.swan.claims}
    rows = list(experiment.rows(claims.values(), swan.of_all_seeds(found)))
    verdicts = {
        key: judge(claim, rows).kind
        for key, claim in claims.items()
        if key not in ("spreads", "same")
    }
    assert verdicts == {
        "log_n": "does not hold", "free": "does not hold", "robust": "holds", "llama4": "holds",
        "loss": "holds", "entropy": "does not hold", "window": "holds",
    }  # fmt: skip
    assert judge(claims["log_n"], rows).decided
    (last,) = [row for row in rows if row.claim == "window"]
    assert last.condition["law"] == swan.LOSS
    assert last.measured == pytest.approx(-0.02, abs=2e-3)


def test_errors_contain_the_spread_over_windows_and_seeds() -> None:
    first, second = torch.tensor([1.0, 3.0]).double(), torch.tensor([2.0, 6.0]).double()
    found = swan.over_seeds([first, second])
    windows, seeds = torch.tensor([1.5, 4.5]), torch.tensor([2.0, 4.0])
    assert found.value == 3.0
    assert found.error == pytest.approx(math.sqrt(float(windows.var() / 2 + seeds.var() / 2)))
    assert swan.over_seeds([first]).error == pytest.approx(1.0)
