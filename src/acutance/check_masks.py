"""Checks of masks, windows, documents, biases and sinks against the shapes of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from acutance.masks import Masking
from acutance.shapes import FLOATS, MOST, check_count, check_tensor, describe

__all__ = ["MaskOptions", "check_masking", "check_sinks"]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class MaskOptions(TypedDict, total=False):
    """Keywords of :func:`check_masking`, as :func:`acutance.attention` documents them."""

    query_offset: int
    window: int | None
    key_mask: Tensor | None
    document_ids: Tensor | tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    return all(
        size in (1, full) for size, full in zip(reversed(shape), reversed(target), strict=False)
    )


def _check_additive(
    name: str, tensor: Tensor, target: tuple[int, ...], query: Tensor, shapes: Callable[[], str]
) -> None:
    """Check that an additive tensor broadcasts to (B, Hq, L, S) and is on the query's device."""
    if not _broadcasts(tensor.shape, target):
        raise ValueError(
            f"{name} must broadcast to (B, Hq, L, S) = {target}, got {tuple(tensor.shape)} "
            f"({shapes()})"
        )
    _check_device(name, tensor, query, shapes)


def _check_device(name: str, tensor: Tensor, query: Tensor, shapes: Callable[[], str]) -> None:
    if tensor.device != query.device:
        raise ValueError(
            f"{name} must be on the query's device {query.device}, got {tensor.device} ({name} "
            f"{tuple(tensor.shape)}, {shapes()})"
        )


