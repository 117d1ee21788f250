"""Change attention in plain PyTorch code: SDPA, nn.MultiheadAttention, hand-written softmaxes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.capture.handwritten.scores import Scores, ScoreTracker
from acutance.capture.handwritten.softmax import (
    FEWEST,
    LOG_SOFTMAX,
    SOFTMAX,
    Softmax,
    Softmaxes,
    scores_of,
)
from acutance.capture.intercept import ATTENTION_FUNCTIONS, EXP
from acutance.capture.kernel_functions.calls import FunctionCall, operator_call
from acutance.capture.readers.torch_multihead import (
    changing_sdpa,
    changing_softmax,
    equivalent_sdpa_arguments,
)
from acutance.capture.readers.torch_sdpa import sdpa_arguments
from acutance.capture.torch_modes import leave
from acutance.masks import hides

__all__ = ["FunctionChange"]

_SDPA = F.scaled_dot_product_attention
_ATTENTION = {_SDPA, F.multi_head_attention_forward, *SOFTMAX, *LOG_SOFTMAX}
_HINT = "; to exclude it, give the law by layer; to scale it, use F.scaled_dot_product_attention"
_NO_PRODUCT = "its scores are not a product of queries and keys"
_WRITTEN_OUT = (
    "its weights were computed without a softmax call, as those that are exponentiated and divided "
    "by their sum"
)
_UNUSED = ", and no matrix product uses its softmax over keys"


class FunctionChanger(Protocol):
    """Decides what a :class:`FunctionChange` changes."""

    def muted(self) -> bool:
        """Whether this thread is inside a call that has already been changed."""

    def module_to_change(self) -> str | None:
        """Name of the running module if its scores are to be scaled, else None."""

    def on_kernel_call(self, call: FunctionCall, run: Callable[[], Any]) -> Any:
        """Run a call of an operator that is a kernel, with its queries scaled."""

    def changed_arguments(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of an SDPA call in module ``name``, with the query scaled and keys hidden."""

    def masked_arguments(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of an SDPA call with keys hidden; ``arguments`` itself if none are."""

    def factor_of_arguments(self, name: str, arguments: dict[str, Any]) -> Tensor:
        """Factor of the query, (B or 1, H or 1, L, 1), for an SDPA call with these arguments."""

    def changed_scores(self, name: str, scores: Tensor, narrow: torch.dtype) -> Tensor:
        """Scores of a softmax over the last dimension, scaled and with keys hidden.

        Args:
            name: name of the module.
            scores: input of the softmax, products of queries and keys with nothing but masks added.
            narrow: of the dtypes the scores passed through, the one whose lowest number, the usual
                mask value, is highest.
        """

    def could_be_over_keys(self, scores: Tensor, dim: int) -> bool:
        """Whether a softmax over ``dim`` in the running module could be attention's over keys."""

    def note_function(self, *, attention: bool = True) -> None:
        """Remember that attention may run through functions, so that later passes are followed.

        Args:
            attention: False if the function was ``exp``, which may begin a softmax.
        """

    def skip(self, name: str, reason: str) -> None:
        """Note that calls in a module may be attention but are not changed, with the reason."""

    def unreachable(self, name: str, reason: str) -> Exception:
        """Error for attention in module ``name`` that cannot be scaled, with the reason."""


class FunctionChange(TorchFunctionMode):
    """A torch-function mode that scales the queries or scores of attention calls."""

    def __init__(self, changer: FunctionChanger) -> None:
        super().__init__()
        self._changer = changer
        self._scores = ScoreTracker()
        self._softmaxes = Softmaxes(self._on_product, self._on_unused, self._on_written_out)

    def __exit__(self, *error: Any) -> None:
        """Stop following products and release them."""
        leave(self)
        self._softmaxes.finish()
        self._scores.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function; if it is attention, with scaled queries or scores."""
        arguments = dict(kwargs or {})
        if torch.compiler.is_compiling() or self._changer.muted():
            return func(*args, **arguments)
        func = ATTENTION_FUNCTIONS.get(func, func)
        if func in _ATTENTION:
            self._changer.note_function()
        elif func in EXP:
            self._changer.note_function(attention=False)
        if func is _SDPA:
            name = self._changer.module_to_change()
            if name is None:
                return func(*args, **arguments)
            return func(**self._changer.changed_arguments(name, sdpa_arguments(args, arguments)))
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, arguments)
        if func in SOFTMAX or func in LOG_SOFTMAX:
            return self._softmax(func, args, arguments)
        if (call := operator_call(func, args, arguments)) is not None:
            return self._changer.on_kernel_call(call, call.compute)
        if getattr(func, "__name__", "") == "flex_attention":
            self._changer.note_function()
            name = self._changer.module_to_change()
            if name is not None:
                raise self._changer.unreachable(name, "it calls flex_attention itself")
        result = self._scores.call(func, args, arguments)
        known = self._scores.of(result) if isinstance(result, Tensor) else None
        is_scores = known is not None and not known.weights
        if self._softmaxes or is_scores:
            self._softmaxes.follow(func, args, arguments, result, remember=is_scores)
        return result

    def _softmax(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a softmax with the products in its scores scaled.

        A softmax whose scores cannot be scaled is watched: using it as attention raises.
        """
        scores, dim = scores_of(args, kwargs)
        if scores is None or dim is None:
            return func(*args, **kwargs)
        name, known = self._changer.module_to_change(), self._scores.of(scores)
        active = known is not None and known.active
        if not _may_be_attention(scores, 2 if active else FEWEST):
            return func(*args, **kwargs)
        reason = ""
        if name is not None and (active or self._changer.could_be_over_keys(scores, dim)):
            reason = _why_not_scaled(scores, dim, known)
            if not reason:
                assert known is not None
                changed = self._changer.changed_scores(name, scores, known.narrow)
                kwargs = {key: value for key, value in kwargs.items() if value is not scores}
                args = (changed, *args[1:])
        result = func(*args, **kwargs)
        self._scores.mark_weights(result)
        if name is not None and reason:
            log = func in LOG_SOFTMAX
            with torch._C.DisableTorchFunction():
                self._softmaxes.add(
                    scores, result, name, dim=dim, log=log, unreadable_reason=reason
                )
        return result

    def _on_written_out(self) -> None:
        """Raise for weights computed without a softmax call that a matrix product uses."""
        name = self._changer.module_to_change()
        if name is not None:
            raise self._changer.unreachable(name, _WRITTEN_OUT + _HINT)

    def _on_product(self, softmax: Softmax, _: Callable[[], str | None]) -> None:
        """Raise for a matrix product with the softmax of scores that could not be scaled."""
        name = softmax.module or ""
        raise self._changer.unreachable(name, softmax.unreadable_reason + _HINT)

    def _on_unused(self, softmax: Softmax) -> None:
        """Note a four-dimensional softmax that no product used: it may still be attention."""
        if softmax.scores.dim() == 4 and not softmax.log and softmax.module is not None:
            self._changer.skip(softmax.module, f"{softmax.unreadable_reason}{_UNUSED}")

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Scale the inner SDPA call of multi-head attention, or its scores if it forms weights."""
        name = self._changer.module_to_change()
        if name is None:
            return func(*args, **kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments["need_weights"]:
            with changing_sdpa(lambda inner: self._changer.changed_arguments(name, inner)):
                return func(*args, **kwargs)
        arguments = equivalent_sdpa_arguments(func, bound.arguments)
        factor = self._changer.factor_of_arguments(name, arguments)

        masked = self._changer.masked_arguments(name, arguments)

        def query(inner: dict[str, Any]) -> dict[str, Any]:  # of a probe, which runs it without
            scaled = {**inner, "query": inner["query"] * factor}
            return scaled if masked is arguments else {**scaled, "attn_mask": masked["attn_mask"]}

        def scores(inner: Tensor) -> Tensor:
            scaled = scaled_weights(inner, factor, arguments)
            if masked is arguments:
                return scaled
            mask = masked["attn_mask"]
            hidden = hides(mask) if mask.is_floating_point() else torch.logical_not(mask)
            shape = (*arguments["query"].shape[:3], inner.shape[-1])
            return scaled.masked_fill(hidden.expand(shape).reshape(inner.shape), -torch.inf)

        with changing_sdpa(query), changing_softmax(scores):
            return func(*args, **kwargs)


def _why_not_scaled(scores: Tensor, dim: int, known: Scores | None) -> str:
    """Why a law cannot scale the input of a softmax; empty if it can.

    Args:
        scores: input of the softmax.
        dim: dimension of the softmax.
        known: how the scores were computed; None if not from a product.
    """
    if dim not in (-1, scores.dim() - 1):
        return f"its softmax is over dimension {dim} of {tuple(scores.shape)}"
    if known is None or not known.active:
        return _NO_PRODUCT
    return f"its scores {known.problem}" if known.problem else ""


def _may_be_attention(scores: Tensor, fewest: int) -> bool:
    """Whether a tensor can be attention scores: dense, floating, with enough dimensions."""
    return (
        scores.dim() >= fewest
        and scores.is_floating_point()
        and scores.layout is torch.strided
        and not scores.is_nested
        and scores.numel() > 0
    )


def scaled_weights(scores: Tensor, factor: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Scale the products in the scores that ``F.multi_head_attention_forward`` computes itself.

    Args:
        scores: (B · H, L, S), with the mask added.
        factor: (B or 1, H or 1, L, 1).
        arguments: the equivalent SDPA arguments, with an additive mask.

    Returns:
        (B · H, L, S), the products multiplied by ``factor`` and the mask added once.

    Example:
        >>> query, mask = torch.ones(1, 1, 1, 1), torch.tensor([[[[0.5, -torch.inf]]]])
        >>> arguments = {"query": query, "attn_mask": mask}
        >>> scaled_weights(
        ...     torch.tensor([[[2.5, -torch.inf]]]), torch.full((1, 1, 1, 1), 3.0), arguments
        ... )
        tensor([[[6.5000,   -inf]]])
    """
    mask = arguments.get("attn_mask")
    shape = (*arguments["query"].shape[:3], scores.shape[-1])
    products = scores
    if mask is not None:
        expanded_mask = mask.expand(shape).reshape(scores.shape)
        products = (scores - expanded_mask).masked_fill(hides(expanded_mask), 0.0)
    return scores + products * (factor - 1).expand(*shape[:3], 1).reshape(*scores.shape[:2], 1)
