r"""The base class of scalings, and those that are a formula of n, of a position or of entropy.

A scaling turns the visible keys of a row into a factor on its query.

*Which law is right depends on the logits.* For one match above a narrow bulk, log n; for Gaussian
logits, :math:`\sqrt{\log n}`; for logits with an exponential tail, none. ``acutance.theory.laws``
has the table, and a scaling cannot see which row it is in.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from acutance.shapes import check_count, check_number, check_tensor

__all__ = [
    "Scaling",
    "AdaptivePoly",
    "ASEntmax",
    "ClipLogN",
    "CosineLogN",
    "CosScale",
    "Critical",
    "InfoScale",
    "Llama4",
    "LogN",
    "Mistral3",
    "NoScaling",
    "SqrtLogN",
    "SSMax",
    "Yarn",
]

#: One number for all heads, or one for each query head.
PerHead: TypeAlias = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class Rows:
    """The checked arguments of :meth:`Scaling.factor`: what a scaling knows of each row.

    Attributes:
        n: number of visible keys of each row, (..., L), at least 1, floating point.
        positions: position of each row's token, counted from 0, broadcastable with ``n``.
        entropy: measured entropy of each unscaled row in nats; None unless it was given.
    """

    n: Tensor
    positions: Tensor
    entropy: Tensor | None = None

    @property
    def log_n(self) -> Tensor:
        """Natural logarithm of n."""
        return self.n.log()


class Factor:
    """A factor on the query of each row, from what a subclass's :meth:`law` makes of its rows."""

    #: Whether :meth:`factor` needs the measured entropy of each row.
    needs_entropy: ClassVar[bool] = False
    #: Whether its parameters stay as they are.
    constant: ClassVar[bool] = True

    def factor(
        self,
        n: Tensor | int,
        positions: Tensor | None = None,
        *,
        entropy: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The factor on the query of each row.

        Args:
            n: visible keys of each row, (..., L), as :func:`visible_keys` counts them; a row that
                sees none is treated as if it saw one.
            positions: position of each row's token, counted from 0, broadcastable with ``n``. None
                is n − 1, where a causal row without window, padding or packing stands.
            entropy: measured entropy of each row, in nats; only ``adaptive_poly`` reads it.
            dtype: of the result; None is that of ``n`` where it is float32 or float64, otherwise
                the default dtype.

        Returns:
            The factor, shaped as ``n``; with parameters per head, (..., Hq, L), broadcast with
            ``n``.

        Raises:
            TypeError: if an argument is not a Tensor.
            ValueError: if the law needs an entropy and there is none.
        """
        return self.law(gather_rows(n, positions, entropy, dtype))

    @abstractmethod
    def law(self, rows: Rows) -> Tensor:
        """The factor on the query of each row, from checked arguments; what each scaling defines.

        Args:
            rows: the checked arguments of :meth:`factor`.

        Returns:
            The factor, shaped as ``rows.n``; (..., Hq, L) with parameters per head.
        """


@dataclass(frozen=True)
class Scaling(Factor, ABC):
    """A factor on the logits of a row as a function of its number of visible keys n.

    The factor multiplies the query, after query-key normalisation and rotary embedding, and so the
    logits. Parameters that differ from head to head are tuples, whatever they were given as, so
    that records compare, hash and write themselves as JSON. The metadata of a field may have a
    ``check``, a function of its name and value that returns the value to keep; a parameter whose
    default is None may be None.

    Attributes:
        name: as in :data:`~acutance.scaling.SCALINGS`.
        source: article, or the model that uses it.
        either: parameters of which exactly one is given.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    either: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **attributes: Any) -> None:
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)

    def __post_init__(self) -> None:
        if self.either and [getattr(self, name) for name in self.either].count(None) != 1:
            given = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.either)
            raise ValueError(f"{self.name} needs either {' or '.join(self.either)}, got {given}")
        for known in fields(self):
            check, value = known.metadata.get("check"), getattr(self, known.name)
            if check is not None and (value is not None or known.default is not None):
                checked = check(known.name, value)
                if checked is not value:
                    self._set(**{known.name: checked})

    def to_dict(self) -> dict[str, Any]:
        """Name and parameters as JSON values; :func:`from_dict` is the inverse.

        Example:
            >>> from acutance import scaling
            >>> scaling.SSMax(s=(0.25, 0.5)).to_dict()
            {'name': 'ssmax', 's': [0.25, 0.5], 'bias': 0.0}
        """
        return {"name": self.name} | {
            part.name: _plain(getattr(self, part.name)) for part in fields(self)
        }

    def _set(self, **values: object) -> None:
        """Set attributes of the frozen record; only for ``__post_init__``."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def gather_rows(
    n: Tensor | int, positions: Tensor | None, entropy: Tensor | None, dtype: torch.dtype | None
) -> Rows:
    """Check the arguments of :meth:`Scaling.factor` and convert them to floating point.

    Returns:
        The rows. ``positions`` of None become n − 1, and n = 0 becomes 1.

    Raises:
        TypeError: if an argument is of the wrong type.
    """
    if not isinstance(n, Tensor):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be a Tensor or an integer, got {type(n).__name__}")
        n = torch.tensor(check_count("n", n, 0))
    if n.dtype == torch.bool or n.is_complex():
        raise TypeError(f"n must contain whole numbers of visible keys, got a Tensor of {n.dtype}")
    if dtype is None:
        dtype = n.dtype if n.dtype in (torch.float32, torch.float64) else torch.get_default_dtype()
    if positions is None:
        positions = (n - 1).clamp(min=0)
    check_tensor("positions", positions)
    if entropy is not None:
        entropy = check_tensor("entropy", entropy).to(dtype)
    return Rows(n.to(dtype).clamp(min=1), positions, entropy)


def check_per_head(
    name: str, value: PerHead, *, above: float = -math.inf
) -> float | tuple[float, ...]:
    """Check a number, or a sequence or (Hq,) tensor with one number for each query head.

    Args:
        name: of the parameter, for error messages.
        value: what to check. Nothing checks its length against a number of heads.
        above: every number must be larger than this.

    Returns:
        A float for a number, a tuple of floats for a sequence (also one of length 1).

    Raises:
        TypeError: if it is neither, or a tensor that requires a gradient: the parameters of a
            scaling law are constants.
        ValueError: if a number is not finite or not larger than ``above``, or the sequence is
            empty or has more than one dimension.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise TypeError(
                f"{name} must be constant, got a tensor that requires a gradient: detach it, or "
                "train it with a module such as scaling.LearnedSSMax"
            )
        if value.dim() > 1:
            raise ValueError(f"{name} must be a number or (Hq,), got {tuple(value.shape)}")
        value = value.tolist()
    numbers: Iterable[float] = value if isinstance(value, Sequence) else (value,)
    checked = []
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(
                f"{name} must be a number or one for each head, got {number!r} "
                f"({type(number).__name__})"
            )
        if not (math.isfinite(number) and number > above):
            bound = "" if above == -math.inf else f" above {above:g}"
            raise ValueError(f"{name} must be finite{bound}, got {number!r}")
        checked.append(float(number))
    if not checked:
        raise ValueError(f"{name} must have one number for each head, got none")
    return tuple(checked) if isinstance(value, Sequence) else checked[0]


