"""Which tokens a model reads, and where in its input the rows and keys of a call stand."""

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
from acutance.capture.module_stack import rerun
from acutance.probing.row_sampling import Sample
from acutance.structure.blocks import last_visible

__all__ = ["InputPlaces", "PlaceReader", "Tokens", "special_ids"]

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


@dataclass(frozen=True)
class InputPlaces:
    """Where the rows and keys of a call stand.

    Attributes:
        queries: (1 or B, L), the key at which each query stands; None where queries are of another
            sequence than the keys.
        last: the key at which the whole call's last query stands; −1 where not known.
        before: tokens of the input before key 0, which a cache that slides with a window has lost.
        begins: whether the call holds the whole sequence so far, and so begins a new one.
    """

    queries: Tensor | None
    last: int = -1
    before: int = 0
    begins: bool = True

    @property
    def in_input(self) -> Tensor | None:
        """Where each query stands in the input, (1 or B, L)."""
        return None if self.queries is None else self.queries + self.before

    def of(self, sample: Sample | None) -> InputPlaces:
        """The places of the rows that were drawn; all of them if ``sample`` is None."""
        if sample is None or self.queries is None:
            return self
        positions = sample.positions.to(self.queries.device)
        queries = self.queries.expand(len(positions), -1).gather(1, positions)
        return replace(self, queries=queries)


class PlaceReader(threading.local):
    """Follows the layers of one thread, whose calls may continue from those before."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def of(self, call: AttentionCall, module: Any = None) -> InputPlaces:
        """The places of a call.

        A call whose queries are as many as its keys, or that says where they begin, is believed.
        Else queries are the last of a longer sequence, in a cache, and stand at the last key they
        see.

        Args:
            call: with all its heads and rows. Each call is given once, since the next may continue
                it.
            module: whose call it is; its window tells of a cache that slides.
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
    """The sliding window of a layer, also where a mask stands for it in the call."""
    config = getattr(module, "config", None)
    known = (getattr(part, "sliding_window", None) for part in (module, config))
    return call.window or next((each for each in known if isinstance(each, int)), None)
