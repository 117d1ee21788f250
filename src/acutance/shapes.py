"""The shape contract of every public call, and the one validator that enforces it.

``query`` (B, Hq, L, E), ``key`` (B, H, S, E), ``value`` (B, H, S, Ev): PyTorch's own names and
order. Everything is checked at the door; past it, kernels assume.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from acutance.compiling import constant
from acutance.escapes import did_you_mean

__all__ = [
    "FLOATS",
    "cast_inputs",
    "check_count",
    "check_flag",
    "check_flags",
    "check_inputs",
    "check_number",
    "check_softcap",
    "check_tensor",
    "describe",
    "did_you_mean",
]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Positions and distances are 64-bit integers; no sum of two overflows.
MOST = 2**61


def describe(**tensors: Tensor | None) -> str:
    """Names and shapes for an error message.

    Example:
        >>> describe(query=torch.zeros(1, 2, 3, 4), value=None)
        'query (1, 2, 3, 4)'
    """
    given = [f"{name} {tuple(t.shape)}" for name, t in tensors.items() if t is not None]
    return ", ".join(given)


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
        TypeError: if one is not a tensor, or dtypes are not floating, not supported or not alike.
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
    query_heads, heads = query.shape[1], key.shape[1]
    if query_heads != heads and not enable_gqa:
        raise ValueError(
            f"query has {query_heads} heads but key has {heads}: pass enable_gqa=True to share "
            f"each key head among query heads ({shapes()})"
        )
    if query_heads != heads and (heads == 0 or query_heads % heads):
        raise ValueError(
            "with enable_gqa the number of query heads must be a multiple of the number of "
            f"key heads: {query_heads} is not a multiple of {heads} ({shapes()})"
        )
    return query, key, value


def cast_inputs(
    query: Tensor, key: Tensor, value: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts the inputs of SDPA, where it is on: to its dtype, but for float64."""
    kind = query.device.type
    known = kind in ("cpu", "cuda") or _has_autocast(kind)
    if not (known and torch.is_autocast_enabled(kind)):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(query), cast(key), None if value is None else cast(value)


@constant
def _has_autocast(kind: str) -> bool:
    """Whether a kind of device has autocast; PyTorch 2.6 cannot compile the question."""
    return torch.amp.is_autocast_available(kind)


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
    """Return ``value`` if it is True or False.

    Raises:
        TypeError: if it is anything else, such as 1, ``"no"`` or a NumPy or tensor boolean.
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
        TypeError: if it is not a number.
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
        TypeError: if it is not a number.
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
        TypeError: if it is not an integer.
        ValueError: if it is smaller or larger.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")
    return value
