"""acutance.extend on the package's decoder, which was trained on windows of 128 bytes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from torch import Tensor

import acutance
from acutance.extending import proposals
from acutance.extending.page import page
from acutance.extending.record import Extension, Final, Tried
from acutance.judging import LawRemedy, Part
from acutance.report.screen import Screen
from acutance_lab.trained import decoder
from tests.contract.extending.test_extend import TRAINED, extend


def test_nothing_is_written_where_nothing_helps(windows: Tensor, tmp_path: Path) -> None:
    found = extend(windows, ["rope:linear,factor=4", "off:0.0"])
    assert found.chosen is None
    assert not found.helps
    assert found.save(tmp_path, decoder()) is None
    assert list(tmp_path.iterdir()) == []
    assert "Nothing that was tried lowers the loss" in page(found)


def test_proposals_are_tried_and_shown(windows: Tensor) -> None:
    """Every proposal gets one window, a third of them two, and the page shows them all."""
    names = [one.name for one in proposals(decoder(), TRAINED, 256)]
    assert len(names) == len(set(names)) > 12
    found = acutance.extend(decoder(), 256, windows[:4], train_length=TRAINED, by_head=False)
    assert {one.name for one in found.tried} == set(names)
    kept = -(-len(names) // 3)
    assert [one.windows for one in found.tried].count(1) == len(names) - kept
    shown = page(found)
    assert all(name in shown for name in names)
    assert "http" not in shown.replace("http-equiv", "")
    assert "<script" not in shown
    for one in found.finals:
        assert one.entropy[0][:2] == pytest.approx((1.0, 0.0), abs=1e-6)
    assert found["as it is"].entropy[-1][0] > TRAINED  # a window may read fewer keys
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_names_and_numbers_stay_whole_at_any_width(width: int) -> None:
    names = (
        "by head: size=2048,far=group,group=3,beyond=8192 in 154 heads, size=4096 in 116 heads",
        "rope:yarn,factor=2,original_max_position_embeddings=8192",
    )
    parts = [Part(1, 8192, d, 0.0437, d - 0.1, d + 0.1, 4.3871) for d in (0.0313, -2.2139)]
    finals = tuple(Final(name, *parts, (), ()) for name in ("as it is", *names))
    tried = (
        Tried(names[0], 2, 0.0, -2.1642, 0.074, True, 1.0),
        Tried(names[1], 1, 0.0313, -2.0579, None, False, 1.0),
    )
    result = Extension(
        16384,
        8192,
        LawRemedy(names[0], "ssmax"),
        finals,
        parts[1],
        tried,
        (),
        3,
        2,
        0.005,
        True,
        1.0,
    )
    stream = io.StringIO()
    Screen(file=stream, width=width).print(result.table())
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    pieces = [re.findall(r"[^,: ]+[,:]?", name) for name in names]
    whole = [piece for one in pieces for piece in one if len(piece) < 24]
    assert [piece for piece in whole if piece not in text] == []
    numbers = ["-2.1642 ± 0.074", "-2.0579", "*+0.0313", "-2.2139 ± 0.0437", "+0.0313 ± 0.0437"]
    assert [number for number in numbers if number not in text] == []
    assert "* not chosen: it raises the loss up to 8,192 tokens" in " ".join(text.split())
    (unchanged, *_) = [line for line in lines if line.startswith("as it is")]
    assert "±" not in unchanged
