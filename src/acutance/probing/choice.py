"""Which layers and heads a probe reads: indices, ranges and patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

__all__ = ["Chosen", "HeadChoice", "LayerChoice"]

#: What names layers or heads: numbers, ranges, text as ``"0-3,8"``, or several of these.
Chosen: TypeAlias = int | str | range | Iterable["int | str | range"]

_RANGE = re.compile(r"(-?\d+)(?:-(-?\d+))?")


def _items(name: str, given: Chosen) -> list[range | str]:
    """Every number as a range (first, last + 1), every pattern as it is.

    Raises:
        TypeError: if something is no number, range or text.
        ValueError: if nothing is chosen, or a range is empty.
    """
    if isinstance(given, int | str | range):
        given = (given,)
    found: list[range | str] = []
    for item in given:
        if isinstance(item, range):
            found += [range(number, number + 1) for number in item]
        elif isinstance(item, int) and not isinstance(item, bool):
            found.append(range(item, item + 1))
        elif isinstance(item, str):
            for part in filter(None, (part.strip() for part in item.split(","))):
                match = _RANGE.fullmatch(part)
                if match is None:
                    found.append(part)
                    continue
                first = int(match[1])
                last = first if match[2] is None else int(match[2])
                if last < first:
                    raise ValueError(f"{name} has ranges low-high, got {part!r}")
                found.append(range(first, last + 1))
        else:
            raise TypeError(f"{name} holds numbers, ranges and text, got {item!r}")
    if not found:
        raise ValueError(f"{name} names at least one, got {given!r}")
    return found


class LayerChoice:
    """The layers of a model that are read.

    A number is that of a block, as the module's name has it: ``encoder.layer.3.attention.self``
    lies in block 3; negative ones count from the last. A pattern (``*`` and ``?``) is of a module's
    name, or of that of a module around it.

    Args:
        given: what was asked for.
        names: of all modules of the model.

    Raises:
        TypeError: if it holds anything but numbers, ranges and text.
        ValueError: if a part of it chooses no module.

    Example:
        >>> names = ["layers", "layers.0", "layers.0.attn", "layers.1", "layers.1.attn", "head"]
        >>> choice = LayerChoice("-1", names)
        >>> [name for name in names if name in choice]
        ['layers.1', 'layers.1.attn']
        >>> "layers.0.attn" in LayerChoice("*.0", names)
        True
        >>> LayerChoice(7, names)
        Traceback (most recent call last):
        ValueError: layers=7 chooses no block: they are numbered 0 to 1
    """

    def __init__(self, given: Chosen, names: Sequence[str]) -> None:
        self._counts: dict[str, int] = {}
        for name in names:
            base, number = _block(name)
            if number is not None:
                self._counts[base] = max(self._counts.get(base, 0), number + 1)
        self._parts = _items("layers", given)
        for part in self._parts:
            if not any(self._takes(part, name) for name in names):
                raise ValueError(self._nothing(part, names))

    def __contains__(self, name: str) -> bool:
        return any(self._takes(part, name.partition("#")[0]) for part in self._parts)

    def _takes(self, part: range | str, name: str) -> bool:
        if isinstance(part, str):
            pieces = name.split(".")
            around = (".".join(pieces[: end + 1]) for end in range(len(pieces)))
            return any(fnmatchcase(each, part) for each in around)
        base, number = _block(name)
        if number is None:
            return False
        return number in part or number - self._counts.get(base, 0) in part

    def _nothing(self, part: range | str, names: Sequence[str]) -> str:
        if isinstance(part, str):
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"layers={part!r} matches no module of the model{hint}"
        told = part[0] if len(part) == 1 else f"{part[0]}-{part[-1]}"
        if not self._counts:
            return f"layers={told} chooses no block: the model has no numbered ones, name modules"
        most = max(self._counts.values()) - 1
        return f"layers={told} chooses no block: they are numbered 0 to {most}"


class HeadChoice:
    """The heads of every layer that are read: numbers and ranges, negative ones from the last.

    Raises:
        TypeError: if it holds anything but numbers, ranges and text.
        ValueError: if text is no number and no range.

    Example:
        >>> HeadChoice("0,4-5,-1").of(8)
        [0, 4, 5, 7]
        >>> HeadChoice(9).of(8)
        []
    """

    def __init__(self, given: Chosen) -> None:
        self._parts: list[range] = []
        for part in _items("heads", given):
            if isinstance(part, str):
                raise ValueError(f"heads are numbers or ranges, as 0,4-7, got {part!r}")
            self._parts.append(part)

    def of(self, heads: int) -> list[int]:
        """The chosen of ``heads`` heads, ascending; those that a layer lacks are left out."""
        return [
            head
            for head in range(heads)
            if any(head in part or head - heads in part for part in self._parts)
        ]


def _block(name: str) -> tuple[str, int | None]:
    """What stands before the first number of a dotted name, and that number."""
    pieces = name.split(".")
    for place, piece in enumerate(pieces):
        if piece.isascii() and piece.isdigit():
            return ".".join(pieces[:place]), int(piece)
    return name, None
