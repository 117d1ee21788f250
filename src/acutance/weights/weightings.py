"""Every weighting: whole rows of scores in, whole rows of weights out.

First their base class, then weightings of each score by itself (divided by n, by their sum, or not
at all), and softmax and its relatives (with a sink, of the largest scores, sparse).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from acutance.extras import install
from acutance.shapes import check_count, check_number, check_tensor

__all__ = [
    "L1",
    "L2",
    "Entmax",
    "Entmax15",
    "Exp",
    "Identity",
    "Power",
    "ReLU",
    "ReLU2",
    "Sigmoid",
    "Sink",
    "Softmax",
    "SoftmaxOne",
    "Sparsemax",
    "TopKSoftmax",
    "Weighting",
]


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

    def __init_subclass__(cls, **attributes: Any) -> None:
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)

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
class Sigmoid(Weighting, name="sigmoid", source="Ramapuram et al. (2024), arXiv:2409.04431"):
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
class ReLU(Pointwise, name="relu", source="Wortsman et al. (2023), arXiv:2309.08586"):
    r"""The positive part of each score, :math:`(s_j)_+`.

    Args:
        normalize: divide by "n" (the visible keys), by the "sum", or by nothing ("none").

    Example:
        >>> ReLU()(torch.tensor([[2.0, -1.0]]))
        tensor([[1., 0.]])

    Source:
        Wortsman et al. (2023), arXiv:2309.08586.
    """

    normalize: Normalization = "n"

    def f(self, scores: Tensor) -> Tensor:
        """The positive part."""
        return torch.relu(scores)

    def df(self, scores: Tensor) -> Tensor:
        """1 for positive scores, else 0."""
        return (scores > 0).to(scores.dtype)


@dataclass(frozen=True)
class ReLU2(Pointwise, name="relu2", source="Hua et al. (2022), arXiv:2202.10447"):
    r"""The squared positive part of each score, :math:`(s_j)_+^2`.

    Args:
        normalize: divide by "n" (the visible keys), by the "sum", or by nothing ("none").

    Example:
        >>> ReLU2()(torch.tensor([[2.0, -1.0]]))
        tensor([[2., 0.]])

    Source:
        Hua et al. (2022), arXiv:2202.10447; Su Jianlin, kexue.fm article 9889.
    """

    normalize: Normalization = "n"

    def f(self, scores: Tensor) -> Tensor:
        """The squared positive part."""
        return torch.relu(scores).square()

    def df(self, scores: Tensor) -> Tensor:
        """Twice the positive part."""
        return 2.0 * torch.relu(scores)


@dataclass(frozen=True)
class Power(Pointwise, name="power", source="Su Jianlin, kexue.fm article 9019"):
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
class Identity(Pointwise, name="identity", source="Su Jianlin, kexue.fm article 9889", signed=True):
    r"""The scores themselves, :math:`s_j / n` or :math:`s_j`.

    Args:
        normalize: divide by "n" (the visible keys) or by nothing ("none").

    Example:
        >>> Identity()(torch.tensor([[2.0, -1.0]]))
        tensor([[ 1.0000, -0.5000]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """

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
class L1(Weighting, name="l1", source="Su Jianlin, kexue.fm article 9889", signed=True, order=1):
    r"""Scores divided by their l1 norm, :math:`s_j / \sum_k |s_k|`.

    Example:
        >>> L1()(torch.tensor([[3.0, -1.0]]))
        tensor([[ 0.7500, -0.2500]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """

    order: ClassVar[int]

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
class L2(L1, name="l2", order=2):
    r"""Scores divided by their l2 norm, :math:`s_j / \sqrt{\sum_k s_k^2}`.

    Example:
        >>> L2()(torch.tensor([[3.0, -4.0]]))
        tensor([[ 0.6000, -0.8000]])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """


#: Far below any score, and finite: the solvers subtract it.
_HIDDEN = -1e9
#: Keys that the exact solvers sort at first; they sort more of a row whose support is larger.
_SORTED = 64


class _Softmax(Weighting, distribution=True):
    """Exponentials over their sum, in which a sink may take part."""

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights p with respect to the scores s: diag p − p pᵀ.

        With a temperature τ it is that with respect to s / τ, and the derivative with respect to
        the scores themselves is 1/τ of it.
        """
        return Jacobian(weights, weights, weights)


@dataclass(frozen=True)
class Softmax(_Softmax, name="softmax", source="Vaswani et al. (2017), arXiv:1706.03762"):
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

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0.0)

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax of the scores over the visible keys."""
        return torch.softmax(masked(scores / self.temperature, visible), -1)


@dataclass(frozen=True)
class SoftmaxOne(_Softmax, name="softmax_one", source="Miller (2023), Attention is off by one"):
    r"""Softmax with an additional outcome of score 0, :math:`e^{s_j} / (1 + \sum_k e^{s_k})`.

    A row can attend to nothing: its weights sum to less than one.

    Example:
        >>> SoftmaxOne()(torch.tensor([[0.0, 0.0]]))
        tensor([[0.3333, 0.3333]])

    Source:
        Miller (2023), Attention is off by one.
    """

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax over the keys and a sink of score 0; only the keys' weights are returned."""
        return _softmax_with_sink(masked(scores, visible), torch.zeros_like(scores[..., :1]))


@dataclass(frozen=True)
class Sink(_Softmax, name="sink", source="Agarwal et al. (2025), arXiv:2508.10925"):
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
class Exp(Weighting, name="exp", source="Su Jianlin, kexue.fm article 9889"):
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
class TopKSoftmax(_Softmax, name="topk_softmax", source="Gupta et al. (2021), arXiv:2106.06899"):
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


def _solve(name: str, scores: Tensor, visible: Tensor | None, **options: float) -> Tensor:
    """Weights by the entmax function ``name``, computed in float32 at least.

    In half precision its search for the threshold does not converge.
    """
    try:
        import entmax
    except ImportError as error:
        raise ImportError(
            "sparsemax and entmax weights need the entmax library; install it with: "
            + install("entmax")
        ) from error
    precise = scores if scores.dtype == torch.float64 else scores.float()
    weights: Tensor = getattr(entmax, name)(masked(precise, visible, _HIDDEN), dim=-1, **options)
    return weights.to(scores.dtype)


class _Entmax(Weighting, distribution=True):
    """Entmax weights, a distribution with exact zeros, for some α."""

    alpha: float

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights p with respect to the scores: diag g − g gᵀ / Σg.

        Here g = p^(2 − α) where p > 0, else 0 (Peters et al. 2019, proposition 2).
        """
        some = weights > 0
        slope = torch.where(some, torch.where(some, weights, 1.0).pow(2.0 - self.alpha), 0.0)
        return Jacobian(slope, slope * inverse(slope.sum(-1, keepdim=True)), slope)


@dataclass(frozen=True)
class Sparsemax(
    _Entmax, name="sparsemax", source="Martins & Astudillo (2016), arXiv:1602.02068", alpha=2.0
):
    r"""The distribution nearest to the scores in Euclidean distance; most weights are exactly 0.

    Raises:
        ImportError: when called without the entmax library; it says what to install.

    Example:
        >>> Sparsemax()(torch.tensor([[1.0, 0.5, -1.0]]))
        tensor([[0.7500, 0.2500, 0.0000]])

    Source:
        Martins & Astudillo (2016), arXiv:1602.02068.
    """

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Project the scores of the visible keys onto the probability distributions."""
        return _solve("sparsemax", scores, visible, k=_SORTED)


@dataclass(frozen=True)
class Entmax15(
    _Entmax, name="entmax15", source="Peters et al. (2019), arXiv:1905.05702", alpha=1.5
):
    r"""Entmax with α = 1.5, between softmax and sparsemax.

    Raises:
        ImportError: when called without the entmax library; it says what to install.

    Example:
        >>> Entmax15()(torch.tensor([[1.0, 0.0, -4.0]])).sum()
        tensor(1.)

    Source:
        Peters et al. (2019), arXiv:1905.05702.
    """

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Entmax weights of the visible keys, exact, by sorting the scores."""
        return _solve("entmax15", scores, visible, k=_SORTED)


@dataclass(frozen=True)
class Entmax(_Entmax, name="entmax", source="Peters et al. (2019), arXiv:1905.05702"):
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

    alpha: float = 1.5

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, above=1.0)

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Entmax weights of the visible keys, by bisection."""
        steps = 60 if scores.dtype == torch.float64 else 40
        return _solve("entmax_bisect", scores, visible, alpha=self.alpha, n_iter=steps)
