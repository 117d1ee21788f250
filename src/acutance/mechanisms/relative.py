r"""Sums of decayed weights stored relative to their size, for decays that would underflow.

Far from a row's last key, or under a fast decay, all weights underflow although their ratios do
not. Here each feature of the carry has an exponent, :math:`k'_f = e^{\varepsilon_f} \kappa_f` with
the largest :math:`\kappa_f` near 1, and each row has one for its weights. In the exponents, sizes
are constants for autograd and powers of λ are not, so common factors of all weights cancel in
float64 in the gradient with respect to λ, before rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from acutance.mechanisms.scan import Carry, Sums, fading, has_squares, read, with_distant

__all__ = [
    "NOTHING",
    "absorb",
    "added",
    "advance",
    "chunks",
    "faded",
    "faded_from",
    "is_relative",
    "log_faded",
    "relative",
    "representable",
    "unit_of",
]

#: Exponent of a sum without a weight: finite, so that differences of two are no NaN.
NOTHING = -1e30
#: Largest exponent of a factor; what it multiplies is at most the reciprocal.
TOP = 87.0


def is_relative(carry: Carry) -> bool:
    """Whether the carry has exponents."""
    return carry.exponents.shape[-1] > 0


def relative(carry: Carry) -> Carry:
    """Add exponents to a carry that has none."""
    if is_relative(carry):
        return carry
    exponents = _log_size(carry.keys)
    unit = _factor(-torch.where(exponents > NOTHING / 2, exponents, 0.0), carry.keys)
    return _scaled(carry, unit)._replace(exponents=exponents)


def advance(carry: Carry, log_decay: Tensor, steps: int) -> Carry:
    """The carry ``steps`` positions later, without further keys."""
    return carry._replace(exponents=carry.exponents + log_decay.unsqueeze(-1) * steps)


def absorb(carry: Carry, k: Tensor, v: Tensor, log_decay: Tensor) -> Carry:
    """The carry after further keys, (B, H, 1, S, F), and values, (B, H, 1, S, Ev)."""
    if k.shape[-2] == 0:
        return carry
    return _followed(carry, _block(k, v, log_decay, has_squares(carry)), log_decay, k.shape[-2])


def chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    carry: Carry,
    size: int,
    strict: bool,
) -> tuple[Sums, Carry]:
    """Sums of whole chunks of ``size`` rows, for :func:`~acutance.mechanisms.scan.scan`."""
    assert log_decay is not None  # without one no sum has exponents
    q, k, v = (part.unflatten(-2, (-1, size)) for part in (q, k, v))
    near = (q @ k.transpose(-1, -2)) * fading(log_decay, size, strict, q.device)
    blocks = _block(k, v, log_decay, has_squares(carry))
    carries = [carry]
    for block in zip(*(part.unbind(3) for part in blocks), strict=True):
        carries.append(_followed(carries[-1], Carry(*block), log_decay, size))
    before = Carry(*(torch.stack(parts, 3) for parts in zip(*carries[:-1], strict=True)))
    steps = torch.arange(1, size + 1, device=q.device)
    reach = before.exponents.unsqueeze(-2) + _times(log_decay, steps)[:, :, None, :, None]
    unit = torch.maximum((_log_size(q) + reach).amax(-1), _log_size(near).amax(-1))
    safe = unit_of(unit)
    distant = read(q * _factor(reach - safe.unsqueeze(-1), q), before)
    near = near * _factor(-safe, near).unsqueeze(-1)
    return with_distant(near, v, distant._replace(exponents=unit)), carries[-1]


def added(left: Sums, right: Sums) -> Sums:
    """Sums of the same rows over two sets of keys."""
    if left.exponents.shape != left.total.shape:
        return Sums(*(x + y for x, y in zip(left, right, strict=True)))
    unit = torch.maximum(left.exponents, right.exponents)
    x, y = (_factor(side.exponents - unit, side.total) for side in (left, right))
    known = left.squares.shape == left.total.shape
    return Sums(
        left.values * x.unsqueeze(-1) + right.values * y.unsqueeze(-1),
        left.total * x + right.total * y,
        left.squares * x.square() + right.squares * y.square() if known else left.squares,
        unit,
    )


def unit_of(exponents: Tensor) -> Tensor:
    """The rows' exponents; 0 for rows without weight."""
    return torch.where(exponents > NOTHING / 2, exponents, 0.0)


