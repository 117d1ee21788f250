"""What the kernels are given: masks as pointers and strides, and what they are compiled for."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall
from acutance.kernels.gpu.language import interpreted, why_unavailable
from acutance.kernels.gpu.scores import Flags
from acutance.masks import mask_limit

__all__ = ["WIDEST", "dense_rows", "flags", "mask_arguments", "padded", "strides"]
__all__ += ["supported", "why_not"]

#: Widest head, of queries or of values.
WIDEST = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supported(call: KernelCall) -> str | None:
    """Why a call cannot be run by these kernels, or None if it can.

    Returns:
        One clause, such as ``"float64 inputs"``, or None.

    Example:
        >>> from acutance.kernels.call import Rule
        >>> from acutance.masks import Masking
        >>> query = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
        >>> masking = Masking(batch=1, heads=1, group=1, queries=4, keys=4)
        >>> supported(KernelCall(query, query, None, masking, Rule(scale=1.0))) is None
        False
    """
    reason = why_not(call)
    if reason is not None:
        return reason
    query, masking = call.query, call.masking
    tensors = [call.key] if call.value is None else [call.key, call.value]
    if any(tensor.dtype != query.dtype or tensor.device != query.device for tensor in tensors):
        return "inputs of different dtypes or devices"
    if not query.numel() or not all(tensor.numel() for tensor in tensors):
        return "no queries, keys or widths"
    if max(masking.keys, masking.queries) >= 2**24:
        return "2²⁴ keys or queries, which float32 cannot count"
    return None


def why_not(call: KernelCall) -> str | None:
    """What :func:`supported` says, as far as it depends on a call's kind and not on its sizes."""
    query, value = call.query, call.value
    reason = why_unavailable()
    if reason is not None:
        return reason
    if query.device.type != "cuda" and not interpreted():
        return f"inputs on {query.device.type}, not on cuda"
    if query.device.type == "cuda" and not _capable(query.device):
        return "a device other than NVIDIA's of compute capability 8.0 and above"
    if query.dtype not in DTYPES:
        return f"{str(query.dtype).removeprefix('torch.')} inputs"
    if call.rule.dropout_p > 0.0:
        return "dropout"
    if max(tensor.shape[-1] for tensor in (query, value) if tensor is not None) > WIDEST:
        return f"heads wider than {WIDEST}"
    return None


@cache
def _capable(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16, and is of a kind these kernels are compiled for."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def padded(width: int) -> int:
    """The width of a tile: a power of two, at least what a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied only if its last dimension has gaps."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """The first three strides of a tensor by the kernels' names for them."""
    axes = ("batch", "head", "row")
    return {f"{name}_{axis}": tensor.stride(place) for place, axis in enumerate(axes)}


def flags(call: KernelCall) -> Flags:
    """What a call's kernels are compiled for."""
    query, masking, rule = call.query, call.masking, call.rule
    mask = masking.attn_mask
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    documents = masking.query_documents is not None and masking.key_documents is not None
    changed = rule.softcap is not None or masking.alibi_slopes is not None or rule.scale < 0.0
    exact = torch.get_float32_matmul_precision() == "highest"
    return Flags(
        causal=masking.causal,
        window=masking.window is not None,
        mask=kind,
        bias=masking.bias is not None,
        key_mask=masking.key_mask is not None,
        documents=documents,
        alibi=masking.alibi_slopes is not None,
        softcap=rule.softcap is not None,
        changed=changed or kind == 2 or masking.bias is not None,
        data=kind > 0 or masking.bias is not None or masking.key_mask is not None or documents,
        precision="ieee" if exact else "tf32x3",
        # the interpreter has no bfloat16 arithmetic of its own
        widen=interpreted() and query.dtype == torch.bfloat16,
        interpreted=interpreted(),
    )


def mask_arguments(call: KernelCall) -> dict[str, Any]:
    """Masks, sizes and the rule by the kernels' names for them.

    What is absent is pointed at the query: it is there, and never read.
    """
    query, masking, rule = call.query, call.masking, call.rule
    slopes, key_mask = masking.alibi_slopes, masking.key_mask
    rows, keys = masking.query_documents, masking.key_documents
    return {
        **_matrix("mask", masking.attn_mask, query),
        **_matrix("bias", masking.bias, query),
        "KEY_MASK": query if key_mask is None else key_mask.contiguous().view(torch.uint8),
        "ROW_DOCUMENTS": query if rows is None else rows.contiguous(),
        "KEY_DOCUMENTS": query if keys is None else keys.contiguous(),
        "row_documents": 0 if rows is None or rows.shape[0] == 1 else masking.queries,
        "key_documents": 0 if keys is None or keys.shape[0] == 1 else masking.keys,
        "SLOPES": query if slopes is None else slopes.contiguous(),
        "SINKS": query if rule.sinks is None else rule.sinks.contiguous(),
        "query_heads": masking.heads * masking.group,
        "group": masking.group,
        "queries": masking.queries,
        "keys": masking.keys,
        "offset": masking.offset,
        "window": 0 if masking.window is None else min(masking.window, 2**30),
        "softcap": 1.0 if rule.softcap is None else float(rule.softcap),
        "scale": float(rule.scale),
    }


def _matrix(name: str, tensor: Tensor | None, query: Tensor) -> dict[str, Any]:
    """Pointer, strides and limit of an L × S mask; what is broadcast has stride 0."""
    if tensor is None:
        steps, limit, found = [0, 0, 0, 0], 0.0, query
    else:
        full = tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape)
        sizes = zip(full.shape, full.stride(), strict=True)
        steps = [0 if size == 1 else step for size, step in sizes]
        boolean = tensor.dtype == torch.bool
        limit = 0.0 if boolean else mask_limit(tensor.dtype)
        found = tensor.view(torch.uint8) if boolean else tensor
    batch, head, row, key = steps
    return {
        name.upper(): found,
        f"{name}_batch": batch,
        f"{name}_head": head,
        f"{name}_row": row,
        f"{name}_key": key,
        f"{name}_limit": limit,
    }
