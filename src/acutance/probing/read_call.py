"""Reading a call: the heads and rows asked for, their statistics, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, differences, observe_scores
from acutance.capture.counted_rows import CountedRows, RowReader
from acutance.capture.head_axis import first_head
from acutance.capture.layer_choice import HeadChoice
from acutance.capture.module_stack import Running
from acutance.kernels.fast_path import PackedStatistics
from acutance.probing.causes import likely_cause
from acutance.probing.head_maps import MapReader
from acutance.probing.query_key_sample import Keeper
from acutance.probing.replace_attention import Provided, Provider
from acutance.probing.row_sampling import Sample, draw, take_heads, take_rows
from acutance.probing.settings import ProbeSettings
from acutance.probing.spans import SpanReader, SpanWeights
from acutance.probing.structure import Structured, StructureReader
from acutance.probing.tokens import PlaceReader
from acutance.rowstats import RowState, RowStatistics
from acutance.summary.head_summary import Layer, Status

__all__ = ["REBUILT", "Read", "Reader"]

#: Begins the doubt about a call of which something was missed.
REBUILT = "do not trust its rows: the output recomputed from the captured arguments differs"


class Read(NamedTuple):
    """What was read of a call.

    Attributes:
        stats: statistics of its rows.
        layer: what is to be told about it.
        kept: boolean (B, H, L), rows that count.
        sample: how they were drawn; None where all are there.
        structured: where their weight lies, if that was requested and can be read.
        on_spans: their weight on spans of the input, likewise.
        doubt: why the rows are not to be trusted, None if nothing speaks against them.
    """

    stats: RowStatistics
    layer: Layer
    kept: Tensor
    sample: Sample | None
    structured: Structured | None = None
    on_spans: SpanWeights | None = None
    doubt: str | None = None


@dataclass(frozen=True)
class _Part:
    """The heads and rows of a call that are read.

    Attributes:
        call: of these heads and rows.
        rows: which rows of the whole call count.
        shape: heads and rows of the whole call.
        heads: which of its heads; None is all.
        chosen: their numbers in the layer, where they are not the first ones.
        sample: how rows were drawn; None if all are read.
    """

    call: AttentionCall
    rows: CountedRows
    shape: tuple[int, int]
    heads: list[int] | None
    chosen: tuple[int, ...]
    sample: Sample | None

    def of(self, rows: Tensor) -> Tensor:
        """Cut the heads and rows of this part out of the whole call's, (B, H, L, ...)."""
        if self.heads is not None and rows.shape[1] == self.shape[0]:
            rows = rows[:, self.heads]
        if self.sample is not None and rows.shape[2] == self.shape[1]:
            rows = self.sample.of(rows)
        return rows

    def kept(self, stats: RowStatistics) -> Tensor:
        """Rows that count: they see a key, and are neither padding nor left out otherwise."""
        real = self.rows.counted if self.sample is None else self.sample.real
        n = stats.n if isinstance(stats, PackedStatistics) else stats.state.n
        kept = n > 0
        return kept if real is None else kept & real[:, None, :]

    def read(
        self,
        stats: RowStatistics,
        status: Status,
        error: float | None = None,
        *,
        provided: bool = False,
    ) -> Read:
        """The rows, and what is known of them."""
        kept, sample, counting = self.kept(stats), self.sample, self.rows
        batch, heads, queries = kept.shape
        padded, padded_by = counting.padded, counting.source
        rows = int(kept.sum((0, 2)).max()) if kept.numel() else 0
        there = batch * queries - padded - counting.excluded if sample is None else sample.taken
        unseen = 0
        if counting.unseen is not None and sample is None:
            unseen = int((kept.any(1) & counting.unseen).sum())
            blank = int((torch.logical_not((stats.state.n > 0).any(1)) & counting.unseen).sum())
            if blank:
                padded, there, padded_by = padded + blank, there - blank, "masks"
        layer = Layer(
            module=self.call.module,
            heads=heads,
            status=status,
            calls=1,
            rows=rows,
            padded=padded,
            padded_by=padded_by if padded else "",
            empty=there - rows,
            excluded=counting.excluded,
            unseen=unseen,
            error=error,
            source=self.call.source,
            chosen=self.chosen,
            skipped=0 if sample is None else sample.total - sample.taken,
            provided=int(provided),
        )
        return Read(stats, layer, kept, sample)


