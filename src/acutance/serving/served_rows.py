"""ServedRows: statistics of some rows of a model that serves requests, and prometheus_text."""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.files import as_json, finite, write_text
from acutance.probing.causes import differences
from acutance.rowstats import RowState, RowStatistics
from acutance.rowstats.metrics import metric, metric_names
from acutance.shapes import check_count
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import Layer, Status
from acutance.summary.readouts.moments import Moments, stack, summarise

#: The metrics that are recorded unless others are named.
SERVED = (
    *("n_keys", "entropy", "normalized_entropy", "effective_keys", "top_weight", "first_weight"),
    *("sink_mass", "max_logit", "lse", "logit_mean", "logit_std", "varentropy"),
)
#: The metrics that are exposed unless others are named: a series for each head is not cheap.
SERVED_METRICS = ("entropy", "effective_keys", "first_weight", "max_logit", "top_weight")
#: Rows, each of one head, that are collected before they are summarised: what fits into caches.
_MOST_PENDING = 1 << 15


class ServedRows:
    """Reads one row in ``every`` of a model's attention, and accumulates their statistics.

    A thread may ask for a summary while another one adds rows.

    Args:
        every: one row in so many is read.
        metrics: names of row metrics, such as those of :data:`acutance.METRICS` without
            ``noise_gain``; None for :data:`SERVED`.
        seed: random seed for the choice of rows.

    Attributes:
        rows: number of rows of each layer that the model has computed.
        unread: attention that could not be read, one sentence each, with the reason.
        finish: called before each summary, to add the rows that wait; None if none wait.

    Raises:
        TypeError: if ``every`` or ``seed`` is not a whole number.
        ValueError: if ``every`` is below 1, or a metric does not exist.

    Example:
        >>> served = ServedRows(every=16)
        >>> sum(served.draw() for _ in range(100_000))
        6323
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
        self.finish: Callable[[], None] | None = None
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._metrics = tuple(name for name in known if name in (metrics or SERVED))
        self._records: dict[tuple[Layer, ...], HeadSummary] = {}
        self._pending: defaultdict[tuple[Layer, ...], list[RowStatistics]] = defaultdict(list)
        self._waiting = 0
        self._verified: dict[tuple[str, bool], tuple[Status, float]] = {}

    def draw(self) -> bool:
        """Whether the next rows are read: True for one call in ``every``, at random."""
        return self._random.random() * self.every < 1.0

    def to_verify(self, names: Sequence[str], decoded: bool) -> bool:
        """Whether a layer's output was not yet compared: for decoded rows, or those of prompts."""
        return any((name, decoded) not in self._verified for name in names)

    def add(
        self,
        names: Sequence[str],
        call: AttentionCall,
        output: Tensor | None,
        *,
        decoded: bool = False,
        chosen: tuple[int, ...] = (),
    ) -> None:
        """Add the rows of one run in several layers.

        Args:
            names: of the layers.
            call: its queries and keys, a sequence for each layer: (layers, Hq, L, E).
            output: the model's output (layers, Hq, L, Ev), which is compared with the one computed
                from the call; None to compare nothing.
            decoded: whether the rows came one by one.
            chosen: numbers of the heads, if they are not 0, 1, 2, ….
        """
        comparisons: list[tuple[str, float, bool]] = []
        if output is None:
            stats = call.statistics(False)
        else:
            rebuilt, stats = call.rebuild(False)
            counted = torch.ones(rebuilt.shape[:3], dtype=torch.bool, device=rebuilt.device)
            errors, tolerance = differences(call, rebuilt, stats.state.m, output, counted)
            for name, error, bound in zip(names, errors, tolerance, strict=True):
                comparisons.append((name, float(error.max()), bool((error <= bound).all())))
        heads, source = call.query.shape[1], call.source
        layers = tuple(Layer(name, heads, source=source, chosen=chosen) for name in names)
        with self._lock:
            for name, largest, agrees in comparisons:
                if not agrees and self._status(name)[0] != "mismatch":
                    self.unread.append(
                        f"{name}: do not trust its rows: the output recomputed from the cache "
                        f"differs by {largest:.2g} of its size"
                    )
                self._verified[name, decoded] = "checked" if agrees else "mismatch", largest
            self._pending[layers].append(stats)
            self._waiting += stats.state.n.numel()
            if self._waiting >= _MOST_PENDING:
                self._summarise_all()

    @property
    def empty(self) -> bool:
        """Whether no row was added yet."""
        with self._lock:
            return not self._records and not self._pending

    def _status(self, name: str) -> tuple[Status, float | None]:
        """Status of a layer, and the largest error of its outputs."""
        results = [result for (of, _), result in self._verified.items() if of == name]
        if not results:
            return "captured", None
        error = max(error for _, error in results)
        return ("mismatch" if any(s == "mismatch" for s, _ in results) else "checked"), error

    def _summarise_all(self) -> None:
        """Move all collected rows into the records, those of layers that are read together at once.

        They are taken as one layer with all heads: 30 small layers take longer than a large one.
        """
        for layers in list(self._pending):
            waiting = self._pending.pop(layers)
            with torch.inference_mode(False), torch.no_grad():
                fields = zip(*(stats.state for stats in waiting), strict=True)
                state = RowState(
                    *(torch.cat(rows, 2).flatten(0, 1).unsqueeze(0) for rows in fields)
                )
                counted = torch.ones(state.n.shape, dtype=torch.bool, device=state.n.device)
                values = RowStatistics(state).as_dict(self._metrics)
                moments = summarise(stack(values, self._metrics), counted, self._metrics)
            calls, rows = len(waiting), counted.shape[2]
            read = tuple(replace(layer, calls=calls, rows=rows) for layer in layers)
            record = HeadSummary(read, self._metrics, moments)
            earlier = self._records.get(layers)
            self._records[layers] = record if earlier is None else earlier.merge(record)
        self._waiting = 0

    def summary(self, about: dict[str, Any] | None = None) -> HeadSummary:
        """The statistics so far, for each layer and head.

        Standard errors are those of rows sampled independently; rows of a run resemble each other.

        Raises:
            ValueError: if no row was read.
        """
        if self.finish is not None:
            self.finish()  # before the lock: it waits for an engine that adds rows
        with self._lock:
            self._summarise_all()
            if not self._records:
                reasons = "".join(f"\n  {reason}" for reason in self.unread)
                raise ValueError(f"no row of attention was read yet{reasons}")
            read = reduce(HeadSummary.merge, self._records.values())
            layers, moments, start = [], [], 0
            for layer in read.layers:
                status, error = self._status(layer.module)
                skipped = max(self.rows - layer.rows, 0)
                layers.append(replace(layer, status=status, error=error, skipped=skipped))
                rows = read.moments.heads(start, start + layer.heads)
                moments.append(rows.sampled(layer.rows + skipped, layer.rows))
                start += layer.heads
            return replace(
                read,
                layers=tuple(layers),
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


def prometheus_text(
    summary: HeadSummary,
    metrics: Sequence[str] = SERVED_METRICS,
    labels: Iterable[tuple[str, str]] = (),
) -> str:
    r"""The sums, counts and largest values of each head, in Prometheus' text format.

    Sums and counts only grow, so ``rate(acutance_entropy_sum[5m]) /
    rate(acutance_entropy_count[5m])`` is the mean over the rows of the last five minutes. The
    largest value is that of all rows so far.

    Args:
        summary: any summary.
        metrics: names of recorded metrics; those that the summary lacks are left out.
        labels: further labels of every series, as pairs of name and value.

    Raises:
        ValueError: if a metric does not exist.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> print(prometheus_text(probe.summary(), ["effective_keys"]))
        # HELP acutance_effective_keys Attention rows: effective_keys of each head.
        # TYPE acutance_effective_keys summary
        acutance_effective_keys_sum{layer="0",module="...",head="0"} 16
        acutance_effective_keys_count{layer="0",module="...",head="0"} 4
        acutance_effective_keys_sum{layer="0",module="...",head="1"} 16
        acutance_effective_keys_count{layer="0",module="...",head="1"} 4
        # HELP acutance_effective_keys_max Largest effective_keys of a row so far.
        # TYPE acutance_effective_keys_max gauge
        acutance_effective_keys_max{layer="0",module="...",head="0"} 4
        acutance_effective_keys_max{layer="0",module="...",head="1"} 4
        <BLANKLINE>
    """
    more = "".join(f",{name}={_quoted(value)}" for name, value in labels)
    places = [
        f'{{layer="{layer}",module={_quoted(summary.layers[layer].module)},head="{head}"{more}}}'
        for layer, head in summary.places
    ]
    lines = []
    for name in metrics:
        metric(name)  # an unknown name says what is near it
        if name not in summary.metrics:
            continue
        column, series = summary.column(name), f"acutance_{name}"
        moments = summary.moments
        count = moments.count[:, column]
        sums, highs = moments.mean[:, column] * count, moments.high[:, column]
        rows = list(zip(places, sums.tolist(), count.tolist(), highs.tolist(), strict=True))
        lines += [
            f"# HELP {series} Attention rows: {name} of each head.",
            f"# TYPE {series} summary",
        ]
        for place, total, number, _ in rows:
            lines.append(f"{series}_sum{place} {total if number else 0.0:.10g}")
            lines.append(f"{series}_count{place} {number}")
        lines += [
            f"# HELP {series}_max Largest {name} of a row so far.",
            f"# TYPE {series}_max gauge",
        ]
        lines += [f"{series}_max{place} {high:.10g}" for place, _, number, high in rows if number]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """A label's value in quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
