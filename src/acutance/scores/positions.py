r"""Location-based scores: each key position has a vector, and what the key holds plays no part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from acutance.scores.base import TileScore, check_pair, check_parameter, precise
from acutance.shapes import describe

__all__ = ["Location", "location"]


@dataclass(frozen=True)
class Location:
    r"""Scores by position alone, :math:`s_{ij} = (W q_i)_j`.

    They are dot products of the query with the rows of W, so they stream as plain attention does:
    the rows of W stand in for the keys. Query heads that share a key head share its W.

    Args:
        weight: W, (S_max, E), or (H, S_max, E) with one for each key head; S_max is the longest
            source it can serve.

    Raises:
        TypeError: if the weight is no floating Tensor.
        ValueError: if its shape is none of the two, or a source is longer than S_max.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> location(torch.tensor([2.0, 3.0]).view(1, 1, 1, 2), weight, keys=3)
        tensor([[[[2., 3., 5.]]]])

    Source:
        Luong et al. (2015), arXiv:1508.04025.
    """

    name: ClassVar[str] = "location"
    weight: Tensor

    def __post_init__(self) -> None:
        check_parameter("weight", self.weight, "(S_max, E)", (0, 0))

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query as it is, rows of W in place of the keys (B, H, S, E), and 1."""
        check_pair(query, key, same_width=False)
        return query, self._rows(query, key, 0), 1.0

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries for the keys from ``key_start`` on."""
        check_pair(query, key, same_width=False)
        rows = self._rows(query, key, key_start)
        rows, query = precise(rows), precise(query)
        grouped = query.unflatten(1, (rows.shape[1], query.shape[1] // rows.shape[1]))
        scores: Tensor = (grouped @ rows.unsqueeze(2).mT).flatten(1, 2)
        return scores

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Nothing to do ahead."""
        return self, query, key

    def _rows(self, query: Tensor, key: Tensor, start: int) -> Tensor:
        heads, count = key.shape[1], key.shape[2]
        weight = self.weight

        def shapes() -> str:
            return f"weight {tuple(weight.shape)}, {describe(query=query, key=key)}"

        if weight.shape[-1] != query.shape[3]:
            raise ValueError(
                f"weight has the query's width E={query.shape[3]}, got {weight.shape[-1]} "
                f"({shapes()})"
            )
        if weight.dim() == 3 and weight.shape[0] != heads:
            raise ValueError(
                f"weight is for {weight.shape[0]} key heads, there are {heads} ({shapes()})"
            )
        if start < 0 or start + count > weight.shape[-2]:
            raise ValueError(
                f"weight has a row for each of at most S_max={weight.shape[-2]} keys, got keys "
                f"{start} to {start + count} ({shapes()})"
            )
        rows = weight[..., start : start + count, :].to(query.dtype)
        return rows.expand(query.shape[0], heads, -1, -1)


def location(query: Tensor, weight: Tensor, keys: int) -> Tensor:
    """Scores by position, (B, Hq, L, keys); see :class:`Location`.

    Example:
        >>> import torch
        >>> location(torch.ones(1, 1, 1, 2), torch.ones(5, 2), keys=3)
        tensor([[[[2., 2., 2.]]]])
    """
    heads = weight.shape[0] if weight.dim() == 3 else 1
    return Location(weight).tile(query, query.new_empty(query.shape[0], heads, keys, 0))
