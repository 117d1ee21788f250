"""The token ids that a model reads, and the input positions of a call's queries and keys."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.module_hooks import follow_inputs
from acutance.capture.module_names import unwrap
from acutance.capture.module_stack import is_rerun
from acutance.probing.row_sampling import Sample
from acutance.structure.blocks import last_visible

__all__ = ["InputPlaces", "PlaceReader", "Tokens", "special_ids"]

#: Tokens of each sequence that are remembered, for the keys of a cache.
_MAX_REMEMBERED = 1 << 17
_NAMES = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")


class _ThreadTokens(threading.local):
    """Token ids that the model embedded in one thread.

    Attributes:
        ids: (B, T) of the last embedding call.
        past: (B, T') of that call and the earlier ones of the same sequences.
    """

    ids: Tensor | None = None
    past: Tensor | None = None


class Tokens:
    """Records the token ids that a model's input embedding receives.

    The embedding is ``get_input_embeddings()`` of a Hugging Face model; in other models, the
    embedding tables with the most rows.
    """

    def __init__(self) -> None:
        self._current = _ThreadTokens()

    def follow(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Context in which the inputs of a model's embedding tables are recorded."""
        return follow_inputs(_embeddings(model), self._record_ids)

    def _record_ids(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Hook: record the ids of an embedding call and append them to the earlier ones."""
        ids = args[0] if args else kwargs.get("input")
        if is_rerun() or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() > 2:
            return
        ids = ids.detach().reshape(-1, ids.shape[-1] if ids.dim() else 1).long()
        current = self._current
        past = current.past
        if past is None or past.shape[0] != ids.shape[0] or past.device != ids.device:
            past = ids[:, :0]
        current.ids = ids
        current.past = torch.cat([past, ids], 1)[:, -_MAX_REMEMBERED:]

    def forget(self) -> None:
        """Forget the token ids recorded in this thread."""
        self._current.ids = self._current.past = None

    def keys(self, batch: int, queries: int, keys: int, last: int) -> Tensor | None:
        """Token ids (B, S) of a call's keys, −1 where unknown; None if none is known.

        Args:
            batch: number of sequences, B.
            queries: number of queries, L.
            keys: number of keys, S.
            last: index of the last query's position among the keys.
        """
        ids, past = self._current.ids, self._current.past
        if ids is None or past is None or ids.shape[1] != queries or ids.shape[0] not in (1, batch):
            return None
        if queries == keys:
            return ids.expand(batch, -1)
        # the last token seen is the last query's own; those before it lie before it in the cache
        count = min(last + 1, past.shape[1], keys)
        if count < queries:
            return None
        key_ids = torch.full((batch, keys), -1, dtype=torch.int64, device=ids.device)
        key_ids[:, last + 1 - count : last + 1] = past[:, past.shape[1] - count :]
        return key_ids


def _embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The embedding modules of a model that receive token ids."""
    tables = [table for table in model.modules() if isinstance(table, torch.nn.Embedding)]
    try:
        declared = unwrap(model).get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        declared = None
    if isinstance(declared, torch.nn.Module) and not isinstance(declared, torch.nn.Embedding):
        return [declared]
    rows = max((table.num_embeddings for table in tables), default=0)
    if declared is not None:
        rows = declared.num_embeddings
    # an encoder and its decoder may have a table each, as large
    return [table for table in tables if table.num_embeddings == rows]


def special_ids(model: torch.nn.Module) -> tuple[int, ...]:
    """Special token ids from a Hugging Face model's configuration; empty for other models."""
    special: set[int] = set()
    model = unwrap(model)
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        for name in _NAMES:
            value = getattr(config, f"{name}_token_id", None)
            values = value if isinstance(value, list | tuple) else [value]
            special.update(token for token in values if type(token) is int and token >= 0)
    return tuple(sorted(special))


@dataclass(frozen=True)
class InputPlaces:
    """Positions of a call's queries and keys in the model's input.

    Attributes:
        queries: (1 or B, L), index of the key at each query's position; None in cross-attention.
        last: index of the key at the position of the call's last query; −1 if not known.
        before: number of input tokens before key 0, dropped by a sliding-window cache.
        begins: whether the call's queries start at the first token of the input.
    """

    queries: Tensor | None
    last: int = -1
    before: int = 0
    begins: bool = True

    @property
    def in_input(self) -> Tensor | None:
        """Position of each query in the input, (1 or B, L); None in cross-attention."""
        return None if self.queries is None else self.queries + self.before

    def of(self, sample: Sample | None) -> InputPlaces:
        """The places of the rows that were drawn; all of them if ``sample`` is None."""
        if sample is None or self.queries is None:
            return self
        positions = sample.positions.to(self.queries.device)
        queries = self.queries.expand(len(positions), -1).gather(1, positions)
        return replace(self, queries=queries)


class PlaceReader(threading.local):
    """Computes :class:`InputPlaces` of calls, counting the tokens of each layer's cache."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def of(self, call: AttentionCall, module: Any = None) -> InputPlaces:
        """Positions of a call's queries and keys.

        If the call has as many queries as keys, or states the first query's position, positions
        follow from that. Otherwise the keys come from a cache, and each query is at the position of
        the last key it sees.

        Args:
            call: the call with all its heads and rows. Pass each call once, since the next may
                continue it.
            module: the attention module; its ``sliding_window`` reveals a cache that drops keys.
        """
        if call.cross:
            return InputPlaces(None)
        queries, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
        if queries >= keys or call.is_causal or call.query_offset:
            first = call.query_offset
            last = first + queries - 1
            places = torch.arange(first, first + queries, device=device)[None]
        else:
            places = last_visible(call.masking())
            last = int(places.max()) if places.numel() else -1
        begins = last < queries
        tokens = queries if begins else self._tokens.get(call.module, 0) + queries
        self._tokens[call.module] = tokens
        window = _window(call, module)
        slides = window is not None and queries < keys == window - 1 + queries
        before = max(0, tokens - 1 - last) if slides and not begins else 0
        return InputPlaces(places, last, before, begins)


def _window(call: AttentionCall, module: Any) -> int | None:
    """Sliding window of a layer in keys, from the call, the module or its configuration."""
    config = getattr(module, "config", None)
    candidates = (getattr(part, "sliding_window", None) for part in (module, config))
    return call.window or next(
        (candidate for candidate in candidates if isinstance(candidate, int)), None
    )
