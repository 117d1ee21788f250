"""What a law fitted to one text does on another: files that the shipped decoder never read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor

import acutance
from acutance.calibration import Law, Measured, measure
from acutance_lab import texts

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LENGTHS = [128, 256]
WINDOWS = 32


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    pytest.importorskip("transformers")
    from acutance.reproduce import decoder

    return decoder()


@pytest.fixture(scope="module")
def windows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    parts: tuple[texts.Part, ...] = ("training", "held out")
    return {
        part: texts.sample_windows(texts.read(texts.files(part)), LENGTHS[-1], WINDOWS, generator)
        for part in parts
    }


def difference(found: Measured) -> tuple[Tensor, Tensor]:
    """Values beyond the reference less those at it, and the standard errors, (lengths, heads)."""
    first = torch.zeros(found.value.shape[1], dtype=torch.int64)
    return found.value[1:] - found.value[:1], found.error(first)[1:]


@pytest.mark.slow
def test_entropy_is_held_on_files_that_were_not_read(
    model: LlamaForCausalLM, windows: dict[str, Tensor]
) -> None:
    """A head's entropy at twice the length is off by no more than both texts' noise."""
    known, other = [windows["training"]], [windows["held out"]]
    law = acutance.calibrate(model, known, lengths=LENGTHS)

    def off(under: Law | None) -> Tensor:
        of_fit = difference(measure(model, known, lengths=LENGTHS, law=under))[1]
        change, error = difference(measure(model, other, lengths=LENGTHS, law=under))
        return (change / torch.hypot(of_fit, error)).abs()

    before, after = off(None), off(law)
    most = student.ppf(1 - 0.001 / 2 / after.numel(), WINDOWS - 1)
    assert float(after.max()) < most < float(before[-1].median())
