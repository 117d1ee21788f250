"""Intercept attention of Hugging Face models at transformers' ``AttentionInterface``.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``. A
wrapper around the returned function passes each call, an :class:`InterfaceCall`, through the open
handlers. How it is read depends on the implementation that the layer asked for.

Example:
    >>> from acutance.reproduce import decoder
    >>> def double(call, run):
    ...     call.set_query(2 * call["query"])
    ...     return run()
    >>> with intercept(double):
    ...     _ = decoder()(torch.tensor([[1, 2, 3]]))
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import is_cross
from acutance.capture.intercept import Handlers, pass_on


class InterfaceCall:
    """One call of an attention function that transformers returned.

    Attributes:
        function: the attention function.
        implementation: its registered name.
        args: its positional arguments.
        kwargs: its keyword arguments.
        instead: what computes the call in place of the function; None for the function.
        provided: its output (B, Hq, L, Ev) if that was computed already.
    """

    __slots__ = ("_stored", "args", "function", "implementation", "instead", "kwargs", "provided")

    def __init__(
        self,
        function: Callable[..., Any],
        implementation: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.function, self.implementation = function, implementation
        self.args, self.kwargs = args, kwargs
        self.instead: Any = None
        self.provided: Tensor | None = None
        self._stored: dict[str, Any] | None = None

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
        kind = base_name(self.implementation)
        if uses_flash_masks(self.implementation):
            masks = _flash_masks(self.kwargs, query, key, mask, module)
            return {part: masks[part] for part in masks if part not in ("softcap", "sinks")}
        return _mask(kind, self["is_causal"], query, key, mask, module)

    def read(self, name: str) -> AttentionCall:
        """The call as its implementation reads it; ``name`` is that of the module.

        Raises:
            ValueError: if it cannot be read; the message is the reason.
        """
        if self.instead is not None:
            read: AttentionCall = self.instead.read(name)
            return read
        kwargs = self.kwargs if self._stored is None else self._stored
        return read_interface_call(self.function, self.implementation, name, self.args, kwargs)

    def replace(self, instead: Any) -> None:
        """Have another object compute the call: its ``run(call)`` and ``read(name)`` are called.

        Raises:
            ValueError: if something else does already.
        """
        if self.instead is not None:
            raise ValueError("two laws with windows cannot be applied to one layer")
        self.instead = instead

    def compute(self) -> Any:
        """The result of the function, or of what takes its place."""
        if self.provided is not None:
            return self.provided.transpose(1, 2).contiguous(), None
        if self.instead is not None:
            return self.instead.run(self)
        if self.kwargs.get("cache") is None:
            return self.function(*self.args, **self.kwargs)
        with stored_keys(self.kwargs) as self._stored:
            return self.function(*self.args, **self.kwargs)

    @staticmethod
    def output(result: Any) -> Tensor:
        """The output (B, Hq, L, Ev) in a result."""
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.transpose(1, 2)

    @property
    def can_be_provided(self) -> bool:
        """Whether nobody has computed it yet, or is to compute it."""
        return self.instead is None and self.provided is None

    def result_needed_because(self) -> str | None:
        """Why the function's own result is needed; None if another function's output will do."""
        kind = base_name(self.implementation)
        if kind != "sdpa" and not uses_flash_masks(self.implementation):
            return f"{kind} attention may return its weights, which only it computes"
        if self.kwargs.get("output_attentions"):
            return "its weights are requested"
        return None


_POSITIONAL = ("module", "query", "key", "value", "attention_mask")


#: Keywords that are read, and those that change nothing of the rows.
_KNOWN = {
    *_POSITIONAL,
    *("scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"),
    *("packed", "read_index", "write_index", "logits_indices", "block_table"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "position_ids"),
    *("cache_position", "layer_idx", "layer_head_mask", "head_mask", "training", "deterministic"),
    *("past_key_values", "past_key_value", "position_embeddings", "num_items_in_batch"),
    *("output_router_logits", "seq_idx"),
}


_PAGED = "paged attention stores its keys in a separate cache"


@contextmanager
def stored_keys(kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Context in which a paged cache notes the keys and values that it gives an attention function.

    Args:
        kwargs: keyword arguments of the function; ``cache`` is the cache, if there is one.

    Yields:
        The arguments as the function goes on with them: keys and values with the earlier ones, and
        no cache. They are complete after the call, and stay as given if it has no cache.
    """
    seen, cache = dict(kwargs), kwargs.get("cache")
    if cache is None or not hasattr(cache, "update"):
        yield seen
        return
    original = cache.update

    @functools.wraps(original)
    def update(*args: Any, **options: Any) -> Any:
        keys, values = original(*args, **options)
        if (options.get("kwargs") or {}).get("block_table") is None:
            seen.update(key=keys, value=values, packed=True)
            seen.pop("cache", None)
        return keys, values

    cache.update = update
    try:
        yield seen
    finally:
        del cache.update


