"""Trained scores as modules, with the usual initialisation.

``init="xavier"`` draws each weight from a Glorot uniform distribution, head by head;
``init="paper"`` does as the article that introduced the score.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from acutance.scores.base import PreparedScore, TileScore
from acutance.scores.products import General, Location
from acutance.scores.tiles import Additive
from acutance.shapes import check_count, check_flag

__all__ = ["AdditiveScore", "GeneralScore", "LocationScore"]

#: How weights start.
Init = Literal["xavier", "paper"]


class _Bilinear(nn.Module):
    """A trained W, (rows, columns), or one for each head."""

    def __init__(
        self, shape: tuple[int, ...], init: Init, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.init: Init = _check_init(init)
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
        super().__init__(shape, init, device, dtype)

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
        self.init: Init = _check_init(init)
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
        super().__init__(shape, init, device, dtype)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query unchanged, rows of W as keys (B, H, S, E), and the scale 1."""
        return Location(self.weight).transform(query, key)

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries for the s keys from ``key_start`` on."""
        return Location(self.weight).tile(query, key, key_start)


def _shape(heads: int | None, **sizes: int) -> tuple[int, ...]:
    """Check sizes and return them as a shape, with ``heads`` in front unless it is None."""
    checked = tuple(check_count(name, size, 1) for name, size in sizes.items())
    return checked if heads is None else (check_count("num_heads", heads, 1), *checked)


def _check_init(init: Init) -> Init:
    if init not in get_args(Init):
        raise ValueError(f"init must be one of {', '.join(get_args(Init))}, got {init!r}")
    return init


def _xavier(weight: Tensor) -> None:
    """Glorot uniform initialisation over the last two dimensions."""
    bound = (6 / (weight.shape[-1] + weight.shape[-2])) ** 0.5
    nn.init.uniform_(weight, -bound, bound)


def _described(weight: Tensor) -> str:
    return " × ".join(str(size) for size in weight.shape)
