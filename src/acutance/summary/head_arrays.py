"""HeadArrays: records of tensors whose first axis is the heads; checks of arrays from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HeadArrays", "check_arrays"]


@dataclass(frozen=True)
class HeadArrays:
    """Base of records whose tensor fields have the heads as their first axis."""

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def heads(self, start: int, stop: int) -> Self:
        """The record of heads ``start`` to ``stop``."""
        return replace(self, **{name: part[start:stop] for name, part in self.tensors().items()})

    def select(self, order: list[int]) -> Self:
        """The record of the heads with these indices, in this order."""
        return replace(self, **{name: part[order] for name, part in self.tensors().items()})

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """Concatenate records of different heads."""
        arrays = [part.tensors() for part in parts]
        joined = {name: torch.cat([each[name] for each in arrays]) for name in arrays[0]}
        return replace(parts[0], **joined)


def check_arrays(
    what: str,
    tensors: Mapping[str, Tensor],
    like: HeadArrays,
    possible: Callable[[str, Tensor], Tensor],
) -> None:
    """Raise ValueError for the first array of a file that has a wrong shape, dtype or value.

    Args:
        what: name of the record, with its article, for messages.
        tensors: arrays by name; must contain those of ``like``.
        like: a record with the right shapes and dtypes.
        possible: returns, for the name of an array and the array, a boolean mask of valid values.
    """
    for name, pattern in like.tensors().items():
        part = tensors[name]
        if part.shape != pattern.shape or part.dtype != pattern.dtype:
            raise ValueError(
                f"the array {name!r} of {what} must have shape {tuple(pattern.shape)} and dtype "
                f"{pattern.dtype}, got {tuple(part.shape)} and {part.dtype}"
            )
        valid = possible(name, part).expand(part.shape)
        if not bool(valid.all()):
            index = tuple(torch.logical_not(valid).nonzero()[0].tolist())
            raise ValueError(
                f"the array {name!r} of {what} has an invalid value at {index}, "
                f"{part[index].item()}"
            )