def read_interface_call(
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
        "unknown": _unknown(base_name(implementation), accepts, arguments),
        "packed": bool(arguments.get("packed")),
    }
    if isinstance(positions := arguments.get("position_ids"), Tensor):
        call["positions"] = positions
    kind = base_name(implementation)
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


def _unknown(kind: str, accepts: frozenset[str], arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Keywords that are not read and may change the rows: not absent, and not swallowed."""
    return tuple(
        name
        for name in sorted(set(arguments) - _KNOWN)
        if arguments[name] is not None
        and arguments[name] is not False
        and _reads_keyword(kind, accepts, name)
    )


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


def base_name(implementation: str | None) -> str:
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
    name = base_name(implementation)
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
    if lengths is None and mask is None:
        lengths = packed_lengths(arguments.get("position_ids"), query, keys)
    return {
        "is_causal": bool(causal),
        "query_offset": keys - queries,
        "key_mask": mask[:, -keys:].bool() if isinstance(mask, Tensor) else None,
        "window": arguments.get("sliding_window"),
        "softcap": arguments.get("softcap") or None,
        "sinks": arguments.get("s_aux"),
        "cu_seqlens": lengths if isinstance(lengths, Tensor) else None,
    }


def packed_lengths(positions: Any, query: Tensor, keys: int) -> Tensor | None:
    """Cumulative lengths of the documents that flash attention tells apart by ``position_ids``.

    As in transformers: only in a batch of one sequence, and each document begins at the lowest
    position. With earlier keys in a cache there is one document.

    Args:
        positions: of the tokens, (1, L); anything else tells nothing.
        query: (B, Hq, L, E).
        keys: number of keys, S.

    Returns:
        Lengths (documents + 1,), of int32; None for one document. In compiled code, which cannot
        count documents, (L + 1,) with empty documents at the end.

    Example:
        >>> packed_lengths(torch.tensor([[0, 1, 2, 0, 1]]), torch.zeros(1, 4, 5, 8), 5)
        tensor([0, 3, 5], dtype=torch.int32)
    """
    if not isinstance(positions, Tensor) or tuple(positions.shape) != (1, query.shape[2]):
        return None
    if query.shape[0] != 1 or keys != query.shape[2]:
        return None
    row = positions[0]
    length, begins = len(row), row == row.min()
    if torch.compiler.is_compiling():
        places = torch.arange(length, device=row.device)
        starts = torch.where(begins, places, length).sort().values
    else:
        starts = begins.nonzero().flatten()
        if len(starts) < 2:
            return None
    return torch.cat([starts, starts.new_full((1,), length)]).to(torch.int32)


def _sinks(kind: str, arguments: dict[str, Any], module: Any) -> Tensor | None:
    """Learned sinks (Hq,) of a call: sdpa ignores them, eager functions have them in the module."""
    if kind == "sdpa":
        return None
    sinks = arguments.get("s_aux")
    if sinks is None and kind == "eager":
        sinks = getattr(module, "sinks", None)
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None


# -- the interface -------------------------------------------------------------------------------

#: What was wrapped: the interface, and its ``get_interface``.
_wrapped: list[tuple[Any, Callable[..., Any]]] = []


def _wrap_interface() -> None:
    """Replace ``get_interface`` so that it returns wrapped attention functions."""
    # a model of transformers has imported this; importing it here would cost others seconds
    modeling = sys.modules.get("transformers.modeling_utils")
    try:
        interface: Any = getattr(modeling, "AttentionInterface", None)
    except Exception:  # its lazy import fails: a torchvision that does not fit, for one
        return
    original = getattr(interface, "get_interface", None)
    if original is None or _wrapped:
        return
    known: dict[tuple[int, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():
            return _wrap_function(function, attn_implementation)
        cached = known.get((id(function), attn_implementation))  # holds it: its id is its alone
        if cached is None or cached[0] is not function:
            cached = function, _wrap_function(function, attn_implementation)
            known[id(function), attn_implementation] = cached
        return cached[1]

    _wrapped.append((interface, original))
    interface.get_interface = get_interface


def _unwrap_interface() -> None:
    """Put the original ``get_interface`` back."""
    for interface, original in _wrapped:
        interface.get_interface = original
    _wrapped.clear()


def _wrap_function(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Wrap an attention function so that each call passes through the open handlers."""

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        handlers = _handlers.changing if compiling else (*_handlers.changing, *_handlers.looking)
        call = InterfaceCall(function, implementation, args, kwargs)
        return pass_on(call, tuple(handlers))

    return attend


_handlers = Handlers(_wrap_interface, _unwrap_interface)
#: Context in which a handler is called around each call of transformers' attention functions, with
#: an :class:`InterfaceCall`. The first to open wraps ``get_interface``, the last restores it.
intercept = _handlers.intercept
