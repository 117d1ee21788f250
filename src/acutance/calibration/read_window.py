"""Attention whose rows read a :class:`~acutance.scaling.Window` of their keys.

Keys at their own distance, sinks and far keys at other positions are three sets of one row's keys.
Each is a call of :func:`acutance.attention`, which gives the log of its normaliser; the outputs are
averaged by these. Where position alone hides keys, no matrix of n × n is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.calibration.visible_keys import VisibleKeys, adds_nothing, seen_through
from acutance.capture.attention_call import AttentionCall
from acutance.capture.rotary import Rotary
from acutance.scaling import Window

__all__ = ["read_through"]


def read_through(
    call: AttentionCall,
    windows: Sequence[Window | None],
    rotary: Rotary | None,
    own: Callable[[], Tensor],
    keys: VisibleKeys | None = None,
) -> Tensor:
    """The output of a call whose heads read through windows, (B, Hq, L, Ev).

    Args:
        call: what the model computes without them.
        windows: of each head; None reads everything.
        rotary: the layer's positions, for windows that move keys.
        own: what computes the call as the model does; for rows and heads that nothing changes.
        keys: what the rows see, if that is known.

    Raises:
        ValueError: if the call has a window, or keys are to be moved and rows see keys after
            themselves or the call adds numbers to its scores.
    """
    if call.window is not None:
        raise ValueError("it has a sliding window, which a law's window would overrule")
    keys = VisibleKeys.of(call) if keys is None else keys
    heads: dict[Window, list[int]] = {}
    for head, window in enumerate(windows):
        if window is not None and keys.most > window.unchanged:
            heads.setdefault(window, []).append(head)
    if not heads:
        return own()
    if any(window.moves for window in heads):
        _check_moved(call, keys)
    positive = keys.count > 0
    least = int(keys.count[positive].min())
    changed = sum(len(some) for some in heads.values())
    whole = None
    if changed < len(windows) or any(least <= window.beyond for window in heads):
        whole = own()
    for window, some in heads.items():
        some_call, some_keys = _of_heads(call, some, len(windows)), _keys_of_heads(keys, some)
        skipped = _leading_rows(some_keys, window.beyond) if whole is not None else 0
        part = _Part(*_rows_from(some_call, some_keys, skipped), window, rotary)
        output = part.output()
        if whole is not None and window.beyond:
            before = whole if len(some) == len(windows) else whole[:, some]
            left = (part.keys.count <= window.beyond)[..., None]
            output = torch.where(left, before[:, :, skipped:], output)
            output = torch.cat([before[:, :, :skipped], output], 2) if skipped else output
        if len(some) == len(windows):
            return output
        index = torch.tensor(some, device=output.device)
        assert whole is not None
        whole = whole.index_copy(1, index, output.to(whole.dtype))
    assert whole is not None
    return whole


def _check_moved(call: AttentionCall, keys: VisibleKeys) -> None:
    if not keys.causal:
        raise ValueError(
            "its rows see keys after themselves, and a window reads only earlier keys at other "
            "positions (far='drop' with sink_positions='keep' can be applied)"
        )
    if call.bias is not None or not adds_nothing(call):
        raise ValueError(
            "it adds numbers to its scores, which would stay where they are when a window moves "
            "keys (far='drop' with sink_positions='keep' can be applied)"
        )


def _of_heads(call: AttentionCall, some: list[int], total: int) -> AttentionCall:
    """A call of some heads alone, with the keys they share."""
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


def _keys_of_heads(keys: VisibleKeys, some: list[int]) -> VisibleKeys:
    if keys.count.shape[1] == 1 and keys.index.shape[1] == 1:
        return keys

    def of(tensor: Tensor) -> Tensor:
        return tensor[:, some] if tensor.shape[1] > 1 else tensor

    return replace(
        keys,
        index=of(keys.index),
        first=of(keys.first),
        count=of(keys.count),
        seen=None if keys.seen is None else of(keys.seen),
    )


def _leading_rows(keys: VisibleKeys, most: int) -> int:
    """How many rows, from the first one on, see at most so many keys, where position decides."""
    if keys.seen is not None:
        return 0
    few = (keys.count <= most).flatten(0, 1).all(0)
    return int(few.to(torch.int64).cumprod(0).sum())


def _rows_from(
    call: AttentionCall, keys: VisibleKeys, start: int
) -> tuple[AttentionCall, VisibleKeys]:
    """The later rows of a call in which position alone hides keys."""
    if not start:
        return call, keys
    rest = replace(
        keys,
        index=keys.index[:, :, start:],
        first=keys.first[:, :, start:],
        count=keys.count[:, :, start:],
        offset=keys.offset + start,
    )
    return replace(call, query=call.query[:, :, start:]), rest


@dataclass
class _Part:
    """The heads of a call that read through one window."""

    call: AttentionCall
    keys: VisibleKeys
    window: Window
    rotary: Rotary | None

    def output(self) -> Tensor:
        """Their output, (B, h, L, Ev)."""
        window, keys = self.window, self.keys
        if keys.seen is not None and not window.moves:
            return self._attend(self._masked(seen_through([window], keys, self._total)))[0]
        parts = [self._near()]
        if window.sinks:
            parts.append(self._sinks())
        if window.far != "drop" and keys.most > window.size:
            parts.append(self._far())
        return _merged(parts).to(parts[0][0].dtype)

    @property
    def _total(self) -> int:
        return self.call.key.shape[2]

    def _attend(self, options: dict[str, Any], **moved: Any) -> tuple[Tensor, Tensor]:
        """Output and log of the normaliser, of keys that ``options`` leave visible."""
        call = self.call
        query, key = moved.get("query", call.query), moved.get("key", call.key)
        output, statistics = attention(
            query,
            key,
            moved.get("value", call.value),
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            softcap=call.softcap,
            sinks=moved.get("sinks", call.sinks),
            dropout_p=call.dropout_p,
            return_stats=True,
            **options,
        )
        return output, statistics.lse

    def _masked(self, read: Tensor) -> dict[str, Any]:
        """Options of a call that reads these keys only."""
        mask = self.call.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            read = mask.masked_fill(torch.logical_not(read), -torch.inf)
        return {"attn_mask": read, "bias": self.call.bias}

    def _by_position(self, hidden: Tensor | int, total: int) -> dict[str, Any]:
        """Options of a causal call without the keys before ``hidden``, (B or 1, 1, 1)."""
        options: dict[str, Any] = {"is_causal": self.keys.causal, "query_offset": self.keys.offset}
        if isinstance(hidden, Tensor):
            column = torch.arange(total, device=hidden.device)
            options["key_mask"] = (column >= hidden[:, 0]).expand(len(self.call.query), -1)
        return options

    def _start(self) -> Tensor:
        """The first key that the rows of each sequence see, (B or 1, 1, 1)."""
        return self.keys.first.amin((1, 2), keepdim=True)

    def _near(self) -> tuple[Tensor, Tensor]:
        """The keys at their own distance; learned sinks in the normaliser are counted here."""
        if self.keys.seen is not None:
            window = replace(self.window, sinks=0, beyond=0)
            return self._attend(self._masked(seen_through([window], self.keys, self._total)))
        hidden: Tensor | int = self._start() if self.keys.padded else 0
        options = self._by_position(hidden, self._total)
        return self._attend(options | {"window": self.window.size})

    def _sinks(self) -> tuple[Tensor, Tensor]:
        """The first keys of each row, where they are outside its window."""
        window, keys, call = self.window, self.keys, self.call
        query = call.query
        if window.moves:
            place = keys.index - keys.first
            query = self._moved(query, window.sink_query(place) - place)
        before, after = (keys.index - window.size)[..., None], (keys.index + window.size)[..., None]
        if keys.seen is not None:
            column = torch.arange(self._total, device=query.device)
            read = keys.seen & (column < keys.first[..., None] + window.sinks) & (column <= before)
            return self._attend(self._masked(read), query=query, sinks=None)
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
        return self._attend({"attn_mask": read}, query=query, key=key, value=value, sinks=None)

    def _far(self) -> tuple[Tensor, Tensor]:
        """The other keys, at other positions."""
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
            return self._attend(self._masked(read), query=query, key=key, sinks=None)
        total = max(1, self._total - window.size)
        hidden: Tensor | int = 0
        if keys.padded or window.sinks:
            hidden = self._start() + window.sinks
        options = self._by_position(hidden, total)
        options["query_offset"] -= window.size
        return self._attend(
            options,
            query=query,
            key=key[:, :, :total],
            value=call.value[:, :, :total],
            sinks=None,
        )

    def _moved(self, x: Tensor, by: Tensor) -> Tensor:
        assert self.rotary is not None
        return self.rotary.moved(x, by)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The output of rows whose keys were read in parts; 0 where no part has a key."""
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
