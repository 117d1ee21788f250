"""Read JSON back: verify its digest, and check each field against its type.

Files come from other machines and from runs that were killed. What does not fit is refused with one
sentence that names the file and the field; nothing is believed because it is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from acutance.files import check_regular

#: Field of a record that holds the digest of all others.
SEAL = "sha256"
#: Whole numbers stay exact in float64.
MOST = 1 << 53
_LARGEST = 64 << 20  # bytes of a file
_T = TypeVar("_T")
_PLAIN = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_types = lru_cache(partial(typing.get_type_hints, include_extras=True))
#: A field of a record that may be infinite or NaN, which stands as text in JSON: "inf", "nan".
AnyFloat = Annotated[float, "or the text of a number that is not finite"]


def sealed_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a record with a digest of its content added, for JSON; numbers must be finite.

    Example:
        >>> list(sealed_json({"a": 1}))
        ['a', 'sha256']
    """
    return {**record, SEAL: _digest(record)}


def _digest(record: Mapping[str, Any]) -> str:
    content = {name: value for name, value in record.items() if name != SEAL}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: str | os.PathLike[str], largest: int = _LARGEST) -> dict[str, Any]:
    """Read a JSON file and verify its digest.

    A file without a digest is accepted: those of acutance 0.1.0 have none, and one can be edited by
    hand after its digest is deleted.

    Args:
        path: a regular file.
        largest: its maximum size in bytes.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if it cannot be read, or is not a regular file.
        ValueError: if it is too large, not a JSON object, or its digest does not match.
    """
    place = Path(path)
    check_regular(place)
    if place.stat().st_size > largest:
        raise ValueError(
            f"it has {place.stat().st_size} bytes, and a file of this kind has at most {largest}"
        )
    try:
        text = place.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return parse_json(text)


def parse_json(text: str) -> dict[str, Any]:
    """Parse JSON text and verify its digest.

    Raises:
        ValueError: if it is not a JSON object, or its digest does not match.
    """
    try:
        record = json.loads(
            text, parse_constant=_number, parse_float=_number, parse_int=whole_number
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"it must be a JSON object, got {type(record).__name__}")
    seal = record.pop(SEAL, None)
    if seal is not None and seal != _digest(record):
        raise ValueError(
            f"it is damaged or was edited: its {SEAL} does not match its content; to accept an "
            "intended edit, delete that line"
        )
    return record


def whole_number(text: str) -> int:
    """The whole number of a JSON text.

    Raises:
        ValueError: if it is larger than any float.

    Example:
        >>> whole_number("9" * 5000)
        Traceback (most recent call last):
        ValueError: numbers must be finite, got 9999999999999999999999999999999999999999
    """
    _number(text)
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"numbers must be finite, got {text[:40]}")
    return value


def checked(kind: type[_T], record: object, place: str = "the record") -> _T:
    """Build a dataclass from JSON: every field present, of its type, and no other.

    Args:
        kind: a dataclass whose fields are numbers, text, dataclasses, tuples, lists and mappings of
            them.
        record: the value read from JSON.
        place: name of the record in error messages.

    Raises:
        ValueError: naming the first field that does not fit.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Point:
        ...     x: float
        ...     names: tuple[str, ...] = ()
        >>> checked(Point, {"x": 1, "names": ["a"]})
        Point(x=1, names=('a',))
        >>> checked(Point, {"x": "1"})
        Traceback (most recent call last):
        ValueError: x of the record must be a number, got '1'
    """
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be a JSON object, got {_short(record)}")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(record) - set(known)):
        raise ValueError(f"{place} has an unknown field {_short(unknown[0])}")
    arguments, annotations = {}, _types(typing.cast(Any, kind))
    for name, field in known.items():
        if name in record:
            arguments[name] = _value(annotations[name], record[name], f"{name} of {place}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{place} lacks the field {name!r}")
    return kind(**arguments)


def _value(kind: Any, value: Any, place: str) -> Any:
    """Convert a JSON value to the type ``kind`` of an annotation; ValueError names ``place``."""
    if kind == AnyFloat:
        if value in ("inf", "-inf", "nan"):
            return float(value)
        kind = float
    if kind is Any:
        return value
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parts:
            return None
        rest = [part for part in parts if part is not type(None)]
        for part in rest[:-1]:
            try:
                return _value(part, value, place)
            except ValueError:
                continue
        return _value(rest[-1], value, place)
    if origin is typing.Literal:
        if not any(value == part and type(value) is type(part) for part in parts):
            raise ValueError(
                f"{place} must be one of {', '.join(map(str, parts))}, got {_short(value)}"
            )
        return value
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ValueError(f"{place} must be a list, got {_short(value)}")
        return origin(_value(parts[0], one, f"an entry of {place}") for one in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{place} must be a JSON object, got {_short(value)}")
        return {
            name: _value(parts[1], one, f"{name[:40]!r} of {place}") for name, one in value.items()
        }
    if is_dataclass(kind):
        return checked(typing.cast(type, kind), value, place)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{place} must be {_PLAIN[kind]}, got {_short(value)}")
    if type(value) is int and abs(value) > MOST:
        raise ValueError(f"{place} must be a whole number up to 2^53, got {_short(value)}")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{place} must be finite, got {value}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
