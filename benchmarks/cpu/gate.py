r"""The gate: every contender is right on the very inputs it is timed with, or it is not timed.

The reference is float64 on some of the query rows of every head, so it fits in memory at any
length: :func:`acutance.rowstats.dense_statistics` for the metrics; gradients are those of a loss on
these rows alone, which makes them exact too. A tolerance is

    2 · (error of plain attention in the contender's precision + eps · largest value + r · size)

where r = u(√n + 8) is what a float32 sum of n terms is off by, relative to the sum of their sizes
(:mod:`acutance.testing.tolerance`): Σ p\|v\| for the output, whose terms mostly cancel; the
largest value for weights and gradients; 1 for what is in nats. To that comes what a contender's
formula is wrong by on purpose. Metrics other than the entropy are allowed twice that, and what a
change of every score by eps of the largest one does to them; gradients, which pass through two
more matrix products, twice that. All rows of an output are held against SDPA's, which itself
passed: the tolerance is twice that of the rows looked at, once for each of the two, and twice again
for rows nobody looked at.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from acutance.rowstats import dense_statistics
from benchmarks.cpu.contenders import Contender, Result
from benchmarks.cpu.inputs import Inputs
from benchmarks.cpu.passes import execute, gradients, make_upstream, terms
from benchmarks.cpu.records import Check

ROWS = 32
_OF_SCORES = ("lse", "max_logit", "logit_mean", "logit_std", "varentropy")


class Gate:
    """The reference values of one case.

    Args:
        inputs: the tensors that will be timed.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        count = min(ROWS, inputs.case.queries)
        self.rows = torch.linspace(0, inputs.case.queries - 1, count).round().long()
        self._upstream = make_upstream(inputs, self.rows) if inputs.case.backward else None
        self._seen, self._added = inputs.visible(self.rows), inputs.added(self.rows)
        self._exact = cache(self._compute_exact)
        self._sizes = cache(self._compute_sizes)
        self._plain = cache(self._compute_plain)
        self._gradients = cache(self._compute_gradients)
        self._output: Tensor | None = None
        #: The kernel of this library that took the call last checked; empty for other ways.
        self.backend = ""

    def check(self, contender: Contender) -> tuple[Check, ...]:
        """Run a contender once and compare what it gives: output, metrics, gradients."""
        self.backend = ""
        result, grads = execute(contender, self._inputs, self._upstream)
        self.backend = result.backend
        dtype = self._inputs.query.dtype
        checks = []
        if result.output is not None:
            checks += self._check_output(result.output.detach(), dtype)
        wide = torch.float32 if contender.wide else dtype
        same = self._plain(wide)
        for name, found in result.metrics.items():
            if name in same.metrics:
                bias = contender.entropy_bias(self._inputs.case) if name == "entropy" else 0.0
                checks.append(self._check_metric(name, found, same, wide, bias))
        if self._upstream is not None:
            names = tuple(terms(result, self._inputs.case.loss))
            exact, plain = self._gradients(torch.float64, names), self._gradients(dtype, names)
            for name, gradient, right, near in zip(
                ("query", "key", "value"), grads, exact, plain, strict=True
            ):
                if gradient is not None and right is not None and near is not None:
                    what = f"gradient of {name}"
                    more = self._r() * float(right.abs().max())
                    checks.append(_check(what, gradient, right, near, dtype, factor=4, more=more))
        return tuple(checks)

    def _check_output(self, output: Tensor, dtype: torch.dtype) -> list[Check]:
        exact, same = self._plain(torch.float64).output, self._plain(dtype).output
        assert exact is not None
        assert same is not None
        picked = output.index_select(2, self.rows)
        found = _check("output", picked, exact, same, dtype, more=self._r() * self._sizes())
        if self._output is None:  # the reference is checked first
            self._output = output.clone() if found.passed else None
            return [found]
        apart = _distance(output, self._output.double())
        return [found, _record("output beside sdpa", apart, 4 * found.tolerance)]

    def _check_metric(
        self, name: str, found: Tensor, same: Result, dtype: torch.dtype, bias: float
    ) -> Check:
        exact = self._exact()[name] if name != "noise_gain" else self._noise()
        picked, near = found.index_select(2, self.rows), same.metrics[name]
        if name == "entropy":
            return _check(name, picked, exact, near, dtype, bias, more=self._r())
        unit = 1.0 if name in _OF_SCORES else float(exact.abs().max())
        moved = torch.finfo(dtype).eps * float(self._exact()["max_logit"].abs().max())
        return _check(name, picked, exact, near, dtype, factor=4, more=(moved + self._r()) * unit)

    def _r(self) -> float:
        """Relative error of a float32 sum over the keys."""
        return 0.5 * torch.finfo(torch.float32).eps * (math.sqrt(self._inputs.case.keys) + 8)

    def _compute_sizes(self) -> float:
        """The largest Σ p|v| of the chosen rows."""
        with torch.no_grad():
            query, key, value = (leaf.float() for leaf in self._inputs.leaves)
            found = self._attend(query, key, value.abs()).output
            assert found is not None
            return float(found.max())

    def _compute_exact(self) -> dict[str, Tensor]:
        """The oracle's metrics of the chosen rows."""
        with torch.no_grad():
            return dense_statistics(
                self._inputs.query.index_select(2, self.rows),
                self._inputs.key,
                attn_mask=self._seen,
                bias=self._added,
                enable_gqa=self._inputs.grouped,
            )

    def _noise(self) -> Tensor:
        """``noise_gain`` of the chosen rows in float64; the oracle's own takes minutes."""
        return self._plain(torch.float64).metrics["noise_gain"]

    def _compute_plain(self, dtype: torch.dtype) -> Result:
        with torch.no_grad():
            return self._attend(*(leaf.to(dtype) for leaf in self._inputs.leaves))

    def _compute_gradients(
        self, dtype: torch.dtype, names: tuple[str, ...]
    ) -> tuple[Tensor | None, ...]:
        assert self._upstream is not None
        leaves = tuple(leaf.detach().to(dtype).requires_grad_() for leaf in self._inputs.leaves)
        whole = self._attend(*leaves)
        chosen = Result(
            whole.output if "output" in names else None,
            {name: part for name, part in whole.metrics.items() if name in names},
        )
        upstream = {
            name: part.index_select(2, self.rows).to(dtype) for name, part in self._upstream.items()
        }
        return gradients(chosen, Inputs(self._inputs.case, *leaves), upstream)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Result:
        """Plain attention of the chosen rows: (B, Hq, rows, E) and (B, Hq, rows)."""
        group = self._inputs.case.groups_of
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        scores = query.index_select(2, self.rows) @ key.transpose(2, 3) * self._inputs.scale
        if self._added is not None:
            scores = scores + self._added.to(scores.dtype)
        seen = torch.ones((), dtype=torch.bool) if self._seen is None else self._seen
        seen = seen.expand(scores.shape)
        hidden = scores.masked_fill(seen.logical_not(), -torch.inf)
        log_p = hidden.log_softmax(-1)
        p = log_p.exp()
        # a hidden key's log is −inf, and 0 · −inf is NaN in the value and in the gradient
        log_p = log_p.masked_fill(seen.logical_not(), 0.0)
        entropy = -(p * log_p).sum(-1)
        count = seen.sum(-1).to(scores.dtype)
        shown = scores.masked_fill(seen.logical_not(), 0.0)
        mean = shown.sum(-1) / count
        apart = (shown - mean.unsqueeze(-1)).masked_fill(seen.logical_not(), 0.0)
        output = p @ value
        squares = p.square()
        metrics = {
            "entropy": entropy,
            "lse": hidden.logsumexp(-1),
            "max_logit": hidden.amax(-1),
            "collision": squares.sum(-1),
            "varentropy": (p * (log_p + entropy.unsqueeze(-1)).square()).sum(-1),
            "top_weight": p.amax(-1),
            "first_weight": p.gather(-1, seen.byte().argmax(-1, keepdim=True)).squeeze(-1),
            "logit_mean": mean,
            "logit_std": _root(apart.square().sum(-1) / count),
            "noise_gain": _noise_gain(squares, value, output),
        }
        return Result(output, metrics)


