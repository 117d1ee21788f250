"""The forward and the backward pass on a GPU: arguments gathered, kernels launched."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.kernels import blocked
from acutance.kernels.backward import Coefficients, converted, row_coefficients, sink_gradient
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.call import ALL, Gradients, KernelCall, SumGradients, Sums
from acutance.kernels.gpu.arguments import (
    FORWARD,
    GAPS,
    KEYS,
    QUERIES,
    Launcher,
    by_head,
    call_arguments,
    dense_rows,
    supported,
)
from acutance.kernels.gpu.forward_kernel import forward_kernel, gaps_kernel
from acutance.kernels.gpu.gradients import (
    COEFFICIENTS,
    Terms,
    keys_kernel,
    largest_kernel,
    queries_kernel,
)
from acutance.kernels.gpu.key_moments import chunk_size, has_moments, row_moments
from acutance.kernels.native import new_sums
from acutance.kernels.tiles import NO_KEY, finite
from acutance.masks import Masking

_launch = Launcher(forward_kernel, FORWARD)
_count = Launcher(gaps_kernel, GAPS, fixed=True)


def forward(call: KernelCall) -> Sums:
    """Output and statistics sums of softmax attention, for validated input on a CUDA device.

    Computes what :func:`acutance.kernels.blocked.forward` does, and calls it where these kernels
    cannot run (:func:`~acutance.kernels.gpu.supported`). For the output, weights are rounded to the
    values' dtype before the product, as in fused attention kernels. The sums that the metric
    ``noise_gain`` needs (Σ e v, Σ e² v and Σ e² ‖v‖² over the keys, with unnormalised weights e and
    values v) use weights in float32.

    Returns:
        The sums of every row in float32; ``out`` in the query's dtype.
    """
    if supported(call) is not None:
        return blocked.forward(call)
    query, key, value, noise = call.query, call.key, call.value, call.noise
    B, Hq, L, E = query.shape
    width = 0 if value is None else value.shape[-1]
    query, key = dense_rows(query), dense_rows(key)
    values = key if value is None else dense_rows(value)

    def blocks(tile: dict[str, int]) -> int:
        return B * Hq * -(-L // tile["BLOCK_M"])

    sums = new_sums(query, value, noise, call.gaps)
    sums.gaps.zero_()
    if noise and value is None:
        sums.R2.zero_()
    noise = noise and value is not None
    summed = has_moments(call)
    means, squares = row_moments(query, key, call) if summed else (query, query)
    common = call_arguments(call, query, key)
    extra = {
        "VALUE": by_head(values),
        "CENTRE": values.float().mean(2) if noise else query,
        "ROW_MEANS": means,
        "ROW_SQUARES": squares,
        "SINKS": query if call.sinks is None else call.sinks.contiguous(),
        "SUMS": sums,
        "EV": width,
        "HAS_SINKS": call.sinks is not None,
        "NOISE": noise,
        "CHUNK": chunk_size(E) if summed else 0,
    }
    _launch(blocks, **common, **extra)
    if call.gaps:
        _count(blocks, **common, M=sums.m, GAPS=sums.gaps)
    return sums


_launch_queries = Launcher(queries_kernel, QUERIES)
_launch_keys = Launcher(keys_kernel, KEYS)
_launch_largest = Launcher(largest_kernel, QUERIES)
#: Column that no tile reaches: first or largest key of a row without any.
_NOWHERE = 2**31 - 1


def unsupported_gradient(masking: Masking, wanted: tuple[bool, ...]) -> str | None:
    """Why these kernels cannot compute the gradient of a mask or bias; None if they can.

    They can for a full (B, Hq, L, S) mask, whose entries belong to one score each, and not for one
    that rows or heads share.
    """
    pairs = masking.batch * masking.heads * masking.group * masking.queries * masking.keys
    for name, want, mask in zip(
        ("attn_mask", "bias"), wanted[3:5], (masking.attn_mask, masking.bias), strict=True
    ):
        if want and (mask is None or mask.numel() != pairs):
            return f"the gradient of a broadcast {name}"
    return None


def backward(
    grad: SumGradients, sums: Sums, call: KernelCall, wanted: tuple[bool, ...] = ALL
) -> Gradients:
    """Gradients of a forward call from those of its results.

    Computes what :func:`acutance.kernels.backward.backward` does, and calls it where these kernels
    cannot run (:func:`unsupported_gradient`, dropout, float64). No sum is added up by several
    programs, so with the same tile sizes results are identical from run to run.
    """
    query, key, value, masking, *_ = call
    if supported(call) is not None or unsupported_gradient(masking, wanted) is not None:
        return blocked_backward(grad, sums, call, wanted)
    B, Hq, L, _ = query.shape
    H, S = key.shape[1:3]
    width = 0 if value is None else value.shape[-1]
    want_q, want_k, want_v, want_mask, want_bias, want_sinks = wanted

    def blocks(tile: dict[str, int]) -> int:
        return B * Hq * -(-L // tile["BLOCK_M"])

    query, key = dense_rows(query), dense_rows(key)
    values = key if value is None else dense_rows(value)

    d_out = query  # is not read
    if grad.out is not None and grad.out.numel():
        d_out = grad.out.to(query.dtype).contiguous()
    grad = converted(grad, torch.float32)
    sink = None if call.sinks is None else call.sinks.float().view(1, -1, 1)
    found = row_coefficients(sums, grad, sink)
    table, undo = _table(sums, grad, found, half=query.dtype == torch.float16)
    terms = Terms(
        square=found.square is not None,
        weight=found.weight is not None,
        out=found.inverse is not None,
        level=found.plain is not None,
        first=grad.first is not None,
        largest=grad.m is not None,
    )
    indices = torch.full((2, B, Hq, L), _NOWHERE, dtype=torch.int32, device=query.device)
    common = call_arguments(call, query, key)
    if terms.first:
        indices[0].copy_(torch.where(sums.first_index == NO_KEY, _NOWHERE, sums.first_index))
    if terms.largest:
        _launch_largest(blocks, **common, INDICES=indices[1])
    common |= {
        "VALUE": by_head(values),
        "GRAD_OUT": d_out,
        "ROWS": table,
        "INDICES": indices,
        "UNDO": undo,
        "count": B * Hq * L,
        "EV": width,
        "TERMS": terms,
    }
    dq = dk = dv = added = None
    if want_mask or want_bias:
        added = torch.zeros(B, Hq, L, S, dtype=torch.float32, device=query.device)
    if want_q or added is not None:
        dq = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        given = table if added is None else added
        _launch_queries(blocks, **common, DQ=dq, ADDED=given, ADD=added is not None)
    if want_k or want_v:
        dk = torch.empty(key.shape, dtype=key.dtype, device=key.device)
        if value is not None:
            new = torch.empty if terms.out else torch.zeros
            dv = new(value.shape, dtype=value.dtype, device=value.device)
        _launch_keys(
            lambda tile: B * H * -(-S // tile["BLOCK_N"]),
            **common, DK=dk, DV=dk if dv is None else dv,
        )  # fmt: skip
    if added is not None:
        added *= undo
    return Gradients(
        query=dq if want_q else None,
        key=dk if want_k else None,
        value=dv if want_v else None,
        attn_mask=_shaped(added, masking.attn_mask) if want_mask else None,
        bias=_shaped(added, masking.bias) if want_bias else None,
        sinks=sink_gradient(call.sinks, found) if want_sinks else None,
    )


def _shaped(added: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Gradients of all scores in the shape and dtype of a full mask; None if not requested."""
    if added is None or mask is None:
        return None
    return added.reshape(mask.shape).to(mask.dtype, copy=True)


def _table(
    sums: Sums, grad: SumGradients, found: Coefficients, half: bool
) -> tuple[Tensor, Tensor]:
    """All coefficients, (10, B, Hq, L), and the factor to multiply gradients by at the end.

    float16 gradients of scores would underflow where many rows share one loss. So all are
    multiplied by the power of two that makes the largest coefficient about 1.
    """
    parts = found._asdict() | {"shift": finite(sums.m), "first": grad.first, "largest": grad.m}
    none = torch.zeros_like(sums.Z)
    table = torch.stack([none if parts[name] is None else parts[name] for name in COEFFICIENTS])
    undo = table.new_ones(1)
    if half:
        largest = table[1:].abs().nan_to_num(0.0, 0.0, 0.0).amax()
        undo = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30)))).view(1)
        table[1:] /= undo
    return table, undo
