r"""The base class of scalings, and those that are a formula of n, of a position or of entropy.

A scaling turns the visible keys of a row into a factor on its query.

*Which law is right depends on the logits.* For one match above a narrow bulk, log n; for Gaussian
logits, :math:`\sqrt{\log n}`; for logits with an exponential tail, none. ``acutance.theory.scales``
has the table, and a scaling cannot see which row it is in.

The parameters of the last ones are fitted to measurements or trained, one set for each query head.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from acutance.shapes import check_count, check_number, check_tensor

__all__ = [
    "ASEntmax",
    "AdaptivePoly",
    "ClipLogN",
    "CosScale",
    "CosineLogN",
    "Critical",
    "EntropyTarget",
    "HeadTable",
    "InfoScale",
    "LearnedASEntmax",
    "LearnedSSMax",
    "LearnedScaling",
    "LearnedTemperature",
    "Llama4",
    "LogN",
    "Mistral3",
    "NoScaling",
    "SSMax",
    "Scaling",
    "SqrtLogN",
    "Yarn",
    "fit_entropy",
    "newton_step",
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
    given = dict(record)
    given.pop("name", None)
    known = [parameter.name for parameter in fields(kind)]
    for key in given:
        if key not in known:
            takes = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
            raise ValueError(f"{kind.name} has no {key!r}: {takes}")
    if missing := [name for name in required(kind) if name not in given]:
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


#: Varentropy below which a row is flat, or has one key: what is left is rounding.
FLAT = 1e-12


@dataclass(frozen=True)
class HeadTable(Scaling, name="head_table", source="calibration on the model itself"):
    r"""A factor for each head, the same for every row or tabled at several lengths.

    Between tabled lengths the factor is linear in log n. Shorter rows have the first one's factor;
    beyond the last the line continues, and never below 0.

    Args:
        factors: positive; (Hq,) for one factor per head, or (Hq, P) for P lengths.
        lengths: the P lengths, rising.

    Raises:
        ValueError: if factors and lengths do not fit, or are not positive or not rising.

    Example:
        >>> HeadTable([1.0, 1.5]).factor(torch.tensor([10, 1000]))
        tensor([[1.0000, 1.0000],
                [1.5000, 1.5000]])
        >>> HeadTable([[1.0, 1.2]], lengths=[512, 2048]).factor(torch.tensor([64, 1024, 8192]))
        tensor([[1.0000, 1.1000, 1.4000]])
    """

    factors: Sequence[float] | Sequence[Sequence[float]] | Tensor
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        lengths, rows = check_lengths(self.lengths), check_table(self.factors)
        if not rows:
            raise ValueError("factors must have one entry for each head, got none")
        if lengths is not None:
            check_widths(rows, lengths)
        elif isinstance(rows[0], tuple):
            raise ValueError("factors must have shape (Hq,) without lengths, got two dimensions")
        self._set(factors=rows, lengths=lengths)

    def law(self, rows: Rows) -> Tensor:
        """The factor of each head and row, interpolated linearly in log n between the lengths."""
        table = torch.tensor(self.factors, dtype=rows.n.dtype, device=rows.n.device)
        if self.lengths is None:
            return table.unsqueeze(-1) * torch.ones_like(rows.n)
        return interpolate(rows.log_n, self.lengths, table)


@dataclass(frozen=True)
class EntropyTarget(
    Scaling,
    name="entropy_target",
    source="Su (2021), https://kexue.fm/archives/8823; fitted by measuring",
):
    r"""The factor that gives rows a target entropy, fitted at a few lengths.

    :meth:`fit` measures; the record holds what it found and reads between lengths as
    :class:`HeadTable` does.

    Args:
        lengths: where it was fitted, rising.
        factors: what was found there, positive; (P,), or (Hq, P) for each head.
        target: the wanted entropy in nats, a number or one for each head; None if not kept.

    Example:
        Gaussian logits have :math:`H = \log n - \lambda^2/2` while λ is moderate, so a target of 5
        nats needs :math:`\lambda = \sqrt{2 \log n - 10}`:

        >>> def measure(n, scale):
        ...     return math.log(n) - scale**2 / 2, scale**2
        >>> law = EntropyTarget.fit(measure, target=5.0, lengths=[512, 4096])
        >>> law.factor(torch.tensor([512, 1024, 4096]))
        tensor([1.5737, 1.9078, 2.5760])

    Source:
        Su (2021), https://kexue.fm/archives/8823 (keep the entropy as n grows).
    """

    lengths: Sequence[int]
    factors: Sequence[float] | Sequence[Sequence[float]] | Tensor
    target: PerHead | None = field(default=None, metadata=POSITIVE_BY_HEAD)

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = check_lengths(self.lengths)
        if lengths is None:
            raise ValueError("entropy_target must have the lengths it was fitted at, got None")
        rows = check_table(self.factors)
        check_widths(rows if rows and isinstance(rows[0], tuple) else (rows,), lengths)
        self._set(lengths=lengths, factors=rows)

    def law(self, rows: Rows) -> Tensor:
        """The fitted factor of each row, linear in log n between the fitted lengths."""
        table = torch.tensor(self.factors, dtype=rows.n.dtype, device=rows.n.device)
        return interpolate(rows.log_n, self.lengths, table)

    @classmethod
    def fit(
        cls,
        measure: Callable[[int, Tensor], tuple[Tensor | float, Tensor | float]],
        *,
        target: PerHead,
        lengths: Sequence[int],
        steps: int = 12,
        tolerance: float = 1e-3,
    ) -> EntropyTarget:
        """Fit the factor at each length, starting from the result of the previous one.

        Args:
            measure: takes n and the factors, () or (Hq,), float64; gives mean entropy and mean
                varentropy of rows of n keys at those factors, likewise shaped.
            target: entropy in nats, positive, below log n at every length; () or (Hq,).
            lengths: where to fit, rising.
            steps: most measurements at each length.
            tolerance: how far the entropy may stay from the target, in nats.

        Raises:
            ValueError: if the target is not below log n at the shortest length.
        """
        targets = check_per_head("target", target, above=0.0)
        places = check_lengths(lengths)
        if places is None:
            raise ValueError("lengths must be given for a fit, got None")
        aim = torch.tensor(targets, dtype=torch.float64)
        if float(aim.max()) >= math.log(places[0]):
            raise ValueError(
                f"target must be below log n at every length, got {float(aim.max()):g} nats "
                f"where log {places[0]} is {math.log(places[0]):.4g}"
            )
        scales, scale = [], torch.ones_like(aim)
        for n in places:
            at_n = partial(measure, n)
            scale = fit_entropy(at_n, aim, start=scale, steps=steps, tolerance=tolerance)
            scales.append(scale)
        return cls(lengths=places, factors=torch.stack(scales, -1), target=targets)


def newton_step(scale: Tensor, entropy: Tensor, varentropy: Tensor, target: Tensor) -> Tensor:
    r"""One Newton step of the scale towards the target entropy.

    Entropy falls with the scale λ of the logits as :math:`dH/d\lambda^2 = -V/(2\lambda^2)`, V the
    varentropy, the variance of the scaled logits under the weights. The step is Newton's in λ²,
    in which the entropy of Gaussian logits is a straight line, and at most halves λ:

    .. math:: \lambda \leftarrow \lambda \sqrt{1 + 2 (H - H^*) / V}

    Args:
        scale: λ, where it was measured.
        entropy: H in nats.
        varentropy: V in nats²; where it is 0 but for rounding, or NaN, nothing can be learnt and λ
            stays.
        target: the wanted entropy in nats.

    Example:
        >>> n, scale = 4096, torch.tensor(1.0)
        >>> newton_step(scale, math.log(n) - scale**2 / 2, scale**2, torch.tensor(6.0))
        tensor(2.1530)
    """
    change = 2 * (entropy - target) / varentropy
    moved = scale * (1 + change.clamp(min=-0.75)).sqrt()
    return torch.where((varentropy > FLAT) & moved.isfinite(), moved, scale)


def fit_entropy(
    measure: Callable[[Tensor], tuple[Tensor | float, Tensor | float]],
    target: Tensor | float,
    *,
    start: Tensor | float = 1.0,
    steps: int = 12,
    tolerance: float = 1e-3,
) -> Tensor:
    """Scale of the logits at which measured entropy meets a target, by safeguarded Newton steps.

    Entropy falls as the scale rises, so each measurement bounds the answer from one side. A step
    that would leave the bounds, or is unknown because the row is flat or one-hot, goes to their
    geometric mean instead; with only an upper bound, to an eighth of it.

    Args:
        measure: takes scales, gives entropy and varentropy there in nats and nats².
        target: entropy in nats, () or (Hq,).
        start: where to begin, positive, broadcast to the target.
        steps: most measurements. From a target about 1 nat away 3 or 4 are enough; a much lower
            one takes up to 10.
        tolerance: how far the entropy may stay from the target, in nats; stops earlier.

    Warns:
        UserWarning: if the last measurement was still further away than the tolerance.

    Returns:
        The scale, float64, shaped as the target.

    Raises:
        ValueError: if a start is not positive or steps is below 1.

    Example:
        >>> scores = torch.linspace(-2, 2, 100, dtype=torch.float64)
        >>> def measure(scale):
        ...     p = torch.softmax(scale * scores, -1)
        ...     H = torch.special.entr(p).sum(-1)
        ...     return H, (p * (p.log() + H) ** 2).sum(-1)
        >>> scale = fit_entropy(measure, 3.0, tolerance=1e-6)
        >>> measure(scale)[0]
        tensor(3.0000, dtype=torch.float64)
    """
    check_count("steps", steps, 1)
    check_number("tolerance", tolerance, above=0.0)
    away = math.inf
    aim = torch.as_tensor(target, dtype=torch.float64)
    scale = torch.as_tensor(start, dtype=torch.float64, device=aim.device).broadcast_to(aim.shape)
    if not bool((scale > 0).all()):
        raise ValueError(f"start must be positive, got {start!r}")
    low, high = torch.zeros_like(aim), torch.full_like(aim, math.inf)
    for _ in range(steps):
        entropy, varentropy = (
            torch.as_tensor(part, dtype=torch.float64, device=aim.device).detach()
            for part in measure(scale)
        )
        away = float((entropy - aim).abs().max())
        if away <= tolerance:
            return scale
        low = torch.where(entropy >= aim, scale, low)
        high = torch.where(entropy <= aim, scale, high)
        moved = newton_step(scale, entropy, varentropy, aim)
        inside = (moved > low) & (moved < high)  # a step that stays put is on a bound
        between = torch.where(low > 0, (low * high).sqrt(), high / 8)
        scale = torch.where(inside | between.isinf(), moved, between)
    warnings.warn(
        f"after {steps} measurements the entropy was still {away:.2g} nats from its target, "
        f"more than {tolerance:g}: increase steps, or choose a reachable target",
        stacklevel=2,
    )
    return scale


def check_lengths(lengths: Sequence[int] | None) -> tuple[int, ...] | None:
    """Check that lengths are whole numbers of at least 1 in ascending order.

    Returns:
        The lengths as a tuple; None for None.

    Raises:
        TypeError: if one is not a whole number.
        ValueError: if there is none, or they are below 1 or not ascending.
    """
    if lengths is None:
        return None
    checked = tuple(check_count("lengths", n, 1) for n in lengths)
    rising = all(a < b for a, b in pairwise(checked))
    if not checked or not rising:
        raise ValueError(f"lengths must be ascending and not empty, got {list(checked)}")
    return checked


def check_table(factors: object) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
    """Check a table of positive factors, (Hq,) or (Hq, P), and return it as (nested) tuples.

    Raises:
        TypeError: if it is not a table of numbers.
        ValueError: if its shape is another or a number is not positive.
    """
    if isinstance(factors, Tensor):
        if check_tensor("factors", factors).dim() not in (1, 2):
            raise ValueError(
                f"factors must have shape (Hq,) or (Hq, P), got {tuple(factors.shape)}"
            )
        factors = factors.tolist()
    if not isinstance(factors, Sequence) or isinstance(factors, str):
        raise TypeError(
            "factors must be numbers, one for each head (Hq,) or for each head and length "
            f"(Hq, P), got {type(factors).__name__}"
        )
    rows = tuple(check_per_head("factors", row, above=0.0) for row in factors)
    if len({isinstance(row, tuple) for row in rows}) > 1:
        raise ValueError(
            "factors must have shape (Hq,) or (Hq, P), got a mixture of numbers and rows"
        )
    return rows  # type: ignore[return-value]


def check_widths(rows: Sequence[object], lengths: tuple[int, ...]) -> None:
    """Check that every head of a table has one factor for each length; raises ValueError if not."""
    widths = [len(row) if isinstance(row, tuple) else 0 for row in rows]
    if set(widths) != {len(lengths)}:
        raise ValueError(
            f"each head must have one factor for each of the {len(lengths)} lengths, got {widths}"
        )


def interpolate(log_n: Tensor, lengths: Sequence[int], table: Tensor) -> Tensor:
    """Factors of rows from a table, linear in log n between the lengths.

    The factor is constant before the first length; beyond the last the line continues, down to 0.

    Args:
        log_n: logarithm of the number of visible keys of each row, (..., L).
        lengths: P lengths, ascending.
        table: factors at the lengths, (P,), or (Hq, P) for each head.

    Returns:
        The factors, shaped as ``log_n``, or (..., Hq, L) for a table with heads.
    """
    knots = [math.log(n) for n in lengths]
    columns = table.unsqueeze(-1).unbind(-2) if table.dim() > 1 else table.unbind()
    result = columns[0] + torch.zeros_like(log_n)
    for (left, low), (right, high) in pairwise(zip(knots, columns, strict=True)):
        width = right - left
        past = (log_n - left).clamp(min=0.0, max=None if right == knots[-1] else width)
        result = result + (high - low) / width * past
    return result.clamp(min=0.0)


class LearnedScaling(nn.Module, Factor):
    """A scaling with trained parameters; accepted wherever a constant scaling is.

    Attributes:
        num_heads: Hq, the query heads.
    """

    constant = False

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = check_count("num_heads", num_heads, 1)

    def forward(self, n: Tensor | int, positions: Tensor | None = None) -> Tensor:
        """Same as :meth:`factor`."""
        return self.factor(n, positions)

    @abstractmethod
    def record(self) -> Scaling:
        """The current parameters as a constant scaling, to save or apply."""

    def extra_repr(self) -> str:
        """The number of heads, for ``print``."""
        return f"num_heads={self.num_heads}"

    def _column(self, parameter: Tensor, rows: Rows) -> Tensor:
        """A parameter (Hq,) as a column (Hq, 1), in the dtype of the rows."""
        return parameter.to(rows.n.dtype).unsqueeze(-1)


class LearnedSSMax(LearnedScaling):
    r"""Scalable softmax with trained s, :math:`s_h \log n + b_h`.

    Args:
        num_heads: Hq.
        s: where every s starts. None is 1/log ``train_length``, so that training starts with a
            factor of 1 there, or 0.43 without one.
        train_length: number of keys at which the factor starts at 1, at least 2.
        bias: where every b starts; None leaves b out. The article finds that it helps training and
            hurts longer contexts.
        device, dtype: of the parameters.

    Example:
        >>> module = LearnedSSMax(num_heads=2, train_length=1024)
        >>> module(torch.tensor([32, 1024]))
        tensor([[0.5000, 1.0000],
                [0.5000, 1.0000]], grad_fn=<MulBackward0>)
        >>> module.record()
        SSMax(s=(0.1443, 0.1443), bias=0.0)

    Source:
        Nakanishi (2025), arXiv:2501.19399.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        *,
        s: float | None = None,
        train_length: int | None = None,
        bias: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads)
        if s is not None and train_length is not None:
            raise ValueError(
                f"pass either s or train_length, got s={s!r}, train_length={train_length!r}"
            )
        if train_length is not None:
            s = 1 / math.log(check_count("train_length", train_length, 2))
        first = 0.43 if s is None else check_number("s", s)
        self.s = nn.Parameter(torch.full((num_heads,), first, device=device, dtype=dtype))
        if bias is None:
            self.register_parameter("bias", None)
        else:
            start = check_number("bias", bias)
            self.bias = nn.Parameter(torch.full((num_heads,), start, device=device, dtype=dtype))

    def law(self, rows: Rows) -> Tensor:
        """The factor s log n + b of each row and head; without b if the module has none."""
        scaled = self._column(self.s, rows) * rows.log_n
        return scaled if self.bias is None else scaled + self._column(self.bias, rows)

    def record(self) -> SSMax:
        """The current s and b."""
        bias = 0.0 if self.bias is None else self.bias.detach()
        return SSMax(s=self.s.detach(), bias=bias)


