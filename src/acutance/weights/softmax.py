"""Softmax and its relatives: with a sink, of the largest scores, and sparse (from entmax)."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from acutance.extras import install
from acutance.shapes import check_count, check_number, check_tensor
from acutance.weights.base import Jacobian, Weighting, inverse, masked

__all__ = ["Entmax", "Entmax15", "Exp", "Sink", "Softmax", "SoftmaxOne", "Sparsemax", "TopKSoftmax"]

#: Far below any score, and finite: the solvers subtract it.
_HIDDEN = -1e9
#: Keys that the exact solvers sort at first; they sort more of a row whose support is larger.
_SORTED = 64


class _Softmax(Weighting):
    """Exponentials over their sum, in which a sink may take part."""

    distribution: ClassVar[bool] = True

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights p with respect to the scores s: diag p − p pᵀ.

        With a temperature τ it is that with respect to s / τ, and the derivative with respect to
        the scores themselves is 1/τ of it.
        """
        return Jacobian(weights, weights, weights)


@dataclass(frozen=True)
class Softmax(_Softmax):
    r"""Exponentials that sum to one, :math:`p_j = e^{s_j/\tau} / \sum_k e^{s_k/\tau}`.

    Args:
        temperature: τ, positive.

    Raises:
        ValueError: if the temperature is not a positive number.

    Example:
        >>> Softmax()(torch.tensor([[0.0, 0.0]]))
        tensor([[0.5000, 0.5000]])

    Source:
        Vaswani et al. (2017), arXiv:1706.03762.
    """

    name: ClassVar[str] = "softmax"
    source: ClassVar[str] = "Vaswani et al. (2017), arXiv:1706.03762"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0.0)

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax of the scores over the visible keys."""
        return torch.softmax(masked(scores / self.temperature, visible), -1)


@dataclass(frozen=True)
class SoftmaxOne(_Softmax):
    r"""Softmax with an additional outcome of score 0, :math:`e^{s_j} / (1 + \sum_k e^{s_k})`.

    A row can attend to nothing: its weights sum to less than one.

    Example:
        >>> SoftmaxOne()(torch.tensor([[0.0, 0.0]]))
        tensor([[0.3333, 0.3333]])

    Source:
        Miller (2023), Attention is off by one.
    """

    name: ClassVar[str] = "softmax_one"
    source: ClassVar[str] = "Miller (2023), Attention is off by one"

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax over the keys and a sink of score 0; only the keys' weights are returned."""
        return _softmax_with_sink(masked(scores, visible), torch.zeros_like(scores[..., :1]))


@dataclass(frozen=True)
class Sink(_Softmax):
    r"""Softmax over the keys and a sink, which has no value, of learned score b.

    .. math:: p_j = e^{s_j} \big/ \left(e^b + \textstyle\sum_k e^{s_k}\right)

    Args:
        sinks: b, (Hq,), one for each query head.

    Raises:
        TypeError: if ``sinks`` is not a tensor.
        ValueError: if it is not a vector, or not of as many heads as the scores.

    Example:
        >>> Sink(torch.zeros(1))(torch.zeros(1, 1, 2))
        tensor([[[0.3333, 0.3333]]])

    Source:
        Agarwal et al. (2025), gpt-oss model card, arXiv:2508.10925.
    """

    name: ClassVar[str] = "sink"
    source: ClassVar[str] = "Agarwal et al. (2025), arXiv:2508.10925"
    sinks: Tensor = field(compare=False)

    def __post_init__(self) -> None:
        sinks = check_tensor("sinks", self.sinks)
        if sinks.dim() != 1:
            raise ValueError(
                f"sinks must have shape (Hq,), one logit for each head, got {tuple(sinks.shape)}"
            )

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax over the keys and the sink; only the keys' weights are returned."""
        if scores.dim() < 3 or self.sinks.shape[0] not in (1, scores.shape[-3]):
            raise ValueError(
                f"sinks must have one logit per query head: sinks {tuple(self.sinks.shape)}, "
                f"scores {tuple(scores.shape)}"
            )
        sinks = self.sinks.to(scores.dtype).view(-1, 1, 1)
        return _softmax_with_sink(masked(scores, visible), sinks.expand_as(scores[..., :1]))


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Softmax over the scores and a sink's score, with the sink's weight dropped."""
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]


@dataclass(frozen=True)
class Exp(Weighting):
    r"""Exponentials, plain or divided by their l2 norm.

    .. math:: e^{s_j} \quad\text{or}\quad e^{s_j} \big/ \sqrt{\textstyle\sum_k e^{2 s_k}}

    Args:
        normalize: "none" or "l2".

    Example:
        >>> Exp(normalize="l2")(torch.zeros(1, 4))
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """

    name: ClassVar[str] = "exp"
    source: ClassVar[str] = "Su Jianlin, kexue.fm article 9889"
    normalize: Literal["none", "l2"] = "none"

    def __post_init__(self) -> None:
        if self.normalize not in ("none", "l2"):
            raise ValueError(f"normalize must be 'none' or 'l2', got {self.normalize!r}")

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """exp(scores), with "l2" divided by their norm, computed from scores less the maximum."""
        hidden = masked(scores, visible)
        if self.normalize == "none":
            return torch.exp(hidden)
        weights = torch.exp(hidden - hidden.amax(-1, keepdim=True).detach())
        norm: Tensor = torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
        return weights / norm

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The matrix diag w, and with the l2 norm diag w − w (w²)ᵀ, with w the weights."""
        if self.normalize == "none":
            return Jacobian(weights)
        return Jacobian(weights, weights, weights.square())


