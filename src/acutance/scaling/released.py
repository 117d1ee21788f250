"""Laws of released models: by how far the context was stretched, or by position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acutance.scaling.base import Rows, Scaling
from acutance.shapes import check_count, check_number

__all__ = ["Llama4", "Mistral3", "Yarn"]


@dataclass(frozen=True)
class Yarn(Scaling):
    r"""YaRN's temperature, as the logits feel it: :math:`(0.1 \log s + 1)^2`, s ≥ 1.

    Implementations multiply the rotary cosines and sines, and so query *and* key, by
    :math:`0.1 \log s + 1`: logits get its square. The factor here multiplies the query alone, so it
    is the square. A model that already has YaRN in its rotary embedding needs no more.

    Args:
        s: how many times longer the context became, a number; 1 or less changes nothing.
        train_length: instead of s, take s = n / train_length row by row.
        coefficient: 0.1.

    Raises:
        ValueError: if neither or both of s and the training length are given, or out of range.

    Example:
        >>> Yarn(s=16.0).factor(torch.tensor([100]))
        tensor([1.6314])
        >>> Yarn(train_length=8192).factor(torch.tensor([100, 8192, 131072]))
        tensor([1.0000, 1.0000, 1.6314])

    Source:
        Peng et al. (2023), arXiv:2309.00071.
    """

    name: ClassVar[str] = "yarn"
    source: ClassVar[str] = "Peng et al. (2023), arXiv:2309.00071"
    s: float | None = None
    train_length: int | None = None
    coefficient: float = 0.1

    def __post_init__(self) -> None:
        if (self.s is None) == (self.train_length is None):
            raise ValueError(
                f"yarn has one of s and train_length, got s={self.s!r}, "
                f"train_length={self.train_length!r}"
            )
        if self.s is not None:
            self._set(s=check_number("s", self.s, above=0.0))
        if self.train_length is not None:
            check_count("train_length", self.train_length, 1)
        self._set(coefficient=check_number("coefficient", self.coefficient, above=0.0))

    def law(self, rows: Rows) -> Tensor:
        """The square of what YaRN multiplies both sides by."""
        if self.s is not None:
            return torch.full_like(rows.n, (self.coefficient * math.log(max(self.s, 1.0)) + 1) ** 2)
        assert self.train_length is not None
        stretch = (rows.n / self.train_length).clamp(min=1.0)
        return (self.coefficient * stretch.log() + 1) ** 2


@dataclass(frozen=True)
class Llama4(Scaling):
    r"""Llama 4's temperature, :math:`1 + c \log(\lfloor (p + 1)/L \rfloor + 1)` at position p.

    It acts by position, not by visible keys, and only in layers without rotary embedding. Without
    positions, p is n − 1.

    Args:
        coefficient: c.
        length: L, at least 1.

    Example:
        >>> Llama4().factor(torch.tensor([8191, 8192, 131072]))
        tensor([1.0000, 1.0693, 1.2833])

    Source:
        Meta (2025), Llama 4, as implemented in Hugging Face transformers, ``modeling_llama4``.
    """

    name: ClassVar[str] = "llama4"
    source: ClassVar[str] = "Meta (2025), Llama 4, in transformers"
    coefficient: float = 0.1
    length: int = 8192

    def __post_init__(self) -> None:
        self._set(coefficient=check_number("coefficient", self.coefficient))
        check_count("length", self.length, 1)

    def law(self, rows: Rows) -> Tensor:
        """By how many lengths were read before the next token."""
        return _steps(rows, rows.positions + 1, self.coefficient, self.length)


@dataclass(frozen=True)
class Mistral3(Scaling):
    r"""Mistral 3's temperature, :math:`1 + c \log(1 + \lfloor p/L \rfloor)` at position p.

    Llama 4's law without the + 1 on the position. Positions count from 0 and, where not given, are
    n − 1, so the step comes one token later: at 131072 visible keys p is 131071 and the factor
    still 1.208; the token at position 131072 has 1.220.

    Args:
        coefficient: c.
        length: L, at least 1.

    Example:
        >>> Mistral3().factor(torch.tensor([16384, 131072, 131073]))
        tensor([1.0000, 1.2079, 1.2197])

    Source:
        Mistral AI (2025), Ministral 3, as implemented in Hugging Face transformers,
        ``modeling_ministral3``.
    """

    name: ClassVar[str] = "mistral3"
    source: ClassVar[str] = "Mistral AI (2025), Ministral 3, in transformers"
    coefficient: float = 0.1
    length: int = 16384

    def __post_init__(self) -> None:
        self._set(coefficient=check_number("coefficient", self.coefficient))
        check_count("length", self.length, 1)

    def law(self, rows: Rows) -> Tensor:
        """By how many lengths were read before this token."""
        return _steps(rows, rows.positions, self.coefficient, self.length)


def _steps(rows: Rows, reached: Tensor, coefficient: float, length: int) -> Tensor:
    """One plus a multiple of log(1 + whole lengths), shaped as the rows."""
    whole = torch.div(reached, length, rounding_mode="floor").clamp(min=0).to(rows.n.dtype)
    return 1 + coefficient * whole.log1p().expand(torch.broadcast_shapes(whole.shape, rows.n.shape))
