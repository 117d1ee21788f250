"""OptionalParts: profiles, distances, examples and spans of a summary; each may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from acutance.files import finite
from acutance.summary.by_octave import Profile
from acutance.summary.distances import Distances
from acutance.summary.examples import Examples
from acutance.summary.spans import Spans

__all__ = ["OptionalParts"]

#: Fields of parts that are no arrays: a file's header holds them.
_TEXTS = ("words", "names")


@dataclass(frozen=True)
class OptionalParts:
    """Parts of a summary that may be absent; the first axis of each is the heads.

    Merging two records keeps only the parts that both have, since a part of one would cover only
    some of the rows.

    Attributes:
        profile: metrics by octave of n.
        positions: metrics by octave of position, with structure.
        distances: weight by octave of distance, with structure.
        examples: the sharpest rows, if requested.
        spans: weight on parts of the input, if requested.
    """

    profile: Profile | None = None
    positions: Profile | None = None
    distances: Distances | None = None
    examples: Examples | None = None
    spans: Spans | None = None

    def merge(self, other: OptionalParts) -> OptionalParts:
        """Merge each part that both records have; a part that only one of them has becomes None.

        Raises:
            ValueError: if their spans have other names.
        """
        merged: dict[str, Any] = {}
        for name, mine, theirs in self._pairs(other):
            both = mine is not None and theirs is not None
            merged[name] = mine.merge(theirs) if both else None
        return OptionalParts(**merged)

    def _pairs(self, other: OptionalParts) -> list[tuple[str, Any, Any]]:
        """Each part's name, with its values in both records."""
        names = [field.name for field in fields(OptionalParts)]
        return [(name, getattr(self, name), getattr(other, name)) for name in names]

    def heads(self, start: int, stop: int) -> OptionalParts:
        """The parts of heads ``start`` to ``stop``."""
        return OptionalParts(**{name: part.heads(start, stop) for name, part in self._present()})

    def select(self, order: list[int]) -> OptionalParts:
        """The parts of the heads with these indices, in this order."""
        return OptionalParts(**{name: part.select(order) for name, part in self._present()})

    def _present(self) -> list[tuple[str, Any]]:
        """Name and value of each part that is present."""
        return [(name, part) for name, part, _ in self._pairs(self) if part is not None]

    @staticmethod
    def join(parts: list[OptionalParts]) -> OptionalParts:
        """Concatenate the parts of different heads."""
        joined: dict[str, Any] = {}
        for field in fields(OptionalParts):
            each = [getattr(part, field.name) for part in parts]
            if each and all(part is not None for part in each):
                joined[field.name] = type(each[0]).join(each)
        return OptionalParts(**joined)

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name, ``<part>.<array>``."""
        return {
            f"{name}.{array}": tensor
            for name, part in self._present()
            for array, tensor in part.tensors().items()
        }

    def to_dicts(self, metrics: tuple[str, ...], heads: int) -> list[dict[str, Any]]:
        """For each head, its recorded parts (by n, by position, distances, examples, spans).

        Args:
            metrics: names of the metrics in the order of the arrays.
            heads: number of heads.

        Returns:
            Plain JSON values; non-finite numbers are None.
        """
        entries: list[dict[str, Any]] = [{} for _ in range(heads)]
        for title, profile in (("by_n", self.profile), ("by_position", self.positions)):
            if profile is not None:
                for entry, octaves in zip(entries, profile.to_dicts(metrics), strict=True):
                    entry[title] = octaves
        for head, entry in enumerate(entries):
            if self.distances is not None:
                entry["distances"] = self.distances.to_dict(head)
            if self.examples is not None:
                entry["examples"] = [row.to_dict() for row in self.examples.rows(head)]
            if self.spans is not None:
                entry["spans"] = self.spans.to_dict(head)
        return [finite(entry) for entry in entries]

    @staticmethod
    def checked(
        tensors: Mapping[str, Tensor],
        heads: int,
        metrics: int,
        words: Mapping[str, Any],
        spans: Sequence[Any] = (),
    ) -> OptionalParts:
        """Build the parts from the arrays of a file, after checking them.

        Args:
            tensors: as :meth:`tensors` names them.
            heads: heads of all layers.
            metrics: number of metrics.
            words: text of token ids.
            spans: names of spans.

        Raises:
            ValueError: naming the first array that does not fit.
        """
        kinds: dict[str, Any] = {
            "profile": (Profile, (heads, metrics)),
            "positions": (Profile, (heads, metrics)),
            "distances": (Distances, (heads,)),
            "examples": (Examples, (heads, words)),
            "spans": (Spans, (heads, spans)),
        }
        parts: dict[str, Any] = {}
        known: set[str] = set()
        for name, (kind, arguments) in kinds.items():
            arrays = {
                key.partition(".")[2]: part
                for key, part in tensors.items()
                if key.startswith(f"{name}.")
            }
            if not arrays:
                continue
            names = [field.name for field in fields(kind) if field.name not in _TEXTS]
            if missing := [array for array in names if array not in arrays]:
                raise ValueError(f"the array {f'{name}.{missing[0]}'!r} is missing")
            known |= {f"{name}.{array}" for array in names}
            parts[name] = kind.checked({array: arrays[array] for array in names}, *arguments)
        if unknown := sorted(set(tensors) - known):
            raise ValueError(f"the array {unknown[0][:60]!r} does not belong to a summary")
        return OptionalParts(**parts)
