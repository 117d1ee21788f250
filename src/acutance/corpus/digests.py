"""Digests of models and texts, which detect that a resumed run differs from the original one."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from acutance.capture.module_names import module_name, unwrap

__all__ = ["model_digest", "text_digest"]

_SAMPLED = 64


def model_digest(model: torch.nn.Module) -> str:
    """Sixteen hexadecimal digits that identify a model's configuration and weights.

    The digest covers the name, shape, dtype and 64 evenly spaced entries of each tensor of the
    state dict; one training step changes it. Location, wrappers and the release that wrote the
    configuration do not matter. Every rank of a sharded model must call it.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = model_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(1.5)
        >>> model_digest(layer) == before
        False
    """
    digest = hashlib.sha256()
    config: Any = getattr(unwrap(model), "config", None)
    if hasattr(config, "to_dict"):
        attributes = {
            name: value
            for name, value in config.to_dict().items()
            if not name.startswith("_") and name not in ("transformers_version", "dtype")
        }
        digest.update(json.dumps(attributes, sort_keys=True, default=str).encode())
    named = {module_name(model, name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in sorted(named.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if hasattr(tensor, "full_tensor"):  # sharded by fully_shard: a DTensor
            tensor = tensor.full_tensor()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            last = flat.numel() - 1
            count = min(_SAMPLED, flat.numel())
            places = [last * index // max(1, count - 1) for index in range(count)]
            entries = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)  # of any dtype
            digest.update(entries[places].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def text_digest(pieces: Sequence[Sequence[int]]) -> str:
    """Sixteen hexadecimal digits that identify the tokens of all windows and their order.

    Example:
        >>> text_digest([[1, 2], [3]]) == text_digest([[1], [2, 3]])
        False
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(array("q", [len(piece), *piece]).tobytes())
    return digest.hexdigest()[:16]
