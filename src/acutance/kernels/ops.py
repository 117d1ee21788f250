"""The kernel as PyTorch operators, so that autograd and ``torch.compile`` see one node each.

:func:`attend_rows` calls them where a compiler, a tracer, a dispatch mode or a tensor subclass
must see an operator. Elsewhere the same kernels are a :class:`torch.autograd.Function`: the first
call of an operator of :mod:`torch.library` imports ``torch._dynamo``, more than a second of CPU.
Derivatives of gradients are those of the same sums as PyTorch operations, in memory O(L S).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.compiling import ordinary, transformed
from acutance.kernels import dispatch
from acutance.kernels.call import KernelCall, Rule, SumGradients, Sums, accumulate_dtype
from acutance.kernels.whole_rows import weigh_rows
from acutance.masks import Masking
from acutance.rowstats.gaps import BINS
from acutance.weights import Sink, Softmax

#: Results that carry a gradient, as positions in :class:`~acutance.kernels.call.Sums`.
_DIFFERENTIABLE = tuple(Sums._fields.index(name) for name in SumGradients._fields)

_INPUTS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? attn_mask, Tensor? bias, Tensor? key_mask, "
    "Tensor? query_documents, Tensor? key_documents, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? seed, bool causal, SymInt offset, SymInt? window, float scale, float? softcap, "
    "float dropout_p, str backend"
)
_RESULTS = ", ".join(["Tensor"] * len(Sums._fields))
#: How many of the operator's arguments are tensors; they come first.
_TENSORS = _INPUTS.count("Tensor")
#: Positions of the differentiable ones, in the order of :class:`~acutance.kernels.call.Gradients`.
_GRADIENT_INPUTS = (0, 1, 2, 3, 4, 9)
#: The results that carry none.
_constant = itemgetter(*sorted({*range(len(Sums._fields))} - {*_DIFFERENTIABLE}))

_Tensors: TypeAlias = Sequence[Tensor | None]


class _Settings(NamedTuple):
    """The settings of a call that are not tensors: the operator's last arguments."""

    causal: bool
    offset: int
    window: int | None
    scale: float
    softcap: float | None
    dropout_p: float
    backend: str
    noise: bool = False
    gaps: bool = False


def _flat(call: KernelCall, backend: str) -> tuple[tuple[Tensor | None, ...], _Settings]:
    """Split a call into tensors and settings: autograd and compilers need them apart."""
    query, key, value, masking, rule, noise, gaps = call
    masks = (masking.attn_mask, masking.bias, masking.key_mask)
    documents = (masking.query_documents, masking.key_documents)
    tensors = (query, key, value, *masks, *documents, masking.alibi_slopes, rule.sinks, rule.seed)
    place = (masking.causal, masking.offset, masking.window)
    scores = (rule.scale, rule.softcap, rule.dropout_p)
    return tensors, _Settings(*place, *scores, backend, noise, gaps)


def _call(tensors: Sequence[Any], settings: _Settings) -> KernelCall:
    """The inverse of :func:`_flat`: the call from its tensors and settings."""
    query, key, value, *masks, sinks, seed = tensors
    attn_mask, bias, key_mask, query_documents, key_documents, alibi_slopes = masks
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
        causal=settings.causal,
        offset=settings.offset,
        window=settings.window,
        device=query.device,
    )
    rule = Rule(settings.scale, settings.softcap, sinks, settings.dropout_p, seed)
    return KernelCall(query, key, value, masking, rule, settings.noise, settings.gaps)


@torch.library.custom_op(
    "acutance::attend_rows",
    mutates_args=(),
    schema=f"({_INPUTS}, bool noise, bool gaps) -> ({_RESULTS})",
)
def row_sums(*inputs: Any) -> tuple[Tensor, ...]:
    """The output and the row sums (:func:`acutance.kernels.dispatch.forward`) as an operator."""
    settings = _Settings(*inputs[_TENSORS:])
    return tuple(_forward(settings.backend, _call(inputs[:_TENSORS], settings)))


def _forward(backend: str, call: KernelCall) -> Sums:
    with torch.autocast(call.query.device.type, enabled=False):
        return dispatch.forward(backend, call)


@row_sums.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    query, _, value, *_, noise, gaps = inputs
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
        new(BINS if gaps else 0, dtype=torch.int32),
    )


@torch.library.custom_op(
    "acutance::attend_rows_backward",
    mutates_args=(),
    schema=f"(Tensor?[] grads, Tensor[] sums, bool[] wanted, {_INPUTS}) -> Tensor[]",
)
def row_sums_backward(
    grads: _Tensors, sums: Sequence[Tensor], wanted: Sequence[bool], *inputs: Any
) -> list[Tensor]:
    """Gradients of the inputs of :func:`row_sums`; empty tensors for those not requested."""
    return _gradients(grads, sums, wanted, inputs[:_TENSORS], _Settings(*inputs[_TENSORS:]))


