"""The shape contract of every public call, and the one validator that enforces it.

``query`` (B, Hq, L, E), ``key`` (B, H, S, E), ``value`` (B, H, S, Ev): PyTorch's own names and
order. Everything is checked at the door; past it, kernels assume.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from acutance.masks import Masking

__all__ = [
    "FLOATS",
    "MaskOptions",
    "cast_inputs",
    "check_count",
    "check_flag",
    "check_flags",
    "check_inputs",
    "check_masking",
    "check_number",
    "check_sinks",
    "check_softcap",
    "check_tensor",
    "describe",
    "did_you_mean",
]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Positions and distances are 64-bit integers; no sum of two overflows.
MOST = 2**61
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def describe(**tensors: Tensor | None) -> str:
    """Names and shapes for an error message.

    Example:
        >>> describe(query=torch.zeros(1, 2, 3, 4), value=None)
        'query (1, 2, 3, 4)'
    """
    given = [f"{name} {tuple(t.shape)}" for name, t in tensors.items() if t is not None]
    return ", ".join(given)


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error about an unknown name: the nearest known one, else ``otherwise``.

    Example:
        >>> did_you_mean("entropi", ["entropy", "lse"]), did_you_mean("x", ["entropy"])
        ("; did you mean 'entropy'?", '')
    """
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else otherwise


class MaskOptions(TypedDict, total=False):
    """Keywords of :func:`check_masking`, as :func:`acutance.attention` documents them."""

    query_offset: int
    window: int | None
    key_mask: Tensor | None
    document_ids: Tensor | tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    enable_gqa: bool,
    *,
    same_width: bool = True,
    autocast: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Query, key and value, their rank, sizes, dtype and device checked.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev), or None.
        enable_gqa: whether Hq may be a multiple of H.
        same_width: whether queries and keys are of one width; some scores take others.
        autocast: whether they are first cast as :func:`cast_inputs` does.

    Raises:
        TypeError: if one is no tensor, or dtypes are not floating, not supported or not alike.
        ValueError: if ranks, sizes, head counts or devices do not fit.
    """
    query, key = check_tensor("query", query), check_tensor("key", key)
    value = None if value is None else check_tensor("value", value)
    if autocast:
        query, key, value = cast_inputs(query, key, value)
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})

    def shapes() -> str:  # written only into an error: sizes may be symbols
        return describe(query=query, key=key, value=value)

    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have four dimensions (batch, heads, length, width), got "
                f"{tensor.dim()} ({shapes()})"
            )
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype} "
                f"({shapes()})"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have the same dtype: query is {query.dtype}, "
                f"{name} is {tensor.dtype} ({shapes()})"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"query, key and value must be on the same device: query is on {query.device}, "
                f"{name} on {tensor.device} ({shapes()})"
            )
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(
                "query, key and value must have the same batch size B: query has "
                f"B={query.shape[0]}, {name} has B={tensor.shape[0]} ({shapes()})"
            )
    if same_width and query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must have the same width E: query has E={query.shape[3]}, key has "
            f"E={key.shape[3]} ({shapes()})"
        )
    if query.shape[3] == 0:
        raise ValueError(f"query and key must have a width E of at least 1, got 0 ({shapes()})")
    if value is not None and value.shape[2] != key.shape[2]:
        raise ValueError(
            f"key and value must have the same source length S: key has S={key.shape[2]}, "
            f"value has S={value.shape[2]} ({shapes()})"
        )
    if value is not None and value.shape[1] != key.shape[1]:
        raise ValueError(
            f"key and value must have the same number of heads H: key has H={key.shape[1]}, "
            f"value has H={value.shape[1]} ({shapes()})"
        )
    if query.shape[1] != key.shape[1]:
        _check_heads(query.shape[1], key.shape[1], enable_gqa, shapes)
    return query, key, value


def cast_inputs(
    query: Tensor, key: Tensor, value: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts the inputs of SDPA, where it is on: to its dtype, but for float64."""
    kind = query.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(query), cast(key), None if value is None else cast(value)


def _check_heads(query_heads: int, heads: int, enable_gqa: bool, shapes: Callable[[], str]) -> None:
    """Check that query heads can share key heads."""
    if not enable_gqa:
        raise ValueError(
            f"query has {query_heads} heads but key has {heads}: pass enable_gqa=True to share "
            f"each key head among query heads ({shapes()})"
        )
    if heads == 0 or query_heads % heads:
        raise ValueError(
            "with enable_gqa the number of query heads must be a multiple of the number of "
            f"key heads: {query_heads} is not a multiple of {heads} ({shapes()})"
        )


