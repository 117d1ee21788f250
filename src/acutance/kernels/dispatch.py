"""Choose the backend of a call and run it, as PyTorch operators with their derivatives.

``native`` is the compiled CPU kernel, ``triton`` the CUDA one, ``blocked`` plain PyTorch on any
device and the reference for behaviour.

:func:`attend_rows` calls an operator where a compiler, a tracer, a dispatch mode or a tensor
subclass must see one. Elsewhere the same kernels are a :class:`torch.autograd.Function`: the first
call of an operator of :mod:`torch.library` imports ``torch._dynamo``, more than a second of CPU.
Derivatives of gradients are those of the same sums as PyTorch operations, in memory O(L S).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acutance.compiling import constant, ordinary, transformed
from acutance.kernels import blocked, native
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.call import Gradients, KernelCall, SumGradients, Sums
from acutance.kernels.hidden import all_finite, hides_keys, only_visible_values
from acutance.kernels.whole_rows import weigh_rows
from acutance.masks import Masking

#: Names of the backends.
BACKENDS = ("native", "blocked", "triton")
#: Environment variable that names the backend of calls that leave the choice open.
BACKEND_VARIABLE = "ACUTANCE_BACKEND"


def check_backend(name: object, what: str = "backend") -> str:
    """Return ``name`` if it is the name of a backend or "auto"; ``what`` names it in errors.

    Raises:
        ValueError: if it is neither.
    """
    if name != "auto" and name not in BACKENDS:
        allowed = ", ".join(repr(each) for each in ("auto", *BACKENDS))
        raise ValueError(f"{what} must be one of {allowed}, got {name!r}")
    return str(name)


@cache
def forced() -> str:
    """The backend named by :data:`BACKEND_VARIABLE`, "auto" if unset; read once."""
    return check_backend(os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE)


@constant
def _forced() -> str:
    """:func:`forced` as a constant for ``torch.compile``, which cannot trace its cache."""
    return forced()


def _why_not(backend: str, call: KernelCall) -> str | None:
    """Why a backend does not support a call, as a clause; None if it does."""
    if backend == "native":
        return native.why_not(call)
    if backend == "triton":
        return cast("str | None", _gpu().why_not(call))
    return None


def _gpu() -> ModuleType:
    """Import the Triton kernels."""
    from acutance.kernels import gpu  # imports triton, which takes its time

    return gpu


def choose(call: KernelCall) -> str:
    """The name of the backend for a call.

    It is the one that the call names. For "auto" it is the first that supports the call of the one
    that the environment variable :data:`BACKEND_VARIABLE` names, the compiled kernel for the device
    and "blocked".

    Raises:
        ValueError: if the backend that the call names does not support it.
    """
    if call.backend != "auto":
        reason = _why_not(call.backend, call)
        if reason is not None:
            raise ValueError(f"backend={call.backend!r} does not support this call: {reason}")
        return call.backend
    named = _forced()
    if named != "auto" and _why_not(named, call) is None:
        return named
    if call.query.device.type == "cpu":
        return "native" if native.why_not(call) is None else "blocked"
    return "triton" if _why_not("triton", call) is None else "blocked"


def forward(call: KernelCall) -> Sums:
    """Output and row sums of a call."""
    chosen = choose(call) if call.backend == "auto" else call.backend
    with torch.autocast(call.query.device.type, enabled=False):
        if chosen == "native":
            return native.forward(call)
        if chosen == "triton":
            reason = _gpu().refusal_reason(call, warn=call.backend != "triton")
            if reason is None:
                return cast(Sums, _gpu().forward(call))
            _only_if_open(call, reason)
        sums = blocked.forward(call)
        if call.value is None or not hides_keys(call.masking) or all_finite(sums.out):
            return sums
        return only_visible_values(blocked.forward, sums, call)


def backward(
    grad: SumGradients, sums: Sums, call: KernelCall, wanted: tuple[bool, ...]
) -> Gradients:
    """Gradients of a forward call, as of :func:`acutance.kernels.backward.backward`.

    Where the backend's backward pass does not support the call, the blocked one is used, since the
    sums have the same meaning in all backends.
    """
    chosen = choose(call) if call.backend == "auto" else call.backend
    _, _, _, of_mask, of_bias, _ = wanted
    with torch.autocast(call.query.device.type, enabled=False):
        if chosen == "native" and not (of_mask or of_bias):
            return native.backward(grad, sums, call, wanted)
        if chosen == "triton" and _gpu().unsupported_gradient(call.masking, wanted) is None:
            reason = _gpu().refusal_reason(call, grad, wanted, warn=call.backend != "triton")
            if reason is None:
                return cast(Gradients, _gpu().backward(grad, sums, call, wanted))
            _only_if_open(call, reason)
        return blocked_backward(grad, sums, call, wanted)


def _only_if_open(call: KernelCall, reason: str) -> None:
    """Raise ValueError if a call that the Triton kernels refuse may be run by no others."""
    if call.backend == "triton":
        raise ValueError(f"backend='triton' does not support this call: {reason}")


def _ran(chosen: str, call: KernelCall) -> str:
    """The backend that a finished call ran on: "blocked" where Triton's kernels were refused."""
    if chosen != "triton" or is_compiling():
        return chosen
    return "blocked" if _gpu().refusal_reason(call, warn=False) is not None else chosen


