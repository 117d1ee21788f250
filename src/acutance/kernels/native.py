"""The native kernel, compiled C++ for the CPU.

Every mask goes to the kernel as it is, with its strides; only tensors whose last dimension is not
contiguous are copied.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from acutance.compiling import constant
from acutance.kernels import blocked, library
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.backward import converted, row_coefficients, sink_gradient
from acutance.kernels.call import Gradients, KernelCall, SumGradients, Sums
from acutance.kernels.hidden import only_visible_values
from acutance.kernels.library import ABI, CALL, GRADIENTS, PLACES, SUMS, Library
from acutance.masks import Masking, mask_limit
from acutance.rowstats.gaps import BINS

#: Numbers of the dtypes in the C interface.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
#: Members of a structure, in order.
_Words: TypeAlias = tuple[int | float, ...]
#: The widest queries, keys and values.
MOST_WIDTH = 256
#: Status of a forward pass that ended well, with an output that is not finite.
UNFINISHED = 4


@constant
def _why_no_library() -> str | None:
    """Why the native library is not available, as a sentence; None if it is."""
    found = library.load()
    return found if isinstance(found, str) else None


def why_not(call: KernelCall) -> str | None:
    """Why the native kernel does not support a call, as a clause; None if it does."""
    query, value = call.query, call.value
    if query.device.type != "cpu":
        return f"inputs on {query.device.type}, not on the CPU"
    if max(query.shape[-1], 0 if value is None else value.shape[-1]) > MOST_WIDTH:
        return f"heads wider than {MOST_WIDTH}"
    if call.dropout_p > 0.0:
        return "dropout"
    return _why_no_library()


def _library() -> Library:
    """The loaded native library.

    Raises:
        RuntimeError: if it is not available.
    """
    found = library.load()
    if isinstance(found, str):
        raise RuntimeError(f"backend 'native' is not available: {found}")
    return found


def check(status: int) -> None:
    """Raise an error if the status returned by a kernel is not 0.

    Raises:
        MemoryError: if its scratch could not be allocated.
        RuntimeError: if it refuses the call, which :func:`why_not` should have prevented.
    """
    if status == 3:
        raise MemoryError("the native kernel could not allocate its scratch memory")
    if status:
        raise RuntimeError(f"the native kernel refuses this call (status {status})")


def new_sums(query: Tensor, value: Tensor | None, noise: bool, gaps: bool) -> Sums:
    """The sums of a call, not yet written: each its own memory, which operators must return."""
    rows = query.shape[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    width = 0 if value is None else value.shape[-1]
    moments = (*rows, width if noise else 0)
    return Sums._make(
        [
            query.new_empty((*rows, width)),
            query.new_empty(rows, dtype=torch.int64),
            *map(partial(query.new_empty, dtype=dtype), [rows] * 9),
            query.new_empty(rows, dtype=torch.int64),
            query.new_empty(moments, dtype=dtype),
            query.new_empty(moments, dtype=dtype),
            query.new_empty(rows if noise else (*rows, 0), dtype=dtype),
            query.new_empty((*rows, BINS if gaps else 0), dtype=torch.int32),
        ]
    )


def forward(call: KernelCall) -> Sums:
    """Output and row sums of softmax attention, for tensors on the CPU, without dropout."""
    packed, _held = _pack(call)
    if packed is None:
        return blocked.forward(call)
    value, noise = call.value, call.noise
    sums = new_sums(call.query, value, noise, call.gaps)
    places = [*map(Tensor.data_ptr, sums)]
    if noise and value is None:
        sums.R2.zero_()
    if not noise or value is None:
        noise, places[-4:-1] = False, [0, 0, 0]
    status = _library().forward(
        packed,
        SUMS.words_packed(
            places[0], *sums.out.stride()[:3], *places[1:-1], noise, places[-1] if call.gaps else 0
        ),
    )
    if status == UNFINISHED:
        return sums if value is None else only_visible_values(forward, sums, call)
    if status:
        check(status)
    return sums


def is_loaded() -> bool:
    """Whether the native library is loaded; loads it if it was not tried yet."""
    return isinstance(library.load(), Library)


def structure(
    call: KernelCall,
    asked: dict[str, Tensor | None],
    written: dict[str, Tensor | None],
    **numbers: int,
) -> None:
    """Compute structure metrics into given tensors (``acutance_places`` in ``cpu/api.h``).

    Args:
        call: tensors on the CPU, no dropout; values are not read.
        asked: ``position``, ``token``, ``asked`` int64 and ``special`` boolean, (1 or B, length).
        written: contiguous tensors by the names of the structure's members.
        numbers: ``octaves``, ``by_head`` and ``every``.
    """
    places: dict[str, int | float | tuple[int | float, ...]] = dict(numbers)
    packed, held = _pack(call._replace(value=None))
    for name, tensor in asked.items():
        if tensor is not None:
            whole = tensor.expand(call.masking.batch, -1)
            held.append(whole)
            member = f"{name}s" if name in ("position", "token") else name
            places[member], places[f"{name}_stride"] = whole.data_ptr(), whole.stride()
    places |= {name: tensor.data_ptr() for name, tensor in written.items() if tensor is not None}
    assert packed is not None  # the caller has no structure of calls without rows or keys
    check(_library().structure(packed, PLACES.pack(**places)))


def _pack(call: KernelCall) -> tuple[bytes | None, list[Tensor]]:
    """The structure ``acutance_call``, and the tensors that must outlive it.

    None instead of the structure of a call without a row, a key or a component.
    """
    query, key, value, masking, *_ = call
    if not (query.numel() and key.numel() and (value is None or value.numel())):
        return None, []
    B, H, g, L, S = masking.batch, masking.heads, masking.group, masking.queries, masking.keys
    q = query if query.stride(3) == 1 else query.contiguous()
    k = key if key.stride(3) == 1 else key.contiguous()
    held = [q, k]
    width, place = 0, 0
    stride: _Words = (0, 0, 0)
    if value is not None:
        v = value if value.stride(3) == 1 else value.contiguous()
        held.append(v)
        width, place, stride = v.shape[3], v.data_ptr(), v.stride()[:3]
    allowed: _Words = (0,) * 5
    mask: _Words = (0,) * 7
    bias: _Words = (0,) * 7
    if masking.attn_mask is not None and masking.attn_mask.dtype == torch.bool:
        allowed = _matrix(masking.attn_mask, masking, held)
    elif masking.attn_mask is not None:
        mask = _matrix(masking.attn_mask, masking, held)
    if masking.bias is not None:
        bias = _matrix(masking.bias, masking, held)
    key_mask: _Words = (0, 0, 0)
    rows: _Words = (0, 0, 0)
    columns: _Words = (0, 0, 0)
    if masking.key_mask is not None:
        key_mask = (masking.key_mask.data_ptr(), *masking.key_mask.stride())
    if masking.query_documents is not None and masking.key_documents is not None:
        rows = _documents(masking.query_documents, B, L, held)
        columns = _documents(masking.key_documents, B, S, held)
    slopes = 0 if masking.alibi_slopes is None else _numbers(masking.alibi_slopes, held)
    sinks = 0 if call.sinks is None else _numbers(call.sinks, held)
    # in the order of library.CALL
    # fmt: off
    packed = CALL.words_packed(
        ABI, DTYPES[query.dtype], B, H, g, L, S, q.shape[3], width,
        q.data_ptr(), k.data_ptr(), place, *q.stride()[:3], *k.stride()[:3], *stride,
        call.scale, call.softcap or 0.0, masking.causal, masking.offset, masking.window or 0,
        *allowed, *bias, *mask, *key_mask, rows[0], columns[0], *rows[1:], *columns[1:],
        slopes, sinks, torch.get_num_threads(),
    )
    # fmt: on
    return packed, held


def _matrix(tensor: Tensor, masking: Masking, held: list[Tensor]) -> _Words:
    """Address and strides of an L × S mask; of an additive one also its limit and dtype."""
    size = (masking.batch, masking.heads * masking.group, masking.queries, masking.keys)
    whole = tensor.expand(size)
    held.append(whole)
    kind = () if tensor.dtype == torch.bool else (mask_limit(tensor.dtype), DTYPES[tensor.dtype])
    return (whole.data_ptr(), *whole.stride(), *kind)


def _documents(ids: Tensor, batch: int, length: int, held: list[Tensor]) -> _Words:
    """Address and strides of document ids."""
    whole = ids.to(torch.int64).expand(batch, length)
    held.append(whole)
    return (whole.data_ptr(), *whole.stride())


def _numbers(numbers: Tensor, held: list[Tensor]) -> int:
    """Address of numbers converted to float64."""
    wide = numbers.detach().to(torch.float64).contiguous()
    held.append(wide)
    return wide.data_ptr()


def backward(
    grad: SumGradients,
    sums: Sums,
    call: KernelCall,
    wanted: tuple[bool, ...] = (True, True, True, False, False, True),
) -> Gradients:
    """Gradients of a forward call, as of :func:`acutance.kernels.backward.backward`.

    ``sums`` may come from any backend. It computes no gradient of ``attn_mask`` or ``bias``.
    """
    packed, _held = _pack(call)
    if packed is None:
        return blocked_backward(grad, sums, call, wanted)
    query, key, value, *_ = call
    dtype = sums.Z.dtype
    want_q, want_k, want_v, _, _, want_sinks = wanted
    sink = None if call.sinks is None else call.sinks.to(dtype).view(1, -1, 1)
    grad = converted(grad, dtype)
    rows = row_coefficients(sums, grad, sink)
    inputs = (query, want_q), (key, want_k), (value, want_v and grad.out is not None)
    made = [
        torch.zeros(tensor.shape, dtype=dtype) if want and tensor is not None else None
        for tensor, want in inputs
    ]
    if want_q or want_k or want_v:
        out = None if grad.out is None else grad.out.to(query.dtype)
        if out is not None and out.stride(3) != 1:
            out = out.contiguous()
        *coefficients, _ = rows
        held, places = [], []
        for part in (sums.m, *coefficients, grad.first, grad.m, sums.first_index, *made):
            part = None if part is None else part.contiguous()
            held.append(part)
            places.append(0 if part is None else part.data_ptr())
        m, *places = places
        grad_out = (0, 0, 0, 0) if out is None else (out.data_ptr(), *out.stride()[:3])
        # in the order of library.GRADIENTS
        status = _library().backward(packed, GRADIENTS.words_packed(m, *grad_out, *places))
        if status:
            check(status)
    if value is not None and want_v and grad.out is None:
        made[2] = torch.zeros_like(value)
    of_sinks = sink_gradient(call.sinks, rows) if want_sinks else None
    dq, dk, dv = [None if part is None else part.to(query.dtype) for part in made]
    return Gradients(dq, dk, dv, attn_mask=None, bias=None, sinks=of_sinks)
