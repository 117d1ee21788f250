"""Probe: records the attention calls that a listener captures, and summarises them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import NOT_READ, looks_like_weights
from acutance.capture.head_axis import heads_of
from acutance.capture.listener import Listener, ProbeError
from acutance.capture.module_names import class_name
from acutance.capture.padding import checked_mask
from acutance.capture.tap import Tap, tap
from acutance.probing.accumulate import LayerRecords, join_calls
from acutance.probing.causes import is_untrained
from acutance.probing.head_maps import MapReader, RecordedMaps
from acutance.probing.query_key_sample import QueryKeyRecorder, QueryKeySample
from acutance.probing.read_call import CallReader
from acutance.probing.settings import ProbeSettings
from acutance.probing.spans import Span, SpanReader
from acutance.probing.structure import StructureReader
from acutance.probing.tokens import Tokens
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts import READOUTS
from acutance.summary.readouts.call_rows import CallRows

#: Methods for runs over a corpus; ``dir`` leaves them out.
_OF_A_CORPUS = ("number_passes", "expect_tokens", "read_passes")


class _Recorder:
    """Reads each call that a probe's listener captures and adds it to the probe's records.

    Attributes:
        records: the accumulated statistics of each layer.
        reader: reads the statistics of one call.
        listener: captures the calls, and lists those whose rows are not reliable.
    """

    reader: CallReader
    listener: Listener

    def __init__(self, records: LayerRecords) -> None:
        self.records = records

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Record a call that the model computed; ``output`` returns the model's (B, Hq, L, Ev)."""
        self._record(self.reader.call(call, output, module), call.module)

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Record rows whose scores (B, H, L, S) are known, but not their queries and keys."""
        self._record(self.reader.scores(scores, name, doubt), name)

    def compute(
        self, call: AttentionCall, model_output: Callable[[], Tensor], module: torch.nn.Module
    ) -> tuple[Tensor, Callable[[], None]]:
        """Compute a call's output in place of the model.

        Returns:
            The output (B, Hq, L, Ev), and a function that records the call's statistics.
        """
        provided = self.reader.provide(call, model_output)

        def record() -> None:
            self._record(self.reader.provided(call, provided, module), call.module)

        return provided.output, record

    def _record(self, rows: CallRows, name: str) -> None:
        """Add what was read of a call to the records, and list it if it is doubtful."""
        self.records.add(rows)
        if rows.doubt is not None:
            self.listener.unreadable(name, rows.doubt)


class Probe:
    """A context in which a model's attention is recorded; opened by :func:`probe`.

    It may be entered several times: records accumulate.

    Attributes:
        metrics: names of the recorded metrics, in the order of :data:`acutance.METRICS`.
    """

    def __init__(self, model: torch.nn.Module, settings: ProbeSettings) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        settings.check_heads(model)
        self.metrics = settings.recorded
        self._model = model
        self._spans = None if settings.spans is None else SpanReader(model, settings.spans)
        texts: dict[str, dict[str, Any]] = {}
        if self._spans is not None:
            texts["spans"] = {"names": self._spans.names}
        self._records = LayerRecords(
            self.metrics,
            {
                name: partial(
                    readout.cells.without_rows, metrics=len(self.metrics), **texts.get(name, {})
                )
                for name, readout in READOUTS.items()
                if not readout.option or getattr(settings, readout.option)
            },
        )
        self._structure: StructureReader | None = None
        if settings.structure:
            self._structure = StructureReader(
                model,
                settings.tokenizer,
                settings.special,
                settings.examples,
                self._records.so_far,
            )
        self._tokens = None if self._structure is None else self._structure.tokens
        self._maps: MapReader | None = None
        if settings.maps is not None:
            self._tokens = self._tokens or Tokens()
            self._maps = MapReader(model, settings.maps, settings.tokenizer, self._tokens)
        self._queries_keys = QueryKeyRecorder() if settings.keep else None
        readers = (self._structure, self._maps, self._spans, self._queries_keys)
        recorder = _Recorder(self._records)
        self._listener = recorder.listener = Listener(
            model,
            recorder,
            layers=settings.layers,
            every=settings.every,
            attention_mask=settings.attention_mask,
            rows=settings.rows,
            provides=settings.provide,
            context=self._follow_tokens,
        )
        recorder.reader = CallReader(
            settings,
            readers=[reader for reader in readers if reader is not None],
            spans=self._spans,
            thread=self._listener.modules.thread,
            rows=self._listener.rows,
        )

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        try:
            self._listener.__enter__()
            return self
        except KeyboardInterrupt:
            self._listener.__exit__()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._listener.__exit__()
        finally:  # again where an interrupt cut it short
            self._listener.__exit__()
        if kind is None and not self._listener.calls:
            raise ProbeError(self._listener.nothing_captured())
        if kind is None and self._spans is not None:
            self._spans.check_length()

    def _follow_tokens(self) -> AbstractContextManager[None]:
        """Context that records the model's input token ids, if an option needs them."""
        return nullcontext() if self._tokens is None else self._tokens.follow(self._model)

    @property
    def unread(self) -> list[str]:
        """Attention that could not be read, one sentence each, with the reason."""
        return self._listener.unread

    @property
    def not_provided(self) -> list[str]:
        """With ``provide``, attention that the model computed itself, with the reason."""
        return self._listener.not_provided

    @property
    def attention_mask(self) -> Tensor | None:
        """Which tokens of the next batches are real, boolean (B, T); set it for each batch.

        None if it was not given: the mask passed to the model then decides.
        """
        mask = self._listener.rows.mask
        return None if mask is None else mask.real

    @attention_mask.setter
    def attention_mask(self, mask: Tensor | None) -> None:
        self._listener.rows.mask = checked_mask(mask)

    @property
    def spans(self) -> Mapping[str, Span] | None:
        """The named spans of the next batches; assign others of the same names for each batch.

        None if the probe was opened without spans.
        """
        return None if self._spans is None else self._spans.original

    @spans.setter
    def spans(self, spans: Mapping[str, Span]) -> None:
        if self._spans is None:
            raise ValueError("spans can be set only if the probe was opened with spans=")
        self._spans.original = spans

    @property
    def maps(self) -> RecordedMaps:
        """Recorded rows of the heads that ``maps=`` names, one entry per layer and sequence.

        A head is found by any of its names: ``(5, 3)``, ``"layer 5 head 3"`` or ``"5.3"``.

        Rows of different sequences are not averaged. Only the first eight sequences are recorded.
        """
        return RecordedMaps() if self._maps is None else self._maps.maps()

    def number_passes(self, pass_number: int | None) -> None:
        """Set the number of the next forward pass, which seeds row sampling; None counts passes."""
        self._listener.passes.pass_number = pass_number

    def read_passes(self, gradients: bool | None) -> None:
        """Read only passes that record gradients (True), only the others (False), or all (None)."""
        self._listener.passes.gradients = gradients

    def expect_tokens(self, longest: int) -> None:
        """Check that all spans end within sequences of ``longest`` tokens.

        Raises:
            ValueError: if a span ends beyond that.
        """
        if self._spans is not None:
            self._spans.expect(longest)

    def tap(self, query: Tensor, key: Tensor, value: Tensor | None = None, **options: Any) -> Tap:
        """Record attention that the model computes itself, from its queries and keys.

        As :func:`acutance.tap`, for this probe only; without effect while the probe is closed.

        Args:
            query: (B, Hq, L, E).
            key: (B, H, S, E).
            value: (B, H, S, Ev), or None.
            options: those of :func:`acutance.tap`.

        Returns:
            A context manager around the code that computes the attention.

        Raises:
            TypeError: if an option does not exist.
        """
        return tap(query, key, value, **options).only(self._listener)

    # -- results ----------------------------------------------------------------------------------

    def summary(self, about: dict[str, Any] | None = None) -> HeadSummary:
        """Summarise what was recorded so far, layers in model order.

        Args:
            about: facts to store in the summary (model, text); versions are added.

        Raises:
            ProbeError: if nothing was recorded.
        """
        records, modules = self._records.finished(), self._listener.modules
        if self._structure is not None:
            for record in records.values():
                self._structure.name_tokens(record.parts)
        records = join_calls(records, lambda name: heads_of(modules.module_of(name)))
        if not records:
            raise ProbeError(self._listener.nothing_captured())
        return HeadSummary.of_layers(
            [records[name] for name in sorted(records, key=modules.order)],
            self.metrics,
            about={
                "model": class_name(self._model),
                "torch": torch.__version__,
                **({"untrained": True} if is_untrained(self._model) else {}),
                **(about or {}),
            },
            unread=(
                *self.unread,
                *self._not_read(records),
                *(() if self._maps is None else self._maps.unrecorded()),
            ),
            not_provided=tuple(self.not_provided),
            maps=tuple(head_map for maps in self.maps.values() for head_map in maps),
        )

    def _not_read(self, records: Iterable[str]) -> Iterator[str]:
        """Sentences about modules that ran unread and look like attention by class name."""
        mentioned = {name.partition("#")[0] for name in records}
        mentioned |= {text.partition(": ")[0].partition("#")[0] for text in self.unread}
        listener, modules = self._listener, self._listener.modules
        for name in sorted(listener.modules_ran, key=modules.order):
            kind = type(modules.module_of(name)).__name__
            already_mentioned = any(
                other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.")
                for other in mentioned
            )
            if (
                looks_like_weights(kind)
                and not already_mentioned
                and listener.captures_module(name)
            ):
                mentioned.add(name)
                yield f"{name}: {kind} ran, and {NOT_READ}"

    def queries_keys(self) -> QueryKeySample:
        """The recorded queries, keys and values: four heads per layer, one sequence.

        Raises:
            ProbeError: if the probe was not opened with ``keep=True``, or recorded none.
        """
        if self._queries_keys is None:
            raise ProbeError("queries and keys are recorded only by a probe opened with keep=True")
        order = sorted(self._records.names(), key=self._listener.modules.order)
        try:
            return self._queries_keys.sample(order)
        except ValueError as error:
            raise ProbeError(str(error)) from error

    def __repr__(self) -> str:
        count = len(list(self._records.names()))
        state = f"{count} layer{'s' * (count != 1)} read" if count else "nothing read yet"
        return f"Probe of {type(self._model).__name__}: {state}; summary(), findings(), report()"

    def __dir__(self) -> list[str]:
        """Attribute names without those that only runs over a corpus and monitors use."""
        return [name for name in super().__dir__() if name not in _OF_A_CORPUS]

    def findings(self) -> Any:
        """The heads that deserve attention first, a list of :class:`~acutance.report.Finding`.

        Raises:
            ProbeError: if nothing was recorded.
        """
        from acutance.diagnose.findings import findings

        return findings(self.summary())

    def to_frame(self) -> Any:
        """:meth:`HeadSummary.to_frame` of the summary."""
        return self.summary().to_frame()

    def save(self, path: str) -> None:
        """:meth:`HeadSummary.save` of the summary."""
        self.summary().save(path)

    def to_json(self, path: str) -> None:
        """:meth:`HeadSummary.to_json` of the summary."""
        self.summary().to_json(path)

    def report(self, path: str | None = None) -> Any:
        """The summary as one self-contained HTML page, a :class:`~acutance.report.Report`.

        A notebook displays it as the result of a cell.

        Args:
            path: also write the page to this file.
        """
        from acutance.report.html_page.write import Report

        page = Report.of(self.summary())
        if path is not None:
            page.save(path)
        return page
