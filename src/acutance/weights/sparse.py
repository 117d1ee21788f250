"""Weightings with exact zeros, from the entmax library."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, cast

import torch
from torch import Tensor

from acutance.extras import install
from acutance.shapes import check_number
from acutance.weights.base import Jacobian, Weighting, inverse, masked

__all__ = ["Entmax", "Entmax15", "Sparsemax"]

#: Far below any score, and finite: the solvers subtract it.
_HIDDEN = -1e9
#: Keys that the exact solvers sort at first; they sort more of a row whose support is larger.
_SORTED = 64


def _entmax() -> ModuleType:
    """Import and return the entmax package; ImportError says how to install it if it is missing."""
    try:
        import entmax
    except ImportError as error:
        raise ImportError(
            "sparsemax and entmax weights need the entmax library; install it with: "
            + install("entmax")
        ) from error
    return cast(ModuleType, entmax)


def _solve(name: str, scores: Tensor, visible: Tensor | None, **options: float) -> Tensor:
    """Weights by the entmax function ``name``, computed in float32 at least.

    In half precision its search for the threshold does not converge.
    """
    precise = scores if scores.dtype == torch.float64 else scores.float()
    solver = getattr(_entmax(), name)
    weights: Tensor = solver(masked(precise, visible, _HIDDEN), dim=-1, **options)
    return weights.to(scores.dtype)


def _entmax_jacobian(weights: Tensor, alpha: float) -> Jacobian:
    """The derivative of entmax weights p with respect to the scores: diag g − g gᵀ / Σg.

    Here g = p^(2 − α) where p > 0, else 0 (Peters et al. 2019, proposition 2).
    """
    some = weights > 0
    part = torch.where(some, torch.where(some, weights, 1.0).pow(2.0 - alpha), 0.0)
    return Jacobian(part, part * inverse(part.sum(-1, keepdim=True)), part)


@dataclass(frozen=True)
class Sparsemax(Weighting):
    r"""The distribution nearest to the scores in Euclidean distance; most weights are exactly 0.

    Raises:
        ImportError: when called without the entmax library; it says what to install.

    Example:
        >>> Sparsemax()(torch.tensor([[1.0, 0.5, -1.0]]))
        tensor([[0.7500, 0.2500, 0.0000]])

    Source:
        Martins & Astudillo (2016), arXiv:1602.02068.
    """

    name: ClassVar[str] = "sparsemax"
    source: ClassVar[str] = "Martins & Astudillo (2016), arXiv:1602.02068"

    @property
    def distribution(self) -> bool:
        """True: weights are non-negative and sum to 1."""
        return True

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Project the scores of the visible keys onto the probability distributions."""
        return _solve("sparsemax", scores, visible, k=_SORTED)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights: that of entmax with α = 2."""
        return _entmax_jacobian(weights, 2.0)


@dataclass(frozen=True)
class Entmax15(Weighting):
    r"""Entmax with α = 1.5, between softmax and sparsemax.

    Raises:
        ImportError: when called without the entmax library; it says what to install.

    Example:
        >>> Entmax15()(torch.tensor([[1.0, 0.0, -4.0]])).sum()
        tensor(1.)

    Source:
        Peters et al. (2019), arXiv:1905.05702.
    """

    name: ClassVar[str] = "entmax15"
    source: ClassVar[str] = "Peters et al. (2019), arXiv:1905.05702"

    @property
    def distribution(self) -> bool:
        """True: weights are non-negative and sum to 1."""
        return True

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Entmax weights of the visible keys, exact, by sorting the scores."""
        return _solve("entmax15", scores, visible, k=_SORTED)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights: that of entmax with α = 1.5."""
        return _entmax_jacobian(weights, 1.5)


@dataclass(frozen=True)
class Entmax(Weighting):
    r"""Entmax of any α above 1, found by bisection; α = 2 is sparsemax.

    Args:
        alpha: α > 1.

    Raises:
        ValueError: if α is not a number above 1.
        ImportError: when called without the entmax library; it says what to install.

    Example:
        >>> Entmax(alpha=2.0)(torch.tensor([[1.0, 0.5, -1.0]]))
        tensor([[0.7500, 0.2500, 0.0000]])

    Source:
        Peters et al. (2019), arXiv:1905.05702.
    """

    name: ClassVar[str] = "entmax"
    source: ClassVar[str] = "Peters et al. (2019), arXiv:1905.05702"
    alpha: float = 1.5

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, above=1.0)

    @property
    def distribution(self) -> bool:
        """True: weights are non-negative and sum to 1."""
        return True

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Entmax weights of the visible keys, by bisection."""
        steps = 60 if scores.dtype == torch.float64 else 40
        return _solve("entmax_bisect", scores, visible, alpha=self.alpha, n_iter=steps)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights."""
        return _entmax_jacobian(weights, self.alpha)
