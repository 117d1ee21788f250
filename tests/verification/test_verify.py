"""verify: what it compares, what it leaves out, and how it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import acutance
from acutance import testing
from acutance.verification.expectation import configured_rope, windows_of
from acutance.verification.inputs import KINDS
from tests.contract.verification.models import IDS, build

ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "long_factor": [4.0] * 8,
        "short_factor": [1.5] * 8,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    config = build("llama", rope_parameters=parameters).config
    rope = configured_rope(config, None, 16)
    assert rope is not None
    for length in (16, 900):
        rates, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        torch.testing.assert_close(rope.frequencies(length).float(), rates, rtol=1e-5, atol=1e-9)
        assert rope.attention_factor == pytest.approx(factor)


def test_every_kind_of_input_is_read() -> None:
    found = acutance.verify(build("llama"), IDS)
    assert {check.inputs for check in found.checks} == set(KINDS)


def test_a_configuration_with_two_texts_has_no_window() -> None:
    class Config:
        def get_text_config(self) -> Any:
            raise ValueError("there are two")

    assert windows_of(Config()) == set()


def test_the_command_names_implementations_with_one_option() -> None:
    done = testing.run(["verify", "--attention", "sdpa"])
    assert done.exit_code == 2
    assert "--implementations" in done.err
