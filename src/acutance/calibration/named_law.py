"""Laws as a command names them: a file, or a scaling or window with its parameters."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container
from typing import Any

from acutance.calibration.law import AnyLaw, Law
from acutance.scaling import SCALINGS, Scaling, Window, from_dict, get
from acutance.shapes import did_you_mean

#: Parameters of a window that are words.
_WORDS = ("sink_positions", "far")
#: Scalings that need parameters, with some as an example.
_EXAMPLES = {
    "log_n": "log_n:train_length=512",
    "clip_log_n": "clip_log_n:train_length=512",
    "head_table": "head_table:factors=[1.0,1.2], one factor for each head",
}


def named_law(text: str) -> AnyLaw:
    """A law from a file, or by name, as ``log_n:train_length=512`` or ``window:size=4096,sinks=4``.

    A scaling and a window are joined by a plus sign. Values are numbers or lists of numbers.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is neither a file nor a law of that name, or a parameter is wrong.

    Example:
        >>> named_law("log_n:train_length=512")
        LogN(train_length=512, base=None, n_min=16)
        >>> named_law("head_table:factors=[1.0,1.2]").factors
        (1.0, 1.2)
        >>> named_law("ssmax+window:size=64,far=clamp")[1].far
        'clamp'
    """
    parts = [text] if os.path.exists(text) else joined_parts(text)
    if len(parts) > 1:
        return _pair(text, [_named(part) for part in parts])
    return _named(text)


def joined_parts(text: str) -> list[str]:
    """The laws of a text that plus signs join.

    Example:
        >>> joined_parts("ssmax+window:size=64")
        ['ssmax', 'window:size=64']
    """
    return re.split(r"\+(?=[a-z])", text)


def unknown_law(text: str) -> ValueError:
    """The error for a text that is neither a file nor a law: it lists what a law can be."""
    if os.sep in text or text.endswith(".json"):
        return ValueError(f"law: there is no file {text}")
    hint = did_you_mean(text.partition(":")[0], (*SCALINGS, *_OTHERS)) or "."
    return ValueError(
        f"law: {text!r} is neither a file nor a law{hint} A law is a file written by "
        "'calibrate -o', 'probe --write-law' or 'budget -o'; a cache plan of another tool, such as "
        "duo_attention:DIR; a scaling, "
        f"with parameters as in log_n:train_length=512 ({', '.join(SCALINGS)}); a window, such as "
        "window:size=1024,sinks=4; a scaling and a window joined by +; RoPE settings, such as "
        "rope:yarn,factor=2; or heads to switch off, such as off:3.1,4.0"
    )


_OTHERS = (Window.name, "rope", "off")


def _pair(text: str, parts: list[AnyLaw]) -> tuple[Scaling, Window]:
    """The scaling and the window of a text with a plus sign; raises ValueError for other parts."""
    scalings = [part for part in parts if isinstance(part, Scaling)]
    windows = [part for part in parts if isinstance(part, Window)]
    if len(parts) != 2 or len(scalings) != 1 or len(windows) != 1:
        raise ValueError(f"law: a plus sign joins one scaling and one window, got {text!r}")
    return scalings[0], windows[0]


def _named(text: str) -> AnyLaw:
    """The law of a text without a plus sign."""
    name, _, rest = text.partition(":")
    if os.path.isdir(text):
        raise ValueError(f"law: {text} is a directory; pass the file that calibrate -o wrote")
    if os.path.exists(text):
        return Law.load(text)
    if name not in SCALINGS and name != Window.name:
        raise unknown_law(text)
    return _from_parameters(name, rest)


def _from_parameters(name: str, rest: str) -> Scaling | Window:
    """A scaling or window from its name and ``name=value,...``."""
    if not rest and name != Window.name:
        try:
            scaling = get(name)
        except ValueError as error:
            if name in _EXAMPLES:
                more = f", for example {_EXAMPLES[name]}"
            else:
                more = f": {str(error).rpartition(' with ')[2]}, as {name}:name=value,..."
            raise ValueError(f"law: {name} needs parameters{more}") from error
        assert isinstance(scaling, Scaling)
        return scaling
    record = {"name": name} | read_parameters(rest, _WORDS if name == Window.name else ())
    try:
        return Window.from_dict(record) if name == Window.name else from_dict(record)
    except (TypeError, ValueError) as error:
        more = ", for example window:size=1024,sinks=4" if not rest else ""
        said = str(error) if str(error).startswith(name) else f"{name}: {error}"
        raise ValueError(f"law: {said}{more}") from error


def read_parameters(text: str, words: Container[str] = ()) -> dict[str, Any]:
    """The values of a text ``name=value,...``: numbers, or lists of them in brackets.

    Args:
        text: the text; empty for no parameters.
        words: names of parameters whose values are words.

    Raises:
        ValueError: if a part is not of this form.

    Example:
        >>> read_parameters("size=64,far=clamp", words=["far"])
        {'size': 64, 'far': 'clamp'}
        >>> read_parameters("factors=[[1,2],[3,4]],lengths=[8,9]")
        {'factors': [[1, 2], [3, 4]], 'lengths': [8, 9]}
    """
    found: dict[str, Any] = {}
    depth, parts = 0, [""]
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    for part in parts if text else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"law: parameters must be name=number, got {part!r}")
        key, value = key.strip(), value.strip()
        try:
            found[key] = value if key in words else json.loads(value)
        except ValueError as error:
            raise ValueError(f"law: {key} must be a number, got {value!r}") from error
    return found
