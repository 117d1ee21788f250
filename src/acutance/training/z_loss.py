"""ZLoss: keeps the logsumexp of attention's rows near zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acutance.shapes import check_number
from acutance.training.entropy import Rows, read_rows

__all__ = ["ZLoss"]


class ZLoss(nn.Module):
    r"""Mean squared logsumexp of the rows.

    .. math:: \ell = w \cdot \frac{1}{R} \sum_r \Bigl(\log \sum_j e^{s_{rj}}\Bigr)^2

    Softmax ignores a shift of a row's logits; this fixes the shift, and with it bounds the largest
    logit, which is at most the logsumexp. A row of n equal logits has it at 0 where they are
    −log n.

    Args:
        weight: w.

    Raises:
        TypeError: if ``weight`` is no number.
        ValueError: if it is negative.

    Example:
        >>> import acutance
        >>> query = torch.zeros(1, 1, 1, 2, requires_grad=True)
        >>> key = torch.zeros(1, 1, 3, 2)
        >>> ZLoss(weight=1.0)(acutance.row_statistics(query, key)).item()  # (log 3)²
        1.2069

    Source:
        Zoph et al. (2022), arXiv:2202.08906, for a router's logits, with weight 0.001; Chowdhery
        et al. (2022), arXiv:2204.02311, for output logits, with 0.0001.
    """

    def __init__(self, weight: float = 1e-3) -> None:
        super().__init__()
        self.weight = check_number("weight", weight, above=0.0, including=True)

    def forward(self, rows: Rows) -> Tensor:
        """The loss, a scalar.

        Args:
            rows: as for :class:`EntropyRegularizer`.

        Raises:
            TypeError: if it is none of these.
            ValueError: if there is no row, or no gradient although gradients are enabled.
        """
        losses = [part.lse[kept].square().mean() for part, kept in read_rows(rows)]
        return self.weight * torch.stack(losses).mean()

    def extra_repr(self) -> str:
        """The weight, for ``print``."""
        return f"weight={self.weight:g}"
