r"""Every score as a record: dot products, by position, additive, by distance, of linear attention.

First the two kinds of scores, dot products of transformed vectors and tiles on demand, then those
that are dot products of transformed vectors, or of the query with position vectors;
then those computed tile by tile. The additive score is :math:`v^\top \tanh(W_q q + W_k k)`.
Written out, the tanh is L×S×hidden. Here it exists for a few hidden units of one tile at a time,
and the backward pass computes it again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from acutance.shapes import FLOATS, check_count, check_number, check_tensor, describe

__all__ = [
    "Additive",
    "Cosine",
    "Dot",
    "DotScore",
    "Features",
    "FunctionScore",
    "General",
    "Location",
    "ScaleInvariant",
    "ScaledDot",
    "TileScore",
    "additive",
    "cosine",
    "dot",
    "dot_tile",
    "general",
    "l2_norm",
    "layer_norm",
    "location",
    "rms_norm",
    "scale_invariant",
    "scaled_dot",
]


@runtime_checkable
class DotScore(Protocol):
    r"""A score that is a dot product of transformed vectors, :math:`s_{ij} = c \, q'_i \cdot k'_j`.

    After one transformation of queries and keys it costs as much as plain attention.
    """

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Transformed query (B, Hq, L, E') and key (B, H, S, E'), and the scale c."""
        ...


@runtime_checkable
class TileScore(Protocol):
    """A score that is no dot product, computed for a block of queries and keys (a tile) at a time.

    It needs memory of a few tiles; no tensor of L×S×hidden is formed, forward or backward.
    """

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries (B, Hq, l, E) and of keys (B, H, s, E).

        They are float32 at least, since statistics would suffer from half precision. ``key_start``
        is the position of the block's first key among all keys.
        """
        ...

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Do once per call what is the same for all tiles, such as projections.

        Returns:
            Another score, and the query and key to cut into blocks for it; its tiles are those of
            this score. Without it, :meth:`tile` gives the same result more slowly. By default
            there is nothing to prepare.
        """
        return self, query, key


class PreparedScore(TileScore, Protocol):
    """A score whose every tile is that of the score which :meth:`prepare` returns."""

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries and of keys, in float32 at least."""
        score, query, key = self.prepare(query, key)
        return score.tile(query, key, key_start)


@dataclass(frozen=True)
class FunctionScore(TileScore):
    """Any function of a block of queries and a block of keys, as a :class:`TileScore`.

    Args:
        function: called as ``function(query, key, key_start)`` with (B, Hq, l, E), (B, H, s, E) and
            the position of the first key; gives scores (B, Hq, l, s).

    Raises:
        TypeError: if it is not callable, or gives no Tensor.
        ValueError: if its result has another shape.

    Example:
        Minus the squared distance:

        >>> score = FunctionScore(lambda q, k, start: -torch.cdist(q, k).square())
        >>> score.tile(torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 3, 2))
        tensor([[[[-2., -2., -2.]]]])
    """

    function: Callable[[Tensor, Tensor, int], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {type(self.function).__name__}")

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """The function's scores, with their shape checked."""
        scores = self.function(query, key, key_start)
        want = (*query.shape[:3], key.shape[2])
        if not isinstance(scores, Tensor):
            raise TypeError(f"the score function must return a Tensor, got {type(scores).__name__}")
        if tuple(scores.shape) != want:
            raise ValueError(
                f"the score function must return (B, Hq, L, S) = {want}, got {tuple(scores.shape)} "
                f"({describe(query=query, key=key)})"
            )
        return scores


def dot_tile(score: DotScore, query: Tensor, key: Tensor) -> Tensor:
    """All scores (B, Hq, L, S) of a :class:`DotScore`, in float32 at least.

    Example:
        >>> from acutance.scores import Dot
        >>> dot_tile(Dot(), torch.ones(1, 2, 1, 4), torch.ones(1, 1, 3, 4)).shape
        torch.Size([1, 2, 1, 3])
    """
    query, key, scale = score.transform(query, key)
    return products(precise(query), precise(key)) * scale


