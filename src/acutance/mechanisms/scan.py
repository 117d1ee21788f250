r"""Sums over keys for linear attention, stored as a state and advanced in chunks.

With features q', k' and a decay λ, row i weighs key j by :math:`a_{ij} = \lambda^{i-j} q'_i \cdot
k'_j`. Its numerator, sum and sum of squares are

.. math::

    \sum_j a_{ij} v_j = q'_i \sum_j \lambda^{i-j} k'_j v_j^\top, \qquad
    \sum_j a_{ij} = q'_i \cdot \sum_j \lambda^{i-j} k'_j, \qquad
    \sum_j a_{ij}^2 = q_i'^\top \Bigl( \sum_j \lambda^{2(i-j)} k'_j k_j'^\top \Bigr) q'_i,

so no row is formed beyond a chunk of neighbours. Tensors here have five dimensions, (B, H, G, ...),
G query heads to a key head; keys and values have G = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Carry",
    "Sums",
    "absorb",
    "advance",
    "fading",
    "empty_carry",
    "read",
    "scan",
    "with_distant",
]


class Carry(NamedTuple):
    """Sums over all keys so far, each decayed by its distance from the last position.

    Attributes:
        values: Σ k' vᵀ, (B, H, G, F, Ev).
        keys: Σ k', (B, H, G, F).
        squares: Σ k' k'ᵀ with squared decay, (B, H, G, F, F); (..., 0) if sums of squares are not
            needed.
        exponents: log of the unit of each feature, (B, H, G, F); (..., 0) if all units are 1
            (:mod:`acutance.mechanisms.relative`).
    """

    values: Tensor
    keys: Tensor
    squares: Tensor
    exponents: Tensor


class Sums(NamedTuple):
    """Sums of each row's weights.

    Attributes:
        values: Σ weights times values, (B, H, G, L, Ev).
        total: Σ weights, (B, H, G, L).
        squares: Σ squared weights, (B, H, G, L), or (..., 0).
        exponents: log of the unit of each row's weights, (B, H, G, L); (..., 0) if all units are 1.
    """

    values: Tensor
    total: Tensor
    squares: Tensor
    exponents: Tensor


def empty_carry(k: Tensor, v: Tensor, group: int, squares: bool) -> Carry:
    """A carry of zeros: the sums before the first key.

    Args:
        k: key features (B, H, ..., F), which give batch, heads, features, dtype and device.
        v: values (..., Ev), which give their width.
        group: number of query heads per key head, G.
        squares: whether to include sums of squares.
    """
    batch, heads, features = k.shape[0], k.shape[1], k.shape[-1]
    rows = (batch, heads, group, features)
    return Carry(
        k.new_zeros(*rows, v.shape[-1]),
        k.new_zeros(rows),
        k.new_zeros(*rows, features if squares else 0),
        k.new_zeros(*rows[:3], 0),
    )


def has_squares(carry: Carry) -> bool:
    """Whether the carry has sums of squares."""
    return carry.squares.shape[-1] > 0


def _powers(log_decay: Tensor, exponents: Tensor) -> Tensor:
    """λ to these powers: (H, G, *exponents' shape)."""
    shape = (*log_decay.shape, *([1] * exponents.dim()))
    return torch.exp(log_decay.view(shape) * exponents.to(log_decay.dtype))


def advance(carry: Carry, log_decay: Tensor | None, steps: int) -> Carry:
    """The carry ``steps`` positions later, without further keys."""
    if log_decay is None or steps == 0:
        return carry
    once = torch.exp(log_decay * steps).unsqueeze(-1)
    twice = once.square().unsqueeze(-1)
    return Carry(
        carry.values * once.unsqueeze(-1),
        carry.keys * once,
        carry.squares * twice,
        carry.exponents,
    )


def absorb(carry: Carry, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Carry:
    """The carry after further keys, (B, H, 1, S, F), by one matrix product."""
    length = k.shape[-2]
    if length == 0:
        return carry
    before = advance(carry, log_decay, length)
    new = _summary(k, v, log_decay, has_squares(carry))
    return Carry(*(x + y for x, y in zip(before, new, strict=True)))


def _summary(k: Tensor, v: Tensor, log_decay: Tensor | None, squares: bool) -> Carry:
    """Sums over one block of keys, or of many: (B, H, 1, [N,] C, F) gives (B, H, G, [N,] ...)."""
    if log_decay is not None:
        ages = torch.arange(k.shape[-2] - 1, -1, -1, device=k.device)
        weights = _powers(log_decay, ages).unsqueeze(-1)
        k = k * (weights.unsqueeze(2) if k.dim() == 6 else weights)
    transposed = k.transpose(-1, -2)
    return Carry(
        transposed @ v,
        k.sum(-2),
        transposed @ k if squares else transposed[..., :0],
        transposed[..., 0, :0],
    )


def read(q: Tensor, carry: Carry) -> Sums:
    """Sums of rows q (..., L, F) that see exactly the carry's keys, without decay."""
    squares = ((q @ carry.squares) * q).sum(-1) if has_squares(carry) else q[..., :0, 0]
    total = (q @ carry.keys.unsqueeze(-1)).squeeze(-1)
    return Sums(q @ carry.values, total, squares, q[..., :0, 0])


#: Whole chunks: q, k, v, log λ, the carry, the rows of a chunk and ``strict`` to what a scan gives.
Chunks = Callable[[Tensor, Tensor, Tensor, Tensor | None, Carry, int, bool], tuple[Sums, Carry]]


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    carry: Carry,
    *,
    chunk: int,
    strict: bool = False,
    chunks: Chunks | None = None,
) -> tuple[Sums, Carry]:
    """Causal sums: row i sees the carry's keys and keys 0 … i.

    Args:
        q: (B, H, G, L, F).
        k: (B, H, 1, L, F), 0 for hidden keys.
        v: (B, H, 1, L, Ev), finite.
        log_decay: log λ, (H, G) or (H, 1), or None for λ = 1.
        carry: sums over earlier keys.
        chunk: number of rows per chunk; within a chunk, weights are computed directly.
        strict: exclude key i from row i.
        chunks: function that handles whole chunks; None for units of 1.

    Returns:
        The rows' sums, and the carry after the last key.
    """
    length = q.shape[-2]
    whole = length - length % chunk
    sums_so_far = []
    for part, size in ((slice(0, whole), chunk), (slice(whole, length), length - whole)):
        if part.stop > part.start:
            rows, keys, values = q[..., part, :], k[..., part, :], v[..., part, :]
            sums, carry = (chunks or _chunks)(rows, keys, values, log_decay, carry, size, strict)
            sums_so_far.append(sums)
    if not sums_so_far:
        return read(q, carry), carry
    if len(sums_so_far) == 1:
        return sums_so_far[0], carry
    return Sums(
        torch.cat([sums.values for sums in sums_so_far], -2),
        torch.cat([sums.total for sums in sums_so_far], -1),
        torch.cat([sums.squares for sums in sums_so_far], -1),
        torch.cat([sums.exponents for sums in sums_so_far], -1),
    ), carry


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    carry: Carry,
    size: int,
    strict: bool,
) -> tuple[Sums, Carry]:
    """Sums of whole chunks: direct weights within a chunk, carries for earlier keys."""
    squares = has_squares(carry)
    q, k, v = (part.unflatten(-2, (-1, size)) for part in (q, k, v))
    places = torch.arange(size, device=q.device)
    near = q @ k.transpose(-1, -2)
    if log_decay is None:
        near = near.masked_fill(~_seen(places, strict), 0.0)
        far = q
    else:
        near = near * fading(log_decay, size, strict, q.device)
        far = q * _powers(log_decay, places + 1)[:, :, None, :, None]
    carries, after = _prefixes(carry, _summary(k, v, log_decay, squares), log_decay, size)
    distant = read(far, carries)
    return with_distant(near, v, distant), after