def check_tensor(name: str, value: object) -> Tensor:
    """A dense Tensor; a lazily negated view, which kernels would read without its sign, resolved.

    Raises:
        TypeError: if it is anything else.

    Example:
        >>> imaginary = torch.tensor([1j]).conj().imag  # a view of 1.0 that says "negated"
        >>> imaginary.is_neg(), check_tensor("bias", imaginary).is_neg()
        (True, False)
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if value.layout not in (torch.strided, torch.jagged):
        raise TypeError(
            f"{name} must be a dense Tensor, got layout {value.layout} and shape "
            f"{tuple(value.shape)}: pass {name}.to_dense()"
        )
    # a compiled graph reaches kernels as operators, whose dispatch resolves it
    if not torch.compiler.is_compiling() and value.is_neg():
        return value.resolve_neg()
    return value


def check_flag(name: str, value: object) -> bool:
    """A bool, and not something that merely looks true.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def check_flags(**flags: object) -> None:
    """:func:`check_flag` of several by name."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            check_flag(name, value)


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
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    low = value >= above if including else value > above
    finite = -math.inf < value < math.inf  # comparisons can be traced; math.isfinite cannot
    if not (finite and low and value < below):
        lower = "" if above == -math.inf else f" {'at least' if including else 'above'} {above:g}"
        upper = "" if below == math.inf else f" below {below:g}"
        joint = " and" if lower and upper else ""
        raise ValueError(f"{name} must be a finite number{lower}{joint}{upper}, got {value!r}")
    return float(value)


def check_softcap(softcap: float | None, dtype: torch.dtype) -> float | None:
    """A positive number that scores of this dtype, summed in float32 at least, can be divided by.

    A softcap above 1e30 (float64: 1e290) bounds no score and is None; one below 1e-30 (1e-290) is
    that number, as good as 0.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not finite or not positive.

    Example:
        >>> check_softcap(50, torch.float32), check_softcap(1e39, torch.float32)
        (50.0, None)
    """
    if softcap is None:
        return None
    cap = check_number("softcap", softcap, above=0.0)
    most = 1e290 if dtype == torch.float64 else 1e30
    return None if cap > most else max(cap, 1.0 / most)


def check_count(name: str, value: int, least: int) -> int:
    """An integer of at least ``least`` and at most :data:`MOST`.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is smaller or larger.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")
    return value


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
    """Ids of queries and keys, (B or 1, length), from one of the two options."""
    if documents is not None and cu_seqlens is not None:
        raise ValueError("document_ids and cu_seqlens exclude each other: pass one of them")
    if cu_seqlens is not None:
        documents = _ids_from_lengths(cu_seqlens, keys)
    assert documents is not None
    if isinstance(documents, tuple):
        if len(documents) != 2:
            raise ValueError(
                "document_ids must be one tensor or a pair (of queries, of keys), got "
                f"{len(documents)}"
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
                "pair (of queries, of keys)"
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
    """Document ids (S,) from cumulative lengths."""
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
    """Check every mask of a call and gather them.

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
                f"attn_mask must be boolean (True is visible) or floating (added), got {dtype} "
                f"(attn_mask {tuple(attn_mask.shape)}, {shapes()})"
            )
        _check_additive("attn_mask", attn_mask, target, query, shapes)
    if bias is not None:
        bias = check_tensor("bias", bias)
        if bias.dtype not in FLOATS:
            raise TypeError(f"bias must be floating and added to the scores, got {bias.dtype}")
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
            raise TypeError(f"alibi_slopes must be a floating Tensor, got {alibi_slopes.dtype}")
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
    """Learned sink logits, one for each query head.

    Raises:
        TypeError: if they are no floating tensor.
        ValueError: if their shape is not (Hq,).
    """
    sinks = check_tensor("sinks", sinks)
    if sinks.dtype not in FLOATS:
        raise TypeError(f"sinks must be a floating Tensor, got {sinks.dtype}")
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must have shape (Hq,) = ({query.shape[1]},), got {tuple(sinks.shape)} "
            f"(query {tuple(query.shape)})"
        )
    _check_device("sinks", sinks, query, lambda: describe(query=query))
    return sinks
