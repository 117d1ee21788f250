"""Captures attention of plain PyTorch: SDPA, nn.MultiheadAttention, and softmax as a last resort.

A torch function mode sees every call of its own thread, so what runs elsewhere is never recorded.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.masks import hides
from acutance.probing.call import VERIFY_TOLERANCE, AttentionCall
from acutance.probing.huggingface import Observer, is_cross

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax}
_SDPA = F.scaled_dot_product_attention
_SDPA_NAMES = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


class FunctionObserver(Observer, Protocol):
    """What this capture reports to: it also asks which module is running."""

    def here(self) -> str | None:
        """Name for an attention call of the module now running, None outside the probed model."""

    def observe_scores(self, scores: Tensor, module: str) -> None:
        """Record rows of which only the scores are known."""


class FunctionCapture(TorchFunctionMode):
    """Sees every torch function called in its context, and records those that are attention."""

    def __init__(self, observer: FunctionObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function unchanged, then record it."""
        kwargs = dict(kwargs or {})
        if self._observer.muted():
            return func(*args, **kwargs)
        if func is _SDPA:
            return self._sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _sdpa(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = self._observer.here()
        if name is None:
            return func(*args, **kwargs)
        with self._observer.mute():
            output = func(*args, **kwargs)
        given = sdpa_arguments(args, kwargs)
        self._observer.observe(
            lambda: sdpa_call(given, name, cross=is_cross(name)), name, lambda: _four(output)
        )
        return output

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Watch the SDPA call inside; where weights are asked for there is none, so run once more.

        The second run asks for no weights and drops nothing; its result is compared, not used.
        """
        name = self._observer.here()
        if name is None:
            return func(*args, **kwargs)
        with self._observer.mute(), _watch_sdpa() as seen:
            result = func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        dropping = bool(given.get("training", True)) and float(given.get("dropout_p") or 0.0) > 0.0

        def read() -> AttentionCall:
            if not seen:
                again, _ = _run_again(func, given, seen)
                if not dropping and not _agree(again, result[0]):
                    raise ValueError("multi-head attention gave another output when run again")
            call, _ = seen[-1]
            cross = not _same(given["query"], given["key"])
            real = None if cross else _not_padding(given.get("key_padding_mask"))
            return sdpa_call(call, name, cross=cross, real=real)

        whole = bool(seen) or not dropping  # the output compared is the one the model used
        self._observer.observe(read, name, (lambda: _four(seen[-1][1])) if whole else None)
        return result

    def _softmax(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        with self._observer.mute():
            result = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if (
            isinstance(scores, Tensor)
            and scores.dim() == 4
            and dim in (-1, 3)
            and scores.is_floating_point()
        ):
            name = self._observer.here()
            if name is not None:
                self._observer.observe_scores(scores, name)
        return result


def _run_again(
    func: Callable[..., Any], given: Mapping[str, Any], seen: list[tuple[dict[str, Any], Tensor]]
) -> tuple[Tensor, Any]:
    """Run multi-head attention without weights and dropout, which concerns no outer watcher."""
    with _watch_sdpa(alone=True) as calls:
        result: tuple[Tensor, Any] = func(**{**given, "need_weights": False, "training": False})
    seen.extend(calls)
    return result


def _agree(again: Tensor, output: Tensor) -> bool:
    """Whether two outputs are equal up to rounding, rows aside that are not numbers in the second.

    A row that sees no key is 0 from SDPA and NaN where the weights are formed.
    """
    counts = output.isfinite()
    first, second = (torch.where(counts, part.detach(), 0.0) for part in (again, output))
    size = float(second.abs().max()) if second.numel() else 0.0
    tolerance = VERIFY_TOLERANCE.get(output.dtype, 1e-4) * max(size, 1e-30)
    return torch.allclose(first, second, rtol=0.0, atol=tolerance)


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are one and the same memory: a transposed view is another object."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def _not_padding(mask: Tensor | None) -> Tensor | None:
    """Boolean (B, L), False where a ``key_padding_mask`` marks padding: True, or very low."""
    if mask is None:
        return None
    real = torch.logical_not(mask if mask.dtype == torch.bool else hides(mask))
    return real if real.dim() == 2 else real.unsqueeze(0)


_Calls = list[tuple[dict[str, Any], Tensor]]
_Change = Callable[[dict[str, Any]], dict[str, Any]]
_thread = threading.local()  # lists: where this thread's SDPA calls go; changes: made to them first
_lock = threading.Lock()
_watchers = 0
_original: Callable[..., Tensor] = _SDPA


@contextmanager
def _watch_sdpa(*, alone: bool = False) -> Iterator[_Calls]:
    """Arguments and results of this thread's SDPA calls made through ``torch.nn.functional``.

    Args:
        alone: hide the calls from the contexts around this one.
    """
    global _watchers, _original
    seen: _Calls = []
    outer: tuple[_Calls, ...] = getattr(_thread, "lists", ())
    _thread.lists = (seen,) if alone else (*outer, seen)
    with _lock:
        if _watchers == 0:
            _original = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _watched
        _watchers += 1
    try:
        yield seen
    finally:
        _thread.lists = outer
        with _lock:
            _watchers -= 1
            if _watchers == 0:
                F.scaled_dot_product_attention = _original


@contextmanager
def changing_sdpa(change: _Change) -> Iterator[_Calls]:
    """Change the arguments of this thread's SDPA calls, as :func:`_watch_sdpa` then sees them.

    Inside a function that a mode handles no mode is active, so that only the name in
    ``torch.nn.functional`` is left to get between.
    """
    outer: tuple[_Change, ...] = getattr(_thread, "changes", ())
    _thread.changes = (*outer, change)
    try:
        with _watch_sdpa() as seen:
            yield seen
    finally:
        _thread.changes = outer


def _watched(*args: Any, **kwargs: Any) -> Tensor:
    given = sdpa_arguments(args, kwargs)
    for change in getattr(_thread, "changes", ()):
        given = change(given)
    output = _original(**given)
    for seen in getattr(_thread, "lists", ()):
        seen.append((given, output))
    return output


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``F.scaled_dot_product_attention``, by name."""
    return dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs)


