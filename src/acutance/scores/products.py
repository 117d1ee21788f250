"""Scores that are dot products of transformed vectors, or of the query with position vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from acutance.scores.base import (
    TileScore,
    check_pair,
    check_parameter,
    dot_tile,
    precise,
    products,
)
from acutance.scores.qk_norm import l2_norm
from acutance.shapes import check_number, describe

__all__ = [
    "Cosine",
    "Dot",
    "General",
    "Location",
    "ScaledDot",
    "cosine",
    "dot",
    "general",
    "location",
    "scaled_dot",
]


@dataclass(frozen=True)
class Dot:
    r"""The dot product, :math:`q \cdot k`.

    For independent components of mean 0 and variance 1 its variance is the width E, so as E grows
    softmax puts all weight on one key.

    Example:
        >>> import torch
        >>> Dot().transform(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 3, 16))[2]
        1.0

    Source:
        Luong et al. (2015), arXiv:1508.04025.
    """

    name: ClassVar[str] = "dot"

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key unchanged, and the scale 1."""
        check_pair(query, key)
        return query, key, 1.0


@dataclass(frozen=True)
class ScaledDot:
    r"""The dot product over the root of the width, :math:`q \cdot k / \sqrt E`.

    For independent components of mean 0 and variance 1 its variance is 1.

    Example:
        >>> import torch
        >>> ScaledDot().transform(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 3, 16))[2]
        0.25

    Source:
        Vaswani et al. (2017), arXiv:1706.03762, footnote 4.
    """

    name: ClassVar[str] = "scaled_dot"

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key unchanged, and the scale 1/√E."""
        check_pair(query, key)
        return query, key, query.shape[3] ** -0.5


@dataclass(frozen=True)
class Cosine:
    r"""The cosine between query and key over a temperature.

    .. math:: s_{ij} = \frac{1}{\tau} \frac{q_i \cdot k_j}
              {\max(\lVert q_i\rVert, \epsilon) \max(\lVert k_j\rVert, \epsilon)}

    Unlike dot products, it does not depend on the norms: that of a query acts as a temperature of
    its row, and those of keys change their order. At τ = 1 the entropy of a row is at most 0.4745
    nat below log n, so use a lower τ or a scaling law. Query and key must have the same width.

    Args:
        temperature: τ, positive.
        eps: a vector shorter than ε is divided by ε: a zero vector scores 0 with everything, and
            its gradient, g/(ετ), is finite, if large.

    Raises:
        ValueError: if the temperature or ε is not positive.

    Example:
        >>> import torch
        >>> query = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).view(1, 1, 2, 2)
        >>> cosine(query, torch.tensor([2.0, 0.0]).view(1, 1, 1, 2))
        tensor([[[[0.6000],
                  [0.0000]]]])

    Source:
        Graves et al. (2014), arXiv:1410.5401 (content-based addressing).
    """

    name: ClassVar[str] = "cosine"
    temperature: float = 1.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0.0)
        check_number("eps", self.eps, above=0.0)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key divided by their lengths, and the scale 1/τ."""
        check_pair(query, key)
        return l2_norm(query, self.eps), l2_norm(key, self.eps), 1 / self.temperature


