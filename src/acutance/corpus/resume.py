"""Resuming a run: what identifies it, and the state it goes on from."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from acutance.capture.module_names import module_name, unwrapped
from acutance.files import tidy
from acutance.summary.state import Run, State, load_state

__all__ = ["model_digest", "restore", "text_digest", "tidy"]

_SAMPLED = 64


def model_digest(model: torch.nn.Module) -> str:
    """Sixteen hexadecimal digits that change with a model's configuration or weights.

    Of each tensor of the state dict the name, shape, dtype and 64 entries, evenly spaced: a step of
    training moves them all. Where the model lies, what wraps it and which release wrote its
    configuration do not count. Every rank of a sharded model has to ask.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = model_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(1.5)
        >>> model_digest(layer) == before
        False
    """
    found = hashlib.sha256()
    config: Any = getattr(unwrapped(model), "config", None)
    if hasattr(config, "to_dict"):
        kept = {
            name: value
            for name, value in config.to_dict().items()
            if not name.startswith("_") and name not in ("transformers_version", "dtype")
        }
        found.update(json.dumps(kept, sort_keys=True, default=str).encode())
    named = {module_name(model, name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in sorted(named.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if hasattr(tensor, "full_tensor"):  # sharded by fully_shard: a DTensor
            tensor = tensor.full_tensor()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            last = flat.numel() - 1
            count = min(_SAMPLED, flat.numel())
            places = [last * index // max(1, count - 1) for index in range(count)]
            entries = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)  # of any dtype
            found.update(entries[places].cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def text_digest(pieces: Sequence[Sequence[int]]) -> str:
    """Sixteen hexadecimal digits that change with any token of any window, or with their order.

    Example:
        >>> text_digest([[1, 2], [3]]) == text_digest([[1], [2, 3]])
        False
    """
    found = hashlib.sha256()
    for piece in pieces:
        found.update(array("q", [len(piece), *piece]).tobytes())
    return found.hexdigest()[:16]


def restore(path: str | os.PathLike[str], run: Run) -> State | None:
    """The state that a run goes on from; None where there is no file yet.

    Args:
        path: where the state is kept.
        run: what is asked for now.

    Raises:
        OSError: if it cannot be read.
        ValueError: if the file is no state, or one of other settings, which it names.
    """
    name = os.fspath(path)
    if not os.path.exists(path):
        return None
    state = load_state(path)
    if found := state.run.difference(run, name, "this run"):
        raise ValueError(f"{name} cannot be resumed with other settings: {found}")
    if state.run.shard != run.shard:
        raise ValueError(
            f"{name} cannot be resumed with other settings: it is of shard {state.run.shard}, this "
            f"run of shard {run.shard}"
        )
    return state
