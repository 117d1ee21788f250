"""A kernel whose queries no parameter names: a law says that it cannot scale them."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import acutance
from acutance.calibration import ApplyError
from acutance.capture.kernel_functions import calls


def flash_attn_func(*, causal: bool = False, **tensors: Tensor) -> Tensor:
    """Attention whose queries, keys and values (B, L, H, E) have no parameters of their own."""
    query, key, value = (tensors[name].transpose(1, 2) for name in "qkv")
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)


class Layer(torch.nn.Module):
    """Calls the kernel by keywords."""

    def forward(self, x: Tensor) -> Any:
        """Attend from (B, L, H, E) to itself."""
        return sys.modules["flash_attn_interface"].flash_attn_func(q=x, k=x, v=x, causal=True)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel under the name of its library."""
    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


def test_what_cannot_be_replaced_is_refused() -> None:
    law = acutance.scaling.LogN(train_length=2)
    layer, x = Layer(), torch.randn(1, 20, 2, 4)
    with pytest.raises(ApplyError, match="its q is no parameter"), acutance.apply(layer, law):
        layer(x)


def test_closing_waits_for_a_pass_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function stays replaced where another thread looks for kernels meanwhile."""
    looking, close = threading.Event(), threading.Event()

    class Slow(ModuleType):
        """A library whose functions are found only once the handler is being removed."""

        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__" and threading.current_thread() is begins:
                looking.set()
                close.wait(5)
            return super().__getattribute__(name)

    module = Slow("flash_attn_interface")
    begins = threading.Thread(target=calls.replace_new, kwargs={"imported": True})
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    original = flash_attn_func.__code__
    with calls.intercept(lambda _, run: run()):
        assert flash_attn_func.__code__ is not original
        begins.start()
        assert looking.wait(5)
        threading.Timer(0.2, close.set).start()
    begins.join()
    assert flash_attn_func.__code__ is original
