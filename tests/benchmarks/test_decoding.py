"""benchmarks/decoding.py: plans are checked before they are timed, and their bytes are counted."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from torch import Tensor

from benchmarks import decoding


def test_attention_is_checked_and_timed_for_every_plan() -> None:
    given = Namespace(dtype="float32", batch=1, layers=2, rounds=1)
    rows = {row["plan"]: row for row in decoding.attention(given, 256)}
    assert set(rows) == {"transformers", "full, with statistics", *decoding.plans(2)}
    shares = {name: row["bytes"] for name, row in rows.items()}
    assert shares["transformers"] == 1.0
    assert shares["4 bits"] < shares["8 bits"] < shares["half of the heads stream"] < 1.0
    assert 1.0 <= shares["full"] < 1.02  # room for 1/64 more tokens
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert rows["full"]["ratio"] == 1.0


class Off(decoding.Planned):
    """Plans whose outputs are too large by a thousandth."""

    def step(self, *given: Tensor) -> list[Tensor]:
        return [1.001 * output for output in super().step(*given)]


def test_an_output_that_is_off_ends_the_run() -> None:
    keys = torch.ones(1, decoding.HEADS, 40, decoding.WIDTH)
    plan = [(decoding.FULL,) * decoding.HEADS]
    new = [torch.randn(1, heads, 1, decoding.WIDTH) for heads in (9, 3, 3)]
    decoding.Planned(plan, lambda layer: (keys, keys)).check(*new)
    with pytest.raises(SystemExit, match=r"the output is off by 0\.00"):
        Off(plan, lambda layer: (keys, keys)).check(*new)
