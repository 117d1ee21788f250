"""Which rows count: a mask over tokens says what is padding, not the keys that no row selects."""

from __future__ import annotations

import json
from typing import Any

import torch

import acutance
from acutance.capture.padding import PaddingMask
from tests.contract.probing.test_padding import (
    REAL,
    TOKENS,
    Masked,
    Sparse,
    one,
)


def test_every_output_says_what_was_left_out_and_why(tmp_path: Any) -> None:
    from io import StringIO

    from rich.console import Console

    from acutance.report import console_table
    from acutance.report.html_page.data import packed
    from tests.page_data import unpack

    model, x = Sparse(), torch.randn(2, TOKENS, 8)
    summary = one(model, x, mask=REAL, probe={"rows": torch.arange(TOKENS) > 1})
    again = acutance.load(_saved(summary, tmp_path))
    assert again.layers == summary.layers
    columns = again.columns()
    assert [columns[name] for name in ("padded", "padded_by", "excluded", "unseen")] == [
        [5], ["mask"], [4], [0],
    ]  # fmt: skip
    (layer,) = json.loads(json.dumps(again.to_dict()))["layers"]
    assert (layer["padded"], layer["padded_by"], layer["excluded"]) == (5, "mask", 4)
    console = Console(width=200, record=True, file=StringIO())
    console.print(console_table(again))
    told = console.export_text()
    assert "left out: 5 padded (by mask), 0 that see no key, 4 not selected." in told
    (layer,) = unpack(packed(again))[0]["layers"]
    assert (layer["padded"], layer["padded_by"], layer["excluded"]) == (5, "mask", 4)

    summary = one(Masked((torch.arange(TOKENS) < 8)[None]), x)
    console.print(console_table(summary))
    assert "6 belong to tokens that no row sees" in console.export_text()


def _saved(summary: Any, folder: Any) -> str:
    path = str(folder / "state.safetensors")
    summary.save(path)
    return path


def test_masks_over_tokens_are_of_the_modules_that_run() -> None:
    mask = PaddingMask(REAL, "mask", past=None)
    assert mask.rows(2, TOKENS + 1, TOKENS + 1) is None
    assert torch.equal(mask.rows(2, 3, TOKENS), REAL[:, -3:])
    assert PaddingMask(REAL, "mask", past=2).rows(2, 3, 64).tolist() == REAL[:, 2:5].tolist()
