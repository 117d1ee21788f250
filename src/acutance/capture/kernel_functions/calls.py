"""Pass the calls of kernel functions and operators through handlers, while something is open."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from acutance.capture.attention_call import AttentionCall
from acutance.capture.intercept import notify_all
from acutance.capture.kernel_functions.flash_attn import OPERATORS
from acutance.capture.kernel_functions.reading import Arguments, Kernel, Reading
from acutance.capture.kernel_functions.replace import Replaced, replaced
from acutance.capture.readers.huggingface import pass_on
from acutance.capture.readers.interface_call import is_cross
from acutance.capture.torch_modes import undoing


class KernelCall:
    """One call of a kernel that a model calls as a function.

    Args:
        kernel: how its arguments are read.
        function: what computes it.
        bound: its arguments, bound to the function's signature.
    """

    def __init__(
        self, kernel: Kernel, function: Callable[..., Any], bound: inspect.BoundArguments
    ) -> None:
        self.kernel, self._function, self._bound = kernel, function, bound
        self._reading: Reading | None = None

    def read(self, module: str) -> AttentionCall:
        """The call as the kernel computes it; ``module`` is the name of the module that makes it.

        Raises:
            ValueError: if it is not understood; the message names the kernel.
        """
        self._reading = self.kernel.reading(self._bound)
        fields = self._reading.fields
        if is_cross(module):
            fields["cross"] = True
        return AttentionCall(module=module, source=self.kernel.name, **fields)

    def refusal(self, reason: str) -> str:
        """Why the call cannot be changed, with the name of the kernel."""
        name = self.kernel.name
        return reason if name in reason else f"it calls {name}: {reason}"

    def scale_queries(self, factor: Tensor) -> None:
        """Multiply the queries by a factor (B or 1, Hq or 1, L, 1), once the call has been read.

        Raises:
            ValueError: if they are in 8 bits, where the product would be rounded to few digits.
        """
        reading = self._reading
        assert reading is not None
        name = self.kernel.names.get(reading.argument, reading.argument)
        given: Tensor = self._bound.arguments[name]
        if given.dtype.itemsize < 2:
            raise ValueError(f"its queries are {given.dtype}")
        # where each row of each head lies, from 1; rows of padding are at 0
        places = torch.arange(1, given[..., 0].numel() + 1, device=given.device)
        rows = reading.rows(places.view(*given.shape[:-1], 1))
        factors = given.new_ones(len(places) + 1)
        factors[rows] = factor.to(given.dtype).expand(rows.shape)
        self._bound.arguments[name] = given * factors[1:].view(*given.shape[:-1], 1)

    def compute(self) -> Any:
        """The result of the kernel."""
        return self._function(*self._bound.args, **self._bound.kwargs)

    def output(self, result: Any) -> Tensor:
        """The output (B, Hq, L, Ev) in a result, once the call has been read."""
        assert self._reading is not None
        if self.kernel.name.endswith("_out"):
            result = self._bound.arguments["out"]
        output: Tensor = result[0] if isinstance(result, tuple | list) else result
        return self._reading.rows(output)


#: Handles one call: ``run()`` goes on with it, as the handler left it, and returns its result.
Handler = Callable[[KernelCall, Callable[[], Any]], Any]

#: Open handlers that change calls, outermost first, and those that only look.
_changing: list[Handler] = []
_looking: list[Handler] = []


@contextmanager
def intercept(handler: Handler, *, looks: bool = False) -> Iterator[None]:
    """Context in which a handler is called around each call of a kernel function.

    It may be nested, as :func:`acutance.capture.readers.huggingface.intercept` is. Operators are
    seen by function modes alone, with :func:`operator_call`.

    Args:
        handler: called with the call, and with ``run``, which goes on with it.
        looks: whether it sees calls as all others change them.
    """
    group = _looking if looks else _changing

    def remove() -> None:
        group[:] = [other for other in group if other is not handler]

    with replaced(_on_call), undoing(remove):
        group.append(handler)
        yield


def _on_call(function: Replaced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass a call of a replaced function through the open handlers."""
    run, kernel, handlers = function.original, function.kernel, (*_changing, *_looking)
    if torch.compiler.is_compiling() or not handlers:
        return run(*args, **kwargs)
    try:
        bound = function.signature.bind(*args, **kwargs)
    except TypeError:  # the function says so in its own words
        return run(*args, **kwargs)
    if kernel.plan:
        result = run(*args, **kwargs)
        kernel.read(Arguments(kernel.name, bound, kernel.names))
        return result
    notify_all()
    return pass_on(KernelCall(kernel, run, bound), handlers)


def operator_call(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> KernelCall | None:
    """The call of an operator that is a kernel; None for any other operator."""
    is_operator = type(operator) is OpOverload or type(operator) is OpOverloadPacket
    kernel = OPERATORS.get(".".join(str(operator).split(".")[:2])) if is_operator else None
    if kernel is None:
        return None
    schema: Any = operator._schema if hasattr(operator, "_schema") else operator.default._schema
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for argument in schema.arguments:
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else inspect.Parameter.empty
        kind = kinds[argument.kwarg_only]
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    bound = inspect.Signature(parameters).bind(*args, **kwargs)
    return KernelCall(kernel, operator, bound)
