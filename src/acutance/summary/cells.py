"""Cells: statistics of heads over rows, as arrays that each declare how two of them merge.

A record of statistics is a dataclass whose fields are made with :func:`counts`, :func:`means` and
their like. The declaration gives its empty record, its merge, its join of different heads, and the
check of its arrays in files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

#: Counts stay exact in float64, and sums of two cannot overflow.
MOST = 1 << 53
_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Array:
    """What an array holds, and how it merges.

    Attributes:
        axes: names of its axes, the heads first.
        rule: how two arrays merge: their ``sum``, the ``low`` or ``high`` of both, the weighted
            ``mean``, the sum of ``squares`` about the weighted mean, or ``own``, by the record.
        of: the array of weights of a mean; the array of means of squares.
        dtype: int64 or float64.
        empty: value of cells without rows; NaN where a value may be unknown.
        least: smallest value that rows can give.
        most: largest value that rows can give.
    """

    axes: tuple[str, ...]
    rule: Literal["sum", "mean", "squares", "low", "high", "own"] = "own"
    of: str = ""
    dtype: torch.dtype = torch.float64
    empty: float = 0.0
    least: float = 0
    most: float = _LARGEST


def array(axes: str, **options: Any) -> Any:
    """A dataclass field for an array with these axes; ``options`` are fields of :class:`Array`."""
    return field(metadata={"array": Array(tuple(axes.split()), **options)})


def counts(axes: str) -> Any:
    """A field of numbers of rows or sequences, int64, which add up."""
    return array(axes, rule="sum", dtype=torch.int64, most=MOST)


def totals(axes: str) -> Any:
    """A field of sums that are 0 or more, float64."""
    return array(axes, rule="sum")


def indices(axes: str) -> Any:
    """A field of positions, counts or token ids, int64, −1 where there is none; not merged."""
    return array(axes, dtype=torch.int64, empty=-1, least=-1, most=2**63 - 1)


def means(axes: str, weight: str, least: float = -_LARGEST, most: float = _LARGEST) -> Any:
    """A field of means over the rows that the array ``weight`` counts; its axes come first."""
    return array(axes, rule="mean", of=weight, least=least, most=most)


def squares(axes: str, mean: str) -> Any:
    """A field of sums of squared deviations from the array ``mean``."""
    return array(axes, rule="squares", of=mean)


def _declared(kind: Any) -> dict[str, Array]:
    """What each array of a kind of record holds, by name."""
    arrays = {entry.name: entry.metadata.get("array") for entry in fields(kind)}
    return {name: array for name, array in arrays.items() if array is not None}


declared: Callable[[Any], dict[str, Array]] = functools.cache(_declared)


@dataclass(frozen=True)
class Cells:
    """Base of records of statistics: arrays whose first axis is the heads.

    A subclass lists its free axes in ``axes``, and the lengths of the others in ``fixed``. The axis
    ``grows`` may differ between records, up to ``most``: shorter ones are padded.

    Example:
        >>> @dataclass(frozen=True)
        ... class Weights(Cells):
        ...     rows: Tensor = counts("heads")
        ...     weight: Tensor = means("heads", "rows")
        >>> one = Weights(torch.tensor([1]), torch.tensor([0.5]))
        >>> three = Weights(torch.tensor([3]), torch.tensor([0.1]))
        >>> one.merge(three).weight.tolist()  # (1 · 0.5 + 3 · 0.1) / 4
        [0.2]
    """

    what: ClassVar[str] = ""  # the record in messages, such as " of a profile"
    axes: ClassVar[tuple[str, ...]] = ("heads",)
    fixed: ClassVar[Mapping[str, int]] = {}
    grows: ClassVar[str] = ""  # the axis that may differ in length
    most: ClassVar[int] = 0
    room: ClassVar[str] = ""  # what a record must have, in messages, such as "0 to 32 octaves"
    text_field: ClassVar[str] = ""  # of a file's header, for texts
    text_kind: ClassVar[type] = dict

    @classmethod
    def none(cls, *sizes: int) -> Self:
        """An empty record, the identity of :meth:`merge`.

        Args:
            sizes: lengths of the axes in ``axes``; 0 for those that are left out.
        """
        lengths = {**cls.fixed, **dict(zip(cls.axes, sizes, strict=False))}
        empty = {}
        for name, array in declared(cls).items():
            shape = [lengths.get(axis, 0) for axis in array.axes]
            empty[name] = torch.full(shape, array.empty, dtype=array.dtype, device="cpu")
        return cls(**empty)

    @classmethod
    def without_rows(cls, heads: int, *, metrics: int, **others: Any) -> Self:
        """The record of heads without rows; ``others`` are its fields that are no arrays."""
        lengths = {"heads": heads, "metrics": metrics, **cls.lengths(others)}
        return replace(cls.none(*(lengths.get(axis, 0) for axis in cls.axes)), **others)

    @classmethod
    def rounded(cls, **fields: Any) -> Self:
        """A record whose counts were summed as float64; arrays are taken to the CPU."""
        for name, array in declared(cls).items():
            values = fields[name] if array.dtype == torch.float64 else fields[name].round().long()
            fields[name] = values.contiguous().cpu()
        return cls(**fields)

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in declared(type(self))}

    def heads(self, start: int, stop: int) -> Self:
        """The record of heads ``start`` to ``stop``."""
        return self.select(slice(start, stop))

    def select(self, heads: list[int] | slice | Tensor, metrics: list[int] | None = None) -> Self:
        """The record of the heads, and metrics, with these indices, in this order."""
        selected = {name: values[heads] for name, values in self.tensors().items()}
        if metrics is not None:
            for name, array in declared(type(self)).items():
                if "metrics" in array.axes:
                    selected[name] = selected[name][:, metrics]
        return replace(self, **selected)

    @classmethod
    def _growing(cls) -> dict[str, int]:
        """For each array whose length may differ, the index of that axis."""
        arrays = declared(cls).items()
        return {
            name: array.axes.index(cls.grows) for name, array in arrays if cls.grows in array.axes
        }

    @property
    def size(self) -> int:
        """Length of the axis that may differ between records."""
        sizes = [getattr(self, name).shape[axis] for name, axis in self._growing().items()]
        return sizes[0] if sizes else 0

    def padded(self, size: int) -> Self:
        """A copy whose axis that may differ has at least this length; what is added is empty."""
        more = size - self.size
        if more <= 0:
            return self
        longer = {}
        for name, axis in self._growing().items():
            values, empty = getattr(self, name), declared(type(self))[name].empty
            pad = [0, 0] * (values.dim() - 1 - axis) + [0, more]
            longer[name] = torch.nn.functional.pad(values, pad, value=empty)
        return replace(self, **longer)

    def merge(self, other: Self) -> Self:
        """The record of the rows of both: exact, in any order, up to rounding."""
        size = max(self.size, other.size)
        left, right = self.padded(size).tensors(), other.padded(size).tensors()
        arrays, merged = declared(type(self)), {}
        shares: dict[str, Tensor] = {}  # of the other's rows, by the array that counts them
        for name, array in arrays.items():
            mine, theirs = left[name], right[name]
            if array.rule in ("mean", "squares"):
                mean = name if array.rule == "mean" else array.of
                weight = arrays[mean].of
                if weight not in shares:
                    total = (left[weight] + right[weight]).clamp(min=1)
                    shares[weight] = right[weight].double() / total.double()
                step, trailing = right[mean] - left[mean], mine.dim() - left[weight].dim()
                share, count = (
                    part.reshape(part.shape + (1,) * trailing)
                    for part in (shares[weight], left[weight])
                )
            if array.rule == "sum":
                merged[name] = mine + theirs
            elif array.rule == "low":
                merged[name] = torch.minimum(mine, theirs)
            elif array.rule == "high":
                merged[name] = torch.maximum(mine, theirs)
            elif array.rule == "mean":
                merged[name] = mine + step * share
            elif array.rule == "squares":
                merged[name] = mine + theirs + step.square() * count * share
        return replace(self, **merged)

    @classmethod
    def join(cls, records: list[Self]) -> Self:
        """Concatenate records of different heads."""
        size = max(record.size for record in records)
        tensors = [record.padded(size).tensors() for record in records]
        joined = {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
        return replace(records[0], **joined)

    def texts(self) -> Any:
        """Texts that a file's header holds, as JSON values; None for none."""
        return None

    def columns(self, metrics: tuple[str, ...]) -> dict[str, list[float]]:
        """Columns of the table of heads, a value for each head."""
        return {}

    def to_dicts(self, metrics: tuple[str, ...]) -> list[Any]:
        """Each head's numbers as JSON values."""
        raise NotImplementedError

    def possible(self) -> dict[str, Tensor]:
        """For each array a boolean mask of the values that rows can give."""
        masks = {}
        for name, array in declared(type(self)).items():
            values = getattr(self, name)
            masks[name] = (values >= array.least) & (values <= array.most)
            if math.isnan(array.empty):
                masks[name] |= values.isnan()
        return masks

    @classmethod
    def read_texts(cls, texts: Any) -> dict[str, Any]:
        """Fields from what :meth:`texts` returned, after checking it."""
        return {}

    @classmethod
    def checked(
        cls, tensors: Mapping[str, Tensor], heads: int, metrics: int = 0, texts: Any = None
    ) -> Self:
        """Build a record from the arrays of a file, after checking shapes, dtypes and values.

        Args:
            tensors: arrays by name, all that are declared.
            heads: number of heads.
            metrics: number of metrics.
            texts: the record's texts from the file's header.

        Raises:
            ValueError: naming the first array that does not fit.
        """
        others = cls.read_texts(texts)
        size = 0
        for name, axis in cls._growing().items():
            shape = tensors[name].shape
            size = max(size, shape[axis]) if len(shape) == len(declared(cls)[name].axes) else -1
            if not 0 <= size <= cls.most:
                raise ValueError(
                    f"{cls.what.removeprefix(' of ')} must have {cls.room}, got {size}"
                )
        lengths = {"heads": heads, "metrics": metrics, cls.grows: size, **cls.lengths(others)}
        pattern = cls.none(*(lengths[axis] for axis in cls.axes))
        for name, expected in pattern.tensors().items():
            values = tensors[name]
            if values.shape != expected.shape or values.dtype != expected.dtype:
                raise ValueError(
                    f"the array {name!r}{cls.what} must have shape {tuple(expected.shape)} and "
                    f"dtype {expected.dtype}, got {tuple(values.shape)} and {values.dtype}"
                )
        record = cls(**tensors, **others)
        for name, mask in record.possible().items():
            if not bool(mask.all()):
                index = torch.logical_not(mask).nonzero()[0].tolist()
                names = (axis.removesuffix("s") for axis in declared(cls)[name].axes)
                position = ", ".join(f"{axis} {i}" for axis, i in zip(names, index, strict=False))
                raise ValueError(f"the array {name!r}{cls.what} has an invalid value at {position}")
        return record

    @classmethod
    def lengths(cls, others: Mapping[str, Any]) -> dict[str, int]:
        """Lengths of axes that follow from the fields of :meth:`read_texts`."""
        return {}


class Parts(dict[str, Cells]):
    """Records of the same heads by name: what a summary holds beside the moments of its metrics.

    A record that only one of two sets has covers only some of the rows, so that their merge has
    none of that name.
    """

    def merge(self, other: Parts) -> Parts:
        """The records that both have, merged."""
        return Parts({name: self[name].merge(other[name]) for name in self if name in other})

    def select(self, heads: list[int] | slice) -> Parts:
        """The records of the heads with these indices, in this order, or of a slice of them."""
        return Parts({name: cells.select(heads) for name, cells in self.items()})

    @staticmethod
    def join(sets: list[Parts]) -> Parts:
        """Concatenate the records of different heads, where all sets have them."""
        if len(sets) == 1:
            return Parts(sets[0])
        names = [name for name in sets[0] if all(name in other for other in sets)] if sets else []
        return Parts({name: sets[0][name].join([each[name] for each in sets]) for name in names})

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name, ``<record>.<array>``."""
        return {
            f"{name}.{array}": tensor
            for name, cells in self.items()
            for array, tensor in cells.tensors().items()
        }
