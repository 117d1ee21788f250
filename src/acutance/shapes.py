"""The shape contract of every public call, and the one validator that enforces it.

``query`` (B, Hq, L, E), ``key`` (B, H, S, E), ``value`` (B, H, S, Ev): PyTorch's own names and order.
Everything is checked at the door; past it, kernels assume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from acutance.masks import Masking

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def describe(**tensors: Tensor | None) -> str:
    """Names and shapes for an error message.

    Example:
        >>> describe(query=torch.zeros(1, 2, 3, 4), value=None)
        'query (1, 2, 3, 4)'
    """
    given = [f"{name} {tuple(t.shape)}" for name, t in tensors.items() if t is not None]
    return ", ".join(given)


def check_inputs(query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool) -> None:
    """Check rank, sizes, dtype and device of query, key and value.

    Raises:
        TypeError: if one is no tensor, or dtypes are not floating, not supported or not alike.
        ValueError: if ranks, sizes, head counts or devices do not fit.
    """
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a Tensor, got {type(tensor).__name__}")
    shapes = describe(query=query, key=key, value=value)
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has four dimensions (batch, heads, length, width), got "
                f"{tensor.dim()} ({shapes})"
            )
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} is float64, float32, bfloat16 or float16, got {tensor.dtype} ({shapes})"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"query, key and value share a dtype: query is {query.dtype}, {name} is "
                f"{tensor.dtype} ({shapes})"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"query, key and value share a device: query is on {query.device}, {name} on "
                f"{tensor.device} ({shapes})"
            )
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(
                f"query, key and value share the batch size B: query has B={query.shape[0]}, "
                f"{name} has B={tensor.shape[0]} ({shapes})"
            )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key share the width E: query has E={query.shape[3]}, key has "
            f"E={key.shape[3]} ({shapes})"
        )
    if query.shape[3] == 0:
        raise ValueError(f"query and key have a width E of at least 1, got 0 ({shapes})")
    if value is not None and value.shape[2] != key.shape[2]:
        raise ValueError(
            f"key and value share the source length S: key has S={key.shape[2]}, value has "
            f"S={value.shape[2]} ({shapes})"
        )
    if value is not None and value.shape[1] != key.shape[1]:
        raise ValueError(
            f"key and value share the number of heads H: key has H={key.shape[1]}, value has "
            f"H={value.shape[1]} ({shapes})"
        )
    _check_heads(query.shape[1], key.shape[1], enable_gqa, shapes)


def _check_heads(query_heads: int, heads: int, enable_gqa: bool, shapes: str) -> None:
    if query_heads == heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"query has {query_heads} heads and key {heads}: pass enable_gqa=True to share each key "
            f"head among query heads ({shapes})"
        )
    if heads == 0 or query_heads % heads:
        raise ValueError(
            f"with enable_gqa the query heads are a multiple of the key heads: {query_heads} is no "
            f"multiple of {heads} ({shapes})"
        )


def check_flag(name: str, value: object) -> bool:
    """A bool, and not something that merely looks true.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, got {value!r} ({type(value).__name__})")
    return value


def check_number(
    name: str,
    value: float,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    including: bool = False,
) -> float:
    """A finite number strictly between bounds (``including`` admits the lower one).

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not finite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, got {value!r} ({type(value).__name__})")
    low = value >= above if including else value > above
    if not (math.isfinite(value) and low and value < below):
        lower = "" if above == -math.inf else f" {'at least' if including else 'above'} {above:g}"
        upper = "" if below == math.inf else f" below {below:g}"
        joint = " and" if lower and upper else ""
        raise ValueError(f"{name} is a finite number{lower}{joint}{upper}, got {value!r}")
    return float(value)


def check_count(name: str, value: int, least: int) -> int:
    """An integer of at least ``least``.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an integer, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")
    return value


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    return all(
        size in (1, full) for size, full in zip(reversed(shape), reversed(target), strict=False)
    )


def _check_additive(name: str, tensor: Tensor, target: tuple[int, ...], query: Tensor) -> None:
    layout = f"(B, Hq, L, S) = {target}"
    if not _broadcasts(tensor.shape, target):
        raise ValueError(
            f"{name} broadcasts to {layout}, got {tuple(tensor.shape)} (query {tuple(query.shape)})"
        )
    if tensor.device != query.device:
        raise ValueError(
            f"{name} is on the query's device {query.device}, got {tensor.device} "
            f"({name} {tuple(tensor.shape)}, query {tuple(query.shape)})"
        )


