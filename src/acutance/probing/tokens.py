"""The token at each key, from the inputs of the model's embedding."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from acutance.capture.module_hooks import follow_inputs
from acutance.capture.module_names import unwrap
from acutance.capture.module_stack import rerun

__all__ = ["Tokens", "special_ids"]

#: Tokens of each sequence that are remembered, for the keys of a cache.
_MOST = 1 << 17
_NAMES = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")


class _Seen(threading.local):
    """Token ids that one thread's embedding looked up: the last ones, and the ones before."""

    ids: Tensor | None = None
    past: Tensor | None = None


class Tokens:
    """Follows the ids that a model's token embedding gets.

    The embedding is the one a Hugging Face model names, else those with the most rows.
    """

    def __init__(self) -> None:
        self._seen = _Seen()

    def follow(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Record the inputs of a model's embeddings, in the context."""
        return follow_inputs(_embeddings(model), self._take)

    def _take(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record the token ids of an embedding call, and append them to those of the cache."""
        ids = args[0] if args else kwargs.get("input")
        if rerun() or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() > 2:
            return
        ids = ids.detach().reshape(-1, ids.shape[-1] if ids.dim() else 1).long()
        seen = self._seen
        past = seen.past
        if past is None or past.shape[0] != ids.shape[0] or past.device != ids.device:
            past = ids[:, :0]
        seen.ids = ids
        seen.past = torch.cat([past, ids], 1)[:, -_MOST:]

    def forget(self) -> None:
        """Forget all tokens seen in this thread."""
        self._seen.ids = self._seen.past = None

    def keys(self, batch: int, queries: int, keys: int, last: int) -> Tensor | None:
        """Token ids of a call's keys, (B, S), −1 where unknown; None if none is known.

        Args:
            batch: B.
            queries: L.
            keys: S.
            last: where the last query stands among the keys.
        """
        ids, past = self._seen.ids, self._seen.past
        if ids is None or past is None or ids.shape[1] != queries or ids.shape[0] not in (1, batch):
            return None
        if queries == keys:
            return ids.expand(batch, -1)
        # the last token seen is the last query's own; those before it lie before it in the cache
        count = min(last + 1, past.shape[1], keys)
        if count < queries:
            return None
        found = torch.full((batch, keys), -1, dtype=torch.int64, device=ids.device)
        found[:, last + 1 - count : last + 1] = past[:, past.shape[1] - count :]
        return found


def _embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The embedding tables that receive token ids."""
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    try:
        named = unwrap(model).get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        named = None
    if isinstance(named, torch.nn.Module) and not isinstance(named, torch.nn.Embedding):
        return [named]
    rows = max((each.num_embeddings for each in tables), default=0)
    if named is not None:
        rows = named.num_embeddings
    # an encoder and its decoder may have a table each, as large
    return [each for each in tables if each.num_embeddings == rows]


def special_ids(model: torch.nn.Module) -> tuple[int, ...]:
    """Ids that a Hugging Face configuration calls special; none for other models."""
    found: set[int] = set()
    model = unwrap(model)
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        for name in _NAMES:
            value = getattr(config, f"{name}_token_id", None)
            values = value if isinstance(value, list | tuple) else [value]
            found.update(each for each in values if type(each) is int and each >= 0)
    return tuple(sorted(found))
