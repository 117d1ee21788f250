"""Laws fitted to the loss: exact derivatives, steps that help, nothing changed by noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import acutance
from acutance.calibration.by_loss.result import sentences as by_loss_sentences
from acutance.calibration.fit.result import sentences
from acutance_lab.trained import decoder


@pytest.mark.parametrize("target", ["entropy", "loss"])
def test_untrained_weights_are_said_as_a_probe_says_them(
    built: Callable[[str, str], torch.nn.Module], target: str, tmp_path: Path
) -> None:
    tokens = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    model = built("llama", "sdpa")
    for part in model.modules():
        if "Norm" in type(part).__name__:
            part.weight.data.fill_(1.0)
    trained = decoder()
    for one, is_random in ((model, True), (trained, False)):
        with acutance.probe(one) as probe, torch.no_grad():
            one(tokens)
        assert probe.summary().about.get("untrained", False) is is_random
        found = acutance.calibrate(
            one, list(tokens.split(1)), target=target, lengths=[16, 32], passes=2
        )
        assert found.untrained is is_random
        words = by_loss_sentences if target == "loss" else sentences
        assert any(line.startswith("Untrained: ") for line in words(found)) is is_random
        *_, last = words(found)
        assert ("can raise the loss of another" in last) is not getattr(found, "empty", False)
        found.save(tmp_path / "law.json")
        again = acutance.Law.load(tmp_path / "law.json")
        assert again.untrained is is_random
        assert ("untrained" in again.record()) is is_random  # older releases read other laws