def sdpa_call(
    given: Mapping[str, Any], name: str, *, cross: bool = False, real: Tensor | None = None
) -> AttentionCall:
    """Read the arguments of ``F.scaled_dot_product_attention``, broadcasting as it does."""
    parts = [given[part] for part in ("query", "key", "value")]
    rank = parts[0].dim()
    if rank == 3:  # (N, L, E) is one head each
        parts = [part.unsqueeze(1) for part in parts]
    elif rank == 2:
        parts = [part[None, None] for part in parts]
    batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))
    heads: tuple[int, ...] = ()
    if not given.get("enable_gqa", False):
        heads = torch.broadcast_shapes(*(part.shape[-3:-2] for part in parts))
    query, key, value = (
        _flat(part.expand(*batch, *(heads or part.shape[-3:-2]), *part.shape[-2:]))
        for part in parts
    )
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        if rank == 3 and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        elif rank > 4 and mask.dim() > 3:
            mask = _flat(mask.expand(*batch, *mask.shape[-3:]))
    scale = given.get("scale")
    return AttentionCall(
        module=name,
        source="scaled_dot_product_attention",
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        is_causal=bool(given.get("is_causal", False)),
        scale=None if scale is None else float(scale),
        dropout_p=float(given.get("dropout_p") or 0.0),
        cross=cross,
        real=real,
    )


def _flat(tensor: Tensor) -> Tensor:
    """Fold all dimensions before the last three into one batch."""
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)


def _four(tensor: Tensor) -> Tensor:
    """Give an output of SDPA its four dimensions."""
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.unsqueeze(1) if tensor.dim() == 3 else _flat(tensor)
