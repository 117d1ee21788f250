"""Files that version 0.1.0 wrote still load, and say what they said.

They are of the decoder that comes with the package: two heads on eight windows of 16 tokens for the
state, its table and the queries and keys; lengths 8 to 32 for the law and its calibration.
"""

from __future__ import annotations

import pytest

from acutance import Law
from acutance.files import holds_state
from acutance.probing import load, load_state
from acutance.report.exports import csv_bytes
from tests.contract.test_saved_by_0_1_0 import SAVED


def test_a_state() -> None:
    state = load_state(SAVED / "state.safetensors")
    summary = load(SAVED / "state.safetensors")
    assert state.run.tokens == 120
    assert summary.about["acutance"] == "0.1.0"
    assert csv_bytes(summary.to_arrow()) == (SAVED / "state.csv").read_bytes()


def test_a_calibration_under_way_is_not_overwritten() -> None:
    """It is not continued any more, but no other file takes its place unasked."""
    state = SAVED / "calibration.safetensors"
    assert holds_state(state)
    with pytest.raises(FileExistsError, match="contains a saved state"):
        Law.load(SAVED / "law.json").save(state)
