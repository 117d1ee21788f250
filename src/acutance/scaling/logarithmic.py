r"""Scalings that grow with log n, the logarithm of the number of visible keys.

*Which law is right depends on the logits.* For one match above a narrow bulk, log n; for Gaussian
logits, :math:`\sqrt{\log n}`; for logits with an exponential tail, none. ``acutance.theory.laws``
has the table, and a scaling cannot see which row it is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acutance.scaling.base import PerHead, Rows, Scaling, by_head, check_per_head
from acutance.shapes import check_count, check_number

__all__ = ["ASEntmax", "ClipLogN", "Critical", "LogN", "NoScaling", "SSMax", "SqrtLogN"]


@dataclass(frozen=True)
class NoScaling(Scaling):
    """The factor 1.

    Example:
        >>> NoScaling().factor(torch.tensor([1, 4096]))
        tensor([1., 1.])
    """

    name: ClassVar[str] = "none"
    source: ClassVar[str] = "Vaswani et al. (2017), arXiv:1706.03762"

    def law(self, rows: Rows) -> Tensor:
        """The factor 1 for every row."""
        return torch.ones_like(rows.n)


@dataclass(frozen=True)
class LogN(Scaling):
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

    name: ClassVar[str] = "log_n"
    source: ClassVar[str] = "Su (2021), https://kexue.fm/archives/8823"
    train_length: int | None = None
    base: float | None = None
    n_min: int = 16

    def __post_init__(self) -> None:
        if (self.train_length is None) == (self.base is None):
            raise ValueError(
                "log_n needs either train_length or base, got "
                f"train_length={self.train_length!r}, base={self.base!r}"
            )
        if self.train_length is not None:
            check_count("train_length", self.train_length, 2)
        if self.base is not None:
            self._set(base=check_number("base", self.base, above=1.0))
        check_count("n_min", self.n_min, 1)

    def law(self, rows: Rows) -> Tensor:
        """The factor log max(n, ``n_min``) / log b of each row."""
        base = self.base if self.base is not None else self.train_length
        assert base is not None
        return rows.n.clamp(min=self.n_min).log() / math.log(base)


@dataclass(frozen=True)
class ClipLogN(Scaling):
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

    name: ClassVar[str] = "clip_log_n"
    source: ClassVar[str] = "Bai et al. (2023), arXiv:2309.16609 (Qwen)"
    train_length: int

    def __post_init__(self) -> None:
        check_count("train_length", self.train_length, 2)

    def law(self, rows: Rows) -> Tensor:
        """The factor max(1, log n / log L) of each row."""
        return (rows.log_n / math.log(self.train_length)).clamp(min=1.0)


@dataclass(frozen=True)
class SqrtLogN(Scaling):
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

    name: ClassVar[str] = "sqrt_log_n"
    source: ClassVar[str] = "Derrida (1981), Phys. Rev. B 24, 2613"
    train_length: int
    gamma: PerHead = 1.0
    minimum: float = 1.0

    def __post_init__(self) -> None:
        check_count("train_length", self.train_length, 2)
        self._set(
            gamma=check_per_head("gamma", self.gamma, above=0.0),
            minimum=check_number("minimum", self.minimum, above=0.0, including=True),
        )

    def law(self, rows: Rows) -> Tensor:
        """The factor on the logits of each row: the deviation wanted at n over that at n₀."""
        gamma = by_head(self.gamma, rows.n)
        growth = 2 * (rows.log_n - math.log(self.train_length))
        return (1 + growth / gamma**2).clamp(min=0.0).sqrt().clamp(min=self.minimum)


@dataclass(frozen=True)
class SSMax(Scaling):
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

    name: ClassVar[str] = "ssmax"
    source: ClassVar[str] = "Nakanishi (2025), arXiv:2501.19399"
    s: PerHead = 0.43
    bias: PerHead = 0.0

    def __post_init__(self) -> None:
        self._set(s=check_per_head("s", self.s), bias=check_per_head("bias", self.bias))

    def law(self, rows: Rows) -> Tensor:
        """The factor s log n + b on the logits of each row."""
        return by_head(self.s, rows.n) * rows.log_n + by_head(self.bias, rows.n)


@dataclass(frozen=True)
class ASEntmax(Scaling):
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

    name: ClassVar[str] = "asentmax"
    source: ClassVar[str] = "Vasylenko et al. (2025), arXiv:2506.16640"
    delta: PerHead = 1.0
    beta: PerHead = 0.1
    gamma: PerHead = 1.0

    def __post_init__(self) -> None:
        self._set(**{name: check_per_head(name, getattr(self, name)) for name in
                     ("delta", "beta", "gamma")})  # fmt: skip

    def law(self, rows: Rows) -> Tensor:
        """The factor of each row's scores: delta + beta (log n)^gamma."""
        delta, beta, gamma = (by_head(x, rows.n) for x in (self.delta, self.beta, self.gamma))
        return delta + beta * power(rows.log_n, gamma)


@dataclass(frozen=True)
class Critical(Scaling):
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

    name: ClassVar[str] = "critical"
    source: ClassVar[str] = "Chen et al. (2025), arXiv:2510.05554; Hayase & Karakida (2026)"
    gamma: float = 1.0
    gap: PerHead | None = None
    critical_scale: PerHead | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        self._set(gamma=check_number("gamma", self.gamma, above=0.0))
        if (self.gap is None) == (self.critical_scale is None):
            raise ValueError(
                f"critical needs either gap or critical_scale, got gap={self.gap!r}, "
                f"critical_scale={self.critical_scale!r}"
            )
        for name in ("gap", "critical_scale"):
            if getattr(self, name) is not None:
                self._set(**{name: check_per_head(name, getattr(self, name), above=0.0)})
        if self.length is not None:
            check_count("length", self.length, 2)
            if self.critical_scale is None:
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


def power(log_n: Tensor, exponent: Tensor | float) -> Tensor:
    """``log_n`` raised to ``exponent``, with a finite value and gradient where ``log_n`` is 0.

    There the result is 0 if the exponent is above 0, else (log 2)^exponent.
    """
    single = log_n <= 0
    safe = torch.where(single, math.log(2), log_n) ** exponent
    falls = torch.as_tensor(exponent, dtype=log_n.dtype, device=log_n.device) <= 0
    return torch.where(single & ~falls, 0.0, safe)
