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

from acutance.attend import attention, row_statistics
from acutance.calibration.law import HeadLaws
from acutance.capture.attention_call import AttentionCall
from acutance.capture.readers.functions import restore_shape
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.capture.rotary import Rotary
from acutance.masks import hidden_scores, hides
from acutance.probing.read_call import MOVED
from acutance.rowstats import RowState, RowStatistics, merge
from acutance.scaling import Window


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
            offset = call.query_offset if call.is_causal else keys - queries
            place = torch.arange(queries, device=call.query.device)[None, None]
            seen = _seen(call)
            if seen is None:
                index = place + offset
                if call.is_causal:
                    count = (index + 1).clamp(min=0, max=keys)
                else:
                    count = torch.full_like(index, keys)
                causal = call.is_causal or queries == 1
                return cls(
                    index, 0 * index, count, None, offset, causal, False, *_extremes(count), keys
                )
            count = seen.sum(-1)
            some = count > 0
            first = seen.to(torch.uint8).argmax(-1)
            last = keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
            index = place.expand_as(last) if queries == keys else last
            causal = bool((torch.logical_not(some) | (last <= index)).all())
            begins = torch.where(some, first, keys).amin((1, 2), keepdim=True)
            row = place + int((last - place)[some].max() if bool(some.any()) else 0)
            plain = (last == row) & (first == begins) & (count == last - first + 1)
            hidden = torch.logical_not(some) & (row < begins)
            offset = int(row[0, 0, 0]) if queries else 0
            if causal and adds_nothing(call) and bool((plain | hidden).all()):
                seen = None
                index, first = row.expand_as(first), begins.expand_as(first)
            padded = bool((begins > 0).any())
            return cls(index, first, count, seen, offset, causal, padded, *_extremes(count), keys)

    def of_heads(self, heads: list[int]) -> VisibleKeys:
        """The same for the heads with these indices."""

        def of(tensor: Tensor) -> Tensor:
            return tensor[:, heads] if tensor.shape[1] > 1 else tensor

        return replace(
            self,
            index=of(self.index),
            first=of(self.first),
            count=of(self.count),
            seen=None if self.seen is None else of(self.seen),
        )

    def leading(self, most: int) -> int:
        """Number of rows, from row 0 on, before the first that sees more than ``most`` keys."""
        few = (self.count <= most).flatten(0, 1).all(0)
        return int(few.to(torch.int64).cumprod(0).sum())

    def from_row(self, start: int) -> VisibleKeys:
        """The same for the rows from ``start`` on, where position alone hides keys."""
        return replace(
            self,
            index=self.index[:, :, start:],
            first=self.first[:, :, start:],
            count=self.count[:, :, start:],
            offset=self.offset + start,
        )


def _extremes(count: Tensor) -> tuple[int, int]:
    """The largest and the smallest positive count; (0, 0) if no count is positive."""
    positive = count[count > 0]
    return (int(positive.max()), int(positive.min())) if positive.numel() else (0, 0)


def _seen(call: AttentionCall) -> Tensor | None:
    """Boolean (B or 1, H or 1, L, S), the keys that each row sees; None without any mask.

    A call whose keys only ``is_causal`` hides has no mask in this sense.
    """
    parts = []
    for mask in (call.attn_mask, call.bias):
        if mask is not None:
            while mask.dim() < 4:
                mask = mask.unsqueeze(0)
            parts.append(mask if mask.dtype == torch.bool else torch.logical_not(hides(mask)))
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
    parts = []
    for window in windows:
        if window is None:
            parts.append(seen)
            continue
        near = (column > index - window.size) & (column < index + window.size)
        read = near | (column < first + window.sinks) | (keys.count[..., None] <= window.beyond)
        parts.append(seen & read)
    if len(parts) == 1:
        return parts[0]
    heads = [part[:, [head]] if part.shape[1] > 1 else part for head, part in enumerate(parts)]
    shape = torch.broadcast_shapes(*(part.shape for part in heads))
    return torch.cat([part.expand(shape) for part in heads], 1)


