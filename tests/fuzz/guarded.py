"""Tensors that start or end at a page of memory which may not be read."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NONE = 0


def guarded(x: Tensor, side: str) -> Tensor:
    """A copy whose memory touches a protected page: reading one byte further ends the process.

    Its strides are those of ``x``, of which gaps between elements are copied too.

    Args:
        x: any tensor; a lazily negated one stays so.
        side: "end" for a page after the last byte, "start" for one before the first.
    """
    if x.is_neg():
        return torch._neg_view(guarded(torch._neg_view(x), side))
    if x.numel() == 0:
        return x
    pairs = zip(x.shape, x.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in pairs)
    held = -(-count * x.element_size() // _PAGE) * _PAGE
    memory = mmap.mmap(-1, held + 2 * _PAGE)  # freed with the tensor that reads it
    first = ctypes.c_char.from_buffer(memory)
    at = ctypes.addressof(first)
    del first
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (at, at + _PAGE + held):
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _NONE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    offset = _PAGE if side == "start" else _PAGE + held - count * x.element_size()
    flat = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=offset)
    flat.copy_(x.detach().as_strided((count,), (1,), x.storage_offset()))
    return flat.as_strided(x.shape, x.stride())
