"""Read attention in vLLM: a plugin that samples rows from the paged cache of its layers.

vLLM loads the functions of the group ``vllm.general_plugins`` in each of its processes. Ours does
nothing unless :data:`FOLDER` is set in the environment.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.kernel_functions.reading import alibi
from acutance.serving.cache_layout import CacheLayout
from acutance.serving.served_rows import ServedRows

#: Environment variables: where to write, one row in how many is read, seconds between writes.
FOLDER, EVERY, SECONDS = "ACUTANCE_VLLM_FOLDER", "ACUTANCE_VLLM_EVERY", "ACUTANCE_VLLM_SECONDS"
#: Most consecutive rows of a sequence that are read together. The kernels compute 32 rows at once.
RUN = 32
#: Seconds without a pass after which the files are written.
_IDLE = 2.0


class Rows(NamedTuple):
    """The rows of one sequence in a forward pass.

    Attributes:
        position: of the first row in the sequence.
        length: number of rows.
        slot: where the key of the first row is stored in the cache.
        last_slot: where the key of the last row is stored.
    """

    position: int
    length: int
    slot: int
    last_slot: int


@dataclass(eq=False)
class Run:
    """Consecutive rows of one sequence that are read together.

    Attributes:
        position: of the first row in the sequence.
        decoded: whether the rows come one by one.
        rows: number of rows so far.
        recorded: what the reader stores of them.
    """

    position: int
    decoded: bool
    rows: int = 0
    recorded: dict[Any, Any] = field(default_factory=dict)


class Piece(NamedTuple):
    """Rows of a run in one forward pass.

    Attributes:
        run: the run.
        sequence: index of the sequence in the pass.
        start: index of the first row in the pass.
        rows: number of rows.
    """

    run: Run
    sequence: int
    start: int
    rows: int


class Runs:
    """Chooses rows of sequences in blocks of :data:`RUN` positions, each block by one draw.

    Several rows of a sequence in one pass, as of a prompt, are read after the pass. Rows that come
    one by one wait until their block of positions is complete, so that the keys are read once. The
    next row of a sequence is recognised by its slot, which follows the last one within a block of
    the cache. At the end of such a block, the run ends too, and a new draw decides on the rest.

    Args:
        draw: returns True for a share of its calls.
        windows: sliding windows of the layers, in keys. A run ends before the engine may free a
            block that its first row needs.

    Attributes:
        wait: whether rows may wait. Where some passes are not seen, keys of rows that wait may be
            overwritten unnoticed.

    Example:
        >>> runs = Runs(lambda: True)
        >>> pieces, complete, _ = runs.follow([Rows(0, 40, 128, 167)], block=64)  # a prompt
        >>> [(piece.start, piece.rows) for piece in pieces], len(complete)
        ([(0, 32), (32, 8)], 2)
        >>> pieces, complete, _ = runs.follow([Rows(40, 1, 168, 168)], block=64)  # a token waits
        >>> [(piece.start, piece.rows) for piece in pieces], len(complete)
        ([(0, 1)], 0)
        >>> [run.rows for run in runs.take()]
        [1]
    """

    def __init__(self, draw: Callable[[], bool], windows: Collection[int] = ()) -> None:
        self._draw, self._windows, self.wait = draw, windows, True
        self._next: dict[int, tuple[int, Run | None]] = {}  # slot -> position, None if not chosen

    def follow(
        self, sequences: Sequence[Rows], block: int
    ) -> tuple[list[Piece], list[Run], list[Run]]:
        """Choose the rows of a forward pass.

        Args:
            sequences: those of the pass, in order.
            block: number of tokens in a block of the cache.

        Returns:
            Rows to record; runs to read after the pass; and runs of earlier passes whose sequences
            do not go on, unless :meth:`end` has returned them.
        """
        earlier, self._next = self._next, {}
        pieces: list[Piece] = []
        complete: list[Run] = []
        row = 0
        for index, (position, length, slot, last_slot) in enumerate(sequences):
            if length == 0:
                continue
            end, at = position + length, position
            known = earlier.get(slot)
            if known is not None and known[0] == position:
                run = earlier.pop(slot)[1]
            else:
                run = Run(at, length == 1) if self._draw() else None
            while True:
                stop = min(end, at - at % RUN + RUN)
                if run is not None:
                    run.rows += stop - at
                    pieces.append(Piece(run, index, row + at - position, stop - at))
                # the keys of rows that wait stay in the cache while the next row is computed: an
                # engine may free a block when all its keys are outside the window of that row
                waits = (
                    run is not None
                    and length == 1
                    and self.wait
                    and all(
                        (end - window + 1) // block <= max(run.position - window + 1, 0) // block
                        for window in self._windows
                    )
                )
                goes_on = end % RUN != 0 and (last_slot + 1) % block != 0
                if run is not None and not (stop == end and goes_on and waits):
                    complete.append(run)
                if stop == end:
                    if goes_on:
                        later = run if waits or run is None else Run(end, True)
                        self._next[last_slot + 1] = end, later
                    break
                at = stop
                run = Run(at, False) if self._draw() else None
            row += length
        ended = [run for _, run in earlier.values() if run is not None and run.rows]
        return pieces, complete, ended

    def end(self, slots: Collection[int]) -> list[Run]:
        """End the runs whose sequences do not go on, and return those with rows.

        Args:
            slots: where the keys of the next pass will be stored.
        """
        # where the last row's slot is written again, its block belongs to another sequence
        ended = [slot for slot in self._next if slot not in slots or slot - 1 in slots]
        runs = [self._next.pop(slot)[1] for slot in ended]
        return [run for run in runs if run is not None and run.rows]

    def take(self) -> list[Run]:
        """Take the rows that wait, to read them now; their runs go on with the next row."""
        waiting = self.waiting
        for slot, (position, run) in self._next.items():
            if run is not None and run.rows:
                self._next[slot] = position, Run(position, True)
        return waiting

    @property
    def waiting(self) -> list[Run]:
        """Runs with rows that wait."""
        return [run for _, run in self._next.values() if run is not None and run.rows]


class Seen(NamedTuple):
    """The recorded rows of one layer in one forward pass.

    Attributes:
        layer: vLLM's layer.
        query: (rows, Hq, E).
        output: (rows, Hq, Ev), which the layer has computed; None if it is not compared.
        cache: its paged cache.
        metadata: where the sequences' keys are.
    """

    layer: Any
    query: Tensor
    output: Tensor | None
    cache: Tensor
    metadata: Any


@dataclass(frozen=True)
class Pass:
    """A forward pass some of whose rows are read.

    Attributes:
        pieces: the recorded rows, by run.
        complete: runs to read after the pass.
        index: (rows,), the recorded rows.
        tokens: number of rows of the pass.
        compared: whether outputs are recorded, too.
        seen: its layers by name.
    """

    pieces: list[Piece]
    complete: list[Run]
    index: Tensor
    tokens: int
    compared: bool
    seen: dict[str, Seen]


class Recorded(NamedTuple):
    """What is recorded of a run in layers of the same kind.

    Attributes:
        layer: the first of vLLM's layers.
        caches: their paged caches.
        blocks: the sequence's blocks in them, in order.
        queries: (layers, rows, Hq, E) of each pass.
        outputs: (layers, rows, Hq, Ev) of each pass whose outputs are compared.
    """

    layer: Any
    caches: list[Tensor]
    blocks: Tensor
    queries: list[Tensor]
    outputs: list[Tensor]


class VllmReader:
    """Wraps the attention implementations of vLLM's layers, and reads some of their rows.

    Rows are read after the last layer of a pass, from all layers together: a call for each layer
    would cost a small model more time than its own work.

    Args:
        served: chooses rows and accumulates them.
        folder: where to write; None for nowhere.
        seconds: time between writes.
        most_bytes: memory for the queries that wait, and for the keys that are read at once.
    """

    def __init__(
        self,
        served: ServedRows,
        folder: str | os.PathLike[str] | None,
        seconds: float,
        most_bytes: int = 1 << 26,
    ) -> None:
        self.served, self._folder, self._seconds = served, folder, seconds
        self._most_bytes = most_bytes
        served.finish = self.finish
        self._next_write = time.monotonic() + seconds
        self._latest, self._written = 0.0, 0  # the end of the last pass; rows at the last write
        self._lock = threading.RLock()
        self._running = False  # in a pass
        self._windows: set[int] = set()
        self._runs = Runs(served.draw, self._windows)
        self._ran: dict[str, None] = {}  # layers of this pass, in order
        self._rank, self._part = 0, 0
        self._last = ""  # the last layer of a pass
        self._pass: Pass | None = None  # None where nothing of a pass is read
        self._read_names: tuple[str, ...] = ()  # layers that the last pass recorded
        self._layouts: dict[str, CacheLayout] = {}
        self._kinds: dict[str, tuple[object, ...]] = {}
        self._refused: set[str] = set()

    def install(self, attention: Any) -> None:
        """Wrap the implementation of each attention layer that is created from now on.

        Args:
            attention: vLLM's class ``Attention``.
        """
        original = attention.__init__

        @functools.wraps(original)
        def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(layer, *args, **kwargs)
            try:
                layer.impl.forward = self.wrap(layer, layer.impl.forward)
                if (update := getattr(layer.impl, "do_kv_cache_update", None)) is not None:
                    layer.impl.do_kv_cache_update = self._wrap_update(_module(layer), update)
            except Exception as error:  # the model is loaded all the same
                self._refuse([_module(layer)], error)

        attention.__init__ = __init__

    def wrap(self, layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that computes a layer's attention."""
        name, window = _module(layer), window_of(layer.impl)
        if not self._last:  # here, since a server may start further processes before
            self._rank, self._part = ranks()
            Finalize(None, self.write, exitpriority=1)  # atexit does not run in forked processes
            if self._folder is not None:
                threading.Thread(target=self._write_when_idle, daemon=True).start()
        self._last = name
        self._windows.update(filter(None, [window]))

        @functools.wraps(forward)
        def wrapped(
            of: Any, query: Tensor, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
            output: Any = None, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            result = forward(
                of, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            try:
                with self._lock:
                    self._follow(name, layer, query, result, kv_cache, attn_metadata)
            except Exception as error:  # serving goes on
                self._pass, self._running = None, self._running and name != self._last
                self._refuse([name], error)
            return result

        return wrapped

    def _wrap_update(self, name: str, update: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that stores a layer's keys.

        The first layer's call shows which sequences have ended, before their blocks are used again.
        """

        @functools.wraps(update)
        def wrapped(
            of: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            if not self._running or name in self._ran:  # or the last pass has broken off
                try:
                    with self._lock:
                        self._running = True
                        if _captures():
                            self._wait_no_more()
                        elif self._runs.waiting:
                            self._read(self._runs.end(set(slot_mapping.tolist())))
                except Exception as error:  # serving goes on
                    self._refuse([name], error)
            return update(of, key, value, kv_cache, slot_mapping, *args, **kwargs)

        return wrapped

    def write(self) -> None:
        """Write the files, if there is anything to write and a folder to write to.

        Warns:
            UserWarning: if they cannot be written; serving goes on.
        """
        if self._folder is None:
            return
        with self._lock:
            self._written = self.served.rows
            self._next_write = time.monotonic() + self._seconds
            name, about = f"attention-rank{self._rank}", {"engine": "vLLM"}
            try:
                self.finish()
                if not self.served.empty:
                    self.served.write(self._folder, name, about=about)
                elif self.served.unread:
                    raise ValueError(f"no row was read: {self.served.unread[0]}")
            except Exception as error:  # serving goes on
                warnings.warn(f"attention was not written to {self._folder}: {error}", stacklevel=2)

    def finish(self) -> None:
        """Read the rows that wait for their runs to be complete; none during a pass."""
        with self._lock:
            if not self._running:  # the rows of a pass are recorded at its end
                self._read(self._runs.take())

    def _write_when_idle(self) -> None:
        """Write the last rows soon after them: a server that is stopped kills its workers."""
        while True:
            time.sleep(_IDLE / 2)
            with self._lock:
                idle = not self._running and time.monotonic() - self._latest >= _IDLE
                if idle and self.served.rows != self._written:
                    self.write()

    def _follow(
        self, name: str, layer: Any, query: Tensor, output: Tensor, cache: Tensor, metadata: Any
    ) -> None:
        """Record a layer: the first one begins a pass, and after the last one rows are read.

        The last layer is the last one created, until a pass shows another.
        """
        if name in self._ran:
            self._last = next(reversed(self._ran))
            self._ran.clear()
        first, self._ran[name] = not self._ran, None
        if first:
            self._running = True
            self._pass = self._begin(name, query, cache, metadata)
        now = self._pass
        if now is not None and name not in self._refused:
            rows = query.index_select(0, now.index)  # an engine may write over its queries
            theirs = output.index_select(0, now.index) if now.compared else None
            now.seen[name] = Seen(layer, rows, theirs, cache, metadata)
        if name == self._last:
            self._pass, self._running = None, False
            if now is not None:
                self._record(now)
                self._read(now.complete)
            self._latest = time.monotonic()
            if self._latest >= self._next_write:
                self.write()

    def _wait_no_more(self) -> None:
        """Let no row wait from now on: replayed passes are not seen, and may overwrite its keys."""
        if self._runs.wait:
            self._runs.wait = False
            self._runs.take()  # their keys may be overwritten before the next pass that is seen
            self.served.unread.append("some passes are replayed by CUDA graphs and are not read")

    def _begin(self, name: str, query: Tensor, cache: Tensor, metadata: Any) -> Pass | None:
        """Choose the rows of a pass that are read; None for none."""
        if _captures():
            self._wait_no_more()
            return None
        if metadata is None:
            return None  # vLLM is warming up
        starts, slots = metadata.query_start_loc.long(), metadata.slot_mapping
        first, end = starts[:-1], starts[1:]
        ends = metadata.seq_lens[: len(first)]
        edges = slots[torch.stack([first, end - 1]).clamp(0, len(slots) - 1)]
        table = torch.stack([end - first, ends, *edges]).T.tolist()  # the only wait for a device
        sequences = [Rows(length - rows, rows, *edge) for rows, length, *edge in table]
        tokens = sum(rows.length for rows in sequences)
        self.served.rows += tokens
        layout = self._layouts.get(name)
        block = 1 if layout is None else min(layout.tokens for layout in self._layouts.values())
        pieces, complete, ended = self._runs.follow(sequences, block)
        if ended and layout is not None:  # this layer's keys of this pass are in its cache
            written = slots[:tokens] // layout.tokens
            self._read([run for run in ended if not _holds(run, cache, written)])
        if not pieces:
            return None
        rows = [row for _, _, start, count in pieces for row in range(start, start + count)]
        compared = not self._read_names or any(
            self.served.to_verify(self._read_names, piece.run.decoded) for piece in pieces
        )
        index = torch.tensor(rows, device=query.device)
        return Pass(pieces, complete, index, tokens, compared, {})

    def _record(self, now: Pass) -> None:
        """Add the rows of a pass to their runs, layers of the same kind together."""
        kinds: dict[tuple[object, ...], dict[str, Seen]] = {}
        for name, seen in now.seen.items():
            try:
                kinds.setdefault(self._kind(name, seen, now), {})[name] = seen
            except Exception as error:  # in one layer; serving goes on
                self._refuse([name], error)
        complete, size = set(now.complete), 0
        for layers in kinds.values():
            names, recorded = tuple(layers), list(layers.values())
            shape = len(names), len(now.index), recorded[0].layer.num_heads, -1
            queries = torch.stack([seen.query for seen in recorded]).view(shape)
            size += queries.nbytes // len(now.index)
            outputs = [seen.output for seen in recorded if seen.output is not None]
            theirs = torch.stack(outputs).view(shape) if outputs else None
            tokens = self._layouts[names[0]].tokens
            at = 0
            for run, sequence, _, count in now.pieces:
                if names not in run.recorded:
                    used = -(-(run.position + run.rows) // tokens)
                    blocks = recorded[0].metadata.block_table[sequence, :used].clone()
                    caches = [seen.cache for seen in recorded]
                    run.recorded[names] = Recorded(recorded[0].layer, caches, blocks, [], [])
                record = run.recorded[names]
                for tensor, earlier in ((queries, record.queries), (theirs, record.outputs)):
                    if tensor is not None:
                        rows = tensor[:, at : at + count]
                        earlier.append(rows if run in complete else rows.clone())
                at += count
        self._read_names = tuple(name for layers in kinds.values() for name in layers)
        if size * sum(run.rows for run in self._runs.waiting) > self._most_bytes:
            self.finish()

    def _read(self, runs: list[Run]) -> None:
        """Read some runs."""
        with torch.inference_mode(False), torch.no_grad():
            for run in runs:
                for names, record in run.recorded.items():
                    rows = sum(part.shape[1] for part in record.queries)
                    if rows != run.rows or not self._refused.isdisjoint(names):
                        continue  # an error left out rows
                    try:
                        self._read_layers(names, run, record)
                    except Exception as error:  # serving goes on
                        self._refuse(list(names), error)
                run.recorded.clear()

    def _refuse(self, names: list[str], error: Exception) -> None:
        """Read these layers no more, and say why."""
        names = [name for name in names if name not in self._refused]
        self._refused.update(names)
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        self.served.unread.extend(f"{name}: {reason}" for name in names)

    def _kind(self, name: str, seen: Seen, now: Pass) -> tuple[object, ...]:
        """What layers that are read together have in common.

        Raises:
            ValueError: if the layer cannot be read.
        """
        layer, metadata, impl = seen.layer, seen.metadata, seen.layer.impl
        if getattr(metadata, "causal", True) is not True:
            raise ValueError("attention that is not causal is not read")
        if metadata.num_actual_tokens != now.tokens:
            raise ValueError("it runs over other tokens than the model's first layer")
        if name not in self._kinds:
            layout = self._layouts[name] = discover_layout(layer, seen.cache)
            alone = any(
                getattr(impl, numbers, None) is not None for numbers in ("sinks", "alibi_slopes")
            )
            self._kinds[name] = (
                *(name if alone else "", layer.num_heads, layer.num_kv_heads, layer.head_size),
                *(layer.head_size_v, float(impl.scale), window_of(impl)),
                *(getattr(impl, "logits_soft_cap", None), seen.cache.dtype, layout.tokens),
            )
        return id(metadata), self._kinds[name]

    def _read_layers(self, names: tuple[str, ...], run: Run, record: Recorded) -> None:
        """Read the rows of a run in layers of the same kind."""
        layer, layout = record.layer, self._layouts[names[0]]
        impl, window = layer.impl, window_of(layer.impl)
        unseen = 0 if window is None else max(run.position - window + 1, 0) // layout.tokens
        blocks = record.blocks[unseen:]
        position = run.position - unseen * layout.tokens
        length, slopes = position + run.rows, getattr(impl, "alibi_slopes", None)
        bias = None  # (1, Hq, L, S) of ALiBi
        if slopes is not None:
            bias = alibi(torch.as_tensor(slopes).float(), run.rows, length, position)
        query, theirs = torch.cat(record.queries, 1), None
        if sum(part.shape[1] for part in record.outputs) == run.rows:
            theirs = torch.cat(record.outputs, 1)
        first = self._part * layer.num_heads
        heads, tokens, width = layout.key.shape
        room = heads * len(blocks) * tokens * width * query.element_size()
        # layers at once; powers of two, since each group of layers has moments of its own
        step = 1 << max(1, self._most_bytes // room).bit_length() - 1
        for start in range(0, len(names), step):
            part = slice(start, start + step)
            caches = list(zip(names[part], record.caches[part], strict=True))
            key = self._cached(caches, blocks, "key")[:, :, :length]
            call = AttentionCall(
                names[start],
                f"vLLM {layer.attn_backend.get_name()}",
                query[part].transpose(1, 2),
                key,
                key[..., :0]
                if theirs is None
                else self._cached(caches, blocks, "value")[:, :, :length],
                is_causal=True,
                query_offset=position,
                window=window,
                scale=float(impl.scale),
                softcap=getattr(impl, "logits_soft_cap", None) or None,
                sinks=getattr(impl, "sinks", None),
                bias=bias,
            )
            self.served.add(
                names[part],
                call,
                None if theirs is None else theirs[part].transpose(1, 2),
                decoded=run.decoded,
                chosen=tuple(range(first, first + layer.num_heads)) if first else (),
            )

    def _cached(self, caches: list[tuple[str, Tensor]], blocks: Tensor, part: str) -> Tensor:
        """The keys or values in a sequence's blocks, (layers, H, blocks · T, E)."""
        heads, tokens, width = getattr(self._layouts[caches[0][0]], part).shape
        entries = caches[0][1].new_empty(len(caches), heads, len(blocks) * tokens, width)
        for out, (name, cache) in zip(entries, caches, strict=True):
            self._layouts[name].read(cache, blocks, out, part)
        return entries


def _module(layer: Any) -> str:
    """The name that transformers gives to a layer's module."""
    return str(layer.layer_name).removesuffix(".attn")


def _captures() -> bool:
    """Whether a CUDA graph is being captured, which allows no copy to the CPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _holds(run: Run, cache: Tensor, blocks: Tensor) -> bool:
    """Whether a run's sequence has one of these blocks of a cache, which layers may share."""
    return any(
        any(of.data_ptr() == cache.data_ptr() for of in part.caches)
        and bool(torch.isin(part.blocks, blocks).any())
        for part in run.recorded.values()
    )


def discover_layout(layer: Any, cache: Tensor) -> CacheLayout:
    """Find out how a layer's implementation stores keys and values."""
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise ValueError(
            f"the cache of {type(layer.impl).__name__} is not read: it has no do_kv_cache_update"
        )
    write = functools.partial(getattr(update, "__wrapped__", update), layer)  # as without a reader
    return CacheLayout.discover(
        write, cache, heads=layer.num_kv_heads, width=layer.head_size, value_width=layer.head_size_v
    )


def window_of(impl: Any) -> int | None:
    """Number of keys that a row sees, itself included; None for all.

    Implementations store the window as a number, or as keys to the left and right of the row's.
    """
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, tuple | list):
        window = window[0] + 1 if window[0] is not None and window[0] >= 0 else None
    return None if window is None or window <= 0 else int(window)


def ranks() -> tuple[int, int]:
    """Number of this process among the workers, and among those that share the heads of a layer."""
    try:
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank

        parallel, part = get_current_vllm_config().parallel_config, get_tensor_model_parallel_rank()
    except (ImportError, AssertionError):  # no configuration or groups: there is one worker
        return 0, 0
    rank = torch.distributed.get_rank()
    if parallel.data_parallel_size == 1:  # copies of a model that do not know of each other
        rank += parallel.data_parallel_index * parallel.world_size
    return rank, part


_reader: VllmReader | None = None


def register() -> None:
    """The entry point that vLLM calls in each process.

    Raises:
        ValueError: if :data:`EVERY` or :data:`SECONDS` is not a positive number.
    """
    folder = os.environ.get(FOLDER)
    if folder:
        read_vllm(folder, every=_number(EVERY, 16), seconds=_number(SECONDS, 30))


def _number(name: str, default: int) -> int:
    """A positive whole number from the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} must be a positive whole number, got {text[:40]!r}")
    return int(text)


def read_vllm(
    folder: str | os.PathLike[str] | None = None, *, every: int = 16, seconds: float = 30.0
) -> ServedRows:
    """Read attention layers that vLLM creates from now on in this process.

    Call it before ``vllm.LLM(...)``, with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, to read the
    statistics in the same process. A server starts further processes: set :data:`FOLDER` for it
    instead. A second call changes nothing and returns the first reader's rows.

    Args:
        folder: write ``attention-rank0.prom``, ``.json`` and ``.safetensors`` there; None to write
            nothing. Each worker process writes the files of its rank.
        every: read one row in so many.
        seconds: write so often, and when nothing has run for two seconds, and at the end.

    Returns:
        The rows read so far, which grow while the model runs.

    Raises:
        ImportError: if vLLM is not installed.
        OSError: if the folder cannot be created.
        ValueError: if ``every`` is below 1.
    """
    global _reader
    if _reader is None:
        from vllm.model_executor.layers.attention import Attention

        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        _reader = VllmReader(ServedRows(every=every), folder, seconds)
        _reader.install(Attention)
    return _reader.served
