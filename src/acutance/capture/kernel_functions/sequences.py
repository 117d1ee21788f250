"""Sequences of different lengths in one tensor: packed, in a cache, or in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.reading import Layout, Reading, alibi, visible

__all__ = ["PACKED", "Sequences", "batch_reading", "batched", "packed", "paged", "sequence_reading"]

#: The layout of packed tensors, (T, H, E).
PACKED = Layout(None, 1, 0)
_PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of N sequences are in a tensor (T, H, E).

    Attributes:
        index: (N, W), index of each token; what is beyond a sequence's length is not read.
        lengths: (N,), numbers of tokens.
        total: T.
        at_end: whether sequences are aligned at their last tokens, not at their first.
    """

    index: Tensor
    lengths: Tensor
    total: int
    at_end: bool = True

    def places(self) -> tuple[Tensor, Tensor]:
        """Indices (N, L) of the tokens in aligned rows, and boolean (N, L), False on padding."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        column = torch.arange(longest, device=self.index.device).expand(len(self.lengths), -1)
        if self.at_end:
            column = column - (longest - self.lengths).unsqueeze(1)
        real = (column >= 0) & (column < self.lengths.unsqueeze(1))
        return self.index.gather(1, column.masked_fill(~real, 0)), real

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor (T, H, E) as (N, H, L, E), zero on padding."""
        index, real = self.places()
        rows = tensor[index.masked_fill(~real, 0)]
        return rows.masked_fill(~real[..., None, None], 0).transpose(1, 2)

    def write(self, tensor: Tensor) -> Tensor:
        """A tensor (N, H, L, E) as (T, H, E), one where no sequence is."""
        index, real = self.places()
        rows = tensor.expand(len(real), -1, real.shape[1], -1).transpose(1, 2)
        flat = rows.new_ones(self.total, *rows.shape[2:])
        flat[index[real]] = rows[real]
        return flat

    def aligned(self, at_end: bool) -> Sequences:
        """The same sequences, aligned at their last or first tokens."""
        return Sequences(self.index, self.lengths, self.total, at_end)


def packed(starts: Tensor, lengths: Tensor, total: int) -> Sequences:
    """Sequences that lie one after another, with or without gaps.

    Example:
        >>> two = packed(torch.tensor([0, 2]), torch.tensor([2, 3]), 5)
        >>> two.read(torch.arange(5.0).view(5, 1, 1))[:, 0, :, 0]
        tensor([[0., 0., 1.],
                [2., 3., 4.]])
    """
    starts, lengths = starts.long(), lengths.long()
    width = int(lengths.max()) if len(lengths) else 0
    column = torch.arange(width, device=starts.device)
    return Sequences(starts.unsqueeze(1) + column, lengths, total)


def batched(batch: int, width: int, lengths: Tensor, device: torch.device) -> Sequences:
    """Sequences of a tensor (B, W, H, E), whose first two dimensions are flattened."""
    rows = torch.arange(batch, device=device) * width
    return packed(rows, lengths.to(device), batch * width)


def paged(table: Tensor, page: int, lengths: Tensor, pages: int) -> Sequences:
    """Sequences in pages of a tensor (pages, page, H, E), whose first dimensions are flattened.

    Args:
        table: (N, most pages of a sequence), the numbers of its pages.
        page: tokens in a page.
        lengths: (N,).
        pages: number of pages.
    """
    token = torch.arange(page, device=table.device)
    index = (table.long().unsqueeze(-1) * page + token).flatten(1)
    return Sequences(index, lengths.long().to(table.device), pages * page)


def documents(queries: Sequences, keys: Sequences) -> Tensor | None:
    """Cumulative lengths of sequences that can be read as documents of one sequence; else None.

    They can if queries and keys are the same tokens, without gaps or empty sequences.
    """
    same = queries.total == keys.total and torch.equal(queries.lengths, keys.lengths)
    if not same or not len(queries.lengths) or not bool(queries.lengths.all()):
        return None
    cumulative = torch.cat([queries.lengths.new_zeros(1), queries.lengths.cumsum(0)])
    if int(cumulative[-1]) != queries.total:
        return None
    in_order = (torch.equal(part.index[:, 0], cumulative[:-1]) for part in (queries, keys))
    return cumulative if all(in_order) else None