def faded(log_decay: Tensor, distance: Tensor, exponents: Tensor) -> Tensor:
    """λ^distance / e^exponent: decay factors relative to the largest weight of each row.

    Args:
        log_decay: log λ of each query head, (H, G).
        distance: number of positions from key to query, broadcast against ``exponents``.
        exponents: log of the unit of each row, (B, H, G, L) or (B, H, G, L, S).

    Returns:
        Factors in the shape of ``exponents``, at most e^87, float64 if the device supports it.
    """
    power = log_decay.view(*log_decay.shape, *([1] * (exponents.dim() - 3)))
    return torch.exp((_wide(power) * distance - unit_of(exponents)).clamp(max=TOP))


def faded_from(log_decay: Tensor, distance: Tensor, size: Tensor, nearest: Tensor) -> Tensor:
    """Powers of λ at distances (L, S), relative to each row's largest weight.

    Args:
        log_decay: log λ of each query head, (H, G).
        distance: (L, S).
        size: log of the largest weight of each row.
        nearest: distance of that weight.
    """
    rate = _wide(log_decay)[:, :, None]
    start = unit_of(size - rate.detach() * nearest)
    power = rate.unsqueeze(-1) * (distance - nearest.unsqueeze(-1)) - start.unsqueeze(-1)
    return torch.exp(power.clamp(max=TOP))


def log_faded(weights: Tensor, log_decay: Tensor, distance: Tensor) -> Tensor:
    """Log of the absolute weights (B, H, G, L, S) with decay at distances (L, S)."""
    return _log_size(weights) + _wide(log_decay)[:, :, None, None] * distance.abs()


def representable(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit of each row, limited so that products with it neither overflow nor underflow."""
    limit = -math.log(torch.finfo(dtype).tiny) / 2
    return torch.exp(unit_of(exponents.detach()).clamp(-limit, limit)).to(dtype)


def _block(k: Tensor, v: Tensor, log_decay: Tensor, squares: bool) -> Carry:
    """Sums over one block of keys, or of many: (B, H, 1, [N,] C, F) gives (B, H, G, [N,] ...)."""
    ages = torch.arange(k.shape[-2] - 1, -1, -1, device=k.device)
    fade = _times(log_decay, ages).unsqueeze(-1)
    fade = fade.unsqueeze(2) if k.dim() == 6 else fade
    exponents = (_log_size(k) + fade).amax(-2)
    k = k * _factor(fade - exponents.unsqueeze(-2), k)
    transposed = k.transpose(-1, -2)
    return Carry(
        transposed @ v, k.sum(-2), transposed @ k if squares else transposed[..., :0], exponents
    )


def _followed(carry: Carry, block: Carry, log_decay: Tensor, length: int) -> Carry:
    """The carry after a block of this length."""
    moved = advance(carry, log_decay, length)
    unit = torch.maximum(moved.exponents, block.exponents)
    old = _scaled(moved, _factor(moved.exponents - unit, carry.keys))
    new = _scaled(block, _factor(block.exponents - unit, carry.keys))
    return Carry(old.values + new.values, old.keys + new.keys, old.squares + new.squares, unit)


def _scaled(carry: Carry, factor: Tensor) -> Carry:
    """The carry with each feature multiplied by its factor, (B, H, G, F)."""
    column = factor.unsqueeze(-1)
    squares = carry.squares
    if has_squares(carry):
        squares = squares * column * factor.unsqueeze(-2)
    return carry._replace(values=carry.values * column, keys=carry.keys * factor, squares=squares)


def _wide(x: Tensor) -> Tensor:
    """Convert to the dtype of exponents, which need more digits than float32."""
    return x if x.device.type == "mps" else x.double()


def _log_size(x: Tensor) -> Tensor:
    """Log of absolute values; a very low number for zeros."""
    size = x.detach().abs()
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(size > 0, _wide(torch.log(size.clamp(min=tiny))), NOTHING)


def _factor(exponents: Tensor, like: Tensor) -> Tensor:
    """exp(exponents) in the dtype of ``like``, without overflow."""
    return torch.exp(exponents.clamp(max=TOP)).to(like.dtype)


def _times(log_decay: Tensor, steps: Tensor) -> Tensor:
    """Log λ times these steps: (H, G, *steps' shape)."""
    return _wide(log_decay).view(*log_decay.shape, *([1] * steps.dim())) * steps
