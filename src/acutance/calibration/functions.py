"""Changes the query of plain PyTorch attention: SDPA and nn.MultiheadAttention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.probing.functions import changing_sdpa, sdpa_arguments

__all__ = ["FunctionChange"]

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax}
_SDPA = F.scaled_dot_product_attention


class FunctionChanger(Protocol):
    """What a :class:`FunctionChange` asks."""

    def muted(self) -> bool:
        """Whether the present code is inside a call that is already dealt with."""

    def here(self) -> str | None:
        """Name of the running module if it is to be scaled, None for any other."""

    def changed_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """SDPA's arguments with the query scaled."""

    def unreachable(self, name: str, what: str) -> Exception:
        """The error for attention that cannot be scaled."""


class FunctionChange(TorchFunctionMode):
    """Sees every torch function while the model runs, and scales the query of attention."""

    def __init__(self, changer: FunctionChanger) -> None:
        super().__init__()
        self._changer = changer

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
        if func is _SDPA:
            name = self._changer.here()
            if name is None:
                return func(*args, **given)
            return func(**self._changer.changed_arguments(name, sdpa_arguments(args, given)))
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, given)
        if func in _SOFTMAX and _is_attention(args, given):
            name = self._changer.here()
            if name is not None:
                raise self._changer.unreachable(name, "its weights are formed by a softmax")
        elif getattr(func, "__name__", "") == "flex_attention":
            name = self._changer.here()
            if name is not None:
                raise self._changer.unreachable(name, "it calls flex_attention itself")
        return func(*args, **given)

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Scale the SDPA call inside; weights that are asked for are formed from its arguments."""
        name = self._changer.here()
        if name is None:
            return func(*args, **kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        with changing_sdpa(lambda inner: self._changer.changed_arguments(name, inner)) as seen:
            output, weights = func(**{**given, "need_weights": False})
        if given["need_weights"]:
            with torch._C.DisableTorchFunction():  # no softmax for a probe to take for attention
                weights = _weights(seen[-1][0])
            if given["average_attn_weights"]:
                weights = weights.mean(1)
            if given["query"].dim() == 2:
                weights = weights.squeeze(0)
        return output, weights


def _is_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    scores = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return (
        isinstance(scores, Tensor)
        and scores.dim() == 4
        and dim in (-1, 3)
        and scores.is_floating_point()
    )


def _weights(given: Mapping[str, Any]) -> Tensor:
    """The weights of an SDPA call that ``nn.MultiheadAttention`` makes, (B, H, L, S)."""
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    scores: Tensor = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    if given.get("is_causal"):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(torch.logical_not(mask), -math.inf)
        else:
            scores = scores + mask
    return scores.softmax(-1)
