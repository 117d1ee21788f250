"""Weight of a captured call's rows on named spans of the input.

If the values are one-hot vectors of each key's span, the attention output is the weight on each
span. One more pass of the kernel gives it for all rows in O(n) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
        self.names = tuple(spans)
        self.parts = [_parse_span(name, span) for name, span in spans.items()]
        sizes = {name: len(part) for name, part in zip(spans, self.parts, strict=True)}
        batches = {
            name: size for name, size in sizes.items() if size > 1 or _is_per_sequence(spans[name])
        }
        if len(set(batches.values())) > 1:
            raise ValueError(
                "spans given for each sequence must all have the same number of sequences, got "
                + ", ".join(f"{name!r} for {size}" for name, size in batches.items())
            )
        self.batch = next(iter(batches.values()), None)
        widths = {part.shape[1] for part in self.parts if isinstance(part, Tensor)}
        if len(widths) > 1:
            raise ValueError(
                "spans given as masks must have the same length, got "
                f"{', '.join(map(str, sorted(widths)))}"
            )
        self.length = next(iter(widths), None)
        ranges = [
            (name, *span)
            for name, part in zip(self.names, self.parts, strict=True)
            if not isinstance(part, Tensor)
            for span in part
        ]
        self.furthest = max(ranges, key=_end, default=None)
        self._check_overlap(max([self.length or 0, *map(_end, ranges)]))

    def _check_overlap(self, length: int) -> None:
        """Raise ValueError if two spans of a text of this length contain the same token."""
        if length >= 1 << 24:
            raise ValueError(f"spans must end within the input, got an end at token {length}")
        # one more token stands for every later one
        count = torch.zeros(self.batch or 1, length + 1, dtype=torch.int64, device="cpu")
        for index, name in enumerate(self.names):
            count += self._token_mask(index, *count.shape, start=0, device=count.device)
            if bool((count > 1).any()):
                row, place = (count > 1).nonzero()[0].tolist()
                of_sequence = f" of sequence {row}" if self.batch is not None else ""
                raise ValueError(
                    f"spans must not overlap: {name!r} and a span before it both contain token "
                    f"{place}{of_sequence}"
                )

    def _token_mask(
        self, index: int, batch: int, keys: int, *, start: int, device: torch.device
    ) -> Tensor:
        """Boolean (batch, keys), True on the tokens of span ``index``; key 0 is token ``start``."""
        part = self.parts[index]
        mask = torch.zeros(batch, keys, dtype=torch.bool, device=device)
        if isinstance(part, Tensor):
            part_mask = part[:, start : start + keys].to(device)
            mask[:, : part_mask.shape[1]] = part_mask
            return mask
        for row, (first, stop) in enumerate(part):
            rows = slice(None) if len(part) == 1 else row
            end = None if stop is None else max(0, stop - start)
            mask[rows, max(0, first - start) : end] = True
        return mask

    def labels(self, start: int, keys: int, device: torch.device) -> Tensor:
        """Span index of each token, (B or 1, keys), K if in none; key 0 is token ``start``."""
        labels = torch.full((self.batch or 1, keys), len(self.names), device=device)
        for index in range(len(self.names)):
            labels[self._token_mask(index, *labels.shape, start=start, device=device)] = index
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
        self._original = settings.spans or {}
        self._spans = _CheckedSpans(settings.spans)
        self._decoder_prefix = _decoder_prefix(model)
        self._longest = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the spans."""
        return self._spans.names

    @property
    def original(self) -> Mapping[str, Span]:
        """The spans of the next batches, as the user gave them."""
        return self._original

    @original.setter
    def original(self, spans: Mapping[str, Span]) -> None:
        checked = _CheckedSpans(spans)
        if checked.names != self.names:
            raise ValueError(
                f"spans must have the same names for every batch, {', '.join(self.names)}, got "
                f"{', '.join(checked.names)}"
            )
        self.check_length()
        self._spans, self._original, self._longest = checked, spans, 0

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
        name = f"{selected.whole.module.partition('#')[0]}."
        prefix = self._decoder_prefix
        if prefix is not None and not selected.whole.cross and name.startswith(prefix):
            return rows
        return self._add(rows, partial(self._weigh, selected))

    def read_scores(self, scores: Tensor, rows: CallRows) -> CallRows:
        """Add the weights on the spans of self-attention with known scores (B, H, L, S)."""
        return self._add(rows, partial(self._weigh_scores, scores))

    def _add(
        self, rows: CallRows, weigh: Callable[[], tuple[Tensor, Tensor, Tensor | None]]
    ) -> CallRows:
        """Add the weights that ``weigh`` returns, or the reason why they are not known."""
        try:
            spans = Spans.of(*weigh(), rows.counted, self.names)
        except ValueError as error:
            reason = f"its weight on the spans is not known: {error}"
            doubt = reason if rows.doubt is None else f"{rows.doubt}; {reason}"
            return rows._replace(doubt=doubt)
        return rows._replace(parts=Parts(rows.parts, spans=spans))

    def _weigh(self, selected: SelectedCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights on the spans, those of even weights, and the queries' spans; see :class:`Spans`.

        Raises:
            ValueError: if the spans are for another batch size or length than the call's.
        """
        call, whole = selected.call, selected.whole
        batch, keys = whole.query.shape[0], whole.key.shape[2]
        tokens = keys if selected.queries is None else selected.last + 1
        sizes = {keys, tokens} if selected.begins else None
        self._check_call(batch, selected.before + tokens, sizes)
        labels = self._spans.labels(selected.before, keys, call.query.device)
        one_hot = torch.nn.functional.one_hot(labels, len(self.names) + 1)
        query_labels = None
        if (positions := selected.positions) is not None:
            positions = positions.clamp(min=0)
            size = torch.broadcast_shapes(positions.shape[:1], labels.shape[:1])[0]
            query_labels = labels.expand(size, -1).gather(1, positions.expand(size, -1))
        return call.weight_on(one_hot), call.uniform_weight_on(one_hot), query_labels

    def _weigh_scores(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """As :meth:`_weigh`, from scores."""
        batch, _, queries, keys = scores.shape
        self._check_call(batch, keys, {keys})
        labels = self._spans.labels(0, keys, scores.device)
        one_hot = torch.nn.functional.one_hot(labels, len(self.names) + 1)
        return *weights_on(scores, one_hot), labels if queries == keys else None

    def _check_call(self, batch: int, tokens: int, sizes: set[int] | None) -> None:
        """Raise ValueError if a call does not fit the spans.

        Args:
            batch: its number of sequences.
            tokens: length of each sequence so far.
            sizes: lengths that a mask may have; None if the call is only a part of the sequences.
        """
        spans = self._spans
        if spans.batch is not None and spans.batch != batch:
            raise ValueError(
                f"spans are given for {spans.batch} sequences, but the call has {batch}"
            )
        if spans.length is not None and sizes is not None and spans.length not in sizes:
            raise ValueError(
                f"spans are given for {spans.length} tokens, but the call has {max(sizes)} keys"
            )
        self._longest = max(self._longest, tokens)


def check_spans(spans: Mapping[str, Span]) -> tuple[str, ...]:
    """Check the option ``spans`` and return its names; raises what :class:`SpanReader` raises."""
    return _CheckedSpans(spans).names


def _end(named_range: tuple[str, int, int | None]) -> int:
    """One past the last token of a range; of one without an end, past its first token."""
    _, start, stop = named_range
    return start + 1 if stop is None else stop


def _is_per_sequence(span: Any) -> bool:
    """Whether a span of keys is given for each sequence separately, not once for all."""
    return isinstance(span, Tensor) or not _is_range(span)


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
            raise ValueError(
                f"spans: {name!r} must be a boolean mask (B, S), got "
                f"{tuple(span.shape)} of {span.dtype}"
            )
        if not bool(span.any()):
            raise ValueError(f"spans: {name!r} contains no token")
        return span.detach()
    per_sequence = not _is_range(span)
    if per_sequence and not (isinstance(span, list | tuple) and span and all(map(_is_range, span))):
        raise TypeError(
            f"spans: {name!r} must be a pair (start, stop), a list of pairs or a "
            "boolean mask (B, S), got "
            f"{span!r:.60}"
        )
    ranges: list[Range] = []
    for start, stop in span if per_sequence else [span]:
        if start is None or start < 0 or (stop is not None and stop <= start):
            raise ValueError(f"spans: {name!r} must have 0 <= start < stop, got ({start}, {stop})")
        ranges.append((start, stop))
    return ranges


def _decoder_prefix(model: torch.nn.Module) -> str | None:
    """Prefix of module names in the decoder of an encoder-decoder; None for other models."""
    unwrapped = unwrap(model)
    part: Any = None
    if getattr(getattr(unwrapped, "config", None), "is_encoder_decoder", False):
        part = unwrapped.get_decoder() if hasattr(unwrapped, "get_decoder") else None  # type: ignore[operator]
    elif isinstance(unwrapped, torch.nn.Transformer):
        part = unwrapped.decoder
    for name, module in unwrapped.named_modules():
        if module is part and name:
            return f"{module_name(model, name)}."
    return None
