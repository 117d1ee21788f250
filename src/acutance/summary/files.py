"""Read and check state files: safetensors arrays with a JSON header.

Files may come from other machines and interrupted runs, so everything is checked on reading, and an
error is one sentence that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acutance.files import check_regular

#: Bytes of a file, many times those of any model's state: files may be sparse.
MOST_BYTES = 1 << 34
#: Field of the header that tells a damaged file.
SEAL = "sha256"


def read(
    path: str | os.PathLike[str], schema: str | tuple[str, ...], what: str = "head summary"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the header and arrays of a state file.

    Args:
        path: the file.
        schema: the schema that its header must name, or also those of earlier versions after it.
        what: what such a file contains, for messages.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if it cannot be read.
        ValueError: if it is not a safetensors file, is truncated, has another schema, or does not
            match its checksum (files of earlier versions have none).
    """
    from safetensors import SafetensorError, safe_open

    name, known = os.fspath(path), (schema,) if isinstance(schema, str) else schema
    check_regular(path)
    if (size := Path(path).stat().st_size) > MOST_BYTES:
        raise ValueError(f"{name} has {size} bytes, which is too large for a state")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("schema") in known:  # other files may be large: not read in vain
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, AttributeError, ValueError) as error:  # torch lacks some dtypes
        raise ValueError(f"{name} is not a complete safetensors file: {_line(error)}") from error
    except OSError as error:
        raise OSError(f"{name} cannot be read: {error.strerror or _line(error)}") from error
    except MemoryError as error:
        raise OSError(f"{name} cannot be read: it is larger than the available memory") from error
    if header.get("schema") not in known:
        schema_read = str(header.get("schema"))[:60] if "schema" in header else None
        raise ValueError(
            f"{name} is not a {what} that this version can read: its schema is "
            f"{schema_read!r}, expected {known[0]!r}"
        )
    seal = header.pop(SEAL, None)
    if seal is not None and seal != sealed(header, tensors)[SEAL]:
        raise ValueError(
            f"{name} is damaged: its content does not match its digest; write the file again"
        )
    return header, tensors


