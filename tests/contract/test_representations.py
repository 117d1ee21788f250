"""What a notebook shows of a result: one line, or one table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import acutance
from acutance import scaling
from acutance.caching import CachePlan, HeadPlan
from acutance.calibration import Law, LossCalibration
from acutance.training import AttentionMonitor
from tests.contract.trained import decoder, directory


@pytest.fixture(scope="module")
def windows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 100, (6, 1, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one} for one in ids]


def test_results_are_shown_in_one_line(windows: list[Any]) -> None:
    model = decoder()
    law = acutance.calibrate(model, windows, lengths=(16, 32), passes=2)
    shown = [
        repr(law),
        repr(Law.of(model, {(0, 1): scaling.LogN(train_length=64)})),
        repr(CachePlan.of(model, {(0, 1): HeadPlan("streaming", first=4, recent=12)})),
        repr(
            acutance.budget(
                model, windows, keep=0.9, plans=[HeadPlan("streaming", first=2, recent=6)]
            )
        ),
        repr(acutance.verify(model, windows[0])),
        repr(acutance.load_model(directory())),
        repr(AttentionMonitor(10)),
        repr(acutance.compare(["identity"], n=8, d=16)),
    ]
    for text in shown:
        assert text.startswith("<"), text
        assert "\n" not in text
        assert len(text) < 400, text
        assert " at 0x" not in text, text
    assert "fitted at 16, 23, 32 tokens" in shown[0]
    assert LossCalibration.__repr__ is Law.__repr__


def test_metrics_are_a_table() -> None:
    lines = repr(acutance.METRICS).splitlines()
    assert [line.split()[0] for line in lines] == list(acutance.METRICS)
    assert all("nat" in line for line in lines if line.startswith("entropy "))
