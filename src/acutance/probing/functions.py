"""Captures attention of plain PyTorch: SDPA, nn.MultiheadAttention, and softmax as a last resort.

A torch function mode sees every call of its own thread, so what runs elsewhere is never recorded.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.masks import hides
from acutance.probing.call import VERIFY_TOLERANCE, AttentionCall
from acutance.probing.flex import FLEX, flex_call
from acutance.probing.huggingface import Observer, Substitute, is_cross
from acutance.probing.own import OWN, own_call
from acutance.probing.softmaxes import Softmaxes, fold, heads_of

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
#: Begins the reason of a softmax that is listed as not read.
NO_PRODUCT = "no matrix product takes a softmax over the last dimension of"


class FunctionObserver(Observer, Protocol):
    """What this capture reports to: it also asks which module is running."""

    def here(self) -> str | None:
        """Name for an attention call of the module now running, None outside the probed model."""

    def running(self) -> str | None:
        """Name of the module now running, None outside the probed model."""

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module an attention call was named after."""

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Record rows of which only the scores are known; ``doubt`` says what speaks against."""


class FunctionCapture(TorchFunctionMode):
    """Sees every torch function called in its context, and records those that are attention."""

    def __init__(self, observer: FunctionObserver) -> None:
        super().__init__()
        self.observer = observer
        self._softmaxes = Softmaxes(self._weighed, self._unused)

    def __exit__(self, *error: Any) -> None:
        """Softmaxes that wait for a product wait no longer."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._softmaxes.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function unchanged, then record it."""
        kwargs = dict(kwargs or {})
        if self.observer.muted():
            return func(*args, **kwargs)
        if func is _SDPA:
            return self._sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if func is FLEX:
            return self._flex(func, args, kwargs)
        if func is OWN:
            return self._own(func, args, kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._softmaxes:
            self._softmaxes.called(func, args, kwargs, result)
        return result

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
                for capture in _other_captures():
                    quiet.enter_context(capture.observer.mute())
                return _four(run())

        provided = None
        if isinstance(self.observer, Substitute):
            provided = self.observer.provide(make, name, own)
        if provided is not None:
            output = _as_given(provided, given)
            for capture in _other_captures():
                capture.saw(given, output)
            return output
        output = run()
        self.observer.observe(make, name, lambda: _four(output))
        return output

    def saw(self, given: dict[str, Any], output: Tensor) -> None:
        """Record a call that another probe provided, so that it never came by here."""
        if self.observer.muted():
            return
        name = self.observer.here()
        if name is not None:
            self.observer.observe(
                lambda: sdpa_call(given, name, cross=is_cross(name)), name, lambda: _four(output)
            )

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Watch the SDPA call inside; where weights are asked for there is none, so run once more.

        The second run asks for no weights and drops nothing; its result is compared, not used.
        """
        name = self.observer.here()
        if name is None:
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        provided, observer = False, self.observer
        substitute = observer if isinstance(observer, Substitute) else None

        def attention(call: dict[str, Any]) -> AttentionCall:
            cross = not _same(given["query"], given["key"])
            real = None if cross else _not_padding(given.get("key_padding_mask"))
            return sdpa_call(call, name, cross=cross, real=real)

        def instead(call: dict[str, Any], own: Callable[[], Tensor]) -> Tensor | None:
            nonlocal provided
            if substitute is None:
                return None
            make = functools.partial(attention, call)
            output = substitute.provide(make, name, lambda: _four(own()))
            provided = output is not None
            return None if output is None else _as_given(output, call)

        if substitute is not None and given.get("need_weights", True):
            reason = "its weights are asked for: call it with need_weights=False"
            substitute.provide(_nothing, name, _nothing, reason)
        with observer.mute(), _watch_sdpa(instead=instead) as seen:
            result = func(*args, **kwargs)
        if provided:
            return result
        dropping = bool(given.get("training", True)) and float(given.get("dropout_p") or 0.0) > 0.0

        def read() -> AttentionCall:
            if not seen:
                again, _ = _run_again(func, given, seen)
                if not dropping and not _agree(again, result[0]):
                    raise ValueError("multi-head attention gave another output when run again")
            return attention(seen[-1][0])

        whole = bool(seen) or not dropping  # the output compared is the one the model used
        self.observer.observe(read, name, (lambda: _four(seen[-1][1])) if whole else None)
        return result

    def _softmax(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        with self.observer.mute():
            result = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(scores, Tensor) and dim in (-1, scores.dim() - 1):
            with torch._C.DisableTorchFunction():
                self._softmaxes.made(scores, result, self.observer.running())
        return result

    def _weighed(self, scores: Tensor, doubt: Callable[[], str | None]) -> None:
        """A product took the softmax of these scores, of any rank."""
        name = self.observer.here()
        if name is None:
            return
        try:
            folded = fold(scores, heads_of(self.observer.module_of(name)))
        except ValueError as error:
            self.observer.unreadable(name, str(error))
            return
        self.observer.observe_scores(folded, name, doubt)

    def _unused(self, name: str | None, shape: tuple[int, ...]) -> None:
        """A softmax came to nothing; of four dimensions it may still be meant as attention."""
        if name is not None and len(shape) == 4:
            self.observer.unreadable(name, f"{NO_PRODUCT} {shape}")

    def _own(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = self.observer.here()
        if name is None:
            return func(*args, **kwargs)
        with self.observer.mute():
            result = func(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        self.observer.observe(lambda: own_call(args, kwargs, name), name, lambda: output)
        return result

    def _flex(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = self.observer.here()
        if name is None:
            return func(*args, **kwargs)
        with self.observer.mute():
            result = func(*args, **kwargs)
        self.observer.observe(lambda: flex_call(args, kwargs, name), name, lambda: result[0])
        return result


def _nothing() -> Any:
    """Stands where nothing is read: the call is refused before."""
    raise AssertionError("a refused call is not read")


def _other_captures() -> list[FunctionCapture]:
    """Captures around the one whose handler runs, which is off the stack; the innermost first."""
    stack = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in reversed(stack) if isinstance(mode, FunctionCapture)]


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
_Instead = Callable[[dict[str, Any], Callable[[], Tensor]], "Tensor | None"]
_thread = threading.local()  # lists: where this thread's SDPA calls go; changes: made to them first
_lock = threading.Lock()
_watchers = 0
_original: Callable[..., Tensor] = _SDPA


@contextmanager
def _watch_sdpa(*, alone: bool = False, instead: _Instead | None = None) -> Iterator[_Calls]:
    """Arguments and results of this thread's SDPA calls made through ``torch.nn.functional``.

    Args:
        alone: hide the calls from the contexts around this one.
        instead: what may compute a call in its stead.
    """
    global _watchers, _original
    seen: _Calls = []
    outer: tuple[_Calls, ...] = getattr(_thread, "lists", ())
    _thread.lists = (seen,) if alone else (*outer, seen)
    before: tuple[_Instead, ...] = getattr(_thread, "instead", ())
    _thread.instead = () if alone else before if instead is None else (*before, instead)
    with _lock:
        if _watchers == 0:
            _original = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _watched
        _watchers += 1
    try:
        yield seen
    finally:
        _thread.lists, _thread.instead = outer, before
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
    output = None
    for instead in reversed(getattr(_thread, "instead", ())):
        output = instead(given, lambda: _original(**given)) if output is None else output
    output = _original(**given) if output is None else output
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


def _as_given(output: Tensor, given: Mapping[str, Any]) -> Tensor:
    """An output (B, Hq, L, Ev) with the dimensions that SDPA would give it."""
    parts = [given[part] for part in ("query", "key", "value")]
    rank = parts[0].dim()
    if rank == 4:
        return output
    if rank < 4:
        return output.squeeze(1) if rank == 3 else output[0, 0]
    batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))
    shaped: Tensor = output.unflatten(0, batch)
    return shaped


def _four(tensor: Tensor) -> Tensor:
    """Give an output of SDPA its four dimensions."""
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.unsqueeze(1) if tensor.dim() == 3 else _flat(tensor)
