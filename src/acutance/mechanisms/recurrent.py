r"""Diagonal linear recurrences, real or complex: :math:`h_t = \lambda h_{t-1} + x_t` per channel.

Whole sequences are scanned in chunks, in O(n) time and memory; a single step needs only the last
state.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from acutance.mechanisms.decays import decay_statistics
from acutance.rowstats.weighted import WeightStatistics
from acutance.shapes import check_count, check_tensor

__all__ = ["diagonal_recurrence", "recurrence_statistics"]

#: Positions that meet by doubling; the chunks' last states are scanned in turn.
CHUNK = 64
#: Numbers of x that one pass takes.
STRETCH = 2**15


def diagonal_recurrence(x: Tensor, decay: Tensor, state: Tensor | None = None) -> Tensor:
    r"""All states of the recurrence :math:`h_t = \lambda h_{t-1} + x_t`.

    The last state of one call can be the ``state`` of the next, so sequences can be processed in
    pieces.

    Args:
        x: (..., L, N), real or complex, of single or double precision.
        decay: λ, (N,), real or complex, :math:`0 < |\lambda| \le 1`.
        state: :math:`h_{-1}`, (..., N); None for 0.

    Returns:
        h, (..., L, N), complex if x, λ or the state is. Twice differentiable in all three; the
        backward pass is the same scan in reverse.

    Raises:
        TypeError: if an argument is not a tensor of single or double precision.
        ValueError: if shapes do not fit, or :math:`|\lambda|` is outside (0, 1].

    Example:
        >>> diagonal_recurrence(torch.ones(4, 1), torch.tensor([0.5])).flatten()
        tensor([1.0000, 1.5000, 1.7500, 1.8750])

    Source:
        Martin & Cundy (2017), arXiv:1709.04057.
    """
    for name, tensor in (("x", x), ("decay", decay), ("state", state)):
        if tensor is None:
            continue
        if check_tensor(name, tensor).dtype not in _PRECISIONS:
            raise TypeError(
                f"{name} must be float32, float64, complex64 or complex128, got {tensor.dtype}"
            )
    if x.dim() < 2 or tuple(decay.shape) != (x.shape[-1],):
        raise ValueError(
            f"x must have shape (..., L, N) and decay (N,), got x {tuple(x.shape)}, decay "
            f"{tuple(decay.shape)}"
        )
    if not torch.compiler.is_compiling():
        size = decay.detach().abs()
        outside = ~((size > 0) & (size <= 1))
        if bool(outside.any()):
            raise ValueError(f"|decay| must be in (0, 1], got {size[outside][0].item():g}")
    dtype = torch.promote_types(x.dtype, decay.dtype)
    if state is not None:
        if state.shape != x.shape[:-2] + x.shape[-1:]:
            raise ValueError(
                "state must have the shape of x without its length, "
                f"{tuple(x.shape[:-2] + x.shape[-1:])}, got {tuple(state.shape)}"
            )
        dtype = torch.promote_types(dtype, state.dtype)
    if x.shape[-2] == 0:
        return x.to(dtype)
    if state is None:
        state = x.new_zeros(x.shape[:-2] + x.shape[-1:])
    return cast(Tensor, _Recurrence.apply(x, decay, state))  # type: ignore[no-untyped-call]


_PRECISIONS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class _Recurrence(torch.autograd.Function):
    """The scan, with a backward pass that stores only its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        h = _scan_segments(x, decay, state)
        ctx.save_for_backward(h, decay, state)
        ctx.real = not x.is_complex(), not decay.is_complex(), not state.is_complex()
        ctx.single = x.dtype, decay.dtype, state.dtype
        return h

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        """Gradients by a reverse scan; differentiable if a second derivative is needed."""
        h, decay, state = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients = _by_operations(upstream[0], h, decay, state)
        else:
            real, dtype = ctx.real[0], ctx.single[0]
            gradients = _returned(upstream[0], h, decay, state, dtype if real else h.dtype)
        return tuple(
            (part.real if real and part.is_complex() else part).to(dtype)
            for part, real, dtype in zip(gradients, ctx.real, ctx.single, strict=True)
        )


