"""Weight of a captured call's rows on named spans of the input.

If the values are one-hot vectors of each key's span, the attention output is the weight on each
span. One more pass of the kernel gives it for all rows in O(n) memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import weights_on
from acutance.capture.find_layers import module_name, unwrap
from acutance.probing.settings import ProbeSettings, Range, Span
from acutance.probing.tokens import Reader, SelectedCall
from acutance.summary.cells import Parts
from acutance.summary.readouts.moments import CallRows
from acutance.summary.readouts.spans import ALL_ROWS, MOST_SPANS, OTHER, Spans


class _CheckedSpans:
    """The checked spans of one batch.

    Attributes:
        given: the spans as the user gave them.
        names: the spans' names.
        parts: for each span a boolean (B, S), or (start, stop) for all or for each sequence.
        batch: number of sequences that the spans are for; None if they are the same for all.
        length: number of tokens, where a span is a mask; None otherwise.
        furthest: name, start and stop of the range that ends last; None if all are masks.
    """

    def __init__(self, spans: Any) -> None:
        if not isinstance(spans, Mapping):
            raise TypeError(f"spans must map names to ranges of tokens, got {type(spans).__name__}")
        if not 1 <= len(spans) <= MOST_SPANS:
            raise ValueError(
                f"spans must name 1 to {MOST_SPANS} parts of the input, got {len(spans)}"
            )
        for name in spans:
            if not isinstance(name, str) or not name or name in (OTHER, ALL_ROWS):
                raise ValueError(
                    f"the name of a span must be text other than {OTHER!r} and "
                    f"{ALL_ROWS!r}, got {name!r}"
                )
        self.given: Mapping[str, Span] = spans
        self.names = tuple(spans)
        self.parts = [_parse_span(name, span) for name, span in spans.items()]
        named = dict(zip(self.names, self.parts, strict=True))
        batches = {name: len(part) for name, part in named.items() if not _is_range(spans[name])}
        if len(set(batches.values())) > 1:
            raise ValueError(
                "spans given for each sequence must all have the same number of sequences, got "
                + ", ".join(f"{name!r} for {size}" for name, size in batches.items())
            )
        self.batch = next(iter(batches.values()), None)
        masks = {name: part for name, part in named.items() if isinstance(part, Tensor)}
        widths = sorted({mask.shape[1] for mask in masks.values()})
        if len(widths) > 1:
            shown = ", ".join(map(str, widths))
            raise ValueError(f"spans given as masks must have the same length, got {shown}")
        self.length = widths[0] if widths else None
        ranges = [(name, *span) for name in named if name not in masks for span in named[name]]
        self.furthest = max(ranges, key=_end, default=None)
        length = max([self.length or 0, *map(_end, ranges)])
        if length >= 1 << 24:
            raise ValueError(f"spans must end within the input, got an end at token {length}")
        # one more token stands for every later one
        count = torch.zeros(self.batch or 1, length + 1, dtype=torch.int64, device="cpu")
        for name, mask in zip(self.names, self._masks(0, length + 1, count.device), strict=True):
            count += mask
            if bool((count > 1).any()):
                row, token = (count > 1).nonzero()[0].tolist()
                of_sequence = f" of sequence {row}" if self.batch is not None else ""
                raise ValueError(
                    f"spans must not overlap: {name!r} and a span before it both contain token "
                    f"{token}{of_sequence}"
                )

    def _masks(self, start: int, keys: int, device: torch.device) -> Iterator[Tensor]:
        """For each span a boolean (B or 1, keys), True on its tokens; key 0 is token ``start``."""
        for part in self.parts:
            mask = torch.zeros(self.batch or 1, keys, dtype=torch.bool, device=device)
            if isinstance(part, Tensor):
                tokens = part[:, start : start + keys].to(device)
                mask[:, : tokens.shape[1]] = tokens
            else:
                for row, (first, stop) in enumerate(part):
                    rows = slice(None) if len(part) == 1 else row
                    end = None if stop is None else max(0, stop - start)
                    mask[rows, max(0, first - start) : end] = True
            yield mask

    def labels(self, start: int, keys: int, device: torch.device) -> Tensor:
        """Span index of each token, (B or 1, keys), K if in none; key 0 is token ``start``."""
        labels = torch.full((self.batch or 1, keys), len(self.names), device=device)
        for index, mask in enumerate(self._masks(start, keys, device)):
            labels[mask] = index
        return labels


class SpanReader(Reader):
    """Measures the weight of a probe's calls on named spans of the input.

    Keys of a decoder that has an encoder are not part of the input.

    Raises:
        TypeError: if a span is neither ranges nor a tensor.
        ValueError: if a span is empty, negative, overlaps another or has a reserved name.
    """

    option = "spans"

    def __init__(self, model: torch.nn.Module, settings: ProbeSettings, *others: Any) -> None:
        super().__init__(model, settings, *others)
        self._spans = _CheckedSpans(settings.spans)
        self._decoder_prefix = _decoder_prefix(model)
        self._longest = 0

    @property
    def original(self) -> Mapping[str, Span]:
        """The spans of the next batches, as the user gave them."""
        return self._spans.given

    @original.setter
    def original(self, spans: Mapping[str, Span]) -> None:
        checked = _CheckedSpans(spans)
        if checked.names != self._spans.names:
            raise ValueError(
                "spans must have the same names for every batch, "
                f"{', '.join(self._spans.names)}, got {', '.join(checked.names)}"
            )
        self.check_length()
        self._spans, self._longest = checked, 0

    def expect(self, longest: int) -> None:
        """Check that all spans end within sequences of ``longest`` tokens.

        Raises:
            ValueError: if one ends beyond that.
        """
        self._longest = longest
        self.check_length()

    def check_length(self) -> None:
        """Raise ValueError if a span ends beyond the longest sequence since the spans were set."""
        if self._spans.furthest is None or not self._longest:
            return
        name, start, stop = self._spans.furthest
        if _end(self._spans.furthest) > self._longest:
            end = "the end" if stop is None else stop
            raise ValueError(
                f"spans: {name!r} covers tokens {start} to {end}, but the longest sequence has "
                f"{self._longest} tokens"
            )

    def read(self, selected: SelectedCall, rows: CallRows) -> CallRows:
        """Add the weights of a call's rows on the spans, if its keys are part of the input.

        The rows are doubtful if the spans are for another batch size or length than the call's.
        """
        call, whole = selected.call, selected.whole
        name, prefix = f"{whole.module.partition('#')[0]}.", self._decoder_prefix
        if prefix is not None and not whole.cross and name.startswith(prefix):
            return rows
        batch, keys = whole.query.shape[0], whole.key.shape[2]
        tokens = keys if selected.queries is None else selected.last + 1
        sizes = {keys, tokens} if selected.begins else set()
        if misfit := self._misfit(batch, selected.before + tokens, sizes):
            return _doubted(rows, misfit)
        labels, one_hot = self._labels(selected.before, keys, call.query.device)
        query_labels = None
        if (positions := selected.positions) is not None:
            size = max(len(positions), len(labels))
            positions = positions.clamp(min=0).expand(size, -1)
            query_labels = labels.expand(size, -1).gather(1, positions)
        try:
            weights = call.weight_on(one_hot), call.uniform_weight_on(one_hot)
        except ValueError as error:  # of calls with moved keys
            return _doubted(rows, str(error))
        return self._with(rows, *weights, query_labels)

    def read_scores(self, scores: Tensor, rows: CallRows) -> CallRows:
        """Add the weights on the spans of self-attention with known scores (B, H, L, S)."""
        batch, _, queries, keys = scores.shape
        if misfit := self._misfit(batch, keys, {keys}):
            return _doubted(rows, misfit)
        labels, one_hot = self._labels(0, keys, scores.device)
        weights = weights_on(scores, one_hot)
        return self._with(rows, *weights, labels if queries == keys else None)

    def _labels(self, start: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Span index of each key, (B or 1, S), and as one-hot vectors (B or 1, S, K + 1)."""
        labels = self._spans.labels(start, keys, device)
        return labels, torch.nn.functional.one_hot(labels, len(self._spans.names) + 1)

    def _with(self, rows: CallRows, mass: Tensor, even: Tensor, labels: Tensor | None) -> CallRows:
        """The rows with their weights on the spans; see :meth:`Spans.of`."""
        spans = Spans.of(mass, even, labels, rows.counted, self._spans.names)
        return rows._replace(parts=Parts(rows.parts, spans=spans))

    def _misfit(self, batch: int, tokens: int, sizes: set[int]) -> str:
        """Why the spans do not fit a call; empty if they do.

        Args:
            batch: its number of sequences.
            tokens: length of each sequence so far.
            sizes: lengths that a mask may have; empty if the call is only a part of the sequences.
        """
        spans = self._spans
        if spans.batch is not None and spans.batch != batch:
            return f"spans are given for {spans.batch} sequences, but the call has {batch}"
        if spans.length is not None and sizes and spans.length not in sizes:
            return f"spans are given for {spans.length} tokens, but the call has {max(sizes)} keys"
        self._longest = max(self._longest, tokens)
        return ""


