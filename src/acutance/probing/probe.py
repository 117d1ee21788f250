"""``probe``: a context in which a model's attention is measured while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from acutance.capture.find_layers import (
    NOT_READ,
    Chosen,
    HeadChoice,
    class_name,
    heads_of,
    looks_like_weights,
)
from acutance.capture.listener import Listener, ProbeError, Tap, tap
from acutance.capture.padding import checked_mask
from acutance.probing.accumulate import LayerRecords, join_calls
from acutance.probing.causes import is_untrained
from acutance.probing.head_maps import MapReader, RecordedMaps
from acutance.probing.query_key_sample import QueryKeyReader, QueryKeySample
from acutance.probing.read_call import CallReader
from acutance.probing.settings import MapRows, ProbeSettings, Span
from acutance.probing.spans import SpanReader, check_spans
from acutance.probing.structure import StructureReader
from acutance.probing.tokens import Reader, Tokens
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts import READOUTS

__all__ = ["READERS", "Probe", "ProbeError", "probe"]

#: What a probe can read of each call beside the statistics of its rows, in this order.
READERS: dict[str, type[Reader]] = {
    "structure": StructureReader,
    "maps": MapReader,
    "spans": SpanReader,
    "queries_keys": QueryKeyReader,
}
#: Methods for runs over a corpus; ``dir`` leaves them out.
_OF_A_CORPUS = ("number_passes", "expect_tokens", "read_passes")


class Probe:
    """A context in which a model's attention is recorded; opened by :func:`probe`.

    It may be entered several times: records accumulate.

    Attributes:
        metrics: names of the recorded metrics, in the order of :data:`acutance.METRICS`.
    """

    def __init__(self, model: torch.nn.Module, settings: ProbeSettings) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if settings.heads is not None:
            HeadChoice(settings.heads).check(model)
        self.metrics = settings.recorded
        self._model = model
        readouts: dict[str, dict[str, Any]] = {
            name: {}
            for name, readout in READOUTS.items()
            if not readout.option or getattr(settings, readout.option)
        }
        if settings.spans is not None:
            readouts["spans"] = {"names": check_spans(settings.spans)}
        self._records = LayerRecords(self.metrics, readouts)
        tokens = Tokens()
        self._readers: dict[str, Any] = {
            name: kind(model, settings, tokens, self._records)
            for name, kind in READERS.items()
            if not kind.option or getattr(settings, kind.option) not in (None, False)
        }
        follows = any(reader.needs_tokens for reader in self._readers.values())
        reader = CallReader(settings, list(self._readers.values()), self._records)
        self._listener = reader.listener = Listener(
            model,
            reader,
            layers=settings.layers,
            every=settings.every,
            attention_mask=settings.attention_mask,
            rows=settings.rows,
            provides=settings.provide,
            context=partial(tokens.follow, model) if follows else nullcontext,
        )

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        try:
            self._listener.__enter__()
            return self
        except KeyboardInterrupt:
            self._listener.__exit__()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._listener.__exit__()
        except BaseException:  # again where an interrupt cut it short
            self._listener.__exit__()
            raise
        if kind is None and not self._listener.calls:
            raise ProbeError(self._listener.nothing_captured())
        if kind is None and "spans" in self._readers:
            self._readers["spans"].check_length()

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
        return self._readers["spans"].original if "spans" in self._readers else None

    @spans.setter
    def spans(self, spans: Mapping[str, Span]) -> None:
        if "spans" not in self._readers:
            raise ValueError("spans can be set only if the probe was opened with spans=")
        self._readers["spans"].original = spans

    @property
    def maps(self) -> RecordedMaps:
        """Recorded rows of the heads that ``maps=`` names, one entry per layer and sequence.

        A head is found by any of its names: ``(5, 3)``, ``"layer 5 head 3"`` or ``"5.3"``.

        Rows of different sequences are not averaged. Only the first eight sequences are recorded.
        """
        return self._readers["maps"].maps() if "maps" in self._readers else RecordedMaps()

    def number_passes(self, pass_number: int | None) -> None:
        """Set the number of the next forward pass, which seeds row sampling; None counts passes."""
        self._listener.pass_number = pass_number

    def read_passes(self, gradients: bool | None) -> None:
        """Read only passes that record gradients (True), only the others (False), or all (None)."""
        self._listener.with_gradients = gradients

    def expect_tokens(self, longest: int) -> None:
        """Check that all spans end within sequences of ``longest`` tokens.

        Raises:
            ValueError: if a span ends beyond that.
        """
        if "spans" in self._readers:
            self._readers["spans"].expect(longest)

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
        records, listener = self._records.finished(), self._listener
        if "structure" in self._readers:
            for record in records.values():
                self._readers["structure"].name_tokens(record.optional_parts)
        records = join_calls(records, lambda name: heads_of(listener.module_of(name)))
        if not records:
            raise ProbeError(self._listener.nothing_captured())
        maps = self._readers.get("maps")
        return HeadSummary.join(
            [records[name] for name in sorted(records, key=listener.order)],
            about={
                "model": class_name(self._model),
                "torch": torch.__version__,
                **({"untrained": True} if is_untrained(self._model) else {}),
                **(about or {}),
            },
            unread=(
                *self.unread,
                *self._not_read(records),
                *(() if maps is None else maps.unrecorded()),
            ),
            not_provided=tuple(self.not_provided),
            maps=tuple(head_map for maps in self.maps.values() for head_map in maps),
        )

    def _not_read(self, records: Iterable[str]) -> Iterator[str]:
        """Sentences about modules that ran unread and look like attention by class name."""
        mentioned = {name.partition("#")[0] for name in records}
        mentioned |= {text.partition(": ")[0].partition("#")[0] for text in self.unread}
        listener = self._listener
        kinds = {name: type(listener.modules.get(name)).__name__ for name in listener.modules_ran}
        attentive = {kind for kind in set(kinds.values()) if looks_like_weights(kind)}
        names = [name for name, kind in kinds.items() if kind in attentive]
        for name in sorted(names, key=listener.order):
            already_mentioned = any(
                other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.")
                for other in mentioned
            )
            if not already_mentioned and listener.captures_module(name):
                mentioned.add(name)
                yield f"{name}: {kinds[name]} ran, and {NOT_READ}"

    def queries_keys(self) -> QueryKeySample:
        """The recorded queries, keys and values: four heads per layer, one sequence.

        Raises:
            ProbeError: if the probe was not opened with ``keep=True``, or recorded none.
        """
        if "queries_keys" not in self._readers:
            raise ProbeError("queries and keys are recorded only by a probe opened with keep=True")
        order = sorted(self._records.names(), key=self._listener.order)
        sample: QueryKeySample = self._readers["queries_keys"].sample(order)
        return sample

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


def probe(
    model: torch.nn.Module,
    *,
    metrics: Sequence[str] | None = None,
    verify: bool | Literal["first"] = "first",
    noise: bool = False,
    gaps: bool = False,
    keep: bool = False,
    every: int = 1,
    layers: Chosen | None = None,
    heads: Chosen | None = None,
    max_rows: int | None = None,
    seed: int = 0,
    provide: bool = False,
    structure: bool = False,
    tokenizer: Any = None,
    special: Iterable[int] | None = None,
    examples: int = 0,
    profile: bool = True,
    spans: Mapping[str, Span] | None = None,
    maps: Mapping[Any, MapRows] | None = None,
    attention_mask: Tensor | None = None,
    rows: Tensor | str = "real",
) -> Probe:
    """Measure a model's attention while it runs, without changing its output.

    Args:
        model: any module; calls inside it are read, whatever else runs.
        metrics: names from :data:`acutance.METRICS`; None is all of them (``noise_gain`` only with
            ``noise``, ``keys_50`` and its like only with ``gaps``).
        verify: recompute outputs from the captured arguments and compare them with the model's. A
            capture that misses something then shows, but outputs are computed twice. ``"first"``
            checks the first call of each kind in each layer, True every call, False none.
        noise: also record ``noise_gain``, which needs a third matrix product.
        gaps: also record how many keys hold 50, 90, 95 and 99 % of a row's weight (``keys_90``),
            from counts of keys by the distance of their logit below the row's maximum. With
            ``structure``, ``critical_ratio`` is then computed on every row, from these counts, and
            not only on about sixteen rows of a sequence.
        keep: also keep a bounded sample of queries and keys: :meth:`Probe.queries_keys`.
        every: read the first of every ``every`` forward passes.
        layers: read these only: numbers of blocks (3 is ``encoder.layer.3``, −1 the last), ranges,
            patterns of module names, or text of several (``"0-3,-1,decoder.*"``).
        heads: read these heads of each layer only: numbers and ranges.
        max_rows: read at most this many rows of a call, drawn at random; the summary has the
            standard error of each mean that results from it.
        seed: random seed for the choice of rows.
        provide: let acutance's kernel compute attention and its statistics in one pass, in place of
            the model's function. Outputs are then equal up to rounding, not bit for bit;
            :attr:`Probe.not_provided` lists calls that the model computed itself, with the reason.
        structure: also record where each row's weight lies: the metrics of
            :data:`acutance.structure.STRUCTURE`, and the weight by octave of distance. Costs a
            second pass over the scores.
        tokenizer: gives ``structure`` the ids of special tokens, and examples and maps their words.
        special: ids of special tokens instead of the tokenizer's; without both, those of the
            model's configuration.
        examples: keep this many of each head's sharpest rows, with the tokens they attend to
            (implies ``structure``).
        profile: also record each metric by octave of n (:attr:`HeadSummary.profile`), which
            standard errors and slopes against n need. False saves time and memory.
        spans: named parts of the input, as ``{"system": (0, 31), "document": (31, 800)}``: also
            record how much weight the rows of each part, and all rows, put on each part
            (:attr:`HeadSummary.spans`). A part is a pair of the first token and one past the last
            (None: to the end), a list of such pairs, one for each sequence of the batch, or a
            boolean (B, S). Tokens are counted from the first column of the input, padding included,
            also while a cache is decoded. Set :attr:`Probe.spans` for each batch. Costs a second
            pass over the scores.
        maps: rows of attention weights to keep, as ``{"layer 5 head 3": [0, 10, 511]}``: for each
            head the positions of its rows in the input, a number, several or a slice, at most 64
            (:attr:`Probe.maps`). A head is named ``"layer 5 head 3"``, ``"5.3"`` or ``(5, 3)``;
            layers are named as for ``layers``.
        attention_mask: which tokens are real, (B, T), 1 or True; their rows count, those of padding
            do not. Needed only where the model is called without such a mask: one that a module
            gets as ``attention_mask``, ``mask``, ``key_padding_mask`` or ``padding_mask`` is read
            from the call. Set :attr:`Probe.attention_mask` for each batch. Calls of other sizes are
            read as if there were none.
        rows: which rows count: ``"real"``, all but padding; ``"all"``; or a boolean tensor, (L,) or
            (B, L), for some of the real ones. Calls of other sizes are then listed as not read.

    Returns:
        A context manager. Leaving it raises :class:`ProbeError` if the model ran no attention the
        probe can see; results are in :meth:`Probe.summary`.

    Raises:
        TypeError: if ``model`` is not a module, or an option has a wrong type.
        ValueError: if a metric does not exist (naming the nearest), layers choose nothing, heads
            are more than the model has, a number is too small, ``attention_mask`` or ``rows`` has
            another shape or other values, or ``spans`` are empty, negative or overlap. Leaving the
            context raises it if a span ends beyond the longest sequence that the model got.

    Example:
        >>> import torch, acutance
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> with acutance.probe(model) as probe:
        ...     _ = model(torch.randn(2, 10, 16))
        >>> frame = probe.summary().columns()
        >>> frame["head"], frame["rows"]
        ([0, 1, 2, 3], [20, 20, 20, 20])
    """
    settings = dict(locals())
    return Probe(settings.pop("model"), ProbeSettings(**settings))