def _documents(
    documents: Tensor | tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Document ids of queries (B or 1, L) and keys (B or 1, S), from one of the two options."""
    if documents is not None and cu_seqlens is not None:
        raise ValueError("document_ids and cu_seqlens exclude each other: pass one of them")
    if cu_seqlens is not None:
        documents = _ids_from_lengths(cu_seqlens, keys)
    assert documents is not None
    if isinstance(documents, tuple):
        if len(documents) != 2:
            raise ValueError(
                "document_ids must be one tensor, or a pair of tensors (for queries, for keys), "
                f"got a tuple of {len(documents)}"
            )
        rows, columns = documents
    else:
        columns = documents
        check_tensor("document_ids", columns)
        given = columns.shape[-1] if columns.dim() else 0
        if not 0 <= offset <= given - queries:
            raise ValueError(
                "a single document_ids tensor requires that every query is also a key: "
                f"L={queries} from offset {offset} does not lie within {given} ids; pass a "
                "pair (for queries, for keys)"
            )
        rows = columns[..., offset : offset + queries]
    checked = []
    for name, ids, length in (("queries", rows, queries), ("keys", columns, keys)):
        if check_tensor(f"document_ids of {name}", ids).dtype not in INTEGERS:
            raise TypeError(f"document_ids must be integers, got {ids.dtype} for the {name}")
        if tuple(ids.shape) not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"document_ids of {name} must have shape ({length},) or ({batch}, {length}), "
                f"got {tuple(ids.shape)}"
            )
        checked.append(ids if ids.dim() == 2 else ids.unsqueeze(0))
    return checked[0], checked[1]


def _ids_from_lengths(cu_seqlens: Tensor, keys: int) -> Tensor:
    """Document ids (S,) from cumulative lengths of documents, which may be empty.

    Raises:
        ValueError: if the lengths decrease, or do not start at 0 and end at S = ``keys``.
    """
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INTEGERS or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be one row of at least two integers, 0 to the total length, got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if not torch.compiler.is_compiling():  # reading a tensor's numbers would break the graph
        ends = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if ends != (0, keys) or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the source length S={keys}, got "
                f"{cu_seqlens.tolist()[:8]}{' …' if cu_seqlens.numel() > 8 else ''}"
            )
    places = torch.arange(keys, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.long(), places, right=True)


def check_masking(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Masking:
    """Check every mask of a call against query and key, and combine them in one record.

    Raises:
        TypeError: if a mask's dtype is wrong.
        ValueError: if a mask's shape or value does not fit, or masks exclude each other.
    """
    batch, query_heads, queries, _ = query.shape
    heads, keys = key.shape[1], key.shape[2]
    target = (batch, query_heads, queries, keys)

    def shapes() -> str:
        return describe(query=query, key=key)

    if attn_mask is not None:
        attn_mask = check_tensor("attn_mask", attn_mask)
        dtype = attn_mask.dtype
        if is_causal:
            raise ValueError(
                f"attn_mask and is_causal=True exclude each other, as in PyTorch: put the causal "
                f"mask into attn_mask (attn_mask {tuple(attn_mask.shape)}, {shapes()})"
            )
        if dtype != torch.bool and dtype not in FLOATS:
            raise TypeError(
                "attn_mask must be boolean (True is visible) or floating-point (added to the "
                f"scores), got {dtype} (attn_mask {tuple(attn_mask.shape)}, {shapes()})"
            )
        _check_additive("attn_mask", attn_mask, target, query, shapes)
    if bias is not None:
        bias = check_tensor("bias", bias)
        if bias.dtype not in FLOATS:
            raise TypeError(f"bias must be a floating-point tensor, got {bias.dtype}")
        _check_additive("bias", bias, target, query, shapes)
    if key_mask is not None:
        if check_tensor("key_mask", key_mask).dtype != torch.bool:
            raise TypeError(
                f"key_mask must be boolean, True for visible keys, got {key_mask.dtype}"
            )
        if tuple(key_mask.shape) != (batch, keys):
            raise ValueError(
                f"key_mask must have shape (B, S) = ({batch}, {keys}), got "
                f"{tuple(key_mask.shape)} ({shapes()})"
            )
        _check_device("key_mask", key_mask, query, shapes)
    if window is not None:
        check_count("window", window, 1)
    check_count("query_offset", query_offset, -MOST)
    if alibi_slopes is not None:
        alibi_slopes = check_tensor("alibi_slopes", alibi_slopes)
        if alibi_slopes.dtype not in FLOATS:
            raise TypeError(
                f"alibi_slopes must be a floating-point tensor, got {alibi_slopes.dtype}"
            )
        if tuple(alibi_slopes.shape) != (query_heads,):
            raise ValueError(
                f"alibi_slopes must have shape (Hq,) = ({query_heads},), got "
                f"{tuple(alibi_slopes.shape)} ({shapes()})"
            )
        _check_device("alibi_slopes", alibi_slopes, query, shapes)
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes must be constants, got a tensor that requires a gradient: "
                "detach it, or pass learned slopes as a bias"
            )
    rows = columns = None
    if document_ids is not None or cu_seqlens is not None:
        rows, columns = _documents(document_ids, cu_seqlens, batch, queries, keys, query_offset)
        _check_device("document_ids of queries", rows, query, shapes)
        _check_device("document_ids of keys", columns, query, shapes)
    return Masking(
        batch=batch,
        heads=heads,
        group=query_heads // heads if heads else 1,
        queries=queries,
        keys=keys,
        attn_mask=attn_mask,
        bias=bias,
        key_mask=key_mask,
        query_documents=rows,
        key_documents=columns,
        alibi_slopes=alibi_slopes,
        causal=is_causal,
        offset=query_offset,
        window=window,
        device=query.device,
    )


def check_sinks(sinks: Tensor, query: Tensor) -> Tensor:
    """Check and return learned sink logits, one for each query head.

    Raises:
        TypeError: if they are not a floating tensor.
        ValueError: if their shape is not (Hq,).
    """
    sinks = check_tensor("sinks", sinks)
    if sinks.dtype not in FLOATS:
        raise TypeError(f"sinks must be a floating-point tensor, got {sinks.dtype}")
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must have shape (Hq,) = ({query.shape[1]},), got {tuple(sinks.shape)} "
            f"(query {tuple(query.shape)})"
        )
    _check_device("sinks", sinks, query, lambda: describe(query=query))
    return sinks
