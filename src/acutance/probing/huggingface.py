"""Captures attention of Hugging Face models where every implementation is chosen.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``.
Wrapping what it returns shows every argument and changes none.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from acutance.probing.call import AttentionCall


class Observer(Protocol):
    """What a capture reports to."""

    def name_of(self, module: torch.nn.Module) -> str | None:
        """Qualified name of a probed module, None for any other."""

    def observe(
        self, make: Callable[[], AttentionCall], module: str, output: Callable[[], Tensor] | None
    ) -> None:
        """Record a call that took place."""

    def unreadable(self, module: str, reason: str) -> None:
        """List attention that took place and could not be read."""

    def muted(self) -> bool:
        """Whether the present code is inside a call that is being captured."""

    def mute(self) -> Any:
        """Context in which captures inside are ignored."""


#: Open captures, innermost last; the first to open wraps ``get_interface``, the last restores it.
_observers: list[Observer] = []
_lock = threading.Lock()
_original: Callable[..., Any] | None = None


@contextmanager
def capture(observer: Observer) -> Iterator[None]:
    """Wrap the attention functions transformers hands out, for the length of the context."""
    try:
        from transformers.modeling_utils import AttentionInterface
    except ImportError:  # transformers is not installed: nothing of it can be running
        yield
        return
    if not hasattr(AttentionInterface, "get_interface"):
        yield
        return
    with _lock:
        if not _observers:
            _wrap(AttentionInterface)
        _observers.append(observer)
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)
            if not _observers:
                AttentionInterface.get_interface = _original


def _wrap(interface: Any) -> None:
    global _original
    _original = original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        return _wrapped(original(self, attn_implementation, default), attn_implementation)

    interface.get_interface = get_interface


def _wrapped(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs.get("module")
        listening: list[tuple[Observer, str]] = []
        for observer in tuple(_observers):
            name = observer.name_of(module) if isinstance(module, torch.nn.Module) else None
            if name is not None and not observer.muted():
                listening.append((observer, name))
        with ExitStack() as quiet:
            for observer, _ in listening:
                quiet.enter_context(observer.mute())
            result = function(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        for observer, name in listening:
            observer.observe(
                functools.partial(_call, function, implementation, name, args, kwargs),
                name,
                lambda: output.transpose(1, 2),  # the interface returns (B, L, Hq, Ev)
            )
        return result

    return attend


def _call(
    function: Callable[..., Any],
    implementation: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> AttentionCall:
    """Read an interface call as its implementation reads it."""
    given = dict(zip(("module", "query", "key", "value", "attention_mask"), args, strict=False))
    given.update(kwargs)
    if given.get("cache") is not None:
        raise ValueError("paged attention keeps its keys in a cache of its own")
    module, query, key, value = (given[part] for part in ("module", "query", "key", "value"))
    mask = given.get("attention_mask")
    accepts = set(inspect.signature(function).parameters)
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
    }
    kind = implementation or "eager"
    if kind.startswith("flash") or "flash_attention" in kind:
        return AttentionCall(**call, **_flash(given, query, key, mask, module))
    bias = given.get("position_bias") if _takes(kind, accepts, "position_bias") else None
    if isinstance(bias, Tensor):
        call["bias"] = bias[..., : key.shape[2]]
    if _takes(kind, accepts, "softcap") and given.get("softcap") is not None:
        call["softcap"] = float(given["softcap"])
    call["sinks"] = _sinks(kind, given, module)
    call.update(_mask(kind, given.get("is_causal"), query, key, mask, module))
    return AttentionCall(**call)


def _takes(kind: str, accepts: set[str], keyword: str) -> bool:
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
        raise ValueError(f"an attention mask of type {type(mask).__name__} is not understood")
    if mask.dim() == 2:
        return {"key_mask": mask[:, :keys].bool()}
    mask = mask[..., :keys]
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        mask = mask.bool()
    return {"attn_mask": mask}


def _block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """The boolean mask a flex BlockMask stands for."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = query.shape[0], query.shape[1]
    shape = (batch, heads, query.shape[2], key.shape[2])
    result: Tensor = create_mask(mask.mask_mod, *shape, device=str(query.device))
    return result


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
    """Learned sinks; sdpa has no place for them, eager ones read their module's own."""
    if kind == "sdpa":
        return None
    sinks = given.get("s_aux")
    if sinks is None and kind == "eager":
        sinks = getattr(module, "sinks", None)
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None


def is_cross(name: str, module: Any = None) -> bool:
    """Whether a module's queries are of another sequence than its keys, as far as it says."""
    if getattr(module, "is_cross_attention", False):
        return True
    last = name.lower().split(".")[-2:]
    return any("cross" in part or "encdec" in part or part == "encoder_attn" for part in last)
