"""Every name under which transformers may register flash attention is read as flash attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    flash_attention_mask,
    sdpa_mask,
)
from transformers.utils.generic import TransformersKwargs

from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall, uses_flash_masks
from tests.contract.probing.test_flash_names import (
    BUILT_IN,
    KERNELS,
    KEYS,
    OTHERS,
    QUERIES,
    WINDOW,
    register,
)


@pytest.mark.parametrize("prefix", ["", "paged|"])
@pytest.mark.parametrize("name", [*BUILT_IN, *KERNELS, *OTHERS])
def test_masks_of_flash_attention(monkeypatch: pytest.MonkeyPatch, name: str, prefix: str) -> None:
    register(monkeypatch, name, flash_attention_mask)
    query, key = torch.zeros(1, 2, QUERIES, 8), torch.zeros(1, 2, KEYS, 8)
    given = {"attention_mask": None, "is_causal": True, "sliding_window": WINDOW}
    arguments = (nn.Identity(), query, key, key)
    call = InterfaceCall(torch.nn.functional.relu, prefix + name, arguments, given)
    for offset, window in (
        (call.read("layer").query_offset, call.read("layer").window),  # what a probe reads
        (call.masks()["query_offset"], call.masks()["window"]),  # what a law reads
    ):
        assert (offset, window) == (KEYS - QUERIES, WINDOW)


def test_a_kernel_with_the_masks_of_sdpa_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "kernels-community/metal-flash-sdpa"  # named flash, given 4-d masks
    register(monkeypatch, name, sdpa_mask)
    assert name in ALL_MASK_ATTENTION_FUNCTIONS
    assert not uses_flash_masks(name)
    assert not uses_flash_masks("paged|eager")


def test_keywords_of_every_model_are_known() -> None:
    """Else a call that differs for another reason would be blamed on them."""
    assert not set(TransformersKwargs.__annotations__) - huggingface._KNOWN
