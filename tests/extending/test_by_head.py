"""Laws by head: one backward pass for all heads, decided by the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.calibration.losses import NextToken
from acutance.capture.find_layers import attention_layers
from acutance.extending.search import head_slopes, mixed, with_temperature
from acutance.scaling import HeadTable, Window
from acutance_lab.trained import decoder
from tests.contract.extending.test_by_head import TRAINED


def test_a_slope_is_the_derivative_of_the_loss(windows: Tensor) -> None:
    """Against two changes of one head, so small that the loss is nearly linear in them."""
    model, loss = decoder().double(), NextToken()
    best, batch = Window(64, far="group", group=4, beyond=TRAINED), {"input_ids": windows[:1, :256]}
    two = [(HeadTable([factor]), best) for factor in (1.01, 0.99)]
    slopes = head_slopes(model, loss, batch, best, two)
    for name, head in (next(iter(slopes)), 1), (list(slopes)[-1], 3):
        change = []
        for other in two:
            law: dict[Any, Any] = {(one, each): best for one in slopes for each in range(4)}
            with acutance.apply(model, law | {(name, head): other}):
                change.append(float(loss.score(model, batch).loss[0, 1:].mean()))
        found = slopes[name][:, head].sum(-1)
        assert float(found[0] - found[1]) == pytest.approx(change[0] - change[1], rel=0.01)


def test_only_heads_that_read_all_keys_get_a_temperature() -> None:
    """Where some heads drop keys, and the derivative promises a gain in all."""
    model, best, drops = decoder(), Window(64, far="group", beyond=TRAINED), Window(64)
    warm = with_temperature(best, TRAINED, 512)
    assert warm is not None
    assert with_temperature(drops, TRAINED, 512) is None
    slopes = {name: torch.full((2, 4, 16), -1.0) for name in attention_layers(model)}
    for part in slopes.values():
        part[0, 2:] = 1.0  # heads 0 and 1 gain by dropping keys, 2 and 3 by reading them all
    laws = mixed(model, best, [drops, warm], slopes, [0.0], TRAINED, 512)
    assert laws[-1].name.endswith("; sharper in 6, softer in 0")
    assert isinstance(laws[-1].law, acutance.Law)
    for _, heads in laws[-1].law.layers:
        assert {head: window.far for head, window in heads.windows} == {
            0: "drop", 1: "drop", 2: "group", 3: "group",
        }  # fmt: skip
        assert {head for head, _ in heads.heads} == {2, 3}
