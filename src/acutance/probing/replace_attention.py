"""Providing: acutance's kernel computes the attention it measures, in the model's stead.

One pass gives the output and the statistics, so that measuring costs little more than the model
alone. The output is then that of another kernel, equal to rounding. What a capture might miss would
now change the model, so the first call of every kind is also computed by the model's own function,
and a layer whose outputs differ is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from acutance.capture.attention_call import VERIFY_TOLERANCE, AttentionCall, relative_error
from acutance.capture.torch_modes import unwatched
from acutance.rowstats import RowState, RowStatistics

__all__ = ["Provided", "Provider", "why_not"]


class Provided(NamedTuple):
    """An output instead of the model's own.

    Attributes:
        output: (B, Hq, L, Ev), with its gradient.
        stats: of the same rows, without.
        error: largest relative difference from the model's own output, None where that was not
            computed.
    """

    output: Tensor
    stats: RowStatistics
    error: float | None


class Provider:
    """Decides which calls are provided, and remembers which kinds agreed with the model.

    Attributes:
        suspects: layers whose own output differed, by name.
    """

    def __init__(self, always: bool) -> None:
        """``always`` compares every call, not only the first of its kind."""
        self._always = always
        self._equal: dict[tuple[object, ...], bool] = {}
        self._lock = threading.Lock()
        self.suspects: set[str] = set()

    def provide(
        self, call: AttentionCall, own: Callable[[], Tensor], noise: bool, gaps: bool
    ) -> Provided:
        """Compute a call.

        Args:
            call: what was captured.
            own: the model's own function, which gives (B, Hq, L, Ev).
            noise: also measure ``noise_gain``.
            gaps: also count keys by their distance below the maximum.

        Raises:
            ValueError: if it cannot be provided; the message is the reason.
        """
        if reason := why_not(call):
            raise ValueError(reason)
        if call.module in self.suspects:
            raise ValueError("its output differs from the model's own")
        with unwatched():
            output, stats = call.rebuilt(noise, gaps)
        if output.requires_grad:
            stats = RowStatistics(RowState(*(part.detach() for part in stats.state)), stats.backend)
        kind = (*call.kind(), bool((stats.state.n == 0).any()))
        with self._lock:
            equal = self._equal.get(kind)
        error = None
        if self._always or equal is None:
            with torch.no_grad():
                theirs = own()
            error = _difference(output, theirs)
            if not error <= VERIFY_TOLERANCE.get(theirs.dtype, 0.0):
                self.suspects.add(call.module)
                raise ValueError(f"its output differs from the model's own by {error:.2g} of it")
            with self._lock:
                self._equal[kind] = True
        return Provided(output, stats, error)


def why_not(call: AttentionCall) -> str | None:
    """Why a call cannot be provided, None if it can.

    Example:
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> why_not(AttentionCall("layer", "sdpa", x, x, x, dropout_p=0.1))
        'dropout makes its weights random'
    """
    if call.dropout_p > 0.0:
        return "dropout makes its weights random"
    for tensor in (call.query, call.key, call.value):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"its tensors have type {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return "its tensors are nested or sparse"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it runs inside a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "it runs under forward-mode differentiation"
    return None


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest relative difference over all rows; infinite where only one is a number."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    both = ours.isnan() & theirs.isnan()
    every = torch.ones(ours.shape[:3], dtype=torch.bool, device=ours.device)
    first, second = (part.detach().masked_fill(both, 0.0) for part in (ours, theirs))
    return relative_error(first, second, every)
