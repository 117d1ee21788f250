"""Capture attention of plain PyTorch: SDPA, nn.MultiheadAttention, and softmax as a last resort.

A torch-function mode sees the calls of its own thread only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from acutance.capture.attention_call import AttentionCall
from acutance.capture.handwritten.scores import ScoreTracker, products_of
from acutance.capture.handwritten.softmax import (
    LOG_OPERATORS,
    LOG_SOFTMAX,
    NOISY,
    OPERATORS,
    SOFTMAX,
    Softmax,
    Softmaxes,
    scores_of,
    version_of,
)
from acutance.capture.head_axis import (
    HeadAxes,
    could_be_over_keys,
    folded,
    heads_at_once,
    heads_of,
)
from acutance.capture.intercept import ATTENTION_FUNCTIONS
from acutance.capture.kernel_functions.calls import operator_call
from acutance.capture.protocols import FunctionObserver
from acutance.capture.readers.acutance_attention import ACUTANCE, acutance_call
from acutance.capture.readers.interface_call import is_cross
from acutance.capture.readers.torch_multihead import (
    not_padding,
    outputs_agree,
    run_again,
    same_memory,
    watch_sdpa,
)
from acutance.capture.readers.torch_sdpa import (
    FLEX,
    QueryChunks,
    flex_call,
    heads_apart,
    refusal,
    restore_shape,
    sdpa_arguments,
    sdpa_call,
    to_four_dims,
)
from acutance.capture.torch_modes import leave

__all__ = ["NO_PRODUCT", "FunctionCapture", "FunctionObserver"]

_SDPA = F.scaled_dot_product_attention
#: What each function is that is not simply run.
_KINDS: dict[Any, str] = {
    _SDPA: "sdpa",
    F.multi_head_attention_forward: "multihead",
    FLEX: "flex",
    ACUTANCE: "acutance",
    F.softmin: "softmax",
    **dict.fromkeys((*SOFTMAX, *NOISY), "softmax"),
    **dict.fromkeys(LOG_SOFTMAX, "log softmax"),
    **dict.fromkeys((torch.matmul, torch.bmm, torch.baddbmm, torch.einsum), "product"),
    **dict.fromkeys((Tensor.matmul, Tensor.bmm, Tensor.baddbmm), "product"),
    **dict.fromkeys((Tensor.__matmul__, Tensor.__rmatmul__), "product"),
}
_KINDS |= {watched: _KINDS[function] for watched, function in ATTENTION_FUNCTIONS.items()}
_OPERATORS = {OpOverload, OpOverloadPacket}
_Reader = Callable[[Sequence[Any], dict[str, Any], str], AttentionCall]
#: Begins the reason of a softmax that is listed as not read.
NO_PRODUCT = "no matrix product uses a softmax over the last dimension of"
#: What is wrong with the rows of a softmax that has a sink among its scores.
NO_VALUE = (
    "its softmax has one score more than its product has values, as a sink: it counts as a key"
)
#: The reason of sparsemax, entmax, or exponentials and their sum.
WRITTEN_OUT = (
    "a matrix product uses weights that were computed without a softmax: report what it computes "
    "with acutance.tap"
)


class FunctionCapture(TorchFunctionMode):
    """A torch-function mode that records the attention calls in its context."""

    def __init__(self, observer: FunctionObserver) -> None:
        super().__init__()
        self.observer = observer
        self._softmaxes = Softmaxes(self._on_product, self._on_unused, self._on_written_out)
        self._heads, self._chunks = HeadAxes(), QueryChunks()
        self._scores = ScoreTracker(factors=True) if observer.products else None

    def __exit__(self, *error: Any) -> None:
        """Leave the mode and forget softmaxes that no product used."""
        leave(self)
        self._softmaxes.clear()
        for module, reason in self._heads.undecided():
            self.observer.unreadable(module, reason)
        if self._scores is not None:
            self._scores.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function unchanged, then record it."""
        kind = _KINDS.get(func)
        if kind is None and type(func) in _OPERATORS:
            kind = "operator"
        if kind is None and not self._softmaxes and self._scores is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = dict(kwargs or {})
        if self.observer.muted():
            return func(*args, **kwargs)
        if kind not in (None, "product"):
            if self.observer.running() is not None:
                self.observer.note_function()
        else:
            if self._scores is None:
                result = func(*args, **kwargs)
            else:
                result = self._scores.call(func, args, kwargs)
            if self._softmaxes or kind == "product":
                self._softmaxes.follow(func, args, kwargs, result)
            return result
        func = ATTENTION_FUNCTIONS.get(func, func)
        if kind == "sdpa":
            return self._sdpa(func, args, kwargs)
        if kind == "multihead":
            return self._multi_head(func, args, kwargs)
        if kind == "flex":
            return self._read_from_arguments(func, args, kwargs, flex_call)
        if kind == "acutance":
            return self._read_from_arguments(func, args, kwargs, acutance_call)
        if kind == "operator":
            return self._operator(func, args, kwargs)
        return self._softmax(func, args, kwargs, log=kind == "log softmax")

    def _sdpa(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run and record a call of scaled dot-product attention."""
        name = self.observer.call_name()
        if name is None:
            return func(*args, **kwargs)
        arguments = sdpa_arguments(args, kwargs)
        heads = heads_of(self.observer.module_of(name))
        apart = heads_apart(arguments, heads)
        name = self._chunks.name(name, apart, heads)

        def as_read(output: Tensor) -> Tensor:
            folded_heads = apart["query"] is not arguments["query"]
            return to_four_dims(output.unflatten(0, (-1, heads)) if folded_heads else output)

        def read_call() -> AttentionCall:
            return sdpa_call(apart, name, cross=is_cross(name))

        def run() -> Any:
            with self.observer.mute():
                return func(*args, **kwargs)

        def model_output() -> Tensor:  # once more, to compare: it concerns no outer capture
            with ExitStack() as quiet:
                for capture in _enclosing_captures():
                    quiet.enter_context(capture.observer.mute())
                return as_read(run())

        provided = None
        if self.observer.provides:
            provided = self.observer.provide(read_call, name, model_output, refusal(arguments))
        if provided is not None:
            output = restore_shape(provided, arguments)
            for capture in _enclosing_captures():
                capture.record_provided(arguments, output)
            return output
        output = run()
        self.observer.observe(read_call, name, lambda: as_read(output))
        return output

    def record_provided(self, arguments: dict[str, Any], output: Tensor) -> None:
        """Record an SDPA call that an inner probe computed, which this mode does not see."""
        if self.observer.muted():
            return
        name = self.observer.call_name()
        if name is not None:
            heads = heads_of(self.observer.module_of(name))
            apart = heads_apart(arguments, heads)
            name = self._chunks.name(name, apart, heads)
            shape = apart["query"].shape[:-1]
            self.observer.observe(
                lambda: sdpa_call(apart, name, cross=is_cross(name)),
                name,
                lambda: to_four_dims(output.view(*shape, -1) if output.dim() == 3 else output),
            )

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run multi-head attention and record its inner SDPA call.

        If weights are requested there is none, so the call is run again without weights and
        dropout; that output is only compared.
        """
        name = self.observer.call_name()
        if name is None:
            return func(*args, **kwargs)
        arguments = inspect.signature(func).bind(*args, **kwargs).arguments
        provided, observer = False, self.observer
        substitute = observer if observer.provides else None

        def attention(call: dict[str, Any]) -> AttentionCall:
            cross = not same_memory(arguments["query"], arguments["key"])
            real = None if cross else not_padding(arguments.get("key_padding_mask"))
            return sdpa_call(call, name, cross=cross, real=real)

        def replacement(call: dict[str, Any], model_output: Callable[[], Tensor]) -> Tensor | None:
            nonlocal provided
            if substitute is None:
                return None
            read_call = functools.partial(attention, call)
            output = substitute.provide(
                read_call, name, lambda: to_four_dims(model_output()), refusal(call)
            )
            provided = output is not None
            return None if output is None else restore_shape(output, call)

        if substitute is not None and arguments.get("need_weights", True):
            reason = "its weights are requested: call it with need_weights=False"
            substitute.provide(_never_called, name, _never_called, reason)
        with observer.mute(), watch_sdpa(replacement=replacement) as sdpa_calls:
            result = func(*args, **kwargs)
        if provided:
            return result
        dropping = (
            bool(arguments.get("training", True)) and float(arguments.get("dropout_p") or 0.0) > 0.0
        )

        def read() -> AttentionCall:
            if not sdpa_calls:
                second_output, _ = run_again(func, arguments, sdpa_calls)
                if not dropping and not outputs_agree(second_output, result[0]):
                    raise ValueError(
                        "multi-head attention returned a different output when run again"
                    )
            return attention(sdpa_calls[-1][0])

        output_comparable = (
            bool(sdpa_calls) or not dropping
        )  # the output compared is the one the model used
        self.observer.observe(
            read, name, (lambda: to_four_dims(sdpa_calls[-1][1])) if output_comparable else None
        )
        return result

    def _operator(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Handle an operator called directly: SDPA is read, other attention kernels are listed."""
        namespace, _, name = str(func).partition(".")
        operator_name = name.partition(".")[0] if namespace == "aten" else ""
        if operator_name == "scaled_dot_product_attention":
            return self._sdpa(func, args, kwargs)
        if operator_name in OPERATORS or operator_name in LOG_OPERATORS:
            return self._softmax(func, args, kwargs, log=operator_name in LOG_OPERATORS)
        if (call := operator_call(func, args, kwargs)) is not None:
            return self.observer.on_kernel_call(call, call.compute)
        attends = ("attention" in name or "attn" in name) and "backward" not in name
        module = self.observer.running() if attends and namespace != "acutance" else None
        if module is not None:
            reason = f"{func} is called directly: report what it computes with acutance.tap"
            self.observer.unreadable(module, reason)
        result = func(*args, **kwargs)
        if self._softmaxes:
            self._softmaxes.follow(func, args, kwargs, result)
        return result

    def _softmax(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, log: bool
    ) -> Any:
        """Run a softmax and remember it until a matrix product uses its result."""
        unreadable_reason = ""
        if func in NOISY:  # (logits, tau, hard, eps, dim)
            scores = args[0] if args else kwargs.get("logits")
            dim = kwargs.get("dim", args[4] if len(args) > 4 else -1)
            unreadable_reason = f"{func.__name__} adds noise to its scores"
        else:
            scores, dim = scores_of(args, kwargs)
        version = version_of(scores)
        with self.observer.mute():
            result = func(*args, **kwargs)
        module = self.observer.running()
        if scores is None or dim is None or module is None:
            return result
        if scores.is_nested:
            self.observer.unreadable(module, "its softmax is of a nested tensor")
        elif scores.layout is torch.strided and result.layout is torch.strided:
            heads = heads_of(self.observer.module_of(module))
            if heads is None:  # a softmax that is a module of its own: its attention is around it
                heads = heads_of(self.observer.module_of(module.rpartition(".")[0]))
            over_keys = could_be_over_keys(scores, dim, heads)
            if not over_keys and not unreadable_reason:
                unreadable_reason = (
                    f"a matrix product uses its softmax over dimension {dim % scores.dim()} of "
                    f"{tuple(scores.shape)}, and only softmaxes over the last are read: report "
                    "what it computes with acutance.tap"
                )
            if not over_keys and scores.shape[-1] == 1:
                return result  # one weight each: taps of a kernel, or a pooling
            with torch._C.DisableTorchFunction():
                if func is F.softmin:  # the softmax of what is negated, in memory of its own
                    scores = -scores
                    version = version_of(scores)
                self._softmaxes.add(
                    scores,
                    result,
                    module,
                    dim=dim,
                    version=version,
                    log=log,
                    unreadable_reason=unreadable_reason,
                    over_keys=over_keys,
                )
            if over_keys and self._scores is not None:
                self._scores.mark_weights(result)
        return result

    def _on_product(self, softmax: Softmax, doubt: Callable[[], str | None]) -> None:
        """Record the scores of a softmax that a matrix product uses."""
        name = self.observer.call_name() if softmax.over_keys else self.observer.running()
        if name is None:
            return
        try:
            if softmax.unreadable_reason:
                raise ValueError(softmax.unreadable_reason)
            if softmax.overwritten():
                raise ValueError("its scores were overwritten after the softmax")
            module = self.observer.module_of(name)
            heads, head_axis = heads_at_once(module), None
            if softmax.last and softmax.base.dim() == 4:
                base = name.partition("#")[0]
                head_axis = self._heads.place(
                    base, module, softmax.base.shape, heads, softmax.product_axes
                )
            scores = folded(softmax.base, softmax.dim, heads, head_axis)
            if self._scores is not None:
                with self.observer.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
                    products = products_of(self._scores.of(softmax.base), scores)
                self.observer.observe_products(*products, name)
                return
        except ValueError as error:
            self.observer.unreadable(name, str(error))
            return
        if softmax.left_out == 1:
            self.observer.unreadable(name, NO_VALUE)
        self.observer.observe_scores(scores, name, doubt)

    def _on_written_out(self) -> None:
        """List a product that takes weights which were computed without a softmax."""
        if (module := self.observer.running()) is not None:
            self.observer.unreadable(module, WRITTEN_OUT)

    def _on_unused(self, softmax: Softmax) -> None:
        """Note a four-dimensional softmax that no product used: it may still be attention."""
        if (
            softmax.log or not softmax.over_keys
        ):  # log-probabilities that nobody exponentiates: of an output, not weights
            return
        shape = tuple(softmax.scores.shape)
        if softmax.module is not None and len(shape) == 4:
            self.observer.unreadable(softmax.module, f"{NO_PRODUCT} {shape}")

    def _read_from_arguments(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], read: _Reader
    ) -> Any:
        """Run and record a function whose arguments describe its attention completely."""
        name = self.observer.call_name()
        if name is None:
            return func(*args, **kwargs)
        with self.observer.mute():
            result = func(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        self.observer.observe(lambda: read(args, kwargs, name), name, lambda: output)
        return result


def _never_called() -> Any:
    """Stands for the functions passed to ``provide`` with a refusal, which are not called."""
    raise AssertionError("a call that is refused cannot be read")


def _enclosing_captures() -> list[FunctionCapture]:
    """The enclosing captures, innermost first.

    The capture whose handler is running is off the mode stack, and so not among them.
    """
    stack = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in reversed(stack) if isinstance(mode, FunctionCapture)]
