"""Changes plain PyTorch attention: SDPA, nn.MultiheadAttention, softmaxes written by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.capture.entry_points import ATTENTION_DOORS, EXP
from acutance.capture.handwritten.products import Lineage, LineageError
from acutance.capture.handwritten.softmax import (
    FEWEST,
    LOG_SOFTMAX,
    SOFTMAX,
    Softmax,
    Softmaxes,
    scores_of,
)
from acutance.capture.readers.torch_multihead import changing_sdpa, changing_softmax, sdpa_instead
from acutance.capture.readers.torch_sdpa import sdpa_arguments
from acutance.capture.torch_modes import leave
from acutance.masks import hides

__all__ = ["FunctionChange"]

_SDPA = F.scaled_dot_product_attention
_ATTENTION = {_SDPA, F.multi_head_attention_forward, *SOFTMAX, *LOG_SOFTMAX}
_HINT = "; to exclude it, give the law by layer"
_UNTAKEN = ", and no matrix product uses its softmax over keys"


class FunctionChanger(Protocol):
    """Decides what a :class:`FunctionChange` changes."""

    def muted(self) -> bool:
        """Whether the present code is inside a call that is already dealt with."""

    def here(self) -> str | None:
        """Name of the module now running if its logits are to be scaled, else None."""

    def changed_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """SDPA's arguments with the query scaled and keys hidden."""

    def masked_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """SDPA's arguments with keys hidden; ``given`` itself if none are."""

    def factor_of_arguments(self, name: str, given: dict[str, Any]) -> Tensor:
        """Factor of the query, for a call of SDPA with these arguments in module ``name``."""

    def changed_scores(
        self, name: str, scores: Tensor, bare: Tensor, dim: int, narrow: torch.dtype
    ) -> Tensor:
        """A softmax's scores with their products scaled; ``bare`` is the scores less products."""

    def could_be_over_keys(self, scores: Tensor, dim: int) -> bool:
        """Whether a softmax over ``dim`` in the running module could be attention's over keys."""

    def noticed(self, *, attention: bool = True) -> None:
        """Note a call of a function that is or may be attention, or of ``exp``."""

    def skip(self, name: str, why: str) -> None:
        """Note calls of a module that may be attention and were left alone."""

    def unreachable(self, name: str, reason: str) -> Exception:
        """The error to raise when the attention of the module ``name`` cannot be changed."""


