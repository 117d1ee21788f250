"""Read and check state files: safetensors arrays with a JSON header.

Files may come from other machines and interrupted runs, so everything is checked on reading, and an
error is one sentence that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acutance.files import check_regular
from acutance.from_json import checked
from acutance.rowstats import METRICS
from acutance.structure import STRUCTURE
from acutance.summary.cells import MOST, Parts
from acutance.summary.layer import COUNTS, Layer
from acutance.summary.readouts import READOUTS
from acutance.summary.readouts.moments import Moments

#: Heads of all layers and bytes of a file, many times those of any model: files may be sparse.
MOST_HEADS, MOST_BYTES = 1 << 17, 1 << 34
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


@dataclass(frozen=True)
class Record:
    """What the header of a summary's file says beside texts and maps.

    Attributes:
        metrics: names of the metrics.
        layers: a :class:`Layer` for each layer.
        about: facts about the run.
        unread: attention that could not be read.
        not_provided: attention that the model computed itself.
    """

    metrics: tuple[Any, ...]
    layers: tuple[Any, ...]
    about: Mapping[str, Any]
    unread: tuple[str, ...]
    not_provided: tuple[str, ...] = ()


def checked_record(header: Mapping[str, str]) -> Record:
    """Check the header of a summary.

    Raises:
        ValueError: naming the first thing that does not fit.
    """
    record = checked(Record, parse(header, "summary"), "'summary'")
    for name in record.metrics:
        if not isinstance(name, str) or not (name in METRICS or name in STRUCTURE):
            raise ValueError(f"{_short(name)} is not a metric of this version")
    layers = tuple(_layer(f"layers[{i}]", layer) for i, layer in enumerate(record.layers))
    if (heads := sum(layer.heads for layer in layers)) > MOST_HEADS:
        raise ValueError(f"a state can hold at most {MOST_HEADS} heads, got {heads}")
    modules = [layer.module for layer in layers]
    for field, names in (("metric", record.metrics), ("layer", modules)):
        if len(set(names)) != len(names):
            raise ValueError(f"'{field}s' must name each {field} once, got {_short(list(names))}")
    return replace(record, layers=layers)


def optional(header: Mapping[str, str], field: str, kind: type = dict) -> Any:
    """Decode the JSON object or list in a header field, or an empty one if the field is missing.

    Raises:
        ValueError: if it has another type.
    """
    return parse(header, field, kind) if field in header else kind()


def _layer(place: str, record: Any) -> Layer:
    """Check and build one layer of a state file; ``place`` names it in messages."""
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be a JSON object, got {_short(record)}")
    error = record.get("error")  # infinite for an output that is NaN where the model's is not
    layer = checked(Layer, {name: record[name] for name in record if name != "error"}, place)
    for name in ("heads", *COUNTS):
        if (value := getattr(layer, name)) < (name == "heads"):
            raise ValueError(f"{name} of {place} must be a whole number, got {value}")
    if layer.chosen and (
        len(layer.chosen) != layer.heads
        or layer.chosen[0] < 0
        or sorted(set(layer.chosen)) != list(layer.chosen)
    ):
        raise ValueError(
            f"chosen of {place} must be {layer.heads} ascending numbers, one for each head, got "
            f"{_short(list(layer.chosen))}"
        )
    known = type(error) is float or (type(error) is int and error <= MOST)
    if error is not None and not (known and error >= 0):
        raise ValueError(f"error of {place} must be a number, 0 or more, got {_short(error)}")
    return replace(layer, error=error)


def checked_cells(
    header: Mapping[str, str], tensors: Mapping[str, Tensor], heads: int, metrics: int
) -> tuple[Moments, Parts]:
    """The moments and readouts of a file, after checking their arrays and texts.

    Args:
        header: the file's header.
        tensors: arrays by name: those of the moments, and ``<readout>.<array>``.
        heads: heads of all layers.
        metrics: number of metrics.

    Raises:
        ValueError: naming the first array that does not fit.
    """
    tensors = dict(tensors)
    if not {"weight", "sampling"} & set(tensors) and {"count", "mean"} <= set(tensors):
        # states of the first schema: there every row that counts stands for itself
        tensors["weight"] = tensors["count"].to(torch.float64)
        tensors["sampling"] = torch.zeros_like(tensors["mean"])
    kinds = {"": Moments} | {name: readout.cells for name, readout in READOUTS.items()}
    records = {}
    for record, kind in kinds.items():
        prefix = f"{record}." if record else ""
        names = {f"{prefix}{name}": name for name in kind.none().tensors()}
        if record and not any(name.startswith(prefix) for name in tensors):
            continue
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"the array {missing[0]!r} is missing")
        arrays = {name: tensors.pop(stored) for stored, name in names.items()}
        texts = optional(header, kind.text_field, kind.text_kind)
        records[record] = kind.checked(arrays, heads, metrics, texts)
    if tensors:
        raise ValueError(f"the array {_short(min(tensors))} does not belong to a summary")
    moments = records.pop("")
    assert isinstance(moments, Moments)
    return moments, Parts(records)


def _short(value: Any) -> str:
    """The repr of a value, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
            low, high = (int(end) for end in tensor.aminmax())
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
