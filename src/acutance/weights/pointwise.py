"""Weightings of each score by itself, divided by n, by their sum, or not at all."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from acutance.shapes import check_number
from acutance.weights.base import Jacobian, Weighting, count, inverse

__all__ = ["L1", "L2", "Identity", "Power", "ReLU", "ReLU2", "Sigmoid"]

#: What the values of a function are divided by: the number of visible keys, their sum, or nothing.
Normalization = Literal["n", "sum", "none"]


class Pointwise(Weighting):
    """A function f of each score alone, whose values are then divided.

    A weighting of this kind is a record with the field ``normalize`` that gives f and df, its
    derivative. A row of zeros stays zero.
    """

    normalize: Normalization

    @abstractmethod
    def f(self, scores: Tensor) -> Tensor:
        """The function of each score."""

    @abstractmethod
    def df(self, scores: Tensor) -> Tensor:
        """The derivative of the function at each score."""

    def __post_init__(self) -> None:
        if self.normalize not in get_args(Normalization):
            raise ValueError(f"normalize must be 'n', 'sum' or 'none', got {self.normalize!r}")

    @property
    def distribution(self) -> bool:  # type: ignore[override]
        """True if divided by the sum: the weights are then non-negative and sum to 1."""
        return self.normalize == "sum"

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """The function of the scores, divided as ``normalize`` says."""
        if self.normalize == "n":
            return self.f(scores) / count(scores, visible)
        if self.normalize == "sum":
            values, total = self._sum(scores, visible)
            return values / torch.where(total > 0, total, 1.0)
        return self.f(scores)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the function, then that of the division."""
        slope = self.df(scores)
        if self.normalize == "n":
            return Jacobian(slope / count(scores, visible))
        if self.normalize == "sum":
            slope = slope * inverse(self._sum(scores, visible)[1])
            return Jacobian(slope, weights, slope)
        return Jacobian(slope)

    def _sum(self, scores: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """The function of the scores, 0 at hidden keys, and its row sums, (..., rows, 1)."""
        values = self.f(scores)
        if visible is not None:
            values = torch.where(visible, values, 0.0)
        return values, values.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Sigmoid(Weighting):
    r"""The sigmoid of each score, :math:`\sigma(s_j + b)`.

    Args:
        bias: b, a number or a tensor (Hq,); None is −log n, n the visible keys of the row, so that
            a row of zeros sums to about one at the start.

    Example:
        >>> Sigmoid()(torch.zeros(1, 3))
        tensor([[0.2500, 0.2500, 0.2500]])

    Source:
        Ramapuram et al. (2024), arXiv:2409.04431.
    """

    name: ClassVar[str] = "sigmoid"
    source: ClassVar[str] = "Ramapuram et al. (2024), arXiv:2409.04431"
    bias: float | Tensor | None = field(default=None, compare=False)

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """The sigmoid of each score plus the bias b."""
        if self.bias is None:
            n = torch.as_tensor(count(scores, visible), dtype=scores.dtype, device=scores.device)
            return torch.sigmoid(scores - n.log())
        if isinstance(self.bias, Tensor) and self.bias.dim():
            if scores.dim() < 3 or self.bias.shape != scores.shape[-3:-2]:
                raise ValueError(
                    f"bias must have one number per query head: bias {tuple(self.bias.shape)}, "
                    f"scores {tuple(scores.shape)}"
                )
            return torch.sigmoid(scores + self.bias.to(scores.dtype).view(-1, 1, 1))
        return torch.sigmoid(scores + self.bias)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """A diagonal matrix with w (1 − w), w being the weights."""
        return Jacobian(weights * (1.0 - weights))


@dataclass(frozen=True)
class ReLU(Pointwise):
    r"""The positive part of each score, :math:`(s_j)_+`.

    Args:
        normalize: divide by "n" (the visible keys), by the "sum", or by nothing ("none").

    Example:
        >>> ReLU()(torch.tensor([[2.0, -1.0]]))
        tensor([[1., 0.]])

    Source:
        Wortsman et al. (2023), arXiv:2309.08586.
    """

    name: ClassVar[str] = "relu"
    source: ClassVar[str] = "Wortsman et al. (2023), arXiv:2309.08586"
    normalize: Normalization = "n"

    def f(self, scores: Tensor) -> Tensor:
        """The positive part."""
        return torch.relu(scores)

    def df(self, scores: Tensor) -> Tensor:
        """1 for positive scores, else 0."""
        return (scores > 0).to(scores.dtype)


@dataclass(frozen=True)
class ReLU2(Pointwise):
    r"""The squared positive part of each score, :math:`(s_j)_+^2`.

    Args:
        normalize: divide by "n" (the visible keys), by the "sum", or by nothing ("none").

    Example:
        >>> ReLU2()(torch.tensor([[2.0, -1.0]]))
        tensor([[2., 0.]])

    Source:
        Hua et al. (2022), arXiv:2202.10447; Su Jianlin, kexue.fm article 9889.
    """

    name: ClassVar[str] = "relu2"
    source: ClassVar[str] = "Hua et al. (2022), arXiv:2202.10447"
    normalize: Normalization = "n"

    def f(self, scores: Tensor) -> Tensor:
        """The squared positive part."""
        return torch.relu(scores).square()

    def df(self, scores: Tensor) -> Tensor:
        """Twice the positive part."""
        return 2.0 * torch.relu(scores)


@dataclass(frozen=True)
class Power(Pointwise):
    r"""A power of each score's absolute value, :math:`|s_j|^k`.

    Args:
        k: exponent, positive.
        normalize: divide by "n", by the "sum", or by nothing ("none").

    Example:
        >>> Power(k=2.0)(torch.tensor([[3.0, -1.0]]))
        tensor([[0.9000, 0.1000]])

    Source:
        Su Jianlin, kexue.fm article 9019.
    """

    name: ClassVar[str] = "power"
    source: ClassVar[str] = "Su Jianlin, kexue.fm article 9019"
    k: float = 2.0
    normalize: Normalization = "sum"

    def __post_init__(self) -> None:
        check_number("k", self.k, above=0.0)
        super().__post_init__()

    def f(self, scores: Tensor) -> Tensor:
        """The k-th power of the absolute value."""
        return scores.abs().pow(self.k)

    def df(self, scores: Tensor) -> Tensor:
        """K abs(s)^(k − 1) sign(s) of each score s, and 0 at 0."""
        size = scores.abs()
        return self.k * torch.where(size > 0, size, 1.0).pow(self.k - 1) * scores.sign()


@dataclass(frozen=True)
class Identity(Pointwise):
    r"""The scores themselves, :math:`s_j / n` or :math:`s_j`.

    Args:
        normalize: divide by "n" (the visible keys) or by nothing ("none").

    Example:
        >>> Identity()(torch.tensor([[2.0, -1.0]]))
        tensor([[ 1.0000, -0.5000]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """

    name: ClassVar[str] = "identity"
    source: ClassVar[str] = "Su Jianlin, kexue.fm article 9889"
    signed: ClassVar[bool] = True
    normalize: Normalization = "n"

    def __post_init__(self) -> None:
        if self.normalize not in ("n", "none"):
            raise ValueError(
                f"normalize must be 'n' or 'none' for signed weights, got {self.normalize!r}"
            )

    def f(self, scores: Tensor) -> Tensor:
        """The score itself."""
        return scores

    def df(self, scores: Tensor) -> Tensor:
        """1, since the weights are linear in the scores."""
        return torch.ones_like(scores)


@dataclass(frozen=True)
class L1(Weighting):
    r"""Scores divided by their l1 norm, :math:`s_j / \sum_k |s_k|`.

    Example:
        >>> L1()(torch.tensor([[3.0, -1.0]]))
        tensor([[ 0.7500, -0.2500]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """

    name: ClassVar[str] = "l1"
    source: ClassVar[str] = "Su Jianlin, kexue.fm article 9889"
    signed: ClassVar[bool] = True
    order: ClassVar[int] = 1

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Scores divided by their norm over the visible keys; a row of zeros stays zero."""
        norm = self._norm(scores)
        return scores / torch.where(norm > 0, norm, 1.0)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """(diag 1 − w sign(s)ᵀ) / norm, with w the weights and s the scores."""
        unit = inverse(self._norm(scores))
        slope = scores.sign() if self.order == 1 else weights
        return Jacobian(unit.expand_as(scores), weights, unit * slope)

    def _norm(self, scores: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(scores, self.order, dim=-1, keepdim=True)
        return norm


@dataclass(frozen=True)
class L2(L1):
    r"""Scores divided by their l2 norm, :math:`s_j / \sqrt{\sum_k s_k^2}`.

    Example:
        >>> L2()(torch.tensor([[3.0, -4.0]]))
        tensor([[ 0.6000, -0.8000]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """

    name: ClassVar[str] = "l2"
    order: ClassVar[int] = 2
