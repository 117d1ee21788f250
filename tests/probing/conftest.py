"""The models of the contract, and a reader that reads wrongly."""

from __future__ import annotations

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
    from acutance.capture.readers.huggingface import InterfaceCall

    original = InterfaceCall.read

    def read(function: Any, implementation: str, name: str, args: Any, kwargs: Any) -> Any:
        return original(InterfaceCall(function, implementation, args, kwargs), name)

    def use(reading: Callable[..., Any]) -> None:
        def read_by_test(call: InterfaceCall, name: str) -> Any:
            tensors = call.query, call.key, call.value, call.mask
            rest = name, (call.module, *tensors), call.kwargs
            return reading(read, call.function, call.implementation, *rest)

        monkeypatch.setattr(InterfaceCall, "read", read_by_test)

    return use