# -- the operators -------------------------------------------------------------------------------

#: Results that carry a gradient, as positions in :class:`~acutance.kernels.call.Sums`.
_DIFFERENTIABLE = tuple(Sums._fields.index(name) for name in SumGradients._fields)
_gradients_of_sums = itemgetter(*_DIFFERENTIABLE)
#: The results that carry none.
_constant = itemgetter(*sorted({*range(len(Sums._fields))} - {*_DIFFERENTIABLE}))

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


def _flat(call: KernelCall) -> tuple[tuple[Tensor | None, ...], _Settings]:
    """Split a call into tensors and settings: autograd and compilers need them apart."""
    masking = call.masking
    masks = (masking.attn_mask, masking.bias, masking.key_mask)
    documents = (masking.query_documents, masking.key_documents)
    tensors = (
        call.query, call.key, call.value, *masks, *documents, masking.alibi_slopes, call.sinks,
        call.seed,
    )  # fmt: skip
    place = (masking.causal, masking.offset, masking.window)
    scores = (call.scale, call.softcap, call.dropout_p)
    return tensors, _Settings(*place, *scores, call.backend, call.noise, call.gaps)


def _call(tensors: Sequence[Any], settings: _Settings) -> KernelCall:
    """The inverse of :func:`_flat`: the call from its tensors and settings."""
    query, key, value, attn_mask, bias, key_mask, rows, columns, slopes, sinks, seed = tensors
    causal, offset, window, scale, softcap, dropout_p, backend, noise, gaps = settings
    batch, query_heads, queries, _ = query.shape
    heads, keys = key.shape[1], key.shape[2]
    group = query_heads // heads if heads else 1
    masking = Masking(
        batch, heads, group, queries, keys, attn_mask, bias, key_mask, rows, columns, slopes,
        causal, offset, window, query.device,
    )  # fmt: skip
    return KernelCall(
        query, key, value, masking, scale, softcap, sinks, dropout_p, seed, noise, gaps, backend
    )


@torch.library.custom_op(
    "acutance::attend_rows",
    mutates_args=(),
    schema=f"({_INPUTS}, bool noise, bool gaps) -> ({_RESULTS})",
)
def row_sums(*inputs: Any) -> tuple[Tensor, ...]:
    """The output and the row sums (:func:`forward`) as an operator."""
    return tuple(forward(_call(inputs[:_TENSORS], _Settings(*inputs[_TENSORS:]))))


@row_sums.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    query, _, value, *_, noise, gaps = inputs
    return tuple(native.new_sums(query, value, noise, gaps))


@torch.library.custom_op(
    "acutance::attend_rows_backward",
    mutates_args=(),
    schema=f"(Tensor?[] grads, Tensor[] sums, bool[] wanted, {_INPUTS}) -> Tensor[]",
)
def row_sums_backward(
    grads: _Tensors, sums: Sequence[Tensor], wanted: Sequence[bool], *inputs: Any
) -> list[Tensor]:
    """Gradients of the inputs of :func:`row_sums`; empty tensors for those not requested."""
    call = _call(inputs[:_TENSORS], _Settings(*inputs[_TENSORS:]))
    return _gradients(grads, sums, wanted, call)


