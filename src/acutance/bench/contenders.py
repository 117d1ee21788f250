"""CONTENDERS: the ways of computing attention and its entropy that are compared.

Each is a function of :class:`Inputs` that returns a :class:`Result`. ``sdpa`` is the reference of
every ratio and gives the output alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.attend import attention, row_statistics
from acutance.bench.cases import Case

MAP_BYTES = 4  # an attention map's element: float32, whatever the inputs


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Attributes:
        case: what they were made for.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, E).
        key_mask: (B, S), True where a key is real, or None if all are.
    """

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.case.heads != self.case.key_heads

    @property
    def scale(self) -> float:
        """Factor of the scores, 1/√E."""
        return float(self.case.width**-0.5)

    @cached_property
    def hidden(self) -> Tensor | None:
        """(B or 1, 1, L or 1, S), True at hidden keys, or None; eager models make it once."""
        hidden = None if self.key_mask is None else ~self.key_mask[:, None, None, :]
        if self.case.causal:
            future = torch.ones(self.case.queries, self.case.keys, dtype=torch.bool).triu_(1)
            return future[None, None] if hidden is None else hidden | future
        return hidden

    @cached_property
    def additive(self) -> Tensor | None:
        """The padding as an additive mask, (B, 1, 1, S), in the query's dtype, or None."""
        if self.key_mask is None:
            return None
        zeros = torch.zeros_like(self.key_mask, dtype=self.query.dtype)
        return zeros.masked_fill_(~self.key_mask, -torch.inf)[:, None, None, :]


@dataclass(frozen=True)
class Result:
    """What a contender computed.

    Attributes:
        output: (B, Hq, L, E), or None.
        entropy: (B, Hq, L), nats, or None.
        metrics: the other metrics it gives, by name.
    """

    output: Tensor | None = None
    entropy: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """One way to do it.

    Attributes:
        meaning: what it does and gives, one line.
        call: the computation.
        maps: how many whole (B, Hq, L, S) maps it holds at once, forward.
        entropy_bias: an upper bound of the error its formula makes by design, nats, for a case; the
            gate allows for it and the error is still shown.
        wide_entropy: whether it promises float32 entropy of bfloat16 and float16 inputs.
    """

    meaning: str
    call: Callable[[Inputs], Result]
    maps: int = 0
    entropy_bias: Callable[[Case], float] = lambda case: 0.0
    wide_entropy: bool = False

    def needs(self, case: Case, backward: bool) -> int:
        """Bytes its maps take; the backward pass keeps about as many again."""
        maps = self.maps * (2 if backward else 1)
        return case.batch * case.heads * case.queries * case.keys * MAP_BYTES * maps


@dataclass(frozen=True)
class Upstream:
    """What a loss hands back to a contender, as gradients of its results.

    Attributes:
        output: (B, Hq, L, E), the query's dtype.
        entropy: (B, Hq, L), float32.
    """

    output: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Outcome:
    """A contender's result and, after a backward pass, the gradients of query, key and value."""

    result: Result
    gradients: tuple[Tensor | None, ...] = ()


def execute(contender: Contender, inputs: Inputs, upstream: Upstream | None = None) -> Outcome:
    """One call as it is timed: forward, and backward through what the contender gives."""
    if upstream is None:
        with torch.no_grad():
            return Outcome(contender.call(inputs))
    result = contender.call(inputs)
    found, back = [], []
    if result.output is not None:
        found.append(result.output)
        back.append(upstream.output)
    if result.entropy is not None:
        found.append(result.entropy)
        back.append(upstream.entropy.to(result.entropy.dtype))
    return Outcome(result, torch.autograd.grad(found, inputs.leaves, back, allow_unused=True))


def make_upstream(inputs: Inputs, rows: Tensor | None = None, *, seed: int = 1) -> Upstream:
    """Standard normal gradients of the results, zero outside ``rows`` where these are given."""
    generator = torch.Generator().manual_seed(seed)
    query = inputs.query
    output = torch.randn(query.shape, generator=generator, dtype=query.dtype)
    entropy = torch.randn(query.shape[:3], generator=generator)
    if rows is not None:
        others = torch.ones(query.shape[2], dtype=torch.bool).index_fill_(0, rows, False)
        output.masked_fill_(others[:, None], 0.0)
        entropy.masked_fill_(others, 0.0)
    return Upstream(output, entropy)


