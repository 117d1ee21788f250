"""Libraries that need a GPU, replaced by stand-ins with their names and parameters."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

#: The stand-in of each module.
STAND_INS = {
    "flash_attn.flash_attn_interface": "flash_attn_2",
    "flash_attn_interface": "flash_attn_3",
    "flash_attn.cute.interface": "flash_attn_4",
    "xformers.ops.fmha": "xformers_fmha",
    "transformer_engine.pytorch.attention.dot_product_attention": "transformer_engine",
    "sageattention.core": "sage",
    "flashinfer.prefill": "flashinfer_prefill",
    "flashinfer.decode": "flashinfer_decode",
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The stand-ins, imported under the libraries' names."""
    modules = {}
    for name, stand_in in STAND_INS.items():
        module = importlib.import_module(f"tests.contract.kernel_functions.stand_ins.{stand_in}")
        monkeypatch.setitem(sys.modules, name, module)
        modules[stand_in] = module
    return modules
