"""What a law fitted to one text does on another: files that the shipped decoder never read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from scipy.stats import binom
from scipy.stats import t as student
from torch import Tensor

import acutance
from acutance.calibration import Law, Measured, measure
from acutance.experiments.models import texts

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
    values = [found.values(name) for name in found.modules]
    errors = [found.layers[name].difference(0) for name in found.modules]
    return torch.cat([v[1:] - v[:1] for v in values], 1), torch.cat([e[1:] for e in errors], 1)


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


def test_a_bound_is_exceeded_as_often_as_new_text_has_a_larger_maximum(
    model: LlamaForCausalLM, windows: dict[str, Tensor]
) -> None:
    """Of k + m windows that are alike the largest logit is in one of the m with m / (k + m)."""
    known, other = [windows["training"]], [windows["held out"][: WINDOWS // 4]]
    bound = 10.0
    law = acutance.calibrate(model, known, target="max_logit", value=bound, lengths=LENGTHS)
    assert law.worst() == 0.0 < 0.2 < law.worst(law=False)
    plain = measure(model, other, target="max_logit", lengths=LENGTHS).flat().amax(1)
    under = measure(model, other, target="max_logit", lengths=LENGTHS, law=law).flat().amax(1)
    assert int((plain > bound).sum()) >= len(plain) - 1
    # once in a thousand texts, were heads independent
    most = int(binom.ppf(0.999, len(under), 1 / 5))
    assert int((under > bound * (1 + 1e-5)).sum()) <= most < len(under)