def products(query: Tensor, key: Tensor) -> Tensor:
    """Dot products (B, Hq, L, S); the query heads that share a key head are neighbours."""
    grouped = query.unflatten(1, (key.shape[1], query.shape[1] // key.shape[1]))
    scores: Tensor = (grouped @ key.unsqueeze(2).mT).flatten(1, 2)
    return scores


def precise(tensor: Tensor) -> Tensor:
    """Convert to the precision of norms and sums: float32 at least."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def check_pair(query: Tensor, key: Tensor, *, same_width: bool = True) -> None:
    """Check the shapes and dtypes of a query and a key.

    Raises:
        TypeError: if one is not a floating-point tensor.
        ValueError: if ranks, batch, head counts or widths do not fit.
    """
    for name, tensor in {"query": query, "key": key}.items():
        if check_tensor(name, tensor).dtype not in FLOATS:
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")

    def shapes() -> str:
        return describe(query=query, key=key)

    for name, tensor in {"query": query, "key": key}.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have four dimensions (batch, heads, length, width), got "
                f"{tensor.dim()} ({shapes()})"
            )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have the same batch size B ({shapes()})")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads ({shapes()})"
        )
    if same_width and query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must have the same width E: query has E={query.shape[3]}, key has "
            f"E={key.shape[3]} ({shapes()})"
        )


def check_parameter(name: str, value: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
    """Check that a parameter has a shape, with or without a dimension of heads in front.

    Args:
        name: of the parameter.
        value: the parameter.
        what: its shape in words, such as ``"(Eq, Ek)"``.
        shape: its last dimensions; 0 stands for any positive size.

    Returns:
        The parameter.

    Raises:
        TypeError: if it is not a floating-point tensor.
        ValueError: if its shape does not fit.
    """
    if check_tensor(name, value).dtype not in FLOATS:
        raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
    trailing = value.shape[-len(shape) :] if value.dim() >= len(shape) else ()
    fits = value.dim() in (len(shape), len(shape) + 1) and all(
        size > 0 and want in (0, size) for size, want in zip(trailing, shape, strict=True)
    )
    if not fits or value.shape[0] == 0:
        raise ValueError(
            f"{name} must have shape {what}, or one such parameter per head, got "
            f"{tuple(value.shape)}"
        )  # fmt: skip
    return value


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
    return F.layer_norm(y, y.shape[-1:], weight, bias, eps).to(x.dtype)


@dataclass(frozen=True)
class Dot:
    r"""The dot product, :math:`q \cdot k`.

    For independent components of mean 0 and variance 1 its variance is the width E, so as E grows
    softmax puts all weight on one key.

    Example:
        >>> import torch
        >>> Dot().transform(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 3, 16))[2]
        1.0

    Source:
        Luong et al. (2015), arXiv:1508.04025.
    """

    name: ClassVar[str] = "dot"

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key unchanged, and the scale 1."""
        check_pair(query, key)
        return query, key, 1.0


@dataclass(frozen=True)
class ScaledDot:
    r"""The dot product over the root of the width, :math:`q \cdot k / \sqrt E`.

    For independent components of mean 0 and variance 1 its variance is 1.

    Example:
        >>> import torch
        >>> ScaledDot().transform(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 3, 16))[2]
        0.25

    Source:
        Vaswani et al. (2017), arXiv:1706.03762, footnote 4.
    """

    name: ClassVar[str] = "scaled_dot"

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key unchanged, and the scale 1/√E."""
        check_pair(query, key)
        return query, key, query.shape[3] ** -0.5


@dataclass(frozen=True)
class Cosine:
    r"""The cosine between query and key over a temperature.

    .. math:: s_{ij} = \frac{1}{\tau} \frac{q_i \cdot k_j}
              {\max(\lVert q_i\rVert, \epsilon) \max(\lVert k_j\rVert, \epsilon)}

    Unlike dot products, it does not depend on the norms: that of a query acts as a temperature of
    its row, and those of keys change their order. At τ = 1 the entropy of a row is at most 0.4745
    nat below log n, so use a lower τ or a scaling law. Query and key must have the same width.

    Args:
        temperature: τ, positive.
        eps: a vector shorter than ε is divided by ε: a zero vector scores 0 with everything, and
            its gradient, g/(ετ), is finite, if large.

    Raises:
        ValueError: if the temperature or ε is not positive.

    Example:
        >>> import torch
        >>> query = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).view(1, 1, 2, 2)
        >>> cosine(query, torch.tensor([2.0, 0.0]).view(1, 1, 1, 2))
        tensor([[[[0.6000],
                  [0.0000]]]])

    Source:
        Graves et al. (2014), arXiv:1410.5401 (content-based addressing).
    """

    name: ClassVar[str] = "cosine"
    temperature: float = 1.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0.0)
        check_number("eps", self.eps, above=0.0)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query and key divided by their lengths, and the scale 1/τ."""
        check_pair(query, key)
        return l2_norm(query, self.eps), l2_norm(key, self.eps), 1 / self.temperature


