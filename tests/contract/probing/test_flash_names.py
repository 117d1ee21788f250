"""Every name under which transformers may register flash attention is read as flash attention."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, modeling_flash_attention_utils
from transformers.masking_utils import (
    AttentionMaskInterface,
    flash_attention_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import acutance
from tests.versions import CACHE, older

BUILT_IN = [name for name in AttentionInterface._global_mapping if "flash" in name]
# releases before 5.2 have no such tables
FALLBACK: dict[str, str] = getattr(modeling_flash_attention_utils, "FLASH_ATTN_KERNEL_FALLBACK", {})
VERSIONS = getattr(modeling_flash_attention_utils, "FLASH_ATTN_KERNEL_VERSIONS", {})
KERNELS = sorted({*FALLBACK.values(), *VERSIONS})
OTHERS = ["me/my-flash@v2:run", "kernels-community/attention-varlen"]
WINDOW, QUERIES, KEYS = 4, 3, 10


def test_transformers_has_names_to_test() -> None:
    assert len(BUILT_IN) >= 3
    assert len(KERNELS) >= 4 or older("transformers", "5.2")


def register(monkeypatch: pytest.MonkeyPatch, name: str, mask: Any, function: Any = None) -> None:
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, mask)
    if function is not None:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, function)


@pytest.mark.parametrize("name", [*KERNELS, *OTHERS])
def test_a_window_after_a_cache_is_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def kernel(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        queries, keys = query.shape[2], key.shape[2]
        row = torch.arange(keys - queries, keys)[:, None]
        column = torch.arange(keys)
        sees = (column <= row) & (column > row - given["sliding_window"])
        group = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        scores = (query @ key.mT * given["scaling"]).masked_fill(~sees, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    register(monkeypatch, name, flash_attention_mask, kernel)
    config = MistralConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
    )
    model = MistralForCausalLM(config).eval()
    monkeypatch.setattr(model.config, "_attn_implementation", name)
    ids = torch.randint(20, (2, KEYS))
    with torch.no_grad():
        plain = model(ids[:, :-QUERIES])
        cache = plain.past_key_values
        with acutance.probe(model, verify=True) as probe:
            model(ids[:, -QUERIES:], **{CACHE: cache})
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"verified"}
    place = summary.metrics.index("n_keys")
    assert (summary.moments.low[:, place], summary.moments.high[:, place]) == (
        pytest.approx(WINDOW),
        pytest.approx(WINDOW),
    )
    with torch.no_grad(), acutance.apply(model, acutance.scaling.LogN(2), windowed=True) as law:
        model(ids)
    assert sum(law.calls.values()) == 2


def test_a_broken_transformers_leaves_probes_of_plain_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", Broken("broken"))
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    with acutance.probe(model) as probe:
        model(*torch.randn(3, 1, 5, 8))
    assert probe.summary().layers[0].rows == 5
    with acutance.apply(model, acutance.scaling.LogN(2)) as law:
        model(*torch.randn(3, 1, 5, 8))
    assert sum(law.calls.values()) == 1
