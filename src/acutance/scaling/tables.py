"""HeadTable: factors for each head, tabulated over lengths, as calibration fits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from acutance.scaling.base import Rows, Scaling, check_per_head
from acutance.shapes import check_count, check_tensor

__all__ = ["HeadTable", "check_lengths", "check_table", "check_widths", "interpolate"]


@dataclass(frozen=True)
class HeadTable(Scaling):
    r"""A factor for each head, the same for every row or tabled at several lengths.

    Between tabled lengths the factor is linear in log n. Shorter rows have the first one's factor;
    beyond the last the line continues, and never below 0.

    Args:
        factors: positive; (Hq,) for one factor per head, or (Hq, P) for P lengths.
        lengths: the P lengths, rising.

    Raises:
        ValueError: if factors and lengths do not fit, or are not positive or not rising.

    Example:
        >>> HeadTable([1.0, 1.5]).factor(torch.tensor([10, 1000]))
        tensor([[1.0000, 1.0000],
                [1.5000, 1.5000]])
        >>> HeadTable([[1.0, 1.2]], lengths=[512, 2048]).factor(torch.tensor([64, 1024, 8192]))
        tensor([[1.0000, 1.1000, 1.4000]])
    """

    name: ClassVar[str] = "head_table"
    source: ClassVar[str] = "calibration on the model itself"
    factors: Sequence[float] | Sequence[Sequence[float]] | Tensor
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        lengths = check_lengths(self.lengths)
        rows = check_table(self.factors)
        if not rows:
            raise ValueError("factors must have one entry for each head, got none")
        if lengths is None:
            if any(isinstance(row, tuple) for row in rows):
                raise ValueError(
                    "factors must have shape (Hq,) without lengths, got two dimensions"
                )
        else:
            check_widths(rows, lengths)
        self._set(factors=rows, lengths=lengths)

    def law(self, rows: Rows) -> Tensor:
        """The factor of each head and row, interpolated linearly in log n between the lengths."""
        table = torch.tensor(self.factors, dtype=rows.n.dtype, device=rows.n.device)
        if self.lengths is None:
            return table.unsqueeze(-1) * torch.ones_like(rows.n)
        return interpolate(rows.log_n, self.lengths, table)


def check_lengths(lengths: Sequence[int] | None) -> tuple[int, ...] | None:
    """Check that lengths are whole numbers of at least 1 in ascending order.

    Returns:
        The lengths as a tuple; None for None.

    Raises:
        TypeError: if one is not a whole number.
        ValueError: if there is none, or they are below 1 or not ascending.
    """
    if lengths is None:
        return None
    checked = tuple(check_count("lengths", n, 1) for n in lengths)
    rising = all(a < b for a, b in pairwise(checked))
    if not checked or not rising:
        raise ValueError(f"lengths must be ascending and not empty, got {list(checked)}")
    return checked


def check_table(factors: object) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
    """Check a table of positive factors, (Hq,) or (Hq, P), and return it as (nested) tuples.

    Raises:
        TypeError: if it is not a table of numbers.
        ValueError: if its shape is another or a number is not positive.
    """
    if isinstance(factors, Tensor):
        if check_tensor("factors", factors).dim() not in (1, 2):
            raise ValueError(
                f"factors must have shape (Hq,) or (Hq, P), got {tuple(factors.shape)}"
            )
        factors = factors.tolist()
    if not isinstance(factors, Sequence) or isinstance(factors, str):
        raise TypeError(
            "factors must be numbers, one for each head (Hq,) or for each head and length "
            f"(Hq, P), got {type(factors).__name__}"
        )
    rows = tuple(check_per_head("factors", row, above=0.0) for row in factors)
    if len({isinstance(row, tuple) for row in rows}) > 1:
        raise ValueError(
            "factors must have shape (Hq,) or (Hq, P), got a mixture of numbers and rows"
        )
    return rows  # type: ignore[return-value]


def check_widths(rows: Sequence[object], lengths: tuple[int, ...]) -> None:
    """Check that every head of a table has one factor for each length; raises ValueError if not."""
    widths = [len(row) if isinstance(row, tuple) else 0 for row in rows]
    if set(widths) != {len(lengths)}:
        raise ValueError(
            f"each head must have one factor for each of the {len(lengths)} lengths, got {widths}"
        )


def interpolate(log_n: Tensor, lengths: Sequence[int], table: Tensor) -> Tensor:
    """Factors of rows from a table, linear in log n between the lengths.

    The factor is constant before the first length; beyond the last the line continues, down to 0.

    Args:
        log_n: logarithm of the number of visible keys of each row, (..., L).
        lengths: P lengths, ascending.
        table: factors at the lengths, (P,), or (Hq, P) for each head.

    Returns:
        The factors, shaped as ``log_n``, or (..., Hq, L) for a table with heads.
    """
    knots = [math.log(n) for n in lengths]
    heads = table.dim() > 1

    def column(values: Tensor) -> Tensor:
        return values.unsqueeze(-1) if heads else values

    result = column(table[..., 0]) + torch.zeros_like(log_n)
    for i in range(len(knots) - 1):
        width = knots[i + 1] - knots[i]
        slope = column((table[..., i + 1] - table[..., i]) / width)
        last = i == len(knots) - 2
        part = log_n - knots[i]
        result = result + slope * part.clamp(min=0.0, max=None if last else width)
    return result.clamp(min=0.0)
