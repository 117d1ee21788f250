"""Planted faults are found and named, and the models that they are planted in are clean."""

from __future__ import annotations

import pytest

import acutance
from acutance.verification.inputs import KINDS
from tests.contract.verification.models import IDS, build

CLEAN = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "neox", "bert")


@pytest.mark.parametrize("kind", CLEAN)
def test_a_model_without_a_fault_has_no_finding(kind: str) -> None:
    names = ("eager", "sdpa") if kind in ("llama", "bert") else ("eager",)
    kinds = [each for each in KINDS if (kind, each) != ("gpt_oss", "packed")]
    found = acutance.verify(build(kind), IDS, implementations=names, kinds=kinds, backward=True)
    assert found.ok, str(found)
    made = {check.name for check in found.checks}
    assert {"arguments", "output", "gradients"} <= made
    assert ("positions" in made) == (kind != "bert")
    assert "cache" in made or kind == "bert"
    assert not [note for note in found.notes if "not checked" in note], found.notes