@dataclass(frozen=True)
class WindowedCall(AttentionCall):
    """A call whose rows read their keys through windows.

    Attributes:
        windows: window of each head; None for a head that reads all visible keys.
        rotary: rotary embedding of the layer; None if no window moves keys.
        keys: the keys that its rows see without windows.
    """

    windows: tuple[Window | None, ...] = ()
    rotary: Rotary | None = None
    keys: VisibleKeys | None = None

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        windows: Sequence[Window | None],
        rotary: Rotary | None = None,
        keys: VisibleKeys | None = None,
        **changed: Any,
    ) -> WindowedCall:
        """A call with windows; ``keys`` of None are computed, ``changed`` are other fields."""
        given = {field.name: getattr(call, field.name) for field in fields(AttentionCall)}
        keys = VisibleKeys.of(call) if keys is None else keys
        return cls(**given | changed, windows=tuple(windows), rotary=rotary, keys=keys)

    @property
    def is_changed(self) -> bool:
        """Whether a window changes which keys, or at which positions, some row reads."""
        most = self._seen.most
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
        whole = unchanged() if self._needs_whole(parts) else None
        for part in parts:
            output = part.output()
            if whole is not None and part.window.beyond:
                before = whole if len(part.heads) == len(self.windows) else whole[:, part.heads]
                output = torch.where(part.left, before[:, :, part.start :], output)
                output = (
                    torch.cat([before[:, :, : part.start], output], 2) if part.start else output
                )
            if len(part.heads) == len(self.windows):
                return output
            if whole is None:  # every head has a window, and no row is left as it is
                whole = output.new_zeros(len(output), len(self.windows), *output.shape[2:])
            index = torch.tensor(part.heads, device=output.device)
            whole = whole.index_copy(1, index, output.to(whole.dtype))
        assert whole is not None
        return whole

    def statistics(self, noise: bool, gaps: bool = False) -> RowStatistics:
        """Row statistics over the keys that rows read, at the positions where they read them.

        Args:
            noise: also compute ``noise_gain``.
            gaps: also compute the gap histogram.

        Raises:
            ValueError: as :meth:`through`, or if this is only some of the rows or heads of a call.
        """
        if self.query.shape[1:3] != (len(self.windows), self._seen.count.shape[2]):
            raise ValueError(MOVED)
        parts = self._parts(whole=True)
        state = None
        if len(parts) != 1 or self._needs_whole(parts):  # each is put in its place among all heads
            state = super().statistics(noise, gaps).state
        for part in parts:
            changed = part.state(noise, gaps)
            if state is not None:
                changed = RowState(*(part.into(*pair) for pair in zip(state, changed, strict=True)))
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

    @property
    def _seen(self) -> VisibleKeys:
        """The keys that its rows see without windows."""
        if self.keys is None:
            raise ValueError(MOVED)
        return self.keys

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
            if window is not None and self._seen.most > window.unchanged:
                heads.setdefault(window, []).append(head)
        if any(window.moves for window in heads):
            _check_moved(self, self._seen)
        parts = []
        for window, some in heads.items():
            call, seen, start = (
                _of_heads(self, some, len(self.windows)),
                self._seen.of_heads(some),
                0,
            )
            if not whole and seen.seen is None and seen.least <= window.beyond:
                start = seen.leading(window.beyond)
                seen = seen.from_row(start)
                call = replace(call, query=call.query[:, :, start:])
            parts.append(_Part(call, seen, window, self.rotary, some, start))
        return parts

    def _needs_whole(self, parts: Sequence[_Part]) -> bool:
        """Whether some heads, or some rows of the others, are computed without any window."""
        if sum(len(part.heads) for part in parts) < len(self.windows):
            return True
        return any(self._seen.least <= part.window.beyond for part in parts)


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

    @property
    def left(self) -> Tensor:
        """Rows that the window does not apply to, for few keys, boolean (B or 1, h or 1, L, 1)."""
        return (self.keys.count <= self.window.beyond)[..., None]

    def output(self) -> Tensor:
        """Their output, (B, h, L, Ev)."""
        outputs = []
        for arguments in self._sets():
            output, statistics = attention(
                **arguments, dropout_p=self.call.dropout_p, return_stats=True
            )
            outputs.append((output, statistics.lse))
        return _merged(outputs).to(outputs[0][0].dtype)

    def state(self, noise: bool, gaps: bool) -> RowState:
        """Row state of these heads over the keys that they read, (B, h, L)."""
        states: list[RowState] = []
        for arguments in self._sets():
            if not noise:
                arguments["value"] = None
            states.append(row_statistics(**arguments, noise=noise, gaps=gaps).state)
        return functools.reduce(merge, states)

    def into(self, whole: Tensor, changed: Tensor) -> Tensor:
        """A field of the whole call's state, (B, H, L, ...), with this part's ``changed`` rows."""
        if whole.dim() < 3:
            return whole
        before = whole[:, self.heads]
        left = self.left if whole.dim() > 3 else self.left[..., 0]
        changed = torch.where(left, before, changed)
        index = torch.tensor(self.heads, device=whole.device)
        return whole.index_copy(1, index, changed)

    def _sets(self) -> list[dict[str, Any]]:
        """Arguments of :func:`acutance.attention` for each set of keys: window, sinks, far keys."""
        window, keys = self.window, self.keys
        if keys.seen is not None and not window.moves:
            return [self._set(self._masked(seen_through([window], keys)))]
        sets = [self._near()]
        if window.sinks:
            sets.append(self._sinks())
        if window.far != "drop" and keys.most > window.size:
            sets.append(self._far())
        return sets

    def _set(self, options: dict[str, Any], **moved: Any) -> dict[str, Any]:
        """Arguments with these masks, and with ``moved`` in place of the call's."""
        call = self.call
        own = {name: getattr(call, name) for name in ("query", "key", "value", "sinks")}
        given: dict[str, Any] = own | moved
        grouped = given["query"].shape[1] != given["key"].shape[1]
        shared = {"scale": call.scale, "enable_gqa": grouped, "softcap": call.softcap}
        return given | shared | options

    def _masked(self, read: Tensor) -> dict[str, Any]:
        """Arguments that leave only the keys visible where the boolean ``read`` is True."""
        return {"attn_mask": _hiding(read, self.call.attn_mask), "bias": self.call.bias}

    def _by_position(self, hidden: Tensor | None, total: int) -> dict[str, Any]:
        """Masks by position of ``total`` keys; a tensor ``hidden`` also hides keys before it."""
        options: dict[str, Any] = {"is_causal": self.keys.causal, "query_offset": self.keys.offset}
        if hidden is not None:
            column = torch.arange(total, device=hidden.device)
            options["key_mask"] = (column >= hidden[:, 0]).expand(len(self.call.query), -1)
        return options

    def _start(self) -> Tensor:
        """Index of the first key that any row of a sequence sees, (B or 1, 1, 1)."""
        return self.keys.first.amin((1, 2), keepdim=True)

    def _near(self) -> dict[str, Any]:
        """Arguments for the keys in the window; the model's learned sinks are counted here."""
        if self.keys.seen is not None:
            window = replace(self.window, sinks=0, beyond=0)
            return self._set(self._masked(seen_through([window], self.keys)))
        hidden = self._start() if self.keys.padded else None
        options = self._by_position(hidden, self.keys.total)
        return self._set(options | {"window": self.window.size})

    def _sinks(self) -> dict[str, Any]:
        """Arguments for the first keys of each row that lie outside its window."""
        window, keys, call = self.window, self.keys, self.call
        query = call.query
        if window.moves:
            place = keys.index - keys.first
            query = self._moved(query, window.sink_query(place) - place)
        before, after = (keys.index - window.size)[..., None], (keys.index + window.size)[..., None]
        if keys.seen is not None:
            column = torch.arange(keys.total, device=query.device)
            read = keys.seen & (column < keys.first[..., None] + window.sinks) & (column <= before)
            return self._set(self._masked(read), query=query, sinks=None)
        if not keys.padded:
            column = torch.arange(min(window.sinks, keys.total), device=query.device)
            key, value = (part[:, :, : len(column)] for part in (call.key, call.value))
            read = column <= before
            if not keys.causal:
                read = read | (column >= after)
        else:
            start = self._start()
            column = start + torch.arange(window.sinks, device=query.device)
            read = (column[:, :, None] <= before) & (column[:, :, None] < keys.total)
            index = column.clamp(max=keys.total - 1).expand(len(query), -1, -1)[..., None]
            key, value = (
                part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))
                for part in (call.key, call.value)
            )
        return self._set({"attn_mask": read}, query=query, key=key, value=value, sinks=None)

    def _far(self) -> dict[str, Any]:
        """Arguments for all other keys, at the positions that the window gives them."""
        window, keys, call = self.window, self.keys, self.call
        own = torch.arange(keys.total, device=call.query.device)[None, None]
        start = torch.where(keys.count > 0, keys.first, keys.total).amin((1, 2), keepdim=True)
        place = keys.index - keys.first
        if bool(((keys.first == start) | (keys.count == 0)).all()):
            own = own - start
        elif keys.index.shape[2] == keys.total:
            own = own - keys.first  # documents in one sequence: each begins at 0
        else:
            raise ValueError(
                "its rows begin at different keys, so that the positions of its cached keys are "
                "not known"
            )
        to_query, to_key = window.far_positions(place, own)
        query, key = self._moved(call.query, to_query - place), self._moved(call.key, to_key - own)
        if keys.seen is not None:
            column = torch.arange(keys.total, device=query.device)
            index, first = keys.index[..., None], keys.first[..., None]
            read = keys.seen & (column <= index - window.size) & (column >= first + window.sinks)
            return self._set(self._masked(read), query=query, key=key, sinks=None)
        most = max(1, keys.total - window.size)
        hidden = self._start() + window.sinks if keys.padded or window.sinks else None
        options = self._by_position(hidden, most)
        options["query_offset"] -= window.size
        return self._set(
            options,
            query=query,
            key=key[:, :, :most],
            value=call.value[:, :, :most],
            sinks=None,
        )

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
        refuse: returns the exception for a module name and the reason windows cannot be applied.
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
        try:
            plain = call.read(name)
            windows = laws.windows_by_head(plain.query.shape[1])
            self.call = WindowedCall.of(plain, windows, rotary, known)
        except ValueError as error:
            raise refuse(name, str(error)) from error

    def run(self, call: InterfaceCall) -> Any:
        """Compute the call with its windows, in place of the attention function.

        Args:
            call: the call as it is about to run.

        Returns:
            The output (B, L, Hq, Ev) and None for the weights; the function's result if no row is
            affected by a window.
        """
        # laws inside may have scaled its query
        self.call = replace(self.call, query=call["query"])
        if not self.call.is_changed:
            return call.function(*call.args, **call.kwargs)
        try:
            with torch._C.DisableTorchFunction():
                output = self.call.through(
                    lambda: call.output(call.function(*call.args, **call.kwargs))
                )
        except ValueError as error:
            raise self._refuse(self.call.module, str(error)) from error
        return output.transpose(1, 2).contiguous(), None

    def read(self, name: str) -> AttentionCall:
        """The call for a probe: as it is where windows move keys, else with a mask for them.

        It is the plain call if no row is affected by a window. ``name`` is the module's name.
        """
        call = replace(self.call, module=name)
        shared = {field.name: getattr(call, field.name) for field in fields(AttentionCall)}
        if not call.is_changed:
            return AttentionCall(**shared)
        if any(window is not None and window.moves for window in call.windows):
            return replace(call, moved=True)
        assert call.keys is not None
        return _masked(AttentionCall(**shared), call.windows, call.keys)


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
