"""Where the kernels are: functions by module and in kernels of the Hugging Face hub, operators."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

from acutance.capture.kernel_functions.flash_attn import FLASH_ATTN, OPERATORS, SAGE, VARLEN_ATTN
from acutance.capture.kernel_functions.flashinfer import FLASHINFER_DECODE, FLASHINFER_PREFILL
from acutance.capture.kernel_functions.reading import Kernel
from acutance.capture.kernel_functions.transformer_engine import TRANSFORMER_ENGINE
from acutance.capture.kernel_functions.xformers import XFORMERS

__all__ = ["MODULES", "OPERATORS", "kernels_in", "loaded_kernels"]

_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention"
#: The modules that define or hold kernels.
MODULES: dict[str, tuple[Kernel, ...]] = {
    "flash_attn.flash_attn_interface": FLASH_ATTN,
    "flash_attn_interface": FLASH_ATTN,
    "flash_attn_3.flash_attn_interface": FLASH_ATTN,
    "flash_attn.cute.interface": FLASH_ATTN,
    "vllm.vllm_flash_attn.flash_attn_interface": FLASH_ATTN,
    "torch.nn.attention.varlen": VARLEN_ATTN,
    "xformers.ops.fmha": XFORMERS,
    "mslk.attention.fmha": XFORMERS,
    _ENGINE: TRANSFORMER_ENGINE,
    f"{_ENGINE}.dot_product_attention": TRANSFORMER_ENGINE,
    "sageattention.core": SAGE,
    "flashinfer.prefill": FLASHINFER_PREFILL,
    "flashinfer.decode": FLASHINFER_DECODE,
}
#: The folder of a kernel from the hub: ``build/torch29-cxx11-cu128-x86_64-linux``, for one.
_HUB = re.compile(r"[/\\]build[/\\]torch[^/\\]*[/\\]")
_hub: set[str] = set()  # names of its modules
_searched: set[str] = set()  # names of modules whose files were looked at


def kernels_in(
    module: ModuleType, kernels: tuple[Kernel, ...]
) -> Iterator[tuple[FunctionType, Kernel]]:
    """The functions and methods of a module that are kernels."""
    for kernel in kernels:
        owner, _, name = kernel.name.rpartition(".")
        holder = vars(module).get(owner) if owner else module
        function = None if holder is None else vars(holder).get(name)
        if isinstance(function, FunctionType):
            function = inspect.unwrap(function)  # a decorator's closure calls it
        if isinstance(function, FunctionType) and not function.__code__.co_freevars:
            yield function, kernel


def loaded_kernels() -> Iterator[tuple[FunctionType, Kernel]]:
    """The functions of all libraries that are imported."""
    for name, kernels in MODULES.items():
        module = sys.modules.get(name)
        if module is not None:
            yield from kernels_in(module, kernels)
    for name in sys.modules.keys() - _searched:
        _searched.add(name)
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if isinstance(file, str) and "torch" in file and _HUB.search(file):
            _hub.add(name)
    for name in _hub:
        module = sys.modules.get(name)
        if module is not None:
            yield from kernels_in(module, (*FLASH_ATTN, *SAGE))
