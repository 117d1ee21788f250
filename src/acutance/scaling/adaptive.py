"""A temperature read from the row itself."""

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
from acutance.shapes import check_number

__all__ = ["AdaptivePoly"]


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
                f"coefficients are numbers from the highest power down, got {coefficients!r}"
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
        """The polynomial of the measured entropy."""
        if rows.entropy is None:
            raise ValueError(
                "adaptive_poly reads the measured entropy of each row: give factor(n, entropy=...)"
            )
        H = rows.entropy.nan_to_num(0.0)  # a row without keys
        if not torch.compiler.is_compiling():
            beyond, total = int((H.detach() > self.upper_limit).sum()), H.numel()
            if beyond:
                warnings.warn(
                    f"adaptive_poly does nothing above {self.upper_limit:.2f} nats: {beyond} of "
                    f"{total} rows are there and stay as they are",
                    stacklevel=3,
                )
        scaled = self._polynomial(H).clamp(min=1.0)
        factor = torch.where(self.threshold < H, scaled, 1.0)
        return factor.expand(torch.broadcast_shapes(factor.shape, rows.n.shape))

    def _polynomial(self, H: Tensor) -> Tensor:
        value = torch.zeros_like(H)
        for coefficient in self.coefficients:
            value = value * H + coefficient
        return value
