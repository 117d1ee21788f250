"""Weightings by the exponential function: softmax and its relatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acutance.shapes import check_count, check_number, check_tensor
from acutance.weights.base import Jacobian, Weighting, masked

__all__ = ["Exp", "Sink", "Softmax", "SoftmaxOne", "TopKSoftmax"]


@dataclass(frozen=True)
class Softmax(Weighting):
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

    @property
    def distribution(self) -> bool:
        """True: weights are non-negative and sum to 1."""
        return True

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax of the scores over the visible keys."""
        return torch.softmax(masked(scores / self.temperature, visible), -1)

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The derivative of the weights p with respect to scores / τ: diag p − p pᵀ.

        τ is the temperature; the derivative with respect to the scores themselves is 1/τ of it.
        """
        return Jacobian(weights, weights, weights)


@dataclass(frozen=True)
class SoftmaxOne(Weighting):
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

    @property
    def distribution(self) -> bool:
        """True: the weights of the keys and the sink sum to 1."""
        return True

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax over the keys and a sink of score 0; only the keys' weights are returned."""
        return _softmax_with_sink(masked(scores, visible), torch.zeros_like(scores[..., :1]))

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The matrix diag p − p pᵀ."""
        return Jacobian(weights, weights, weights)


@dataclass(frozen=True)
class Sink(Weighting):
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

    @property
    def distribution(self) -> bool:
        """True: the weights of the keys and the sink sum to 1."""
        return True

    def weigh(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax over the keys and the sink; only the keys' weights are returned."""
        if scores.dim() < 3 or self.sinks.shape[0] not in (1, scores.shape[-3]):
            raise ValueError(
                f"sinks must have one logit per query head: sinks {tuple(self.sinks.shape)}, "
                f"scores {tuple(scores.shape)}"
            )
        sinks = self.sinks.to(scores.dtype).view(-1, 1, 1)
        return _softmax_with_sink(masked(scores, visible), sinks.expand_as(scores[..., :1]))

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The matrix diag p − p pᵀ."""
        return Jacobian(weights, weights, weights)


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

    @property
    def distribution(self) -> bool:
        """False: weights do not sum to one."""
        return False

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
class TopKSoftmax(Weighting):
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

    @property
    def distribution(self) -> bool:
        """True: weights are non-negative and sum to 1."""
        return True

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

    def jacobian(self, scores: Tensor, weights: Tensor, visible: Tensor | None) -> Jacobian:
        """The matrix diag p − p pᵀ, with p the weights, which are 0 beyond the k largest."""
        return Jacobian(weights, weights, weights)
