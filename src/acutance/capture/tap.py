"""tap: report attention that a model computes in a way that cannot be captured."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from acutance.capture.function_mode import FunctionMode
from acutance.capture.intercept import notify_all
from acutance.capture.listener import Listener
from acutance.capture.readers.functions import call_from_arguments


def tap(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tap:
    """Report the attention computed inside this context to every open probe.

    Use it for attention that a probe cannot see, such as a kernel called directly, or of which it
    sees only the softmax. Probes read nothing else inside the context. It costs almost nothing if
    no probe is open.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev); ``verify`` and ``noise`` need it.
        attn_mask: this and the options below are those of :func:`acutance.attention`.
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None for 1/√E.
        dropout_p: if above 0, the output is not compared.
        query_offset: position of query 0 among the keys.
        window: sliding window, in keys.
        key_mask: boolean (B, S).
        cu_seqlens: cumulative document lengths.
        bias: added to the scores.
        softcap: bound of the scaled scores.
        sinks: (Hq,).

    Returns:
        A context manager. Set its ``output``, (B, Hq, L, Ev), so that ``verify`` can compare.
        Inputs that do not fit together are listed in :attr:`acutance.HeadSummary.unread`; the model
        runs on.

    Example:
        >>> import torch, acutance
        >>> class Mine(torch.nn.Module):
        ...     def forward(self, x):
        ...         with acutance.tap(x, x, x, scale=0.5) as told:
        ...             weights = torch.exp(0.5 * x @ x.mT)  # no softmax to be seen
        ...             told.output = (weights / weights.sum(-1, keepdim=True)) @ x
        ...         return told.output
        >>> with acutance.probe(model := Mine(), verify=True) as probe:
        ...     _ = model(torch.randn(1, 2, 5, 4))
        >>> probe.summary().layers[0].status
        'verified'
    """
    arguments = dict(locals())
    if torch.compiler.is_compiling():
        return Tap([], arguments)
    notify_all()
    stack = torch.overrides._get_current_function_mode_stack()
    modes = [mode for mode in stack if isinstance(mode, FunctionMode) and mode.looks]
    return Tap([mode.owner for mode in modes], arguments)


class Tap:
    """The context that :func:`tap` returns.

    Attributes:
        output: what the code inside computes, (B, Hq, L, Ev); None if not set.
    """

    def __init__(self, observers: Sequence[Listener], arguments: dict[str, Any]) -> None:
        self.output: Tensor | None = None
        self._observers, self._arguments = observers, arguments
        self._names: dict[Listener, str] = {}
        self._quiet = ExitStack()

    def only(self, observer: Listener) -> Tap:
        """Report to ``observer`` only, or to none if it is not among the open ones; return self."""
        self._observers = [candidate for candidate in self._observers if candidate is observer]
        return self

    def __enter__(self) -> Tap:
        for observer in self._observers:
            name = None if observer.muted() else observer.modules.call_name()
            if name is not None:
                self._names[observer] = name
                self._quiet.enter_context(observer.mute())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._quiet.close()
        if kind is not None:
            return
        output: Any = self.output
        compared = isinstance(output, Tensor) and isinstance(self._arguments.get("value"), Tensor)
        for observer, name in self._names.items():
            read_call = functools.partial(call_from_arguments, self._arguments, name, "tap")
            observer.observe(read_call, name, (lambda: output) if compared else None)
