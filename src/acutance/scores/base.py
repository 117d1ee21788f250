"""The two kinds of scores: dot products of transformed vectors, and tiles on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from acutance.shapes import FLOATS, check_tensor, describe

__all__ = ["DotScore", "FunctionScore", "TileScore", "dot_tile"]


@runtime_checkable
class DotScore(Protocol):
    r"""A score that is a dot product of transformed vectors, :math:`s_{ij} = c \, q'_i \cdot k'_j`.

    After one transformation of queries and keys it costs as much as plain attention.
    """

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Transformed query (B, Hq, L, E') and key (B, H, S, E'), and the scale c."""
        ...


@runtime_checkable
class TileScore(Protocol):
    """A score that is no dot product, computed for a block of queries and keys (a tile) at a time.

    It needs memory of a few tiles; no tensor of L×S×hidden is formed, forward or backward.
    """

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries (B, Hq, l, E) and of keys (B, H, s, E).

        They are float32 at least, since statistics would suffer from half precision. ``key_start``
        is the position of the block's first key among all keys.
        """
        ...

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Do once per call what is the same for all tiles, such as projections.

        Returns:
            Another score, and the query and key to cut into blocks for it; its tiles are those of
            this score. Without it, :meth:`tile` gives the same result more slowly. By default
            there is nothing to prepare.
        """
        return self, query, key


class PreparedScore(TileScore, Protocol):
    """A score whose every tile is that of the score which :meth:`prepare` returns."""

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries and of keys, in float32 at least."""
        score, query, key = self.prepare(query, key)
        return score.tile(query, key, key_start)


@dataclass(frozen=True)
class FunctionScore(TileScore):
    """Any function of a block of queries and a block of keys, as a :class:`TileScore`.

    Args:
        function: called as ``function(query, key, key_start)`` with (B, Hq, l, E), (B, H, s, E) and
            the position of the first key; gives scores (B, Hq, l, s).

    Raises:
        TypeError: if it is not callable, or gives no Tensor.
        ValueError: if its result has another shape.

    Example:
        Minus the squared distance:

        >>> score = FunctionScore(lambda q, k, start: -torch.cdist(q, k).square())
        >>> score.tile(torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 3, 2))
        tensor([[[[-2., -2., -2.]]]])
    """

    function: Callable[[Tensor, Tensor, int], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {type(self.function).__name__}")

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """The function's scores, with their shape checked."""
        scores = self.function(query, key, key_start)
        want = (*query.shape[:3], key.shape[2])
        if not isinstance(scores, Tensor):
            raise TypeError(f"the score function must return a Tensor, got {type(scores).__name__}")
        if tuple(scores.shape) != want:
            raise ValueError(
                f"the score function must return (B, Hq, L, S) = {want}, got {tuple(scores.shape)} "
                f"({describe(query=query, key=key)})"
            )
        return scores


def dot_tile(score: DotScore, query: Tensor, key: Tensor) -> Tensor:
    """All scores (B, Hq, L, S) of a :class:`DotScore`, in float32 at least.

    Example:
        >>> from acutance.scores import Dot
        >>> dot_tile(Dot(), torch.ones(1, 2, 1, 4), torch.ones(1, 1, 3, 4)).shape
        torch.Size([1, 2, 1, 3])
    """
    query, key, scale = score.transform(query, key)
    return products(precise(query), precise(key)) * scale


def products(query: Tensor, key: Tensor) -> Tensor:
    """Dot products (B, Hq, L, S); the query heads that share a key head are neighbours."""
    grouped = query.unflatten(1, (key.shape[1], query.shape[1] // key.shape[1]))
    scores: Tensor = (grouped @ key.unsqueeze(2).mT).flatten(1, 2)
    return scores


def precise(tensor: Tensor) -> Tensor:
    """Convert to the precision of norms and sums: float32 at least."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def check_pair(query: Tensor, key: Tensor, *, same_width: bool = True) -> None:
    """Check the shapes and dtypes of a query and a key.

    Raises:
        TypeError: if one is not a floating-point tensor.
        ValueError: if ranks, batch, head counts or widths do not fit.
    """
    for name, tensor in {"query": query, "key": key}.items():
        if check_tensor(name, tensor).dtype not in FLOATS:
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")

    def shapes() -> str:
        return describe(query=query, key=key)

    for name, tensor in {"query": query, "key": key}.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have four dimensions (batch, heads, length, width), got "
                f"{tensor.dim()} ({shapes()})"
            )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have the same batch size B ({shapes()})")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads ({shapes()})"
        )
    if same_width and query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must have the same width E: query has E={query.shape[3]}, key has "
            f"E={key.shape[3]} ({shapes()})"
        )


def check_parameter(name: str, value: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
    """Check that a parameter has a shape, with or without a dimension of heads in front.

    Args:
        name: of the parameter.
        value: the parameter.
        what: its shape in words, such as ``"(Eq, Ek)"``.
        shape: its last dimensions; 0 stands for any positive size.

    Returns:
        The parameter.

    Raises:
        TypeError: if it is not a floating-point tensor.
        ValueError: if its shape does not fit.
    """
    if check_tensor(name, value).dtype not in FLOATS:
        raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
    trailing = value.shape[-len(shape) :] if value.dim() >= len(shape) else ()
    fits = value.dim() in (len(shape), len(shape) + 1) and all(
        size > 0 and want in (0, size) for size, want in zip(trailing, shape, strict=True)
    )
    if not fits or value.shape[0] == 0:
        raise ValueError(
            f"{name} must have shape {what}, or one such parameter per head, got "
            f"{tuple(value.shape)}"
        )  # fmt: skip
    return value
