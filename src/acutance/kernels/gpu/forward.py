"""The forward pass on a GPU: the output and every row sum in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.kernels import blocked
from acutance.kernels.call import KernelCall, Sums
from acutance.kernels.gpu.arguments import (
    dense_rows,
    flags,
    mask_arguments,
    padded,
    strides,
    supported,
)
from acutance.kernels.gpu.forward_kernel import forward_kernel
from acutance.kernels.gpu.gaps_kernel import gaps_kernel
from acutance.kernels.gpu.key_moments import chunk_size, has_moments, row_moments
from acutance.kernels.gpu.tuning import FORWARD, GAPS, Launcher, size_class
from acutance.rowstats.gaps import BINS

__all__ = ["forward"]

_launch = Launcher(forward_kernel, FORWARD, ["size", "E", "EV", "NOISE", "CHUNK", "FLAGS"])
_count = Launcher(gaps_kernel, GAPS, [], fixed=True)


def forward(call: KernelCall) -> Sums:
    """The output and every row sum of softmax attention, for validated input on a CUDA device.

    Means what :func:`acutance.kernels.blocked.forward` means. Weights are rounded to the values'
    dtype before they multiply them, as fused attention kernels do, except where ``noise`` asks for
    the sums of the values themselves.

    Returns:
        The sums in float32; ``out`` in the query's dtype. What these kernels do not take
        (:func:`~acutance.kernels.gpu.supported`) is the blocked path's.
    """
    if supported(call) is not None:
        return blocked.forward(call)
    query, key, value, _, rule, noise, gaps = call
    B, Hq, L, E = query.shape
    width = 0 if value is None else value.shape[-1]
    query, key = dense_rows(query), dense_rows(key)
    values = key if value is None else dense_rows(value)

    def rows(*extra: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(B, Hq, L, *extra, dtype=dtype, device=query.device)

    kept = width if noise else 0
    sums = Sums(
        out=rows(width, dtype=query.dtype),
        n=rows(dtype=torch.int64),
        **{name: rows() for name in Sums._fields[2:11]},
        first_index=rows(dtype=torch.int64),
        O=rows(kept),
        R1=rows(kept),
        R2=(rows() if value is not None else rows().zero_()) if noise else rows(0),
        gaps=rows(BINS if gaps else 0, dtype=torch.int32).zero_(),
    )
    noise = noise and value is not None
    centre = values.float().mean(2) if noise else query
    summed = has_moments(call)
    means, squares = row_moments(query, key, call) if summed else (query, query)
    arguments = {
        "QUERY": query,
        "KEY": key,
        "VALUE": values,
        "CENTRE": centre,
        "ROW_MEANS": means,
        "ROW_SQUARES": squares,
        "OUT": sums.out,
        "N": sums.n,
        "M": sums.m,
        "NORMALISER": sums.Z,
        "FIRST_MOMENT": sums.U,
        "SECOND_MOMENT": sums.W,
        "SQUARES": sums.Q,
        "MEAN": sums.mean,
        "DEVIATIONS": sums.M2,
        "DEPTH": sums.depth,
        "FIRST": sums.first,
        "FIRST_INDEX": sums.first_index,
        "SUM": sums.O,
        "NOISE_MEAN": sums.R1,
        "NOISE_SPREAD": sums.R2,
        **strides("query", query),
        **strides("key", key),
        **strides("value", values),
        **mask_arguments(call),
        "size": size_class(L),
        "E": E,
        "EV": width,
        "BLOCK_E": padded(E),
        "BLOCK_V": padded(max(1, width)),
        "HAS_SINKS": rule.sinks is not None,
        "NOISE": noise,
        "CHUNK": chunk_size(E) if summed else 0,
        "FLAGS": flags(call),
    }
    _launch(lambda sizes: B * Hq * -(-L // sizes["BLOCK_M"]), arguments)
    if gaps:
        names = ("QUERY", "KEY", "M", "E", "BLOCK_E", "FLAGS")
        _count(
            lambda sizes: B * Hq * -(-L // sizes["BLOCK_M"]),
            {
                "GAPS": sums.gaps,
                **{name: arguments[name] for name in names},
                **strides("query", query),
                **strides("key", key),
                **{name: part for name, part in mask_arguments(call).items() if name != "SINKS"},
            },
        )
    return sums
