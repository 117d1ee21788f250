"""What one call of a kernel computes, and how its tensors are laid out: in a batch, or packed.

Packed sequences of different lengths lie one after another, in a cache, or in pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.arguments import Arguments

__all__ = [
    "PACKED",
    "Kernel",
    "Layout",
    "Reading",
    "Sequences",
    "alibi",
    "banded",
    "batch_reading",
    "batched",
    "multiply",
    "packed",
    "paged",
    "sequence_reading",
    "widened",
]

_Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a tensor are batch, heads and rows; the last one is the width.

    Attributes:
        batch: dimension of the batch; None if there is none.
        heads: dimension of the heads; None if there is one head.
        rows: dimension of the rows; None if there is one row.

    Example:
        >>> layout = Layout(0, 2, 1)  # (B, L, H, E), as in flash-attn
        >>> layout.read(torch.zeros(2, 5, 3, 8)).shape
        torch.Size([2, 3, 5, 8])
        >>> layout.write(torch.zeros(2, 3, 5, 1)).shape
        torch.Size([2, 5, 3, 1])
    """

    batch: int | None
    heads: int | None
    rows: int | None

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor as (B, H, L, E)."""
        dims = (self.batch, self.heads, self.rows)
        there = tensor.permute([dim for dim in dims if dim is not None] + [tensor.dim() - 1])
        for place, dim in enumerate(dims):
            if dim is None:
                there = there.unsqueeze(place)
        return there

    def write(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`read`."""
        dims = (self.batch, self.heads, self.rows)
        for place in (2, 1, 0):
            if dims[place] is None:
                tensor = tensor.select(place, 0)
        there = [dim for dim in dims if dim is not None]
        return tensor.permute([there.index(dim) for dim in range(len(there))] + [len(there)])


#: The layout of packed tensors, (T, H, E).
PACKED = Layout(None, 1, 0)


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


@dataclass(frozen=True)
class Reading:
    """What one call of a kernel computes.

    Attributes:
        fields: the fields of the :class:`AttentionCall`, without module and source.
        output: the kernel's output as (B, Hq, L, Ev).
        place: a factor (B or 1, Hq or 1, L, 1) in the layout of the kernel's queries.
    """

    fields: dict[str, Any]
    output: Callable[[Tensor], Tensor]
    place: Callable[[Tensor], Tensor]


