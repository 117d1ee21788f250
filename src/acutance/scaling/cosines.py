"""Scalings for cosine scores, and one derived from the cosines of random directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acutance.scaling.base import Rows, Scaling
from acutance.shapes import check_count, check_number

__all__ = ["CosScale", "CosineLogN", "InfoScale"]


@dataclass(frozen=True)
class CosineLogN(Scaling):
    r"""Scale of cosine scores, :math:`c \log n`.

    Cosines lie in [−1, 1], where a softmax can say at most 0.47 nat, so they need a scale well
    above 1 that grows with n. Use it with ``score="cosine"`` or l2-normalised queries and keys, at
    temperature 1.

    Args:
        coefficient: c, positive: 3.5 and 4 are in use.
        n_min: shorter rows are scaled as rows of this length, at least 1.

    Example:
        >>> CosineLogN().factor(torch.tensor([512, 65536]))
        tensor([24.9533, 44.3614])

    Source:
        Su (2023), https://kexue.fm/archives/9812 (3.5) and https://kexue.fm/archives/9859 (4).
    """

    name: ClassVar[str] = "cosine_log_n"
    source: ClassVar[str] = "Su (2023), https://kexue.fm/archives/9859"
    coefficient: float = 4.0
    n_min: int = 16

    def __post_init__(self) -> None:
        self._set(coefficient=check_number("coefficient", self.coefficient, above=0.0))
        check_count("n_min", self.n_min, 1)

    def law(self, rows: Rows) -> Tensor:
        """The scale c log max(n, ``n_min``) of each row's cosines."""
        return self.coefficient * rows.n.clamp(min=self.n_min).log()


@dataclass(frozen=True)
class CosScale(Scaling):
    r"""A constant scale of cosine scores, :math:`s \cos(q, k)` at every n.

    Use it with ``score="cosine"``, in a model that is trained with it: it equals the temperature
    1/s of :class:`~acutance.scores.Cosine`. On dot products it is a plain factor s.

    Args:
        scale: s, positive. The authors' results are for 32 and 128.

    Example:
        >>> CosScale(32.0).factor(torch.tensor([64, 4096]))
        tensor([32., 32.])

    Source:
        Li et al. (2025), arXiv:2501.08570; the formula is that of the authors' code,
        github.com/HT-NEKO/Information-Entropy-Invariance, ``model/my_gau_alpha_eval/layer.py``.
    """

    name: ClassVar[str] = "cos_scale"
    source: ClassVar[str] = "Li et al. (2025), arXiv:2501.08570"
    scale: float

    def __post_init__(self) -> None:
        self._set(scale=check_number("scale", self.scale, above=0.0))

    def law(self, rows: Rows) -> Tensor:
        """The constant scale s for every row, whatever its number of keys; shaped as ``rows.n``."""
        return torch.full_like(rows.n, self.scale)


@dataclass(frozen=True)
class InfoScale(Scaling):
    r"""InfoScale: a factor on dot products that needs no training and depends on their width d.

    .. math:: \sqrt{\frac{1 - n^{-2/d}}{1 - L^{-2/d}}}

    :math:`\sqrt{1 - n^{-2/d}}` is the cosine of the angle with :math:`\sin^d \theta = 1/n`, roughly
    that of the nearest of n random directions of d dimensions; sampled at d = 8, the nearest
    cosine grows by 7 per cent more from 64 to 1024 directions. While log n is well below d/2 the
    factor is :math:`\sqrt{\log n / \log L}`; it never exceeds :math:`1/\sqrt{1 - L^{-2/d}}`.

    Args:
        train_length: L, at least 2.
        width: d, the width of a head, at least 1.
        minimum: no factor is lower. The authors' is 0: shorter rows than in training are flattened,
            down to a factor of 0 at n = 1. At 1 they stay as they were trained.

    Example:
        >>> InfoScale(train_length=512, width=64).factor(torch.tensor([1, 64, 512, 4096]))
        tensor([0.0000, 0.8295, 1.0000, 1.1368])
        >>> InfoScale(train_length=512, width=64, minimum=1.0).factor(torch.tensor([64, 4096]))
        tensor([1.0000, 1.1368])

    Source:
        Li et al. (2025), arXiv:2501.08570; the formula is that of the authors' code,
        github.com/HT-NEKO/Information-Entropy-Invariance, ``model/my_gau_alpha_eval/layer.py``.
        The reading as a nearest direction is acutance's own.
    """

    name: ClassVar[str] = "info_scale"
    source: ClassVar[str] = "Li et al. (2025), arXiv:2501.08570"
    train_length: int
    width: int
    minimum: float = 0.0

    def __post_init__(self) -> None:
        check_count("train_length", self.train_length, 2)
        check_count("width", self.width, 1)
        self._set(minimum=check_number("minimum", self.minimum, above=0.0, including=True))

    def law(self, rows: Rows) -> Tensor:
        """The factor √((1 − n^(−2/d)) / (1 − L^(−2/d))) of each row, at least ``minimum``."""
        trained = -math.expm1(-2 * math.log(self.train_length) / self.width)
        seen = -torch.expm1(-2 * rows.log_n / self.width)
        return (seen / trained).sqrt().clamp(min=self.minimum)
