"""Attention whose rows read a :class:`~acutance.scaling.Window` of their keys.

Keys at their own distance, sinks and far keys at other positions are three sets of one row's keys.
Each is a call of :func:`acutance.attention`, which gives the log of its normaliser; the outputs are
averaged by these. Where position alone hides keys, no matrix of n × n is formed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.calibration.law import HeadLaws
from acutance.capture.attention_call import AttentionCall
from acutance.capture.readers.functions import restore_shape
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.capture.rotary import Rotary
from acutance.masks import hidden_scores, hides, shows
from acutance.probing.read_call import MOVED
from acutance.rowstats import RowState, RowStatistics, merge
from acutance.scaling import Window

FIELDS = fields(AttentionCall)


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys the rows of a call see without a window.

    Attributes:
        index: index of the key at the position of each row, (B or 1, H or 1, L).
        first: index of the first key that each row sees, same shape.
        count: number of keys that each row sees, same shape.
        seen: boolean mask broadcastable to (B, H, L, S); None if each row sees all keys from
            ``first`` on, up to ``index`` if causal.
        offset: without ``seen``, the index of row 0.
        causal: whether no row sees a key after its position.
        padded: whether some sequence's first visible key is not key 0.
        most: the largest count.
        least: the smallest positive count; 0 if no row sees a key.
        total: number of keys of the call, S.
    """

    index: Tensor
    first: Tensor
    count: Tensor
    seen: Tensor | None
    offset: int
    causal: bool
    padded: bool
    most: int
    least: int
    total: int

    @classmethod
    def of(cls, call: AttentionCall) -> VisibleKeys:
        """The visible keys of a call.

        Example:
            >>> x = torch.zeros(1, 1, 3, 4)
            >>> VisibleKeys.of(AttentionCall("", "", x, x, x, is_causal=True)).count
            tensor([[[1, 2, 3]]])
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            queries, keys = call.query.shape[2], call.key.shape[2]
            row = torch.arange(queries, device=call.query.device)[None, None]
            seen, padded = _seen(call), False
            if seen is None:
                offset = call.query_offset if call.is_causal else keys - queries
                index, first = row + offset, 0 * row
                count = (index + 1).clamp(min=0, max=keys)
                count = count if call.is_causal else torch.full_like(index, keys)
                causal = call.is_causal or queries == 1
            else:
                count, first = seen.sum(-1), seen.to(torch.uint8).argmax(-1)
                last = keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
                some = count > 0
                index = row.expand_as(last) if queries == keys else last
                causal = bool((torch.logical_not(some) | (last <= index)).all())
                begins = torch.where(some, first, keys).amin((1, 2), keepdim=True)
                row = row + int((last - row)[some].max() if bool(some.any()) else 0)
                plain = (last == row) & (first == begins) & (count == last - first + 1)
                hidden = torch.logical_not(some) & (row < begins)
                offset, padded = int(row[0, 0, 0]) if queries else 0, bool((begins > 0).any())
                if causal and adds_nothing(call) and bool((plain | hidden).all()):
                    seen = None
                    index, first = row.expand_as(first), begins.expand_as(first)
            positive = count[count > 0]
            most, least = (int(positive.max()), int(positive.min())) if positive.numel() else (0, 0)
            return cls(index, first, count, seen, offset, causal, padded, most, least, keys)

    def cut(self, heads: list[int], start: int = 0) -> VisibleKeys:
        """The same for some heads, and for the rows from ``start`` on if position hides keys."""
        by_row = {name: getattr(self, name) for name in ("index", "first", "count", "seen")}
        for name, tensor in by_row.items():
            if tensor is not None:
                of_heads = tensor[:, heads] if tensor.shape[1] > 1 else tensor
                by_row[name] = of_heads[:, :, start:]
        return replace(self, **by_row, offset=self.offset + start)

    def leading(self, most: int) -> int:
        """Number of rows, from row 0 on, before the first that sees more than ``most`` keys."""
        few = (self.count <= most).flatten(0, 1).all(0)
        return int(few.to(torch.int64).cumprod(0).sum())


def _seen(call: AttentionCall) -> Tensor | None:
    """Boolean (B or 1, H or 1, L, S), the keys that each row sees; None without any mask.

    A call whose keys only ``is_causal`` hides has no mask in this sense.
    """
    parts = []
    for mask in (call.attn_mask, call.bias):
        if mask is not None:
            while mask.dim() < 4:
                mask = mask.unsqueeze(0)
            parts.append(shows(mask))
    if call.key_mask is not None:
        parts.append(call.key_mask[:, None, None])
    if not parts and call.cu_seqlens is None:
        return None
    rows = torch.arange(call.query.shape[2], device=call.query.device)[None]
    by_position = replace(call, window=None).seen_by_position(rows)
    seen = torch.ones(1, 1, rows.shape[1], call.key.shape[2], device=rows.device) > 0
    for part in (*parts, by_position):
        seen = seen if part is None else seen & part
    return seen


def adds_nothing(call: AttentionCall) -> bool:
    """Whether the masks of a call only hide keys, and add no finite number to a score."""
    mask = call.attn_mask
    if call.bias is not None:
        return False
    if mask is None or mask.dtype == torch.bool:
        return True
    return bool((mask.masked_fill(hides(mask), 0.0) == 0).all())


def seen_through(windows: Sequence[Window | None], keys: VisibleKeys) -> Tensor:
    """Boolean mask of the keys that rows read through windows that move no keys.

    Args:
        windows: one for each head, or a single one for all heads; None reads every visible key.
        keys: the keys that rows see without windows.

    Returns:
        (B or 1, H, L, S), or (B or 1, H or 1, L, S) for a single window.
    """
    column = torch.arange(keys.total, device=keys.index.device)
    index, first = keys.index[..., None], keys.first[..., None]
    seen = keys.seen
    if seen is None:
        seen = (column >= first) & (column <= index if keys.causal else column >= 0)
    by_window = []
    for window in windows:
        read = seen
        if window is not None:
            read = (column > index - window.size) & (column < index + window.size)
            read = read | (column < first + window.sinks) | (keys.count[..., None] <= window.beyond)
            read = seen & read
        by_window.append(read)
    if len(by_window) == 1:
        return by_window[0]
    heads = [read[:, [head]] if read.shape[1] > 1 else read for head, read in enumerate(by_window)]
    shape = torch.broadcast_shapes(*(read.shape for read in heads))
    return torch.cat([read.expand(shape) for read in heads], 1)


@dataclass(frozen=True, kw_only=True)
class WindowedCall(AttentionCall):
    """A call whose rows read their keys through windows.

    Attributes:
        windows: window of each head; None for a head that reads all visible keys.
        rotary: rotary embedding of the layer; None if no window moves keys.
        keys: the keys that its rows see without windows.
    """

    windows: tuple[Window | None, ...]
    rotary: Rotary | None
    keys: VisibleKeys

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        windows: Sequence[Window | None],
        rotary: Rotary | None = None,
        keys: VisibleKeys | None = None,
    ) -> WindowedCall:
        """A call with windows; ``keys`` of None are computed."""
        keys = VisibleKeys.of(call) if keys is None else keys
        return cls(**vars(call) | {"windows": tuple(windows), "rotary": rotary, "keys": keys})

    @property
    def plain(self) -> AttentionCall:
        """The call without windows."""
        return AttentionCall(**{field.name: getattr(self, field.name) for field in FIELDS})

    @property
    def is_changed(self) -> bool:
        """Whether a window changes which keys, or at which positions, some row reads."""
        most = self.keys.most
        return any(window is not None and most > window.unchanged for window in self.windows)

    def through(self, unchanged: Callable[[], Tensor]) -> Tensor:
        """The output, (B, H, L, Ev).

        Args:
            unchanged: computes the call without windows; called only if some head or row needs it.

        Raises:
            ValueError: if the call has a window of its own, or keys are to be moved and rows see
                keys after themselves or the call adds numbers to its scores.
        """
        parts = self._parts()
        if not parts:
            return unchanged()
        outputs = [part.output() for part in parts]
        if self._needs_whole(parts):
            whole = unchanged()
        elif len(parts) == 1:
            return outputs[0]
        else:  # every head has a window, and no row is left as it is
            shape = len(self.query), len(self.windows), *outputs[0].shape[2:]
            whole = outputs[0].new_zeros(shape)
        for part, output in zip(parts, outputs, strict=True):
            whole = part.put(whole, output)
        return whole

    def statistics(self, noise: bool, gaps: bool = False) -> RowStatistics:
        """Row statistics over the keys that rows read, at the positions where they read them.

        Args:
            noise: also compute ``noise_gain``.
            gaps: also compute the gap histogram.

        Raises:
            ValueError: as :meth:`through`, or if this is only some of the rows or heads of a call.
        """
        if self.query.shape[1:3] != (len(self.windows), self.keys.count.shape[2]):
            raise ValueError(MOVED)
        parts = self._parts(whole=True)
        state = None
        if len(parts) != 1 or self._needs_whole(parts):  # each is put in its place among all heads
            state = super().statistics(noise, gaps).state
        for part in parts:
            changed = part.state(noise, gaps)
            if state is not None:
                changed = RowState(*map(part.put, state, changed))
            state = changed
        assert state is not None
        return RowStatistics(state)

    def rebuild(self, noise: bool, gaps: bool = False) -> tuple[Tensor, RowStatistics]:
        """The output, without dropout, and the row statistics."""
        plain, statistics = super().rebuild, self.statistics(noise, gaps)
        return replace(self, dropout_p=0.0).through(lambda: plain(False)[0]), statistics

    def as_eager(self) -> None:
        """None: there are no weights of one softmax to return."""

    def weight_on(self, groups: Tensor) -> Tensor:
        """Raises ValueError: the weight on groups of keys is not available for moved keys."""
        raise ValueError(MOVED)

    uniform_weight_on = weight_on

    def _parts(self, *, whole: bool = False) -> list[_Part]:
        """Group the heads by the window that changes what their rows read.

        Heads that no window changes are in no group, nor are the leading rows that a window does
        not change unless ``whole`` is set.

        Raises:
            ValueError: as :meth:`through`.
        """
        if self.window is not None:
            raise ValueError("it has a sliding window, which a law's window would overrule")
        heads: dict[Window, list[int]] = {}
        for head, window in enumerate(self.windows):
            if window is not None and self.keys.most > window.unchanged:
                heads.setdefault(window, []).append(head)
        if any(window.moves for window in heads):
            _check_moved(self, self.keys)
        parts = []
        for window, some in heads.items():
            start = 0
            if not whole and self.keys.seen is None and self.keys.least <= window.beyond:
                start = self.keys.cut(some).leading(window.beyond)
            call = _of_heads(self.plain, some, len(self.windows))
            call = replace(call, query=call.query[:, :, start:])
            parts.append(_Part(call, self.keys.cut(some, start), window, self.rotary, some, start))
        return parts

    def _needs_whole(self, parts: Sequence[_Part]) -> bool:
        """Whether some heads, or some rows of the others, are computed without any window."""
        if sum(len(part.heads) for part in parts) < len(self.windows):
            return True
        return any(self.keys.least <= part.window.beyond for part in parts)


def _check_moved(call: AttentionCall, keys: VisibleKeys) -> None:
    """Raise ValueError if windows cannot move keys: rows are not causal, or biases are added."""
    if not keys.causal:
        raise ValueError(
            "its rows see keys after themselves, and a window reads only earlier keys at other "
            "positions: use far='drop' and sink_positions='keep'"
        )
    if call.bias is not None or not adds_nothing(call):
        raise ValueError(
            "it adds numbers to its scores, which would not move with the keys of a window: use "
            "far='drop' and sink_positions='keep'"
        )


def _of_heads(call: AttentionCall, some: list[int], total: int) -> AttentionCall:
    """The part of a call that belongs to the query heads ``some`` of ``total``, with their keys."""
    if len(some) == total:
        return call
    group = total // call.key.shape[1]
    shared = list(dict.fromkeys(head // group for head in some))
    if some != [head * group + i for head in shared for i in range(group)]:
        shared = [head // group for head in some]

    def of_rows(tensor: Tensor | None) -> Tensor | None:
        wide = tensor is not None and tensor.dim() > 2 and tensor.shape[-3] > 1
        return tensor[..., some, :, :] if wide and tensor is not None else tensor

    return replace(
        call,
        query=call.query[:, some],
        key=call.key[:, shared],
        value=call.value[:, shared],
        attn_mask=of_rows(call.attn_mask),
        bias=of_rows(call.bias),
        sinks=None if call.sinks is None else call.sinks[some],
    )


@dataclass
class _Part:
    """The heads of a call that share one window.

    ``call`` has these heads alone, from the row ``start`` of the whole call on, ``keys`` is what
    its rows see without the window, and ``heads`` are the heads' indices in the whole call.
    """

    call: AttentionCall
    keys: VisibleKeys
    window: Window
    rotary: Rotary | None
    heads: list[int]
    start: int

    def output(self) -> Tensor:
        """Their output, (B, h, L, Ev)."""
        outputs = []
        for call in self._calls():
            output, statistics = attention(
                call.query, call.key, call.value, dropout_p=call.dropout_p, return_stats=True,
                **call.options,
            )  # fmt: skip
            outputs.append((output, statistics.lse))
        return _merged(outputs).to(outputs[0][0].dtype)

    def state(self, noise: bool, gaps: bool) -> RowState:
        """Row state of these heads over the keys that they read, (B, h, L)."""
        states = [call.statistics(noise, gaps).state for call in self._calls()]
        return functools.reduce(merge, states)

    def put(self, whole: Tensor, changed: Tensor) -> Tensor:
        """A tensor (B, H, L, ...) of the whole call with the rows that the window changes."""
        if whole.dim() < 3:
            return whole
        before = whole if len(self.heads) == whole.shape[1] else whole[:, self.heads]
        if self.window.beyond:
            left = self.keys.count <= self.window.beyond  # (B or 1, h or 1, L)
            left = left.reshape(*left.shape, *[1] * (whole.dim() - 3))
            changed = torch.where(left, before[:, :, self.start :], changed)
        if self.start:
            changed = torch.cat([before[:, :, : self.start], changed], 2)
        if before is whole:
            return changed
        index = torch.tensor(self.heads, device=whole.device)
        return whole.index_copy(1, index, changed.to(whole.dtype))

    def _calls(self) -> list[AttentionCall]:
        """One call for each set of keys that rows read: window, sinks, far keys."""
        window, keys = self.window, self.keys
        if keys.seen is not None and not window.moves:
            return [self._masked(seen_through([window], keys))]
        calls = [self._near()]
        if window.sinks:
            calls.append(self._sinks())
        if window.far != "drop" and keys.most > window.size:
            calls.append(self._far())
        return calls

    def _without_masks(self, **changed: Any) -> AttentionCall:
        """The call without its masks, and with other fields."""
        none = {"attn_mask": None, "bias": None, "key_mask": None, "cu_seqlens": None}
        return replace(self.call, **none | {"is_causal": False, "query_offset": 0} | changed)

    def _masked(self, read: Tensor, **changed: Any) -> AttentionCall:
        """The call with only the keys visible where the boolean ``read`` is True."""
        mask = _hiding(read, self.call.attn_mask)
        return self._without_masks(attn_mask=mask, bias=self.call.bias, **changed)

    def _by_position(self, hidden: Tensor | None, total: int, **changed: Any) -> AttentionCall:
        """The call with masks by position of ``total`` keys; ``hidden`` also hides those before."""
        if hidden is not None:
            column = torch.arange(total, device=hidden.device)
            changed["key_mask"] = (column >= hidden[:, 0]).expand(len(self.call.query), -1)
        offset = {"is_causal": self.keys.causal, "query_offset": self.keys.offset}
        return self._without_masks(**offset | changed)

    def _start(self) -> Tensor:
        """Index of the first key that any row of a sequence sees, (B or 1, 1, 1)."""
        return self.keys.first.amin((1, 2), keepdim=True)

    def _near(self) -> AttentionCall:
        """The call of the keys in the window; the model's learned sinks are counted here."""
        if self.keys.seen is not None:
            return self._masked(seen_through([replace(self.window, sinks=0, beyond=0)], self.keys))
        hidden = self._start() if self.keys.padded else None
        return self._by_position(hidden, self.keys.total, window=self.window.size)

    def _sinks(self) -> AttentionCall:
        """The call of the first keys of each row that lie outside its window."""
        window, keys, query = self.window, self.keys, self.call.query
        if window.moves:
            position = keys.index - keys.first
            query = self._moved(query, window.sink_query(position) - position)
        before, after = (keys.index - window.size)[..., None], (keys.index + window.size)[..., None]
        if keys.seen is not None:
            column = torch.arange(keys.total, device=query.device)
            read = keys.seen & (column < keys.first[..., None] + window.sinks) & (column <= before)
            return self._masked(read, query=query, sinks=None)
        key, value = self.call.key, self.call.value
        if not keys.padded:
            column = torch.arange(min(window.sinks, keys.total), device=query.device)
            key, value = key[:, :, : len(column)], value[:, :, : len(column)]
            read = column <= before
            if not keys.causal:
                read = read | (column >= after)
        else:
            column = self._start() + torch.arange(window.sinks, device=query.device)
            read = (column[:, :, None] <= before) & (column[:, :, None] < keys.total)
            index = column.clamp(max=keys.total - 1).expand(len(query), -1, -1)[..., None]
            key, value = (
                tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
                for tensor in (key, value)
            )
        return self._without_masks(attn_mask=read, query=query, key=key, value=value, sinks=None)

    def _far(self) -> AttentionCall:
        """The call of all other keys, at the positions that the window gives them."""
        window, keys, call = self.window, self.keys, self.call
        column = torch.arange(keys.total, device=call.query.device)
        begins = torch.where(keys.count > 0, keys.first, keys.total).amin((1, 2), keepdim=True)
        if bool(((keys.first == begins) | (keys.count == 0)).all()):
            key_position = column - begins
        elif keys.index.shape[2] == keys.total:
            key_position = column - keys.first  # documents in one sequence: each begins at 0
        else:
            raise ValueError(
                "its rows begin at different keys, so that the positions of its cached keys are "
                "not known"
            )
        position = keys.index - keys.first
        to_query, to_key = window.far_positions(position, key_position)
        query = self._moved(call.query, to_query - position)
        key, value = self._moved(call.key, to_key - key_position), call.value
        if keys.seen is not None:
            index, first = keys.index[..., None], keys.first[..., None]
            read = keys.seen & (column <= index - window.size) & (column >= first + window.sinks)
            return self._masked(read, query=query, key=key, sinks=None)
        most = max(1, keys.total - window.size)
        hidden = self._start() + window.sinks if keys.padded or window.sinks else None
        return self._by_position(
            hidden, most, query_offset=keys.offset - window.size,
            query=query, key=key[:, :, :most], value=value[:, :, :most], sinks=None,
        )  # fmt: skip

    def _moved(self, x: Tensor, by: Tensor) -> Tensor:
        """Queries or keys with their positions increased by ``by``, through their rotary angles."""
        assert self.rotary is not None
        return self.rotary.moved(x, by)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The output from outputs and log-normalisers over disjoint sets of keys; 0 with no key."""
    if len(parts) == 1:
        return parts[0][0]
    logs = torch.stack([log for _, log in parts])
    seen = logs > -torch.inf
    most = logs.detach().amax(0)
    most = torch.where(most > -torch.inf, most, 0.0)
    each = torch.where(seen, torch.where(seen, logs - most, 0.0).exp(), 0.0)
    shares = each / each.sum(0).clamp(min=torch.finfo(each.dtype).tiny)
    output = shares[0][..., None] * parts[0][0]
    for share, (part, _) in zip(shares[1:], parts[1:], strict=True):
        output = output + share[..., None] * part
    return output


class Replacement:
    """What computes one call of transformers' interface whose heads have windows, in its place.

    Args:
        call: the call, with its query already scaled.
        name: name of its module.
        laws: scalings and windows of the layer.
        rotary: rotary embedding of the layer; None if no window moves keys.
        refuse: returns the exception for a module name and the reason why it cannot run.
        known: the keys that its rows see without windows; None computes them.

    Attributes:
        call: the call through its windows.
    """

    def __init__(
        self,
        call: InterfaceCall,
        name: str,
        laws: HeadLaws,
        rotary: Rotary | None,
        refuse: Callable[[str, str], Exception],
        known: VisibleKeys | None = None,
    ) -> None:
        self._refuse = refuse
        plain = call.read(name)
        windows = laws.windows_by_head(plain.query.shape[1])
        self.call = WindowedCall.of(plain, windows, rotary, known)

    def run(self, call: InterfaceCall) -> Any:
        """Compute the call with its windows, in place of the attention function.

        Args:
            call: the call as it is about to run.

        Returns:
            The output (B, L, Hq, Ev) and None for the weights; the function's result if no row is
            affected by a window.
        """
        # laws inside may have scaled its query
        self.call = replace(self.call, query=call.query)
        if not self.call.is_changed:
            return call.original()
        try:
            with torch._C.DisableTorchFunction():
                output = self.call.through(lambda: call.output(call.original()))
        except ValueError as error:
            raise self._refuse(self.call.module, str(error)) from error
        return output.transpose(1, 2).contiguous(), None

    def read(self, name: str) -> AttentionCall:
        """The call for a probe: as it is where windows move keys, else with a mask for them.

        It is the plain call if no row is affected by a window. ``name`` is the module's name.
        """
        call = replace(self.call, module=name)
        if not call.is_changed:
            return call.plain
        if any(window is not None and window.moves for window in call.windows):
            return replace(call, moved=True)
        return _masked(call.plain, call.windows, call.keys)


def _hiding(read: Tensor, mask: Tensor | None) -> Tensor:
    """The boolean mask ``read``, or where there are numbers to add these, with its keys alone."""
    if mask is None or mask.dtype == torch.bool:
        return read
    return mask.masked_fill(torch.logical_not(read), -torch.inf)


def _masked(
    call: AttentionCall, windows: Sequence[Window | None], keys: VisibleKeys
) -> AttentionCall:
    """The call with windows that move no keys as its only mask.

    Args:
        call: the call.
        windows: window of each head, None for a head without.
        keys: the keys that its rows see.
    """
    different = list(dict.fromkeys(windows))
    windows = different if len(different) == 1 else windows
    with torch.no_grad():
        read = _hiding(seen_through(windows, keys), call.attn_mask)
    return replace(
        call, attn_mask=read, is_causal=False, query_offset=0, key_mask=None, cu_seqlens=None
    )


def masked_arguments(laws: HeadLaws, call: AttentionCall, given: dict[str, Any]) -> dict[str, Any]:
    """SDPA's arguments with the masks of a layer's windows.

    Args:
        laws: of the layer.
        call: what ``given`` says, read.
        given: the arguments.

    Raises:
        ValueError: if a window moves keys, which only transformers' interface can, or there is a
            head that the call does not have.
    """
    if any(given[part].is_nested for part in ("query", "key", "value")):
        raise ValueError("its tensors are nested, and a window applies only to dense tensors")
    windows = laws.windows_by_head(call.query.shape[1])
    keys = VisibleKeys.of(call)
    if all(window is None or keys.most <= window.unchanged for window in windows):
        return given
    _refuse_moves(laws)
    mask = _masked(call, windows, keys).attn_mask
    assert mask is not None
    if given["query"].dim() != 4:
        mask = restore_shape(mask.expand(*call.query.shape[:3], -1), given)
    return {**given, "attn_mask": mask, "is_causal": False}


def masked_scores(laws: HeadLaws, scores: Tensor, heads: int | None, narrow: torch.dtype) -> Tensor:
    """The scores of a hand-written softmax with the keys hidden that a window does not read.

    Args:
        laws: of the layer.
        scores: (..., L, S).
        heads: how many the layer has, None if unknown.
        narrow: a key is hidden by a score that hides in this dtype.

    Raises:
        ValueError: if a window moves keys, or heads that differ are not the third last.
    """
    _refuse_moves(laws)
    if scores.dim() == 2:
        return masked_scores(laws, scores[:, None], heads, narrow)[:, 0]
    windows = [laws.window] if laws.window is not None else laws.windows_by_head(heads or 0)
    if laws.window is None and (scores.dim() < 4 or scores.shape[-3] != heads):
        raise ValueError(
            f"windows that differ between heads need scores (..., {heads or 'heads'}, L, S), but "
            f"its scores have shape {tuple(scores.shape)}"
        )
    with torch.no_grad(), torch._C.DisableTorchFunction():
        seen = torch.logical_not(hidden_scores(scores.detach(), narrow))
        four = seen.flatten(0, -4) if seen.dim() > 3 else seen[None]
        if laws.window is not None:
            four = four.flatten(0, 1)[:, None]
        like = torch.empty(*four.shape[:3], 0, device=scores.device)
        call = AttentionCall("", "", like, torch.empty(*four.shape[:2], four.shape[3], 0), like)
        read = seen_through(windows, VisibleKeys.of(replace(call, attn_mask=four)))
        hidden = torch.logical_not(read).reshape(scores.shape)
    return scores.masked_fill(hidden, -torch.inf)


def _refuse_moves(laws: HeadLaws) -> None:
    """Raise ValueError if a window moves keys, which only transformers' interface allows."""
    if laws.moves:
        raise ValueError(
            "a window that moves keys to other positions needs a model that uses transformers' "
            "attention interface: use far='drop' and sink_positions='keep', which move none"
        )
