"""PlannedCache: transformers' cache of keys and values that holds only what a plan keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from acutance.caching.head_plan import HeadPlan, Plan, value_groups
from acutance.caching.stores import Attend, Store, is_range, some, store_for
from acutance.calibration.apply_law import ApplyError
from acutance.kernels import ragged
from acutance.kernels.ragged import HeldHeads

_reading = 0  # plans that are applied
_lock = threading.Lock()


@contextmanager
def reading() -> Iterator[None]:
    """Context in which attention calls read planned caches, as an applied plan makes them."""
    global _reading
    with _lock:
        _reading += 1
    try:
        yield
    finally:
        with _lock:
            _reading -= 1


class _Pending(threading.local):
    """The layer whose new keys this thread's next attention call reads."""

    layer: PlannedLayer | None = None


_PENDING = _Pending()


def take_pending(key: Tensor) -> PlannedLayer | None:
    """The layer whose new keys these are; None if they come from no planned cache.

    Raises:
        ValueError: if the cache received other keys than the attention call.
    """
    layer, _PENDING.layer = _PENDING.layer, None
    if layer is not None and layer.new_key is not key:
        raise ValueError(
            "its keys are changed after they enter the cache, which a cache plan cannot follow"
        )
    if layer is not None:
        layer.new_key = None
    return layer


def forget_pending() -> None:
    """At the start of a pass: forget what an interrupted one left."""
    _PENDING.layer = None


class PlannedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer, by groups of heads that keep the same.

    Args:
        group: tokens, or channels, that share a scale.
        residual: newest tokens that are not quantised.
    """

    is_sliding = False

    def __init__(self, group: int, residual: int) -> None:
        super().__init__()
        self._group, self._residual = group, residual
        self._length = 0  # tokens with padding
        self._batch = 0
        self._kind: torch.dtype | None = None  # of what is stored
        self._places: dict[HeadPlan, list[int]] = {}  # key heads of each group
        self._stores: list[dict[HeadPlan, Store]] = []  # one, or one for each sequence
        self.new_key: Tensor | None = None

    # -- what transformers asks -------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values alone: the attention call that follows stores them.

        Raises:
            ApplyError: if no plan is applied that makes attention read the cache.
        """
        if not _reading or _PENDING.layer is not None:
            _PENDING.layer = None
            raise ApplyError(
                "a PlannedCache is read only while its plan is applied: run the model inside "
                "acutance.apply(model, plan)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._length += key_states.shape[2]
        self.new_key, _PENDING.layer = key_states, self
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens that were stored, with padding and those forgotten since."""
        return self._length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Keys that the mask of a pass covers, and the first one's index, 0."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        return self._length + count, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def reset(self) -> None:
        """Forget everything."""
        self._stores, self._length, self.is_initialized = [], 0, False

    def crop(self, *_: Any) -> None:
        """Raises ValueError: what was forgotten cannot be brought back."""
        raise ValueError("a PlannedCache cannot be cropped: its heads have forgotten keys")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of these indices, in this order."""
        if not self._stores:
            return
        with torch.inference_mode(False), torch.no_grad():
            if len(self._stores) == 1:
                self._stores = [self._selected(0, indices.to(self.device))]
            else:
                one = torch.zeros(1, dtype=torch.int64, device=self.device)
                self._stores = [self._selected(int(index), one) for index in indices]
        self._batch = len(indices)

    def offload(self) -> None:
        """Raises ValueError: a planned cache stays where the model is."""
        raise ValueError("a PlannedCache cannot be offloaded")

    def prefetch(self) -> None:
        """Nothing."""

    # -- attention --------------------------------------------------------------------------------

    def attend(
        self,
        heads: Sequence[HeadPlan],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        """Store new tokens, and return the output of their rows.

        Args:
            heads: what each key head keeps.
            query: (B, Hq, L, E).
            key: (B, H, L, E), of the new tokens.
            value: (B, H, L, Ev).
            real: (B, L), whether a new token is no padding; None if all are.
            attend: computes attention.

        Returns:
            (B, Hq, L, Ev), zero for padding.
        """
        self._prepare(heads, key, real)
        if query.shape[2] == 1 and real is None:
            output = self._decoded(query, key, value, attend)
            if output is not None:
                return output
        if len(self._stores) == 1 and real is None:
            return _by_groups(self._stores[0], self._places, query, key, value, attend)
        output = query.new_zeros((*query.shape[:3], value.shape[3]))
        for place, stores in enumerate(self._stores):
            one = slice(place, place + 1)
            if real is None:
                tokens = torch.arange(key.shape[2], device=key.device)
            else:
                tokens = real[place].nonzero()[:, 0]
            if len(tokens):
                q, k, v = (part[one][:, :, tokens] for part in (query, key, value))
                output[one, :, tokens] = _by_groups(stores, self._places, q, k, v, attend)
        return output

    def add(self, heads: Sequence[HeadPlan], key: Tensor, value: Tensor) -> None:
        """Store new tokens, none of them padding, that no row reads now.

        Args:
            heads: what each key head keeps.
            key: (B, H, L, E).
            value: (B, H, L, Ev).
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._length += key.shape[2]
        self._prepare(heads, key, None)
        for place, stores in enumerate(self._stores):
            one = slice(None) if len(self._stores) == 1 else slice(place, place + 1)
            for plan, store in stores.items():
                index = self._places[plan]
                store.add(some(key[one], index), some(value[one], index))

    def held(self) -> list[list[HeldHeads]]:
        """What heads hold of each sequence, in one entry if none has padding.

        It is valid until the next token is stored.
        """
        return [
            [
                HeldHeads(self._places[plan], *found)
                for plan, store in stores.items()
                if (found := store.held()) is not None
            ]
            for stores in self._stores
        ]

    def _prepare(self, heads: Sequence[HeadPlan], key: Tensor, real: Tensor | None) -> None:
        """Make the stores: one for all sequences, or one for each where there is padding."""
        if self._stores and len(key) != self._batch:
            raise ValueError(
                f"the cache holds {self._batch} sequences, but new keys are {tuple(key.shape)}"
            )
        if not self._stores:
            self._batch, self._kind = len(key), key.dtype
            self._places = {
                one: [head for head, other in enumerate(heads) if other == one]
                for one in dict.fromkeys(heads)
            }
            self._stores = [self._empty() for _ in range(1 if real is None else len(key))]
        elif real is not None and len(self._stores) == 1 and len(key) > 1:
            with torch.inference_mode(False), torch.no_grad():  # they are written to later
                indices = torch.arange(len(key), device=key.device)
                self._stores = [self._selected(0, index[None]) for index in indices]

    def _decoded(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor | None:
        """:meth:`attend` for one token of each sequence, in one call of the native kernel.

        None, with nothing stored, if that does not support the call.
        """
        width = value.shape[3]
        channels = width // value_groups(width, self._group)
        if not attend.plain or not ragged.supports(query, width, self._group, channels):
            return None
        if not self._kind == query.dtype == key.dtype == value.dtype:
            return None
        held: list[list[HeldHeads]] = []
        for place, stores in enumerate(self._stores):
            held.append([])
            k, v = key, value
            if len(self._stores) > 1:
                k, v = key[place : place + 1], value[place : place + 1]
            for plan, store in stores.items():
                index = self._places[plan]
                found = store.admit(k, v, index)
                if found is not None:
                    held[-1].append(HeldHeads(index, *found))
        scale = query.shape[3] ** -0.5 if attend.scale is None else attend.scale
        return ragged.attend(
            query, key, value, held, scale=scale, tokens=self._group, channels=channels
        )

    def _empty(self) -> dict[HeadPlan, Store]:
        """A store for each group of heads."""
        return {one: store_for(one, self._group, self._residual) for one in self._places}

    def _selected(self, place: int, indices: Tensor) -> dict[HeadPlan, Store]:
        """Copies of the stores at ``place`` with these sequences."""
        return {plan: store.select(indices) for plan, store in self._stores[place].items()}

    def real_counts(self, batch: int) -> list[int]:
        """Stored tokens of each sequence, without padding."""
        if not self._stores:
            return [0] * batch
        counts = [next(iter(stores.values())).n for stores in self._stores]
        return counts * (batch if len(counts) == 1 else 1)

    def tensors(self) -> list[Tensor]:
        """All tensors that hold keys and values."""
        return [
            tensor
            for stores in self._stores
            for store in stores.values()
            for tensor in store.tensors()
        ]


def _by_groups(
    stores: dict[HeadPlan, Store],
    places: dict[HeadPlan, list[int]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Attend,
) -> Tensor:
    """The output of all heads, group by group; ``places`` are the key heads of each group."""
    if len(stores) == 1:
        return next(iter(stores.values())).attend(query, key, value, attend)
    shape = (key.shape[1], query.shape[1] // key.shape[1])
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    by_head, queries = output.unflatten(1, shape), query.unflatten(1, shape)
    for plan, store in stores.items():
        index = places[plan]
        group = some(queries, index).flatten(1, 2)
        part = store.attend(group, some(key, index), some(value, index), attend)
        part = part.unflatten(1, (len(index), shape[1]))
        if is_range(index):
            by_head[:, index[0] : index[-1] + 1] = part
        else:
            by_head[:, index] = part
    return output


class PlannedCache(Cache):  # type: ignore[misc]
    """transformers' cache that holds what a plan keeps.

    :func:`acutance.apply` gives one to every forward pass and every ``generate`` that has no cache
    yet. To continue from it later, pass the cache in its output on as usual. Keys are stored
    after RoPE. Gradients do not reach keys of earlier passes.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        count = len(plan.layers)
        super().__init__(layers=[PlannedLayer(plan.group, plan.residual) for _ in range(count)])

    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())
