"""Which rows of a call enter the statistics: real tokens, among the rows a user selected.

What is padding is read from the user's mask, the masks of modules, or the masks of calls. A key
that no row sees need not be padding: sparse attention selects few keys, and a strictly causal mask
hides the last one. So padding is read from masks over tokens.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import CACHE_ARGUMENTS, block_of, is_cross
from acutance.masks import hidden_scores, shows

#: In the place of a mask's name: the model was called without one.
NO_MASK = "no mask"
#: Names of masks over tokens, the one to believe first. True, or 1, is a real token in those of the
#: first group, and padding in those of the second.
_REAL = ("attention_mask", "input_mask", "token_mask", "mask")
_PADDED = (
    *("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask"),
    *("padding_mask", "pad_mask"),
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


def tells_padding(module: torch.nn.Module) -> bool:
    """Whether modules of this class take masks over tokens, or begin a sequence without one."""
    _, masks, begins = _signature(inspect.getattr_static(type(module), "forward"))
    return bool(masks) or begins


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
    elif (getattr(forward, "__module__", None) or "").startswith("torch.nn."):
        order = _PADDED  # ``mask`` is about pairs of tokens there
    masks = tuple(name for name in order if name in names)
    return names, masks, _STATES not in names and not _INPUTS.isdisjoint(names)


def _token_mask(mask: Tensor, *, padded: bool) -> Tensor | None:
    """A mask (B, T), or (B, 1, …, 1, T), as a boolean that is True on real tokens."""
    if mask.dim() < 2 or mask.numel() == 0 or mask.is_nested:
        return None
    if mask.dim() > 2:
        if any(size != 1 for size in mask.shape[1:-1]):
            return None
        mask = mask.reshape(mask.shape[0], mask.shape[-1])
    tokens: Tensor = mask.detach()
    with torch.no_grad():
        if tokens.is_floating_point():
            factors = bool(((tokens == 0) | (tokens == 1)).all()) and bool((tokens == 1).any())
            return tokens == 1 if factors and not padded else shows(tokens)
        real = tokens != 0
        return torch.logical_not(real) if padded else real


def _cached_tokens(cache: Any) -> int | None:
    """Number of tokens in a cache; None if there is none, or it does not say."""
    try:
        return int(cache.get_seq_length())
    except Exception:  # a cache of another kind
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
    return PaddingMask(real, "the given attention_mask")


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
    keys, mask = call.key.shape[2], call.attn_mask
    if call.cross or queries + call.query_offset != keys:
        return None
    real, source = call.key_mask, "key_mask"
    square = mask is not None and mask.dim() == 4 and queries == keys == mask.shape[3]
    if real is None and mask is not None and square and mask.shape[0] == batch > 1:
        first = mask[:, 0, 0]
        seen = shows(first)
        if _same_for_all_rows(mask) and bool((seen != seen[:1]).any()):
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


def call_sees_padding(call: AttentionCall, rows: Tensor, keys: Tensor) -> bool:
    """Whether a row of a real token sees a key that a padding mask marks as padding.

    If so, the mask is not used: it means something else.

    Args:
        call: the captured call.
        rows: boolean (B, L), True for queries of real tokens.
        keys: boolean (B, S), True for keys of real tokens.
    """
    padding, seen = torch.logical_not(keys), call.seen_keys()
    padding = padding if seen is None else padding & seen
    if not bool(padding.any()):
        return False
    places = torch.arange(rows.shape[1], device=rows.device)

    def visible(part: slice) -> Iterator[Tensor]:
        near = call.seen_by_position(places[None, part])
        if near is not None:
            yield near[:, 0]
        for mask in (call.attn_mask, call.bias):
            if mask is None:
                continue
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask if mask.shape[2] == 1 else mask[:, :, part]
            yield shows(mask.amax(1))

    return _sees(rows, padding, visible)


def scores_see_padding(scores: Tensor, rows: Tensor, keys: Tensor) -> bool:
    """Whether a real row of masked scores (B, H, L, S) sees a key that is called padding.

    ``rows`` and ``keys`` are as for :func:`call_sees_padding`.
    """

    def visible(part: slice) -> Iterator[Tensor]:
        yield torch.logical_not(hidden_scores(scores[:, :, part].detach().amax(1)))

    return _sees(rows, torch.logical_not(keys), visible, heads=scores.shape[1])


def _sees(
    rows: Tensor, keys: Tensor, visible: Callable[[slice], Iterator[Tensor]], heads: int = 1
) -> bool:
    """Whether one of some rows (B, L) sees one of some keys (B, S).

    ``visible`` returns masks of what the rows of a slice see; a slice is small with many ``heads``.
    """
    step = max(1, _ROWS_AT_ONCE // max(1, heads * keys.numel()))
    for start in range(0, rows.shape[1], step):
        part = slice(start, start + step)
        sees = rows[:, part, None] & keys[:, None, :]
        for mask in visible(part):
            sees = sees & mask
        if bool(sees.any()):
            return True
    return False


# -- the rows of a call that count -----------------------------------------------------------------


class CountedRows(NamedTuple):
    """Which rows of a call enter the statistics, and how many do not.

    Attributes:
        counted: boolean (B, L); None if all rows count.
        padded: number of rows left out as padding.
        excluded: number of rows left out because the user selected others.
        source: where the padding is known from.
        unseen: boolean (B, L), tokens that no row sees, if no source says what is padding.
    """

    counted: Tensor | None = None
    padded: int = 0
    excluded: int = 0
    source: str = ""
    unseen: Tensor | None = None


class _Thread(threading.local):
    """What one thread knows of the modules that it runs.

    Attributes:
        masks: the token masks that they were called with and their modules' ids, innermost last.
        rows: module of the last self-attention, and which of its rows are real.
    """

    def __init__(self) -> None:
        self.masks: list[tuple[int, PaddingMask]] = []
        self.rows: tuple[str, RealRows] | None = None


class RowReader:
    """Decides which rows of captured calls enter the statistics.

    Args:
        attention_mask: a user's mask over tokens, (B, T).
        rows: ``"real"``, ``"all"``, or boolean (L,) or (B, L).

    Attributes:
        mask: the user's mask; None if there is none.
        thread: what the current thread knows of the modules that it runs.
    """

    def __init__(self, attention_mask: Tensor | None = None, rows: Tensor | str = "real") -> None:
        self.mask: PaddingMask | None = checked_mask(attention_mask)
        self._chosen = checked_rows(rows)
        self._all = isinstance(rows, str) and rows == "all"
        self.thread = _Thread()

    # -- the masks of running modules -------------------------------------------------------------

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a module's forward pass with these arguments."""
        kind = type(module)
        forward = vars(kind).get("forward")  # what a scripted class has in its place raises errors
        if forward is None:
            forward = inspect.getattr_static(kind, "forward")
        parameters, names, is_unmasked = _signature(forward)
        if not names and not is_unmasked:
            return
        arguments, masks = dict(zip(parameters, args, strict=False)) | kwargs, self.thread.masks
        for name in names:
            mask = arguments.get(name)
            is_unmasked = is_unmasked and mask is None
            if not isinstance(mask, Tensor) or (mask.dim() > 2 and masks):
                continue  # of more dimensions, it is made of the mask of a module around this one
            real = _token_mask(mask, padded=name in _PADDED)
            if real is not None:
                known = None if bool(real.all()) else real
                caches = [arguments[x] for x in CACHE_ARGUMENTS if arguments.get(x) is not None]
                past = _cached_tokens(caches[0]) if caches else None
                masks.append((id(module), PaddingMask(known, name, past, mask.dim() > 2)))
                return
        if is_unmasked:
            masks.append((id(module), PaddingMask(None, NO_MASK)))

    def forget(self) -> None:
        """Forget what this thread runs."""
        self.thread.masks.clear()
        self.thread.rows = None

    # -- the rows of a call -----------------------------------------------------------------------

    def rows_of_call(self, call: AttentionCall) -> CountedRows:
        """Which rows of a call count.

        Raises:
            ValueError: if the user's selection of rows has another shape.
        """
        real = self.real(call)
        if self._all and call.packed and real.rows is not None:  # no rows of the model's tensors
            return CountedRows(real.rows, int((~real.rows).sum()), 0, real.source)
        square = call.query.shape[2] == call.key.shape[2]
        known = real.source or call.cross or not square
        return self._counted(real, None if known else call.seen_keys(), call.query)

    def rows_of_scores(self, scores: Tensor, module: str, n: Tensor, seen: Tensor) -> CountedRows:
        """Which rows of a score matrix count.

        Args:
            scores: (B, H, L, S).
            module: name of the module that computed them.
            n: (B, H, L), number of keys that each row sees.
            seen: boolean (B, S), True for keys that at least one row sees.

        Raises:
            ValueError: if the user's selection of rows has another shape.
        """
        real = self.real_of_scores(scores, module, n, seen)
        known = real.source or is_cross(module) or scores.shape[2] != scores.shape[3]
        return self._counted(real, None if known else seen, scores)

    def real(self, call: AttentionCall) -> RealRows:
        """Which rows of a call are not padding.

        The first source that applies decides: the user's mask; the call's own padding mask; the
        token mask that the innermost running module was called with, unless real rows see tokens it
        calls padding; masks over keys. Masks of cross-attention concern its keys; its queries are
        those of the self-attention that ran before it in the same numbered block.
        """
        if call.packed:
            real = RealRows(call.real, "cu_seqlens")
            mask = None if self.mask is None else self.mask.real
            if call.real is None and mask is not None and mask.shape == (1, call.query.shape[2]):
                real = RealRows(mask.to(call.query.device), "attention_mask")  # over these tokens
            return self._recorded(call.module, call.cross, real, call.query)
        given = None if call.real is None else RealRows(call.real, "key_padding_mask")
        keys, sees = call.key.shape[2], functools.partial(call_sees_padding, call)
        known = self._from_masks_over_tokens(call.query, keys, call.cross, given, sees)
        if known is None or known.source == NO_MASK:
            known = real_rows_from_key_masks(call) or known
        return self._recorded(call.module, call.cross, known, call.query)

    def real_of_scores(self, scores: Tensor, module: str, n: Tensor, seen: Tensor) -> RealRows:
        """Which rows of a score matrix are not padding; arguments as for :meth:`rows_of_scores`."""
        queries, keys = scores.shape[2:]
        cross, sees = is_cross(module), functools.partial(scores_see_padding, scores)
        real = self._from_masks_over_tokens(scores, keys, cross, None, sees)
        if (real is None or real.source == NO_MASK) and queries == keys and not cross:
            same_for_all_rows = bool((n == seen.sum(-1)[:, None, None]).all())
            if same_for_all_rows and bool((seen != seen[:1]).any()):
                real = RealRows(seen, "masks")
        return self._recorded(module, cross, real, scores)

    def _counted(self, real: RealRows, seen: Tensor | None, query: Tensor) -> CountedRows:
        """Combine real rows with the user's selection.

        Args:
            real: which rows are not padding.
            seen: boolean (B, S), keys that any row sees; None if padding is known otherwise.
            query: (B, Hq, L, E), or scores.

        Raises:
            ValueError: if the selection has another shape than (B, L).
        """
        if self._all:
            return CountedRows()
        unseen = None if seen is None else torch.logical_not(seen)
        rows, requested = real.rows, self._chosen
        padded = 0 if rows is None else int(rows.numel() - rows.sum())
        if requested is None:
            return CountedRows(rows, padded, 0, real.source, unseen)
        batch, _, queries, _ = query.shape
        if requested.shape[1] != queries or requested.shape[0] not in (1, batch):
            raise ValueError(
                f"rows has shape {tuple(requested.shape)}, but its queries are (B, L) = "
                f"{(batch, queries)}"
            )
        requested = requested.to(query.device).expand(batch, -1)
        rows = requested if rows is None else rows & requested
        excluded = batch * queries - padded - int(rows.sum())
        return CountedRows(rows, padded, excluded, real.source, unseen)

    def _from_masks_over_tokens(
        self,
        query: Tensor,
        keys: int,
        cross: bool,
        given: RealRows | None,
        sees: Callable[[Tensor, Tensor], bool],
    ) -> RealRows | None:
        """Real rows by the user's mask, the call's own, or that of a module; None if none fits.

        Args:
            query: (B, Hq, L, E), or scores.
            keys: keys per sequence, S.
            cross: whether the call is cross-attention.
            given: by the call's own mask.
            sees: returns whether real rows see padding, given rows and keys.
        """
        batch, _, queries, _ = query.shape
        masks, user = self.thread.masks, self.mask
        around = masks[-1][1] if masks else None
        if user is not None:
            user = user if around is None else replace(user, past=around.past)
            if (rows := user.rows(batch, queries, keys)) is not None:
                return RealRows(rows.to(query.device), user.source)
        if given is not None or around is None:
            return given
        if around.real is None:
            return RealRows(None, around.source)
        if (rows := around.rows(batch, queries, keys)) is None:
            return None
        rows = rows.to(query.device)
        real_keys = None if cross else around.keys(rows, keys)
        if real_keys is not None and sees(rows, real_keys.to(query.device)):
            return None
        return RealRows(rows, around.source)

    def _recorded(self, module: str, cross: bool, real: RealRows | None, query: Tensor) -> RealRows:
        """Which rows of a call are real, not padding; of self-attention they are also remembered.

        Cross-attention whose real rows are unknown has those of the self-attention before it in the
        same block. If they remain unknown, every row counts.

        Args:
            module: name of the module that made the call.
            cross: whether it is cross-attention.
            real: the real rows as known so far; None if unknown.
            query: (B, Hq, L, E), or scores.
        """
        thread, unknown = self.thread, RealRows(None, "")
        if not cross:
            thread.rows = module, real or unknown
        elif real is None and thread.rows is not None:
            previous_module, before = thread.rows
            fits = before.rows is not None and before.rows.shape == (len(query), query.shape[2])
            block = block_of(module)
            same_block = block[1] is not None and block_of(previous_module) == block
            real = before if fits and same_block else None
        return real or unknown
