"""A law leaves no trace on the model that it was applied to, nor on copies made meanwhile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance import scaling
from tests.versions import any_global_hook

LAW = scaling.SSMax(s=0.6)
Built = Callable[..., nn.Module]


def logits(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def traces(model: nn.Module) -> list[Any]:
    """Everything a law might leave behind."""
    from transformers.modeling_utils import AttentionInterface

    kept: list[Any] = [AttentionInterface.get_interface, F.scaled_dot_product_attention]
    kept.append(torch._C._len_torch_function_stack())
    kept.append(any_global_hook())
    for module in model.modules():
        kept.append(sorted(vars(module)))
        kept.append([len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")])
    return kept


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_restore_leaves_no_trace(built: Built, ids: Tensor, name: str) -> None:
    model = built(name)
    before, plain = traces(model), logits(model, input_ids=ids)
    applied = acutance.apply(model, LAW)
    scaled = logits(model, input_ids=ids)
    assert not torch.equal(scaled, plain)
    applied.restore()
    applied.restore()
    assert torch.equal(logits(model, input_ids=ids), plain)
    assert traces(model) == before
    with pytest.raises(acutance.ApplyError, match="was removed from its model"), applied:
        pass


def test_an_error_inside_the_model_restores(built: Built, ids: Tensor) -> None:
    model = built("llama")
    before = traces(model)
    with pytest.raises(IndexError, match="out of range"), acutance.apply(model, LAW):
        model(input_ids=ids + 1000)
    assert traces(model) == before


def test_a_copy_made_meanwhile_is_free(built: Built, ids: Tensor) -> None:
    model = built("llama")
    plain = logits(model, input_ids=ids)
    with acutance.apply(model, LAW):
        logits(model, input_ids=ids)
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin, input_ids=ids), plain)


def test_a_model_is_saved_whole_meanwhile(built: Built, ids: Tensor) -> None:
    """What is read back has no law and runs where the law is, or is not, in force."""
    model = built("llama")
    plain, before = logits(model, input_ids=ids), traces(model)
    with acutance.apply(model, LAW):
        written = pickle.dumps(model)
        twin = pickle.loads(written)
        assert torch.equal(logits(twin, input_ids=ids), plain)
        assert not torch.equal(logits(model, input_ids=ids), plain)
    assert torch.equal(logits(pickle.loads(written), input_ids=ids), plain)
    assert traces(model) == before
