"""``torch.nn.attention.varlen.varlen_attn`` and ``varlen_attn_out``, and their operators.

Tensors are packed, (T, H, E). The window (−1, 0) is causal; windows are aligned at the last key.
"""

from __future__ import annotations

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import Kernel, Reading
from acutance.capture.kernel_functions.sequences import packed, paged, sequence_reading

__all__ = ["VARLEN_ATTN", "VARLEN_OPERATORS"]


def _read(arguments: Arguments) -> Reading:
    """Query (Tq, Hq, E), key and value (Tk, H, E) or pages (pages, page, H, E)."""
    query, key, value = (arguments.tensor(name) for name in ("query", "key", "value"))
    arguments.ignore("enable_gqa", "max_q", "max_k")
    bounds = arguments.tensor("cu_seq_q").long()
    asks = packed(bounds[:-1], bounds.diff(), len(query))
    used, table = arguments.optional("seqused_k"), arguments.optional("block_table")
    if table is not None:
        if used is None:
            raise ValueError("varlen_attn with block_table needs seqused_k")
        answers = paged(table, key.shape[1], used, key.shape[0])
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    else:
        starts = arguments.tensor("cu_seq_k").long()
        answers = packed(starts[:-1], starts.diff() if used is None else used, len(key))
    left, right = arguments.window()
    scale = arguments["scale"]
    return sequence_reading(
        (query, key, value),
        asks,
        answers,
        causal=bool(arguments["is_causal"]),
        window=(left, right),
        scale=None if scale is None else float(scale),
    )


#: The functions of PyTorch.
VARLEN_ATTN = (Kernel("varlen_attn", _read, "query"), Kernel("varlen_attn_out", _read, "query"))
#: Their operators.
VARLEN_OPERATORS = (
    Kernel("torch_attn._varlen_attn", _read, "query"),
    Kernel("torch_attn._varlen_attn_out", _read, "query"),
)
