"""Reading: what one call of a kernel computes, and how its tensors are laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.kernel_functions.arguments import Arguments

__all__ = ["Kernel", "Layout", "Reading", "alibi", "banded", "multiply", "visible", "widened"]


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

    def call(self, module: str, source: str) -> AttentionCall:
        """The call, as made by a module."""
        return AttentionCall(module=module, source=source, **self.fields)


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

    def reading(self, arguments: Arguments) -> Reading:
        """Read a call.

        Raises:
            ValueError: if it is not understood; the message names the function.
        """
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


def visible(
    queries: int,
    keys: int,
    offset: int,
    *,
    causal: bool,
    left: int | None,
    right: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Fields of an :class:`AttentionCall` for a causal mask and a window.

    Row i sees the keys from ``i + offset - left`` to ``i + offset + right``, both included.

    Args:
        queries: number of rows.
        keys: number of keys.
        offset: position of row 0 among the keys.
        causal: whether ``right`` is 0.
        left: None for no bound.
        right: None for no bound.
        device: of the mask, where one is needed.

    Example:
        >>> visible(2, 5, 3, causal=True, left=1, right=None, device=torch.device("cpu"))
        {'query_offset': 3, 'is_causal': True, 'window': 2}
    """
    right = 0 if causal else right
    fields: dict[str, Any] = {"query_offset": offset}
    if left is None and right is None:
        return fields
    if right == 0:
        fields["is_causal"] = True
        if left is not None:
            fields["window"] = left + 1
    elif left is not None and left == right:
        fields["window"] = left + 1
    else:
        fields["attn_mask"] = banded(queries, keys, offset, left, right, device)
    return fields


def banded(
    queries: int, keys: int, offset: int, left: int | None, right: int | None, device: torch.device
) -> Tensor:
    """The mask (1, 1, L, S) of a window, with the arguments of :func:`visible`."""
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
