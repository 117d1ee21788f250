"""Replace a model's attention by acutance's kernel, which also returns the statistics.

Measuring then costs little more than running the model. Outputs equal the model's up to rounding.
The first call of each kind is also computed by the model's function; a layer whose outputs differ
is not replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from acutance.capture.attention_call import VERIFY_TOLERANCE, AttentionCall
from acutance.capture.intercept import unwatched
from acutance.probing.causes import relative_error
from acutance.rowstats import RowState, RowStatistics


class Provider:
    """Computes attention calls with acutance's kernel and compares them with the model's output.

    Attributes:
        suspects: names of the layers whose output differed; they are not replaced any more.
    """

    def __init__(self, always: bool) -> None:
        """Compare every call with the model's output if ``always``, else the first of each kind."""
        self._always = always
        self._equal: dict[tuple[object, ...], bool] = {}
        self._lock = threading.Lock()
        self.suspects: set[str] = set()

    def provide(
        self, call: AttentionCall, model_output: Callable[[], Tensor], noise: bool, gaps: bool
    ) -> tuple[Tensor, RowStatistics, float | None]:
        """Compute the output and row statistics of a captured call.

        Args:
            call: the captured call.
            model_output: runs the model's function and returns its output (B, Hq, L, Ev).
            noise: also measure ``noise_gain``.
            gaps: also count keys by their distance below the maximum.

        Returns:
            The output (B, Hq, L, Ev), differentiable; row statistics, detached; and the largest
            relative difference from the model's output, None if that was not computed.

        Raises:
            ValueError: if the call cannot be replaced; the message is the reason.
        """
        if reason := reason_not_provided(call):
            raise ValueError(reason)
        if call.module in self.suspects:
            raise ValueError("its output differs from the model's")
        with unwatched():
            output, stats = call.rebuild(noise, gaps)
        if output.requires_grad:
            stats = RowStatistics(RowState(*(part.detach() for part in stats.state)), stats.backend)
        kind = (*call.kind(), bool((stats.state.n == 0).any()))
        with self._lock:
            equal = self._equal.get(kind)
        error = None
        if self._always or equal is None:
            with torch.no_grad():
                theirs = model_output()
            error = _difference(output, theirs)
            if not error <= VERIFY_TOLERANCE.get(theirs.dtype, 0.0):
                self.suspects.add(call.module)
                raise ValueError(
                    f"its output differs from the model's by a relative error of {error:.2g}"
                )
            with self._lock:
                self._equal[kind] = True
        return output, stats, error


def reason_not_provided(call: AttentionCall) -> str | None:
    """Reason why acutance's kernel cannot replace a call; None if it can.

    Example:
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> reason_not_provided(AttentionCall("layer", "sdpa", x, x, x, dropout_p=0.1))
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
    """Largest relative difference of two outputs; infinite where exactly one of them is NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    both_nan = ours.isnan() & theirs.isnan()
    all_rows = torch.ones(ours.shape[:3], dtype=torch.bool, device=ours.device)
    first, second = (part.detach().masked_fill(both_nan, 0.0) for part in (ours, theirs))
    return relative_error(first, second, all_rows)
