"""Which tokens are padding: from the user's mask, the masks of modules, or the masks of calls.

A key that no row sees need not be padding: sparse attention selects few keys, and a strictly causal
mask hides the last one. So padding is read from masks over tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.model_cache import CACHE_ARGUMENTS
from acutance.masks import hidden_scores, hides

#: In the place of a mask's name: the model was called without one.
NO_MASK = "no mask"
_FROM_USER = "the given attention_mask"  # what a user's own mask is called in a summary
#: Names of masks over tokens, the one to believe first. True, or 1, is a real token in those of the
#: first group, and padding in those of the second.
_REAL = ("attention_mask", "input_mask", "token_mask", "mask")
_PADDED = (
    "src_key_padding_mask",
    "tgt_key_padding_mask",
    "key_padding_mask",
    "padding_mask",
    "pad_mask",
)
#: A module that takes one of these begins a sequence of its own: no mask around it is about that.
_INPUTS = {"input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values"}
#: Unless it takes this too: then it is a layer, which continues with the sequence around it.
_STATES = "hidden_states"
#: A mask of a module that takes one of these is about keys, which may be of another sequence.
_KEYS = {"key", "keys", "k"}
_ROWS_AT_ONCE = 1 << 22


class RealRows(NamedTuple):
    """Which rows of a call are real tokens.

    Attributes:
        rows: boolean (B, L), False on padding; None if all rows are real.
        source: name of the mask that says so; empty if there was none.
    """

    rows: Tensor | None
    source: str


@dataclass(frozen=True)
class PaddingMask:
    """A mask over the tokens of a batch.

    Attributes:
        real: boolean (B, T), False on padding; None if no token is padding.
        source: name of the mask.
        past: number of tokens in a cache before the first query; None if unknown.
        whole: whether the mask applies only to calls with as many queries as it has tokens.
    """

    real: Tensor | None
    source: str
    past: int | None = None
    whole: bool = False

    def rows(self, batch: int, queries: int, keys: int) -> Tensor | None:
        """Mask of a call's queries, (B, L); None if the sizes do not fit.

        Example:
            >>> mask = PaddingMask(torch.tensor([[True, True, False], [True, True, True]]), "", 1)
            >>> mask.rows(2, 3, 5).tolist()
            [[True, True, False], [True, True, True]]
            >>> mask.rows(2, 2, 3).tolist(), mask.rows(4, 3, 3)
            ([[True, False], [True, True]], None)
        """
        if self.real is None or self.real.shape[0] not in (1, batch):
            return None
        tokens, first = self.real.shape[1], 0
        if queries > tokens or (self.whole and queries != tokens):
            return None
        if queries < tokens:
            if self.past is not None and self.past + queries <= tokens:
                first = self.past
            elif keys == tokens:
                first = tokens - queries
            else:
                return None
        return self.real[:, first : first + queries].expand(batch, -1)

    def keys(self, rows: Tensor, keys: int) -> Tensor | None:
        """Mask of the keys of a call whose queries have the mask ``rows``; None if unknown."""
        if self.real is not None and self.real.shape[1] == keys:
            return self.real.expand(rows.shape[0], -1)
        return rows if rows.shape[1] == keys else None


class TokenMasks:
    """The token masks that one thread's running modules were called with, innermost last."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, PaddingMask]] = []

    def clear(self) -> None:
        """Forget all masks."""
        self._stack.clear()

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a module's forward pass with these arguments."""
        kind = type(module)
        forward = vars(kind).get("forward")  # what a scripted class has in its place raises errors
        if forward is None:
            forward = inspect.getattr_static(kind, "forward")
        parameters, masks, begins = _signature(forward)
        if not masks and not begins:
            return
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        for name in masks:
            whole = isinstance(arguments.get(name), Tensor) and arguments[name].dim() > 2
            if whole and self._stack:
                continue  # made of the mask of a module around this one
            mask = _token_mask(arguments.get(name), padded=name in _PADDED)
            if mask is not None:
                real = None if bool(mask.all()) else mask
                mask_here = PaddingMask(real, name, _cached_tokens(arguments), whole)
                self._stack.append((id(module), mask_here))
                return
        if begins and all(arguments.get(name) is None for name in masks):
            self._stack.append((id(module), PaddingMask(None, NO_MASK)))

    @staticmethod
    def reads(module: torch.nn.Module) -> bool:
        """Whether :meth:`enter` needs to be called for modules of this class."""
        _, masks, begins = _signature(inspect.getattr_static(type(module), "forward"))
        return bool(masks) or begins

    def leave(self, module: torch.nn.Module) -> None:
        """Handle the end of a module's forward pass."""
        if self._stack and self._stack[-1][0] == id(module):
            self._stack.pop()

    @property
    def innermost(self) -> PaddingMask | None:
        """The mask of the innermost running module that has one; None if there is none."""
        return self._stack[-1][1] if self._stack else None