def multiply(query: Tensor, factor: Tensor) -> Tensor:
    """Multiply a kernel's queries by a factor in their layout.

    Raises:
        ValueError: if they are in 8 bits, where the product would be rounded to few digits.
    """
    if query.dtype.itemsize < 2:
        raise ValueError(f"its queries are {query.dtype}")
    return query * factor.to(query.dtype)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in 8 bits as float32; any other as it is."""
    return tensor.float() if tensor.dtype.itemsize < 2 else tensor


@dataclass(frozen=True)
class Kernel:
    """A kernel that models call as a function.

    Attributes:
        name: the function's name; of a method, with its class.
        read: reads the arguments of a call.
        query: name of the argument that holds the queries.
        scaled: multiplies that argument by a factor in the layout of the queries.
        plan: whether the function only plans later calls; ``read`` then stores its arguments.
    """

    name: str
    read: Callable[[Arguments], Reading | None]
    query: str = "q"
    scaled: Callable[[Tensor, Tensor], Tensor] = multiply
    plan: bool = False

    def reading(self, bound: inspect.BoundArguments) -> Reading:
        """Read a call, from its arguments.

        Raises:
            ValueError: if it is not understood; the message names the function.
        """
        arguments = Arguments(self.name, bound)
        try:
            reading = self.read(arguments)
        except ValueError as error:
            reason = str(error)
            if self.name in reason:
                raise
            raise ValueError(f"{self.name} cannot be read: {reason}") from error
        except Exception as error:  # a version of the library with other arguments
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the arguments of {self.name} are not understood: {reason}"
            ) from error
        arguments.check()
        assert reading is not None
        return reading


# -- readings of calls ----------------------------------------------------------------------------


def sequence_reading(
    tensors: _Tensors,
    queries: Sequences,
    keys: Sequences,
    *,
    at_end: bool = True,
    flat: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **options: Any,
) -> Reading:
    """Read a call on sequences of different lengths.

    Args:
        tensors: query, key and value, (T, H, E).
        queries: the sequences in the query.
        keys: the sequences in key and value.
        at_end: whether the last query is at the last key; else the first is at the first.
        flat: reshapes the kernel's output to (T, Hq, Ev).
        options: masks and others, as for :func:`_call_fields`.
    """
    cumulative = _documents(queries, keys) if options.get("slopes") is None else None
    if cumulative is not None:
        query, key, value = map(PACKED.read, tensors)
        fields = _call_fields(query, key, value, at_end, **options)
        fields |= {"cu_seqlens": cumulative, "packed": True}
        return Reading(fields, lambda output: PACKED.read(flat(output)), PACKED.write)
    queries, keys = replace(queries, at_end=at_end), replace(keys, at_end=at_end)
    query, key, value = (
        part.read(tensor) for part, tensor in zip((queries, keys, keys), tensors, strict=True)
    )
    fields = _call_fields(query, key, value, at_end, **options)
    (_, asks), (_, answers) = queries.places(), keys.places()
    if not bool(answers.all()):
        fields["key_mask"] = answers
    fields |= {"real": asks, "packed": True}
    return Reading(fields, lambda output: queries.read(flat(output)), queries.write)


def batch_reading(
    tensors: _Tensors,
    layout: Layout,
    *,
    at_end: bool = True,
    keys: Layout | None = None,
    output: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Reading:
    """Read a call on sequences of one length.

    Args:
        tensors: query, key and value.
        layout: of the query, and of the output.
        at_end: whether the last query is at the last key; else the first is at the first.
        keys: layout of key and value; None for that of the query.
        output: the kernel's output as (B, Hq, L, Ev); None if its layout is the query's.
        options: masks and others, as for :func:`_call_fields`.
    """
    layouts = (layout, keys or layout, keys or layout)
    query, key, value = (place.read(part) for place, part in zip(layouts, tensors, strict=True))
    fields = _call_fields(query, key, value, at_end, **options)
    return Reading(fields, output or layout.read, layout.write)


def _call_fields(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    at_end: bool,
    *,
    causal: bool,
    window: tuple[int | None, int | None] = (None, None),
    slopes: Tensor | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The fields of an :class:`AttentionCall`.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        at_end: whether the last query is at the last key; else the first is at the first.
        causal: whether rows see no later keys.
        window: keys to the left and right that a row sees; None for all.
        slopes: of ALiBi, (Hq,) or (B, Hq).
        fields: further fields.
    """
    rows, columns = query.shape[2], key.shape[2]
    offset = columns - rows if at_end else 0
    masks = _visible(query, key, offset, causal, *window)
    if slopes is not None:
        masks["bias"] = alibi(slopes, rows, columns, offset)
    fields = {name: given for name, given in fields.items() if given is not None}
    if "attn_mask" in masks and "attn_mask" in fields:
        fields["attn_mask"] = fields["attn_mask"] & masks["attn_mask"]
    if "bias" in masks and "bias" in fields:
        fields["bias"] = fields["bias"] + masks["bias"]
    return {"query": query, "key": key, "value": value, **masks, **fields}


def _documents(queries: Sequences, keys: Sequences) -> Tensor | None:
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


def _visible(
    query: Tensor,
    key: Tensor,
    offset: int,
    causal: bool,
    left: int | None,
    right: int | None,
) -> dict[str, Any]:
    """Fields of an :class:`AttentionCall` for a causal mask and a window.

    Row i sees the keys from ``i + offset - left`` to ``i + offset + right``, both included.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        offset: position of row 0 among the keys.
        causal: whether ``right`` is 0.
        left: None for no bound.
        right: None for no bound.

    Example:
        >>> _visible(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4), 3, True, 1, None)
        {'query_offset': 3, 'is_causal': True, 'window': 2}
    """
    right = 0 if causal else right
    fields: dict[str, Any] = {"query_offset": offset}
    if right == 0:
        fields["is_causal"] = True
    if left is not None and right in (0, left):
        fields["window"] = left + 1
    elif right != 0 and (left, right) != (None, None):
        rows, columns = query.shape[2], key.shape[2]
        fields["attn_mask"] = banded(rows, columns, offset, left, right, query.device)
    return fields


def banded(
    queries: int, keys: int, offset: int, left: int | None, right: int | None, device: torch.device
) -> Tensor:
    """The mask (1, 1, L, S) of a window: rows see ``left`` and ``right`` keys beside their own."""
    distance = _distances(queries, keys, offset, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= distance >= -right
    return seen[None, None]


def alibi(slopes: Tensor, queries: int, keys: int, offset: int) -> Tensor:
    """The bias −slope · abs(i + offset − j), (1 or B, H, L, S), of slopes (H,) or (B, H)."""
    distance = _distances(queries, keys, offset, slopes.device).abs()
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    return -slopes[..., None, None] * distance


def _distances(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """Positions of rows minus positions of keys, (L, S)."""
    rows = torch.arange(queries, device=device).unsqueeze(1) + offset
    return rows - torch.arange(keys, device=device)