@dataclass(frozen=True)
class General:
    r"""A bilinear form, :math:`q^\top W k`.

    Args:
        weight: W, (Eq, Ek), or (Hq, Eq, Ek) with one for each query head. Query and key may differ
            in width.

    Raises:
        TypeError: if the weight is not a floating-point tensor.
        ValueError: if its shape is not one of the two.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # first of the query, second of the key
        >>> query, key = torch.tensor([2.0, 5.0]), torch.tensor([7.0, 3.0])
        >>> general(query.view(1, 1, 1, 2), key.view(1, 1, 1, 2), weight)
        tensor([[[[6.]]]])

    Source:
        Luong et al. (2015), arXiv:1508.04025.
    """

    name: ClassVar[str] = "general"
    weight: Tensor

    def __post_init__(self) -> None:
        check_parameter("weight", self.weight, "(Eq, Ek)", (0, 0))

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query times W (B, Hq, L, Ek), the key unchanged, and the scale 1."""
        check_pair(query, key, same_width=False)
        want = (query.shape[3], key.shape[3])
        heads = self.weight.shape[0] if self.weight.dim() == 3 else query.shape[1]
        if tuple(self.weight.shape[-2:]) != want or heads != query.shape[1]:
            raise ValueError(
                f"weight must have shape (Eq, Ek) = {want} or (Hq, Eq, Ek) = "
                f"{(query.shape[1], *want)}, got {tuple(self.weight.shape)} "
                f"({describe(query=query, key=key)})"
            )
        return query @ self.weight.to(query.dtype), key, 1.0


def dot(query: Tensor, key: Tensor) -> Tensor:
    """Dot products, (B, Hq, L, S), of query (B, Hq, L, E) and key (B, H, S, E).

    Example:
        >>> import torch
        >>> dot(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4))
        tensor([[[[4., 4.]]]])
    """
    return dot_tile(Dot(), query, key)


def scaled_dot(query: Tensor, key: Tensor) -> Tensor:
    """Dot products over √E, (B, Hq, L, S).

    Example:
        >>> import torch
        >>> scaled_dot(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4))
        tensor([[[[2., 2.]]]])
    """
    return dot_tile(ScaledDot(), query, key)


def cosine(query: Tensor, key: Tensor, temperature: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Cosine similarity of every query and key, divided by ``temperature``: (B, Hq, L, S).

    See :class:`Cosine`.

    Example:
        >>> import torch
        >>> cosine(torch.ones(1, 1, 1, 4), -torch.ones(1, 1, 1, 4), temperature=0.5)
        tensor([[[[-2.]]]])
    """
    return dot_tile(Cosine(temperature, eps), query, key)