@dataclass(frozen=True)
class General:
    r"""A bilinear form, :math:`q^\top W k`.

    Args:
        weight: W, (Eq, Ek), or (Hq, Eq, Ek) with one for each query head. Query and key may differ
            in width.

    Raises:
        TypeError: if the weight is not a floating-point tensor.
        ValueError: if its shape is not one of the two.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # first of the query, second of the key
        >>> query, key = torch.tensor([2.0, 5.0]), torch.tensor([7.0, 3.0])
        >>> general(query.view(1, 1, 1, 2), key.view(1, 1, 1, 2), weight)
        tensor([[[[6.]]]])

    Source:
        Luong et al. (2015), arXiv:1508.04025.
    """

    name: ClassVar[str] = "general"
    weight: Tensor

    def __post_init__(self) -> None:
        check_parameter("weight", self.weight, "(Eq, Ek)", (0, 0))

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query times W (B, Hq, L, Ek), the key unchanged, and the scale 1."""
        check_pair(query, key, same_width=False)
        want = (query.shape[3], key.shape[3])
        heads = self.weight.shape[0] if self.weight.dim() == 3 else query.shape[1]
        if tuple(self.weight.shape[-2:]) != want or heads != query.shape[1]:
            raise ValueError(
                f"weight must have shape (Eq, Ek) = {want} or (Hq, Eq, Ek) = "
                f"{(query.shape[1], *want)}, got {tuple(self.weight.shape)} "
                f"({describe(query=query, key=key)})"
            )
        return query @ self.weight.to(query.dtype), key, 1.0


def dot(query: Tensor, key: Tensor) -> Tensor:
    """Dot products, (B, Hq, L, S), of query (B, Hq, L, E) and key (B, H, S, E).

    Example:
        >>> import torch
        >>> dot(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4))
        tensor([[[[4., 4.]]]])
    """
    return dot_tile(Dot(), query, key)


def scaled_dot(query: Tensor, key: Tensor) -> Tensor:
    """Dot products over √E, (B, Hq, L, S).

    Example:
        >>> import torch
        >>> scaled_dot(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4))
        tensor([[[[2., 2.]]]])
    """
    return dot_tile(ScaledDot(), query, key)


def cosine(query: Tensor, key: Tensor, temperature: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Cosine similarity of every query and key, divided by ``temperature``: (B, Hq, L, S).

    See :class:`Cosine`.

    Example:
        >>> import torch
        >>> cosine(torch.ones(1, 1, 1, 4), -torch.ones(1, 1, 1, 4), temperature=0.5)
        tensor([[[[-2.]]]])
    """
    return dot_tile(Cosine(temperature, eps), query, key)


def general(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Bilinear forms qᵀWk, (B, Hq, L, S); see :class:`General`.

    Example:
        >>> import torch
        >>> general(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 3), torch.ones(2, 3))
        tensor([[[[6.]]]])
    """
    return dot_tile(General(weight), query, key)


@dataclass(frozen=True)
class Location(TileScore):
    r"""Scores by position alone, :math:`s_{ij} = (W q_i)_j`.

    They are dot products of the query with the rows of W, which take the place of the keys, and
    cost as much as plain attention. Query heads that share a key head share its W.

    Args:
        weight: W, (S_max, E), or (H, S_max, E) with one for each key head; S_max is the longest
            source it can serve.

    Raises:
        TypeError: if the weight is not a floating-point tensor.
        ValueError: if its shape is not one of the two, or a source is longer than S_max.

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
        """The query unchanged, rows of W as keys (B, H, S, E), and the scale 1."""
        check_pair(query, key, same_width=False)
        return query, self._rows(query, key, 0), 1.0

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries for the keys from ``key_start`` on."""
        check_pair(query, key, same_width=False)
        return products(precise(query), precise(self._rows(query, key, key_start)))

    def _rows(self, query: Tensor, key: Tensor, start: int) -> Tensor:
        """The rows of W for the given keys, as keys (..., S, E); raises if there are too few."""
        heads, count = key.shape[1], key.shape[2]
        weight = self.weight

        def shapes() -> str:
            return f"weight {tuple(weight.shape)}, {describe(query=query, key=key)}"

        if weight.shape[-1] != query.shape[3]:
            raise ValueError(
                f"weight must have the query's width E={query.shape[3]}, got "
                f"{weight.shape[-1]} ({shapes()})"
            )
        if weight.dim() == 3 and weight.shape[0] != heads:
            raise ValueError(
                f"weight has {weight.shape[0]} key heads, but there are {heads} ({shapes()})"
            )
        if start < 0 or start + count > weight.shape[-2]:
            raise ValueError(
                f"weight must have a row for each of at most S_max={weight.shape[-2]} keys, "
                f"got keys {start} to {start + count} ({shapes()})"
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