def at_least(least: int) -> dict[str, Any]:
    """The metadata of a field that holds a whole number of at least ``least``."""
    return {"check": partial(check_count, least=least)}


NUMBER = {"check": check_number}
POSITIVE = {"check": partial(check_number, above=0.0)}
NOT_NEGATIVE = {"check": partial(check_number, above=0.0, including=True)}
BY_HEAD = {"check": check_per_head}
POSITIVE_BY_HEAD = {"check": partial(check_per_head, above=0.0)}


def by_head(value: PerHead, like: Tensor) -> Tensor | float:
    """A parameter in a form that multiplies rows (..., L).

    Args:
        value: a number, or one for each head.
        like: tensor whose dtype and device the result has.

    Returns:
        The number itself, or a tensor (Hq, 1).
    """
    if isinstance(value, Tensor | Sequence):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device).unsqueeze(-1)
    return value


def _plain(value: object) -> object:
    """A value as JSON can hold it: tuples become lists."""
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def arguments(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which a record's class is built, from what its ``to_dict`` wrote.

    Raises:
        ValueError: if a parameter is unknown, or one without a default is missing.
    """
    given, known, missing = dict(record), [], []
    given.pop("name", None)
    for part in fields(kind):
        known.append(part.name)
        if part.default is MISSING and part.name not in given:
            missing.append(part.name)
    for key in given:
        if key not in known:
            takes = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
            raise ValueError(f"{kind.name} has no {key!r}: {takes}")
    if missing:
        raise ValueError(f"{kind.name} needs {' and '.join(missing)}")
    return given


def required(kind: type[Any]) -> list[str]:
    """The parameters of a record's class that have no default."""
    return [parameter.name for parameter in fields(kind) if parameter.default is MISSING]


@dataclass(frozen=True)
class NoScaling(Scaling, name="none", source="Vaswani et al. (2017), arXiv:1706.03762"):
    """The factor 1.

    Example:
        >>> NoScaling().factor(torch.tensor([1, 4096]))
        tensor([1., 1.])
    """

    def law(self, rows: Rows) -> Tensor:
        """The factor 1 for every row."""
        return torch.ones_like(rows.n)


@dataclass(frozen=True)
class LogN(
    Scaling,
    name="log_n",
    source="Su (2021), https://kexue.fm/archives/8823",
    either=("train_length", "base"),
):
    r"""Logarithm of n to a base: :math:`\log \max(n, n_{min}) / \log b`.

    With the base at the training length the factor is 1 there, above 1 for longer rows and below 1
    for shorter ones.

    Args:
        train_length: b as the number of keys a row saw in training, at least 2.
        base: b as a number above 1, such as e; give one of the two.
        n_min: shorter rows are scaled as rows of this length, at least 1. A row of one key would
            have factor 0, and its first tokens next to none.

    Raises:
        ValueError: if neither or both of base and training length are given, or out of range.

    Example:
        >>> LogN(train_length=512).factor(torch.tensor([1, 16, 512, 4096]))
        tensor([0.4444, 0.4444, 1.0000, 1.3333])

    Source:
        Su (2021), https://kexue.fm/archives/8823; Chiang & Cholak (2022), arXiv:2202.12172.
    """

    train_length: int | None = field(default=None, metadata=at_least(2))
    base: float | None = field(default=None, metadata={"check": partial(check_number, above=1.0)})
    n_min: int = field(default=16, metadata=at_least(1))

    def law(self, rows: Rows) -> Tensor:
        """The factor log max(n, ``n_min``) / log b of each row."""
        base = self.base if self.base is not None else self.train_length
        assert base is not None
        return rows.n.clamp(min=self.n_min).log() / math.log(base)


@dataclass(frozen=True)
class ClipLogN(Scaling, name="clip_log_n", source="Bai et al. (2023), arXiv:2309.16609 (Qwen)"):
    r"""Logarithm of n to the base of the training length, never below 1.

    .. math:: \max(1, \log n / \log L)

    Rows no longer than in training stay as they were trained.

    Args:
        train_length: L, at least 2.

    Example:
        >>> ClipLogN(train_length=8192).factor(torch.tensor([100, 8192, 131072]))
        tensor([1.0000, 1.0000, 1.3077])

    Source:
        Bai et al. (2023), arXiv:2309.16609 (Qwen).
    """

    train_length: int = field(metadata=at_least(2))

    def law(self, rows: Rows) -> Tensor:
        """The factor max(1, log n / log L) of each row."""
        return (rows.log_n / math.log(self.train_length)).clamp(min=1.0)


@dataclass(frozen=True)
class SqrtLogN(Scaling, name="sqrt_log_n", source="Derrida (1981), Phys. Rev. B 24, 2613"):
    r"""The factor that keeps the entropy of Gaussian logits constant as n grows.

    .. math:: \sqrt{\gamma_0^2 + 2 \log(n/n_0)} \, / \, \gamma_0

    Logits of standard deviation γ₀ at n₀ keys have entropy :math:`\log n_0 - \gamma_0^2/2`, and
    keep it at n keys with the deviation :math:`\sqrt{\gamma_0^2 + 2 \log(n/n_0)}`. The formula is
    the one for many keys; at a finite n the exact scale is a few per cent higher. Rows of fewer
    than :math:`n_0 e^{-\gamma_0^2/2}` keys cannot have that much entropy.

    Args:
        train_length: n₀, at least 2.
        gamma: γ₀, the standard deviation of a row's logits there: a number, or one for each head.
        minimum: no factor is lower. 1 leaves rows shorter than n₀ as they were trained, and a
            shorter row that cannot have the entropy gets this factor.

    Example:
        >>> SqrtLogN(train_length=512).factor(torch.tensor([100, 512, 2048, 65536]))
        tensor([1.0000, 1.0000, 1.9423, 3.2717])
        >>> SqrtLogN(train_length=512, gamma=2.0, minimum=0.0).factor(torch.tensor([8, 128, 512]))
        tensor([0.0000, 0.5539, 1.0000])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, for the entropy.
    """

    train_length: int = field(metadata=at_least(2))
    gamma: PerHead = field(default=1.0, metadata=POSITIVE_BY_HEAD)
    minimum: float = field(default=1.0, metadata=NOT_NEGATIVE)

    def law(self, rows: Rows) -> Tensor:
        """The factor on the logits of each row: the deviation wanted at n over that at n₀."""
        gamma = by_head(self.gamma, rows.n)
        growth = 2 * (rows.log_n - math.log(self.train_length))
        return (1 + growth / gamma**2).clamp(min=0.0).sqrt().clamp(min=self.minimum)


@dataclass(frozen=True)
class SSMax(Scaling, name="ssmax", source="Nakanishi (2025), arXiv:2501.19399"):
    r"""Scalable softmax, :math:`s \log n + b`.

    It multiplies the logits. Written as a shift, :math:`x_j - s \log n`, it would take the same
    number from every key and change nothing. A row of one key has factor b, and one weight of 1
    either way.

    Args:
        s: a number, or one for each query head. In training, :class:`LearnedSSMax`.
        bias: b, likewise.

    Example:
        >>> SSMax(s=0.43).factor(torch.tensor([1000]))
        tensor([2.9703])
        >>> SSMax(s=[0.2, 0.4]).factor(torch.tensor([1, 1000]))
        tensor([[0.0000, 1.3816],
                [0.0000, 2.7631]])

    Source:
        Nakanishi (2025), arXiv:2501.19399; 0.43 is the value of its figure 1.
    """

    s: PerHead = field(default=0.43, metadata=BY_HEAD)
    bias: PerHead = field(default=0.0, metadata=BY_HEAD)

    def law(self, rows: Rows) -> Tensor:
        """The factor s log n + b on the logits of each row."""
        return by_head(self.s, rows.n) * rows.log_n + by_head(self.bias, rows.n)


@dataclass(frozen=True)
class ASEntmax(Scaling, name="asentmax", source="Vasylenko et al. (2025), arXiv:2506.16640"):
    r"""Scale made for entmax weights, :math:`\delta + \beta (\log n)^\gamma`.

    Args:
        delta: δ, a number or one for each query head.
        beta: β, likewise; at 0 the scale does not grow.
        gamma: γ, likewise; 1 gives ``ssmax``, and below 0 the factor falls as n grows. A row of one
            key then counts as one of 2, since log 1 is 0.

    Example:
        >>> ASEntmax(delta=1.0, beta=0.5, gamma=0.5).factor(torch.tensor([1, 1024]))
        tensor([1.0000, 2.3164])

    Source:
        Vasylenko et al. (2025), arXiv:2506.16640, where β and γ also depend on the token.
    """

    delta: PerHead = field(default=1.0, metadata=BY_HEAD)
    beta: PerHead = field(default=0.1, metadata=BY_HEAD)
    gamma: PerHead = field(default=1.0, metadata=BY_HEAD)

    def law(self, rows: Rows) -> Tensor:
        """The factor of each row's scores: delta + beta (log n)^gamma."""
        delta, beta, gamma = (by_head(x, rows.n) for x in (self.delta, self.beta, self.gamma))
        return delta + beta * power(rows.log_n, gamma)


@dataclass(frozen=True)
class Critical(
    Scaling,
    name="critical",
    source="Chen et al. (2025), arXiv:2510.05554; Hayase & Karakida (2026)",
    either=("gap", "critical_scale"),
):
    r"""A multiple γ of the scale above which a row's maximum dominates.

    With a gap Δ between the match and the bulk that scale is :math:`\log n / \Delta`. In general it
    is :math:`\Lambda = \sup_t \log N(t)/t`, N(t) the keys within t of the maximum, measured on a
    model's own scores (``acutance.theory.critical_scale``; take medians, since its mean is
    infinite). For γ above 1 the maximum wins, below 1 the bulk does.

    Args:
        gamma: γ, positive.
        gap: Δ, a number or one for each query head: the factor is γ log n / Δ. Keys of pairwise
            cosine ρ have Δ = 1 − ρ.
        critical_scale: Λ, likewise, instead of a gap: the factor is γ Λ at every n.
        length: n at which Λ was measured, at least 2: the factor is then γ Λ log n / log length,
            which is right where one gap decides.

    Example:
        >>> Critical(gamma=2.0, gap=0.5).factor(torch.tensor([1024]))
        tensor([27.7259])
        >>> Critical(critical_scale=[3.0, 6.0], length=1024).factor(torch.tensor([1024, 32768]))
        tensor([[3.0000, 4.5000],
                [6.0000, 9.0000]])

    Source:
        Chen et al. (2025), arXiv:2510.05554 (γ log n and its transition); Hayase & Karakida (2026),
        arXiv:2605.12697 (Λ).
    """

    gamma: float = field(default=1.0, metadata=POSITIVE)
    gap: PerHead | None = field(default=None, metadata=POSITIVE_BY_HEAD)
    critical_scale: PerHead | None = field(default=None, metadata=POSITIVE_BY_HEAD)
    length: int | None = field(default=None, metadata=at_least(2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and self.critical_scale is None:
            raise ValueError(
                "length can be used only with critical_scale, got "
                f"length={self.length} and gap={self.gap!r}"
            )

    def law(self, rows: Rows) -> Tensor:
        """The factor of each row: γ log n / Δ for a gap Δ, else γ Λ for a critical scale Λ.

        With ``length``, γ Λ is multiplied by log n / log ``length``.
        """
        if self.gap is not None:
            return self.gamma * rows.log_n / by_head(self.gap, rows.n)
        assert self.critical_scale is not None
        growth = torch.ones_like(rows.n)
        if self.length is not None:
            growth = rows.log_n / math.log(self.length)
        return self.gamma * by_head(self.critical_scale, rows.n) * growth


@dataclass(frozen=True)
class CosineLogN(Scaling, name="cosine_log_n", source="Su (2023), https://kexue.fm/archives/9859"):
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

    coefficient: float = field(default=4.0, metadata=POSITIVE)
    n_min: int = field(default=16, metadata=at_least(1))

    def law(self, rows: Rows) -> Tensor:
        """The scale c log max(n, ``n_min``) of each row's cosines."""
        return self.coefficient * rows.n.clamp(min=self.n_min).log()


@dataclass(frozen=True)
class CosScale(Scaling, name="cos_scale", source="Li et al. (2025), arXiv:2501.08570"):
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

    scale: float = field(metadata=POSITIVE)

    def law(self, rows: Rows) -> Tensor:
        """The constant scale s for every row, whatever its number of keys; shaped as ``rows.n``."""
        return torch.full_like(rows.n, self.scale)


@dataclass(frozen=True)
class InfoScale(Scaling, name="info_scale", source="Li et al. (2025), arXiv:2501.08570"):
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

    train_length: int = field(metadata=at_least(2))
    width: int = field(metadata=at_least(1))
    minimum: float = field(default=0.0, metadata=NOT_NEGATIVE)

    def law(self, rows: Rows) -> Tensor:
        """The factor √((1 − n^(−2/d)) / (1 − L^(−2/d))) of each row, at least ``minimum``."""
        trained = -math.expm1(-2 * math.log(self.train_length) / self.width)
        seen = -torch.expm1(-2 * rows.log_n / self.width)
        return (seen / trained).sqrt().clamp(min=self.minimum)


@dataclass(frozen=True)
class Yarn(
    Scaling,
    name="yarn",
    source="Peng et al. (2023), arXiv:2309.00071",
    either=("s", "train_length"),
):
    r"""YaRN's temperature, as the logits feel it: :math:`(0.1 \log s + 1)^2`, s ≥ 1.

    Implementations multiply the rotary cosines and sines, and so query *and* key, by
    :math:`0.1 \log s + 1`: logits get its square. The factor here multiplies the query alone, so it
    is the square. A model that already has YaRN in its rotary embedding needs no more.

    Args:
        s: how many times longer the context became, a number; 1 or less changes nothing.
        train_length: instead of s, take s = n / train_length row by row.
        coefficient: 0.1.

    Raises:
        ValueError: if neither or both of s and the training length are given, or out of range.

    Example:
        >>> Yarn(s=16.0).factor(torch.tensor([100]))
        tensor([1.6314])
        >>> Yarn(train_length=8192).factor(torch.tensor([100, 8192, 131072]))
        tensor([1.0000, 1.0000, 1.6314])

    Source:
        Peng et al. (2023), arXiv:2309.00071.
    """

    s: float | None = field(default=None, metadata=POSITIVE)
    train_length: int | None = field(default=None, metadata=at_least(1))
    coefficient: float = field(default=0.1, metadata=POSITIVE)

    def law(self, rows: Rows) -> Tensor:
        """The factor (c log s + 1)² of each row, with s at least 1 and c the ``coefficient``."""
        if self.s is not None:
            return torch.full_like(rows.n, (self.coefficient * math.log(max(self.s, 1.0)) + 1) ** 2)
        assert self.train_length is not None
        stretch = (rows.n / self.train_length).clamp(min=1.0)
        return (self.coefficient * stretch.log() + 1) ** 2


@dataclass(frozen=True)
class _ByPosition(Scaling):
    """1 + c log(⌊(p + a)/L⌋ + 1) at position p, with a of 0 or 1."""

    ahead: ClassVar[int] = 0
    coefficient: float = field(default=0.1, metadata=NUMBER)
    length: int = field(default=1, metadata=at_least(1))

    def law(self, rows: Rows) -> Tensor:
        """The factor of the row at position p, a step up after every L positions."""
        reached = rows.positions + self.ahead
        steps = torch.div(reached, self.length, rounding_mode="floor").clamp(min=0)
        growth = steps.to(rows.n.dtype).log1p()
        return 1 + self.coefficient * growth.expand(
            torch.broadcast_shapes(growth.shape, rows.n.shape)
        )


@dataclass(frozen=True)
class Llama4(_ByPosition, name="llama4", source="Meta (2025), Llama 4, in transformers", ahead=1):
    r"""Llama 4's temperature, :math:`1 + c \log(\lfloor (p + 1)/L \rfloor + 1)` at position p.

    It acts by position, not by visible keys, and only in layers without rotary embedding. Without
    positions, p is n − 1.

    Args:
        coefficient: c.
        length: L, at least 1.

    Example:
        >>> Llama4().factor(torch.tensor([8191, 8192, 131072]))
        tensor([1.0000, 1.0693, 1.2833])

    Source:
        Meta (2025), Llama 4, as implemented in Hugging Face transformers, ``modeling_llama4``.
    """

    length: int = field(default=8192, metadata=at_least(1))


@dataclass(frozen=True)
class Mistral3(
    _ByPosition, name="mistral3", source="Mistral AI (2025), Ministral 3, in transformers"
):
    r"""Mistral 3's temperature, :math:`1 + c \log(1 + \lfloor p/L \rfloor)` at position p.

    Llama 4's law without the + 1 on the position. Positions count from 0 and, where not given, are
    n − 1, so the step comes one token later: at 131072 visible keys p is 131071 and the factor
    still 1.208; the token at position 131072 has 1.220.

    Args:
        coefficient: c.
        length: L, at least 1.

    Example:
        >>> Mistral3().factor(torch.tensor([16384, 131072, 131073]))
        tensor([1.0000, 1.2079, 1.2197])

    Source:
        Mistral AI (2025), Ministral 3, as implemented in Hugging Face transformers,
        ``modeling_ministral3``.
    """

    length: int = field(default=16384, metadata=at_least(1))


@dataclass(frozen=True)
class AdaptivePoly(
    Scaling, name="adaptive_poly", source="Veličković et al. (2024), arXiv:2410.01104"
):
    r"""Adaptive temperature: a polynomial of the row's own entropy H, never below 1.

    .. math:: \max(1, a_4 H^4 + a_3 H^3 + a_2 H^2 + a_1 H + a_0) \text{ where } H > 0.5, \text{ else
              } 1

    H is measured on the unscaled row, so the row is read twice. **Its range is short:** with the
    published coefficients the polynomial is above 1 only for H between 0.85 and 5.94 nats. A row
    spread over 380 keys or more is left as it is, which is where help was wanted; a warning says
    how many rows that is.

    Args:
        coefficients: from the highest power down.
        threshold: entropy in nats, at or below which a row is left alone.

    Example:
        >>> AdaptivePoly().factor(torch.tensor([1024]), entropy=torch.tensor([0.3, 2.0, 4.0]))
        tensor([1.0000, 2.0990, 2.3890])
        >>> AdaptivePoly().upper_limit
        5.9445

    Source:
        Veličković et al. (2024), arXiv:2410.01104.
    """

    needs_entropy: ClassVar[bool] = True
    coefficients: Sequence[float] = field(
        default=(-0.037, 0.481, -2.3, 4.917, -1.791), metadata=BY_HEAD
    )
    threshold: float = field(default=0.5, metadata=NOT_NEGATIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.coefficients, tuple):
            raise TypeError(
                "coefficients must be numbers from the highest power down, got "
                f"{self.coefficients!r}"
            )

    @property
    def upper_limit(self) -> float:
        """Entropy above which no row is scaled; infinite where the polynomial stays above 1."""
        if self._polynomial(torch.tensor(1e3, dtype=torch.float64)) > 1:
            return math.inf
        moved = np.array(self.coefficients, dtype=np.float64)
        moved[-1] -= 1
        roots = np.roots(moved)
        real = roots.real[np.abs(roots.imag) < 1e-9]
        return float(real.max(initial=self.threshold))

    def law(self, rows: Rows) -> Tensor:
        """The polynomial of each row's entropy, at least 1; 1 for entropies up to the threshold.

        Raises:
            ValueError: if the rows have no entropy.
        """
        if rows.entropy is None:
            raise ValueError(
                "adaptive_poly needs the measured entropy of each row: pass factor(n, entropy=...)"
            )
        H = rows.entropy.nan_to_num(0.0)  # a row without keys
        if not torch.compiler.is_compiling():
            beyond, total = int((H.detach() > self.upper_limit).sum()), H.numel()
            if beyond:
                warnings.warn(
                    f"adaptive_poly has no effect above {self.upper_limit:.2f} nats: {beyond} "
                    f"of {total} rows are above and stay unchanged",
                    stacklevel=3,
                )
        scaled = self._polynomial(H).clamp(min=1.0)
        factor = torch.where(self.threshold < H, scaled, 1.0)
        return factor.expand(torch.broadcast_shapes(factor.shape, rows.n.shape))

    def _polynomial(self, H: Tensor) -> Tensor:
        """a₄ H⁴ + … + a₀ of each entropy."""
        value = torch.zeros_like(H)
        for coefficient in self.coefficients:
            value = value * H + coefficient
        return value


def power(log_n: Tensor, exponent: Tensor | float) -> Tensor:
    """``log_n`` raised to ``exponent``, with a finite value and gradient where ``log_n`` is 0.

    There the result is 0 if the exponent is above 0, else (log 2)^exponent.
    """
    single = log_n <= 0
    safe = torch.where(single, math.log(2), log_n) ** exponent
    falls = torch.as_tensor(exponent, dtype=log_n.dtype, device=log_n.device) <= 0
    return torch.where(single & ~falls, 0.0, safe)
