r"""Normalisation of queries and keys, which bounds the scores or fixes their spread.

Norms are taken over the width of a head, in float32 at least, and given back in the input's dtype.
A normalisation removes whatever multiplied the query before it: a scaling comes after.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from acutance.scores.base import check_pair, precise
from acutance.shapes import check_count, check_number, check_tensor, describe

__all__ = ["HenryGain", "QKNorm", "SwinGain", "l2_norm", "layer_norm", "rms_norm"]

#: Length 1; root mean square 1; mean 0 and variance 1.
Kind = Literal["l2", "rms", "layer"]
#: Which of the two is normalised.
Sides = Literal["both", "query", "key"]


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Divide vectors (last dimension) by their length, :math:`x / \max(\lVert x\rVert, \epsilon)`.

    A vector shorter than ε keeps its direction and gets length :math:`\lVert x\rVert/\epsilon`: a
    zero stays zero.

    Example:
        >>> l2_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    y = precise(check_tensor("x", x))
    length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    unit: Tensor = y / length.clamp(min=eps)
    return unit.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    r"""Vectors of root mean square 1, :math:`x / \sqrt{\overline{x^2} + \epsilon}`, times a weight.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]))
        tensor([1.2000, 1.6000, 0.0000, 0.0000])

    Source:
        Zhang & Sennrich (2019), arXiv:1910.07467.
    """
    y = precise(check_tensor("x", x))
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    r"""Vectors of mean 0 and variance 1, times a weight, plus a bias.

    .. math:: (x - \bar x) / \sqrt{\overline{(x - \bar x)^2} + \epsilon}

    Example:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0]))
        tensor([-1.2247,  0.0000,  1.2247])

    Source:
        Ba et al. (2016), arXiv:1607.06450.
    """
    y = precise(check_tensor("x", x))
    weight, bias = (None if part is None else part.to(y.dtype) for part in (weight, bias))
    return nn.functional.layer_norm(y, y.shape[-1:], weight, bias, eps).to(x.dtype)


class HenryGain(nn.Module):
    r"""One trained scale for all heads, starting at :math:`g_0 = \log_2(L^2 - L)`.

    Args:
        length: L, at least 2: a length that 97.5 % of the training sequences do not exceed.
        device, dtype: of the parameter.

    Example:
        >>> HenryGain(length=512)().detach()
        tensor([17.9972])

    Source:
        Henry et al. (2020), arXiv:2010.04245.
    """

    def __init__(
        self,
        length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("length", length, 2)
        start = math.log2(length * (length - 1))
        self.gain = nn.Parameter(torch.full((1,), start, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """The learned factor of the normalised scores, (1,)."""
        return self.gain


class SwinGain(nn.Module):
    r"""A trained scale for each head, kept as its logarithm: :math:`e^{\min(t_h, \log m)}`.

    Args:
        num_heads: Hq.
        start: where every scale starts, positive.
        maximum: m: no scale is higher, and one above it gets no gradient.
        device, dtype: of the parameters.

    Example:
        >>> SwinGain(num_heads=2)().detach()
        tensor([10.0000, 10.0000])

    Source:
        Liu et al. (2022), arXiv:2111.09883 (Swin Transformer V2): temperature above 0.01.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        start: float = 10.0,
        maximum: float = 100.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_heads", num_heads, 1)
        log = math.log(check_number("start", start, above=0.0))
        self.log_maximum = math.log(check_number("maximum", maximum, above=0.0))
        self.log_gain = nn.Parameter(torch.full((num_heads,), log, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """Factor of each head's cosines, (Hq,): the exponential of the clamped parameter."""
        return self.log_gain.clamp(max=self.log_maximum).exp()


class QKNorm(nn.Module):
    r"""Normalised queries and keys, as a score: give it as ``score=``.

    ``"l2"`` scores are cosines times a gain; ``"rms"`` and ``"layer"`` scores are divided by √E and
    have a trained weight for each component, as in today's language models.

    Args:
        width: E, of a head.
        kind: ``"l2"``, ``"rms"`` or ``"layer"``.
        sides: normalise ``"both"``, or only ``"query"`` or ``"key"``. With keys alone, a row's
            temperature stays the query's length.
        gain: a module that gives one scale or one for each query head, such as :class:`HenryGain`
            or :class:`SwinGain`; it multiplies the normalised query.
        affine: with ``"rms"`` and ``"layer"``, train a weight (and for ``"layer"`` a bias) of each
            component, shared by the heads.
        scale: of the scores; None is 1 for ``"l2"``, where a side of length 1 stands for 1/√E, and
            1/√E for the others.
        eps: see :func:`l2_norm`, :func:`rms_norm` and :func:`layer_norm`.
        device, dtype: of the parameters.

    Raises:
        ValueError: if a name is unknown or a number out of range.

    Example:
        >>> norm = QKNorm(8, "l2", gain=SwinGain(num_heads=2))
        >>> query, key = 3 * torch.ones(1, 2, 1, 8), torch.ones(1, 1, 1, 8)
        >>> from acutance.scores import dot_tile
        >>> dot_tile(norm, query, key).detach().flatten()
        tensor([10.0000, 10.0000])

    Source:
        Henry et al. (2020), arXiv:2010.04245; Dehghani et al. (2023), arXiv:2302.05442 (LayerNorm);
        Su (2023), https://kexue.fm/archives/9859 (keys alone).
    """

    def __init__(
        self,
        width: int,
        kind: Kind = "rms",
        *,
        sides: Sides = "both",
        gain: nn.Module | None = None,
        affine: bool = True,
        scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value, kinds in (("kind", kind, Kind), ("sides", sides, Sides)):
            if value not in get_args(kinds):
                names = ", ".join(get_args(kinds))
                raise ValueError(f"{name} must be one of {names}, got {value!r}")
        self.width = check_count("width", width, 1)
        self.kind, self.sides = kind, sides
        self.eps = check_number("eps", eps, above=0.0)
        default = 1.0 if kind == "l2" else width**-0.5
        self.scale = default if scale is None else check_number("scale", scale)
        self.gain = gain
        for side in ("query", "key"):
            has_gain = affine and kind != "l2" and sides in ("both", side)
            for part, start, used in (
                ("weight", 1.0, has_gain),
                ("bias", 0.0, has_gain and kind == "layer"),
            ):
                parameter = torch.full((width,), start, device=device, dtype=dtype)
                self.register_parameter(f"{side}_{part}", nn.Parameter(parameter) if used else None)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key, normalised, in their dtypes; the gain multiplies the query.

        Args:
            query: (B, Hq, L, E).
            key: (B, H, S, E).
        """
        check_pair(query, key)
        if query.shape[3] != self.width:
            raise ValueError(
                f"query and key must have the width E={self.width} of the normalisation "
                f"({describe(query=query, key=key)})"
            )
        x, y = precise(query), precise(key)
        if self.sides != "key":
            x = self._normalise(x, "query")
        if self.sides != "query":
            y = self._normalise(y, "key")
        if self.gain is not None:
            factor = self.gain()
            if tuple(factor.shape) not in ((), (1,), (query.shape[1],)):
                raise ValueError(
                    f"the gain must be one number or (Hq,) = ({query.shape[1]},), got "
                    f"{tuple(factor.shape)} ({describe(query=query)})"
                )
            x = x * factor.to(x.dtype).reshape(-1, 1, 1)
        return x.to(query.dtype), y.to(key.dtype)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key, normalised, and the scale of their dot product."""
        return *self(query, key), self.scale

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return f"{self.width}, {self.kind!r}, sides={self.sides!r}, scale={self.scale:g}"

    def _normalise(self, x: Tensor, side: str) -> Tensor:
        weight, bias = getattr(self, f"{side}_weight"), getattr(self, f"{side}_bias")
        if self.kind == "l2":
            return l2_norm(x, self.eps)
        if self.kind == "rms":
            return rms_norm(x, weight, self.eps)
        return layer_norm(x, weight, bias, self.eps)
