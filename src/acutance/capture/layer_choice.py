"""Choose layers and heads by numbers, ranges and name patterns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from acutance.capture.find_layers import attention_layers, named_modules

#: What names layers or heads: numbers, ranges, text as ``"0-3,8"``, or several of these.
Chosen: TypeAlias = int | str | range | Iterable["int | str | range"]

_RANGE = re.compile(r"(-?\d+)(?:-(-?\d+))?")


def _items(name: str, given: Chosen) -> list[range | str]:
    """Parse a choice: numbers and ranges become ``range``, patterns stay text.

    Raises:
        TypeError: if an item is not a number, range or text.
        ValueError: if nothing is chosen, or a range is empty.
    """
    if isinstance(given, int | str | range):
        given = (given,)
    items: list[range | str] = []
    for item in given:
        if isinstance(item, range):
            items += [range(number, number + 1) for number in item]
        elif isinstance(item, int) and not isinstance(item, bool):
            items.append(range(item, item + 1))
        elif isinstance(item, str):
            for part in filter(None, (part.strip() for part in item.split(","))):
                match = _RANGE.fullmatch(part)
                if match is None:
                    items.append(part)
                    continue
                first = int(match[1])
                last = first if match[2] is None else int(match[2])
                if last < first:
                    raise ValueError(f"{name} must have ranges low-high, got {part!r}")
                items.append(range(first, last + 1))
        else:
            raise TypeError(f"{name} must contain numbers, ranges and text, got {item!r}")
    if not items:
        raise ValueError(f"{name} must name at least one, got {given!r}")
    return items


class LayerChoice:
    """The layers of a model that a user chose.

    A number is a block's number in the module name: ``encoder.layer.3.attention.self`` lies in
    block 3; negative numbers count from the last. In a model without numbered blocks it is the
    index of an attention layer. A pattern (``*`` and ``?``) matches the name of a module or of one
    that contains it.

    Args:
        given: the user's choice.
        names: names of all modules of the model, without wrappers.
        attention: names of its attention layers, in order.
        argument: name of the option, for messages.

    Raises:
        TypeError: if the choice holds anything but numbers, ranges and text.
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
        ValueError: layers=7 is not a layer of the model: it has 2 blocks, 0 to 1
        >>> LayerChoice("hea", names)
        Traceback (most recent call last):
        ValueError: layers='hea' is not a layer of the model; did you mean 'head'?
    """

    def __init__(
        self,
        given: Chosen,
        names: Sequence[str],
        attention: Sequence[str] = (),
        argument: str = "layers",
    ) -> None:
        self._argument, self._attention = argument, list(attention)
        self._counts: dict[str, int] = {}
        for name in names:
            base, number = _block(name)
            if number is not None:
                self._counts[base] = max(self._counts.get(base, 0), number + 1)
        self._parts = _items(argument, given)
        for part in self._parts:
            most = max(self._counts.values(), default=len(self._attention))
            beyond = isinstance(part, range) and not (-most <= part[0] and part[-1] < most)
            if beyond or not any(self._takes(part, name) for name in names):
                raise ValueError(self._nothing(part, names))

    @classmethod
    def from_model(
        cls, given: Chosen, model: torch.nn.Module, argument: str = "layers"
    ) -> LayerChoice:
        """Apply a choice to the modules of a model, however it is wrapped."""
        names = [name for name, _ in named_modules(model)]
        return cls(given, names, list(attention_layers(model)), argument)

    def __contains__(self, name: str) -> bool:
        return any(self._takes(part, name.partition("#")[0]) for part in self._parts)

    def _takes(self, part: range | str, name: str) -> bool:
        """Whether a part of the choice, a range or a pattern, includes the named module."""
        if isinstance(part, str):
            pieces = name.split(".")
            around = (".".join(pieces[: end + 1]) for end in range(len(pieces)))
            return any(fnmatchcase(each, part) for each in around)
        if not self._counts:
            place = self._attention.index(name) if name in self._attention else None
            return place is not None and (place in part or place - len(self._attention) in part)
        base, number = _block(name)
        if number is None:
            return False
        return number in part or number - self._counts.get(base, 0) in part

    def _nothing(self, part: range | str, names: Sequence[str]) -> str:
        """A sentence for a part that chooses no module, with the nearest names."""
        if isinstance(part, str):
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            near = difflib.get_close_matches(part, names, n=3, cutoff=0.6)
            near = near or difflib.get_close_matches(part, ends, n=1, cutoff=0.7)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            if not near and self._attention:
                first, count = self._attention[0], len(self._attention)
                hint = f": it has {count} attention layer{'s' * (count > 1)}, the first is {first}"
            return f"{self._argument}={part!r} is not a layer of the model{hint}"
        requested = part[0] if len(part) == 1 else f"{part[0]}-{part[-1]}"
        text = f"{self._argument}={requested} is not a layer of the model"
        count = max(self._counts.values(), default=len(self._attention))
        if count:
            kind = "block" if self._counts else "attention layer"
            numbers = f"{kind}s, 0 to {count - 1}" if count > 1 else f"{kind}, 0"
            return f"{text}: it has {count} {numbers}"
        return f"{text}: it has no numbered blocks, so use module names"


def choose_layers(model: torch.nn.Module, given: Chosen, argument: str = "layers") -> list[str]:
    """Names of the chosen attention layers, in model order.

    Text that names a module without known attention layers chooses that module. If no attention
    layer of the model is known before it runs, the outermost chosen modules are returned.

    Raises:
        TypeError: if ``given`` holds anything but numbers, ranges and text.
        ValueError: if a part of it is not a layer of the model.

    Example:
        >>> model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(8, 2), 2)
        >>> choose_layers(model, "-1"), choose_layers(model, "layers.0.self_attn")
        (['layers.1.self_attn', 'layers.1.multihead_attn'], ['layers.0.self_attn'])
    """
    choice = LayerChoice.from_model(given, model, argument)
    attention = attention_layers(model)
    if isinstance(given, str) and given in attention:
        return [given]
    chosen = [name for name in attention if name in choice]
    if chosen:
        return chosen
    names = list(dict(named_modules(model)))
    if isinstance(given, str) and given in names:
        return [given]
    if not attention:
        chosen = [name for name in names if name in choice]
        return [
            name for name in chosen if not any(name.startswith(f"{outer}.") for outer in chosen)
        ]
    raise ValueError(f"{argument}={given!r} is not a layer of the model: it has no attention")


class HeadChoice:
    """The chosen heads of every layer: numbers and ranges, negative ones counted from the last.

    Raises:
        TypeError: if the choice holds anything but numbers, ranges and text.
        ValueError: if text is neither a number nor a range.

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
                raise ValueError(f"heads must be numbers or ranges, such as 0,4-7, got {part!r}")
            self._parts.append(part)

    def check(self, most: int, model: str) -> None:
        """Raise ValueError for the first chosen head that no layer has.

        Args:
            most: largest number of heads of any layer.
            model: what messages call the model.
        """
        for part in self._parts:
            for head in (part[-1], part[0]):
                if not -most <= head < most:
                    raise ValueError(
                        f"heads includes head {head}, but the layers of {model} have {most} "
                        f"heads: 0 to {most - 1}"
                    )

    def of(self, heads: int) -> list[int]:
        """Indices of the chosen heads of a layer with ``heads`` heads, ascending."""
        return [
            head
            for head in range(heads)
            if any(head in part or head - heads in part for part in self._parts)
        ]


def _block(name: str) -> tuple[str, int | None]:
    """Prefix of a dotted name before its first number, and that number."""
    pieces = name.split(".")
    for place, piece in enumerate(pieces):
        if piece.isascii() and piece.isdigit():
            return ".".join(pieces[:place]), int(piece)
    return name, None