class FunctionChange(TorchFunctionMode):
    """A torch-function mode that scales the queries or scores of attention calls."""

    def __init__(self, changer: FunctionChanger) -> None:
        super().__init__()
        self._changer = changer
        self._lineage = Lineage(by_hand=self._by_hand)
        self._softmaxes = Softmaxes(self._weighed, self._unused)
        self._why: dict[str, str] = {}  # by module, why its softmax was left as it is

    def __exit__(self, *error: Any) -> None:
        """Stop following products and release them."""
        leave(self)
        self._softmaxes.finish()
        self._lineage.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function, with another query if it is attention."""
        given = dict(kwargs or {})
        if torch.compiler.is_compiling() or self._changer.muted():
            return func(*args, **given)
        func = ATTENTION_DOORS.get(func, func)
        if func in _ATTENTION:
            self._changer.noticed()
        elif func in EXP:
            self._changer.noticed(attention=False)
        if func is _SDPA:
            name = self._changer.here()
            if name is None:
                return func(*args, **given)
            return func(**self._changer.changed_arguments(name, sdpa_arguments(args, given)))
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, given)
        if func in SOFTMAX or func in LOG_SOFTMAX:
            return self._softmax(func, args, given)
        if getattr(func, "__name__", "") == "flex_attention":
            self._changer.noticed()
            name = self._changer.here()
            if name is not None:
                raise self._changer.unreachable(name, "it calls flex_attention itself")
        result = self._lineage.call(func, args, given)
        if self._softmaxes:
            self._softmaxes.called(func, args, given, result)
        return result

    def _softmax(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Scale what scores have of products; one that cannot be scaled must be no attention."""
        scores, dim = scores_of(args, kwargs)
        if scores is None or dim is None:
            return func(*args, **kwargs)
        name, active = self._changer.here(), self._lineage.is_active(scores)
        if not _may_be_attention(scores, 2 if active else FEWEST):
            return func(*args, **kwargs)
        over_keys = self._changer.could_be_over_keys(scores, dim)
        if name is None or not (over_keys or active):
            return self._weights(func, args, kwargs)
        bare, why = None, "its scores are not a product of queries and keys"
        if not over_keys:
            why = f"its softmax is over dimension {dim} of {tuple(scores.shape)}"
        elif active:
            try:
                bare = self._lineage.without_products(scores)
            except LineageError as error:
                why = str(error)
        if bare is None:
            result, log = self._weights(func, args, kwargs), func in LOG_SOFTMAX
            self._why[name] = why
            with torch._C.DisableTorchFunction():
                self._softmaxes.made(scores, result, name, dim=dim, log=log)
            return result
        narrow = self._lineage.narrowest(scores)
        changed = self._changer.changed_scores(name, scores, bare, dim, narrow)
        if args:
            return self._weights(func, (changed, *args[1:]), kwargs)
        return self._weights(func, (), {**kwargs, "input": changed})

    def _weights(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        self._lineage.weights(result)
        return result

    def _by_hand(self, why: str) -> None:
        """Handle the weights of a softmax without a softmax call, used in a matrix product."""
        name = self._changer.here()
        if name is not None:
            raise self._changer.unreachable(name, why + _HINT)

    def _weighed(self, softmax: Softmax, _: Callable[[], str | None]) -> None:
        """Handle a matrix product with the softmax of scores that were not scaled."""
        name = softmax.module or ""
        raise self._changer.unreachable(name, self._why[name] + _HINT)

    def _unused(self, softmax: Softmax) -> None:
        """Handle a softmax that no product used: with four dimensions it may still be attention."""
        if softmax.scores.dim() == 4 and not softmax.log and softmax.module is not None:
            self._changer.skip(softmax.module, f"{self._why[softmax.module]}{_UNTAKEN}")

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Scale the SDPA call inside, or the scores if weights are requested."""
        name = self._changer.here()
        if name is None:
            return func(*args, **kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments["need_weights"]:
            with changing_sdpa(lambda inner: self._changer.changed_arguments(name, inner)):
                return func(*args, **kwargs)
        given = sdpa_instead(func, bound.arguments)
        factor = self._changer.factor_of_arguments(name, given)

        masked = self._changer.masked_arguments(name, given)

        def query(inner: dict[str, Any]) -> dict[str, Any]:  # of a probe, which runs it without
            scaled = {**inner, "query": inner["query"] * factor}
            return scaled if masked is given else {**scaled, "attn_mask": masked["attn_mask"]}

        def scores(inner: Tensor) -> Tensor:
            scaled = scaled_weights(inner, factor, given)
            if masked is given:
                return scaled
            mask = masked["attn_mask"]
            hidden = hides(mask) if mask.is_floating_point() else torch.logical_not(mask)
            shape = (*given["query"].shape[:3], inner.shape[-1])
            return scaled.masked_fill(hidden.expand(shape).reshape(inner.shape), -torch.inf)

        with changing_sdpa(query), changing_softmax(scores):
            return func(*args, **kwargs)


def _may_be_attention(scores: Tensor, fewest: int) -> bool:
    return (
        scores.dim() >= fewest
        and scores.is_floating_point()
        and scores.layout is torch.strided
        and not scores.is_nested
        and scores.numel() > 0
    )


def scaled_weights(scores: Tensor, factor: Tensor, given: dict[str, Any]) -> Tensor:
    """The scores that ``F.multi_head_attention_forward`` computes when weights are requested.

    Args:
        scores: (B · H, L, S), the mask added.
        factor: (B or 1, H or 1, L, 1).
        given: what SDPA would be called with, the mask additive.

    Example:
        >>> query, mask = torch.ones(1, 1, 1, 1), torch.tensor([[[[0.5, -torch.inf]]]])
        >>> given = {"query": query, "attn_mask": mask}
        >>> scaled_weights(
        ...     torch.tensor([[[2.5, -torch.inf]]]), torch.full((1, 1, 1, 1), 3.0), given
        ... )
        tensor([[[6.5000,   -inf]]])
    """
    mask = given.get("attn_mask")
    each = (*given["query"].shape[:3], scores.shape[-1])
    products = scores
    if mask is not None:
        added = mask.expand(each).reshape(scores.shape)
        products = (scores - added).masked_fill(hides(added), 0.0)
    return scores + products * (factor - 1).expand(*each[:3], 1).reshape(*scores.shape[:2], 1)
