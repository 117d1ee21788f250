"""The kernel as PyTorch operators, so that autograd and ``torch.compile`` see one node each.

:func:`attend_rows` calls them where a compiler, a tracer, a dispatch mode or a tensor subclass
must see an operator. Elsewhere the same kernels are a :class:`torch.autograd.Function`: the first
call of an operator of :mod:`torch.library` imports ``torch._dynamo``, more than a second of CPU.
Derivatives of gradients are those of the same sums made of PyTorch's operations, in memory of
O(L S).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.compiling import undispatched
from acutance.kernels import dispatch
from acutance.kernels.backward import SumGradients
from acutance.kernels.blocked import Sums
from acutance.kernels.fast_path import plain
from acutance.kernels.tiles import Rule, accumulate_dtype
from acutance.kernels.transforms import transformed, vmapped
from acutance.kernels.whole_rows import weigh_rows
from acutance.masks import Masking
from acutance.weights import Sink, Softmax

__all__ = ["attend_rows", "row_sums", "row_sums_backward"]

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
    return _forward(*inputs)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
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
    return _gradients(grads, sums, wanted, *call)


def _gradients(
    grads: Sequence[Tensor | None], sums: Sequence[Tensor], wanted: Sequence[bool], *call: Any
) -> list[Tensor]:
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
    sums = saved[count:]
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or transformed()):
        run = row_sums_backward if _needs_operator(*chosen, *sums, *call) else _gradients
        found: Sequence[Tensor] = run(chosen, list(sums), wanted, *call)
    else:
        found = _Gradients.apply(wanted, *call, *chosen, *sums)  # type: ignore[no-untyped-call]
    for place, want, part in zip(_GRADIENT_INPUTS, wanted, found, strict=True):
        result[place] = part if want else None
    return tuple(result)


row_sums.register_autograd(_backward, setup_context=_setup)


def attend_rows(*inputs: Any) -> tuple[Tensor, ...]:
    """:func:`row_sums`, as an operator only where one is needed."""
    if not transformed() and _needs_operator(*inputs):
        found: tuple[Tensor, ...] = row_sums(*inputs)
        return found
    return _RowSums.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _needs_operator(*inputs: Any) -> bool:
    """Whether something must see an operator: compilers, tracers, modes, subclasses, no memory."""
    tensors = [part for part in inputs if isinstance(part, Tensor)]
    return not undispatched() or any(part.is_meta or not plain(part) for part in tensors)


class _RowSums(torch.autograd.Function):
    """:func:`row_sums` for autograd alone, and as :mod:`torch.func` wants it."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return (row_sums if _needs_operator(*inputs) else _forward)(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _setup(ctx, inputs, output)
        ctx.mark_non_differentiable(
            *(part for index, part in enumerate(output) if index not in _DIFFERENTIABLE)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return vmapped(_RowSums.apply, info.batch_size, in_dims, inputs)


class _Gradients(torch.autograd.Function):
    """:func:`row_sums_backward`, of ``wanted, *call, *grads, *sums``, with a derivative."""

    @staticmethod
    def forward(wanted: Sequence[bool], *rest: Any) -> tuple[Tensor, ...]:
        call, grads, sums = _split(rest)
        run = row_sums_backward if _needs_operator(*rest) else _gradients
        return tuple(run(grads, sums, wanted, *call))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.wanted, *rest = inputs
        call, grads, _ = _split(rest)
        flat = [*call, *grads]
        ctx.save_for_backward(*(part if isinstance(part, Tensor) else None for part in flat))
        ctx.rest = [None if isinstance(part, Tensor) else part for part in flat]
        unwanted = (part for part, want in zip(output, ctx.wanted, strict=True) if not want)
        ctx.mark_non_differentiable(*unwanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = [
            other if part is None else part
            for part, other in zip(ctx.saved_tensors, ctx.rest, strict=True)
        ]
        call, cotangents, _ = _split(flat)
        _, (_, _, _, _, rule) = _arguments(*call)
        if rule.dropout_p > 0.0:
            raise RuntimeError(
                "attention with dropout has first derivatives only, got a second one with "
                f"dropout_p={rule.dropout_p:g}"
            )
        inputs = [
            index
            for index in _GRADIENT_INPUTS
            if isinstance(call[index], Tensor) and call[index].is_floating_point()
        ]
        results = [index for index, part in enumerate(cotangents) if part is not None]

        def gradient(*variables: Tensor) -> tuple[Tensor, ...]:
            def sums_of(*tensors: Tensor) -> tuple[Tensor, ...]:
                again = list(call)
                for index, tensor in zip(inputs, tensors, strict=True):
                    again[index] = tensor
                found = _whole(*_arguments(*again)[1])
                return tuple(found[_DIFFERENTIABLE[index]] for index in results)

            pull = torch.func.vjp(sums_of, *variables[: len(inputs)])[1]
            found = dict(zip(inputs, pull(variables[len(inputs) :]), strict=True))
            return tuple(
                found[index]
                for index, want in zip(_GRADIENT_INPUTS, ctx.wanted, strict=True)
                if want
            )

        variables = [*(call[index] for index in inputs), *(cotangents[index] for index in results)]
        pull = torch.func.vjp(gradient, *variables)[1]
        chosen = tuple(part for part, want in zip(grads, ctx.wanted, strict=True) if want)
        places = [*inputs, *(len(call) + index for index in results)]
        found: list[Tensor | None] = [None] * (1 + len(flat) + len(Sums._fields))
        for place, part in zip(places, pull(chosen), strict=True):
            found[1 + place] = part
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return vmapped(_Gradients.apply, info.batch_size, in_dims, inputs)


def _split(flat: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A call's arguments without ``noise``, the gradients of its results, its results."""
    count = _INPUTS.count(",") + 1
    middle = count + len(_DIFFERENTIABLE)
    return list(flat[:count]), list(flat[count:middle]), list(flat[middle:])


def _whole(query: Tensor, key: Tensor, value: Tensor | None, masking: Masking, rule: Rule) -> Sums:
    """The sums without those of noise, made of operations that PyTorch differentiates itself."""
    found = weigh_rows(
        query,
        key,
        value,
        masking,
        Softmax() if rule.sinks is None else Sink(rule.sinks),
        scale=rule.scale,
        softcap=rule.softcap,
    )
    fields = found.scores._asdict()
    del fields["sink"]
    none = query.new_empty(*query.shape[:3], 0)
    return Sums(out=none if found.out is None else found.out, **fields)
