"""Captures attention of Hugging Face models where every implementation is chosen.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``.
Wrapping what it returns shows every argument and changes none.
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
    """What a capture reports to.

    Attributes:
        provides: whether it may compute calls itself.
    """

    provides: bool

    def provide(
        self,
        make: Callable[[], AttentionCall],
        module: str,
        own: Callable[[], Tensor],
        refuse: str | None = None,
    ) -> Tensor | None:
        """Compute and record a call, (B, Hq, L, Ev), in the model's stead; None leaves it alone."""

    def place_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a probed module, None for any other."""

    def observe(
        self, make: Callable[[], AttentionCall], module: str, output: Callable[[], Tensor] | None
    ) -> None:
        """Handle one attention call."""

    def unreadable(self, module: str, reason: str) -> None:
        """List attention that could not be read."""

    def muted(self) -> bool:
        """Whether the present code is inside a call that is being captured."""

    def mute(self) -> Any:
        """Context in which captures inside are ignored."""


class Changer(Protocol):
    """Changes the query of a call before it runs and before observers see it.

    A changer may also have a method ``changed_output(call, output)``: it receives the output
    (B, L, Hq, Ev) and returns the changed one, or None to keep it. It may also have a method
    ``instead(call)``: it returns an :class:`Instead` that computes the call, or None.
    """

    def changed_query(self, call: InterfaceCall) -> Tensor | None:
        """The changed query; None to keep the call's."""

    def mute(self) -> Any:
        """Context in which the functions that the call uses are left alone."""


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
    """One call of an attention function that transformers handed out.

    Attributes:
        function: what is called.
        implementation: its name.
        args: its positional arguments.
        kwargs: its keywords.
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
        """An argument by name, None where there is none."""
        return (
            self.positional()[_POSITIONAL.index(name)]
            if name in _POSITIONAL
            else self.kwargs.get(name)
        )

    def positional(self) -> tuple[Any, ...]:
        """Module, query, key, value and mask, None where there is none."""
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
            masks = _flash(self.kwargs, query, key, mask, module)
            return {part: masks[part] for part in masks if part not in ("softcap", "sinks")}
        return _mask(kind, self["is_causal"], query, key, mask, module)

    def read(self, name: str) -> AttentionCall:
        """The call as its implementation reads it; ``name`` is its module's."""
        return _call(self.function, self.implementation, name, self.args, self.kwargs)


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
    """Wrap the attention functions transformers hands out, for the length of the context."""
    with _among(_observers, observer):
        yield


@contextmanager
def change(changer: Changer) -> Iterator[None]:
    """Let a changer change every query, and what else it can, in the context."""
    can = {"changed_output": _output_changers, "instead": _instead}
    groups = [group for method, group in can.items() if hasattr(changer, method)]
    with _among(_changers, changer):
        for group in groups:
            group.append(changer)
        try:
            yield
        finally:
            for group in groups:
                group.remove(changer)


@contextmanager
def _among(group: list[Any], member: Any) -> Iterator[None]:
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
            _wrap(interface)
        group.append(member)
    try:
        yield
    finally:
        with _lock:
            group.remove(member)
            if not _observers and not _changers:
                interface.get_interface = _original


def _wrap(interface: Any) -> None:
    global _original
    _original = original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():
            return _wrapped(function, attn_implementation)
        place = id(function), attn_implementation, bool(_output_changers)
        known = wrapped.get(place)  # holds the function: its identity is its alone
        if known is None or known[0] is not function:
            known = wrapped[place] = function, _wrapped(function, attn_implementation)
        return known[1]

    wrapped: dict[tuple[int, str, bool], tuple[Callable[..., Any], Callable[..., Any]]] = {}
    interface.get_interface = get_interface