def _noise_gain(squares: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """Σ p² ‖v − o‖², multiplied out."""
    lengths = squares.matmul(value.square().sum(-1, keepdim=True)).squeeze(-1)
    crossed = (squares.matmul(value) * output).sum(-1)
    return lengths - 2 * crossed + output.square().sum(-1) * squares.sum(-1)


def _root(variance: Tensor) -> Tensor:
    """The square root, with slope 0 at 0: a row of one key does not spread."""
    some = variance > 0
    return torch.where(some, torch.where(some, variance, 1.0).sqrt(), variance)


def _check(
    quantity: str,
    found: Tensor,
    exact: Tensor,
    plain: Tensor,
    dtype: torch.dtype,
    bias: float = 0.0,
    factor: int = 2,
    more: float = 0.0,
) -> Check:
    """Compare a contender's values with the exact ones, by what plain attention achieves."""
    rounding = torch.finfo(dtype).eps * float(exact.abs().max())
    tolerance = factor * (_distance(plain, exact) + rounding + more) + bias
    return _record(quantity, _distance(found, exact), tolerance)


def _record(quantity: str, error: float, tolerance: float) -> Check:
    return Check(quantity, error if math.isfinite(error) else None, tolerance)


def _distance(found: Tensor, exact: Tensor) -> float:
    if found.shape != exact.shape:
        raise ValueError(f"shape {tuple(found.shape)} instead of {tuple(exact.shape)}")
    return float((found.detach().double() - exact).abs().max())
