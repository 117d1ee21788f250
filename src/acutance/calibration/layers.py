"""The attention layers of a model, found before it runs: their names, order and windows."""

from __future__ import annotations

import types
from collections.abc import Iterator

import torch

__all__ = ["attention_layers", "is_windowed", "label", "uses_interface"]

#: Names whose presence in a module's code says that it computes attention.
_INTERFACE = "get_interface"
_FUNCTIONS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_LOCAL = {"sliding_attention", "chunked_attention", "local", "local_attention"}


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that compute attention by what they call, under their names, in model order.

    They are told by the code of their class: it asks transformers for an attention function, or
    names ``scaled_dot_product_attention`` or ``multi_head_attention_forward``.

    Args:
        model: any module.

    Example:
        >>> list(attention_layers(torch.nn.TransformerDecoderLayer(8, 2)))
        ['self_attn', 'multihead_attn']
    """
    found = {}
    for name, module in model.named_modules():
        names = _names_of(type(module))
        if _INTERFACE in names or names & _FUNCTIONS:
            found[label(model, name)] = module
    return found


def uses_interface(module: torch.nn.Module) -> bool:
    """Whether a module asks transformers for its attention function."""
    return _INTERFACE in _names_of(type(module))


def label(model: torch.nn.Module, name: str) -> str:
    """A module's name, the same for a compiled model as for the model itself."""
    parts = [part for part in name.split(".") if part and part != "_orig_mod"]
    return ".".join(parts) or type(getattr(model, "_orig_mod", model)).__name__


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
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if isinstance(kinds, list | tuple) and isinstance(index, int) and index < len(kinds):
        return kinds[index] in _LOCAL
    return False


_KNOWN: dict[type, frozenset[str]] = {}


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
                    for part in _codes(code):
                        names.update(part.co_names)
        _KNOWN[kind] = frozenset(names)
    return _KNOWN[kind]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
