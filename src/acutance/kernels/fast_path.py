"""The way past PyTorch's dispatcher, for calls that nothing observes.

An operator of :mod:`torch.library` costs some hundred microseconds a call, more than a short
sequence takes. Where no gradient is wanted, nothing is traced and no mode watches, the native
kernel is called as it is; every other call goes through the operators.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from ctypes import addressof
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, empty_like, float32, float64, get_num_threads, is_autocast_enabled

from acutance.compiling import unobserved
from acutance.kernels import dispatch, library
from acutance.kernels.library import ABI, CALL, METRIC_BITS, SUMS, Layout
from acutance.kernels.native import DTYPES, MOST_WIDTH, UNFINISHED, check
from acutance.rowstats import RowState, RowStatistics
from acutance.rowstats.gaps import absent
from acutance.rowstats.gaussian import spline_table
from acutance.shapes import MOST

CPU = torch.device("cpu")


def _beginning(layout: Layout, last: str, after: str = "") -> struct.Struct:
    """A packer of a C structure: members up to ``last``, zeros, and ``after`` at the very end."""
    code = layout.code_until(last)
    rest = layout.words - layout.words_until(last) - len(after)
    return struct.Struct(f"={code}{8 * rest}x{after}")


_CALL = _beginning(CALL, "window", "q").pack
_SUMS = _beginning(SUMS, "first_index").pack


class PackedStatistics(RowStatistics):
    """Row statistics from the native kernel, whose sums stay in one memory block until read."""

    _rows: tuple[Any, torch.dtype, int, int, int]

    def __init__(self, rows: Any, dtype: torch.dtype, B: int, H: int, L: int) -> None:
        """Store the sums as the kernel wrote them: counts, first keys, then the other fields."""
        own = self.__dict__
        own["_rows"] = rows, dtype, B, H, L
        own["backend"] = "native"

    def __reduce__(self) -> tuple[type[RowStatistics], tuple[RowState, str | None]]:
        """The sums as tensors, for pickle, ``torch.save`` and ``copy``."""
        return RowStatistics, (RowState(*(part.clone() for part in self.state)), self.backend)

    def __getitem__(self, name: str) -> Tensor:
        computed = self._native([name] if name in METRIC_BITS else [])
        return computed[name] if computed else super().__getitem__(name)

    def as_dict(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Metrics by name, (B, Hq, L): those in ``names``, or all available ones.

        Most of them are computed by one call of the native library.
        """
        names = self.available if names is None else tuple(names)
        computed = self._native([name for name in METRIC_BITS if name in names])
        read = super().__getitem__
        return {name: computed[name] if name in computed else read(name) for name in names}

    def _native(self, wanted: list[str]) -> dict[str, Tensor]:
        """Metrics of :data:`~acutance.kernels.library.METRIC_BITS`, by one call of the library."""
        found = library.load()
        if not wanted or isinstance(found, str) or not unobserved():
            return {}
        rows, dtype, B, H, L = self._rows
        at = rows.data_ptr() if isinstance(rows, Tensor) else addressof(rows)
        bits = 0
        for name in wanted:
            bits |= METRIC_BITS[name]
        values = torch.empty((len(wanted), B, H, L), dtype=dtype)
        knots = spline_table(float64, CPU).data_ptr() if "gaussian_entropy" in wanted else 0
        status = found.metrics(bits, dtype is float64, B * H * L, at, knots, values.data_ptr())
        if status:
            check(status)
        if len(wanted) == 1:
            return {wanted[0]: values[0]}
        # each its own memory: whoever keeps or saves one keeps no other
        return {name: part.clone() for name, part in zip(wanted, values.unbind(0), strict=True)}

    @property
    def n(self) -> Tensor:
        """Visible keys of each row, (B, Hq, L), without unpacking the other sums."""
        rows, (_, B, H, L) = self._values(), self._rows[1:]
        whole = 8 // rows.element_size() * B * H * L
        return rows[:whole].view(torch.int64).clone().view(B, H, L)

    def _values(self) -> Tensor:
        """The memory block of the sums as a tensor."""
        rows, dtype = self._rows[:2]
        return rows if isinstance(rows, Tensor) else torch.frombuffer(rows, dtype=dtype)

    @cached_property
    def state(self) -> RowState:
        """The mergeable sums, fields (B, Hq, L)."""
        B, H, L = self._rows[2:]
        rows = self._values()
        whole = 2 * 8 // rows.element_size() * B * H * L
        n, first_index = rows[:whole].view(torch.int64).clone().view(2, B, H, L).unbind(0)
        m, Z, U, W, Q, mean, M2, depth, first = rows[whole:].view(9, B, H, L).unbind(0)
        none = Z.unsqueeze(-1)[..., :0]
        return RowState(
            n, m, Z, U, W, Q, mean, M2, depth, first, first_index, *(none,) * 4, absent(Z)
        )


def packed_alike(left: RowStatistics, right: RowStatistics) -> bool:
    """Whether both are :class:`PackedStatistics` of the same dtype and shape (B, Hq, L)."""
    if not (isinstance(left, PackedStatistics) and isinstance(right, PackedStatistics)):
        return False
    return left._rows[1:] == right._rows[1:]


