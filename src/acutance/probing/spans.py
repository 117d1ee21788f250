"""Weight of a captured call's rows on named spans of the input.

A span's weight is the output that its keys' values of 1 have: one more pass of the attention
kernel, with a component of the value for each span, gives those of all rows in memory of O(n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, weights_on
from acutance.capture.module_names import module_name, unwrap
from acutance.probing.tokens import InputPlaces
from acutance.summary.spans import ALL_ROWS, MOST_SPANS, OTHER

__all__ = ["Span", "SpanReader", "SpanWeights", "check_spans"]

#: First token and one past the last; None is the end of the sequence.
_Range: TypeAlias = tuple[int, "int | None"]
#: One range for all sequences, one for each, or a boolean (B, S).
Span: TypeAlias = "_Range | Sequence[_Range] | Tensor"


class SpanWeights(NamedTuple):
    """Weights of one call's rows on K spans and on all other keys.

    Attributes:
        mass: (B, H, L, K + 1).
        even: (B, H or 1, L, K + 1), the same where every visible key has the same weight.
        labels: (B or 1, L), number of each query's span, K for none; None where the queries are of
            another sequence.
    """

    mass: Tensor
    even: Tensor
    labels: Tensor | None


class _Spans:
    """The spans of one batch, checked."""

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
        self.parts = [_checked(name, span) for name, span in spans.items()]
        sizes = {name: len(part) for name, part in zip(spans, self.parts, strict=True)}
        batches = {name: size for name, size in sizes.items() if size > 1 or _each(spans[name])}
        if len(set(batches.values())) > 1:
            raise ValueError(
                "spans given for each sequence must all have the same number of sequences, got "
                + ", ".join(f"{name!r} for {size}" for name, size in batches.items())
            )
        #: sequences that the spans are of; None where they are the same for all
        self.batch = next(iter(batches.values()), None)
        widths = {part.shape[1] for part in self.parts if isinstance(part, Tensor)}
        if len(widths) > 1:
            raise ValueError(
                "spans given as masks must have the same length, got "
                f"{', '.join(map(str, sorted(widths)))}"
            )
        #: tokens of the sequences, where masks tell
        self.length = next(iter(widths), None)
        self._check_overlap()
        stops = [
            (name, span)
            for name, part in zip(self.names, self.parts, strict=True)
            if not isinstance(part, Tensor)
            for span in part
        ]
        #: the span that ends last, by name, and where
        self.furthest = max(stops, key=lambda one: one[1][1] or one[1][0] + 1, default=None)

    def _check_overlap(self) -> None:
        ends = [
            end
            for part in self.parts
            if not isinstance(part, Tensor)
            for span in part
            for end in span
            if end is not None
        ]
        length = max([*ends, self.length or 0]) + 1  # one more stands for every later token
        if length > 1 << 24:
            raise ValueError(f"spans must end within the input, got an end at token {length - 1}")
        count = torch.zeros(self.batch or 1, length, dtype=torch.int64, device="cpu")
        for index in range(len(self.parts)):
            count += self._held(index, count.shape[0], 0, length, torch.device("cpu"))
            if bool((count > 1).any()):
                row, place = (count > 1).nonzero()[0].tolist()
                where = f" of sequence {row}" if self.batch is not None else ""
                raise ValueError(
                    f"spans must not overlap: {self.names[index]!r} and a span before it "
                    "both contain "
                    f"token {place}{where}"
                )

    def _held(self, index: int, batch: int, start: int, keys: int, device: torch.device) -> Tensor:
        """Boolean (batch, keys), True on the tokens of a span; key 0 is token ``start``."""
        part = self.parts[index]
        held = torch.zeros(batch, keys, dtype=torch.bool, device=device)
        if isinstance(part, Tensor):
            mask = part[:, start : start + keys].to(device)
            held[:, : mask.shape[1]] = mask
            return held
        for row, (first, stop) in enumerate(part):
            rows = slice(None) if len(part) == 1 else row
            held[rows, max(0, first - start) : None if stop is None else max(0, stop - start)] = (
                True
            )
        return held

    def labels(self, start: int, keys: int, device: torch.device) -> Tensor:
        """Number of each token's span, (B or 1, keys) int64; K for none; key 0 is ``start``."""
        batch = self.batch or 1
        labels = torch.full((batch, keys), len(self.names), device=device)
        for index in range(len(self.names)):
            labels[self._held(index, batch, start, keys, device)] = index
        return labels


