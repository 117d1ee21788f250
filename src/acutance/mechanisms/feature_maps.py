r"""Feature maps φ of linear attention, whose weights are :math:`\phi(q) \cdot \phi(k)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def identity(x: Tensor) -> Tensor:
    """The vectors themselves; weights have both signs and are not normalised."""
    return x


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1: exp(x) below 0, x + 1 above, without the rounding of a sum far below 0."""
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0.0)))


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² of each component."""
    return torch.relu(x).square()


def softmax(x: Tensor) -> Tensor:
    """Softmax over the components of each vector."""
    return torch.softmax(x, -1)


def hedgehog(x: Tensor) -> Tensor:
    """Softmax over the components and their negatives: twice as many features."""
    return torch.softmax(torch.cat([x, -x], -1), -1)


#: Functions of (..., E) to features (..., F), by name. All but ``"identity"`` are non-negative.
FEATURE_MAPS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "identity": identity,
        "elu1": elu1,
        "relu": torch.relu,
        "relu2": relu2,
        "exp": torch.exp,
        "softmax": softmax,
        "hedgehog": hedgehog,
    }
)


def cosformer(x: Tensor, positions: Tensor, length: int) -> Tensor:
    r"""ReLU features whose products are multiplied by :math:`\cos(\pi (i - j) / 2M)`.

    Args:
        x: queries or keys, (..., L, E).
        positions: their positions among the keys, (L,), each at most ``length``.
        length: M, so that no weight is negative.

    Returns:
        (..., L, 2 E).

    Example:
        >>> features = cosformer(torch.ones(3, 1), torch.arange(3), length=4)
        >>> features[2] @ features[0]  # cos(π/4)
        tensor(0.7071)

    Source:
        Qin et al. (2022), arXiv:2202.08791.
    """
    angle = (positions.double() * (math.pi / 2 / length)).unsqueeze(-1)
    positive = torch.relu(x)
    return torch.cat([positive * angle.cos().to(x.dtype), positive * angle.sin().to(x.dtype)], -1)
