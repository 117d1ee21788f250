"""Damage to files: bytes as disks leave them, contents as no run writes them; run by path."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from acutance.from_json import SEAL, sealed_json
from acutance.summary.files import sealed

#: What stands in place of a value of JSON: other types, sizes, signs, depths and versions.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 7, 10**29, 1e29, 1e308, -0.5, "", "x", "x" * 70_000, "\x1b[31m", "9" * 400,
    [], [[]], {}, {"x": 1}, "acutance.law/99", "acutance.head_summary/99",
)  # fmt: skip
#: The same as text, for what Python does not write as JSON.
LITERALS = ("NaN", "Infinity", "-Infinity", "1e400", "9" * 5000, "[" * 100_000 + "]" * 100_000)
_MARK = "\u0001mark\u0001"


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes of a file after one accident."""
    at, much = chance.randrange(len(data)), chance.choice((1, 2, 8, 64, 512))
    kind = chance.choice(("flip", "flip", "flip", "cut", "put", "drop", "twice", "zero", "more"))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    return {
        "cut": data[:at],
        "put": data[:at] + chance.randbytes(much) + data[at + much :],
        "drop": data[:at] + data[at + much :],
        "twice": data[: at + much] + data[at:],
        "zero": data[:at] + bytes(much) + data[at + much :],
        "more": data + chance.randbytes(much),
    }[kind]


def forged_json(text: str, chance: random.Random) -> str:
    """A record with one thing in it changed; some with the right digest, some with none."""
    record = json.loads(text)
    seal = record.pop(SEAL)
    literal = _change(record, chance)
    match chance.choice(("sealed", "sealed", "bare", "old")):
        case "sealed" if isinstance(record, dict) and literal is None:
            record = sealed_json(record)
        case "old" if isinstance(record, dict):
            record[SEAL] = seal
        case _:
            pass
    written = json.dumps(record)
    return written if literal is None else written.replace(json.dumps(_MARK), literal, 1)


def forged_tensors(path: Path, chance: random.Random) -> bytes:
    """A safetensors file with one array, or one entry of its header, changed."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    seal = header.pop(SEAL)
    if chance.random() < 0.5:
        _change_array(tensors, chance)
    else:
        field = chance.choice(sorted(header))
        try:
            record = json.loads(header[field])
        except ValueError:
            record = None
        if not isinstance(record, dict | list) or chance.random() < 0.1:
            header[field] = chance.choice(("", "x", "{", "[]", "acutance.queries_keys/99"))
        else:
            literal = _change(record, chance)
            header[field] = json.dumps(record)
            if literal is not None:
                header[field] = header[field].replace(json.dumps(_MARK), literal, 1)
    match chance.choice(("sealed", "sealed", "bare", "old")):
        case "sealed":
            header = sealed(header, tensors)
        case "old":
            header[SEAL] = seal
        case _:
            pass
    return save({name: part.contiguous() for name, part in tensors.items()}, metadata=header)


def _change(record: Any, chance: random.Random) -> str | None:
    """Change one thing in a record, anywhere; a literal that its text is to have at the mark."""
    parent, key = record, None
    while True:
        inside = list(parent) if isinstance(parent, Mapping) else list(range(len(parent)))
        if not inside:
            return None
        key = chance.choice(inside)
        if not isinstance(parent[key], dict | list) or chance.random() < 0.25:
            break
        parent = parent[key]
    match chance.choice(("value", "value", "value", "literal", "drop", "name", "twice", "near")):
        case "drop":
            del parent[key]
        case "name" if isinstance(parent, dict):
            parent[f"{key}_"] = parent.pop(key)
        case "twice" if isinstance(parent, list):
            parent.append(parent[key])
        case "near" if type(parent[key]) in (int, float):
            parent[key] *= chance.choice((-1, 2, 1.5, 1e6))
        case "literal":
            parent[key] = _MARK
            return chance.choice(LITERALS)
        case _:
            parent[key] = chance.choice(VALUES)
    return None


def _change_array(tensors: dict[str, Tensor], chance: random.Random) -> None:
    name = chance.choice(sorted(tensors))
    part = tensors[name].clone()
    match chance.choice(("value", "value", "value", "dtype", "shape", "drop", "name")):
        case "value" if part.numel():
            large = 1 << (20 if part.itemsize > 2 else 7)  # what a narrow integer holds
            values = (-1, 0, 1, 3, large - 1) + (() if not part.is_floating_point() else
                (torch.nan, torch.inf, -torch.inf, 1e30))  # fmt: skip
            part.view(-1)[chance.randrange(part.numel())] = chance.choice(values)
            tensors[name] = part
        case "dtype":
            kinds = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
            tensors[name] = part.to(chance.choice((*kinds, torch.bool, torch.uint8)))
        case "shape":
            ways = (
                part[:-1],
                part[..., :-1],
                part[None],
                part.reshape(-1),
                torch.cat([part, part]),
            )
            tensors[name] = chance.choice(ways).clone()
        case "name":
            tensors[f"{name}_"] = tensors.pop(name)
        case _:
            del tensors[name]
