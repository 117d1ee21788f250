"""Intercept attention of Hugging Face models at transformers' ``AttentionInterface``.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``. A
wrapper around the returned function passes each call, an :class:`InterfaceCall`, through the open
handlers. How it is read depends on the implementation that the layer asked for.

Example:
    >>> from acutance.reproduce import decoder
    >>> def double(call, run):
    ...     call.query = 2 * call.query
    ...     return run()
    >>> with intercept(double):
    ...     _ = decoder()(torch.tensor([[1, 2, 3]]))
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, Carrier
from acutance.capture.find_layers import is_cross
from acutance.capture.intercept import Handlers, pass_on


class InterfaceCall(Carrier):
    """One call of an attention function that transformers returned.

    Args:
        function: the attention function.
        implementation: its registered name.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Attributes:
        function, implementation: as given.
        kind: the name without a cache prefix.
        is_flash: whether its masks are those of flash attention.
        module: the attention module.
        query, key, value: (B, heads, length, width).
        mask: the attention mask; None if there is none.
        kwargs: its other arguments.
        instead: what computes the call in place of the function; None for the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        implementation: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.function, self.implementation = function, implementation
        self.kind, self.is_flash = base_name(implementation), uses_flash_masks(implementation)
        if len(args) != len(_POSITIONAL):
            kwargs = dict(kwargs)
            args = (*args, *(kwargs.pop(name, None) for name in _POSITIONAL[len(args) :]))
        self.module, self.query, self.key, self.value, self.mask, *self._others = args
        self.kwargs = kwargs
        self.instead: Any = None

    def masks(self) -> dict[str, Any]:
        """The masks as the implementation reads them, as fields of an :class:`AttentionCall`.

        Flash attention aligns its causal mask bottom-right and has padding from a 2-d mask.

        Raises:
            ValueError: if they cannot be read; the message is the reason.
        """
        if self.kwargs.get("cache") is not None:
            raise ValueError("paged attention stores its keys in a separate cache")
        query, mask, causal = self.query, self.mask, self.kwargs.get("is_causal")
        queries, keys = query.shape[2], self.key.shape[2]
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        if self.is_flash:
            lengths = self.kwargs.get("cu_seq_lens_k")
            if lengths is None and mask is None:
                lengths = packed_lengths(self.kwargs.get("position_ids"), query, keys)
            return {
                "is_causal": bool(causal),
                "query_offset": keys - queries,
                "key_mask": mask[:, -keys:].bool() if isinstance(mask, Tensor) else None,
                "window": self.kwargs.get("sliding_window"),
                "cu_seqlens": lengths if isinstance(lengths, Tensor) else None,
            }
        if mask is None:
            return {"is_causal": bool(causal) and queries > 1 and self.kind != "eager"}
        if hasattr(mask, "mask_mod"):
            from torch.nn.attention.flex_attention import create_mask

            batch, heads = query.shape[:2]
            seen = create_mask(mask.mask_mod, batch, heads, queries, keys, str(query.device))
            return {"attn_mask": seen}
        if not isinstance(mask, Tensor):
            raise ValueError(f"an attention mask of type {type(mask).__name__} is not supported")
        if mask.dim() == 2:
            return {"key_mask": mask[:, :keys].bool()}
        mask = mask[..., :keys]
        return {"attn_mask": mask if mask.dtype.is_floating_point else mask.bool()}

    def read(self, name: str) -> AttentionCall:
        """The call as its implementation reads it; ``name`` is that of the module.

        Raises:
            ValueError: if it cannot be read; the message is the reason.
        """
        if self.instead is not None:
            read: AttentionCall = self.instead.read(name)
            return read
        module, key = self.module, self.key
        kind, read_names = self.kind, set(self.kwargs)
        if kind in ("eager", "sdpa"):  # whose functions swallow the rest
            read_names &= _ALWAYS_READ | _parameters(self.function)
        known = {part: self.kwargs[part] for part in read_names if self.kwargs[part] is not None}
        scale, bias, softcap = map(known.get, ("scaling", "position_bias", "softcap"))
        sinks, positions = map(known.get, ("s_aux", "position_ids"))
        if sinks is None and kind == "eager":
            sinks = getattr(module, "sinks", None)
        unknown = [
            part for part in sorted(read_names - _KNOWN) if known.get(part, False) is not False
        ]
        return AttentionCall(
            module=name,
            source=f"transformers {self.implementation or 'eager'}",
            query=self.query,
            key=key,
            value=self.value,
            scale=None if scale is None else float(scale),
            dropout_p=float(known.get("dropout") or 0.0),
            bias=bias[..., : key.shape[2]]
            if isinstance(bias, Tensor) and not self.is_flash
            else None,
            softcap=None if softcap is None or (self.is_flash and not softcap) else float(softcap),
            sinks=sinks.reshape(-1) if isinstance(sinks, Tensor) and kind != "sdpa" else None,
            cross=is_cross(name, module),
            unknown=tuple(unknown),
            packed=bool(known.get("packed")),
            positions=positions if isinstance(positions, Tensor) else None,
            **self.masks(),
        )

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
        cache = self.kwargs.get("cache")
        if not hasattr(cache, "update"):
            return self.original()
        with stored_keys(cache) as stored:
            result = self.original()
        if stored:
            self.key, self.value = stored
            others = {name: value for name, value in self.kwargs.items() if name != "cache"}
            self.kwargs = {**others, "packed": True}
        return result

    def original(self) -> Any:
        """The result of the function."""
        given = self.module, self.query, self.key, self.value, self.mask, *self._others
        return self.function(*given, **self.kwargs)

    def output(self, result: Any) -> Tensor:
        """The output (B, Hq, L, Ev) in a result."""
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.transpose(1, 2)

    @property
    def can_be_provided(self) -> bool:
        """Whether nobody has computed it yet, or is to compute it."""
        return self.instead is None and self.provided is None

    def result_needed_because(self) -> str | None:
        """Why the function's own result is needed; None if another function's output will do."""
        if self.kind != "sdpa" and not self.is_flash:
            return f"{self.kind} attention may return its weights, which only it computes"
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


#: Those that are read whatever parameters a function has.
_ALWAYS_READ = _KNOWN - {"softcap", "position_bias"}


@contextmanager
def stored_keys(cache: Any) -> Iterator[list[Any]]:
    """Context in which a paged cache notes the keys and values that it gives an attention function.

    Yields:
        After the call, the keys and the values, with the earlier ones; empty if they are in blocks.
    """
    stored: list[Any] = []
    original = cache.update

    @functools.wraps(original)
    def update(*args: Any, **options: Any) -> Any:
        keys, values = original(*args, **options)
        if (options.get("kwargs") or {}).get("block_table") is None:
            stored[:] = keys, values
        return keys, values

    cache.update = update
    try:
        yield stored
    finally:
        del cache.update


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


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