def _by_operations(
    upstream: Tensor, h: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a scan by differentiable operations."""
    back = decay.conj().resolve_conj()
    reversed_upstream, no_state = upstream.flip(-2), torch.zeros_like(state)
    grad = cast(Tensor, _Recurrence.apply(reversed_upstream, back, no_state)).flip(-2)  # type: ignore[no-untyped-call]
    first = grad[..., 0, :]
    by_decay = _by_channel(grad[..., 1:, :] * h[..., :-1, :].conj())
    by_decay = by_decay + _by_channel(first * state.conj())
    return grad, by_decay, first * back


def _returned(
    upstream: Tensor, h: Tensor, decay: Tensor, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a scan, segment by segment from the end; that of the input has ``dtype``."""
    grad = h.new_empty(h.shape, dtype=dtype)
    back = decay.conj().resolve_conj()
    exact = back.to(torch.complex128 if back.is_complex() else torch.float64)
    back = back.to(h.dtype)
    last, by_decay = torch.zeros_like(state, dtype=h.dtype), torch.zeros_like(back)
    for start in reversed(_starts(h)):
        stop = min(start + _size(h), h.shape[-2])
        piece = upstream[..., start:stop, :].flip(-2).to(h.dtype)
        piece[..., 0, :] += back * last
        segment_grad = _scan(piece, exact).flip(-2)
        last = segment_grad[..., 0, :]
        grad[..., start:stop, :] = segment_grad.real if dtype != h.dtype else segment_grad
        before = state.to(h.dtype) if start == 0 else h[..., start - 1, :]
        by_decay += _by_channel(last * before.conj())
        by_decay += _by_channel(segment_grad[..., 1:, :] * h[..., start : stop - 1, :].conj())
    return grad, by_decay, last * back


def _by_channel(products: Tensor) -> Tensor:
    """Sum over all dimensions but the channels."""
    return products.reshape(-1, products.shape[-1]).sum(0)


def _size(x: Tensor) -> int:
    """Number of positions per segment."""
    return max(1, STRETCH // max(1, x[..., :1, :].numel() * CHUNK)) * CHUNK


def _starts(x: Tensor) -> range:
    return range(0, x.shape[-2], _size(x))


def _scan_segments(x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """The scan in segments that fit in cache, each continuing from the one before."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, decay.dtype), state.dtype)
    h = x.new_empty(x.shape, dtype=dtype)
    exact = decay.to(torch.complex128 if decay.is_complex() else torch.float64)
    decay, last = decay.to(dtype), state.to(dtype)
    for start in _starts(x):
        piece = x[..., start : start + _size(x), :].to(dtype, copy=True)
        piece[..., 0, :] += decay * last
        h[..., start : start + _size(x), :] = _scan(piece, exact)
        last = h[..., start + piece.shape[-2] - 1, :]
    return h


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    """States h_t = λ h_{t−1} + x_t along the last but one dimension, starting at h_0 = x_0.

    Chunks are computed by doubling, then the chunks' last states by the same scan. ``decay`` is λ
    for each channel, in double precision, since its high powers amplify rounding.
    """
    length = x.shape[-2]
    if length <= CHUNK:
        return _doubled(x, decay)
    whole = length - length % CHUNK
    h = _doubled(x[..., :whole, :].unflatten(-2, (-1, CHUNK)), decay)
    exact = _powers(decay, CHUNK)
    powers = exact.to(x.dtype)
    ends = _scan(h[..., -1, :], exact[-1])
    h[..., 1:, :, :] += powers * ends[..., :-1, None, :]
    states = h.flatten(-3, -2)
    if whole == length:
        return states
    rest = _doubled(x[..., whole:, :], decay)
    rest += powers[: length - whole] * ends[..., -1:, :]
    return torch.cat([states, rest], -2)


def _doubled(x: Tensor, decay: Tensor) -> Tensor:
    """The recurrence over at most one chunk: h_t += λ^s h_{t−s} for s = 1, 2, 4, …."""
    h, factor, step = x.clone(), decay, 1
    while step < x.shape[-2]:
        h[..., step:, :] += factor.to(x.dtype) * h[..., :-step, :].clone()
        factor, step = factor * factor, 2 * step
    return h


def _powers(decay: Tensor, count: int) -> Tensor:
    """λ, λ², …, λ^count as (count, N)."""
    return decay.expand(count, -1).cumprod(0)


def recurrence_statistics(length: int, decay: Tensor) -> WeightStatistics:
    r"""Statistics of the weights in each state of a recurrence: :math:`|\lambda|^{t-j}` in row t.

    Args:
        length: number of rows, L.
        decay: λ, (N,), real or complex.

    Returns:
        Statistics in closed form, fields (L, N); see :func:`~acutance.mechanisms.decay_statistics`.

    Raises:
        ValueError: if :math:`|\lambda|` is outside (0, 1].

    Example:
        >>> ring = torch.polar(torch.tensor([0.9, 0.99]), torch.tensor([0.3, 2.0]))
        >>> recurrence_statistics(5000, ring).effective_keys[-1]
        tensor([ 19., 199.])
    """
    check_count("length", length, 0)
    rows = torch.arange(1, length + 1, device=check_tensor("decay", decay).device)
    return decay_statistics(rows[:, None], decay.abs())
