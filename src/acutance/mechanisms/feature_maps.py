r"""Feature maps from q and k to q' and k', such that a weight is :math:`a = q' \cdot k'`.

A map is given by name (``feature_map="elu1"``), as a record with options
(``feature_map=CosFormer(length=4096)``), or as any function of a tensor (``feature_map=lambda x:
torch.relu(x) + 0.1``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from acutance.shapes import check_flag, check_number, did_you_mean

__all__ = ["FEATURE_MAPS", "AnyMap", "CallableMap", "CosFormer", "FeatureMap", "feature_map"]


@dataclass(frozen=True)
class FeatureMap(ABC):
    """A map of queries and keys to features.

    Attributes:
        name: as in :data:`FEATURE_MAPS`.
        source: article.
        nonnegative: whether every weight is at least 0, so that rows can be normalised.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    nonnegative: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Features of queries or keys.

        Args:
            x: (..., length, E), floating point.
            positions: (length,), position of each among all keys; most maps ignore it.

        Returns:
            (..., length, features), of the same dtype.
        """


class Identity(FeatureMap):
    """The vectors themselves; weights have both signs and are not normalised."""

    name = "identity"
    source = "Schmidhuber (1992), Neural Computation 4:131"
    nonnegative = False

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return ``x`` unchanged."""
        return x


class Elu1(FeatureMap):
    """elu(x) + 1 of each component: always positive."""

    name = "elu1"
    source = "Katharopoulos et al. (2020), arXiv:2006.16236"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """exp(x) below 0, x + 1 above, without the rounding of elu(x) + 1 far below 0."""
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0.0)))


class Relu(FeatureMap):
    """max(x, 0) of each component; a query without positive components gives no key any weight."""

    name = "relu"
    source = "Kasai et al. (2021), arXiv:2103.13076"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Positive parts."""
        return torch.relu(x)


class Relu2(FeatureMap):
    """max(x, 0)² of each component."""

    name = "relu2"
    source = "Hua et al. (2022), arXiv:2202.10447, and Zhang et al. (2024), arXiv:2402.04347"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Squared positive parts."""
        return torch.relu(x).square()


class Exp(FeatureMap):
    """exp(x) of each component; float32 overflows where a component is above 88."""

    name = "exp"
    source = "Su Jianlin, kexue.fm article 9889; Zhang et al. (2024), arXiv:2402.04347"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Exponentials."""
        return torch.exp(x)


class Softmax(FeatureMap):
    """Softmax over the components of each vector."""

    name = "softmax"
    source = "Shen et al. (2018), arXiv:1812.01243"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Components that sum to 1."""
        return torch.softmax(x, -1)


class Hedgehog(FeatureMap):
    """Softmax over the components and their negatives: twice as many features."""

    name = "hedgehog"
    source = "Zhang et al. (2024), arXiv:2402.04347"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Softmax of (x, −x)."""
        return torch.softmax(torch.cat([x, -x], -1), -1)


@dataclass(frozen=True)
class CosFormer(FeatureMap):
    r"""ReLU features whose weights are multiplied by the cosine of the distance.

    At distance i − j the factor is :math:`\cos\bigl(\frac{\pi}{2} \frac{i - j}{M}\bigr)`.

    Args:
        length: M, at or above the largest distance between a query and a key, so that no weight
            is negative; twice as many features.

    Raises:
        ValueError: if length is not positive, or a position lies outside [0, M].

    Example:
        >>> x, places = torch.ones(3, 1), torch.arange(3)
        >>> q = CosFormer(length=4)(x, places)
        >>> q[2] @ q[0]  # cos(π/4)
        tensor(0.7071)

    Source:
        Qin et al. (2022), arXiv:2202.08791.
    """

    name: ClassVar[str] = "cosformer"
    source: ClassVar[str] = "Qin et al. (2022), arXiv:2202.08791"
    length: float = 8192

    def __post_init__(self) -> None:
        check_number("length", self.length, above=0.0)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """relu(x) times the cosine and the sine of the position's angle."""
        if positions.numel() and not torch.compiler.is_compiling():
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high > self.length:
                raise ValueError(
                    f"positions of CosFormer must be in [0, length={self.length}], got {low} "
                    f"to {high}: pass feature_map=CosFormer(length=...) with the length of the "
                    "longest sequence"
                )
        angle = (positions.double() * (math.pi / 2 / self.length)).unsqueeze(-1)
        positive = torch.relu(x)
        return torch.cat(
            [positive * torch.cos(angle).to(x.dtype), positive * torch.sin(angle).to(x.dtype)], -1
        )


