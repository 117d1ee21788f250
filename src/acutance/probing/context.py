"""The probe: a context in which a model's attention is measured while it runs as it always does."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from acutance.probing import huggingface
from acutance.probing.call import (
    VERIFY_TOLERANCE,
    AttentionCall,
    observe_scores,
    relative_error,
)
from acutance.probing.functions import FunctionCapture
from acutance.probing.kept import Keeper, QueryKeySample
from acutance.probing.moments import Moments
from acutance.probing.summary import HeadSummary, Layer, Status, summarise
from acutance.rowstats import METRICS, RowStatistics, metric

_LOOKED_FOR = (
    "it looks for transformers' attention interface, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention, and softmax over the last of four dimensions"
)


class ProbeError(RuntimeError):
    """The probe could not do what it was opened for."""


def probe(
    model: torch.nn.Module,
    *,
    metrics: Sequence[str] | None = None,
    verify: bool = False,
    noise: bool = False,
    keep: bool = False,
) -> Probe:
    """Measure the attention of a model while it runs, changing nothing of it.

    Args:
        model: any module; calls inside it are read, whatever else runs.
        metrics: names from :data:`acutance.METRICS`; None is all of them (``noise_gain`` only with
            ``noise``).
        verify: rebuild each call's output from what was captured and compare, which catches a
            capture that misses something at the price of computing the output twice.
        noise: also record ``noise_gain``, which needs a third matrix product.
        keep: also keep a bounded sample of queries and keys: :meth:`Probe.queries_keys`.

    Returns:
        A context manager. Leaving it raises :class:`ProbeError` if the model ran no attention the
        probe can see; results are in :meth:`Probe.summary`.

    Raises:
        TypeError: if ``model`` is no module.
        ValueError: if a metric does not exist (naming the nearest).

    Example:
        >>> import torch, acutance
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> with acutance.probe(model) as probe:
        ...     _ = model(torch.randn(2, 10, 16))
        >>> frame = probe.summary().columns()
        >>> frame["head"], frame["rows"]
        ([0, 1, 2, 3], [20, 20, 20, 20])
    """
    return Probe(model, metrics=metrics, verify=verify, noise=noise, keep=keep)


_Read = tuple[RowStatistics, Tensor | None, Status, float | None, str]


class _Eager:
    """Runs compiled models uncompiled while any probe is open.

    A graph compiled earlier would run without ever calling what is captured here. The compiler's
    stance is one for the process, so the first probe to open sets it and the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._stance.__exit__(None, None, None)


EAGER = _Eager()


class _Thread(threading.local):
    """What one thread is doing inside a probed model."""

    def __init__(self) -> None:
        self.depth = 0
        #: modules running, innermost last: name, attention calls so far
        self.stack: list[tuple[str, list[int]]] = []
        #: the last self-attention: module, boolean (B, L) of its real rows
        self.rows: tuple[str, Tensor] | None = None


class _Record:
    """One layer as it fills."""

    def __init__(self, module: str, heads: int, metrics: int) -> None:
        self.layer = Layer(module=module, heads=heads, status="verified")
        self.moments = Moments.none(heads, metrics)


