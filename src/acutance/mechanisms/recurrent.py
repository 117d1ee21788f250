r"""Diagonal linear recurrences, real or complex: :math:`h_t = \lambda h_{t-1} + x_t` per channel.

Whole sequences are scanned in chunks, in O(n) time and memory; a single step needs only the last
state.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from acutance.mechanisms.decays import decay_statistics
from acutance.rowstats.weighted import WeightStatistics
from acutance.shapes import check_count, check_number, check_tensor

__all__ = [
    "LRUParameters",
    "diagonal_recurrence",
    "linear_recurrent_unit",
    "lru_decays",
    "lru_parameters",
    "recurrence_statistics",
]

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


class LRUParameters(NamedTuple):
    r"""Parameters of a linear recurrent unit of N states, H inputs and M outputs.

    Attributes:
        nu_log: (N,), ν with :math:`|\lambda| = e^{-e^{\nu}}`: stable for any value.
        theta_log: (N,), θ; the angle of λ is :math:`e^{\theta}`.
        gamma_log: (N,), logarithm of the inputs' scale, initially :math:`\sqrt{1 - |\lambda|^2}`.
        B: (N, H), complex.
        C: (M, N), complex.
        D: (M, H), a skip connection; if M = H, a vector (H,) is its diagonal.
    """

    nu_log: Tensor
    theta_log: Tensor
    gamma_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


def lru_decays(nu_log: Tensor, theta_log: Tensor) -> Tensor:
    r""":math:`\lambda = e^{-e^\nu + i e^\theta}`, (N,), complex, always inside the unit circle.

    Example:
        >>> lru_decays(torch.tensor([-2.0]), torch.tensor([0.0])).abs()
        tensor([0.8734])

    Source:
        Orvieto et al. (2023), arXiv:2303.06349.
    """
    return torch.polar(torch.exp(-torch.exp(nu_log)), torch.exp(theta_log))


def lru_parameters(
    states: int,
    inputs: int,
    outputs: int | None = None,
    *,
    r_min: float = 0.0,
    r_max: float = 1.0,
    max_phase: float = 2 * math.pi,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> LRUParameters:
    r"""Parameters with the published initialisation: λ uniform on a ring in the complex plane.

    Args:
        states: number of states, N.
        inputs: number of inputs, H.
        outputs: number of outputs, M; None for H, with a diagonal D.
        r_min: inner radius, in [0, r_max).
        r_max: outer radius, in (r_min, 1].
        max_phase: largest angle, in (0, 2π].
        dtype: dtype of the real parameters, float32 or float64.
        device: device of the parameters.
        generator: random generator.

    Returns:
        The parameters, without ``requires_grad``.

    Raises:
        ValueError: if a size is not positive, or radii or phase are out of range.

    Example:
        >>> p = lru_parameters(256, 8, r_min=0.9, r_max=0.999)
        >>> radius = lru_decays(p.nu_log, p.theta_log).abs()
        >>> bool(((radius >= 0.9) & (radius <= 0.999)).all())
        True

    Source:
        Orvieto et al. (2023), arXiv:2303.06349, appendix A.
    """
    check_count("states", states, 1)
    check_count("inputs", inputs, 1)
    if outputs is not None:
        check_count("outputs", outputs, 1)
    if not 0 <= r_min < r_max <= 1:
        raise ValueError(
            f"r_min and r_max must satisfy 0 <= r_min < r_max <= 1, got r_min={r_min!r}, "
            f"r_max={r_max!r}"
        )
    if not 0 < check_number("max_phase", max_phase) <= 2 * math.pi:
        raise ValueError(f"max_phase must be in (0, 2π], got {max_phase!r}")
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be float32 or float64, got {dtype}")

    def uniform() -> Tensor:  # in (0, 1]: its logarithm is taken
        draw = torch.rand(states, generator=generator, dtype=torch.float64, device=device)
        return 1 - draw

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    # an area between circles, not their radii, is divided evenly
    nu = -0.5 * torch.log(uniform() * (r_max**2 - r_min**2) + r_min**2)
    nu = nu.clamp(min=torch.finfo(dtype).tiny)  # a draw of 1 with r_max = 1 is λ = 1
    theta = max_phase * uniform()
    rows = inputs if outputs is None else outputs
    D = normal(inputs) if outputs is None else normal(rows, inputs) / math.sqrt(inputs)
    return LRUParameters(
        nu_log=nu.log().to(dtype),
        theta_log=theta.log().to(dtype),
        gamma_log=(0.5 * torch.log(-torch.expm1(-2 * nu))).to(dtype),
        B=torch.complex(normal(states, inputs), normal(states, inputs)) / math.sqrt(2 * inputs),
        C=torch.complex(normal(rows, states), normal(rows, states)) / math.sqrt(states),
        D=D,
    )


def linear_recurrent_unit(
    inputs: Tensor, parameters: LRUParameters, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Run a linear recurrent unit over a sequence, or a piece of one.

    .. math:: h_t = \lambda h_{t-1} + e^\gamma B u_t, \qquad y_t = \mathrm{Re}(C h_t) + D u_t

    Args:
        inputs: u, (..., L, H), float32 or float64.
        parameters: from :func:`lru_parameters`, possibly trained.
        state: h before the first input, (..., N), complex; None for 0.

    Raises:
        TypeError: if inputs are not a real tensor of single or double precision.
        ValueError: if widths do not fit.

    Returns:
        y, (..., L, M), and the state after the last input, (..., N).

    Example:
        >>> p = lru_parameters(16, 4)
        >>> u = torch.randn(10, 4)
        >>> whole, _ = linear_recurrent_unit(u, p)
        >>> first, state = linear_recurrent_unit(u[:7], p)
        >>> last, _ = linear_recurrent_unit(u[7:], p, state)
        >>> torch.allclose(whole, torch.cat([first, last]), atol=1e-5)
        True

    Source:
        Orvieto et al. (2023), arXiv:2303.06349.
    """
    if check_tensor("inputs", inputs).dtype not in (torch.float32, torch.float64):
        raise TypeError(f"inputs must be float32 or float64, got {inputs.dtype}")
    if inputs.dim() < 2 or inputs.shape[-1] != parameters.B.shape[-1]:
        raise ValueError(
            f"inputs must have shape (..., L, H) with H={parameters.B.shape[-1]}, since B is "
            f"{tuple(parameters.B.shape)}, got {tuple(inputs.shape)}"
        )
    if inputs.shape[-2] == 0:
        raise ValueError(f"inputs must have a length of at least 1, got {tuple(inputs.shape)}")
    into = parameters.B * torch.exp(parameters.gamma_log).unsqueeze(-1)
    decay = lru_decays(parameters.nu_log, parameters.theta_log)
    D = parameters.D
    width = inputs[..., :1, 0].numel() * max(parameters.B.shape)
    size = CHUNK * max(1, 4 * STRETCH // (CHUNK * max(1, width)))
    outputs_so_far = []
    for u in inputs.split(size, -2):  # complex states of a stretch at a time
        h = diagonal_recurrence(u.to(into.dtype) @ into.mT, decay, state)
        state = h[..., -1, :]
        skip = D * u if D.dim() == 1 else u @ D.mT
        outputs_so_far.append((h @ parameters.C.mT).real + skip)
    assert state is not None
    return torch.cat(outputs_so_far, -2), state