@dataclass(frozen=True)
class CallableMap(FeatureMap):
    """A function of a tensor, or a module, as a feature map.

    Args:
        function: maps queries or keys, (..., length, E), to features, (..., length, F); it receives
            a segment at a time. Its parameters get gradients.
        nonnegative: whether all features are non-negative, so that rows can be normalised; checked.

    Raises:
        TypeError: if the function is not callable, or does not return a tensor.
        ValueError: if its features have another length, or are negative despite ``nonnegative``.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 6, 4).unbind(0)
        >>> from acutance.mechanisms import CallableMap, linear_attention
        >>> linear_attention(query, key, value, feature_map=lambda x: x.sigmoid()).shape
        torch.Size([1, 2, 6, 4])
        >>> signed = CallableMap(torch.tanh, nonnegative=False)
        >>> linear_attention(query, key, value, feature_map=signed).shape
        torch.Size([1, 2, 6, 4])
    """

    name: ClassVar[str] = "callable"
    source: ClassVar[str] = "the caller"
    function: Callable[[Tensor], Tensor]
    nonnegative: bool = field(default=True, kw_only=True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {type(self.function).__name__}")
        check_flag("nonnegative", self.nonnegative)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply the function to x."""
        features: object = self.function(x)
        if not isinstance(features, Tensor):
            raise TypeError(f"a feature map must return a Tensor, got {type(features).__name__}")
        if features.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                "a feature map must map (..., length, E) to (..., length, F), got "
                f"{tuple(features.shape)} for {tuple(x.shape)}"
            )
        if self.nonnegative and not torch.compiler.is_compiling():
            below = features.detach() < 0
            if bool(below.any()):
                raise ValueError(
                    "a callable feature map must not have negative features, got "
                    f"{features.detach()[below][0].item():g}: pass signed ones as "
                    "CallableMap(function, nonnegative=False)"
                )
        return features.to(x.dtype)


#: A name, a feature map or a function that is one.
AnyMap: TypeAlias = str | FeatureMap | Callable[[Tensor], Tensor]

#: Every feature map by name.
FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    entry.name: entry for entry in (Identity, Elu1, Relu, Relu2, Exp, Softmax, Hedgehog, CosFormer)
}


def feature_map(given: AnyMap | object) -> FeatureMap:
    """The feature map for a name, a map or a function.

    Raises:
        ValueError: if the name is unknown; the message gives the nearest.
        TypeError: if it is not a name, FeatureMap or function.

    Example:
        >>> feature_map("hedgehog").nonnegative
        True
    """
    if isinstance(given, FeatureMap):
        return given
    if not isinstance(given, str):
        if isinstance(given, type) or not callable(given):
            raise TypeError(
                "feature_map must be a name, a FeatureMap or a function of a tensor, got "
                f"{given.__name__ if isinstance(given, type) else type(given).__name__}"
            )
        return CallableMap(given)
    if given not in FEATURE_MAPS:
        longer = [name for name in FEATURE_MAPS if given and name.startswith(given)]
        known = f": choose from {', '.join(FEATURE_MAPS)}"
        hint = did_you_mean(longer[0] if longer else given, FEATURE_MAPS, known)
        raise ValueError(f"there is no feature map named {given!r}{hint}")
    return FEATURE_MAPS[given]()