class LearnedASEntmax(LearnedScaling):
    r"""Trained :math:`\delta + \beta_h (\log n)^{\gamma_h}`, β kept positive by a softplus.

    Args:
        num_heads: Hq.
        delta: δ, a constant.
        beta: where every β starts, positive.
        gamma: where every γ starts.
        device, dtype: of the parameters.

    Example:
        >>> module = LearnedASEntmax(num_heads=1, beta=0.5, gamma=0.5)
        >>> module(torch.tensor([1024])).detach()
        tensor([[2.3164]])

    Source:
        Vasylenko et al. (2025), arXiv:2506.16640, where β and γ are read from each token.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        delta: float = 1.0,
        beta: float = 0.1,
        gamma: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads)
        self.delta = check_number("delta", delta)
        raw = math.log(math.expm1(check_number("beta", beta, above=0.0, below=30.0)))
        start = check_number("gamma", gamma)
        self.raw_beta = nn.Parameter(torch.full((num_heads,), raw, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.full((num_heads,), start, device=device, dtype=dtype))

    @property
    def beta(self) -> Tensor:
        """β of each head, (Hq,)."""
        return nn.functional.softplus(self.raw_beta)

    def law(self, rows: Rows) -> Tensor:
        """The factor δ + β (log n)^γ of each row and head."""
        grown = power(rows.log_n, self._column(self.gamma, rows))
        return self.delta + self._column(self.beta, rows) * grown

    def record(self) -> ASEntmax:
        """The current δ, β and γ."""
        return ASEntmax(self.delta, self.beta.detach(), self.gamma.detach())


class LearnedTemperature(LearnedScaling):
    """A trained factor for each head that does not depend on n, kept positive as an exponential.

    Args:
        num_heads: Hq.
        start: where every factor starts, positive.
        device, dtype: of the parameters.

    Example:
        >>> LearnedTemperature(num_heads=2, start=2.0).record()
        HeadTable(factors=(2.0, 2.0), lengths=None)
    """

    def __init__(
        self,
        num_heads: int,
        *,
        start: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads)
        log = math.log(check_number("start", start, above=0.0))
        self.log_factor = nn.Parameter(torch.full((num_heads,), log, device=device, dtype=dtype))

    def law(self, rows: Rows) -> Tensor:
        """The learned factor of each head, the same for every n."""
        return self._column(self.log_factor, rows).exp() * torch.ones_like(rows.n)

    def record(self) -> HeadTable:
        """The current factors."""
        return HeadTable(self.log_factor.detach().exp())
