"""Write the arrays of a state in less space, without loss: narrow integers, equal arrays once.

Counts are 64 bits wide in memory, and few need more than 16. A causal model on text without padding
has the same numbers by position as by visible keys. The header says what was changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from acutance.summary.files import parse

__all__ = ["compact", "expand"]

#: Field of the header that says which arrays are narrow, and which are left out as equal to others.
FIELD = "stored"
_NARROW = (torch.uint8, torch.int16, torch.int32)


def compact(
    header: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and arrays as they go into a file; :func:`expand` is the inverse.

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
        content = (tensor.dtype, tuple(tensor.shape), hash(tensor.numpy().tobytes()))
        equal = by_content.setdefault(content, name)
        if equal != name and _identical(tensors[equal], tensor):
            same[name] = equal
            continue
        if tensor.dtype == torch.int64 and tensor.numel():
            low, high = (int(end) for end in tensor.aminmax())
            fits = [kind for kind in _NARROW if _holds(kind, low) and _holds(kind, high)]
            if fits:
                tensor = tensor.to(fits[0])
                narrow.append(name)
        stored[name] = tensor
    return {**header, FIELD: json.dumps({"narrow": narrow, "same": same})}, stored


def expand(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays before :func:`compact`; arrays of other files are returned unchanged.

    Raises:
        ValueError: if the header names arrays that the file has not, or has in another form.
    """
    if FIELD not in header:
        return dict(tensors)
    record = parse(header, FIELD)
    narrow, same = record.get("narrow"), record.get("same")
    if not isinstance(narrow, list) or not isinstance(same, dict):
        raise ValueError(f"{FIELD!r} has a list 'narrow' and an object 'same'")
    whole = dict(tensors)
    for name in narrow:
        if not isinstance(name, str) or name not in tensors or tensors[name].dtype not in _NARROW:
            raise ValueError(f"{FIELD!r} names {name!r:.60}, which is no array of narrow integers")
        whole[name] = tensors[name].to(torch.int64)
    for name, other in same.items():
        if name in tensors or not isinstance(other, str) or other not in tensors:
            raise ValueError(
                f"{FIELD!r} says that {name!r:.60} is {other!r:.60}, which is no array"
            )
        whole[name] = whole[other].clone()
    return whole


def _holds(kind: torch.dtype, value: int) -> bool:
    return torch.iinfo(kind).min <= value <= torch.iinfo(kind).max


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two arrays of one shape and dtype have the same bits, NaN included."""
    left, right = (part.contiguous().reshape(-1).view(torch.uint8) for part in (one, other))
    return torch.equal(left, right)
