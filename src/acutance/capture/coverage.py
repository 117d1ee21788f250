"""Coverage: modules that ran attention, or what is called so, and were not read."""

from __future__ import annotations

import re

import torch

__all__ = ["NOT_READ", "looks_like_attention", "scripted_attention"]

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
    return "torch.jit compiled it, and nothing can listen inside: probe it as it was before"
