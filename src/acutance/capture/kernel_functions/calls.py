"""Pass calls of kernel functions and operators through handlers, while something is open.

The functions are those of known modules and of kernels from the Hugging Face hub. Other modules
hold them under any name, in closures, partial objects and attributes. So the function object stays
and its ``__code__`` is exchanged; the original code runs in a copy of the function. Restoring puts
the same code object back.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from acutance.capture.intercept import AT_BEGIN, AfterImport, Handlers, pass_on
from acutance.capture.kernel_functions.flash_attn import (
    FLASH_ATTN,
    OPERATORS,
    SAGE,
    VARLEN_ATTN,
)
from acutance.capture.kernel_functions.flashinfer import FLASHINFER_DECODE, FLASHINFER_PREFILL
from acutance.capture.kernel_functions.reading import FunctionCall, Kernel
from acutance.capture.kernel_functions.transformer_engine import TRANSFORMER_ENGINE
from acutance.capture.kernel_functions.xformers import XFORMERS

__all__ = ["FunctionCall", "intercept", "loaded_kernels", "operator_call", "replace_new"]

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


def loaded_kernels() -> Iterator[tuple[FunctionType, Kernel]]:
    """The functions and methods of all libraries that are imported."""
    for name in sys.modules.keys() - _searched:
        _searched.add(name)
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if isinstance(file, str) and "torch" in file and _HUB.search(file):
            _hub.add(name)
    for name, kernels in (*MODULES.items(), *zip(_hub, repeat((*FLASH_ATTN, *SAGE)))):
        module = sys.modules.get(name)
        if module is None:
            continue
        for kernel in kernels:
            owner, _, member = kernel.name.rpartition(".")
            holder = getattr(module, owner, None) if owner else module
            function = getattr(holder, "__dict__", {}).get(member)
            if isinstance(function, FunctionType):
                function = inspect.unwrap(function)  # a decorator's closure calls it
            if isinstance(function, FunctionType) and not function.__code__.co_freevars:
                yield function, kernel


_modules = 0  # number of imported modules when they were last searched


@dataclass(frozen=True)
class _Replaced:
    """A kernel function whose code is exchanged.

    Attributes:
        function: the function.
        original: a copy of it, with the original code.
        kernel: how its calls are read.
        signature: of the original function.
    """

    function: FunctionType
    original: FunctionType
    kernel: Kernel
    signature: inspect.Signature


#: Functions that were ever replaced: a thread may still run their new code after restoring.
_known: dict[str, _Replaced] = {}
_active: dict[str, _Replaced] = {}


def run_replaced(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass a call of the function with this key through the open handlers."""
    replaced, handlers = _known[key], (*_handlers.changing, *_handlers.looking)
    run = replaced.original
    if torch.compiler.is_compiling() or not handlers:
        return run(*args, **kwargs)
    try:
        call = FunctionCall(replaced.kernel, run, replaced.signature.bind(*args, **kwargs))
    except TypeError:  # the function says so in its own words
        return run(*args, **kwargs)
    if replaced.kernel.plans:
        result = run(*args, **kwargs)
        replaced.kernel.reading(call)
        return result
    return pass_on(call, handlers)


def _new_code(*args: Any, **kwargs: Any) -> Any:
    from acutance.capture.kernel_functions.calls import run_replaced

    return run_replaced("key of the function", args, kwargs)


def _replace(function: FunctionType, kernel: Kernel) -> None:
    """Exchange the code of a function for one that calls :func:`run_replaced` with its key."""
    key, code = str(id(function)), function.__code__
    if key in _active:
        return
    known = _known.get(key)
    if known is None or known.function is not function or known.original.__code__ is not code:
        original = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        original.__qualname__, original.__module__ = function.__qualname__, function.__module__
        known = _Replaced(function, original, kernel, inspect.signature(function))
        _known[key] = known
    _active[key] = known  # first: an interrupt may come
    if "__signature__" not in vars(function):  # libraries look up which parameters it has
        vars(function)["__signature__"] = known.signature
    template = _new_code.__code__
    constants = [
        key if constant == "key of the function" else constant for constant in template.co_consts
    ]
    function.__code__ = template.replace(co_consts=tuple(constants), co_name=code.co_name)


def replace_new(*, imported: bool = False) -> None:
    """Replace the functions of libraries that were imported since; for the start of a pass.

    Args:
        imported: look for them even if there are as many modules as before.
    """
    global _modules
    with _lock:
        if (imported or len(sys.modules) != _modules) and len(_handlers):
            _modules = len(sys.modules)
            for function, kernel in loaded_kernels():
                _replace(function, kernel)


_finder = AfterImport(frozenset(MODULES), functools.partial(replace_new, imported=True))


def _install() -> None:
    """Replace the functions of all libraries, now and as they are imported."""
    is_first = _finder not in sys.meta_path
    if is_first:
        sys.meta_path.insert(0, _finder)
        AT_BEGIN.append(replace_new)
    replace_new(imported=is_first)


def _uninstall() -> None:
    """Put the original code of all functions back."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if replace_new in AT_BEGIN:
        AT_BEGIN.remove(replace_new)
    with _lock:  # a pass that begins in another thread may be replacing functions
        for known in _active.values():
            known.function.__code__ = known.original.__code__
            if vars(known.function).get("__signature__") is known.signature:
                del vars(known.function)["__signature__"]
        _active.clear()


_lock = threading.RLock()
_handlers = Handlers(_install, _uninstall)
#: Context in which a handler is called around each call of a kernel function, with a
#: :class:`FunctionCall`. Operators are seen by function modes alone, with :func:`operator_call`.
intercept = _handlers.intercept


def operator_call(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> FunctionCall | None:
    """The call of an operator that is a kernel; None for any other operator."""
    is_operator = type(operator) is OpOverload or type(operator) is OpOverloadPacket
    kernel = OPERATORS.get(".".join(str(operator).split(".")[:2])) if is_operator else None
    if kernel is None:
        return None
    schema: Any = operator._schema if hasattr(operator, "_schema") else operator.default._schema
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for argument in schema.arguments:
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else inspect.Parameter.empty
        kind = kinds[argument.kwarg_only]
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    bound = inspect.Signature(parameters).bind(*args, **kwargs)
    return FunctionCall(kernel, operator, bound)
