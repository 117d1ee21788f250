"""The gate: every contender is right on the very inputs it is timed with, or it is not timed.

The reference is plain attention in float64 on some of the query rows of every head, so it fits in
memory at any length; gradients are those of a loss on these rows alone, which makes them exact too.
A tolerance is 2 · (error of the same plain attention in the contender's precision + eps · largest
value), plus what a contender's formula is wrong by on purpose. Gradients, which pass through two
more matrix products than the output, are allowed twice that.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from acutance.bench.contenders import (
    Contender,
    Inputs,
    Result,
    Upstream,
    execute,
    make_upstream,
)
from acutance.bench.records import Check

ROWS = 32


class Gate:
    """The reference values of one case.

    Args:
        inputs: the tensors that will be timed.
        backward: also check gradients.
    """

    def __init__(self, inputs: Inputs, *, backward: bool = False) -> None:
        self._inputs = inputs
        count = min(ROWS, inputs.case.queries)
        self.rows = torch.linspace(0, inputs.case.queries - 1, count).round().long()
        self._upstream = make_upstream(inputs, self.rows) if backward else None
        self._plain = cache(self._compute_plain)
        self._gradients = cache(self._compute_gradients)

    def check(self, contender: Contender) -> tuple[Check, ...]:
        """Run a contender once and compare what it gives: output, entropy, gradients."""
        outcome = execute(contender, self._inputs, self._upstream)
        result, dtype = outcome.result, self._inputs.query.dtype
        exact, same = self._plain(torch.float64), self._plain(dtype)
        checks = []
        if result.output is not None:
            assert exact.output is not None
            assert same.output is not None
            found = result.output.index_select(2, self.rows)
            checks.append(_check("output", found, exact.output, same.output, dtype))
        if result.entropy is not None:
            wide = torch.float32 if contender.wide_entropy else dtype
            plain = self._plain(wide)
            assert exact.entropy is not None
            assert plain.entropy is not None
            found = result.entropy.index_select(2, self.rows)
            bias = contender.entropy_bias(self._inputs.case)
            checks.append(_check("entropy", found, exact.entropy, plain.entropy, wide, bias))
        if self._upstream is not None:
            given = (result.output is not None, result.entropy is not None)
            exact_gradients = self._gradients(torch.float64, *given)
            same_gradients = self._gradients(dtype, *given)
            names = ("query", "key", "value")
            for name, gradient, right, plain_gradient in zip(
                names, outcome.gradients, exact_gradients, same_gradients, strict=True
            ):
                if gradient is not None and right is not None and plain_gradient is not None:
                    quantity = f"gradient of {name}"
                    checks.append(
                        _check(quantity, gradient, right, plain_gradient, dtype, factor=4)
                    )
        return tuple(checks)

    def _compute_plain(self, dtype: torch.dtype) -> Result:
        with torch.no_grad():
            return self._attend(*(leaf.to(dtype) for leaf in self._inputs.leaves))

    def _compute_gradients(
        self, dtype: torch.dtype, output: bool, entropy: bool
    ) -> tuple[Tensor | None, ...]:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in self._inputs.leaves]
        result, upstream = self._attend(*leaves), self._rows_of(self._upstream)
        assert result.output is not None
        assert result.entropy is not None
        found = [result.output] * output + [result.entropy] * entropy
        back = [upstream.output] * output + [upstream.entropy] * entropy
        back = [part.to(dtype) for part in back]
        return torch.autograd.grad(found, leaves, back, allow_unused=True)

    def _rows_of(self, upstream: Upstream | None) -> Upstream:
        assert upstream is not None
        output, entropy = upstream.output, upstream.entropy
        return Upstream(output.index_select(2, self.rows), entropy.index_select(2, self.rows))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Result:
        """Plain attention of the chosen rows: (B, Hq, rows, E) and (B, Hq, rows)."""
        case = self._inputs.case
        group = case.heads // case.key_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        scores = query.index_select(2, self.rows) @ key.transpose(2, 3) * self._inputs.scale
        if case.causal:
            scores = scores.masked_fill(torch.arange(case.keys) > self.rows[:, None], -torch.inf)
        if self._inputs.key_mask is not None:
            scores = scores.masked_fill(~self._inputs.key_mask[:, None, None, :], -torch.inf)
        log_weights = scores.log_softmax(-1)
        weights = log_weights.exp()
        # a hidden key's log is −inf, and 0 · −inf is NaN in the value and in the gradient
        entropy = -(weights * log_weights.masked_fill(scores == -torch.inf, 0.0)).sum(-1)
        return Result(weights @ value, entropy)


def _check(
    quantity: str,
    found: Tensor,
    exact: Tensor,
    plain: Tensor,
    dtype: torch.dtype,
    bias: float = 0.0,
    factor: int = 2,
) -> Check:
    """Compare a contender's values with the exact ones, by what plain attention achieves."""
    error = _distance(found, exact)
    largest = float(exact.abs().max())
    tolerance = factor * (_distance(plain, exact) + torch.finfo(dtype).eps * largest) + bias
    return Check(quantity, error if math.isfinite(error) else None, tolerance)


def _distance(found: Tensor, exact: Tensor) -> float:
    if found.shape != exact.shape:
        raise ValueError(f"shape {tuple(found.shape)} instead of {tuple(exact.shape)}")
    return float((found.detach().double() - exact).abs().max())
