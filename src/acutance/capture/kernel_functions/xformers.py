"""xFormers: ``memory_efficient_attention`` with its classes of biases.

Tensors are (B, L, H, E), (B, L, E) with one head, or (B, L, groups, heads of a group, E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import (
    Kernel,
    Layout,
    Reading,
    Sequences,
    batch_reading,
    packed,
    sequence_reading,
)

__all__ = ["XFORMERS"]

#: By class of a bias: whether it is causal, and whether it is aligned at the last key.
_ALIGNED = {
    "LowerTriangularMask": (True, False),
    "LowerTriangularMaskWithTensorBias": (True, False),
    "LowerTriangularFromBottomRightMask": (True, True),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, True),
    "LocalAttentionFromBottomRightMask": (False, True),
    "BlockDiagonalMask": (False, False),
    "BlockDiagonalCausalMask": (True, False),
    "BlockDiagonalCausalFromBottomRightMask": (True, True),
    "BlockDiagonalCausalLocalAttentionMask": (True, False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, True),
    "BlockDiagonalPaddedKeysMask": (False, True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (True, True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (False, True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (True, True),
    "BlockDiagonalGappyKeysMask": (False, True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (True, True),
}
_LIBRARIES = ("xformers.", "mslk.")


def _read(arguments: Arguments) -> Reading:
    query, key, value = arguments.tensors("query", "key", "value")
    bias = arguments["attn_bias"]
    options: dict[str, Any] = {
        "scale": arguments.number("scale"),
        "dropout_p": float(arguments["p"] or 0.0),
    }
    grouped = query.dim() == 5
    groups = query.shape[2:4]
    if grouped:
        shared = all(part.stride(3) == 0 or part.shape[3] == 1 for part in (key, value))
        key, value = (part[:, :, :, 0] if shared else part.flatten(2, 3) for part in (key, value))
        query = query.flatten(2, 3)
    layout = Layout(0, None, 1) if query.dim() == 3 else Layout(0, 2, 1)
    given = query, key, value
    if bias is None or isinstance(bias, Tensor):
        of_heads = bias if bias is None or not grouped else bias.flatten(1, 2)
        if of_heads is not None and of_heads.dim() == 3:
            of_heads = of_heads.unsqueeze(1)
        reading = batch_reading(given, layout, causal=False, bias=of_heads, **options)
    else:
        reading = _of_class(arguments, bias, given, layout, options)
    if not grouped:
        return reading

    def place(factor: Tensor) -> Tensor:
        placed = reading.place(factor)  # (B, L, Hq or 1, 1)
        split: Tensor = placed.unflatten(2, (1, 1) if placed.shape[2] == 1 else groups)
        return split

    return Reading(reading.fields, lambda output: reading.output(output.flatten(2, 3)), place)


def _of_class(
    arguments: Arguments,
    bias: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    options: dict[str, Any],
) -> Reading:
    """Read a call whose bias is an object."""
    kind = type(bias)
    known = _ALIGNED.get(kind.__name__)
    if known is None or not kind.__module__.startswith(_LIBRARIES):
        raise ValueError(
            f"{arguments.function} with attn_bias of class {kind.__name__} cannot be read"
        )
    causal, at_end = known
    left, right = getattr(bias, "window_left", None), getattr(bias, "window_right", None)
    size = getattr(bias, "_window_size", None)  # the row's own key is one of them
    window = (left if size is None else int(size) - 1, right)
    if not hasattr(bias, "q_seqinfo"):
        added = getattr(bias, "_bias", None)
        if added is not None and added.dim() == 3:
            added = added.unsqueeze(1)
        return batch_reading(
            tensors, layout, causal=causal, window=window, at_end=at_end, bias=added, **options
        )
    if tensors[0].shape[0] != 1:
        raise ValueError(f"{kind.__name__} needs a batch of 1")
    query, key, value = (layout.read(part)[0].transpose(0, 1) for part in tensors)  # (T, H, E)
    reading = sequence_reading(
        (query, key, value),
        _intervals(bias.q_seqinfo, query),
        _intervals(bias.k_seqinfo, key),
        causal=causal,
        window=window,
        at_end=at_end,
        flat=lambda output: layout.read(output)[0].transpose(0, 1),
        **options,
    )
    return Reading(
        reading.fields,
        reading.output,
        lambda factor: layout.write(reading.place(factor).transpose(0, 1).unsqueeze(0)),
    )


def _intervals(info: Any, tensor: Tensor) -> Sequences:
    """The sequences that a ``seqinfo`` describes; ``seqlen`` is there where they have gaps."""
    starts = torch.as_tensor(info.seqstart, device=tensor.device).long()
    lengths = getattr(info, "seqlen", None)
    if lengths is None:
        return packed(starts[:-1], starts.diff(), len(tensor))
    lengths = torch.as_tensor(lengths, device=tensor.device).long()
    return packed(starts[: len(lengths)], lengths, len(tensor))


#: The functions of xFormers.
XFORMERS = tuple(
    Kernel(name, _read, "query")
    for name in (
        "memory_efficient_attention",
        "memory_efficient_attention_forward",
        "memory_efficient_attention_forward_requires_grad",
    )
)
