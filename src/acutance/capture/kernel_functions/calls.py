"""Observe and change calls of kernel functions, while a probe, a law or a monitor is open."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from acutance.capture.attention_call import AttentionCall
from acutance.capture.intercept import notify_all
from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.libraries import OPERATORS
from acutance.capture.kernel_functions.reading import Kernel, Reading
from acutance.capture.kernel_functions.replace import Replaced, replaced
from acutance.capture.protocols import FunctionObserver
from acutance.capture.readers.interface_call import is_cross
from acutance.capture.torch_modes import undoing

__all__ = [
    "KernelChanger",
    "change",
    "change_operator",
    "never_called",
    "observe",
    "observe_operator",
    "on_call",
    "operator_kernel",
]


class KernelChanger(Protocol):
    """Changes the queries of kernel calls."""

    def muted(self) -> bool:
        """Whether this thread is inside a call that has already been changed."""

    def mute(self) -> Any:
        """Context in which calls are not changed: they are part of a changed call."""

    def note_function(self, *, attention: bool = True) -> None:
        """Note that the model calls attention as a function."""

    def module_to_change(self) -> str | None:
        """Name of the running module if its scores are to be scaled, else None."""

    def factor_of_kernel(self, name: str, kernel: str, read: Callable[[], AttentionCall]) -> Tensor:
        """Factor (B or 1, Hq or 1, L, 1) of the queries of a call in module ``name``.

        It raises an error that names the kernel if the call cannot be read or changed.
        """

    def refused_kernel(self, name: str, kernel: str, reason: str) -> Exception:
        """The error for a call of a kernel that cannot be changed."""


_observers: list[FunctionObserver] = []
_changers: list[KernelChanger] = []
_NO_DEFAULT = inspect.Parameter.empty


def observe(observer: FunctionObserver) -> AbstractContextManager[None]:
    """Context in which an observer sees the calls of kernel functions."""
    return _listed(_observers, observer)


def change(changer: KernelChanger) -> AbstractContextManager[None]:
    """Context in which a changer changes the queries of kernel functions."""
    return _listed(_changers, changer)


@contextmanager
def _listed(group: list[Any], member: Any) -> Iterator[None]:
    def remove() -> None:
        group[:] = [each for each in group if each is not member]

    with replaced(on_call), undoing(remove):
        group.append(member)
        yield


def on_call(function: Replaced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a replaced function, and report its call to observers."""
    run, kernel = function.original, function.kernel
    if torch.compiler.is_compiling() or not (_observers or _changers):
        return run(*args, **kwargs)
    try:
        bound = function.signature.bind(*args, **kwargs)
    except TypeError:  # the function says so in its own words
        return run(*args, **kwargs)
    if kernel.plan:
        result = run(*args, **kwargs)
        kernel.read(Arguments(kernel.name, bound))
        return result
    notify_all()
    with ExitStack() as quiet:
        for changer in tuple(_changers):
            if not changer.muted():
                _change(changer, kernel, bound)
                quiet.enter_context(changer.mute())
        listening = [
            (observer, name)
            for observer in tuple(_observers)
            if not observer.muted() and (name := observer.call_name()) is not None
        ]
        for observer, _ in listening:
            observer.note_function()
            quiet.enter_context(observer.mute())
        result = run(*bound.args, **bound.kwargs)
    for observer, name in listening:
        _record(observer, name, kernel, bound, result)
    return result


def _change(changer: KernelChanger, kernel: Kernel, bound: inspect.BoundArguments) -> None:
    """Multiply the queries among the arguments of a call."""
    name = changer.module_to_change()
    if name is None:
        return
    changer.note_function()
    readings: list[Reading] = []

    def read() -> AttentionCall:
        readings.append(kernel.reading(bound))
        return AttentionCall(module=name, source=kernel.name, **readings[0].fields)

    factor = changer.factor_of_kernel(name, kernel.name, read)
    heads = readings[0].fields["query"].shape[1]
    placed = readings[0].place(factor.expand(-1, heads, -1, -1))
    try:
        bound.arguments[kernel.query] = kernel.scaled(bound.arguments[kernel.query], placed)
    except (ValueError, KeyError) as error:
        raise changer.refused_kernel(name, kernel.name, str(error)) from error


def _record(
    observer: FunctionObserver,
    name: str,
    kernel: Kernel,
    bound: inspect.BoundArguments,
    result: Any,
) -> None:
    """Report a call that has run to an observer."""
    if observer.provides:
        reason = f"{kernel.name} is called as a function"
        observer.provide(never_called, name, never_called, reason)
    output: Tensor = result[0] if isinstance(result, tuple | list) else result
    readings: list[Reading] = []

    def read() -> AttentionCall:
        readings[:] = [kernel.reading(bound)]
        if is_cross(name):
            readings[0].fields["cross"] = True
        return AttentionCall(module=name, source=kernel.name, **readings[0].fields)

    observer.observe(read, name, lambda: readings[0].output(output))


def never_called() -> Any:
    """Stands for the functions passed to ``provide`` with a refusal, which are not called."""
    raise AssertionError("a call that is refused cannot be read")


# -- operators, which a torch-function mode sees --------------------------------------------------


def operator_kernel(operator: Any) -> Kernel | None:
    """The kernel that an operator is; None for any other operator."""
    if type(operator) is not OpOverload and type(operator) is not OpOverloadPacket:
        return None
    return OPERATORS.get(".".join(str(operator).split(".")[:2]))


def observe_operator(
    observer: FunctionObserver,
    kernel: Kernel,
    operator: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an operator that is a kernel, and report it to an observer."""
    name = observer.call_name()
    if name is None:
        return operator(*args, **kwargs)
    with observer.mute():
        result = operator(*args, **kwargs)
    bound = _signature_of(operator).bind(*args, **kwargs)
    output = bound.arguments["out"] if kernel.name.endswith("_out") else result
    _record(observer, name, kernel, bound, output)
    return result


def change_operator(
    changer: KernelChanger,
    kernel: Kernel,
    operator: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an operator that is a kernel with its queries changed."""
    bound = _signature_of(operator).bind(*args, **kwargs)
    _change(changer, kernel, bound)
    with changer.mute():
        return operator(*bound.args, **bound.kwargs)


def _signature_of(operator: Any) -> inspect.Signature:
    """The signature of an operator, from its schema."""
    schema = operator._schema if hasattr(operator, "_schema") else operator.default._schema
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                kinds[argument.kwarg_only],
                default=argument.default_value if argument.has_default_value() else _NO_DEFAULT,
            )
            for argument in schema.arguments
        ]
    )
