"""What is timed of a contender: its forward pass, its backward pass alone, or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.cpu.contenders import (
    DIFFERENTIATED,
    Call,
    Contender,
    Result,
    instruction_set,
)
from benchmarks.cpu.inputs import Inputs

#: What a loss hands back, by name: "output" (B, Hq, L, E) in the query's dtype, metrics (B, Hq, L).
Upstream = Mapping[str, Tensor]


def make_upstream(inputs: Inputs, rows: Tensor | None = None, *, seed: int = 1) -> Upstream:
    """Standard normal gradients of the results, zero outside ``rows`` where these are given."""
    generator = torch.Generator().manual_seed(seed)
    query = inputs.query
    made = {"output": torch.randn(query.shape, generator=generator, dtype=query.dtype)}
    for name in DIFFERENTIATED:
        made[name] = torch.randn(query.shape[:3], generator=generator)
    if rows is not None:
        others = torch.ones(query.shape[2], dtype=torch.bool).index_fill_(0, rows, False)
        for name, part in made.items():
            part.masked_fill_(others[:, None] if name == "output" else others, 0.0)
    return made


def terms(result: Result, loss: str) -> dict[str, Tensor]:
    """What of a result a loss is of: all that has gradients, or the entropy where there is one."""
    if loss == "entropy" and "entropy" in result.metrics:
        return {"entropy": result.metrics["entropy"]}
    found = {} if result.output is None else {"output": result.output}
    return found | {name: part for name, part in result.metrics.items() if name in DIFFERENTIATED}


def gradients(
    result: Result, inputs: Inputs, upstream: Upstream, *, again: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value; ``again`` keeps what a further call needs."""
    found = terms(result, inputs.case.loss)
    return torch.autograd.grad(
        list(found.values()),
        inputs.leaves,
        [upstream[name].to(part.dtype) for name, part in found.items()],
        allow_unused=True,
        retain_graph=again,
    )


@contextmanager
def ready(contender: Contender, inputs: Inputs, upstream: Upstream | None = None) -> Iterator[Call]:
    """The call that is timed, with all that goes before it done.

    Args:
        contender: whose.
        inputs: the tensors.
        upstream: of the loss, where the case has a backward pass.

    Raises:
        UnavailableError: if the contender cannot run here.
    """
    case = inputs.case
    with instruction_set(contender.cpu):
        if not case.backward:
            with torch.no_grad():
                yield contender.prepare(inputs)
            return
        assert upstream is not None
        call = contender.prepare(inputs)
        if case.timing == "step":
            yield lambda: gradients(contender.read(call()), inputs, upstream)
            return
        result = contender.read(call())
        yield lambda: gradients(result, inputs, upstream, again=True)


def execute(
    contender: Contender, inputs: Inputs, upstream: Upstream | None = None
) -> tuple[Result, tuple[Tensor | None, ...]]:
    """One call, for what it gives: the result and, with ``upstream``, the gradients."""
    with instruction_set(contender.cpu):
        if upstream is None:
            with torch.no_grad():
                return contender.read(contender.prepare(inputs)()), ()
        result = contender.read(contender.prepare(inputs)())
        return result, gradients(result, inputs, upstream)