def sequence_reading(
    tensors: tuple[Tensor, Tensor, Tensor],
    queries: Sequences,
    keys: Sequences,
    *,
    causal: bool,
    window: tuple[int | None, int | None] = (None, None),
    slopes: Tensor | None = None,
    at_end: bool = True,
    flat: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **fields: Any,
) -> Reading:
    """Read a call on sequences of different lengths.

    Args:
        tensors: query, key and value, (T, H, E).
        queries: the sequences in the query.
        keys: the sequences in key and value.
        causal: whether rows see no later keys.
        window: keys to the left and right that a row sees; None for all.
        slopes: of ALiBi, (Hq,) or (N, Hq).
        at_end: whether the last query is at the last key; else the first is at the first.
        flat: reshapes the kernel's output to (T, Hq, Ev).
        fields: further fields of the :class:`AttentionCall`.
    """
    query, key, value = tensors
    left, right = window
    cumulative = documents(queries, keys) if slopes is None else None
    if cumulative is not None:
        total, layout = queries.total, PACKED
        masks = visible(total, total, 0, causal=causal, left=left, right=right, device=query.device)
        parts = dict(zip(_PARTS, map(layout.read, tensors), strict=True))
        given = {**parts, **masks, "cu_seqlens": cumulative, "packed": True, **fields}
        return Reading(given, lambda output: layout.read(flat(output)), layout.write)
    queries, keys = queries.aligned(at_end), keys.aligned(at_end)
    parts = {"query": queries.read(query), "key": keys.read(key), "value": keys.read(value)}
    (_, asks), (_, answers) = queries.places(), keys.places()
    rows, columns = asks.shape[1], answers.shape[1]
    offset = columns - rows if at_end else 0
    masks = visible(
        rows, columns, offset, causal=causal, left=left, right=right, device=query.device
    )
    if not bool(answers.all()):
        masks["key_mask"] = answers
    if slopes is not None:
        masks["bias"] = alibi(slopes, rows, columns, offset)
    given = {**parts, **masks, "real": asks, "packed": True, **fields}
    return Reading(given, lambda output: queries.read(flat(output)), queries.write)


def batch_reading(
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    *,
    causal: bool,
    window: tuple[int | None, int | None] = (None, None),
    slopes: Tensor | None = None,
    at_end: bool = True,
    keys: Layout | None = None,
    output: Callable[[Tensor], Tensor] | None = None,
    **fields: Any,
) -> Reading:
    """Read a call on sequences of one length.

    Args:
        tensors: query, key and value.
        layout: of the query, and of the output.
        causal: whether rows see no later keys.
        window: keys to the left and right that a row sees; None for all.
        slopes: of ALiBi, (Hq,) or (B, Hq).
        at_end: whether the last query is at the last key; else the first is at the first.
        keys: layout of key and value; None for that of the query.
        output: the kernel's output as (B, Hq, L, Ev); None if its layout is the query's.
        fields: further fields of the :class:`AttentionCall`.
    """
    keys = layout if keys is None else keys
    query, key, value = (
        place.read(part) for place, part in zip((layout, keys, keys), tensors, strict=True)
    )
    rows, columns = query.shape[2], key.shape[2]
    offset = columns - rows if at_end else 0
    masks = visible(
        rows, columns, offset, causal=causal, left=window[0], right=window[1], device=query.device
    )
    if slopes is not None:
        masks["bias"] = alibi(slopes, rows, columns, offset)
    for name in ("attn_mask", "bias"):  # one that the kernel is given, and one made above
        if name in masks and fields.get(name) is not None:
            fields[name] = (
                fields[name] & masks[name] if name == "attn_mask" else fields[name] + masks[name]
            )
    given = {"query": query, "key": key, "value": value, **masks, **fields}
    return Reading(given, output or layout.read, layout.write)