@functools.lru_cache(maxsize=1024)
def _signature(forward: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """What the parameters of a module's ``forward`` say about padding masks.

    Returns:
        The names of all its parameters but ``self``; the names among them that hold a mask over
        tokens; and whether the module starts on raw inputs, such as ``input_ids``, so that a mask
        that is missing means that no token is padding. Empty and False if it cannot be inspected.
    """
    try:
        names = tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return (), (), False
    order: tuple[str, ...] = (*_REAL, *_PADDED)
    if not _KEYS.isdisjoint(names):
        order = ()
    elif (getattr(forward, "__module__", None) or "").startswith(
        "torch.nn."
    ):  # where ``mask`` is about pairs of tokens
        order = _PADDED
    masks = tuple(name for name in order if name in names)
    return names, masks, _STATES not in names and not _INPUTS.isdisjoint(names)


def _token_mask(mask: Any, *, padded: bool) -> Tensor | None:
    """A mask (B, T), or (B, 1, …, 1, T), as a boolean that is True on real tokens."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.numel() == 0 or mask.is_nested:
        return None
    if mask.dim() > 2:
        if any(size != 1 for size in mask.shape[1:-1]):
            return None
        mask = mask.reshape(mask.shape[0], mask.shape[-1])
    tokens: Tensor = mask.detach()
    with torch.no_grad():
        if tokens.is_floating_point():
            factors = bool(((tokens == 0) | (tokens == 1)).all()) and bool((tokens == 1).any())
            return tokens == 1 if factors and not padded else torch.logical_not(hides(tokens))
        real = tokens != 0
        return torch.logical_not(real) if padded else real


def _cached_tokens(arguments: Mapping[str, Any]) -> int | None:
    """Number of tokens in the cache that a module was called with; None without a cache."""
    cache = next(
        (arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None
    )
    if cache is None:
        return None
    try:
        return int(cache.get_seq_length())
    except Exception:  # a cache of another kind: not known
        return None


def checked_mask(mask: Any) -> PaddingMask | None:
    """Check the option ``attention_mask``.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if it is not (B, T), or holds other numbers than 0 and 1.

    Example:
        >>> checked_mask(torch.tensor([[1, 1, 0]])).real.tolist()
        [[True, True, False]]
        >>> checked_mask(torch.tensor([1, 2]))
        Traceback (most recent call last):
            ...
        ValueError: attention_mask must have shape (batch, tokens), got shape (2,)
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask must be a tensor (batch, tokens), got {type(mask).__name__}"
        )
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens), got shape {tuple(mask.shape)}"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"attention_mask must be 1 on real tokens and 0 on padding, got {mask}")
    real = mask.detach() != 0
    return PaddingMask(real, _FROM_USER)


def checked_rows(rows: Any) -> Tensor | None:
    """Check the option ``rows``: None for all real rows, else boolean (1 or B, L).

    Raises:
        TypeError: if it is neither a word nor a boolean tensor.
        ValueError: if it is another word, or does not have one or two dimensions.

    Example:
        >>> checked_rows("real"), checked_rows(torch.tensor([True, False]))
        (None, tensor([[ True, False]]))
        >>> checked_rows("some")
        Traceback (most recent call last):
            ...
        ValueError: rows must be 'real', 'all' or a boolean tensor (L,) or (B, L), got 'some'
    """
    if isinstance(rows, str) and rows in ("real", "all"):
        return None
    expected = "rows must be 'real', 'all' or a boolean tensor (L,) or (B, L), got"
    if isinstance(rows, str):
        raise ValueError(f"{expected} {rows!r}")
    if not isinstance(rows, Tensor):
        raise TypeError(f"{expected} {type(rows).__name__}")
    if rows.dtype != torch.bool or rows.dim() not in (1, 2):
        raise ValueError(f"{expected} {rows.dtype} of shape {tuple(rows.shape)}")
    return rows.detach() if rows.dim() == 2 else rows.detach()[None]