def _wrapped(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        result = attend(*args, **kwargs)
        for changer in tuple(_output_changers):
            call = InterfaceCall(function, implementation, args, kwargs)
            output = changer.changed_output(call, _of(result))
            if output is not None:
                result = (output, *result[1:]) if isinstance(result, tuple) else output
        return result

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
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
            return _quietly(tuple(_changers), used, args, kwargs)
        module = args[0] if args else kwargs.get("module")
        listening: list[tuple[Observer, str]] = []
        for observer in tuple(_observers):
            if observer.muted() or not isinstance(module, torch.nn.Module):
                continue
            name = observer.place_of(module)
            if name is not None:
                listening.append((observer, name))
        members: list[Observer | Changer] = [*_changers, *(each for each, _ in listening)]

        def run() -> Any:
            return _quietly(members, used, args, kwargs)

        def own() -> Tensor:
            return _of(run()).transpose(1, 2)  # the interface returns (B, L, Hq, Ev)

        def make(name: str) -> Callable[[], AttentionCall]:
            if instead is not None:
                return functools.partial(instead.read, name)
            return functools.partial(_call, function, implementation, name, args, kwargs)

        provider, result = None, None
        for observer, name in listening:
            if not observer.provides or instead is not None:
                continue
            provided = observer.provide(make(name), name, own, _keeps(implementation, kwargs))
            if provided is not None:
                provider, result = observer, (provided.transpose(1, 2).contiguous(), None)
                break
        result = run() if result is None else result
        output = _of(result)
        for observer, name in listening:
            if observer is not provider:
                observer.observe(make(name), name, lambda: output.transpose(1, 2))
        return result

    return changed if _output_changers else attend


def _quietly(
    members: Sequence[Observer | Changer],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function while these ignore what it calls."""
    if len(members) == 1:
        with members[0].mute():
            return function(*args, **kwargs)
    with ExitStack() as quiet:
        for member in members:
            quiet.enter_context(member.mute())
        return function(*args, **kwargs)


def _of(result: Any) -> Tensor:
    """The output among what an attention function returns."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _keeps(implementation: str, kwargs: dict[str, Any]) -> str | None:
    """Why the function's own result is needed; None if only its output is."""
    kind = _base_name(implementation)
    if kind != "sdpa" and not uses_flash_masks(implementation):
        return f"{kind} attention may return its weights, which only it computes"
    if kwargs.get("output_attentions"):
        return "its weights are requested"
    return None


def _call(
    function: Callable[..., Any],
    implementation: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> AttentionCall:
    """Read an interface call as its implementation reads it."""
    given = dict(zip(_POSITIONAL, args, strict=False))
    given.update(kwargs)
    if given.get("cache") is not None:
        raise ValueError(_PAGED)
    module, query, key, value = (given[part] for part in ("module", "query", "key", "value"))
    mask = given.get("attention_mask")
    accepts = _parameters(function)
    scale = given.get("scaling")
    call = {
        "module": name,
        "source": f"transformers {implementation or 'eager'}",
        "query": query,
        "key": key,
        "value": value,
        "scale": None if scale is None else float(scale),
        "dropout_p": float(given.get("dropout") or 0.0),
        "cross": is_cross(name, module),
        "unknown": tuple(sorted(set(given) - _KNOWN)),
    }
    kind = _base_name(implementation)
    if uses_flash_masks(implementation):
        return AttentionCall(**call, **_flash(given, query, key, mask, module))
    bias = given.get("position_bias") if _takes(kind, accepts, "position_bias") else None
    if isinstance(bias, Tensor):
        call["bias"] = bias[..., : key.shape[2]]
    if _takes(kind, accepts, "softcap") and given.get("softcap") is not None:
        call["softcap"] = float(given["softcap"])
    call["sinks"] = _sinks(kind, given, module)
    call.update(_mask(kind, given.get("is_causal"), query, key, mask, module))
    return AttentionCall(**call)


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def _takes(kind: str, accepts: frozenset[str], keyword: str) -> bool:
    """Whether the function reads a keyword, rather than letting it fall into ``**kwargs``."""
    return keyword in accepts or kind not in ("eager", "sdpa")


def _mask(
    kind: str, causal: bool | None, query: Tensor, key: Tensor, mask: Any, module: Any
) -> dict[str, Any]:
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
    """The boolean mask equivalent to a flex BlockMask."""
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
    sliding window itself. This is read from the mask function that transformers registers under
    the name or, if there is none, from the name itself.

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


def _flash(
    given: dict[str, Any], query: Tensor, key: Tensor, mask: Any, module: Any
) -> dict[str, Any]:
    """Flash attention aligns its causal mask bottom-right and reads padding from a 2-d mask."""
    queries, keys = query.shape[2], key.shape[2]
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    lengths = given.get("cu_seq_lens_k")
    return {
        "is_causal": bool(causal),
        "query_offset": keys - queries,
        "key_mask": mask[:, -keys:].bool() if isinstance(mask, Tensor) else None,
        "window": given.get("sliding_window"),
        "softcap": given.get("softcap") or None,
        "sinks": given.get("s_aux"),
        "cu_seqlens": lengths if isinstance(lengths, Tensor) else None,
    }


def _sinks(kind: str, given: dict[str, Any], module: Any) -> Tensor | None:
    """Learned sinks: not supported by sdpa; eager functions read them from their module."""
    if kind == "sdpa":
        return None
    sinks = given.get("s_aux")
    if sinks is None and kind == "eager":
        sinks = getattr(module, "sinks", None)
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None


def is_cross(name: str, module: Any = None) -> bool:
    """Whether a module is known to be cross-attention."""
    if getattr(module, "is_cross_attention", False):
        return True
    last = name.lower().split(".")[-2:]
    return any("cross" in part or "encdec" in part or part == "encoder_attn" for part in last)
