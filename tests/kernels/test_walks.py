"""How many files and functions a call of attention crosses on its way to a metric."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import acutance
from acutance.attend import attention, row_statistics
from acutance.kernels import library

ROOT = str(Path(acutance.__file__).parent)
QUERY, KEY, VALUE = torch.randn(3, 1, 2, 16, 16)
LEARNED = QUERY.clone().requires_grad_()
PADDING = torch.arange(16)[None] < 13
JOURNEYS = {
    "plain": (lambda: attention(QUERY, KEY, VALUE, return_stats=True)[1].entropy, 5, 13),
    "statistics": (lambda: row_statistics(QUERY, KEY).entropy, 5, 13),
    "gradient": (lambda: attention(LEARNED, KEY, VALUE, return_stats=True)[1].entropy, 10, 50),
    "backward": (
        lambda: attention(LEARNED, KEY, VALUE, return_stats=True)[1].entropy.sum().backward(),
        9,
        50,
    ),
    "key_mask": (
        lambda: attention(QUERY, KEY, VALUE, key_mask=PADDING, return_stats=True)[1].entropy,
        10,
        50,
    ),
}


def walk(journey: Callable[[], object]) -> list[tuple[str, str]]:
    """Files and functions of acutance that a journey enters, in order, once all is imported."""
    journey()
    entered = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            entered.append((frame.f_code.co_filename[len(ROOT) + 1 :], frame.f_code.co_name))

    sys.setprofile(enter)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.skipif(isinstance(library.load(), str), reason="the native kernel is absent")
@pytest.mark.parametrize("name", JOURNEYS)
def test_a_call_takes_few_steps(name: str) -> None:
    journey, files, calls = JOURNEYS[name]
    entered = walk(journey)
    assert len({file for file, _ in entered}) <= files, entered
    assert len(entered) <= calls, entered