def joined(parts: Sequence[RowStatistics], dim: int = 0) -> RowStatistics:
    """The statistics of many calls in one, with fields (calls · B, Hq, L) or (B, calls · Hq, L).

    Args:
        parts: of the same heads and rows.
        dim: 0 to join the batches; 1 to join the heads.

    Raises:
        ValueError: for heads of calls for which :func:`packed_alike` does not hold.
    """
    first = parts[0]
    if not isinstance(first, PackedStatistics) or not all(
        packed_alike(first, part) for part in parts
    ):
        if dim:
            raise ValueError("parts must be packed rows of one dtype and shape to join their heads")
        return RowStatistics(
            RowState(*map(torch.cat, zip(*(part.state for part in parts), strict=True)))
        )
    dtype, B, H, L = first._rows[1:]
    rows = torch.stack([part._values() for part in parts if isinstance(part, PackedStatistics)])
    # the 2 counts of a row are int64, and its 9 sums of the dtype
    whole, calls = 2 * 8 // rows.element_size() * B * H * L, len(parts)
    counts = rows[:, :whole].reshape(calls, 2, B, H, whole // (2 * B * H))
    sums = rows[:, whole:].reshape(calls, 9, B, H, L)
    packed = torch.cat([part.movedim(0, 1 + dim).flatten() for part in (counts, sums)])
    shape = (calls * B, H, L) if dim == 0 else (B, calls * H, L)
    return PackedStatistics(packed, dtype, *shape)


#: Rows of calls so small that Python's own memory is had faster than a tensor, by size in bytes.
_SMALL = 16384
_BUFFERS: dict[int, Any] = {}


def _memory(size: int) -> Any:
    """A small buffer that stays alive as long as it is referenced."""
    if size not in _BUFFERS:
        _BUFFERS[size] = ctypes.c_char * size
    return _BUFFERS[size]()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    causal: Any,
    scale: Any,
    enable_gqa: Any,
    offset: Any,
    window: Any,
    backend: Any,
) -> tuple[Any, PackedStatistics] | None:
    """Run an ordinary call of attention on the CPU without PyTorch's dispatcher.

    Args:
        query: (B, Hq, L, E), a plain tensor without gradient, like the others.
        key: (B, H, S, E).
        value: (B, H, S, Ev), or None for the statistics alone.
        causal: as ``is_causal`` of :func:`acutance.attention`.
        scale: factor of the scores, or None.
        enable_gqa: whether several query heads may share a key head.
        offset: position of the first query among the keys.
        window: number of keys that a row sees at most, or None.
        backend: name of the requested backend, or "auto".

    Returns:
        The output (None without values) and the statistics. None for a call that is not ordinary or
        not valid: the caller then takes the general way, which checks it and raises.
    """
    if not unobserved():
        return None
    bare = value is None
    v: Any = key if bare else value
    dtype = query.dtype
    if (
        key.dtype is not dtype
        or v.dtype is not dtype
        or not (query.is_cpu and key.is_cpu and v.is_cpu)
        or is_autocast_enabled("cpu")
    ):
        return None
    code = DTYPES.get(dtype)
    if code is None:
        return None
    try:
        B, Hq, L, E = query.shape
        B1, H, S, E1 = key.shape
        B2, H2, S2, Ev = v.shape
        q0, q1, q2, q3 = query.stride()
        k0, k1, k2, k3 = key.stride()
        v0, v1, v2, v3 = v.stride()
        q, k, place = query.data_ptr(), key.data_ptr(), v.data_ptr()
    except (RuntimeError, ValueError):
        return None
    if (
        not (B == B1 == B2 and H == H2 and S == S2 and E == E1)
        or not (B and Hq and L and H and S and 0 < E <= MOST_WIDTH and 0 < Ev <= MOST_WIDTH)
        or not (q3 == k3 == v3 == 1)
        # the kernel would read a lazily negated view without its sign
        or query.is_neg()
        or key.is_neg()
        or v.is_neg()
        or not (q and k and place)
        or not ((enable_gqa is False and Hq == H) or (enable_gqa is True and Hq % H == 0))
        or not (causal is True or causal is False)
        or not (type(offset) is int and -MOST <= offset <= MOST)
    ):
        return None
    if window is None:
        window = 0
    elif type(window) is not int or not 0 < window <= MOST:
        return None
    if scale is None:
        scale = E**-0.5
    elif type(scale) is not float or not -1e300 < scale < 1e300:
        return None
    found = library.load()
    if isinstance(found, str):
        return None
    if backend == "auto":
        backend = dispatch.forced()
    if backend not in ("native", "auto"):
        return None
    count = B * Hq * L
    wide = dtype if dtype is float64 else float32
    step = 8 * count if dtype is float64 else 4 * count
    size = 16 * count + 9 * step
    rows: Any
    if size <= _SMALL:
        rows = _memory(size)
        at = addressof(rows)
    else:
        rows = torch.empty(size * count // step, dtype=wide)
        at = rows.data_ptr()
    m = at + 16 * count
    Z = m + step
    U = Z + step
    W = U + step
    Q = W + step
    mean = Q + step
    M2 = mean + step
    depth = M2 + step
    first = depth + step
    if bare:
        out, place, Ev = None, 0, 0
        sums = _SUMS(0, 0, 0, 0, at, m, Z, U, W, Q, mean, M2, depth, first, at + 8 * count)
    else:
        width = L * Ev
        if Ev == E and query.is_contiguous():
            out = empty_like(query)
        else:
            out = query.new_empty((B, Hq, L, Ev))
        place_out, last = out.data_ptr(), at + 8 * count
        sums = _SUMS(
            place_out, Hq * width, width, Ev, at, m, Z, U, W, Q, mean, M2, depth, first, last
        )
    threads = get_num_threads()
    # tuples put together with stars, or an argument a line, would be slower or longer
    # fmt: off
    call = _CALL(
        ABI, code, B, H, Hq // H, L, S, E, Ev, q, k, place, q0, q1, q2, k0, k1, k2, v0, v1, v2,
        scale, 0.0, causal, offset, window, threads,
    )
    # fmt: on
    status = found.forward(call, sums)
    if status:
        if status != UNFINISHED:
            check(status)
        return None
    return out, PackedStatistics(rows, wide, B, Hq, L)
