"""Which tokens a call's rows and keys belong to, and the part of a call that is read."""

from __future__ import annotations

import threading
import zlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import unwrap
from acutance.capture.intercept import follow_results, is_rerun
from acutance.capture.padding import CountedRows
from acutance.probing.accumulate import LayerRecords
from acutance.probing.settings import ProbeSettings
from acutance.structure.statistics import last_visible
from acutance.summary.readouts.moments import CallRows

#: Tokens of each sequence that are remembered, for the keys of a cache.
_MAX_REMEMBERED = 1 << 17
_NAMES = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")


class Tokens(threading.local):
    """Records the token ids that a model's input embedding receives, for each thread.

    The embedding is ``get_input_embeddings()`` of a Hugging Face model; in other models, the
    embedding tables with the most rows.

    Attributes:
        ids: (B, T) of the last embedding call.
        past: (B, T') of that call and the earlier ones of the same sequences.
    """

    ids: Tensor | None = None
    past: Tensor | None = None

    def follow(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Context in which the inputs of a model's embedding tables are recorded."""
        return follow_results(_embeddings(model), self._record_ids)

    def _record_ids(self, module: torch.nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        """Record the ids of an embedding call and append them to the earlier ones."""
        ids = args[0] if args else kwargs.get("input")
        if is_rerun() or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() > 2:
            return
        ids = ids.detach().reshape(-1, ids.shape[-1] if ids.dim() else 1).long()
        past = self.past
        if past is None or past.shape[0] != ids.shape[0] or past.device != ids.device:
            past = ids[:, :0]
        self.ids, self.past = ids, torch.cat([past, ids], 1)[:, -_MAX_REMEMBERED:]

    def keys(self, batch: int, queries: int, keys: int, last: int) -> Tensor | None:
        """Token ids (B, S) of a call's keys, −1 where unknown; None if none is known.

        Args:
            batch: number of sequences, B.
            queries: number of queries, L.
            keys: number of keys, S.
            last: index of the last query's position among the keys.
        """
        ids, past = self.ids, self.past
        if ids is None or past is None or ids.shape[1] != queries or len(ids) not in (1, batch):
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
    sizes = [table.num_embeddings for table in ([declared] if declared is not None else tables)]
    # an encoder and its decoder may have a table each, as large
    return [table for table in tables if table.num_embeddings == max(sizes)]


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


class PlaceReader(threading.local):
    """Finds where calls are in the model's input, counting the tokens of each layer's cache."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def place(self, selected: SelectedCall, module: torch.nn.Module) -> None:
        """Set the positions of a call's queries and keys.

        If the call has as many queries as keys, or states the first query's position, positions
        follow from that. Otherwise the keys come from a cache, and each query is at the position of
        the last key it sees.

        Args:
            selected: the call. Pass each call once, since the next may continue it.
            module: the attention module; its ``sliding_window`` reveals a cache that drops keys.
        """
        call = selected.whole
        if call.cross:
            return
        queries, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
        if queries >= keys or call.is_causal or call.query_offset:
            first = call.query_offset
            last = first + queries - 1
            positions = torch.arange(first, first + queries, device=device)[None]
        else:
            positions = last_visible(call.masking())
            last = int(positions.max()) if positions.numel() else -1
        begins = last < queries
        tokens = queries if begins else self._tokens.get(call.module, 0) + queries
        self._tokens[call.module] = tokens
        selected.queries, selected.last, selected.begins = positions, last, begins
        holders = (module, getattr(module, "config", None))
        windows = (call.window, *(getattr(holder, "sliding_window", None) for holder in holders))
        window = next((size for size in windows if isinstance(size, int) and size), 0)
        if not begins and window and queries < keys == window - 1 + queries:
            selected.before = max(0, tokens - 1 - last)


@dataclass(frozen=True)
class Sample:
    """Rows sampled uniformly, without replacement, from one call.

    Attributes:
        positions: (B, r) indices of sampled queries, ascending; padded at the end of each sequence.
        real: boolean (B, r), False where ``positions`` is padded.
        total: number of rows of the call, without padding.
        n_sampled: number of sampled rows.
    """

    positions: Tensor
    real: Tensor
    total: int
    n_sampled: int

    @staticmethod
    def of(chosen: Tensor, total: int, device: torch.device | None = None) -> Sample:
        """The sample of the rows on which ``chosen``, boolean (B, L), is True."""
        longest = int(chosen.sum(1).max())
        order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :longest]
        real = chosen.gather(1, order)
        return Sample(order.to(device), real.to(device), total, int(real.sum()))

    def select(self, rows: Tensor) -> Tensor:
        """The sampled rows (B, H, r, ...) of a tensor (B, H, L, ...)."""
        index = self.positions.view(len(self.positions), 1, -1, *[1] * (rows.dim() - 3))
        index = index.expand(-1, rows.shape[1], -1, *rows.shape[3:])
        return torch.gather(rows.expand(len(self.positions), *rows.shape[1:]), 2, index)


def draw(real: Tensor, max_rows: int, seed: tuple[object, ...]) -> Sample | None:
    """Sample ``max_rows`` rows of a call at random; None if the call has no more rows than that.

    Args:
        real: boolean (B, L), False on padding.
        max_rows: number of rows to sample.
        seed: any values; the same values give the same rows.

    Example:
        >>> real = torch.ones(2, 5, dtype=torch.bool)
        >>> sample = draw(real, 3, (0, "layer", 0))
        >>> sample.n_sampled, sample.total, int(sample.real.sum())
        (3, 10, 3)
        >>> draw(real, 10, (0,)) is None
        True
    """
    rows = real.flatten().nonzero()[:, 0].cpu()
    if len(rows) <= max_rows:
        return None
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr(seed).encode()))
    order = torch.randperm(len(rows), generator=generator, device="cpu")
    chosen = torch.zeros(real.numel(), dtype=torch.bool, device="cpu")
    chosen[rows[order[:max_rows]]] = True
    return Sample.of(chosen.view(real.shape), len(rows), real.device)


@dataclass
class SelectedCall:
    """The heads and rows of a call that a probe reads, and where they are in the model's input.

    Attributes:
        whole: the call with all its heads and rows.
        rows: which rows of the whole call count.
        heads: indices of the selected heads; None for all.
        first_head: number, in the layer, of this rank's first head.
        sample: how the rows were sampled; None if every row is read.
        queries: (1 or B, L), index of the key at the position of each query of the whole call; None
            in cross-attention.
        last: index of the key at the position of the last query; −1 if not known.
        before: number of input tokens before key 0, dropped by a sliding-window cache.
        begins: whether the queries start at the first token of the input.
    """

    whole: AttentionCall
    rows: CountedRows
    heads: list[int] | None
    first_head: int = 0
    sample: Sample | None = None
    queries: Tensor | None = None
    last: int = -1
    before: int = 0
    begins: bool = True

    @cached_property
    def call(self) -> AttentionCall:
        """The call restricted to the heads and rows that are read."""
        call = self.whole if self.heads is None else take_heads(self.whole, self.heads)
        return call if self.sample is None else take_rows(call, self.sample)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the selected heads in the layer; empty if they are 0, 1, 2, …."""
        numbers = tuple(range(self.first_head, self.first_head + self.whole.query.shape[1]))
        if self.heads is not None:
            numbers = tuple(numbers[head] for head in self.heads)
        return () if numbers == tuple(range(len(numbers))) else numbers

    @property
    def positions(self) -> Tensor | None:
        """Index of the key at the position of each row that is read, (1 or B, r)."""
        if self.sample is None or self.queries is None:
            return self.queries
        rows = self.sample.positions.to(self.queries.device)
        return self.queries.expand(len(rows), -1).gather(1, rows)

    def select(self, rows: Tensor) -> Tensor:
        """Restrict a tensor (B, H, L, ...) of the whole call to the selected heads and rows."""
        _, heads, queries, _ = self.whole.query.shape
        if self.heads is not None and rows.shape[1] == heads:
            rows = rows[:, self.heads]
        if self.sample is not None and rows.shape[2] == queries:
            rows = self.sample.select(rows)
        return rows


def take_heads(call: AttentionCall, heads: list[int]) -> AttentionCall:
    """Restrict a call to some query heads, with the key head of each."""
    total, group = call.query.shape[1], call.query.shape[1] // call.key.shape[1]
    shared = [head // group for head in heads]

    def select(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dim() < 3 or tensor.shape[-3] != total or total == 1:
            return tensor
        return tensor[..., heads, :, :]

    masks: Any = {"attn_mask": select(call.attn_mask), "bias": select(call.bias)}
    sinks = None if call.sinks is None else call.sinks[heads]
    key, value = call.key[:, shared], call.value[:, shared]
    return replace(call, query=call.query[:, heads], key=key, value=value, sinks=sinks, **masks)


def take_rows(call: AttentionCall, sample: Sample) -> AttentionCall:
    """Restrict a call to sampled rows; causality, window and documents become an explicit mask."""
    visible = call.seen_by_position(sample.positions)

    def select(tensor: Tensor | None) -> Tensor | None:
        while tensor is not None and tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        if tensor is None or tensor.shape[2] == 1:
            return tensor
        return sample.select(tensor)

    mask, bias = select(call.attn_mask), select(call.bias)
    if visible is not None and mask is not None and mask.dtype != torch.bool:
        mask = torch.where(visible, mask, -torch.inf)
    elif visible is not None:
        mask = visible if mask is None else mask & visible
    changed: Any = {"query": sample.select(call.query), "attn_mask": mask, "bias": bias}
    changed |= {"is_causal": False, "query_offset": 0, "window": None, "cu_seqlens": None}
    return replace(call, real=sample.real, **changed)


class Reader(ABC):
    """What a probe reads of each call beside the statistics of its rows.

    Args:
        model: the probed model.
        settings: the probe's options.
        tokens: records the token ids that the model's embedding receives.
        records: the statistics accumulated so far.

    Attributes:
        option: the option of a probe that asks for it; empty for what every probe reads.
        needs_tokens: whether it reads token ids.
    """

    option: ClassVar[str] = ""
    needs_tokens: ClassVar[bool] = False

    def __init__(
        self,
        model: torch.nn.Module,
        settings: ProbeSettings,
        tokens: Tokens,
        records: LayerRecords,
    ) -> None:
        self.settings, self.tokens, self.records = settings, tokens, records

    @abstractmethod
    def read(self, selected: SelectedCall, rows: CallRows) -> CallRows:
        """Read a call, and return its rows with what they now also hold."""

    def read_scores(self, scores: Tensor, rows: CallRows) -> CallRows:
        """Read rows whose scores (B, H, L, S) are known, but not their queries and keys."""
        return rows