def sealed(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Header with a SHA-256 checksum of header and arrays, which :func:`read` verifies.

    Example:
        >>> arrays = {"mean": torch.zeros(2)}
        >>> before = sealed({"schema": "a"}, arrays)
        >>> sealed(before, arrays) == before
        True
        >>> arrays["mean"][1] = 1e-30
        >>> sealed(before, arrays) == before
        False
    """
    digest = hashlib.sha256()
    for field in sorted(set(header) - {SEAL}):
        digest.update(json.dumps([field, header[field]]).encode())
    for name in sorted(tensors):
        array = tensors[name].contiguous()
        digest.update(json.dumps([name, str(array.dtype), list(array.shape)]).encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().data)
    return {**header, SEAL: digest.hexdigest()}


def parse(header: Mapping[str, str], field: str, kind: type = dict) -> Any:
    """Decode the JSON object or list in a header field.

    Raises:
        ValueError: if the field is missing or has another type.
    """
    if field not in header:
        raise ValueError(f"{field!r} is missing")
    try:
        record = json.loads(header[field])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field!r} is not JSON: {_line(error)}") from None
    if not isinstance(record, kind):
        what = "a JSON object" if kind is dict else f"a {kind.__name__}"
        raise ValueError(f"{field!r} must be {what}, got {type(record).__name__}")
    return record


def _line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())[:200]


#: Field of the header that says which arrays are narrow, and which are left out as equal to others.
FIELD = "stored"
_NARROW = (torch.uint8, torch.int16, torch.int32)


def compact(
    header: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and arrays in the compact form of a file; :func:`expand` is the inverse.

    Example:
        >>> arrays = {"a": torch.tensor([0, 300]), "b": torch.tensor([0, 300])}
        >>> header, stored = compact({}, arrays)
        >>> stored["a"].dtype, list(stored)
        (torch.int16, ['a'])
        >>> expand(header, stored)["b"]
        tensor([  0, 300])
    """
    stored: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    by_content: dict[tuple[object, ...], str] = {}
    narrow = []
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()
        equal = by_content.setdefault((tensor.dtype, tensor.shape, digest), name)
        if equal != name:
            same[name] = equal
            continue
        if tensor.dtype == torch.int64 and tensor.numel():
            low, high = map(int, tensor.aminmax())
            for kind in _NARROW:
                if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max:
                    tensor = tensor.to(kind)
                    narrow.append(name)
                    break
        stored[name] = tensor
    return {**header, FIELD: json.dumps({"narrow": narrow, "same": same})}, stored


def expand(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`compact`; arrays of files without compaction are returned unchanged.

    Raises:
        ValueError: if the header names arrays that are missing or have another form.
    """
    if FIELD not in header:
        return dict(tensors)
    record = parse(header, FIELD)
    narrow, same = record.get("narrow"), record.get("same")
    if not isinstance(narrow, list) or not isinstance(same, dict):
        raise ValueError(f"{FIELD!r} must have a list 'narrow' and a JSON object 'same'")
    expanded = dict(tensors)
    for name in narrow:
        if not isinstance(name, str) or name not in tensors or tensors[name].dtype not in _NARROW:
            raise ValueError(
                f"{FIELD!r} names {name!r:.60}, which is not an array of narrow integers"
            )
        expanded[name] = tensors[name].to(torch.int64)
    for name, other in same.items():
        if name in tensors or not isinstance(other, str) or other not in tensors:
            raise ValueError(
                f"{FIELD!r} says that {name!r:.60} is {other!r:.60}, which is not an array"
            )
        expanded[name] = expanded[other].clone()
    return expanded


#: What a setting is called, if not by the option of its name.
_OPTIONS = {
    "laws": "--law",
    "plans": "--keep",
    "value": "the value of --target",
    "alternatives": "the choice of windows (--window, --streaming)",
    "chosen": "the choice of windows (--window)",
    "weights": "the type of the weights",
    "windows": "the number of windows (--windows)",
    "loss": "the loss",
    "key_heads": "key_heads",
}
#: Settings whose values say nothing to a reader.
_OTHER = {
    "model": "it was written for another MODEL, or for other weights of it",
    "text": "it was written for another text, or other windows of it; --text, --windows and --seed "
    "must be the same",
}
#: Settings that change others with them are compared before those, and others in between.
_FIRST = ("attention", "dtype", "weights", "model")
_LAST = ("lengths", "reference", "windows", "text")
#: Entries of a list that are named.
_FEW = 4


def check_settings(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a state whose settings differ: the first difference is named with values.

    Args:
        name: the file.
        before: its settings. An entry ``shown`` has texts for settings whose values say little,
            such as digests, by name.
        now: those of this run.

    Raises:
        ValueError: if a setting differs.

    Example:
        >>> check_settings("state", {"law": "table"}, {"law": "constant"})
        Traceback (most recent call last):
            ...
        ValueError: state cannot be resumed: --law was table and is now constant
    """
    now = json.loads(json.dumps(dict(now)))
    keys = [key for key in dict.fromkeys((*now, *before)) if key != "shown"]
    rest = [key for key in keys if key not in (*_FIRST, *_LAST)]
    for key in (*_FIRST, *rest, *_LAST):
        if before.get(key) == now.get(key):
            continue
        if key in _OTHER:
            raise ValueError(f"{name} cannot be resumed: {_OTHER[key]}")
        option = _OPTIONS.get(key, f"--{key.replace('_', '-')}")
        then, today = (
            _text(values["shown"][key] if key in values.get("shown", {}) else values.get(key))
            for values in (before, now)
        )
        if then == today:  # a file that has changed since
            raise ValueError(f"{name} cannot be resumed: {option} {today} is no longer the same")
        raise ValueError(f"{name} cannot be resumed: {option} was {then} and is now {today}")


def _text(value: Any) -> str:
    """A setting as a user would write it."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        more = f" and {len(value) - _FEW} others" if len(value) > _FEW else ""
        return (", ".join(map(_text, value[:_FEW])) or "none") + more
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")