def _doubted(rows: CallRows, misfit: str) -> CallRows:
    """The rows with the reason why their weight on the spans is not known."""
    reason = f"its weight on the spans is not known: {misfit}"
    return rows._replace(doubt=reason if rows.doubt is None else f"{rows.doubt}; {reason}")


def check_spans(spans: Mapping[str, Span]) -> tuple[str, ...]:
    """Check the option ``spans`` and return its names; raises what :class:`SpanReader` raises."""
    return _CheckedSpans(spans).names


def _end(named_range: tuple[str, int, int | None]) -> int:
    """One past the last token of a range; of one without an end, past its first token."""
    _, start, stop = named_range
    return start + 1 if stop is None else stop


def _is_range(span: Any) -> bool:
    """Whether a value is a pair of whole numbers or None, (start, stop)."""
    return (
        isinstance(span, list | tuple)
        and len(span) == 2
        and all(part is None or type(part) is int for part in span)
    )


def _parse_span(name: str, span: Any) -> Tensor | list[Range]:
    """Check one span: a boolean (B, S), or ranges, one for all sequences or one for each."""
    if isinstance(span, Tensor):
        if span.dtype != torch.bool or span.dim() != 2:
            kind = f"{tuple(span.shape)} of {span.dtype}"
            raise ValueError(f"spans: {name!r} must be a boolean mask (B, S), got {kind}")
        if not bool(span.any()):
            raise ValueError(f"spans: {name!r} contains no token")
        return span.detach()
    ranges = [span] if _is_range(span) else span
    if not (isinstance(ranges, list | tuple) and ranges and all(map(_is_range, ranges))):
        raise TypeError(
            f"spans: {name!r} must be a pair (start, stop), a list of pairs or a boolean mask "
            f"(B, S), got {span!r:.60}"
        )
    for start, stop in ranges:
        if start is None or start < 0 or (stop is not None and stop <= start):
            raise ValueError(f"spans: {name!r} must have 0 <= start < stop, got ({start}, {stop})")
    return [(start, stop) for start, stop in ranges]


def _decoder_prefix(model: torch.nn.Module) -> str | None:
    """Prefix of module names in the decoder of an encoder-decoder; None for other models."""
    unwrapped: Any = unwrap(model)
    decoder: Any = None
    if getattr(getattr(unwrapped, "config", None), "is_encoder_decoder", False):
        decoder = unwrapped.get_decoder() if hasattr(unwrapped, "get_decoder") else None
    elif isinstance(unwrapped, torch.nn.Transformer):
        decoder = unwrapped.decoder
    names = (name for name, module in unwrapped.named_modules() if module is decoder and name)
    return next((f"{module_name(model, name)}." for name in names), None)