def _gradients(
    grads: _Tensors,
    sums: Sequence[Tensor],
    wanted: Sequence[bool],
    tensors: _Tensors,
    settings: _Settings,
) -> list[Tensor]:
    """Gradients of the inputs from those of the sums, empty where not wanted."""
    call = _call(tensors, settings)
    query = call.query
    with torch.autocast(query.device.type, enabled=False):
        gradients = dispatch.backward(
            settings.backend, SumGradients(*grads), Sums(*sums), call, tuple(wanted)
        )
    return [query.new_empty(0) if part is None else part for part in gradients]


@row_sums_backward.register_fake
def _(
    grads: _Tensors, sums: Sequence[Tensor], wanted: Sequence[bool], *inputs: Any
) -> list[Tensor]:
    parts = [inputs[place] for place in _GRADIENT_INPUTS]
    return [
        part.new_empty(part.shape) if want and part is not None else inputs[0].new_empty(0)
        for part, want in zip(parts, wanted, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs[:_TENSORS], _Settings(*inputs[_TENSORS:]), output)


def _keep(ctx: Any, tensors: _Tensors, settings: _Settings, output: tuple[Tensor, ...]) -> None:
    """Save inputs and results of the operator for its backward pass."""
    ctx.set_materialize_grads(False)
    ctx.settings = settings._replace(noise=False, gaps=False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors, and None for each setting."""
    result = _tensor_gradients(ctx, ctx.needs_input_grad[:_TENSORS], grads)
    return (*result, *[None] * len(ctx.settings))


def _tensor_gradients(ctx: Any, needed: Sequence[bool], grads: _Tensors) -> list[Tensor | None]:
    """Gradients of the tensor arguments, None where not needed."""
    saved, settings = ctx.saved_tensors, ctx.settings
    tensors, sums = saved[:_TENSORS], saved[_TENSORS:]
    wanted = [
        needed[place] and tensors[place] is not None and tensors[place].is_floating_point()
        for place in _GRADIENT_INPUTS
    ]
    chosen = [grads[index] for index in _DIFFERENTIABLE]
    result: list[Tensor | None] = [None] * _TENSORS
    if not any(wanted) or all(part is None for part in chosen):
        return result
    gradients: Sequence[Tensor]
    if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transformed()):
        gradients = _Gradients.apply(settings, wanted, *tensors, *chosen, *sums)  # type: ignore[no-untyped-call]
    elif ordinary((*tensors, *chosen, *sums)):
        gradients = _gradients(chosen, sums, wanted, tensors, settings)
    else:
        gradients = row_sums_backward(chosen, list(sums), wanted, *tensors, *settings[:-2])
    for place, want, part in zip(_GRADIENT_INPUTS, wanted, gradients, strict=True):
        result[place] = part if want else None
    return result


row_sums.register_autograd(_backward, setup_context=_setup)


def attend_rows(call: KernelCall, backend: str) -> tuple[Sums, str]:
    """Output and row sums of a call, differentiable, and the name of the backend used.

    Args:
        call: a validated call.
        backend: its name, or "auto".

    Raises:
        ValueError: if the backend named does not support the call.
    """
    chosen = dispatch.choose(backend, call)
    tensors, settings = _flat(call, backend)
    if ordinary(tensors):
        backend = backend if chosen == "triton" else chosen  # "auto" may still turn from Triton
        if torch.is_grad_enabled() and _any_wants_gradient(tensors):
            settings = settings._replace(backend=backend)
            sums = Sums(*_RowSums.apply(settings, *tensors))  # type: ignore[no-untyped-call]
        else:
            sums = _forward(backend, call)
    elif transformed():
        sums = Sums(*_RowSums.apply(settings, *tensors))  # type: ignore[no-untyped-call]
    else:
        sums = Sums(*row_sums(*tensors, *settings))
    return sums, dispatch.ran(chosen, call)


def value_gradients(grad: SumGradients, sums: Sums, call: KernelCall, backend: str) -> Tensor:
    """The gradient of a call's values, (B, H, S, Ev), given that of its results.

    Args:
        grad: gradients of the results.
        sums: the results of the call.
        call: the call, with values.
        backend: name of the backend of both passes.
    """
    tensors, settings = _flat(call, backend)
    wanted = [place == 2 for place in _GRADIENT_INPUTS]
    if torch.compiler.is_compiling():
        gradients = row_sums_backward(grad, list(sums), wanted, *tensors, *settings[:-2])
    else:
        gradients = _Gradients.apply(settings, wanted, *tensors, *grad, *sums)  # type: ignore[no-untyped-call]
    found: Tensor = gradients[2]
    return found


def _any_wants_gradient(tensors: _Tensors) -> bool:
    for place in _GRADIENT_INPUTS:  # any() would cost a step of its generator for each
        tensor = tensors[place]
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _RowSums(torch.autograd.Function):
    """:func:`row_sums` as an autograd function that :mod:`torch.func` supports."""

    @staticmethod
    def forward(settings: _Settings, *tensors: Any) -> tuple[Tensor, ...]:
        if ordinary(tensors):
            return tuple(_forward(settings.backend, _call(tensors, settings)))
        results: tuple[Tensor, ...] = row_sums(*tensors, *settings)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        settings, *tensors = inputs
        _keep(ctx, tensors, settings, output)
        ctx.mark_non_differentiable(*_constant(output))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *_tensor_gradients(ctx, ctx.needs_input_grad[1:], grads))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return _mapped(_RowSums.apply, info.batch_size, in_dims, inputs)


class _Gradients(torch.autograd.Function):
    """:func:`row_sums_backward` as an autograd function, for second derivatives."""

    @staticmethod
    def forward(settings: _Settings, wanted: Sequence[bool], *parts: Any) -> tuple[Tensor, ...]:
        tensors, grads, sums = _split(parts)
        if ordinary(parts):
            return tuple(_gradients(grads, sums, wanted, tensors, settings))
        return tuple(row_sums_backward(grads, list(sums), wanted, *tensors, *settings[:-2]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings, ctx.wanted, *parts = inputs
        tensors, grads, _ = _split(parts)
        ctx.save_for_backward(*tensors, *grads)
        unwanted = (part for part, want in zip(output, ctx.wanted, strict=True) if not want)
        ctx.mark_non_differentiable(*unwanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Second derivatives, by differentiating whole rows."""
        settings, (tensors, cotangents, _) = ctx.settings, _split(ctx.saved_tensors)
        if settings.dropout_p > 0.0:
            raise RuntimeError(
                "attention with dropout has first derivatives only, got a second one with "
                f"dropout_p={settings.dropout_p:g}"
            )
        present = [i for i in _GRADIENT_INPUTS if tensors[i] is not None]
        inputs = [i for i in present if tensors[i].is_floating_point()]
        results = [index for index, part in enumerate(cotangents) if part is not None]

        def gradient(*variables: Tensor) -> tuple[Tensor, ...]:
            def sums_of(*changed: Tensor) -> tuple[Tensor, ...]:
                again = list(tensors)
                for index, tensor in zip(inputs, changed, strict=True):
                    again[index] = tensor
                sums = _whole(_call(again, settings))
                return tuple(sums[_DIFFERENTIABLE[index]] for index in results)

            pull = torch.func.vjp(sums_of, *variables[: len(inputs)])[1]
            pulled = dict(zip(inputs, pull(variables[len(inputs) :]), strict=True))
            return tuple(
                pulled[index]
                for index, want in zip(_GRADIENT_INPUTS, ctx.wanted, strict=True)
                if want
            )

        variables = [tensors[i] for i in inputs] + [cotangents[i] for i in results]
        pull = torch.func.vjp(gradient, *variables)[1]
        chosen = tuple(part for part, want in zip(grads, ctx.wanted, strict=True) if want)
        places = [*inputs, *(_TENSORS + index for index in results)]
        second: list[Tensor | None] = [None] * (_TENSORS + len(cotangents) + len(Sums._fields))
        for place, part in zip(places, pull(chosen), strict=True):
            second[place] = part
        return (None, None, *second)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return _mapped(_Gradients.apply, info.batch_size, in_dims, inputs)


def _split(parts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Split flat arguments into the call's tensors, its results' gradients, and its results."""
    middle = _TENSORS + len(_DIFFERENTIABLE)
    return parts[:_TENSORS], parts[_TENSORS:middle], parts[middle:]


def _mapped(
    function: Callable[..., Sequence[Tensor]],
    size: int,
    in_dims: Sequence[Any],
    arguments: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Call a function for each slice of a dimension mapped by ``torch.vmap``; stack the results.

    ``in_dims`` has the index of that dimension in each argument, or None. Returns the results, with
    a new first dimension, and its index in each of them, 0.
    """
    each = [
        part.unbind(dim) if isinstance(dim, int) else [part] * size
        for part, dim in zip(arguments, in_dims, strict=True)
    ]
    slices = [function(*one) for one in zip(*each, strict=True)]
    results = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
    return results, (0,) * len(results)


def _whole(call: KernelCall) -> Sums:
    """The sums except those for noise, computed with differentiable PyTorch operations."""
    sinks = call.rule.sinks
    rows = weigh_rows(
        call._replace(noise=False, gaps=False), Softmax() if sinks is None else Sink(sinks)
    )
    fields = rows.scores._asdict()
    del fields["sink"]
    none = call.query.new_empty(*call.query.shape[:3], 0)
    return Sums(out=none if rows.out is None else rows.out, **fields)
