"""Losses on attention rows: the distance of their entropy from a target, and the z-loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from acutance.rowstats import RowStatistics
from acutance.shapes import check_number
from acutance.training.watch import AttentionWatch, WatchedRows

__all__ = ["EntropyRegularizer", "Rows", "ZLoss", "read_rows"]

#: What a loss on statistics takes: a watch, its rows, or statistics of one call or several.
Rows: TypeAlias = AttentionWatch | RowStatistics | Iterable[WatchedRows | RowStatistics]


Unit = Literal["nats", "fraction"]


class EntropyRegularizer(nn.Module):
    r"""Squared distance of the rows' entropy from a target, or from a floor if below it.

    .. math:: \ell = w \cdot \frac{1}{R} \sum_r \delta_r^2, \qquad
              \delta_r = H_r - \min(H^*, \log n_r)
              \quad\text{or}\quad \max(0, \min(H^*, \log n_r) - H_r)

    The target of a row of n keys is at most log n nats, its largest possible entropy. The mean is
    over the rows of each call, then over calls. Distances up to ``margin`` cost nothing.

    Args:
        target: desired entropy of the rows; or
        floor: lower limit of their entropy. Give exactly one of the two.
        weight: factor of the loss, w.
        unit: of target, floor and margin: ``"nats"``, or ``"fraction"`` of each row's log n.
        margin: distance without cost.

    Attributes:
        entropy: mean entropy of the rows at the last call, in nats, detached; None before.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, or neither or both of target and floor are given.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> watch, regularizer = AttentionWatch(model), EntropyRegularizer(floor=2.0, weight=0.1)
        >>> with watch:
        ...     out = model(9 * torch.randn(2, 10, 16))
        >>> loss = out.square().mean() + regularizer(watch)
        >>> loss.backward()

        Statistics that a module or :func:`acutance.attention` gave are taken as well:

        >>> import acutance
        >>> query = torch.randn(1, 2, 8, 4, requires_grad=True)
        >>> regularizer(acutance.row_statistics(query, query)).requires_grad
        True

    Source:
        Zhai et al. (2023), arXiv:2303.06296 (entropy collapse); Jha & Reagen (2025),
        arXiv:2501.03489 (a squared penalty outside a margin).
    """

    def __init__(
        self,
        *,
        target: float | None = None,
        floor: float | None = None,
        weight: float = 0.01,
        unit: Unit = "nats",
        margin: float = 0.0,
    ) -> None:
        super().__init__()
        if (target is None) == (floor is None):
            raise ValueError(f"pass either target or floor, got target={target!r}, floor={floor!r}")
        if unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {', '.join(get_args(Unit))}, got {unit!r}")
        name, value = ("target", target) if target is not None else ("floor", floor)
        self.aim = check_number(name, value, above=0.0, including=True)  # type: ignore[arg-type]
        if unit == "fraction" and self.aim > 1:
            raise ValueError(f"{name} must be a fraction of log n, at most 1, got {value!r}")
        self.is_floor, self.unit = floor is not None, unit
        self.weight = check_number("weight", weight, above=0.0, including=True)
        self.margin = check_number("margin", margin, above=0.0, including=True)
        self.entropy: float | None = None

    def forward(self, rows: Rows) -> Tensor:
        """The loss, a scalar.

        Args:
            rows: an :class:`AttentionWatch` after its context, or statistics with their graph.

        Raises:
            TypeError: if it is not one of these.
            ValueError: if there is no row, or no gradient although gradients are enabled.
        """
        losses, means = [], []
        for statistics, counted in read_rows(rows):
            entropy = statistics.entropy[counted]
            n = statistics.n_keys[counted].to(entropy.dtype)
            losses.append(self._distance(entropy, n.log()).square().mean())
            means.append(float(entropy.detach().mean()))
        self.entropy = sum(means) / len(means)
        return self.weight * torch.stack(losses).mean()

    def _distance(self, entropy: Tensor, most: Tensor) -> Tensor:
        """How far each row's entropy is outside the target ± margin, or below the floor, in nats.

        0 within. ``most`` is log n of each row, its largest entropy; both have shape (rows,).
        """
        nats = self.unit == "nats"
        aim = most.clamp(max=self.aim) if nats else self.aim * most
        margin = self.margin if nats else self.margin * most
        away = aim - entropy
        if not self.is_floor:
            away = away.abs()
        return (away - margin).clamp(min=0.0)

    def extra_repr(self) -> str:
        """The target and the weight, for ``print``."""
        kind = "floor" if self.is_floor else "target"
        return f"{kind}={self.aim:g} {self.unit}, weight={self.weight:g}, margin={self.margin:g}"


def read_rows(rows: Rows) -> list[tuple[RowStatistics, Tensor]]:
    """Pairs of statistics and a boolean (B, Hq, L) mask of the rows to count.

    Raises:
        TypeError: if it is not one of :data:`Rows`.
        ValueError: if there is no row, or no gradient although gradients are enabled.
    """
    if isinstance(rows, AttentionWatch):
        rows = rows.rows
    parts = [rows] if isinstance(rows, RowStatistics) else list(rows)
    statistics_read = []
    for part in parts:
        if isinstance(part, WatchedRows):
            statistics_read.append((part.statistics, part.kept))
        elif isinstance(part, RowStatistics):
            statistics_read.append((part, part.state.n > 0))
        else:
            raise TypeError(
                "rows must be an AttentionWatch, WatchedRows or RowStatistics, got "
                f"{type(part).__name__}"
            )
    statistics_read = [
        (statistics, counted) for statistics, counted in statistics_read if bool(counted.any())
    ]
    if not statistics_read:
        raise ValueError("every row of rows is fully masked: at least one row must see a key")
    if torch.is_grad_enabled() and not any(
        part.state.Z.requires_grad for part, _ in statistics_read
    ):
        raise ValueError(
            "rows have no gradient: run the model with gradients enabled, watch it with "
            "gradients=True, and without reentrant checkpointing"
        )
    return statistics_read


class ZLoss(nn.Module):
    r"""Mean squared logsumexp of the rows.

    .. math:: \ell = w \cdot \frac{1}{R} \sum_r \Bigl(\log \sum_j e^{s_{rj}}\Bigr)^2

    Softmax ignores a common shift of a row's logits; this loss fixes the shift and so bounds the
    largest logit, which is at most the logsumexp. It is 0 for a row of n logits equal to −log n.

    Args:
        weight: factor of the loss, w.

    Raises:
        TypeError: if ``weight`` is not a number.
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
            TypeError: if it is not one of these.
            ValueError: if there is no row, or no gradient although gradients are enabled.
        """
        losses = [part.lse[counted].square().mean() for part, counted in read_rows(rows)]
        return self.weight * torch.stack(losses).mean()

    def extra_repr(self) -> str:
        """The weight, for ``print``."""
        return f"weight={self.weight:g}"