class SpanReader:
    """Reads the weight of one probe's calls on spans of the input.

    Args:
        model: what is probed; the keys of a decoder that has an encoder are no part of the input.
        spans: as for :func:`acutance.probe`.

    Raises:
        TypeError: if a span is neither ranges nor a tensor.
        ValueError: if a span is empty, negative, overlaps another or has a name that is in use.
    """

    def __init__(self, model: torch.nn.Module, spans: Mapping[str, Span]) -> None:
        self._spans, self._given = _Spans(spans), spans
        self._decoder = _decoder(model)
        self._longest = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the spans."""
        return self._spans.names

    @property
    def given(self) -> Mapping[str, Span]:
        """The spans of the next batches."""
        return self._given

    @given.setter
    def given(self, spans: Mapping[str, Span]) -> None:
        checked = _Spans(spans)
        if checked.names != self.names:
            raise ValueError(
                f"spans must have the same names for every batch, {', '.join(self.names)}, got "
                f"{', '.join(checked.names)}"
            )
        self.check_length()
        self._spans, self._given, self._longest = checked, spans, 0

    def expect(self, longest: int) -> None:
        """Check the spans against the longest sequence to come.

        Raises:
            ValueError: if one ends beyond it.
        """
        self._longest = longest
        self.check_length()

    def check_length(self) -> None:
        """Raise ValueError if a span ends beyond the longest sequence since the spans were set."""
        if self._spans.furthest is None or not self._longest:
            return
        name, (start, stop) = self._spans.furthest
        if (start + 1 if stop is None else stop) > self._longest:
            end = "the end" if stop is None else stop
            raise ValueError(
                f"spans: {name!r} covers tokens {start} to {end}, but the longest sequence has "
                f"{self._longest} tokens"
            )

    def read(
        self, call: AttentionCall, whole: AttentionCall, places: InputPlaces
    ) -> SpanWeights | None:
        """The weights of a call's rows; None where its keys are no part of the input.

        Args:
            call: of the heads and rows that are read.
            whole: the call before rows were drawn from it.
            places: where they stand.

        Raises:
            ValueError: if the spans are of another batch or another length than the call.
        """
        name = whole.module.partition("#")[0]
        if self._decoder is not None and not whole.cross and f"{name}.".startswith(self._decoder):
            return None
        batch, keys = whole.query.shape[0], whole.key.shape[2]
        tokens = keys if places.queries is None else places.last + 1
        sizes = {keys, tokens} if places.begins else None
        self._check_call(batch, places.before + tokens, sizes)
        labels = self._spans.labels(places.before, keys, call.query.device)
        one_hot = torch.nn.functional.one_hot(labels, len(self.names) + 1)
        asked = None
        if places.queries is not None:
            at = places.queries.clamp(min=0)
            size = torch.broadcast_shapes(at.shape[:1], labels.shape[:1])[0]
            asked = labels.expand(size, -1).gather(1, at.expand(size, -1))
        return SpanWeights(call.weight_on(one_hot), call.even_weight_on(one_hot), asked)

    def read_scores(self, scores: Tensor) -> SpanWeights:
        """The same of self-attention whose scores (B, H, L, S) a model has formed itself.

        Raises:
            ValueError: as :meth:`read`.
        """
        batch, _, queries, keys = scores.shape
        self._check_call(batch, keys, {keys})
        labels = self._spans.labels(0, keys, scores.device)
        one_hot = torch.nn.functional.one_hot(labels, len(self.names) + 1)
        mass, even = weights_on(scores, one_hot)
        return SpanWeights(mass, even, labels if queries == keys else None)

    def _check_call(self, batch: int, tokens: int, sizes: set[int] | None) -> None:
        """Raise ValueError where a call does not fit the spans.

        Args:
            batch: its sequences.
            tokens: of each, so far.
            sizes: what masks may be long; None if the call is a part of the sequences.
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


def check_spans(spans: Mapping[str, Span]) -> None:
    """Raise what :class:`SpanReader` raises of spans, before there is a model."""
    _Spans(spans)


def _each(span: Any) -> bool:
    """Whether a span is given for each sequence."""
    return isinstance(span, Tensor) or not _is_range(span)


def _is_range(span: Any) -> bool:
    return (
        isinstance(span, list | tuple)
        and len(span) == 2
        and all(part is None or type(part) is int for part in span)
    )


def _checked(name: str, span: Any) -> Tensor | list[_Range]:
    """A boolean (B, S), or ranges: one for all sequences, or one for each."""
    if isinstance(span, Tensor):
        if span.dtype != torch.bool or span.dim() != 2:
            raise ValueError(
                f"spans: {name!r} must be a boolean mask (B, S), got "
                f"{tuple(span.shape)} of {span.dtype}"
            )
        if not bool(span.any()):
            raise ValueError(f"spans: {name!r} contains no token")
        return span.detach()
    several = not _is_range(span)
    if several and not (isinstance(span, list | tuple) and span and all(map(_is_range, span))):
        raise TypeError(
            f"spans: {name!r} must be a pair (start, stop), a list of pairs or a "
            "boolean mask (B, S), got "
            f"{span!r:.60}"
        )
    ranges: list[_Range] = []
    for start, stop in span if several else [span]:
        if start is None or start < 0 or (stop is not None and stop <= start):
            raise ValueError(f"spans: {name!r} must have 0 <= start < stop, got ({start}, {stop})")
        ranges.append((start, stop))
    return ranges


def _decoder(model: torch.nn.Module) -> str | None:
    """The beginning of names inside the decoder of an encoder-decoder; None for other models."""
    whole = unwrap(model)
    part: Any = None
    if getattr(getattr(whole, "config", None), "is_encoder_decoder", False):
        part = whole.get_decoder() if hasattr(whole, "get_decoder") else None  # type: ignore[operator]
    elif isinstance(whole, torch.nn.Transformer):
        part = whole.decoder
    for name, module in whole.named_modules():
        if module is part and name:
            return f"{module_name(model, name)}."
    return None
