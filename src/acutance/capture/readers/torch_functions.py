"""Captures attention of plain PyTorch: SDPA, nn.MultiheadAttention, and softmax as a last resort.

A torch function mode sees every call of its own thread, so what runs elsewhere is never recorded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from acutance.capture.attention_call import AttentionCall
from acutance.capture.entry_points import ATTENTION_DOORS
from acutance.capture.handwritten.operands import stand_for
from acutance.capture.handwritten.products import Lineage
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
    HeadPlaces,
    could_be_over_keys,
    folded,
    heads_at_once,
    heads_of,
)
from acutance.capture.readers.acutance_attention import OWN, own_call
from acutance.capture.readers.huggingface import Observer, is_cross
from acutance.capture.readers.torch_flex import FLEX, flex_call
from acutance.capture.readers.torch_multihead import (
    agree,
    not_padding,
    run_again,
    same,
    watch_sdpa,
)
from acutance.capture.readers.torch_sdpa import as_given, four, refusal, sdpa_arguments, sdpa_call
from acutance.capture.torch_modes import leave
from acutance.masks import hidden_scores

__all__ = ["NO_PRODUCT", "FunctionCapture", "FunctionObserver"]

_SDPA = F.scaled_dot_product_attention
#: What each function is that is not simply run.
_KINDS: dict[Any, str] = {
    _SDPA: "sdpa",
    F.multi_head_attention_forward: "multihead",
    FLEX: "flex",
    OWN: "acutance",
    F.softmin: "softmax",
    **dict.fromkeys((*SOFTMAX, *NOISY), "softmax"),
    **dict.fromkeys(LOG_SOFTMAX, "log softmax"),
}
_KINDS |= {door: _KINDS[function] for door, function in ATTENTION_DOORS.items()}
_OPERATORS = {OpOverload, OpOverloadPacket}
_Reader = Callable[[Sequence[Any], dict[str, Any], str], AttentionCall]
#: Begins the reason of a softmax that is listed as not read.
NO_PRODUCT = "no matrix product uses a softmax over the last dimension of"


class FunctionObserver(Observer, Protocol):
    """The observer of a :class:`FunctionCapture`; it also tracks the running module."""

    def noticed(self) -> None:
        """Note a call of a function that is or may be attention."""

    def here(self) -> str | None:
        """Name for an attention call of the module now running, None outside the probed model."""

    def running(self) -> str | None:
        """Name of the module now running, None outside the probed model."""

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module an attention call was named after."""

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Record rows from their scores; ``doubt`` gives a reason not to trust them."""


@runtime_checkable
class ProductObserver(FunctionObserver, Protocol):
    """An observer of what scores that a model forms itself have of products.

    Attributes:
        products: whether it wants that instead of the scores.
    """

    products: bool

    def observe_products(self, products: Tensor, query: Tensor, key: Tensor, module: str) -> None:
        """Record the scaled products of queries and keys, −inf where the key is hidden."""


class FunctionCapture(TorchFunctionMode):
    """A torch-function mode that records the attention calls in its context."""

    def __init__(self, observer: FunctionObserver) -> None:
        super().__init__()
        self.observer = observer
        self._softmaxes = Softmaxes(self._weighed, self._unused)
        self._heads = HeadPlaces()
        asked = isinstance(observer, ProductObserver) and observer.products
        self._lineage = Lineage(operands=True) if asked else None

    def __exit__(self, *error: Any) -> None:
        """Softmaxes that wait for a product wait no longer."""
        leave(self)
        self._softmaxes.clear()
        for module, why in self._heads.undecided():
            self.observer.unreadable(module, why)
        if self._lineage is not None:
            self._lineage.clear()

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
        if kind is None and not self._softmaxes and self._lineage is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = dict(kwargs or {})
        if self.observer.muted():
            return func(*args, **kwargs)
        if kind is not None:
            self.observer.noticed()
        else:
            if self._lineage is None:
                result = func(*args, **kwargs)
            else:
                result = self._lineage.call(func, args, kwargs)
            if self._softmaxes:
                self._softmaxes.called(func, args, kwargs, result)
            return result
        func = ATTENTION_DOORS.get(func, func)
        if kind == "sdpa":
            return self._sdpa(func, args, kwargs)
        if kind == "multihead":
            return self._multi_head(func, args, kwargs)
        if kind == "flex":
            return self._whole(func, args, kwargs, flex_call)
        if kind == "acutance":
            return self._whole(func, args, kwargs, own_call)
        if kind == "operator":
            return self._operator(func, args, kwargs)
        return self._softmax(func, args, kwargs, log=kind == "log softmax")

    def _sdpa(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = self.observer.here()
        if name is None:
            return func(*args, **kwargs)
        given = sdpa_arguments(args, kwargs)

        def make() -> AttentionCall:
            return sdpa_call(given, name, cross=is_cross(name))

        def run() -> Any:
            with self.observer.mute():
                return func(*args, **kwargs)

        def own() -> Tensor:  # once more, to compare: it concerns no outer capture
            with ExitStack() as quiet:
                for capture in _enclosing_captures():
                    quiet.enter_context(capture.observer.mute())
                return four(run())

        provided = None
        if self.observer.provides:
            provided = self.observer.provide(make, name, own, refusal(given))
        if provided is not None:
            output = as_given(provided, given)
            for capture in _enclosing_captures():
                capture.saw(given, output)
            return output
        output = run()
        self.observer.observe(make, name, lambda: four(output))
        return output

    def saw(self, given: dict[str, Any], output: Tensor) -> None:
        """Record a call that another probe provided, which this mode does not see."""
        if self.observer.muted():
            return
        name = self.observer.here()
        if name is not None:
            self.observer.observe(
                lambda: sdpa_call(given, name, cross=is_cross(name)), name, lambda: four(output)
            )

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Watch the SDPA call inside, or run the call again if weights are requested.

        The second run requests no weights and has no dropout; its result is only compared.
        """
        name = self.observer.here()
        if name is None:
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        provided, observer = False, self.observer
        substitute = observer if observer.provides else None

        def attention(call: dict[str, Any]) -> AttentionCall:
            cross = not same(given["query"], given["key"])
            real = None if cross else not_padding(given.get("key_padding_mask"))
            return sdpa_call(call, name, cross=cross, real=real)

        def instead(call: dict[str, Any], own: Callable[[], Tensor]) -> Tensor | None:
            nonlocal provided
            if substitute is None:
                return None
            make = functools.partial(attention, call)
            output = substitute.provide(make, name, lambda: four(own()), refusal(call))
            provided = output is not None
            return None if output is None else as_given(output, call)

        if substitute is not None and given.get("need_weights", True):
            reason = "its weights are requested: call it with need_weights=False"
            substitute.provide(_refused, name, _refused, reason)
        with observer.mute(), watch_sdpa(instead=instead) as seen:
            result = func(*args, **kwargs)
        if provided:
            return result
        dropping = bool(given.get("training", True)) and float(given.get("dropout_p") or 0.0) > 0.0

        def read() -> AttentionCall:
            if not seen:
                again, _ = run_again(func, given, seen)
                if not dropping and not agree(again, result[0]):
                    raise ValueError(
                        "multi-head attention returned a different output when run again"
                    )
            return attention(seen[-1][0])

        whole = bool(seen) or not dropping  # the output compared is the one the model used
        self.observer.observe(read, name, (lambda: four(seen[-1][1])) if whole else None)
        return result

    def _operator(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Handle an operator called directly: SDPA is read, other attention kernels are listed."""
        space, _, name = str(func).partition(".")
        plain = name.partition(".")[0] if space == "aten" else ""
        if plain == "scaled_dot_product_attention":
            return self._sdpa(func, args, kwargs)
        if plain in OPERATORS or plain in LOG_OPERATORS:
            return self._softmax(func, args, kwargs, log=plain in LOG_OPERATORS)
        attends = "attention" in name or "attn" in name
        if attends and "backward" not in name and space != "acutance":
            module = self.observer.running()
            if module is not None:
                reason = f"{func} is called directly: report what it computes with acutance.tap"
                self.observer.unreadable(module, reason)
        result = func(*args, **kwargs)
        if self._softmaxes:
            self._softmaxes.called(func, args, kwargs, result)
        return result

    def _softmax(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, log: bool
    ) -> Any:
        why_not = ""
        if func in NOISY:  # (logits, tau, hard, eps, dim)
            scores = args[0] if args else kwargs.get("logits")
            dim = kwargs.get("dim", args[4] if len(args) > 4 else -1)
            why_not = f"{func.__name__} adds noise to its scores"
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
            if could_be_over_keys(scores, dim, heads):
                with torch._C.DisableTorchFunction():
                    if func is F.softmin:  # the softmax of what is negated, in memory of its own
                        scores = -scores
                        version = version_of(scores)
                    self._softmaxes.made(
                        scores, result, module, dim=dim, version=version, log=log, why_not=why_not
                    )
                if self._lineage is not None:
                    self._lineage.weights(result)
        return result

    def _weighed(self, softmax: Softmax, doubt: Callable[[], str | None]) -> None:
        """Record the scores of a softmax that a matrix product used, of any rank."""
        name = self.observer.here()
        if name is None:
            return
        try:
            if softmax.why_not:
                raise ValueError(softmax.why_not)
            if softmax.overwritten():
                raise ValueError("its scores were overwritten after the softmax")
            module = self.observer.module_of(name)
            heads, place = heads_at_once(module), None
            if softmax.last and softmax.base.dim() == 4:
                base = name.partition("#")[0]
                place = self._heads.place(base, module, softmax.base.shape, heads, softmax.places)
            scores = folded(softmax.base, softmax.dim, heads, place)
            if self._lineage is not None:
                self._multiplied(self._lineage, softmax, scores, heads, place, name)
                return
        except ValueError as error:
            self.observer.unreadable(name, str(error))
            return
        self.observer.observe_scores(scores, name, doubt)

    def _multiplied(
        self,
        lineage: Lineage,
        softmax: Softmax,
        scores: Tensor,
        heads: int | None,
        place: int | None,
        name: str,
    ) -> None:
        """Report what the scores of a softmax have of a product.

        Raises:
            ValueError: if they are made of none, of several, or in a way that cannot be followed.
        """
        with self.observer.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
            bare, pairs = lineage.without_products(softmax.base), lineage.pairs(softmax.base)
            if bare is None or len(pairs) != 1:
                many = f"the sum of {len(pairs)} products" if len(pairs) > 1 else "no product"
                raise ValueError(f"its scores are {many} of queries and keys")
            hidden = hidden_scores(scores, lineage.narrowest(softmax.base))
            wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
            products = scores.to(wide) - folded(bare, softmax.dim, heads, place).to(wide)
            query, key = stand_for(pairs[0], scores)
        assert isinstance(self.observer, ProductObserver)
        self.observer.observe_products(products.masked_fill(hidden, -torch.inf), query, key, name)

    def _unused(self, softmax: Softmax) -> None:
        """Handle a softmax that no product used: with four dimensions it may still be attention."""
        if softmax.log:  # log-probabilities that nobody exponentiates: of an output, not weights
            return
        shape = tuple(softmax.scores.shape)
        if softmax.module is not None and len(shape) == 4:
            self.observer.unreadable(softmax.module, f"{NO_PRODUCT} {shape}")

    def _whole(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], read: _Reader
    ) -> Any:
        """A function whose arguments say all that its attention is."""
        name = self.observer.here()
        if name is None:
            return func(*args, **kwargs)
        with self.observer.mute():
            result = func(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        self.observer.observe(lambda: read(args, kwargs, name), name, lambda: output)
        return result


def _refused() -> Any:
    """Whether ``provide`` refuses a call, without reading or computing anything."""
    raise AssertionError("a call that is refused is not read")


def _enclosing_captures() -> list[FunctionCapture]:
    """The enclosing captures, innermost first.

    The capture whose handler is running is off the mode stack, and so not among them.
    """
    stack = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in reversed(stack) if isinstance(mode, FunctionCapture)]