@dataclass(frozen=True)
class TopKSoftmax(_Softmax):
    r"""Softmax over the k largest scores of a row; of tied scores the earlier ones count.

    Args:
        k: number of keys that get weight, at least 1; with fewer visible keys, all of them do.

    Raises:
        ValueError: if k is less than 1.

    Example:
        >>> TopKSoftmax(2)(torch.tensor([[1.0, 0.0, 1.0]]))
        tensor([[0.5000, 0.0000, 0.5000]])

    Source:
        Gupta et al. (2021), arXiv:2106.06899.
    """

    name: ClassVar[str] = "topk_softmax"
    source: ClassVar[str] = "Gupta et al. (2021), arXiv:2106.06899"
    k: int = 32

    def __post_init__(self) -> None:
        check_count("k", self.k, 1)

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax over the k largest visible scores; the other weights are 0."""
        hidden = masked(scores, visible)
        if self.k >= hidden.shape[-1]:
            return torch.softmax(hidden, -1)
        free = hidden.detach()
        border = free.topk(self.k, dim=-1, sorted=True).values[..., -1:]
        selected = free >= border
        if torch.compiler.is_compiling() or bool((selected.sum(-1) > self.k).any()):
            above, equal = free > border, free == border
            room = self.k - above.sum(-1, keepdim=True)
            selected = above | (equal & (equal.cumsum(-1) <= room))
        return torch.softmax(torch.where(selected, hidden, -torch.inf), -1)


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


class _Entmax(Weighting):
    """Entmax weights, a distribution with exact zeros, for some α."""

    distribution: ClassVar[bool] = True
    alpha: float

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights p with respect to the scores: diag g − g gᵀ / Σg.

        Here g = p^(2 − α) where p > 0, else 0 (Peters et al. 2019, proposition 2).
        """
        some = weights > 0
        slope = torch.where(some, torch.where(some, weights, 1.0).pow(2.0 - self.alpha), 0.0)
        return Jacobian(slope, slope * inverse(slope.sum(-1, keepdim=True)), slope)


@dataclass(frozen=True)
class Sparsemax(_Entmax):
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
    alpha: ClassVar[float] = 2.0  # type: ignore[misc]

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Project the scores of the visible keys onto the probability distributions."""
        return _solve("sparsemax", scores, visible, k=_SORTED)


@dataclass(frozen=True)
class Entmax15(_Entmax):
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
    alpha: ClassVar[float] = 1.5  # type: ignore[misc]

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Entmax weights of the visible keys, exact, by sorting the scores."""
        return _solve("entmax15", scores, visible, k=_SORTED)


@dataclass(frozen=True)
class Entmax(_Entmax):
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

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Entmax weights of the visible keys, by bisection."""
        steps = 60 if scores.dtype == torch.float64 else 40
        return _solve("entmax_bisect", scores, visible, alpha=self.alpha, n_iter=steps)
