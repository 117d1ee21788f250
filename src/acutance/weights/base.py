"""The base class of weightings: whole rows of scores in, whole rows of weights out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = ["Weighting"]


class Jacobian(NamedTuple):
    r"""Derivative of weights: :math:`\partial w_i/\partial s_j = g_i \delta_{ij} - l_i r_j`.

    Attributes:
        diagonal: g, shaped as the scores.
        left: l, or None where each weight depends on its own score alone.
        right: r, or None; the same tensor as ``diagonal`` where the two are equal.
    """

    diagonal: Tensor
    left: Tensor | None = None
    right: Tensor | None = None


@dataclass(frozen=True)
class Weighting(ABC):
    """A function from a row of scores to a row of weights.

    Attributes:
        name: as in :data:`~acutance.weights.WEIGHTS`.
        source: article.
        distribution: whether rows are distributions (non-negative, sum 1, with a sink's weight
            where there is one), which have an entropy.
        signed: whether weights can be negative.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    distribution: ClassVar[bool] = False
    signed: ClassVar[bool] = False

    def __call__(self, scores: Tensor, visible: Tensor | None = None) -> Tensor:
        """Weights of whole rows.

        Args:
            scores: (..., Hq, rows, S), floating point.
            visible: boolean, broadcastable to the scores, True where a key takes part; None: all
                do. Hidden scores may be NaN or infinite.

        Returns:
            Weights, shaped as the scores: 0 at hidden keys, and in rows without a visible one.
        """
        if not scores.numel():  # rows of no keys, or no rows: solvers refuse them
            return scores
        if visible is not None:
            scores = torch.where(visible, scores, 0.0)  # no gradient, no NaN from hidden scores
        weights = self.weigh(scores, visible)
        return weights if visible is None else torch.where(visible, weights, 0.0)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian | None:
        """The derivative of the weights with respect to the scores.

        Args:
            scores: finite, 0 where hidden.
            weights: the weights of these scores.
            visible: True for visible keys, as in :meth:`__call__`; None: all.

        Returns:
            The diagonal and rank-one parts; their values at hidden keys are not used. None for a
            weighting that does not implement it.
        """
        return None

    @abstractmethod
    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Compute weights from finite scores; the caller then sets hidden keys' weights to 0."""


def masked(scores: Tensor, visible: Tensor | None, value: float = -torch.inf) -> Tensor:
    """Set hidden scores to ``value``; rows without visible keys stay finite."""
    if visible is None:
        return scores
    some = visible.any(-1, keepdim=True)
    return torch.where(visible | ~some, scores, value)


def count(scores: Tensor, visible: Tensor | None) -> Tensor | int:
    """Visible keys of each row, at least 1: (..., rows, 1), or one number for all."""
    if visible is None:
        return max(1, scores.shape[-1])
    seen = visible.expand(*visible.shape[:-1], scores.shape[-1])
    return seen.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)


def inverse(total: Tensor) -> Tensor:
    """1 / total, and 0 where total is 0."""
    return torch.where(total > 0, 1.0 / torch.where(total > 0, total, 1.0), 0.0)
