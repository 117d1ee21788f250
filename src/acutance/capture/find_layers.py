"""The attention layers of a model, found before it runs: their names, order and windows."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

import torch

from acutance.capture.head_axis import heads_of
from acutance.capture.module_names import module_name

__all__ = [
    "attention_layers",
    "is_softmax",
    "is_windowed",
    "most_heads",
    "uses_interface",
    "windowed_layers",
]

#: Names whose presence in a module's code says that it computes attention.
_INTERFACE = "get_interface"
_FUNCTIONS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_LOCAL = {"sliding_attention", "chunked_attention", "local", "local_attention"}


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that compute attention by what they call, under their names, in model order.

    They are told by the code of their class: it asks transformers for an attention function, names
    ``scaled_dot_product_attention`` or ``multi_head_attention_forward``, or takes a softmax and
    matrix products and holds no other attention layer.

    Args:
        model: any module.

    Example:
        >>> list(attention_layers(torch.nn.TransformerDecoderLayer(8, 2)))
        ['self_attn', 'multihead_attn']
    """
    modules = dict(model.named_modules())
    found, holding = set(), set()
    for name, module in modules.items():
        names = _names_of(type(module))
        if _INTERFACE in names or names & _FUNCTIONS:
            found.add(name)
            holding |= _around(name)
    hands = set()
    for name in reversed(modules):  # innermost first: what holds attention is none itself
        around = _around(name)
        if name not in holding and not found & {name, *around} and _by_hand(modules[name]):
            hands.add(name)
            holding |= around
    return {module_name(model, name): modules[name] for name in modules if name in found | hands}


def most_heads(model: torch.nn.Module) -> int | None:
    """Heads of the attention layer that has the most, None where one does not say.

    Example:
        >>> most_heads(torch.nn.TransformerDecoderLayer(8, 2))
        2
    """
    counts = [heads_of(module) for module in attention_layers(model).values()]
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


def _around(name: str) -> set[str]:
    """Names of the modules that a module is inside."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(len(parts))} - {name}


def _by_hand(module: torch.nn.Module) -> bool:
    names = _names_of(type(module))
    softmax = any(is_softmax(part) for part in module.children())
    return bool(names & _PRODUCTS) and (softmax or bool(names & _SOFTMAX))


def is_softmax(module: torch.nn.Module) -> bool:
    """Whether a module is a softmax alone: the attention is the module around it."""
    return "softmax" in type(module).__name__.lower()


def uses_interface(module: torch.nn.Module) -> bool:
    """Whether a module asks transformers for its attention function."""
    return _INTERFACE in _names_of(type(module))


def is_windowed(module: torch.nn.Module) -> bool:
    """Whether a transformers layer says that its rows see a window or a chunk only.

    What is passed to a call (``sliding_window``) is better evidence; this is for layers whose
    window is in their mask alone.
    """
    for name in ("layer_type", "attention_type"):
        if getattr(module, name, None) in _LOCAL:
            return True
    if getattr(module, "is_sliding", False) is True:
        return True
    if isinstance(getattr(module, "one_sided_attn_window_size", None), int):  # Longformer's
        return True
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if isinstance(kinds, list | tuple) and isinstance(index, int) and index < len(kinds):
        return kinds[index] in _LOCAL
    return False


_MATMUL = {"@", "@=", "BINARY_MATRIX_MULTIPLY", "INPLACE_MATRIX_MULTIPLY"}
_KNOWN: dict[type, frozenset[str]] = {}


def windowed_layers(model: torch.nn.Module) -> dict[str, bool]:
    """Whether each module's rows see a window only, by its name: it says so, or its attention.

    Example:
        >>> windowed_layers(torch.nn.MultiheadAttention(8, 2))["MultiheadAttention"]
        False
    """
    found = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        above = modules.get(name.rpartition(".")[0]) if name else None
        outer = above is not None and "att" in type(above).__name__.lower() and is_windowed(above)
        found[module_name(model, name)] = outer or is_windowed(module)
    return found


def _names_of(kind: type) -> frozenset[str]:
    """Global and attribute names in the code of a class, without those of ``nn.Module``."""
    if kind not in _KNOWN:
        names: set[str] = set()
        for base in kind.__mro__:
            if base is torch.nn.Module:
                break
            for member in vars(base).values():
                function = getattr(member, "__wrapped__", member)
                code = getattr(function, "__code__", None)
                if isinstance(code, types.CodeType):
                    names.update(_names_in(code))
                    called = getattr(function, "__globals__", {})
                    for name in code.co_names:  # a function beside the class, as many write it
                        beside = called.get(name)
                        if (
                            isinstance(beside, types.FunctionType)
                            and beside.__module__ == base.__module__
                        ):
                            names.update(_names_in(beside.__code__) & (_SOFTMAX | _PRODUCTS))
        _KNOWN[kind] = frozenset(names)
    return _KNOWN[kind]


def _names_in(code: types.CodeType) -> set[str]:
    """Global and attribute names in code, and ``@`` for that operator."""
    names: set[str] = set()
    for part in _codes(code):
        names.update(part.co_names)
        if any(
            one.argrepr in _MATMUL or one.opname in _MATMUL for one in dis.get_instructions(part)
        ):
            names.add("@")
    return names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