def _documents(
    documents: Tensor | tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    offset: int,
) -> tuple[Tensor | None, Tensor | None]:
    if documents is not None and cu_seqlens is not None:
        raise ValueError("document_ids and cu_seqlens say the same thing: pass one of them")
    if cu_seqlens is not None:
        documents = _ids_from_lengths(cu_seqlens, keys)
    if documents is None:
        return None, None
    if isinstance(documents, tuple):
        if len(documents) != 2:
            raise ValueError(
                f"document_ids is one tensor or a pair (of queries, of keys), got {len(documents)}"
            )
        rows, columns = documents
    else:
        columns = documents
        if not isinstance(columns, Tensor):
            raise TypeError(f"document_ids is a Tensor, got {type(columns).__name__}")
        if not 0 <= offset <= columns.shape[-1] - queries:
            raise ValueError(
                f"one document_ids tensor serves queries and keys where every query is also a key: "
                f"L={queries} from offset {offset} does not lie within {columns.shape[-1]} ids; "
                f"pass a pair (of queries, of keys)"
            )
        rows = columns[..., offset : offset + queries]
    checked = []
    for name, ids, length in (("queries", rows, queries), ("keys", columns, keys)):
        if not isinstance(ids, Tensor):
            raise TypeError(f"document_ids of {name} is a Tensor, got {type(ids).__name__}")
        if ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise TypeError(f"document_ids are integers, got {ids.dtype} for the {name}")
        if tuple(ids.shape) not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"document_ids of {name} is ({length},) or ({batch}, {length}), got "
                f"{tuple(ids.shape)}"
            )
        checked.append(ids.reshape(-1, length))
    return checked[0], checked[1]


def _ids_from_lengths(cu_seqlens: Tensor, keys: int) -> Tensor:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens is a Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype.is_floating_point or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens is one row of at least two integers, 0 to the total length, got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != keys or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens rises from 0 to the source length S={keys}, got {cu_seqlens.tolist()[:8]}"
            f"{' …' if cu_seqlens.numel() > 8 else ''}"
        )
    places = torch.arange(keys, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.long(), places, right=True)


def check_masking(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    query_offset: int,
    window: int | None,
    key_mask: Tensor | None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Masking:
    """Check every mask of a call and gather them.

    Raises:
        TypeError: if a mask's dtype is wrong.
        ValueError: if a mask's shape or value does not fit, or masks exclude each other.
    """
    batch, query_heads, queries, _ = query.shape
    heads, keys = key.shape[1], key.shape[2]
    target = (batch, query_heads, queries, keys)
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask is a Tensor, got {type(attn_mask).__name__}")
        if is_causal:
            raise ValueError(
                f"attn_mask and is_causal=True exclude each other, as in PyTorch: put the causal mask "
                f"into attn_mask (attn_mask {tuple(attn_mask.shape)}, query {tuple(query.shape)}, "
                f"key {tuple(key.shape)})"
            )
        if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
            raise TypeError(
                f"attn_mask is boolean (True takes part) or floating (added), got {attn_mask.dtype} "
                f"({tuple(attn_mask.shape)})"
            )
        _check_additive("attn_mask", attn_mask, target, query)
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(f"bias is a Tensor, got {type(bias).__name__}")
        if bias.dtype not in FLOATS:
            raise TypeError(f"bias is floating and added to the scores, got {bias.dtype}")
        _check_additive("bias", bias, target, query)
    if key_mask is not None:
        if not isinstance(key_mask, Tensor):
            raise TypeError(f"key_mask is a Tensor, got {type(key_mask).__name__}")
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask is boolean, True where a key takes part, got {key_mask.dtype}")
        if tuple(key_mask.shape) != (batch, keys):
            raise ValueError(
                f"key_mask is (B, S) = ({batch}, {keys}), got {tuple(key_mask.shape)} "
                f"({describe(query=query, key=key)})"
            )
    if window is not None:
        check_count("window", window, 1)
    check_count("query_offset", query_offset, -(2**62))
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor):
            raise TypeError(f"alibi_slopes is a Tensor, got {type(alibi_slopes).__name__}")
        if tuple(alibi_slopes.shape) != (query_heads,):
            raise ValueError(
                f"alibi_slopes is (Hq,) = ({query_heads},), got {tuple(alibi_slopes.shape)}"
            )
    rows, columns = _documents(document_ids, cu_seqlens, batch, queries, keys, query_offset)
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


def check_sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """Learned sink logits, one for each query head.

    Raises:
        TypeError: if they are no floating tensor.
        ValueError: if their shape is not (Hq,).
    """
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or sinks.dtype not in FLOATS:
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks is a floating Tensor, got {got}")
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks is (Hq,) = ({query.shape[1]},), got {tuple(sinks.shape)} "
            f"(query {tuple(query.shape)})"
        )
    if sinks.device != query.device:
        raise ValueError(
            f"sinks are on the query's device {query.device}, got {sinks.device} "
            f"(sinks {tuple(sinks.shape)}, query {tuple(query.shape)})"
        )
    return sinks