def general(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Bilinear forms qᵀWk, (B, Hq, L, S); see :class:`General`.

    Example:
        >>> import torch
        >>> general(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 3), torch.ones(2, 3))
        tensor([[[[6.]]]])
    """
    return dot_tile(General(weight), query, key)


@dataclass(frozen=True)
class Location(TileScore):
    r"""Scores by position alone, :math:`s_{ij} = (W q_i)_j`.

    They are dot products of the query with the rows of W, which take the place of the keys, and
    cost as much as plain attention. Query heads that share a key head share its W.

    Args:
        weight: W, (S_max, E), or (H, S_max, E) with one for each key head; S_max is the longest
            source it can serve.

    Raises:
        TypeError: if the weight is not a floating-point tensor.
        ValueError: if its shape is not one of the two, or a source is longer than S_max.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> location(torch.tensor([2.0, 3.0]).view(1, 1, 1, 2), weight, keys=3)
        tensor([[[[2., 3., 5.]]]])

    Source:
        Luong et al. (2015), arXiv:1508.04025.
    """

    name: ClassVar[str] = "location"
    weight: Tensor

    def __post_init__(self) -> None:
        check_parameter("weight", self.weight, "(S_max, E)", (0, 0))

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """The query unchanged, rows of W as keys (B, H, S, E), and the scale 1."""
        check_pair(query, key, same_width=False)
        return query, self._rows(query, key, 0), 1.0

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        """Scores (B, Hq, l, s) of a block of queries for the keys from ``key_start`` on."""
        check_pair(query, key, same_width=False)
        return products(precise(query), precise(self._rows(query, key, key_start)))

    def _rows(self, query: Tensor, key: Tensor, start: int) -> Tensor:
        """The rows of W for the given keys, as keys (..., S, E); raises if there are too few."""
        heads, count = key.shape[1], key.shape[2]
        weight = self.weight

        def shapes() -> str:
            return f"weight {tuple(weight.shape)}, {describe(query=query, key=key)}"

        if weight.shape[-1] != query.shape[3]:
            raise ValueError(
                f"weight must have the query's width E={query.shape[3]}, got "
                f"{weight.shape[-1]} ({shapes()})"
            )
        if weight.dim() == 3 and weight.shape[0] != heads:
            raise ValueError(
                f"weight has {weight.shape[0]} key heads, but there are {heads} ({shapes()})"
            )
        if start < 0 or start + count > weight.shape[-2]:
            raise ValueError(
                f"weight must have a row for each of at most S_max={weight.shape[-2]} keys, "
                f"got keys {start} to {start + count} ({shapes()})"
            )
        rows = weight[..., start : start + count, :].to(query.dtype)
        return rows.expand(query.shape[0], heads, -1, -1)


def location(query: Tensor, weight: Tensor, keys: int) -> Tensor:
    """Scores by position, (B, Hq, L, keys); see :class:`Location`.

    Example:
        >>> import torch
        >>> location(torch.ones(1, 1, 1, 2), torch.ones(5, 2), keys=3)
        tensor([[[[2., 2., 2.]]]])
    """
    heads = weight.shape[0] if weight.dim() == 3 else 1
    return Location(weight).tile(query, query.new_empty(query.shape[0], heads, keys, 0))


#: Elements of the tanh that exist at a time, where a tile alone is not larger.
CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Additive(PreparedScore):
    r"""A network of one hidden layer on query and key, :math:`v^\top \tanh(W_q q + W_k k + b)`.

    Args:
        query_weight: W_q, (hidden, Eq), or (Hq, hidden, Eq) with one for each query head.
        key_weight: W_k, (hidden, Ek), or (H, hidden, Ek) with one for each key head.
        vector: v, (hidden,), or (Hq, hidden).
        bias: b, (hidden,), or (Hq, hidden); None is 0.

    Raises:
        TypeError: if a parameter is not a floating-point tensor.
        ValueError: if shapes do not fit each other, or, when called, query and key.

    Example:
        >>> score = Additive(torch.ones(3, 2), torch.ones(3, 2), torch.ones(3))
        >>> score.tile(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1, 2), 0.25))  # 3 tanh(1/2)
        tensor([[[[1.3864]]]])

    Source:
        Bahdanau et al. (2015), arXiv:1409.0473.
    """

    name: ClassVar[str] = "additive"
    query_weight: Tensor
    key_weight: Tensor
    vector: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_parameter("query_weight", self.query_weight, "(hidden, Eq)", (0, 0))
        hidden = self.query_weight.shape[-2]
        check_parameter("key_weight", self.key_weight, f"(hidden, Ek) = ({hidden}, Ek)",
                        (hidden, 0))  # fmt: skip
        check_parameter("vector", self.vector, f"(hidden,) = ({hidden},)", (hidden,))
        if self.bias is not None:
            check_parameter("bias", self.bias, f"(hidden,) = ({hidden},)", (hidden,))

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Project queries (B, Hq, L, hidden) and keys (B, H, S, hidden), in float32 at least."""
        check_pair(query, key, same_width=False)
        self._check(query, key)
        x, y = precise(query), precise(key)
        projected = x @ self.query_weight.to(x.dtype).mT
        if self.bias is not None:
            projected = projected + self.bias.to(x.dtype).unsqueeze(-2)
        vector = self.vector.to(x.dtype).expand(query.shape[1], -1)
        return _Projected(vector), projected, y @ self.key_weight.to(y.dtype).mT

    def _check(self, query: Tensor, key: Tensor) -> None:
        """Raise ValueError unless heads and widths of the parameters fit query and key."""
        for name, parameter, tensor, sizes in (
            ("query_weight", self.query_weight, query, 2),
            ("key_weight", self.key_weight, key, 2),
            ("vector", self.vector, query, 1),
            ("bias", self.bias, query, 1),
        ):
            if parameter is None:
                continue
            if parameter.dim() > sizes and parameter.shape[0] != tensor.shape[1]:
                raise ValueError(
                    f"{name} has {parameter.shape[0]} heads, but there are {tensor.shape[1]} "
                    f"({name} {tuple(parameter.shape)}, {describe(query=query, key=key)})"
                )
            if sizes == 2 and parameter.shape[-1] != tensor.shape[3]:
                raise ValueError(
                    f"{name} and its input must have the same width, got {parameter.shape[-1]} and "
                    f"{tensor.shape[3]} ({name} {tuple(parameter.shape)}, "
                    f"{describe(query=query, key=key)})"
                )


