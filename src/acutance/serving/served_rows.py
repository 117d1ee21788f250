"""ServedRows: statistics of some of the rows that a model computes while it serves requests."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.files import as_json, finite, write_text
from acutance.probing.causes import differences
from acutance.rowstats import RowState, RowStatistics
from acutance.rowstats.metrics import metric_names
from acutance.serving.prometheus import SERVED_METRICS, prometheus_text
from acutance.shapes import check_count
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import Layer, Status
from acutance.summary.moments import Moments, summarise

__all__ = ["RUN", "SERVED", "Run", "ServedRows"]

#: The metrics that are recorded unless others are named.
SERVED = (
    *("n_keys", "entropy", "normalized_entropy", "effective_keys", "top_weight", "first_weight"),
    *("sink_mass", "max_logit", "lse", "logit_mean", "logit_std", "varentropy"),
)
#: Most consecutive rows of a sequence that are chosen together.
RUN = 16
#: Most runs of a layer that are collected before they are summarised.
_MOST_PENDING = 256


class Run(NamedTuple):
    """Consecutive rows of one sequence that are read.

    Attributes:
        sequence: index of the sequence in the pass.
        start: the first row, counted from the sequence's first row in the pass.
        rows: number of rows.
    """

    sequence: int
    start: int
    rows: int


class ServedRows:
    """Reads one row in ``every`` of a model's attention, and accumulates their statistics.

    Rows are chosen in runs of up to 16 consecutive rows of a sequence, each with probability
    1/``every``; a decoded token is a run of one row.

    Args:
        every: one row in so many is read.
        metrics: names of row metrics, such as those of :data:`acutance.METRICS` without
            ``noise_gain``; None for :data:`SERVED`.
        seed: random seed for the choice of rows.

    Attributes:
        rows: number of rows of each layer that the model has computed.
        unread: attention that could not be read, one sentence each, with the reason.

    Raises:
        TypeError: if ``every`` or ``seed`` is not a whole number.
        ValueError: if ``every`` is below 1, or a metric does not exist.

    Example:
        >>> served = ServedRows(every=1)
        >>> served.choose([20, 1])  # a prompt of 20 tokens, and a decoded one
        [Run(sequence=0, start=0, rows=16), Run(sequence=0, start=16, rows=4), Run(...)]
        >>> served = ServedRows(every=16)
        >>> read = sum(run.rows for _ in range(1000) for run in served.choose([100] * 10))
        >>> read, served.rows
        (64180, 1000000)
    """

    def __init__(
        self, *, every: int = 16, metrics: Sequence[str] | None = None, seed: int = 0
    ) -> None:
        check_count("every", every, 1)
        check_count("seed", seed, 0)
        known = metric_names()
        for name in metrics or ():
            if name not in known:
                raise ValueError(f"metrics must be among {', '.join(known)}, got {name!r}")
        self.every, self.rows = every, 0
        self.unread: list[str] = []
        self._random = random.Random(seed)
        self._metrics = tuple(name for name in known if name in (metrics or SERVED))
        self._records: dict[str, tuple[Layer, Moments]] = {}
        self._pending: defaultdict[tuple[Layer, ...], list[RowStatistics]] = defaultdict(list)
        self._verified: dict[tuple[str, bool], tuple[Status, float]] = {}

    def choose(self, lengths: Sequence[int]) -> list[Run]:
        """Choose the runs that are read of a forward pass.

        Args:
            lengths: number of rows of each sequence in the pass.
        """
        self.rows += sum(lengths)
        share, draw = 1.0 / self.every, self._random.random
        return [
            Run(sequence, start, min(RUN, length - start))
            for sequence, length in enumerate(lengths)
            for start in range(0, length, RUN)
            if draw() < share
        ]

    def to_verify(self, names: Sequence[str], one_row: bool) -> bool:
        """Whether a layer's output was not yet compared: for runs of one row, or of several."""
        return any((name, one_row) not in self._verified for name in names)

    def add(
        self,
        names: Sequence[str],
        call: AttentionCall,
        output: Tensor | None,
        chosen: tuple[int, ...] = (),
    ) -> None:
        """Add the rows of one run in several layers.

        Args:
            names: of the layers.
            call: its queries and keys, a sequence for each layer: (layers, Hq, L, E).
            output: the model's output (layers, Hq, L, Ev), which is compared with the one computed
                from the call; None to compare nothing.
            chosen: numbers of the heads, if they are not 0, 1, 2, ….
        """
        one_row = call.query.shape[2] == 1
        if output is None:
            stats = call.statistics(False)
        else:
            rebuilt, stats = call.rebuild(False)
            counted = torch.ones(rebuilt.shape[:3], dtype=torch.bool, device=rebuilt.device)
            errors, tolerance = differences(call, rebuilt, stats.state.m, output, counted)
            for name, error, bound in zip(names, errors, tolerance, strict=True):
                self._compared(name, one_row, float(error.max()), bool((error <= bound).all()))
        heads, source = call.query.shape[1], call.source
        layers = tuple(Layer(name, heads, source=source, chosen=chosen) for name in names)
        waiting = self._pending[layers]
        waiting.append(stats)
        if len(waiting) >= _MOST_PENDING:
            self._summarise(layers)

    def _compared(self, name: str, one_row: bool, error: float, agrees: bool) -> None:
        """Note the result of a comparison of outputs."""
        if not agrees and self._status(name)[0] != "mismatch":
            self.unread.append(
                f"{name}: do not trust its rows: the output recomputed from the cache differs by "
                f"{error:.2g} of its size"
            )
        self._verified[name, one_row] = "checked" if agrees else "mismatch", error

    def _status(self, name: str) -> tuple[Status, float | None]:
        """Status of a layer, and the largest error of its outputs."""
        results = [result for (of, _), result in self._verified.items() if of == name]
        if not results:
            return "captured", None
        error = max(error for _, error in results)
        return ("mismatch" if any(s == "mismatch" for s, _ in results) else "checked"), error

    def _summarise(self, layers: tuple[Layer, ...]) -> None:
        """Move the collected rows of some layers into the records."""
        waiting = self._pending.pop(layers, [])
        if not waiting:
            return
        with torch.inference_mode(False), torch.no_grad():
            fields = zip(*(part.state for part in waiting), strict=True)
            # one layer with all heads: 30 small layers take longer than a large one
            state = RowState(*(torch.cat(parts, 2).flatten(0, 1).unsqueeze(0) for parts in fields))
            counted = torch.ones(state.n.shape, dtype=torch.bool, device=state.n.device)
            values = RowStatistics(state).as_dict(self._metrics)
            moments = summarise(values, counted, self._metrics)
        rows, start = counted.shape[2], 0
        for layer in layers:
            now = replace(layer, calls=len(waiting), rows=rows)
            part = moments.heads(start, start + layer.heads)
            start += layer.heads
            earlier = self._records.get(layer.module)
            if earlier is not None:
                now, part = earlier[0].merge(now), earlier[1].merge(part)
            self._records[layer.module] = now, part

    def summary(self, about: dict[str, Any] | None = None) -> HeadSummary:
        """The statistics so far, for each layer and head.

        Standard errors are those of rows sampled independently; rows of a run resemble each other.

        Raises:
            ValueError: if no row was read.
        """
        for several in list(self._pending):
            self._summarise(several)
        if not self._records:
            reasons = "".join(f"\n  {reason}" for reason in self.unread)
            raise ValueError(f"no row of attention was read yet{reasons}")
        layers, moments = [], []
        for layer, part in self._records.values():
            status, error = self._status(layer.module)
            skipped = max(self.rows - layer.rows, 0)
            layers.append(replace(layer, status=status, error=error, skipped=skipped))
            moments.append(part.sampled(layer.rows + skipped, layer.rows))
        return HeadSummary(
            layers=tuple(layers),
            metrics=self._metrics,
            moments=Moments.join(moments),
            about={"tokens": self.rows, "torch": torch.__version__, **(about or {})},
            unread=tuple(self.unread),
        )

    def write(
        self,
        folder: str | os.PathLike[str],
        name: str = "attention",
        metrics: Sequence[str] = SERVED_METRICS,
        about: dict[str, Any] | None = None,
    ) -> None:
        """Write ``name.prom``, ``name.json`` and ``name.safetensors``, each atomically.

        The JSON holds the columns of :meth:`HeadSummary.columns`; :func:`acutance.load` reads the
        safetensors file.

        Args:
            folder: created if it does not exist.
            name: the beginning of the files' names.
            metrics: those in the ``.prom`` file.
            about: facts to store in the summary.

        Raises:
            ValueError: if no row was read.
        """
        summary, place = self.summary(about), Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        write_text(place / f"{name}.prom", prometheus_text(summary, metrics))
        facts = {"about": dict(summary.about), "unread": list(summary.unread)}
        write_text(place / f"{name}.json", as_json(finite({**facts, "heads": summary.columns()})))
        summary.save(place / f"{name}.safetensors")