class Reader:
    """How the calls of one probe are read.

    Attributes:
        rows: decides which rows count.
        provider: computes calls in the model's stead, where that is wanted.
        keeper: keeps queries and keys, where that is wanted.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        *,
        structure: StructureReader | None,
        spans: SpanReader | None,
        maps: MapReader | None,
        thread: Running,
        rows: RowReader,
    ) -> None:
        """What a probe reads of each call.

        Args:
            settings: the probe's options.
            structure: reads where rows' weight lies, None if that is not asked for.
            spans: reads their weight on spans of the input, likewise.
            maps: keeps rows of named heads, likewise.
            thread: what is running.
            rows: decides which rows are padding.
        """
        self._settings = settings
        self.structure, self.spans, self.maps = structure, spans, maps
        self._places = PlaceReader()
        self._verify = settings.verify
        self._wanted = settings.noise, settings.gaps
        self._agreed: set[tuple[object, ...]] = set()
        self._asked: set[str] = set()
        self._heads = None if settings.heads is None else HeadChoice(settings.heads)
        self.keeper = Keeper() if settings.keep else None
        self.provider = Provider(settings.verify is True) if settings.provide else None
        self._doubted: set[str] = set()
        self.thread, self.rows = thread, rows

    def provide(self, call: AttentionCall, own: Callable[[], Tensor]) -> Provided:
        """Compute a call in the model's stead.

        Raises:
            ValueError: if it cannot be provided; the message is the reason.
        """
        if self.provider is None:
            raise ValueError("this probe provides nothing")
        return self.provider.provide(call, own, *self._wanted)

    def provided(
        self, call: AttentionCall, found: Provided, module: torch.nn.Module | None
    ) -> Read:
        """A call that was provided."""
        part = self._part(call, module, gather=False)
        stats = found.stats
        if part.heads is not None or part.sample is not None:
            state = RowState(*(part.of(field) for field in stats.state))
            stats = RowStatistics(state, stats.backend)
        status: Status = "checked" if found.error is None else "verified"
        read = part.read(stats, status, found.error, provided=True)
        return self._with_places(part, call, read, module)

    def call(
        self,
        call: AttentionCall,
        output: Callable[[], Tensor] | None,
        module: torch.nn.Module | None,
    ) -> Read:
        """Read a call; ``output`` returns the model's (B, Hq, L, Ev), and is None if unknown."""
        _check_whole(call.query, call.key, call.value)
        part = self._part(call, module)
        doubted = self.provider is not None and call.module in self.provider.suspects
        known = output is not None and call.dropout_p == 0.0
        kind = call.kind() if known and self._verify == "first" else None
        agreed = not doubted and kind in self._agreed
        if output is None or not known or not (self._verify or doubted) or agreed:
            status: Status = "checked" if agreed else "captured"
            read = part.read(part.call.statistics(*self._wanted), status)
            return self._with_places(part, call, read, module)
        rebuilt, stats = part.call.rebuilt(*self._wanted)
        theirs = part.of(output())
        if theirs.shape != rebuilt.shape:
            raise ValueError(
                f"its output has shape {tuple(theirs.shape)}, expected {tuple(rebuilt.shape)}"
            )
        kept = part.kept(stats)
        errors, tolerance = differences(part.call, rebuilt, stats.state.m, theirs, kept)
        good = bool((errors <= tolerance).all())
        error = float(errors.max()) if errors.numel() else 0.0
        read = part.read(stats, "verified" if good else "mismatch", error)
        if good and kind is not None:
            self._agreed.add(kind)
        if not good and call.module not in self._doubted:  # a module's first says it all
            self._doubted.add(call.module)
            cause = self._cause(part, call, output(), kept, module)
            why = f"; {cause}" if cause else call.unknown_keywords()
            read = read._replace(doubt=f"{REBUILT} by {error:.2g} of its size{why}")
        return self._with_places(part, call, read, module)

    def _cause(
        self,
        part: _Part,
        whole: AttentionCall,
        output: Tensor,
        kept: Tensor,
        module: torch.nn.Module | None,
    ) -> str:
        """Why the output differs, judged by all rows: those drawn no longer tell their masks."""
        call = whole if part.heads is None else take_heads(whole, part.heads)
        if part.heads is not None and output.shape[1] == part.shape[0]:
            output = output[:, part.heads]
        if part.sample is not None:
            kept = call.statistics(False).state.n > 0
            if part.rows.counted is not None:
                kept = kept & part.rows.counted[:, None, :]
        return likely_cause(call, output, kept, module)

    def _with_places(
        self, part: _Part, whole: AttentionCall, read: Read, module: torch.nn.Module | None
    ) -> Read:
        """Add structure metrics and weights on spans to a read, where they were requested.

        Also updates the head maps, if there are any.

        Args:
            part: the heads and rows of the call that are read.
            whole: the call with all its heads and rows.
            read: the statistics of those rows.
            module: the module that made the call, if known.
        """
        if self.structure is None and self.spans is None and self.maps is None:
            return read
        call = part.call
        if read.layer.provided:  # computed whole: cut only now
            call = call if part.heads is None else take_heads(call, part.heads)
            call = call if part.sample is None else take_rows(call, part.sample)
        of_whole = self._places.of(whole, module)
        places = of_whole.of(part.sample)
        if self.structure is not None:
            found, rows, tokens = self.structure.read(call, whole, read.stats, places)
            name = read.layer.module
            self.structure.keep(name, rows, read.stats, read.kept, found.positions, tokens)
            read = read._replace(structured=found)
        if self.maps is not None:
            self.maps.read(whole, of_whole, part.rows.counted)
        return self._with_spans(read, lambda spans: spans.read(call, whole, places))

    def _with_spans(self, read: Read, weigh: Callable[[SpanReader], SpanWeights | None]) -> Read:
        """Add the weight on spans, or why it is not known."""
        if self.spans is None:
            return read
        try:
            return read._replace(on_spans=weigh(self.spans))
        except ValueError as error:
            why = f"its weight on the spans is not known: {error}"
            return read._replace(doubt=why if read.doubt is None else f"{read.doubt}; {why}")

    def scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> Read:
        """Read rows from their scores (B, H, L, S) alone; ``doubt`` is asked to verify."""
        _check_whole(scores)
        total, queries = scores.shape[1:3]
        heads = self._chosen(total)
        chosen = scores if heads is None else scores[:, heads]
        stats, seen = observe_scores(chosen, self._settings.gaps)
        counting = self.rows.of_scores(scores, module, stats.state.n, seen)
        none = scores[..., :0]
        call = AttentionCall(module, "softmax", none, none, none)
        numbers = _numbers(0, range(total) if heads is None else heads)
        part = _Part(call, counting, (total, queries), heads, numbers, None)
        asked = self._verify and not (self._verify == "first" and module in self._asked)
        self._asked.add(module)
        against = doubt() if doubt is not None and asked else None
        read = part.read(stats, "unverified" if against is None else "mismatch")
        read = read._replace(doubt=against)
        return self._with_spans(read, lambda spans: spans.read_scores(chosen))

    def _chosen(self, total: int) -> list[int] | None:
        """Heads that are read of so many; None is all."""
        if self._heads is None:
            return None
        heads = self._heads.of(total)
        if not heads:
            raise ValueError(f"none of the requested heads is among its {total}")
        return heads

    def _part(
        self, call: AttentionCall, module: torch.nn.Module | None, *, gather: bool = True
    ) -> _Part:
        """Choose the heads and rows of a call that are read.

        With ``gather``, the part's call has only these; without, all heads and rows of ``call``.
        """
        batch, total, queries, _ = call.query.shape
        counting = self.rows.of(call)
        real = counting.counted
        if self.keeper is not None:
            self.keeper.take(call, real)
        first = first_head(module, call.query)
        sample = None
        if (most := self._settings.max_rows) is not None:
            thread = self.thread
            seed = (self._settings.seed, call.module, thread.turn, thread.call_number(call.module))
            sample = draw(batch, queries, real, most, seed, call.query.device)
        heads = self._chosen(total)
        if heads is not None and gather:
            call = take_heads(call, heads)
        if sample is not None and gather:
            call = take_rows(call, sample)
        numbers = _numbers(first, range(total) if heads is None else heads)
        return _Part(call, counting, (total, queries), heads, numbers, sample)


def _check_whole(*tensors: Tensor) -> None:
    if any(torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors):
        raise ValueError("it runs inside torch.vmap, where one call stands for many")


def _numbers(first: int, heads: list[int] | range) -> tuple[int, ...]:
    """Numbers of the heads in their layer; () where they are the first ones."""
    numbers = tuple(first + head for head in heads)
    return () if numbers == tuple(range(len(numbers))) else numbers
