"""Whose losses a state holds: changes with equal texts, and another command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import acutance
from acutance import scaling
from acutance.judging import judge
from acutance.reproduce import decoder


def test_learned_scalings_of_one_kind_are_not_confused() -> None:
    model = decoder()
    laws = {}
    for name, value in (("weak", 0.2), ("strong", 2.0)):
        law = scaling.LearnedASEntmax(num_heads=4)
        with torch.no_grad():
            for parameter in law.parameters():
                parameter.fill_(value)
        laws[name] = law
    windows = torch.randint(100, (6, 48), generator=torch.Generator().manual_seed(0))
    together = judge(model, windows, laws)
    alone = [judge(model, windows, {name: law}).laws[0] for name, law in laws.items()]
    assert [law.delta for law in together.laws] == [law.delta for law in alone]
    assert together.laws[0].delta != together.laws[1].delta


def test_a_state_of_another_command_is_called_what_it_is(tmp_path: Path) -> None:
    model, state = decoder(), tmp_path / "state"
    windows = torch.randint(100, (6, 48), generator=torch.Generator().manual_seed(0))
    judge(model, windows, "ssmax", save=state)
    with pytest.raises(ValueError, match="no search to resume: it contains a comparison to resume"):
        acutance.extend(model, 48, windows, train_length=16, save=state, resume=True)
    with pytest.raises(ValueError, match=r"no search for a plan .*contains a comparison to resume"):
        acutance.budget(model, windows, save=state, resume=True)