def _gradients(
    grads: _Tensors, sums: Sequence[Tensor], wanted: Sequence[bool], call: KernelCall
) -> list[Tensor]:
    """Gradients of the inputs from those of the sums, empty where not wanted."""
    gradients = backward(SumGradients(*grads), Sums(*sums), call, tuple(wanted))
    return [call.query.new_empty(0) if part is None else part for part in gradients]


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
    """Save inputs and results of the operator for its backward pass."""
    ctx.set_materialize_grads(False)
    ctx.settings = _Settings(*inputs[_TENSORS : _TENSORS + len(_Settings._fields)])
    ctx.others = len(inputs) - _TENSORS
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.mark_non_differentiable(*_constant(output))


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors, None where not needed and for everything else."""
    saved, settings = ctx.saved_tensors, ctx.settings
    tensors, sums = saved[:_TENSORS], saved[_TENSORS:]
    needed = ctx.needs_input_grad
    wanted = [
        needed[place] and tensors[place] is not None and tensors[place].is_floating_point()
        for place in _GRADIENT_INPUTS
    ]
    chosen = _gradients_of_sums(grads)
    result: list[Tensor | None] = [None] * (_TENSORS + ctx.others)
    if not any(wanted) or not [part for part in chosen if part is not None]:
        return tuple(result)
    gradients: _Tensors
    if not torch.is_grad_enabled() and ordinary((*tensors, *chosen, *sums)):
        call = _call(tensors, settings)
        gradients = backward(SumGradients(*chosen), Sums(*sums), call, tuple(wanted))
    elif not is_compiling() and (torch.is_grad_enabled() or transformed()):
        gradients = _Gradients.apply(settings, wanted, *tensors, *chosen, *sums)  # type: ignore[no-untyped-call]
    else:
        gradients = row_sums_backward(chosen, list(sums), wanted, *tensors, *settings[:-2])
    for place, want, part in zip(_GRADIENT_INPUTS, wanted, gradients, strict=True):
        result[place] = part if want else None
    return tuple(result)


row_sums.register_autograd(_backward, setup_context=_setup)


def attend_rows(call: KernelCall) -> tuple[Sums, str]:
    """Output and row sums of a call, differentiable, and the name of the backend used.

    Raises:
        ValueError: if the backend that the call names does not support it.
    """
    chosen = choose(call)
    tensors, settings = _flat(call)
    if ordinary(tensors):
        if chosen != "triton":  # "auto" may still turn from it
            call, settings = call._replace(backend=chosen), settings._replace(backend=chosen)
        if torch.is_grad_enabled() and _any_wants_gradient(tensors):
            sums = Sums(*_RowSums.apply(*tensors, *settings, call))  # type: ignore[no-untyped-call]
        else:
            sums = forward(call)
    elif transformed():
        sums = Sums(*_RowSums.apply(*tensors, *settings, None))  # type: ignore[no-untyped-call]
    else:
        sums = Sums(*row_sums(*tensors, *settings))
    return sums, chosen if chosen != "triton" else _ran(chosen, call)


def value_gradients(grad: SumGradients, sums: Sums, call: KernelCall) -> Tensor:
    """The gradient of a call's values, (B, H, S, Ev), given that of its results.

    Args:
        grad: gradients of the results.
        sums: the results of the call.
        call: the call, with values.
    """
    tensors, settings = _flat(call)
    wanted = [place == 2 for place in _GRADIENT_INPUTS]
    if is_compiling():
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
    """:func:`row_sums` as an autograd function that :mod:`torch.func` supports.

    Its last argument is the call that the others make up, where they are ordinary tensors.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *flat, call = inputs
        tensors, settings = flat[:_TENSORS], _Settings(*flat[_TENSORS:])
        if call is None and ordinary(tensors):
            call = _call(tensors, settings)
        if call is not None:
            return tuple(forward(call))
        results: tuple[Tensor, ...] = row_sums(*flat)
        return results

    setup_context = staticmethod(_setup)
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return _mapped(_RowSums.apply, info.batch_size, in_dims, inputs)


class _Gradients(torch.autograd.Function):
    """:func:`row_sums_backward` as an autograd function, for second derivatives."""

    @staticmethod
    def forward(settings: _Settings, wanted: Sequence[bool], *parts: Any) -> tuple[Tensor, ...]:
        tensors, grads, sums = _split(parts)
        if ordinary(parts):
            return tuple(_gradients(grads, sums, wanted, _call(tensors, settings)))
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
    columns = [
        part.unbind(dim) if isinstance(dim, int) else [part] * size
        for part, dim in zip(arguments, in_dims, strict=True)
    ]
    slices = [function(*row) for row in zip(*columns, strict=True)]
    results = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
    return results, (0,) * len(results)


def _whole(call: KernelCall) -> Sums:
    """The sums except those for noise, computed with differentiable PyTorch operations."""
    rows = weigh_rows(call._replace(noise=False, gaps=False))
    fields = rows.scores._asdict()
    del fields["sink"]
    none = call.query.new_empty(*call.query.shape[:3], 0)
    return Sums(out=none if rows.out is None else rows.out, **fields)