def real_rows_from_key_masks(call: AttentionCall) -> RealRows | None:
    """Real rows of self-attention from the call's key masks; None if they do not determine them.

    ``key_mask`` hides padding. A mask that is the same for all rows does too, if it differs between
    sequences; keys that it hides in all sequences alike may be real tokens.
    """
    batch, _, queries, _ = call.query.shape
    keys = call.key.shape[2]
    if call.cross or queries + call.query_offset != keys:
        return None
    real, source = call.key_mask, "key_mask"
    mask = call.attn_mask
    whole = mask is not None and mask.dim() == 4 and queries == keys == mask.shape[3]
    if (
        real is None
        and mask is not None
        and whole
        and mask.shape[0] == batch > 1
        and _same_for_all_rows(mask)
    ):
        first = mask[:, 0, 0]
        seen = first if mask.dtype == torch.bool else torch.logical_not(hides(first))
        if bool((seen != seen[:1]).any()):
            real, source = seen, "attn_mask"
    if real is None:
        return None
    real = real.expand(batch, -1)[:, keys - queries :]
    return RealRows(None if bool(real.all()) else real, source)


def _same_for_all_rows(mask: Tensor) -> bool:
    """Whether a mask (B, H, L, S) is the same for all heads and rows."""
    first, last = mask[:, 0, 0], mask[:, -1, -1]
    if not torch.equal(first, last):  # as where position hides keys
        return False
    steps = zip(mask.shape[1:3], mask.stride()[1:3], strict=True)
    expanded = all(size == 1 or step == 0 for size, step in steps)
    return expanded or bool((mask == mask[:, :1, :1]).all())


def real_rows_from_counts(n: Tensor, seen: Tensor) -> RealRows | None:
    """Real rows of self-attention with known scores; None if undetermined.

    Args:
        n: (B, H, L), keys that each row sees.
        seen: boolean (B, S), keys that any row sees.
    """
    alike = bool((n == seen.sum(-1)[:, None, None]).all()) and bool((seen != seen[:1]).any())
    return RealRows(seen, "masks") if alike else None


def call_sees_padding(call: AttentionCall, rows: Tensor, keys: Tensor) -> bool:
    """Whether a row of a real token sees a key that a padding mask marks as padding.

    If so, the mask is not used: it means something else.

    Args:
        call: the captured call.
        rows: boolean (B, L), True for queries of real tokens.
        keys: boolean (B, S), True for keys of real tokens.
    """
    padding = torch.logical_not(keys)
    seen = call.seen_keys()
    padding = padding if seen is None else padding & seen
    if not bool(padding.any()):
        return False
    batch, queries = rows.shape
    step = max(1, _ROWS_AT_ONCE // max(1, batch * keys.shape[1]))
    places = torch.arange(queries, device=rows.device)
    for start in range(0, queries, step):
        part = slice(start, start + step)
        sees = rows[:, part, None] & padding[:, None, :]
        near = call.seen_by_position(places[None, part])
        sees = sees if near is None else sees & near[:, 0]
        for mask in (call.attn_mask, call.bias):
            if mask is None:
                continue
            while mask.dim() < 4:
                mask = mask.unsqueeze(0)
            mask = mask if mask.shape[2] == 1 else mask[:, :, part]
            boolean = mask.dtype == torch.bool
            sees = sees & (mask.any(1) if boolean else ~hides(mask.amax(1)))
        if bool(sees.any()):
            return True
    return False


def scores_see_padding(scores: Tensor, rows: Tensor, keys: Tensor) -> bool:
    """Whether a real row of masked scores (B, H, L, S) sees a key that is called padding.

    ``rows`` and ``keys`` are as for :func:`call_sees_padding`.
    """
    padding = torch.logical_not(keys)
    batch, heads, queries, width = scores.shape
    step = max(1, _ROWS_AT_ONCE // max(1, batch * heads * width))
    for start in range(0, queries, step):
        part = slice(start, start + step)
        visible = torch.logical_not(hidden_scores(scores[:, :, part].detach().amax(1)))
        if bool((visible & rows[:, part, None] & padding[:, None, :]).any()):
            return True
    return False
