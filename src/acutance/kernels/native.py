"""The native kernel behind the signature of :mod:`acutance.kernels.blocked`.

Every mask goes to the kernel as it is, with its strides; only tensors whose last dimension is not
contiguous are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.compiling import constant
from acutance.kernels import blocked, library
from acutance.kernels.backward import Gradients, SumGradients, row_coefficients
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.bindings import ABI, CALL, GRADIENTS, PLACES, SUMS, Library
from acutance.kernels.blocked import Sums
from acutance.kernels.hidden import only_visible_values
from acutance.kernels.tiles import Rule, accumulate_dtype
from acutance.masks import Masking, mask_limit

__all__ = [
    "DTYPES",
    "MOST_WIDTH",
    "UNFINISHED",
    "backward",
    "check",
    "forward",
    "is_loaded",
    "structure",
    "why_no_gradient",
    "why_not",
]

#: Numbers of the dtypes in the C interface.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
#: The widest queries, keys and values.
MOST_WIDTH = 256
#: Status of a forward pass that ended well, with an output that is not finite.
UNFINISHED = 4


@constant
def _why_no_library() -> str | None:
    """Why there is no library, or None."""
    found = library.load()
    return found if isinstance(found, str) else None


def why_not(query: Tensor, value: Tensor | None, dropout_p: float) -> str | None:
    """Why the native kernel cannot take a call, in a clause, or None if it can."""
    if query.device.type != "cpu":
        return f"inputs on {query.device.type}, not on the CPU"
    if max(query.shape[-1], 0 if value is None else value.shape[-1]) > MOST_WIDTH:
        return f"heads wider than {MOST_WIDTH}"
    if dropout_p > 0.0:
        return "dropout"
    return _why_no_library()


def why_no_gradient(wanted: tuple[bool, ...]) -> str | None:
    """Why the backward pass cannot give the gradients asked for, or None if it can."""
    _, _, _, mask, bias, _ = wanted
    if mask or bias:
        return "the gradient of a bias or an additive mask"
    return None


def _library() -> Library:
    found = library.load()
    if isinstance(found, str):
        raise RuntimeError(f"backend 'native' is not there: {found}")
    return found


def check(status: int) -> None:
    """Raise what the kernel reports.

    Raises:
        MemoryError: if its scratch could not be allocated.
        RuntimeError: if it refuses the call, which :func:`why_not` should have.
    """
    if status == 3:
        raise MemoryError("the native kernel could not allocate its scratch memory")
    if status:
        raise RuntimeError(f"the native kernel refuses this call (status {status})")


def forward(
    query: Tensor, key: Tensor, value: Tensor | None, masking: Masking, rule: Rule, noise: bool
) -> Sums:
    """The output and every row sum (:func:`acutance.kernels.blocked.forward`).

    Args:
        query: (B, Hq, L, E), on the CPU.
        key: (B, H, S, E).
        value: (B, H, S, Ev), or None for the statistics alone.
        masking: which keys each row sees.
        rule: scale, softcap and sinks; no dropout.
        noise: also sum e² v and e² ‖v‖².

    Returns:
        The sums, in float32 or float64; ``out`` in the query's dtype.
    """
    if not _something(query, key, value):
        return blocked.forward(query, key, value, masking, rule, noise)
    rows = query.shape[:3]
    width = 0 if value is None else value.shape[-1]
    dtype = accumulate_dtype(query.dtype)

    def new(*extra: int, dtype: torch.dtype = dtype) -> Tensor:
        return query.new_empty(*rows, *extra, dtype=dtype)

    wants_noise, noise = noise, noise and value is not None
    kept = width if noise else 0
    # each its own memory: what an operator returns shares none
    made = {name: new() for name in Sums._fields[2:11]} | {
        "out": new(width, dtype=query.dtype),
        "n": new(dtype=torch.int64),
        "first_index": new(dtype=torch.int64),
        "O": new(kept),
        "R1": new(kept),
        "R2": new() if noise else new(0),
    }
    if wants_noise and not noise:
        made["R2"] = new().zero_()
    sums = Sums(**made)
    call, held = _call(query, key, value, masking, rule)
    status = _library().forward(call, _sums(sums, noise))
    check(0 if status == UNFINISHED else status)
    del held
    if value is not None and status == UNFINISHED:
        return only_visible_values(forward, sums, query, key, value, masking, rule, noise)
    return sums


def is_loaded() -> bool:
    """Whether there is a library."""
    return isinstance(library.load(), Library)


def structure(
    query: Tensor,
    key: Tensor,
    masking: Masking,
    rule: Rule,
    asked: dict[str, Tensor | None],
    written: dict[str, Tensor | None],
    **numbers: int,
) -> None:
    """Write where rows put their weight (``acutance_places`` in ``cpu/api.h``).

    Args:
        query: (B, Hq, L, E), on the CPU.
        key: (B, H, S, E).
        masking: which keys each row sees.
        rule: scale, softcap and sinks; no dropout.
        asked: ``position``, ``token``, ``asked`` int64 and ``special`` boolean, (1 or B, length).
        written: contiguous tensors by the names of the structure's members.
        numbers: ``octaves``, ``by_head`` and ``every``.
    """
    places: dict[str, int | float | tuple[int | float, ...]] = dict(numbers)
    call, held = _call(query, key, None, masking, rule)
    for name, tensor in asked.items():
        if tensor is not None:
            whole = tensor.expand(masking.batch, -1)
            held.append(whole)
            member = f"{name}s" if name in ("position", "token") else name
            places[member], places[f"{name}_stride"] = whole.data_ptr(), whole.stride()
    places |= {name: tensor.data_ptr() for name, tensor in written.items() if tensor is not None}
    check(_library().structure(call, PLACES.pack(**places)))
    del held


def _something(query: Tensor, key: Tensor, value: Tensor | None) -> bool:
    """Whether there is anything to attend with and to."""
    return bool(query.numel() and key.numel() and (value is None or value.numel()))


def _sums(sums: Sums, noise: bool) -> bytes:
    places: dict[str, int] = {
        name: part.data_ptr()
        for name, part in sums._asdict().items()
        if part.numel() and (noise or name not in ("O", "R1", "R2"))
    }
    return SUMS.pack(**places, out_stride=sums.out.stride()[:3], noise=int(noise))


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _call(
    query: Tensor, key: Tensor, value: Tensor | None, masking: Masking, rule: Rule
) -> tuple[bytes, list[Tensor]]:
    """The packed call, and the tensors that must outlive it."""
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    B, H, g = masking.batch, masking.heads, masking.group
    L, S = masking.queries, masking.keys
    q, k = (keep(_rows_contiguous(part)) for part in (query, key))
    v = None if value is None else keep(_rows_contiguous(value))
    members: dict[str, int | float | tuple[int | float, ...]] = {}

    def matrix(name: str, tensor: Tensor) -> None:
        whole = keep(tensor.expand(B, H * g, L, S))
        members[name] = whole.data_ptr()
        members[f"{name}_stride"] = whole.stride()

    mask = masking.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        matrix("allowed", mask)
    for name, added in (("mask", mask), ("bias", masking.bias)):
        if added is not None and added.dtype != torch.bool:
            matrix(name, added)
            members[f"{name}_limit"] = mask_limit(added.dtype)
            members[f"{name}_dtype"] = DTYPES[added.dtype]
    if masking.key_mask is not None:
        seen = keep(masking.key_mask)
        members["key_mask"], members["key_mask_stride"] = seen.data_ptr(), seen.stride()
    if masking.query_documents is not None and masking.key_documents is not None:
        for name, ids, length in (
            ("query_documents", masking.query_documents, L),
            ("key_documents", masking.key_documents, S),
        ):
            each = keep(ids.to(torch.int64).expand(B, length))
            members[name], members[f"{name}_stride"] = each.data_ptr(), each.stride()
    for name, numbers in (("slopes", masking.alibi_slopes), ("sinks", rule.sinks)):
        if numbers is not None:
            members[name] = keep(numbers.detach().to(torch.float64).contiguous()).data_ptr()
    packed = CALL.pack(
        abi=ABI,
        dtype=DTYPES[query.dtype],
        batch=B,
        heads=H,
        group=g,
        queries=L,
        keys=S,
        width=q.shape[-1],
        value_width=0 if v is None else v.shape[-1],
        query=q.data_ptr(),
        key=k.data_ptr(),
        value=0 if v is None else v.data_ptr(),
        query_stride=q.stride()[:3],
        key_stride=k.stride()[:3],
        value_stride=0 if v is None else v.stride()[:3],
        scale=rule.scale,
        softcap=rule.softcap or 0.0,
        causal=int(masking.causal),
        offset=masking.offset,
        window=masking.window or 0,
        threads=torch.get_num_threads(),
        **members,
    )
    return packed, held


def backward(
    grad: SumGradients,
    sums: Sums,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    masking: Masking,
    rule: Rule,
    wanted: tuple[bool, ...] = (True, True, True, False, False, True),
) -> Gradients:
    """Gradients of a forward call (:func:`acutance.kernels.backward.backward`).

    The state's sums may come from any backend. No gradient of ``attn_mask`` or ``bias``.
    """
    if not _something(query, key, value):
        return blocked_backward(grad, sums, query, key, value, masking, rule, wanted)
    dtype = accumulate_dtype(query.dtype)
    want_q, want_k, want_v, _, _, want_sinks = wanted
    sink = None if rule.sinks is None else rule.sinks.to(dtype).view(1, -1, 1)
    grads = {
        name: None if part is None or not part.numel() else part.to(dtype)
        for name, part in grad._asdict().items()
    }
    rows = row_coefficients(
        {name: part for name, part in sums._asdict().items() if part.numel()}, grads, sink
    )
    held = {
        name: part.contiguous() for name, part in rows._asdict().items() if part is not None
    } | {
        name: part.contiguous()
        for name, part in (("first", grads["first"]), ("largest", grads["m"]))
        if part is not None
    }
    held.pop("sink", None)
    held |= {"m": sums.m.contiguous(), "first_index": sums.first_index.contiguous()}
    made = {
        name: torch.zeros(tensor.shape, dtype=dtype)
        for name, tensor, want in (
            ("query", query, want_q),
            ("key", key, want_k),
            ("value", value, want_v and grads["out"] is not None),
        )
        if want and tensor is not None
    }
    places = {name: part.data_ptr() for name, part in (held | made).items()}
    stride: tuple[int, ...] = (0, 0, 0)
    if grad.out is not None and grads["out"] is not None:
        held["out"] = _rows_contiguous(grad.out.to(query.dtype))
        places["grad_out"], stride = held["out"].data_ptr(), held["out"].stride()[:3]
    if made:
        call, kept = _call(query, key, value, masking, rule)
        check(_library().backward(call, GRADIENTS.pack(**places, grad_out_stride=stride)))
        del kept

    def narrowed(name: str, like: Tensor | None, want: bool) -> Tensor | None:
        if like is None or not want:
            return None
        return made[name].to(like.dtype) if name in made else torch.zeros_like(like)

    dsinks = None
    if want_sinks and rule.sinks is not None:
        dsinks = torch.zeros_like(rule.sinks)
        if rows.sink is not None:
            dsinks = rows.sink.sum((0, 2)).to(rule.sinks.dtype)
    return Gradients(
        query=narrowed("query", query, want_q),
        key=narrowed("key", key, want_k),
        value=narrowed("value", value, want_v),
        attn_mask=None,
        bias=None,
        sinks=dsinks,
    )
