"""The kernel as PyTorch operators, so that autograd and ``torch.compile`` see one node each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.kernels import dispatch
from acutance.kernels.backward import SumGradients
from acutance.kernels.blocked import Sums
from acutance.kernels.tiles import Rule, accumulate_dtype
from acutance.masks import Masking

__all__ = ["row_sums", "row_sums_backward"]

#: Results that carry a gradient, as positions in :class:`~acutance.kernels.blocked.Sums`.
_DIFFERENTIABLE = tuple(Sums._fields.index(name) for name in SumGradients._fields)

_INPUTS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? attn_mask, Tensor? bias, Tensor? key_mask, "
    "Tensor? query_documents, Tensor? key_documents, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? seed, bool causal, SymInt offset, SymInt? window, float scale, float? softcap, "
    "float dropout_p, str backend"
)
_RESULTS = ", ".join(["Tensor"] * len(Sums._fields))


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None,
    bias: Tensor | None,
    key_mask: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    offset: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    backend: str,
) -> tuple[str, tuple[Tensor, Tensor, Tensor | None, Masking, Rule]]:
    batch, query_heads, queries, _ = query.shape
    heads, keys = key.shape[1], key.shape[2]
    masking = Masking(
        batch=batch,
        heads=heads,
        group=query_heads // heads if heads else 1,
        queries=queries,
        keys=keys,
        attn_mask=attn_mask,
        bias=bias,
        key_mask=key_mask,
        query_documents=query_documents,
        key_documents=key_documents,
        alibi_slopes=alibi_slopes,
        causal=causal,
        offset=offset,
        window=window,
        device=query.device,
    )
    rule = Rule(
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=0 if seed is None else int(seed),
    )
    return backend, (query, key, value, masking, rule)


@torch.library.custom_op(
    "acutance::attend_rows", mutates_args=(), schema=f"({_INPUTS}, bool noise) -> ({_RESULTS})"
)
def row_sums(*inputs: Any) -> tuple[Tensor, ...]:
    """The output and the row sums (:func:`acutance.kernels.dispatch.forward`) as an operator."""
    *call, noise = inputs
    query = call[0]
    backend, arguments = _arguments(*call)
    with torch.autocast(query.device.type, enabled=False):
        return tuple(dispatch.forward(backend, *arguments, noise))


@row_sums.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    query, _, value, *_, noise = inputs
    dtype = accumulate_dtype(query.dtype)
    rows = query.shape[:3]
    width = 0 if value is None else value.shape[-1]

    def new(*extra: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*rows, *extra, dtype=dtype, device=query.device)

    kept = width if noise else 0
    return (
        new(width, dtype=query.dtype),
        new(dtype=torch.int64),
        *(new() for _ in range(9)),
        new(dtype=torch.int64),
        new(kept),
        new(kept),
        new() if noise else new(0),
    )


@torch.library.custom_op(
    "acutance::attend_rows_backward",
    mutates_args=(),
    schema=f"(Tensor?[] grads, Tensor[] sums, bool[] wanted, {_INPUTS}) -> Tensor[]",
)
def row_sums_backward(
    grads: Sequence[Tensor | None], sums: Sequence[Tensor], wanted: Sequence[bool], *call: Any
) -> list[Tensor]:
    """Gradients of the inputs of :func:`row_sums`; those not wanted are empty tensors."""
    query = call[0]
    backend, arguments = _arguments(*call)
    with torch.autocast(query.device.type, enabled=False):
        found = dispatch.backward(
            backend, SumGradients(*grads), Sums(*sums), *arguments, tuple(wanted)
        )
    return [query.new_empty(0) if part is None else part for part in found]


@row_sums_backward.register_fake
def _(
    grads: Sequence[Tensor | None], sums: Sequence[Tensor], wanted: Sequence[bool], *call: Any
) -> list[Tensor]:
    query, key, value, attn_mask, bias = call[:5]
    sinks = call[9]
    parts = (query, key, value, attn_mask, bias, sinks)
    return [
        part.new_empty(part.shape) if want and part is not None else query.new_empty(0)
        for part, want in zip(parts, wanted, strict=True)
    ]


#: Positions of the differentiable inputs in the operator's arguments.
_GRADIENT_INPUTS = (0, 1, 2, 3, 4, 9)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *call, _ = inputs
    tensors = [part for part in call if isinstance(part, Tensor)]
    ctx.places = [index for index, part in enumerate(call) if isinstance(part, Tensor)]
    ctx.rest = [None if isinstance(part, Tensor) else part for part in call]
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    count = len(ctx.places)
    saved = ctx.saved_tensors
    call = list(ctx.rest)
    for place, tensor in zip(ctx.places, saved[:count], strict=True):
        call[place] = tensor
    wanted = [
        ctx.needs_input_grad[place]
        and isinstance(call[place], Tensor)
        and call[place].is_floating_point()
        for place in _GRADIENT_INPUTS
    ]
    chosen = [grads[index] for index in _DIFFERENTIABLE]
    result: list[Tensor | None] = [None] * (len(call) + 1)
    if not any(wanted) or all(part is None for part in chosen):
        return tuple(result)
    found = row_sums_backward(chosen, list(saved[count:]), wanted, *call)
    for place, want, part in zip(_GRADIENT_INPUTS, wanted, found, strict=True):
        result[place] = part if want else None
    return tuple(result)


row_sums.register_autograd(_backward, setup_context=_setup)
