"""Gates between heads' outputs: exact derivatives, windows chosen by the loss of other text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import acutance
from acutance.calibration import LossCalibration
from acutance.scaling import Window
from acutance_lab.trained import decoder
from tests.contract.calibration.test_gates import windows


def test_windows_and_factors_are_one_law(tmp_path: Path) -> None:
    batch = windows("training", 9, 256, 0)
    state = tmp_path / "state"
    given: dict[str, Any] = {
        "target": "loss", "lengths": [128, 256], "passes": 2, "window": Window(96, sinks=4)
    }  # fmt: skip
    law = acutance.calibrate(decoder(), batch, save=state, **given)
    assert isinstance(law, LossCalibration)
    assert len(law.slopes) == len(law.gates) == len(law.factors) == 12
    assert any(law.reads)
    _, laws = law.layers[0]
    assert laws.whole is not None
    assert laws.all_windows
    ones = replace(law, factors=((1.0,) * len(law.factors[0]),) * 12)
    said = " ".join(ones.sentences())
    assert "Every head has the factor 1" in said
    assert "keeps its last factor" not in said
    assert ("for the others no gain" in said) == (None in law.reads)
    ran: list[int] = []
    model = decoder()
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *_: ran.append(1))
    assert acutance.calibrate(model, batch, save=state, resume=True, **given) == law
    handle.remove()
    assert len(ran) == 2  # the layers are found twice; nothing else runs
    with pytest.raises(FileExistsError, match="state"):
        acutance.calibrate(decoder(), batch, save=state, **given)
