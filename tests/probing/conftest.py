"""The models of the contract, and a reader that reads wrongly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.probing.conftest import (
    case,
    entropies,
    gpt2_models,
    left_padding,
    llama_models,
    minilm,
    random_tokens,
    reference,
    translator,
)

__all__ = [
    "case",
    "entropies",
    "gpt2_models",
    "left_padding",
    "llama_models",
    "minilm",
    "random_tokens",
    "reference",
    "translator",
    "read_by",
]


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Have calls of transformers' models read by a function of the reader and its arguments.

    No release of transformers passes what the reader gets wrong, or the reader would be mended.
    """
    from acutance.capture.readers import huggingface

    read = huggingface.read_interface_call

    def use(reading: Callable[..., Any]) -> None:
        monkeypatch.setattr(huggingface, "read_interface_call", functools.partial(reading, read))

    return use