@dataclass(frozen=True)
class _Projected(TileScore):
    """Additive scores of queries and keys that are already projected to the hidden width."""

    vector: Tensor  # (Hq, hidden)

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        heads = key.shape[1]
        grouped = query.unflatten(1, (heads, query.shape[1] // heads))
        vector = self.vector.unflatten(0, (heads, -1))
        scores: Tensor = _AdditiveTile.apply(grouped, key, vector)  # type: ignore[no-untyped-call]
        return scores.flatten(1, 2)


class _AdditiveTile(torch.autograd.Function):
    """Σ v tanh(a + b) over hidden units, as an autograd function that stores no tanh.

    a is (B, H, g, l, hidden), b (B, H, s, hidden), v (H, g, hidden); the result (B, H, g, l, s).
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, v)
        scores = a.new_zeros(*a.shape[:4], b.shape[2])
        for part in _chunks(a, b):
            scores += torch.einsum("bhglsc,hgc->bhgls", _hidden(a, b, part), v[..., part])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by recomputing the tanh in chunks of hidden units."""
        a, b, v = ctx.saved_tensors
        da, db, dv = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(v)
        for part in _chunks(a, b):
            t = _hidden(a, b, part)
            dv[..., part] = torch.einsum("bhgls,bhglsc->hgc", grad, t)
            slope = (1 - t.square()).mul_(grad.unsqueeze(-1))
            slope.mul_(v[:, :, None, None, part])
            da[..., part] = slope.sum(4)
            db[..., part] = slope.sum((2, 3))
        return da, db, dv


def _chunks(a: Tensor, b: Tensor) -> list[slice]:
    """Slices of the hidden units, each with at most :data:`CHUNK_ELEMENTS` values of tanh."""
    tile = max(1, a[..., 0].numel() * b.shape[2])
    step = max(1, CHUNK_ELEMENTS // tile)
    return [slice(i, i + step) for i in range(0, a.shape[-1], step)]


def _hidden(a: Tensor, b: Tensor, part: slice) -> Tensor:
    """tanh(a + b) of the hidden units in ``part``, (B, H, g, l, s, units), of additive scores.

    Args:
        a: projected queries, (B, H, g, l, hidden).
        b: projected keys, (B, H, s, hidden).
        part: hidden units.
    """
    return (a[..., part].unsqueeze(4) + b[:, :, None, None, :, part]).tanh_()


def additive(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    vector: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Additive scores, (B, Hq, L, S); see :class:`Additive`. Differentiable once.

    Example:
        >>> query = key = torch.zeros(1, 1, 1, 2)
        >>> additive(query, key, torch.ones(3, 2), torch.ones(3, 2), torch.ones(3))
        tensor([[[[0.]]]])
    """
    return Additive(query_weight, key_weight, vector, bias).tile(query, key)


@dataclass(frozen=True)
class ScaleInvariant(PreparedScore):
    r"""Scale-invariant attention: a factor and a shift by the distance t between query and key.

    .. math:: s_{ij} = a_t \, c\, q_i \cdot k_j + m_t, \qquad
              a_t^2 = 2 \log(t/\tau + 1) + 1, \qquad m_t = -2 \log(t/\tau + 1)

    If the scores :math:`c\, q \cdot k` at distance t are standard normal, then :math:`E\,e^{s} =
    E\,s\,e^{s} = \sqrt e / (t/\tau + 1)`: distances from t to 10 t have about the same total weight
    at every t, and few keys have most of it. The factor differs from key to key, so it is a score
    and not a :class:`~acutance.scaling.Scaling`, which has one factor for each row.

    Row i of the query is at position i + ``offset`` of the keys. For keys after the row's position,
    t is the absolute distance; this is an extension by acutance.

    Args:
        tau: τ, positive: up to about this distance scores stay as they are.
        scale: c; None is 1/√E.
        offset: keys before the first query, as with a cache; None is the call's ``query_offset``.

    Raises:
        ValueError: if τ or the scale is not positive, or the offset negative.

    Example:
        Equal scores of 0, at distances 3, 2, 1 and 0 and τ = 1, weigh 1/16, 1/9, 1/4 and 1:

        >>> query, key = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 4, 2)
        >>> scores = ScaleInvariant(tau=1.0, offset=3).tile(query, key)
        >>> scores.exp()
        tensor([[[[0.0625, 0.1111, 0.2500, 1.0000]]]])

    Source:
        Anson, Wang & Aitchison (2025), arXiv:2505.17083, with their α = β = √e, which make
        :math:`a_0 = 1` and :math:`m_0 = 0`.
    """

    name: ClassVar[str] = "scale_invariant"
    tau: float = 10.0
    scale: float | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        check_number("tau", self.tau, above=0.0)
        if self.scale is not None:
            check_number("scale", self.scale, above=0.0)
        if self.offset is not None:
            check_count("offset", self.offset, 0)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Append its position to each query as a component, and a 0 to each key."""
        check_pair(query, key)
        scale = query.shape[3] ** -0.5 if self.scale is None else self.scale
        query, key = precise(query) * scale, precise(key)
        positions = torch.arange(query.shape[2], device=query.device, dtype=query.dtype)
        column = (positions + (self.offset or 0)).view(1, 1, -1, 1).expand(*query.shape[:3], 1)
        return _Placed(self.tau), torch.cat((query, column), -1), F.pad(key, (0, 1))


@dataclass(frozen=True)
class _Placed(TileScore):
    """Scale-invariant scores of queries with their position as the last component."""

    tau: float

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        at = torch.arange(key_start, key_start + key.shape[2], device=key.device, dtype=key.dtype)
        distance = (query[0, 0, :, -1:].detach() - at).abs()
        growth = 2 * torch.log1p(distance / self.tau)
        return (growth + 1).sqrt() * products(query, key) - growth


def scale_invariant(
    query: Tensor, key: Tensor, tau: float = 10.0, scale: float | None = None, offset: int = 0
) -> Tensor:
    """Scale-invariant scores, (B, Hq, L, S); see :class:`ScaleInvariant`.

    Example:
        >>> scale_invariant(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4), tau=1.0)
        tensor([[[[2.0000, 1.7032]]]])
    """
    return ScaleInvariant(tau, scale, offset).tile(query, key)


@dataclass(frozen=True)
class Features(PreparedScore):
    r"""The weights of linear attention as scores: a feature map each for query and key, and gates.

    .. math:: s_{ij} = \phi_q(q_i) \cdot \phi_k(k_j) \prod_{t=j+1}^{i} \lambda_t

    With non-negative features, ``weights=ReLU(normalize="sum")`` makes them linear attention. Rows
    are computed in blocks, in O(n²) time and O(n) memory, and have every statistic.

    Args:
        query_map: φ_q, a function from (..., E) to (..., F).
        key_map: φ_k.
        log_gate: a function from keys (B, H, S, E) to log λ (B, H, S), at most 0; None for λ = 1.
            For keys after the row's position the product is over the gates in between. Gates of
            hidden keys count; that of a key that is not finite is 1.
        offset: keys before the first query, as with a cache; None is the call's ``query_offset``.

    Raises:
        TypeError: if a map or the gate is not a function.
        ValueError: if features or gates have another shape, or a gate is above 1 or NaN.

    Example:
        Equal keys that each halve the weight of all earlier ones:

        >>> half = lambda k: torch.full_like(k[..., 0], 0.5).log()
        >>> score = Features(torch.exp, torch.exp, log_gate=half, offset=3)
        >>> score.tile(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2))
        tensor([[[[0.2500, 0.5000, 1.0000, 2.0000]]]])

    Source:
        Su Jianlin, kexue.fm article 9889 (two maps); Sun et al. (2024), arXiv:2405.05254 (gates).
    """

    name: ClassVar[str] = "features"
    query_map: Callable[[Tensor], Tensor]
    key_map: Callable[[Tensor], Tensor]
    log_gate: Callable[[Tensor], Tensor] | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        functions: dict[str, object] = {"query_map": self.query_map, "key_map": self.key_map}
        if self.log_gate is not None:
            functions["log_gate"] = self.log_gate
        for name, function in functions.items():
            if not callable(function):
                hint = "" if name == "log_gate" else ", such as mechanisms.FEATURE_MAPS['elu1']"
                raise TypeError(f"{name} must be a function of a Tensor{hint}, got {function!r}")

    def prepare(self, query: Tensor, key: Tensor) -> tuple[TileScore, Tensor, Tensor]:
        """Features, with the summed log gates appended in two parts, as float32 alone is coarse."""
        check_pair(query, key)
        query, key = precise(query), precise(key)
        features = _mapped("query_map", self.query_map, query)
        key_features = _mapped("key_map", self.key_map, key)
        if features.shape[3] != key_features.shape[3]:
            raise ValueError(
                "query_map and key_map must return features of the same width, got "
                f"{describe(query_map=features, key_map=key_features)}"
            )
        if self.log_gate is None:
            return _Products(), features, key_features
        gate = check_tensor("log_gate(key)", self.log_gate(key))
        if gate.shape != key.shape[:3]:
            raise ValueError(
                f"log_gate must return (B, H, S) = {tuple(key.shape[:3])}, got {tuple(gate.shape)}"
            )
        gate = torch.where(key.isfinite().all(-1), gate, 0.0)  # a hidden key may be NaN
        if not torch.compiler.is_compiling() and not bool((gate <= 0).all()):
            raise ValueError(
                f"log_gate must return logarithms of gates, at most 0, got {float(gate.max()):g}"
            )
        total = gate.double().clamp(min=_CLOSED).cumsum(-1)
        place = torch.arange(query.shape[2], device=key.device) + (self.offset or 0)
        own = total[..., place.clamp(max=max(0, key.shape[2] - 1))] if key.shape[2] else total
        own = own.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return _Gated(), _with(features, own), _with(key_features, total)


def _mapped(name: str, feature_map: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
    """Features of queries or keys, a vector for each.

    Raises:
        ValueError: if the map returned anything else.
    """
    features = check_tensor(f"the result of {name}", feature_map(vectors))
    if features.dim() != 4 or features.shape[:3] != vectors.shape[:3]:
        raise ValueError(
            f"{name} must return a vector of features for each of {tuple(vectors.shape)}, "
            f"got {tuple(features.shape)}"
        )
    return features


_CLOSED = -1000.0  # the exponential of it and less is 0 in float64 too; of -inf, sums would be NaN


def _with(features: Tensor, total: Tensor) -> Tensor:
    """Features with a float64 number for each, as two components of their own dtype."""
    high = total.to(features.dtype)
    return torch.cat((features, torch.stack((high, (total - high).to(features.dtype)), -1)), -1)


class _Products(TileScore):
    """Products of features."""

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        return products(query, key)


class _Gated(TileScore):
    """Products of features, times the exponential of minus the difference of their last two."""

    def tile(self, query: Tensor, key: Tensor, key_start: int = 0) -> Tensor:
        scores = products(query[..., :-2], key[..., :-2])
        own = query[..., None, -2:].unflatten(1, (key.shape[1], -1))
        high, low = (own - key[:, :, None, None, :, -2:]).flatten(1, 2).unbind(-1)
        decay: Tensor = (high + low).abs().neg().exp()
        return scores * decay
