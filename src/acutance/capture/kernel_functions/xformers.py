"""xFormers: ``memory_efficient_attention`` with its classes of biases.

Tensors are (B, L, H, E), (B, L, E) with one head, or (B, L, groups, heads of a group, E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.reading import FunctionCall, Kernel, Reading, Sequences

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


def _read(call: FunctionCall) -> Reading:
    query, key, value = call.qkv()
    bias, dropout = call["attn_bias"], float(call["p"] or 0.0)
    options: dict[str, Any] = {"scale": call.number("scale"), "dropout_p": dropout}
    if query.dim() == 5 and all(part.stride(3) == 0 or part.shape[3] == 1 for part in (key, value)):
        key, value = key[:, :, :, 0], value[:, :, :, 0]  # the heads of a group share them
    tensors = query, key, value = _four_dims(query), _four_dims(key), _four_dims(value)
    if bias is None or isinstance(bias, Tensor):
        added = None if bias is None else _four_dims(bias, 1)
        reading = Reading.of_batch(tensors, causal=False, bias=added, **options)
        return Reading(reading.fields, lambda tensor: reading.rows(_four_dims(tensor)))
    kind = type(bias)
    if kind.__name__ not in _ALIGNED or not kind.__module__.startswith(_LIBRARIES):
        raise ValueError(f"{call.name} with attn_bias of class {kind.__name__} cannot be read")
    options["causal"], options["at_end"] = _ALIGNED[kind.__name__]
    left, size = getattr(bias, "window_left", None), getattr(bias, "_window_size", None)
    left = left if size is None else int(size) - 1  # the row's own key is one of them
    options["window"] = left, getattr(bias, "window_right", None)
    if hasattr(bias, "q_seqinfo"):
        if len(query) != 1:
            raise ValueError(f"{kind.__name__} needs a batch of 1")
        queries, keys = _sequences(bias.q_seqinfo, query), _sequences(bias.k_seqinfo, key)
        reading = Reading.of_sequences(tensors, queries, keys, **options)
    else:
        added = getattr(bias, "_bias", None)
        added = None if added is None else _four_dims(added, 1)
        reading = Reading.of_batch(tensors, bias=added, **options)
    return Reading(reading.fields, lambda tensor: reading.rows(_four_dims(tensor)))


def _four_dims(tensor: Tensor, heads: int = 2) -> Tensor:
    """A tensor whose dimension ``heads`` are all heads, as groups of heads or one head may be."""
    if tensor.dim() == 5:
        return tensor.flatten(heads, heads + 1)
    return tensor.unsqueeze(heads) if tensor.dim() == 3 else tensor


def _sequences(info: Any, tensor: Tensor) -> Sequences:
    """The sequences that a ``seqinfo`` describes; ``seqlen`` is there where they have gaps."""
    starts = torch.as_tensor(info.seqstart, device=tensor.device)
    lengths = getattr(info, "seqlen", None)
    return Sequences.packed(starts, None if lengths is None else torch.as_tensor(lengths))


_NAMES = {"q": "query", "k": "key", "v": "value"}
_VARIANTS = ("", "_forward", "_forward_requires_grad")

#: The functions of xFormers.
XFORMERS = tuple(
    Kernel(f"memory_efficient_attention{variant}", _read, _NAMES) for variant in _VARIANTS
)
