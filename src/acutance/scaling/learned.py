"""Scalings with parameters that are trained, one set for each query head."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from acutance.scaling.fitted import HeadTable
from acutance.scaling.laws import ASEntmax, Factor, Rows, Scaling, SSMax, power
from acutance.shapes import check_count, check_number

__all__ = ["LearnedASEntmax", "LearnedScaling", "LearnedSSMax", "LearnedTemperature"]


class LearnedScaling(nn.Module, Factor):
    """A scaling with trained parameters; accepted wherever a constant scaling is.

    Attributes:
        num_heads: Hq, the query heads.
    """

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
