"""Files that version 0.1.0 wrote still load, and say what they said.

They are of the decoder that comes with the package: two heads on eight windows of 16 tokens for the
state, its table and the queries and keys; lengths 8 to 32 for the law and its calibration.
"""

from __future__ import annotations

import json

import safetensors.torch

from acutance.calibration.fit.progress import Progress
from acutance.probing import load, load_state
from acutance.report.exports import csv_bytes
from tests.contract.test_saved_by_0_1_0 import SAVED


def test_a_state() -> None:
    state = load_state(SAVED / "state.safetensors")
    summary = load(SAVED / "state.safetensors")
    assert state.run.tokens == 120
    assert summary.about["acutance"] == "0.1.0"
    assert csv_bytes(summary.to_arrow()) == (SAVED / "state.csv").read_bytes()


def test_a_calibration_under_way() -> None:
    with safetensors.safe_open(SAVED / "calibration.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["settings"])
    progress = Progress.resume(SAVED / "calibration.safetensors", settings)
    assert len(progress.passes) == 2
