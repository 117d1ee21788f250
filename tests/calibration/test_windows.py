"""A law of windows on a model: every row against a dense reference, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from torch import nn

from acutance import scaling
from acutance.calibration import Law, LawError
from acutance.calibration.law import named_law
from acutance.scaling import Window
from tests.contract.calibration.test_windows import Built


@pytest.fixture(scope="module")
def llama(built: Built) -> nn.Module:
    return copy.deepcopy(built("llama", "sdpa")).double()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": "window"}, "the window of 'everywhere' is invalid: window needs size"),
        ({"name": "window", "size": 4, "sink": 1}, "window has no 'sink': its parameters are size"),
        ([{"name": "window", "size": 4}] * 2, "must be a scaling, then a window"),
        ([{"name": "window", "size": 4}], "must be a JSON object or a list of two"),
        (
            [[{"name": "ssmax"}, {"name": "window", "size": 4}], {"name": "window", "size": 4}],
            "the law of 'everywhere' must be .* a scaling, then a window",
        ),
    ],
)
def test_bad_files(llama: nn.Module, tmp_path: Any, change: Any, match: str) -> None:
    from acutance.from_json import sealed_json

    record = Law.of(llama, Window(4)).record() | {"everywhere": change}
    path = tmp_path / "law.json"
    path.write_text(json.dumps(sealed_json(record)), encoding="utf-8")
    with pytest.raises(LawError, match=match):
        Law.load(path)


def test_laws_by_name() -> None:
    text = "window:size=40,sinks=4,sink_positions=window,far=group,group=2,beyond=80"
    window = Window(40, 4, "window", "group", 2, 80)
    assert named_law(text) == window
    assert named_law(f"log_n:train_length=512+{text}") == (scaling.LogN(train_length=512), window)
    assert named_law("ssmax+window:size=4") == (scaling.SSMax(), Window(4))
    for wrong, match in {
        "window": "window needs size, for example window:size=1024",
        "window:size=-1": "window: size must be at least 1, got -1",
        "window:size=x": "size must be a number, got .x.",
        "window:size=4,far=near": "far must be drop or clamp or group, got 'near'",
        "window:size=4+window:size=5": "a plus sign joins one scaling and one window",
    }.items():
        with pytest.raises(ValueError, match=match):
            named_law(wrong)
