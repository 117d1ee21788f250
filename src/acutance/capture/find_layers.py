"""The attention layers of a model before it runs: their names, order, heads and windows.

Which modules attend shows when they run, and whoever listens goes by that. Before, to number layers
and to say how many heads there are, a layer is known by the name of its class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import torch

from acutance.capture.head_axis import HEADS, attribute, heads_of
from acutance.capture.module_names import class_name, module_name, named_modules

__all__ = [
    "NOT_READ",
    "attention_layers",
    "in_window",
    "is_softmax",
    "is_windowed",
    "layer_numbers",
    "looks_like_attention",
    "may_attend",
    "most_heads",
    "scripted_attention",
    "uses_interface",
    "windowed_layers",
]

#: Ends the reason of a module that is listed for its name alone.
NOT_READ = "nothing in it was read as attention"
_NAME = re.compile(r"attention|attn", re.IGNORECASE)
_OPERATIONS = re.compile(r"aten::(_?softmax|scaled_dot_product_attention|_safe_softmax)\b")


def looks_like_attention(kind: str) -> bool:
    """Whether a class is called attention.

    Example:
        >>> [looks_like_attention(name) for name in ("LlamaAttention", "SelfAttn", "Linear")]
        [True, True, False]
    """
    return _NAME.search(kind) is not None


def scripted_attention(module: torch.nn.Module) -> str:
    """Why the attention of a module compiled by ``torch.jit`` is not read; empty if it has none.

    Example:
        >>> scripted_attention(torch.nn.MultiheadAttention(2, 1))  # can be listened to
        ''
    """
    if not isinstance(module, torch.jit.ScriptModule):
        return ""
    try:
        graph = str(module.inlined_graph)
    except (RuntimeError, AttributeError):
        graph = ""
    if _OPERATIONS.search(graph) is None:
        return ""
    return "torch.jit compiled it, so it cannot be captured: probe the model before compilation"


_LOCAL = {"sliding_attention", "chunked_attention", "local", "local_attention"}


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules named or classed as attention, or with a head count, by module name.

    They are in model order. Of modules inside each other only the innermost: transformers'
    ``BertAttention`` holds the ``BertSelfAttention`` that attends. What has heads in or around a
    module that is called attention is none itself.

    Args:
        model: any module.

    Example:
        >>> list(attention_layers(torch.nn.TransformerDecoderLayer(8, 2)))
        ['self_attn', 'multihead_attn']
    """
    modules = dict(model.named_modules())
    called = [name for name, one in modules.items() if looks_like_attention(type(one).__name__)]
    found = set(called) - {outer for name in called for outer in _around(name)}
    holding = {outer for name in found for outer in _around(name)}
    for name in reversed(modules):  # innermost first
        if name in found or name in holding or not _says_heads(modules[name]):
            continue
        around = _around(name)
        if found.isdisjoint(around):
            found.add(name)
            holding |= around
    return {module_name(model, name): modules[name] for name in modules if name in found}


def _says_heads(module: torch.nn.Module) -> bool:
    return any(type(attribute(module, heads)) is int for heads in HEADS)


def layer_numbers(model: torch.nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Layers that attended by the number that each has among the model's attention layers.

    Where one of them is not known by the name of its class, they are numbered among themselves.

    Args:
        model: any module.
        names: of modules that attended.

    Example:
        >>> layer_numbers(torch.nn.TransformerDecoderLayer(8, 2), ["multihead_attn"])
        {'multihead_attn': 1}
    """
    attended = set(names)
    known = list(attention_layers(model))
    if not attended <= set(known):
        known = [name for name in dict(named_modules(model)) if name in attended]
    return {name: place for place, name in enumerate(known) if name in attended}


def most_heads(model: torch.nn.Module) -> int | None:
    """The largest number of heads of any attention layer; None if a layer does not give it.

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


def is_softmax(module: torch.nn.Module) -> bool:
    """Whether a module is a softmax alone: the attention is the module around it."""
    return "softmax" in type(module).__name__.lower()


def may_attend(module: torch.nn.Module) -> bool:
    """Whether a module has code that might compute attention, unlike PyTorch's simple layers."""
    kind = type(module)
    # a list or a table of modules has none, and a scripted class one that cannot be asked for
    if inspect.getattr_static(kind, "forward", None) is torch.nn.Module.forward:
        return False
    simple = kind.__module__.startswith("torch.nn.modules.") and not list(module.children())
    return is_softmax(module) or not simple


def uses_interface(module: torch.nn.Module) -> bool:
    """Whether a module's class gets its attention function from transformers' interface."""
    for base in type(module).__mro__:
        for member in vars(base).values():
            code = getattr(getattr(member, "__wrapped__", member), "__code__", None)
            if "get_interface" in getattr(code, "co_names", ()):
                return True
    return False


def is_windowed(module: torch.nn.Module) -> bool:
    """Whether a transformers layer is configured with a window or chunks.

    What is passed to a call (``sliding_window``) is better evidence; this is for layers whose
    window is in their mask alone.
    """
    for name in ("layer_type", "attention_type"):
        if attribute(module, name) in _LOCAL:
            return True
    if attribute(module, "is_sliding") is True:
        return True
    if isinstance(attribute(module, "one_sided_attn_window_size"), int):  # Longformer's
        return True
    kinds = getattr(attribute(module, "config"), "layer_types", None)
    index = attribute(module, "layer_idx")
    if isinstance(kinds, list | tuple) and isinstance(index, int) and index < len(kinds):
        return kinds[index] in _LOCAL
    return False


def windowed_layers(model: torch.nn.Module) -> dict[str, bool]:
    """Whether each module has windowed attention, by name, from its configuration or its parent's.

    Example:
        >>> windowed_layers(torch.nn.MultiheadAttention(8, 2))["MultiheadAttention"]
        False
    """
    modules, top = dict(named_modules(model)), class_name(model)
    return {
        name: in_window(module, modules[name.rpartition(".")[0] or top])
        for name, module in modules.items()
    }


def in_window(module: torch.nn.Module, above: torch.nn.Module | None) -> bool:
    """Whether a module or the attention that contains it is windowed."""
    outer = "att" in type(above).__name__.lower() and above is not None and is_windowed(above)
    return outer or is_windowed(module)