class Probe:
    """What :func:`probe` opens. Used once or many times; records add up.

    Attributes:
        metrics: names recorded, in the order of :data:`acutance.METRICS`.
        unread: attention that could not be read, with the reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        metrics: Sequence[str] | None = None,
        verify: bool = False,
        noise: bool = False,
        keep: bool = False,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a torch.nn.Module, got {type(model).__name__}")
        if isinstance(metrics, str):
            raise TypeError(f"metrics is a sequence of names, got the string {metrics!r}")
        wanted = list(METRICS) if metrics is None else [metric(name).name for name in metrics]
        if metrics is None:
            wanted = [name for name in wanted if noise or not METRICS[name].needs_values]
        noise = noise or any(METRICS[name].needs_values for name in wanted)
        self.metrics: tuple[str, ...] = tuple(name for name in METRICS if name in wanted)
        if not self.metrics:
            raise ValueError("metrics names at least one metric, got none")
        self.unread: list[str] = []
        self._model, self._verify, self._noise = model, verify, noise
        self._keeper = Keeper() if keep else None
        self._records: dict[str, _Record] = {}
        self._names: dict[int, str] = {}
        self._order: dict[str, int] = {}
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._context: ExitStack | None = None
        self._runs = self._calls = 0

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        if self._context is not None:
            raise ProbeError("this probe is already open; open another for a nested one")
        self._runs = self._calls = 0
        self._names.clear()
        for index, (name, module) in enumerate(self._model.named_modules()):
            label = self._label(name)
            self._names[id(module)] = label
            self._order.setdefault(label, index)
        with ExitStack() as context:
            context.enter_context(EAGER)
            for module in self._model.modules():
                before = module.register_forward_pre_hook(lambda m, *_: self._enter_module(m))
                context.callback(before.remove)
                after = module.register_forward_hook(
                    lambda m, *_: self._leave_module(m), always_call=True
                )
                context.callback(after.remove)
            context.enter_context(huggingface.capture(self))
            context.enter_context(FunctionCapture(self))
            self._context = context.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        context, self._context = self._context, None
        self._thread = _Thread()
        if context is not None:
            context.close()
        if kind is None and not self._calls:
            raise ProbeError(self._saw_nothing())

    def _label(self, name: str) -> str:
        """A module's name, the same for a compiled model as for the model itself."""
        parts = [part for part in name.split(".") if part and part != "_orig_mod"]
        return ".".join(parts) or type(getattr(self._model, "_orig_mod", self._model)).__name__

    def _saw_nothing(self) -> str:
        model = type(self._model).__name__
        if self.unread:
            return f"the probe could not read any attention of {model}: {'; '.join(self.unread)}"
        if not self._runs:
            return f"the probe saw no attention call: {model} did not run while it was open"
        return f"the probe saw no attention call in {model}: {_LOOKED_FOR}"

    # -- what the captures ask --------------------------------------------------------------------

    def name_of(self, module: torch.nn.Module) -> str | None:
        """Qualified name of a probed module, None for any other."""
        return self._names.get(id(module))

    def here(self) -> str | None:
        """Name for an attention call of the running module; a second call of one gets ``#1``."""
        if not self._thread.stack:
            return None
        name, calls = self._thread.stack[-1]
        seen = calls[0]
        calls[0] = seen + 1
        place = f"{name}#{seen}" if seen else name
        self._order.setdefault(place, self._order[name])
        return place

    def muted(self) -> bool:
        """Whether this thread is inside a call that is being captured, or inside the probe."""
        return self._thread.depth > 0

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Ignore captures of this thread in the context: a call counts once."""
        thread = self._thread
        thread.depth += 1
        try:
            yield
        finally:
            thread.depth -= 1

    def observe(
        self, make: Callable[[], AttentionCall], module: str, output: Callable[[], Tensor] | None
    ) -> None:
        """Record a call: its statistics and, with ``verify``, whether its output can be rebuilt."""

        def read() -> _Read:
            call = make()
            real = self._real_rows(call)
            if self._keeper is not None:
                self._keeper.take(call, real)
            if not self._verify or output is None or call.dropout_p > 0.0:
                return call.statistics(self._noise), real, "captured", None, call.source
            rebuilt, stats = call.rebuilt(self._noise)
            theirs = output()
            if theirs.shape != rebuilt.shape:
                raise ValueError(
                    f"its output is {tuple(theirs.shape)} where {tuple(rebuilt.shape)} was expected"
                )
            kept = _kept(stats, real)
            error = relative_error(rebuilt, theirs, kept)
            good = error <= VERIFY_TOLERANCE[theirs.dtype]
            return stats, real, "verified" if good else "mismatch", error, call.source

        self._read(module, read)

    def observe_scores(self, scores: Tensor, module: str) -> None:
        """Record rows of which only the scores are known."""

        def read() -> _Read:
            stats, real = observe_scores(scores)
            return stats, real, "unverified", None, "softmax"

        self._read(module, read)

    def unreadable(self, module: str, reason: str) -> None:
        """List attention that took place and could not be read."""
        text = f"{module}: {reason}"
        with self._lock:
            if text not in self.unread:
                self.unread.append(text)

    def _read(self, module: str, read: Callable[[], _Read]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed forward pass run again for the backward pass
        # no function mode sees what happens here: not another probe, not a default device
        with self.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                stats, real, status, error, source = read()
                self._add(module, stats, real, status, error, source)
            except Exception as problem:  # the model must go on; the reason is kept and shown
                self.unreadable(module, " ".join(str(problem).split()) or type(problem).__name__)

    def _real_rows(self, call: AttentionCall) -> Tensor | None:
        """Boolean (B, L), False on padding; cross-attention has the queries of its own block.

        Its masks are about the keys, so what is padding among its queries is known only from the
        self-attention that ran before it in the same numbered block of the model.
        """
        batch, _, queries, _ = call.query.shape
        if call.cross:
            if self._thread.rows is None:
                return None
            module, real = self._thread.rows
            fits = tuple(real.shape) == (batch, queries) and _one_block(module, call.module)
            return real if fits else None
        real_rows = call.real_rows()
        self._thread.rows = None if real_rows is None else (call.module, real_rows)
        return real_rows

    def _add(
        self,
        module: str,
        stats: RowStatistics,
        real: Tensor | None,
        status: Status,
        error: float | None,
        source: str,
    ) -> None:
        kept = _kept(stats, real)
        names = tuple(name for name in self.metrics if name in stats.available)
        values = {name: stats[name] for name in names}
        for name in self.metrics:
            if name not in values:  # noise_gain of rows known by their scores alone
                values[name] = torch.full_like(stats.state.Z, torch.nan)
        moments = summarise(values, kept, self.metrics)
        batch, heads, queries = kept.shape
        rows = int(kept.sum((0, 2)).max()) if kept.numel() else 0
        padded = 0 if real is None else int((~real).sum())
        layer = Layer(
            module=module,
            heads=heads,
            status=status,
            calls=1,
            rows=rows,
            padded=padded,
            empty=batch * queries - padded - rows,
            error=error,
            source=source,
        )
        with self._lock:
            record = self._records.get(module)
            if record is None:
                record = self._records[module] = _Record(module, heads, len(self.metrics))
            record.layer = record.layer.merge(layer)
            record.moments = record.moments.merge(moments)
            self._calls += 1

    # -- which module runs ------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module) -> None:
        name = self._names.get(id(module))
        if name is not None:  # a copy of a probed module carries its hooks along
            self._thread.stack.append((name, [0]))
            self._runs += 1

    def _leave_module(self, module: torch.nn.Module) -> None:
        stack = self._thread.stack
        if stack and stack[-1][0] == self._names.get(id(module)):
            stack.pop()

    # -- results ----------------------------------------------------------------------------------

    def summary(self, about: dict[str, Any] | None = None) -> HeadSummary:
        """What was recorded so far, layers in model order.

        Args:
            about: facts to keep with it (model, text); versions are added.

        Raises:
            ProbeError: if nothing was recorded.
        """
        with self._lock:
            records = sorted(self._records.items(), key=lambda item: self._place(item[0]))
            if not records:
                raise ProbeError(self._saw_nothing())
            return HeadSummary(
                layers=tuple(record.layer for _, record in records),
                metrics=self.metrics,
                moments=Moments.join([record.moments for _, record in records]),
                about={"model": type(self._model).__name__, "torch": torch.__version__}
                | (about or {}),
                unread=tuple(self.unread),
            )

    def _place(self, name: str) -> tuple[int, int]:
        base, _, call = name.partition("#")
        return self._order.get(name, self._order.get(base, 0)), int(call or 0)

    def queries_keys(self) -> QueryKeySample:
        """The queries, keys and values that were kept: four heads a layer, one sequence.

        Raises:
            ProbeError: if the probe was not opened with ``keep=True``, or kept nothing.
        """
        if self._keeper is None:
            raise ProbeError("queries and keys are kept by a probe opened with keep=True")
        with self._lock:
            order = sorted(self._records, key=self._place)
        try:
            return self._keeper.sample(order)
        except ValueError as error:
            raise ProbeError(str(error)) from error

    def to_frame(self) -> Any:
        """:meth:`HeadSummary.to_frame` of the summary."""
        return self.summary().to_frame()

    def save(self, path: str) -> None:
        """:meth:`HeadSummary.save` of the summary."""
        self.summary().save(path)

    def to_json(self, path: str) -> None:
        """:meth:`HeadSummary.to_json` of the summary."""
        self.summary().to_json(path)

    def report(self, path: str) -> None:
        """Write the summary as one self-contained HTML file."""
        # reports are drawn from records, so their stage comes after this one: reached by name
        importlib.import_module("acutance.report").write_html(self.summary(), path)


def _kept(stats: RowStatistics, real: Tensor | None) -> Tensor:
    """Rows that count: they see a key, and their token is not padding."""
    kept = stats.state.n > 0
    return kept if real is None else kept & real[:, None, :]


def _one_block(left: str, right: str) -> bool:
    """Whether two modules lie in the same numbered block, as ``decoder.layers.3`` is one."""
    for mine, theirs in zip(left.split("."), right.split("."), strict=False):
        if mine != theirs:
            return False
        if mine.isdigit():
            return True
    return False


__all__ = ["Probe", "ProbeError", "probe"]
