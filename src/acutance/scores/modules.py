r"""Trained scores as modules, and normalised queries and keys, which bound the scores.

``init="xavier"`` draws each weight from a Glorot uniform distribution, head by head;
``init="paper"`` does as the article that introduced the score.

Norms are taken over the width of a head, in float32 at least, and given back in the input's dtype.
A normalisation removes whatever multiplied the query before it: a scaling comes after.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from acutance.scores.records import (
    Additive,
    General,
    Location,
    PreparedScore,
    TileScore,
    check_pair,
    l2_norm,
    layer_norm,
    precise,
    rms_norm,
)
from acutance.shapes import check_count, check_flag, check_number, describe

__all__ = ["AdditiveScore", "GeneralScore", "HenryGain", "LocationScore", "QKNorm", "SwinGain"]

#: How weights start.
Init = Literal["xavier", "paper"]
#: Length 1; root mean square 1; mean 0 and variance 1.
Kind = Literal["l2", "rms", "layer"]
#: Which of the two is normalised.
Sides = Literal["both", "query", "key"]


class _Bilinear(nn.Module):
    """A trained W, (rows, columns), or one for each head."""

    def __init__(self, shape: tuple[int, ...], init: Init, **factory: Any) -> None:
        super().__init__()
        _check_choice("init", init, get_args(Init))
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        self.init: Init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W to new random values, as ``init`` says."""
        if self.init == "xavier":
            _xavier(self.weight)
        else:
            nn.init.uniform_(self.weight, -0.1, 0.1)

    def extra_repr(self) -> str:
        """The shape of W, for ``print``."""
        return _described(self.weight)


class GeneralScore(_Bilinear):
    r"""Trained bilinear scores, :math:`q^\top W k`.

    Args:
        query_width: Eq.
        key_width: Ek; None is Eq.
        num_heads: Hq, for a W of each query head; None shares one.
        init: ``"xavier"``, or ``"paper"``: uniform in [−0.1, 0.1].
        device, dtype: of W.

    Example:
        >>> module = GeneralScore(8, num_heads=2)
        >>> module.weight.shape
        torch.Size([2, 8, 8])

    Source:
        Luong et al. (2015), arXiv:1508.04025; Glorot & Bengio (2010).
    """

    def __init__(
        self,
        query_width: int,
        key_width: int | None = None,
        *,
        num_heads: int | None = None,
        init: Init = "xavier",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        key_width = query_width if key_width is None else key_width
        shape = _shape(num_heads, query_width=query_width, key_width=key_width)
        super().__init__(shape, init, device=device, dtype=dtype)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query times W (B, Hq, L, Ek), the key unchanged, and the scale 1."""
        return General(self.weight).transform(query, key)


class AdditiveScore(nn.Module, PreparedScore):
    r"""Trained additive scores, :math:`v^\top \tanh(W_q q + W_k k + b)`.

    Args:
        query_width: Eq.
        key_width: Ek; None is Eq.
        hidden: width of the hidden layer; None is Eq.
        num_heads: Hq, for parameters of each head; None shares them.
        num_kv_heads: H, of which each has its W_k; None is Hq.
        bias: whether there is a b; it starts at 0.
        init: ``"xavier"``, v as a layer of one output; or ``"paper"``: W_q and W_k normal with
            deviation 0.001 and v 0, so that every row starts uniform.
        device, dtype: of the parameters.

    Example:
        >>> module = AdditiveScore(8, hidden=4, init="paper")
        >>> scores = module.tile(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8))
        >>> scores.shape, bool((scores == 0).all())
        (torch.Size([1, 2, 3, 5]), True)

    Source:
        Bahdanau et al. (2015), arXiv:1409.0473, appendix B.1; Glorot & Bengio (2010).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        query_width: int,
        key_width: int | None = None,
        hidden: int | None = None,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        init: Init = "xavier",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        key_width = query_width if key_width is None else key_width
        hidden = query_width if hidden is None else hidden
        key_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads is None and num_kv_heads is not None:
            raise ValueError(f"num_kv_heads={num_kv_heads} needs num_heads, got None")

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.query_weight = empty(*_shape(num_heads, hidden=hidden, query_width=query_width))
        self.key_weight = empty(*_shape(key_heads, hidden=hidden, key_width=key_width))
        self.vector = empty(*_shape(num_heads, hidden=hidden))
        if check_flag("bias", bias):
            self.bias = empty(*_shape(num_heads, hidden=hidden))
        else:
            self.register_parameter("bias", None)
        _check_choice("init", init, get_args(Init))
        self.init: Init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters to new random values, as ``init`` says."""
        with torch.no_grad():
            if self.bias is not None:
                self.bias.zero_()
            if self.init == "paper":
                self.query_weight.normal_(std=0.001)
                self.key_weight.normal_(std=0.001)
                self.vector.zero_()
                return
        _xavier(self.query_weight)
        _xavier(self.key_weight)
        _xavier(self.vector.unsqueeze(-2))

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Project queries to (B, Hq, L, hidden) and keys to (B, H, S, hidden), once per call."""
        return self._score().prepare(query, key)

    def extra_repr(self) -> str:
        """The shapes, for ``print``."""
        return f"{_described(self.query_weight)}, {_described(self.key_weight)}"

    def _score(self) -> Additive:
        return Additive(self.query_weight, self.key_weight, self.vector, self.bias)


class LocationScore(_Bilinear, TileScore):
    r"""Trained scores by position, :math:`(W q)_j`.

    Args:
        width: E, of the query.
        max_keys: S_max, the longest source.
        num_kv_heads: H, for a W of each key head; None shares one.
        init: ``"xavier"``, or ``"paper"``: uniform in [−0.1, 0.1].
        device, dtype: of W.

    Example:
        >>> module = LocationScore(8, max_keys=50)
        >>> query, keys, scale = module.transform(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8))
        >>> keys.shape
        torch.Size([1, 2, 5, 8])

    Source:
        Luong et al. (2015), arXiv:1508.04025; Glorot & Bengio (2010).
    """

    def __init__(
        self,
        width: int,
        max_keys: int,
        *,
        num_kv_heads: int | None = None,
        init: Init = "xavier",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = _shape(num_kv_heads, max_keys=max_keys, width=width)
        super().__init__(shape, init, device=device, dtype=dtype)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query unchanged, rows of W as keys (B, H, S, E), and the scale 1."""
        return Location(self.weight).transform(query, key)

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries for the s keys from ``key_start`` on."""
        return Location(self.weight).tile(query, key, key_start)


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
        _check_choice("kind", kind, get_args(Kind))
        _check_choice("sides", sides, get_args(Sides))
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


def _shape(heads: int | None, **sizes: int) -> tuple[int, ...]:
    """Check sizes and return them as a shape, with ``heads`` in front unless it is None."""
    checked = tuple(check_count(name, size, 1) for name, size in sizes.items())
    return checked if heads is None else (check_count("num_heads", heads, 1), *checked)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless an option is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _xavier(weight: Tensor) -> None:
    """Glorot uniform initialisation over the last two dimensions."""
    bound = (6 / (weight.shape[-1] + weight.shape[-2])) ** 0.5
    nn.init.uniform_(weight, -bound, bound)


def _described(weight: Tensor) -> str:
    return " × ".join(str(size) for size in weight.shape)
