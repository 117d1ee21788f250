"""Attention written out by hand: which softmaxes are attention, and where their heads are."""

from __future__ import annotations

import pytest
import torch

import acutance
from acutance.capture.head_axis import fold
from tests.contract.probing.test_softmaxes import (
    Written,
    in_windows,
    inputs,
)


def test_five_dimensions_without_a_number_of_heads_are_listed() -> None:
    with pytest.raises(
        ValueError, match=r"not known which dimension of its softmax \(2, 3, 4, 5, 6\) is heads"
    ):
        fold(torch.zeros(2, 3, 4, 5, 6), None)
    model = Written(in_windows, heads=None)
    with pytest.raises(acutance.ProbeError, match="it is not known which dimension of its softmax"):  # noqa: SIM117
        with acutance.probe(model):
            model(*inputs())
