"""Coverage: modules that ran attention, or what is called so, and were not read."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

__all__ = ["NOT_READ", "coverage_line", "looks_like_attention", "scripted_attention"]

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


def coverage_line(modules: Sequence[str], unread: Sequence[str]) -> str:
    """How many modules' attention was read, and in which it was not.

    Args:
        modules: that were read.
        unread: what was not, each text beginning with the name of its module.

    Example:
        >>> coverage_line(["layers.0", "layers.1"], ["pool: its scores were overwritten"])
        'Coverage: attention read in 2 modules, not in 1: pool.'
    """
    names = dict.fromkeys(text.partition(": ")[0] for text in unread)
    read = f"Coverage: attention read in {len(modules)} module{'s' * (len(modules) != 1)}"
    return f"{read}, not in {len(names)}: {', '.join(names)}." if names else f"{read}."
