"""Read attention in vLLM: a plugin that samples rows from the paged cache of its layers.

vLLM loads the functions of the group ``vllm.general_plugins`` in each of its processes. Ours does
nothing unless :data:`FOLDER` is set in the environment.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.kernel_functions.reading import alibi
from acutance.serving.cache_layout import CacheLayout
from acutance.serving.served_rows import Run, ServedRows

__all__ = ["EVERY", "FOLDER", "SECONDS", "VllmReader", "read_vllm", "register"]

#: Environment variables: where to write, one row in how many is read, seconds between writes.
FOLDER, EVERY, SECONDS = "ACUTANCE_VLLM_FOLDER", "ACUTANCE_VLLM_EVERY", "ACUTANCE_VLLM_SECONDS"
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
        seconds: write so often, and once at the end.

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
        atexit.register(_reader.write)
    return _reader.served


class _Seen(NamedTuple):
    """One layer in one forward pass.

    Attributes:
        layer: vLLM's layer.
        query: (T, Hq, E).
        output: (T, Hq, Ev), which the layer has filled.
        cache: its paged cache.
        metadata: where the sequences' keys are.
    """

    layer: Any
    query: Tensor
    output: Tensor
    cache: Tensor
    metadata: Any


@dataclass(frozen=True)
class _Pass:
    """A forward pass some of whose rows are read.

    Attributes:
        runs: the chosen runs.
        tokens: number of rows of the pass.
        seen: its layers by name.
    """

    runs: list[Run]
    tokens: int
    seen: dict[str, _Seen]


class VllmReader:
    """Wraps the attention implementations of vLLM's layers, and reads some of their rows.

    The rows of a pass are read after its last layer, from all layers together: a call for each
    layer would cost a small model more time than its own work.

    Args:
        served: chooses rows and accumulates them.
        folder: where to write; None for nowhere.
        seconds: time between writes.
    """

    def __init__(
        self, served: ServedRows, folder: str | os.PathLike[str] | None, seconds: float
    ) -> None:
        self.served, self._folder, self._seconds = served, folder, seconds
        self._next_write = time.monotonic() + seconds
        self._ran: dict[str, None] = {}  # layers of this pass, in order
        self._last = ""  # the last layer of a pass
        self._pass: _Pass | None = None  # None where nothing of a pass is read
        self._layouts: dict[str, CacheLayout] = {}
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
            layer.impl.forward = self.wrap(layer, layer.impl.forward)

        attention.__init__ = __init__

    def wrap(self, layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that computes a layer's attention."""
        name = layer.layer_name.removesuffix(".attn")  # the module that transformers calls so
        self._last = name

        @functools.wraps(forward)
        def wrapped(
            of: Any, query: Tensor, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
            output: Any = None, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            result = forward(
                of, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            try:
                self._follow(name, _Seen(layer, query, result, kv_cache, attn_metadata))
            except Exception as error:  # serving goes on
                self._pass = None
                self._refuse([name], error)
            return result

        return wrapped

    def write(self) -> None:
        """Write the files, if there is anything to write and a folder to write to.

        Warns:
            UserWarning: if they cannot be written; serving goes on.
        """
        if self._folder is None:
            return
        try:
            self.served.write(self._folder, f"attention-rank{_rank()}", about={"engine": "vLLM"})
        except ValueError:  # no row yet
            return
        except OSError as error:
            warnings.warn(f"attention was not written to {self._folder}: {error}", stacklevel=2)

    def _follow(self, name: str, seen: _Seen) -> None:
        """Note that a layer ran: the first one begins a pass, and after the last one it is read.

        The last layer is the last one created, until a pass shows another.
        """
        if name in self._ran:
            self._last = next(reversed(self._ran))
            self._ran.clear()
        if not self._ran:
            self._begin(seen.metadata)
        self._ran[name] = None
        if self._pass is None:
            return
        if name not in self._refused:
            self._pass.seen[name] = seen
        if name == self._last:
            with torch.inference_mode(False), torch.no_grad():
                self._read(self._pass)
            self._pass = None

    def _begin(self, metadata: Any) -> None:
        """Choose the rows of a pass that are read."""
        self._pass = None
        if metadata is None:  # vLLM is warming up
            return
        lengths = metadata.query_start_loc.diff().tolist()
        runs = self.served.choose(lengths)
        if runs:
            self._pass = _Pass(runs, sum(lengths), {})
        if time.monotonic() >= self._next_write:
            self.write()
            self._next_write = time.monotonic() + self._seconds

    def _read(self, now: _Pass) -> None:
        """Read the chosen runs of a pass, layers of the same kind together."""
        kinds: dict[tuple[object, ...], dict[str, _Seen]] = {}
        for name, seen in now.seen.items():
            try:
                kinds.setdefault(self._kind(name, seen, now), {})[name] = seen
            except Exception as error:  # in one layer; serving goes on
                self._refuse([name], error)
        for layers in kinds.values():
            try:
                for run in now.runs:
                    self._read_run(layers, run)
            except Exception as error:
                self._refuse(list(layers), error)

    def _refuse(self, names: list[str], error: Exception) -> None:
        """Read these layers no more, and say why."""
        names = [name for name in names if name not in self._refused]
        self._refused.update(names)
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        self.served.unread.extend(f"{name}: {reason}" for name in names)

    def _kind(self, name: str, seen: _Seen, now: _Pass) -> tuple[object, ...]:
        """What layers that are read together have in common.

        Raises:
            ValueError: if the layer cannot be read.
        """
        layer, metadata, impl = seen.layer, seen.metadata, seen.layer.impl
        if getattr(metadata, "causal", True) is not True:
            raise ValueError("attention that is not causal is not read")
        if metadata.num_actual_tokens != now.tokens:
            raise ValueError("it runs over other tokens than the model's first layer")
        if name not in self._layouts:
            self._layouts[name] = _layout(layer, seen.cache)
        alone = _option(impl, "sinks") is not None or _option(impl, "alibi_slopes") is not None
        return (
            *(id(metadata), name if alone else "", layer.num_heads, layer.num_kv_heads),
            *(layer.head_size, layer.head_size_v, float(impl.scale), _window(impl)),
            *(_option(impl, "logits_soft_cap"), seen.cache.dtype, self._layouts[name].tokens),
        )

    def _read_run(self, layers: dict[str, _Seen], run: Run) -> None:
        """Read one run of rows in layers of the same kind."""
        names, parts = list(layers), list(layers.values())
        layer, metadata, impl = parts[0].layer, parts[0].metadata, parts[0].layer.impl
        start, stop = metadata.query_start_loc[run.sequence : run.sequence + 2].tolist()
        position = int(metadata.seq_lens[run.sequence]) - (stop - start) + run.start
        rows = slice(start + run.start, start + run.start + run.rows)
        keys = position + run.rows
        check = self.served.to_verify(names, run.rows == 1)
        key = self._cached(layers, run.sequence, keys, "key")
        call = AttentionCall(
            names[0],
            f"vLLM {layer.attn_backend.get_name()}",
            _rows([seen.query for seen in parts], rows, layer.num_heads),
            key,
            self._cached(layers, run.sequence, keys, "value") if check else key[..., :0],
            is_causal=True,
            query_offset=position,
            window=_window(impl),
            scale=float(impl.scale),
            softcap=_option(impl, "logits_soft_cap") or None,
            sinks=_option(impl, "sinks"),
            bias=_alibi(impl, position, run.rows, keys),
        )
        theirs = _rows([seen.output for seen in parts], rows, layer.num_heads) if check else None
        self.served.add(names, call, theirs, _heads(layer.num_heads))

    def _cached(self, layers: dict[str, _Seen], sequence: int, count: int, part: str) -> Tensor:
        """The first keys or values of a sequence in each layer's cache, (layers, H, count, E)."""
        name, first = next(iter(layers.items()))
        heads, tokens, width = getattr(self._layouts[name], part).shape
        blocks = first.metadata.block_table[sequence, : -(-count // tokens)].tolist()
        found = first.cache.new_empty(len(layers), heads, len(blocks) * tokens, width)
        for out, (name, seen) in zip(found, layers.items(), strict=True):
            self._layouts[name].read(seen.cache, blocks, out, part)
        return found[:, :, :count]


def _rows(parts: list[Tensor], rows: slice, heads: int) -> Tensor:
    """Some rows of tensors (T, ...) of several layers, (layers, Hq, L, E)."""
    stacked = torch.stack([part[rows] for part in parts])
    return stacked.view(len(parts), stacked.shape[1], heads, -1).transpose(1, 2)


def _layout(layer: Any, cache: Tensor) -> CacheLayout:
    """Find out how a layer's implementation stores keys and values."""
    impl = layer.impl
    update = getattr(impl, "do_kv_cache_update", None)
    if update is None:
        raise ValueError(
            f"the cache of {type(impl).__name__} is not read: it has no do_kv_cache_update"
        )

    def write(key: Tensor, value: Tensor, scratch: Tensor, slots: Tensor) -> None:
        update(layer, key, value, scratch, slots)

    return CacheLayout.discover(
        write, cache, heads=layer.num_kv_heads, width=layer.head_size, value_width=layer.head_size_v
    )


def _option(impl: Any, name: str) -> Any:
    """An option of an implementation; None if it has no such option."""
    return getattr(impl, name, None)


def _window(impl: Any) -> int | None:
    """Number of keys that a row sees, itself included; None for all.

    Implementations store the window as a number, or as keys to the left and right of the row's.
    """
    window = _option(impl, "sliding_window")
    if isinstance(window, tuple | list):
        window = window[0] + 1 if window[0] is not None and window[0] >= 0 else None
    return None if window is None or window <= 0 else int(window)


def _alibi(impl: Any, position: int, rows: int, keys: int) -> Tensor | None:
    """The bias (1, Hq, L, S) of ALiBi; None without."""
    slopes = _option(impl, "alibi_slopes")
    return None if slopes is None else alibi(torch.as_tensor(slopes).float(), rows, keys, position)


def _rank() -> int:
    """Number of this process among the workers."""
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if running else 0


@functools.cache
def _heads(heads: int) -> tuple[int, ...]:
    """Numbers of this rank's heads, where tensor parallelism gives it others than the first."""
    try:
        from vllm.distributed import get_tensor_model_parallel_rank

        first = get_tensor_model_parallel_rank() * heads
    except (ImportError, AssertionError):  # no groups: there is one rank
        return ()
    return tuple(range(first, first + heads)) if first else ()