def make_inputs(case: Case, *, requires_grad: bool = False, seed: int = 0) -> Inputs:
    """Standard normal tensors for a case, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, case.dtype)

    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, heads, length, case.width)
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)

    query = normal(case.heads, case.queries)
    key, value = (normal(case.key_heads, case.keys) for _ in range(2))
    key_mask = None
    if case.padded:
        lengths = torch.linspace(case.keys, (case.keys + 1) // 2, case.batch).round()
        key_mask = torch.arange(case.keys) < lengths[:, None]
    return Inputs(case, query, key, value, key_mask)


def _sdpa(x: Inputs, value: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(
        x.query,
        x.key,
        x.value if value is None else value,
        attn_mask=None if x.key_mask is None else x.key_mask[:, None, None, :],
        is_causal=x.case.causal,
        enable_gqa=x.grouped,
    )


def sdpa(x: Inputs) -> Result:
    """Attention alone."""
    return Result(output=_sdpa(x))


def acutance_all(x: Inputs) -> Result:
    """Output and statistics; every metric is read, or only the entropy where a loss needs it."""
    output, statistics = attention(
        x.query,
        x.key,
        x.value,
        is_causal=x.case.causal,
        enable_gqa=x.grouped,
        key_mask=x.key_mask,
        return_stats=True,
    )
    if x.query.requires_grad:
        return Result(output, statistics.entropy)
    metrics = statistics.as_dict()
    return Result(output, metrics.pop("entropy"), metrics)


def acutance_statistics(x: Inputs) -> Result:
    """Statistics without the output; every metric is read, or the entropy alone as above."""
    statistics = row_statistics(
        x.query, x.key, is_causal=x.case.causal, enable_gqa=x.grouped, key_mask=x.key_mask
    )
    if x.query.requires_grad:
        return Result(entropy=statistics.entropy)
    metrics = statistics.as_dict()
    return Result(entropy=metrics.pop("entropy"), metrics=metrics)


def entropy_trick(x: Inputs) -> Result:
    r"""Output and entropy from two SDPA calls, the second with the keys as values.

    The first call's hidden second result is the row's log-sum-exp; the second gives
    :math:`\sum_j p_j k_j`, so :math:`H = \mathrm{lse} - q \cdot \sum_j p_j k_j / \sqrt E`.
    """
    # Neither bound in torch's stubs nor public; it is what the public call runs on the CPU.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = flash(*x.leaves, is_causal=x.case.causal, attn_mask=x.additive)
    if not x.query.requires_grad:
        mean_key = _sdpa(x, x.key)
        return Result(output, lse - x.scale * (x.query * mean_key).sum(-1))
    # the gradient of the entropy is minus that of q·Σpk with q and the values held fixed
    mean_score = x.scale * (x.query.detach() * _sdpa(x, x.key.detach())).sum(-1)
    fixed = mean_score.detach()
    return Result(output, (lse - fixed) - (mean_score - fixed))


def naive(x: Inputs) -> Result:
    """Every map in memory, all heads at once, the entropy by ``log(p + 1e-9)``."""
    key, value = x.key, x.value
    if x.grouped:
        group = x.case.heads // x.case.key_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.matmul(x.query, key.transpose(2, 3)) * x.scale
    if x.hidden is not None:
        scores = scores.masked_fill(x.hidden, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    del scores
    weights = weights.to(x.query.dtype)
    entropy = -(weights * torch.log(weights + 1e-9)).sum(-1)
    return Result(torch.matmul(weights, value), entropy)


CONTENDERS: dict[str, Contender] = {
    "sdpa": Contender("F.scaled_dot_product_attention: the output alone", sdpa),
    "acutance": Contender(
        "attention(…, return_stats=True): the output and every metric",
        acutance_all,
        wide_entropy=True,
    ),
    "acutance-statistics": Contender(
        "row_statistics(…): every metric, no output", acutance_statistics, wide_entropy=True
    ),
    "entropy-trick": Contender(
        "two SDPA calls, the second with the keys as values: the output and the entropy",
        entropy_trick,
    ),
    "naive": Contender(
        "maps in memory: scores, softmax, −Σ p log(p + 1e-9), p@v: the output and the entropy",
        naive,
        maps=3,
        # Σ p log(1 + ε/p) ≤ n ε
        entropy_bias=lambda case: case.keys * 1e-9,
    ),
}
