"""Scores that depend on how far a key is: scale-invariant attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.scores.base import TileScore, check_pair, precise
from acutance.shapes import check_count, check_number

__all__ = ["ScaleInvariant", "scale_invariant"]


@dataclass(frozen=True)
class ScaleInvariant:
    r"""Scale-invariant attention: a factor and a shift by the distance t between query and key.

    .. math:: s_{ij} = a_t \, c\, q_i \cdot k_j + m_t, \qquad
              a_t^2 = 2 \log(t/\tau + 1) + 1, \qquad m_t = -2 \log(t/\tau + 1)

    If the scores :math:`c\, q \cdot k` at distance t are standard normal, then
    :math:`E\,e^{s} = E\,s\,e^{s} = \sqrt e / (t/\tau + 1)`: distances from t to 10 t have about the
    same weight together at every t, and few keys hold it. The factor differs from key to key, so
    this is a score; a :class:`~acutance.scaling.Scaling`, one factor a row, cannot be it.

    Rows are positions: row i of the query stands at key i + ``offset``. In rows that see keys ahead
    of them t is the absolute distance, which is acutance's own extension.

    Args:
        tau: τ, positive: up to about this distance scores stay as they are.
        scale: c; None is 1/√E.
        offset: keys before the first query, as with a cache; None is the call's ``query_offset``.

    Raises:
        ValueError: if τ or the scale is not positive, or the offset negative.

    Example:
        Equal scores of 0, at distances 3, 2, 1 and 0 and τ = 1, weigh 1/16, 1/9, 1/4 and 1:

        >>> query, key = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 4, 2)
        >>> scores = ScaleInvariant(tau=1.0, offset=3).tile(query, key)
        >>> scores.exp()
        tensor([[[[0.0625, 0.1111, 0.2500, 1.0000]]]])

    Source:
        Anson, Wang & Aitchison (2025), arXiv:2505.17083, with their α = β = √e, which make
        :math:`a_0 = 1` and :math:`m_0 = 0`.
    """

    name: ClassVar[str] = "scale_invariant"
    tau: float = 10.0
    scale: float | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        check_number("tau", self.tau, above=0.0)
        if self.scale is not None:
            check_number("scale", self.scale, above=0.0)
        if self.offset is not None:
            check_count("offset", self.offset, 0)

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s), in float32 at least; ``offset`` is the first query's position."""
        score, query, key = self.prepare(query, key)
        return score.tile(query, key, key_start)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Queries with their position as one more component, keys with a 0 there."""
        check_pair(query, key)
        scale = query.shape[3] ** -0.5 if self.scale is None else self.scale
        query, key = precise(query) * scale, precise(key)
        positions = torch.arange(query.shape[2], device=query.device, dtype=query.dtype)
        column = (positions + (self.offset or 0)).view(1, 1, -1, 1).expand(*query.shape[:3], 1)
        return _Placed(self.tau), torch.cat((query, column), -1), F.pad(key, (0, 1))


@dataclass(frozen=True)
class _Placed:
    """Scale-invariant scores of queries whose last component is their position."""

    tau: float

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        grouped = query.unflatten(1, (key.shape[1], query.shape[1] // key.shape[1]))
        products = (grouped @ key.unsqueeze(2).mT).flatten(1, 2)
        at = torch.arange(key_start, key_start + key.shape[2], device=key.device, dtype=key.dtype)
        distance = (query[0, 0, :, -1:].detach() - at).abs()
        growth = 2 * torch.log1p(distance / self.tau)
        scores: Tensor = (growth + 1).sqrt() * products - growth
        return scores

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        return self, query, key


def scale_invariant(
    query: Tensor, key: Tensor, tau: float = 10.0, scale: float | None = None, offset: int = 0
) -> Tensor:
    """Scale-invariant scores, (B, Hq, L, S); see :class:`ScaleInvariant`.

    Example:
        >>> scale_invariant(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4), tau=1.0)
        tensor([[[[2.0000, 1.7032]]]])
    """
    return ScaleInvariant(tau, scale, offset).tile(query, key)
