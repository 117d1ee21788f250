r"""What mechanisms without scores are made of: feature maps φ, and decays λ with their statistics.

Weights of linear attention are :math:`\phi(q) \cdot \phi(k)`; decays shrink weights by a factor λ
per key of distance. All statistics of :math:`1, \lambda, \lambda^2, \dots` have closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from acutance.rowstats.state import NO_KEY
from acutance.rowstats.weighted import WeightStatistics, WeightSums
from acutance.shapes import FLOATS, check_count


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


def retnet_decays(
    heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    r"""RetNet's decays, :math:`\lambda_h = 1 - 2^{-5-h}` for h = 0 … heads − 1.

    Args:
        heads: Hq.
        dtype: floating dtype.
        device: where they live.

    Returns:
        (Hq,), increasing towards 1. From head 20 on they are 1 in float32.

    Example:
        >>> retnet_decays(3)
        tensor([0.9688, 0.9844, 0.9922])

    Source:
        Sun et al. (2023), arXiv:2307.08621, equation 8.
    """
    check_count("heads", heads, 1)
    exponents = torch.arange(heads, dtype=torch.float64, device=device) + 5
    return (1 - torch.exp2(-exponents)).to(dtype)


def alibi_decays(
    heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    r"""ALiBi's slopes as decays, :math:`\lambda_h = e^{-m_h}` with :math:`m_h = 2^{-8(h+1)/H}`.

    In softmax attention with the linear bias :math:`-m_h |i - j|`, the weights are proportional to
    :math:`\lambda_h^{|i - j|}` times a factor that depends on content. As published, a number of
    heads that is not a power of two uses the slopes of the next lower power of two, then every
    other slope of twice as many.

    Args:
        heads: Hq.
        dtype: floating dtype.
        device: where they live.

    Returns:
        (Hq,).

    Example:
        >>> alibi_decays(8)[[0, 7]]
        tensor([0.6065, 0.9961])

    Source:
        Press, Smith & Lewis (2021), arXiv:2108.12409.
    """
    check_count("heads", heads, 1)
    whole = 1 << (heads.bit_length() - 1)

    def slopes(count: int) -> Tensor:
        steps = torch.arange(1, count + 1, dtype=torch.float64, device=device)
        return torch.exp2(-8 / count * steps)

    chosen = torch.cat([slopes(whole), slopes(2 * whole)[::2][: heads - whole]])
    return torch.exp(-chosen).to(dtype)


def decay_statistics(n: Tensor | int, decay: Tensor | float) -> WeightStatistics:
    r"""Statistics of the weights :math:`1, \lambda, \dots, \lambda^{n-1}`, the latest key first.

    With :math:`\theta = -\log \lambda`, effective keys are :math:`\tanh(n\theta/2) /
    \tanh(\theta/2)`, always below :math:`(1+\lambda)/(1-\lambda)`. Divided by their sum, the
    weights are a distribution and have an entropy.

    Args:
        n: number of visible keys, integers of shape (...); 0 for rows without keys.
        decay: λ in (0, 1], or :math:`|\lambda|` of complex decays; broadcast against n.

    Returns:
        Statistics of the broadcast shape, float64 for float64 decays and float32 otherwise.
        Differentiable in the decay.

    Raises:
        TypeError: if n is not an integer, or the decay no number.
        ValueError: if a decay is outside (0, 1].

    Example:
        >>> stats = decay_statistics(torch.tensor([1, 10, 10_000]), 0.9)
        >>> stats.effective_keys
        tensor([ 1.0000,  9.1757, 19.0000])
        >>> stats.entropy
        tensor([0.0000, 2.2580, 3.2508])

    Source:
        Su Jianlin, kexue.fm article 9889.
    """
    keys = n if isinstance(n, Tensor) else torch.tensor(check_count("n", n, 0))
    if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
        raise TypeError(f"n must contain whole numbers of keys, got {keys.dtype}")
    number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if not (number or (isinstance(decay, Tensor) and decay.dtype in FLOATS)):
        kind = decay.dtype if isinstance(decay, Tensor) else type(decay).__name__
        raise TypeError(f"decay must be a number or a floating-point tensor, got {kind}")
    double = isinstance(decay, Tensor) and decay.dtype == torch.float64
    dtype = torch.float64 if double else torch.float32
    lam = torch.as_tensor(decay, dtype=torch.float64)
    lam = lam if isinstance(decay, Tensor) else lam.to(keys.device)
    if not torch.compiler.is_compiling():
        outside = ~((lam > 0) & (lam <= 1))  # NaN is outside too
        if bool(outside.any()):
            raise ValueError(f"decay must be in (0, 1], got {lam.detach()[outside][0].item():g}")
    keys, lam = torch.broadcast_tensors(keys.long(), lam)
    has_keys, count, theta = keys > 0, keys.double(), -torch.log(lam)
    A, Q = _geometric(theta, count), _geometric(2 * theta, count)
    X = -theta * _mean_position(theta, count) * A
    top = has_keys.double()
    first = torch.where(has_keys, torch.exp(-theta * (count - 1).clamp(min=0.0)), 0.0)
    c, T, A, Q, X, top, first = (part.to(dtype) for part in (top, A, A, Q, X, top, first))
    index = torch.where(has_keys, 0, NO_KEY)
    return WeightStatistics(WeightSums(keys, c, T, A, Q, X, top, first, index))


def _geometric(theta: Tensor, n: Tensor) -> Tensor:
    r""":math:`\sum_{k<n} e^{-k\theta}`, n at θ = 0."""
    flat = n * theta < 1e-7
    safe = torch.where(flat, 1.0, theta)
    return torch.where(
        flat, n - n * (n - 1) / 2 * theta, torch.expm1(-n * safe) / torch.expm1(-safe)
    )


def _mean_position(theta: Tensor, n: Tensor) -> Tensor:
    r"""Mean of k under :math:`e^{-k\theta}`, 0 ≤ k < n; by a series for small n θ."""
    width = n * theta
    near = width < 0.2
    x = torch.where(near, theta / 2, 0.0)
    series = (n - 1) / 2 - (n * _langevin(n * x) - _langevin(x)) / 2
    t = torch.where(near, 1.0, theta)
    wide = torch.where(near, 1.0, n * t)
    exact = _excess(t) - torch.where(near, 1.0, n) * _excess(wide)
    return torch.where(n > 0, torch.where(near, series, exact), 0.0)


def _excess(x: Tensor) -> Tensor:
    r""":math:`1 / (e^x - 1)`; 0 if :math:`e^x` overflows."""
    return torch.exp(-x) / -torch.expm1(-x)


def _langevin(x: Tensor) -> Tensor:
    r""":math:`\coth x - 1/x` for x ≤ 0.1, to full precision."""
    y = x * x
    tail = 1 / 4725 - y * (2 / 93555 - y * 1382 / 638512875)
    return x * (1 / 3 - y * (1 / 45 - y * (2 / 945 - y * tail)))
