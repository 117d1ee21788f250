"""Capture attention of Hugging Face models at transformers' ``AttentionInterface``.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``. A
wrapper around the returned function sees every argument and changes none.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall


class Observer(Protocol):
    """Receives the calls that a capture sees.

    Attributes:
        provides: whether it may compute calls in place of the model.
    """

    provides: bool

    def provide(
        self,
        read_call: Callable[[], AttentionCall],
        module: str,
        model_output: Callable[[], Tensor],
        refusal: str | None = None,
    ) -> Tensor | None:
        """Compute and record a call in place of the model, (B, Hq, L, Ev); None declines."""

    def call_name_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a module of the model; None for any other module."""

    def observe(
        self,
        read_call: Callable[[], AttentionCall],
        module: str,
        output: Callable[[], Tensor] | None,
    ) -> None:
        """Handle one attention call; ``output`` returns the model's (B, Hq, L, Ev)."""

    def unreadable(self, module: str, reason: str) -> None:
        """List attention that could not be read."""

    def muted(self) -> bool:
        """Whether this thread is inside a call that is already captured."""

    def mute(self) -> Any:
        """Context in which nested captures are ignored."""


class Changer(Protocol):
    """Changes the query of a call before it runs and before observers see it.

    A changer may also have a method ``changed_output(call, output)``: it receives the output
    (B, L, Hq, Ev) and returns the changed one, or None to keep it. It may also have a method
    ``instead(call)``: it returns an :class:`Instead` that computes the call, or None.
    """

    def changed_query(self, call: InterfaceCall) -> Tensor | None:
        """The changed query (B, Hq, L, E) of a call; None to keep it."""

    def mute(self) -> Any:
        """Context in which functions that the call uses are not changed."""


class Instead(Protocol):
    """Computes a call in the function's stead."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the function would return, for its arguments."""

    def read(self, name: str) -> AttentionCall:
        """The call whose rows are what is computed; ``name`` is its module's.

        Raises:
            ValueError: if no single call is; the message is the reason.
        """


class InterfaceCall:
    """One call of an attention function that transformers returned.

    Attributes:
        function: the attention function.
        implementation: its registered name.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    __slots__ = ("args", "function", "implementation", "kwargs")

    def __init__(
        self,
        function: Callable[..., Any],
        implementation: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.function, self.implementation = function, implementation
        self.args, self.kwargs = args, kwargs

    def __getitem__(self, name: str) -> Any:
        """An argument by name; None if it is absent."""
        return (
            self.positional()[_POSITIONAL.index(name)]
            if name in _POSITIONAL
            else self.kwargs.get(name)
        )

    def positional(self) -> tuple[Any, ...]:
        """Module, query, key, value and mask; None for absent ones."""
        if len(self.args) == len(_POSITIONAL):
            return self.args
        rest = _POSITIONAL[len(self.args) :]
        return (*self.args[: len(_POSITIONAL)], *(self.kwargs.get(name) for name in rest))

    def set_query(self, query: Tensor) -> None:
        """Replace the query of the call."""
        if len(self.args) > 1:
            self.args = (self.args[0], query, *self.args[2:])
        else:
            self.kwargs = {**self.kwargs, "query": query}

    def masks(self) -> dict[str, Any]:
        """The call's masks, as fields of an :class:`AttentionCall`."""
        if self["cache"] is not None:
            raise ValueError(_PAGED)
        module, query, key, _, mask = self.positional()
        kind = _base_name(self.implementation)
        if uses_flash_masks(self.implementation):
            masks = _flash_masks(self.kwargs, query, key, mask, module)
            return {part: masks[part] for part in masks if part not in ("softcap", "sinks")}
        return _mask(kind, self["is_causal"], query, key, mask, module)

    def read(self, name: str) -> AttentionCall:
        """The call as its implementation reads it; ``name`` is that of the module."""
        return _read_call(self.function, self.implementation, name, self.args, self.kwargs)


