"""Scalings whose parameters are fitted to measurements or trained, one set for each query head."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from acutance.scaling.laws import (
    POSITIVE_BY_HEAD,
    ASEntmax,
    Factor,
    PerHead,
    Rows,
    Scaling,
    SSMax,
    check_per_head,
    power,
)
from acutance.shapes import check_count, check_number, check_tensor

__all__ = [
    "EntropyTarget", "HeadTable", "LearnedASEntmax", "LearnedScaling", "LearnedSSMax",
    "LearnedTemperature", "fit_entropy", "newton_step",
]  # fmt: skip

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
