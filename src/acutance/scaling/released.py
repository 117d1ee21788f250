"""Scalings of released models: by stretched context, by position, or by the entropy of the row."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from acutance.scaling.base import Rows, Scaling, check_per_head
from acutance.shapes import check_count, check_number

__all__ = ["AdaptivePoly", "Llama4", "Mistral3", "Yarn"]


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
                f"yarn needs either s or train_length, got s={self.s!r}, "
                f"train_length={self.train_length!r}"
            )
        if self.s is not None:
            self._set(s=check_number("s", self.s, above=0.0))
        if self.train_length is not None:
            check_count("train_length", self.train_length, 1)
        self._set(coefficient=check_number("coefficient", self.coefficient, above=0.0))

    def law(self, rows: Rows) -> Tensor:
        """The factor (c log s + 1)² of each row, with s at least 1 and c the ``coefficient``."""
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
        """The factor 1 + c log(⌊(p + 1) / L⌋ + 1) of the row at position p."""
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
        """The factor 1 + c log(⌊p / L⌋ + 1) of the row at position p."""
        return _steps(rows, rows.positions, self.coefficient, self.length)


def _steps(rows: Rows, reached: Tensor, coefficient: float, length: int) -> Tensor:
    """One plus a multiple of log(1 + whole lengths), shaped as the rows."""
    whole = torch.div(reached, length, rounding_mode="floor").clamp(min=0).to(rows.n.dtype)
    return 1 + coefficient * whole.log1p().expand(torch.broadcast_shapes(whole.shape, rows.n.shape))


@dataclass(frozen=True)
class AdaptivePoly(Scaling):
    r"""Adaptive temperature: a polynomial of the row's own entropy H, never below 1.

    .. math:: \max(1, a_4 H^4 + a_3 H^3 + a_2 H^2 + a_1 H + a_0) \text{ where } H > 0.5, \text{ else
              } 1

    H is measured on the unscaled row, so the row is read twice. **Its range is short:** with the
    published coefficients the polynomial is above 1 only for H between 0.85 and 5.94 nats. A row
    spread over 380 keys or more is left as it is, which is where help was wanted; a warning says
    how many rows that is.

    Args:
        coefficients: from the highest power down.
        threshold: entropy in nats, at or below which a row is left alone.

    Example:
        >>> AdaptivePoly().factor(torch.tensor([1024]), entropy=torch.tensor([0.3, 2.0, 4.0]))
        tensor([1.0000, 2.0990, 2.3890])
        >>> AdaptivePoly().upper_limit
        5.9445

    Source:
        Veličković et al. (2024), arXiv:2410.01104.
    """

    name: ClassVar[str] = "adaptive_poly"
    source: ClassVar[str] = "Veličković et al. (2024), arXiv:2410.01104"
    needs_entropy: ClassVar[bool] = True
    coefficients: Sequence[float] = (-0.037, 0.481, -2.3, 4.917, -1.791)
    threshold: float = 0.5

    def __post_init__(self) -> None:
        coefficients = check_per_head("coefficients", self.coefficients)
        if not isinstance(coefficients, tuple):
            raise TypeError(
                f"coefficients must be numbers from the highest power down, got {coefficients!r}"
            )
        self._set(coefficients=coefficients)
        self._set(threshold=check_number("threshold", self.threshold, above=0.0, including=True))

    @property
    def upper_limit(self) -> float:
        """Entropy above which no row is scaled; infinite where the polynomial stays above 1."""
        if self._polynomial(torch.tensor(1e3, dtype=torch.float64)) > 1:
            return math.inf
        moved = np.array(self.coefficients, dtype=np.float64)
        moved[-1] -= 1
        roots = np.roots(moved)
        real = roots.real[np.abs(roots.imag) < 1e-9]
        return float(real.max(initial=self.threshold))

    def law(self, rows: Rows) -> Tensor:
        """The polynomial of each row's entropy, at least 1; 1 for entropies up to the threshold.

        Raises:
            ValueError: if the rows have no entropy.
        """
        if rows.entropy is None:
            raise ValueError(
                "adaptive_poly needs the measured entropy of each row: pass factor(n, entropy=...)"
            )
        H = rows.entropy.nan_to_num(0.0)  # a row without keys
        if not torch.compiler.is_compiling():
            beyond, total = int((H.detach() > self.upper_limit).sum()), H.numel()
            if beyond:
                warnings.warn(
                    f"adaptive_poly has no effect above {self.upper_limit:.2f} nats: {beyond} "
                    f"of {total} rows are above and stay unchanged",
                    stacklevel=3,
                )
        scaled = self._polynomial(H).clamp(min=1.0)
        factor = torch.where(self.threshold < H, scaled, 1.0)
        return factor.expand(torch.broadcast_shapes(factor.shape, rows.n.shape))

    def _polynomial(self, H: Tensor) -> Tensor:
        """a₄ H⁴ + … + a₀ of each entropy."""
        value = torch.zeros_like(H)
        for coefficient in self.coefficients:
            value = value * H + coefficient
        return value
