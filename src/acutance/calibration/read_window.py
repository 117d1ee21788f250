"""Attention whose rows read a :class:`~acutance.scaling.Window` of their keys.

Keys at their own distance, sinks and far keys at other positions are three sets of one row's keys.
Each is a call of :func:`acutance.attention`, which gives the log of its normaliser; the outputs are
averaged by these. Where position alone hides keys, no matrix of n × n is formed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.attend import attention, row_statistics
from acutance.calibration.visible_keys import VisibleKeys, adds_nothing, seen_through
from acutance.capture.attention_call import AttentionCall
from acutance.capture.rotary import Rotary
from acutance.rowstats import RowState, RowStatistics, merge
from acutance.scaling import Window


def read_through(
    call: AttentionCall,
    windows: Sequence[Window | None],
    rotary: Rotary | None,
    unchanged: Callable[[], Tensor],
    keys: VisibleKeys | None = None,
) -> Tensor:
    """Compute a call whose heads have windows.

    Args:
        call: the call without windows.
        windows: window of each head; None for a head that reads all visible keys.
        rotary: rotary embedding of the layer; None if no window moves keys.
        unchanged: computes the call without windows; called only if some head or row needs it.
        keys: the keys that the rows see without windows; None computes them.

    Returns:
        The output, (B, H, L, Ev).

    Raises:
        ValueError: if the call has a window of its own, or keys are to be moved and rows see keys
            after themselves or the call adds numbers to its scores.
    """
    keys = VisibleKeys.of(call) if keys is None else keys
    parts = _parts(call, windows, rotary, keys)
    if not parts:
        return unchanged()
    whole = unchanged() if _needs_whole(parts, windows, keys) else None
    for part in parts:
        output = part.output()
        if whole is not None and part.window.beyond:
            before = whole if part.is_whole(windows) else whole[:, part.heads]
            output = torch.where(part.left, before[:, :, part.start :], output)
            output = torch.cat([before[:, :, : part.start], output], 2) if part.start else output
        if part.is_whole(windows):
            return output
        if whole is None:  # every head has a window, and no row is left as it is
            whole = output.new_zeros(len(output), len(windows), *output.shape[2:])
        index = torch.tensor(part.heads, device=output.device)
        whole = whole.index_copy(1, index, output.to(whole.dtype))
    assert whole is not None
    return whole


def statistics_through(
    call: AttentionCall,
    windows: Sequence[Window | None],
    rotary: Rotary | None,
    keys: VisibleKeys,
    *,
    noise: bool,
    gaps: bool,
) -> RowStatistics:
    """Row statistics of a call whose heads have windows, over the keys that each row reads.

    Args:
        call: the call without windows.
        windows: window of each head; None for a head that reads all visible keys.
        rotary: rotary embedding of the layer; None if no window moves keys.
        keys: the keys that the rows see without windows.
        noise: also compute ``noise_gain``.
        gaps: also compute the gap histogram.

    Raises:
        ValueError: as :func:`read_through`.
    """
    parts = _parts(call, windows, rotary, keys, whole=True)
    several = len(parts) > 1  # each is put in its place among all heads
    needed = several or _needs_whole(parts, windows, keys)
    plain = call.statistics(noise, gaps) if needed else None
    if not parts:
        assert plain is not None
        return plain
    state = None if plain is None else plain.state
    for part in parts:
        changed = part.state(noise, gaps)
        if state is not None:
            changed = RowState(*(part.into(*pair) for pair in zip(state, changed, strict=True)))
        state = changed
    assert state is not None
    return RowStatistics(state)


def _parts(
    call: AttentionCall,
    windows: Sequence[Window | None],
    rotary: Rotary | None,
    keys: VisibleKeys,
    *,
    whole: bool = False,
) -> list[_Part]:
    """Group the heads of a call by the window that changes what their rows read.

    Heads that no window changes are in no group, nor are the leading rows that a window does not
    change unless ``whole`` is set.

    Raises:
        ValueError: as :func:`read_through`.
    """
    if call.window is not None:
        raise ValueError("it has a sliding window, which a law's window would overrule")
    heads: dict[Window, list[int]] = {}
    for head, window in enumerate(windows):
        if window is not None and keys.most > window.unchanged:
            heads.setdefault(window, []).append(head)
    if any(window.moves for window in heads):
        _check_moved(call, keys)
    parts = []
    for window, some in heads.items():
        of_heads, seen = _of_heads(call, some, len(windows)), keys.of_heads(some)
        start = 0
        if not whole and seen.seen is None and seen.least <= window.beyond:
            start = seen.leading(window.beyond)
            seen = seen.from_row(start)
            of_heads = replace(of_heads, query=of_heads.query[:, :, start:])
        parts.append(_Part(of_heads, seen, window, rotary, some, start))
    return parts


def _needs_whole(
    parts: Sequence[_Part], windows: Sequence[Window | None], keys: VisibleKeys
) -> bool:
    """Whether some heads, or some rows of the others, are computed without any window."""
    if sum(len(part.heads) for part in parts) < len(windows):
        return True
    return any(keys.least <= part.window.beyond for part in parts)


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

    def is_whole(self, windows: Sequence[Window | None]) -> bool:
        """Whether these are all heads of the call."""
        return len(self.heads) == len(windows)

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
            return [self._set(self._masked(seen_through([window], keys, self._total)))]
        sets = [self._near()]
        if window.sinks:
            sets.append(self._sinks())
        if window.far != "drop" and keys.most > window.size:
            sets.append(self._far())
        return sets

    @property
    def _total(self) -> int:
        """Number of keys of the call, S."""
        return self.call.key.shape[2]

    def _set(self, options: dict[str, Any], **moved: Any) -> dict[str, Any]:
        """Arguments with these masks, and with ``moved`` in place of the call's."""
        call = self.call
        given: dict[str, Any] = {
            "query": call.query,
            "key": call.key,
            "value": call.value,
            "sinks": call.sinks,
        }
        given |= moved
        grouped = given["query"].shape[1] != given["key"].shape[1]
        shared = {"scale": call.scale, "enable_gqa": grouped, "softcap": call.softcap}
        return given | shared | options

    def _masked(self, read: Tensor) -> dict[str, Any]:
        """Arguments that leave only the keys visible where the boolean ``read`` is True."""
        mask = self.call.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            read = mask.masked_fill(torch.logical_not(read), -torch.inf)
        return {"attn_mask": read, "bias": self.call.bias}

    def _by_position(self, hidden: Tensor | int, total: int) -> dict[str, Any]:
        """Masks by position of ``total`` keys; a tensor ``hidden`` also hides keys before it."""
        options: dict[str, Any] = {"is_causal": self.keys.causal, "query_offset": self.keys.offset}
        if isinstance(hidden, Tensor):
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
            return self._set(self._masked(seen_through([window], self.keys, self._total)))
        hidden: Tensor | int = self._start() if self.keys.padded else 0
        options = self._by_position(hidden, self._total)
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
            column = torch.arange(self._total, device=query.device)
            read = keys.seen & (column < keys.first[..., None] + window.sinks) & (column <= before)
            return self._set(self._masked(read), query=query, sinks=None)
        if not keys.padded:
            column = torch.arange(min(window.sinks, self._total), device=query.device)
            key, value = (part[:, :, : len(column)] for part in (call.key, call.value))
            read = column <= before
            if not keys.causal:
                read = read | (column >= after)
        else:
            start = self._start()
            column = start + torch.arange(window.sinks, device=query.device)
            read = (column[:, :, None] <= before) & (column[:, :, None] < self._total)
            index = column.clamp(max=self._total - 1).expand(len(query), -1, -1)[..., None]
            key, value = (
                part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))
                for part in (call.key, call.value)
            )
        return self._set({"attn_mask": read}, query=query, key=key, value=value, sinks=None)

    def _far(self) -> dict[str, Any]:
        """Arguments for all other keys, at the positions that the window gives them."""
        window, keys, call = self.window, self.keys, self.call
        own = torch.arange(self._total, device=call.query.device)[None, None]
        start = torch.where(keys.count > 0, keys.first, self._total).amin((1, 2), keepdim=True)
        place = keys.index - keys.first
        if bool(((keys.first == start) | (keys.count == 0)).all()):
            own = own - start
        elif keys.index.shape[2] == self._total:
            own = own - keys.first  # documents in one sequence: each begins at 0
        else:
            raise ValueError(
                "its rows begin at different keys, so that the positions of its cached keys are "
                "not known"
            )
        to_query, to_key = window.far_positions(place, own)
        query, key = self._moved(call.query, to_query - place), self._moved(call.key, to_key - own)
        if keys.seen is not None:
            column = torch.arange(self._total, device=query.device)
            index, first = keys.index[..., None], keys.first[..., None]
            read = keys.seen & (column <= index - window.size) & (column >= first + window.sinks)
            return self._set(self._masked(read), query=query, key=key, sinks=None)
        total = max(1, self._total - window.size)
        hidden: Tensor | int = 0
        if keys.padded or window.sinks:
            hidden = self._start() + window.sinks
        options = self._by_position(hidden, total)
        options["query_offset"] -= window.size
        return self._set(
            options,
            query=query,
            key=key[:, :, :total],
            value=call.value[:, :, :total],
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