_POSITIONAL = ("module", "query", "key", "value", "attention_mask")
#: Keywords that are read, and those that change nothing of the rows.
_KNOWN = {
    *_POSITIONAL,
    *("scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "position_ids"),
    *("cache_position", "layer_idx", "layer_head_mask", "head_mask", "training", "deterministic"),
    *("past_key_values", "past_key_value", "position_embeddings", "num_items_in_batch"),
    *("output_router_logits", "seq_idx"),
}
_PAGED = "paged attention stores its keys in a separate cache"

#: Open captures, innermost last, and open changes. The first of them to open wraps
#: ``get_interface``, the last to close restores it.
_observers: list[Observer] = []
_changers: list[Changer] = []
_output_changers: list[Any] = []  # those that have changed_output
_instead: list[Any] = []  # those that have instead
_lock = threading.Lock()
_original: Callable[..., Any] | None = None


@contextmanager
def capture(observer: Observer) -> Iterator[None]:
    """Context in which an observer sees the calls of transformers' attention functions."""
    with _wrapping(_observers, observer):
        yield


@contextmanager
def change(changer: Changer) -> Iterator[None]:
    """Context in which a changer changes every query, and what else its methods change."""
    can = {"changed_output": _output_changers, "instead": _instead}
    groups = [group for method, group in can.items() if hasattr(changer, method)]
    with _wrapping(_changers, changer):
        for group in groups:
            group.append(changer)
        try:
            yield
        finally:
            for group in groups:
                group.remove(changer)


@contextmanager
def _wrapping(group: list[Any], member: Any) -> Iterator[None]:
    """Context in which ``member`` is in ``group`` and attention functions are wrapped."""
    # a model of transformers has imported this; importing it here would cost others seconds
    modeling = sys.modules.get("transformers.modeling_utils")
    try:
        interface: Any = getattr(modeling, "AttentionInterface", None)
    except Exception:  # its lazy import fails: a torchvision that does not fit, for one
        interface = None
    if not hasattr(interface, "get_interface"):
        yield
        return
    with _lock:
        if not _observers and not _changers:
            _wrap_interface(interface)
        group.append(member)
    try:
        yield
    finally:
        with _lock:
            group.remove(member)
            if not _observers and not _changers:
                interface.get_interface = _original


def _wrap_interface(interface: Any) -> None:
    """Replace ``get_interface`` so that it returns wrapped attention functions."""
    global _original
    _original = original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():
            return _wrap_function(function, attn_implementation)
        cache_key = id(function), attn_implementation, bool(_output_changers)
        cached = wrapped.get(cache_key)  # holds the function: its identity is its alone
        if cached is None or cached[0] is not function:
            cached = wrapped[cache_key] = function, _wrap_function(function, attn_implementation)
        return cached[1]

    wrapped: dict[tuple[int, str, bool], tuple[Callable[..., Any], Callable[..., Any]]] = {}
    interface.get_interface = get_interface


def _wrap_function(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Wrap an attention function so that changers change, and observers see, each call."""

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        result = attend(*args, **kwargs)
        for changer in tuple(_output_changers):
            call = InterfaceCall(function, implementation, args, kwargs)
            output = changer.changed_output(call, _output_of(result))
            if output is not None:
                result = (output, *result[1:]) if isinstance(result, tuple) else output
        return result

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        """Call the attention function with changed queries, and report the call to observers."""
        instead: Instead | None = None
        if _changers:
            call = InterfaceCall(function, implementation, args, kwargs)
            for changer in tuple(_changers):
                query = changer.changed_query(call)
                if query is not None:
                    call.set_query(query)
            for changer in tuple(_instead):
                another = changer.instead(call)
                if another is not None and instead is not None:
                    raise ValueError("two laws with windows cannot be applied to one layer")
                instead = instead or another
            args, kwargs = call.args, call.kwargs
        used = function if instead is None else instead.run
        if torch.compiler.is_compiling():  # a probe runs nothing compiled: no one is listening
            return used(*args, **kwargs)
        if not _observers:
            return _call_muted(tuple(_changers), used, args, kwargs)
        module = args[0] if args else kwargs.get("module")
        listening: list[tuple[Observer, str]] = []
        for observer in tuple(_observers):
            if observer.muted() or not isinstance(module, torch.nn.Module):
                continue
            name = observer.call_name_of(module)
            if name is not None:
                listening.append((observer, name))
        members: list[Observer | Changer] = [*_changers, *(each for each, _ in listening)]

        def run() -> Any:
            return _call_muted(members, used, args, kwargs)

        def model_output() -> Tensor:
            return _output_of(run()).transpose(1, 2)  # the interface returns (B, L, Hq, Ev)

        def read_call(name: str) -> Callable[[], AttentionCall]:
            if instead is not None:
                return functools.partial(instead.read, name)
            return functools.partial(_read_call, function, implementation, name, args, kwargs)

        provider, result = None, None
        for observer, name in listening:
            if not observer.provides or instead is not None:
                continue
            provided = observer.provide(
                read_call(name), name, model_output, _result_needed_because(implementation, kwargs)
            )
            if provided is not None:
                provider, result = observer, (provided.transpose(1, 2).contiguous(), None)
                break
        result = run() if result is None else result
        output = _output_of(result)
        for observer, name in listening:
            if observer is not provider:
                observer.observe(read_call(name), name, lambda: output.transpose(1, 2))
        return result

    return changed if _output_changers else attend


def _call_muted(
    members: Sequence[Observer | Changer],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function while these observers and changers ignore what it calls."""
    if len(members) == 1:
        with members[0].mute():
            return function(*args, **kwargs)
    with ExitStack() as quiet:
        for member in members:
            quiet.enter_context(member.mute())
        return function(*args, **kwargs)


def _output_of(result: Any) -> Tensor:
    """The output among the results of an attention function."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _result_needed_because(implementation: str, kwargs: dict[str, Any]) -> str | None:
    """Why the function's own result is needed; None if another function's output will do."""
    kind = _base_name(implementation)
    if kind != "sdpa" and not uses_flash_masks(implementation):
        return f"{kind} attention may return its weights, which only it computes"
    if kwargs.get("output_attentions"):
        return "its weights are requested"
    return None


def _read_call(
    function: Callable[..., Any],
    implementation: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> AttentionCall:
    """Read an interface call as its implementation reads it."""
    arguments = dict(zip(_POSITIONAL, args, strict=False))
    arguments.update(kwargs)
    if arguments.get("cache") is not None:
        raise ValueError(_PAGED)
    module, query, key, value = (arguments[part] for part in ("module", "query", "key", "value"))
    mask = arguments.get("attention_mask")
    accepts = _parameters(function)
    scale = arguments.get("scaling")
    call = {
        "module": name,
        "source": f"transformers {implementation or 'eager'}",
        "query": query,
        "key": key,
        "value": value,
        "scale": None if scale is None else float(scale),
        "dropout_p": float(arguments.get("dropout") or 0.0),
        "cross": is_cross(name, module),
        "unknown": tuple(sorted(set(arguments) - _KNOWN)),
    }
    kind = _base_name(implementation)
    if uses_flash_masks(implementation):
        return AttentionCall(**call, **_flash_masks(arguments, query, key, mask, module))
    bias = (
        arguments.get("position_bias") if _reads_keyword(kind, accepts, "position_bias") else None
    )
    if isinstance(bias, Tensor):
        call["bias"] = bias[..., : key.shape[2]]
    if _reads_keyword(kind, accepts, "softcap") and arguments.get("softcap") is not None:
        call["softcap"] = float(arguments["softcap"])
    call["sinks"] = _sinks(kind, arguments, module)
    call.update(_mask(kind, arguments.get("is_causal"), query, key, mask, module))
    return AttentionCall(**call)


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def _reads_keyword(kind: str, accepts: frozenset[str], keyword: str) -> bool:
    """Whether the function reads a keyword, rather than ignoring it in ``**kwargs``."""
    return keyword in accepts or kind not in ("eager", "sdpa")


def _mask(
    kind: str, causal: bool | None, query: Tensor, key: Tensor, mask: Any, module: Any
) -> dict[str, Any]:
    """Mask arguments of an :class:`AttentionCall`, as this kind of implementation reads them."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        if kind == "eager":
            return {}
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return {"is_causal": bool(causal) and queries > 1}
    if not isinstance(mask, Tensor):
        if hasattr(mask, "mask_mod"):
            return {"attn_mask": _block_mask(mask, query, key)}
        raise ValueError(f"an attention mask of type {type(mask).__name__} is not supported")
    if mask.dim() == 2:
        return {"key_mask": mask[:, :keys].bool()}
    mask = mask[..., :keys]
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        mask = mask.bool()
    return {"attn_mask": mask}


def _block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """The boolean mask (B, H, L, S) equivalent to a FlexAttention BlockMask."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = query.shape[0], query.shape[1]
    shape = (batch, heads, query.shape[2], key.shape[2])
    result: Tensor = create_mask(mask.mask_mod, *shape, device=str(query.device))
    return result


def _base_name(implementation: str | None) -> str:
    """The name of an attention implementation, without a cache prefix such as ``"paged|"``."""
    return (implementation or "eager").removeprefix("paged|")


def uses_flash_masks(implementation: str | None) -> bool:
    """Whether an attention implementation follows the mask conventions of flash attention.

    It then receives only a 2-d padding mask, aligns its causal mask bottom-right, and applies the
    sliding window itself. This is read from the mask function that transformers registers under the
    name; if there is none, from the name.

    Args:
        implementation: a name registered with ``AttentionInterface``, such as
            ``"kernels-community/flash-attn2"``; ``"paged|"`` in front of it does not count.

    Example:
        >>> [
        ...     uses_flash_masks(name)
        ...     for name in ("flash_attention_2", "paged|my_flash", "sdpa", None)
        ... ]
        [True, True, False, False]
    """
    name = _base_name(implementation)
    masking = sys.modules.get("transformers.masking_utils")
    registered = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", {}).get(name)
    if registered is not None:
        return registered is getattr(masking, "flash_attention_mask", None)
    return "flash" in name


def _flash_masks(
    arguments: dict[str, Any], query: Tensor, key: Tensor, mask: Any, module: Any
) -> dict[str, Any]:
    """Mask arguments for flash attention: bottom-right causal mask, padding from a 2-d mask."""
    queries, keys = query.shape[2], key.shape[2]
    causal = arguments.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    lengths = arguments.get("cu_seq_lens_k")
    return {
        "is_causal": bool(causal),
        "query_offset": keys - queries,
        "key_mask": mask[:, -keys:].bool() if isinstance(mask, Tensor) else None,
        "window": arguments.get("sliding_window"),
        "softcap": arguments.get("softcap") or None,
        "sinks": arguments.get("s_aux"),
        "cu_seqlens": lengths if isinstance(lengths, Tensor) else None,
    }


def _sinks(kind: str, arguments: dict[str, Any], module: Any) -> Tensor | None:
    """Learned sinks (Hq,) of a call: sdpa ignores them, eager functions have them in the module."""
    if kind == "sdpa":
        return None
    sinks = arguments.get("s_aux")
    if sinks is None and kind == "eager":
        sinks = getattr(module, "sinks", None)
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None


def is_cross(name: str, module: Any = None) -> bool:
    """Whether a module is known to be cross-attention."""
    if getattr(module, "is_cross_attention", False):
        return True
    last = name.lower().split(".")[-2:]
    return any("cross" in part or "encdec" in part or part == "encoder_attn" for part in last)
