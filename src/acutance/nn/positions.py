"""Positions of a module's queries and keys: rotary embedding and ALiBi."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from acutance.mechanisms import alibi_decays
from acutance.shapes import check_number, check_tensor


def rotate(x: Tensor, offset: int = 0, *, base: float = 10_000.0) -> Tensor:
    r"""Rotary position embedding: rotate pairs of components by angles proportional to position.

    Component i is paired with component :math:`i + E/2` and rotated by :math:`p \, b^{-2i/E}` at
    position p: the half rotation of GPT-NeoX and Hugging Face's Llama. The original paper pairs
    neighbours :math:`(2i, 2i+1)`, which differs only in the order of components.

    Args:
        x: (..., L, E), E even.
        offset: position of the first row.
        base: b, positive; larger bases rotate more slowly.

    Returns:
        The rotated vectors, in the dtype of ``x``. Angles are computed in float64, the rotation in
        float32 or float64.

    Raises:
        TypeError: if x is not a Tensor.
        ValueError: if E is odd or the base not positive.

    Example:
        A dot product of two turned vectors depends on their distance alone:

        >>> q, k = torch.randn(2, 1, 8, dtype=torch.float64)
        >>> near = rotate(q, 7) @ rotate(k, 4).mT
        >>> far = rotate(q, 1007) @ rotate(k, 1004).mT
        >>> torch.allclose(near, far)
        True

    Source:
        Su et al. (2021), arXiv:2104.09864.
    """
    width = check_tensor("x", x).shape[-1]
    if x.dim() < 2 or width % 2:
        raise ValueError(
            f"rotary embedding needs shape (..., L, E) with E even, got {tuple(x.shape)}"
        )
    check_number("base", base, above=0.0)
    half = width // 2
    exact = torch.float32 if x.device.type == "mps" else torch.float64  # Metal has no float64
    places = torch.arange(x.shape[-2], dtype=exact, device=x.device) + offset
    speeds = base ** (torch.arange(half, dtype=exact, device=x.device) / -half)
    angle = places[:, None] * speeds
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = x.to(dtype).split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions, as an option of a module: see :func:`rotate`.

    Args:
        base: base of the angular frequencies.

    Example:
        >>> Rotary(base=500_000.0)(torch.ones(1, 4, 2)).shape
        torch.Size([1, 4, 2])
    """

    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_number("base", self.base, above=0.0)

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate vectors (..., L, E)."""
        return rotate(x, offset, base=self.base)


@dataclass(frozen=True)
class Alibi:
    r"""A bias that decreases with distance, :math:`-m_h |i - j|`, as an option of a module.

    Args:
        slopes: m for each query head; None for ALiBi's, :math:`2^{-8(h+1)/H}`.

    Example:
        >>> Alibi().of(heads=4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])

    Source:
        Press, Smith & Lewis (2021), arXiv:2108.12409.
    """

    slopes: Sequence[float] | None = None

    def of(
        self,
        heads: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The slopes for a number of query heads, (Hq,)."""
        if self.slopes is None:
            return -torch.log(alibi_decays(heads, dtype=torch.float64)).to(dtype).to(device)
        slopes = torch.tensor([check_number("slopes", m) for m in self.slopes], dtype=torch.float64)
        if slopes.shape != (heads,):
            raise ValueError(
                f"slopes must have one number for each of {heads} heads, got {len(slopes)}"
            )
        return slopes.to(dtype).to(device)


#: How a module knows positions: not at all, by rotation, or by a bias.
Positions: TypeAlias = str | Rotary | Alibi | None


def find_positions(positions: Positions, *, alibi: bool = True) -> Rotary | Alibi | None:
    """The positions for a name, or the given ones.

    Raises:
        ValueError: if the name is unknown, or ALiBi is not supported here.
        TypeError: if it is neither a name nor a record.

    Example:
        >>> find_positions("rotary")
        Rotary(base=10000.0)
    """
    known = "None, 'rotary' or 'alibi'" if alibi else "None or 'rotary'"
    if isinstance(positions, str):
        if positions not in ("rotary", "alibi"):
            raise ValueError(f"positions must be {known}, got {positions!r}")
        positions = Rotary() if positions == "rotary" else Alibi()
    if isinstance(positions, Alibi) and not alibi:
        raise ValueError(
            f"positions must be {known}, got 'alibi': these weights do not support a bias"
        )
    if positions is not None and not isinstance(positions, Rotary | Alibi):
        raise TypeError(f"positions must be {known}, got {type(positions).__name__}")
    return positions