def with_distant(near: Tensor, v: Tensor, distant: Sums) -> Sums:
    """Add the sums over earlier keys to the weights within each chunk."""
    has_squares = distant.squares.shape == distant.total.shape
    return Sums(
        (near @ v + distant.values).flatten(-3, -2),
        (near.sum(-1) + distant.total).flatten(-2, -1),
        (near.square().sum(-1) + distant.squares).flatten(-2, -1)
        if has_squares
        else distant.squares[..., 0, :],
        distant.exponents.flatten(-2, -1)
        if distant.exponents.shape == distant.total.shape
        else distant.exponents[..., 0, :],
    )


def _seen(positions: Tensor, strict: bool) -> Tensor:
    """Boolean (C, C), True where row i of a chunk sees key j of it: j ≤ i, or j < i if ``strict``.

    ``positions`` are the positions 0 … C − 1 in the chunk.
    """
    return positions[:, None] > positions if strict else positions[:, None] >= positions


def fading(log_decay: Tensor, size: int, strict: bool, device: torch.device) -> Tensor:
    """Decay factors exp(log_decay · (i − j)) of key j in row i of a chunk, (H, G, 1, size, size).

    They are 0 for later keys j > i, and with ``strict`` also for j = i. ``log_decay`` is (H, G).
    """
    places = torch.arange(size, device=device)
    fade = _powers(log_decay, (places[:, None] - places).clamp(min=0))
    return fade.masked_fill(~_seen(places, strict), 0.0).unsqueeze(2)


def _prefixes(
    carry: Carry, blocks: Carry, log_decay: Tensor | None, size: int
) -> tuple[Carry, Carry]:
    """The carry before each of N blocks (dimension 3), and the carry after the last."""
    before, last = [], []
    fade = None if log_decay is None else torch.exp(log_decay * size)
    for name, first, new in zip(Carry._fields, carry, blocks, strict=True):
        if new.shape[-1] == 0:
            before.append(new)
            last.append(first)
            continue
        if fade is None:
            steps = torch.cat([first.unsqueeze(3), new], 3).cumsum(3)
            before.append(steps[:, :, :, :-1])
            last.append(steps[:, :, :, -1])
            continue
        factor = fade.view(*fade.shape, *([1] * (first.dim() - 3)))
        factor = factor.square() if name == "squares" else factor
        states = [first]
        for block in new.unbind(3):
            states.append(states[-1] * factor + block)
        before.append(torch.stack(states[:-1], 3))
        last.append(states[-1])
    return Carry(*before), Carry(*last)
