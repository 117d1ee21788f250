"""Probe: a model's captures while it is open, what they tell it, and what it has found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from acutance.capture import huggingface
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import most_heads
from acutance.capture.head_axis import heads_of
from acutance.capture.layer_choice import Chosen, HeadChoice, LayerChoice
from acutance.capture.module_hooks import follow
from acutance.capture.module_names import class_name, named_modules
from acutance.capture.module_stack import Passes, module_of_method, rerun
from acutance.capture.padding import checked_mask
from acutance.capture.tap import Tap, tap
from acutance.capture.torch_functions import FunctionCapture
from acutance.capture.uncompiled import EAGER, unwatched
from acutance.probing.accumulate import Records, Rows
from acutance.probing.coverage import NOT_READ, looks_like_attention, scripted_attention
from acutance.probing.query_key_sample import QueryKeySample
from acutance.probing.read_call import Read, Reader
from acutance.probing.repeated_calls import joined
from acutance.probing.structure import StructureReader
from acutance.probing.untrained import is_untrained
from acutance.rowstats import METRICS, metric
from acutance.shapes import check_count, check_flag
from acutance.structure import STRUCTURE
from acutance.summary.head_summary import HeadSummary
from acutance.summary.moments import Moments
from acutance.summary.optional_parts import Beside

__all__ = ["Probe", "ProbeError"]

_LOOKED_FOR = (
    "it looks for transformers' attention interface, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention, FlexAttention, acutance.attention, and a softmax that a matrix product "
    "takes; acutance.tap tells it of anything else"
)

#: Methods that captures and runs of a corpus call; ``dir`` leaves them out.
_ASKED_BY_CAPTURES = frozenset(
    [
        *("here", "module_of", "mute", "muted", "name_of", "number_passes", "observe"),
        *("observe_scores", "provide", "running", "unreadable"),
    ]
)


class ProbeError(RuntimeError):
    """The probe could not do what it was opened for."""


class Probe:
    """What :func:`probe` opens. Used once or many times; records add up.

    Attributes:
        metrics: names recorded, in the order of :data:`acutance.METRICS`.
        unread: attention that could not be read, with the reason.
        not_provided: with ``provide``, attention that was left to the model's own function, with
            the reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        metrics: Sequence[str] | None = None,
        verify: bool | Literal["first"] = "first",
        noise: bool = False,
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
        attention_mask: Tensor | None = None,
        rows: Tensor | str = "real",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a torch.nn.Module, got {type(model).__name__}")
        if verify not in (True, False, "first"):
            raise ValueError(f'verify is True, False or "first", got {verify!r}')
        if isinstance(metrics, str):
            raise TypeError(f"metrics is a sequence of names, got the string {metrics!r}")
        wanted = list(METRICS) if metrics is None else [metric(name).name for name in metrics]
        if metrics is None:
            wanted = [name for name in wanted if noise or not METRICS[name].needs_values]
        noise = noise or any(METRICS[name].needs_values for name in wanted)
        self.metrics: tuple[str, ...] = tuple(name for name in METRICS if name in wanted)
        if not self.metrics:
            raise ValueError("metrics names at least one metric, got none")
        self._structure: StructureReader | None = None
        if structure or examples:
            self._structure = StructureReader(model, tokenizer, special, examples)
            wanted = [*wanted, "first_weight"]  # the weight on the first token
            self.metrics = tuple(name for name in METRICS if name in wanted) + tuple(STRUCTURE)
        self.unread: list[str] = []
        self.not_provided: list[str] = []
        self._model = model
        self._passes = Passes(check_count("every", every, 1))
        self._reader = Reader(
            verify=verify,
            noise=noise,
            keep=keep,
            heads=heads,
            max_rows=None if max_rows is None else check_count("max_rows", max_rows, 2),
            seed=check_count("seed", seed, 0),
            provide=provide,
            structure=self._structure,
            attention_mask=attention_mask,
            rows=rows,
        )
        self._thread = self._reader.thread
        if heads is not None and (most := most_heads(model)) is not None:
            HeadChoice(heads).check(most, class_name(model))
        self._layers: LayerChoice | None = None
        if layers is not None:
            self._layers = LayerChoice.from_model(layers, model)
        self._records = Records(self.metrics, check_flag("profile", profile))
        self._names: dict[int, str] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._order: dict[str, int] = {}
        self._ran: set[str] = set()
        self._lock = threading.Lock()
        self._context: ExitStack | None = None
        self._runs = self._calls = 0

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        if self._context is not None:
            raise ProbeError("this probe is already open; open another for a nested one")
        self._runs = self._calls = 0
        self._names.clear()
        self._modules.clear()
        for index, (name, module) in enumerate(named_modules(self._model)):
            self._names[id(module)] = name
            self._modules[name] = module
            self._order.setdefault(name, index)
        with ExitStack() as context:
            context.enter_context(EAGER)
            context.enter_context(follow(self._enter_module, self._leave_module))
            if self._structure is not None:
                context.enter_context(self._structure.tokens.follow(self._model))
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
        self._thread.reset()
        if context is not None:
            context.close()
        if kind is None and not self._calls:
            raise ProbeError(self._saw_nothing())

    @property
    def attention_mask(self) -> Tensor | None:
        """Which tokens of the next batches are real, boolean (B, T); set it for each batch.

        None where it was not given: the model's own mask tells then.
        """
        mask = self._reader.rows.mask
        return None if mask is None else mask.real

    @attention_mask.setter
    def attention_mask(self, mask: Tensor | None) -> None:
        self._reader.rows.mask = checked_mask(mask)

    def _saw_nothing(self) -> str:
        model = class_name(self._model)
        if self._layers is not None and self._runs and not self.unread:
            return f"the probe saw no attention call in the layers of {model} that were asked for"
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
        """Name for an attention call of the running module; its second in one pass gets ``#1``."""
        if not self._thread.stack:
            method_of = module_of_method(self._names)
            if method_of is not None:
                self._thread.reading = True  # of no forward pass that could be left out
            return method_of
        name = self._thread.stack[-1]
        seen = self._thread.places.get(name, 0)
        self._thread.places[name] = seen + 1
        place = f"{name}#{seen}" if seen else name
        self._order.setdefault(place, self._order[name])
        return place

    def place_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a module, numbered as by :meth:`here` where it runs."""
        name, stack = self.name_of(module), self._thread.stack
        return self.here() if name is not None and stack and stack[-1] == name else name

    def muted(self) -> bool:
        """Whether this thread is inside a call that is being captured, or inside the probe."""
        return self._thread.depth > 0

    def mute(self) -> AbstractContextManager[None]:
        """Ignore captures of this thread in the context: a call counts once."""
        return self._thread.mute()

    def provide(
        self,
        make: Callable[[], AttentionCall],
        module: str,
        own: Callable[[], Tensor],
        refuse: str | None = None,
    ) -> Tensor | None:
        """Compute and record a call in the model's stead; None leaves it to the model.

        Args:
            make: reads the call.
            module: its module.
            own: runs the model's own function, which gives (B, Hq, L, Ev).
            refuse: why calls of this kind cannot be provided, if they cannot.
        """
        if self._reader.provider is None or not self._wanted(module):
            return None
        try:
            if refuse is not None:
                raise ValueError(refuse)
            with self.mute():
                with unwatched():
                    call = make()
                found = self._reader.provide(call, own)
        except Exception as problem:  # the model has its own way to go on
            self._list(self.not_provided, module, problem)
            return None
        self._read(module, lambda: self._reader.provided(call, found, self.module_of(module)))
        return found.output

    def observe(
        self, make: Callable[[], AttentionCall], module: str, output: Callable[[], Tensor] | None
    ) -> None:
        """Record a call: its statistics and, with ``verify``, whether its output can be rebuilt."""
        if self._wanted(module):
            self._read(module, lambda: self._reader.call(make(), output, self.module_of(module)))

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Record rows of which only the scores are known; ``doubt`` says what speaks against."""
        if self._wanted(module):
            self._read(module, lambda: self._reader.scores(scores, module, doubt))

    def running(self) -> str | None:
        """Name of the module now running, None outside the probed model."""
        stack = self._thread.stack
        return stack[-1] if stack else module_of_method(self._names)

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module an attention call was named after."""
        return self._modules.get(name.partition("#")[0])

    def unreadable(self, module: str, reason: str) -> None:
        """List attention that took place and could not be read."""
        if self._wanted(module):
            self._list(self.unread, module, reason)

    def _list(self, texts: list[str], module: str, reason: object) -> None:
        said = " ".join(str(reason).split()) or type(reason).__name__
        text = f"{module}: {said}"
        with self._lock:
            if text not in texts:
                texts.append(text)

    def _real_rows(self, call: AttentionCall) -> Tensor | None:
        """Boolean (B, L), False on padding; None where nothing tells."""
        return self._reader.rows.real(call).rows

    def _wanted(self, module: str) -> bool:
        """Whether calls of a module are read."""
        return self._layers is None or module in self._layers

    def _read(self, module: str, read: Callable[[], Read]) -> None:
        if rerun() or not self._thread.reading:
            return
        # nothing sees what happens here: not another probe, not a default device
        with self.mute(), torch.no_grad(), unwatched():
            try:
                found = read()
                layer = replace(found.layer, module=module)
                rows = Rows(found.stats, found.kept, found.sample, found.structured)
                self._records.add(layer, rows)
                if found.doubt is not None:
                    self._list(self.unread, module, found.doubt)
            except Exception as problem:  # the model must go on; the reason is kept and shown
                self._list(self.unread, module, problem)
                return
        with self._lock:
            self._calls += 1

    # -- which module runs ------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module) -> None:
        name = self._names.get(id(module))
        if name is not None:
            if not self._thread.stack:
                self._thread.places.clear()
                self._passes.begin(name, self._thread)
            self._thread.stack.append(name)
            self._thread.masks.enter(module)
            self._runs += 1
            if name not in self._ran:
                self._ran.add(name)
                if why := scripted_attention(module):
                    self.unreadable(name, why)

    def _leave_module(self, module: torch.nn.Module) -> None:
        stack = self._thread.stack
        if stack and stack[-1] == self._names.get(id(module)):
            stack.pop()
            self._thread.masks.leave(module)

    def number_passes(self, turn: int | None) -> None:
        """Give the next forward passes this number, which decides the rows drawn; None counts."""
        self._passes.turn = turn

    def tap(self, query: Tensor, key: Tensor, value: Tensor | None = None, **options: Any) -> Tap:
        """:func:`acutance.tap`, told to this probe alone; nothing while it is closed.

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
        return tap(query, key, value, **options).only(self)

    # -- results ----------------------------------------------------------------------------------

    def summary(self, about: dict[str, Any] | None = None) -> HeadSummary:
        """What was recorded so far, layers in model order.

        Args:
            about: facts to keep with it (model, text); versions are added.

        Raises:
            ProbeError: if nothing was recorded.
        """
        records = self._records.finished()
        if self._structure is not None:
            for name, (layer, moments, beside) in records.items():
                records[name] = layer, moments, self._structure.among(beside, layer)
        records = joined(records, lambda name: heads_of(self.module_of(name)))
        if not records:
            raise ProbeError(self._saw_nothing())
        found = [records[name] for name in sorted(records, key=self._place)]
        besides = [beside for _, _, beside in found]
        return HeadSummary(
            layers=tuple(layer for layer, _, _ in found),
            metrics=self.metrics,
            moments=Moments.join([moments for _, moments, _ in found]),
            about={
                "model": class_name(self._model),
                "torch": torch.__version__,
                **({"untrained": True} if is_untrained(self._model) else {}),
                **(about or {}),
            },
            unread=(*self.unread, *self._not_read(records)),
            beside=Beside.join(besides),
            not_provided=tuple(self.not_provided),
        )

    def _not_read(self, records: Iterable[str]) -> Iterator[str]:
        """Modules that are called attention and ran, and of which nothing was read or listed."""
        heard = {name.partition("#")[0] for name in records}
        heard |= {text.partition(": ")[0].partition("#")[0] for text in self.unread}
        modules = [(name, type(self._modules[name]).__name__) for name in self._ran]
        for name, kind in sorted(modules, key=lambda each: self._order[each[0]]):
            near = any(
                other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.")
                for other in heard
            )
            if looks_like_attention(kind) and not near and self._wanted(name):
                heard.add(name)
                yield f"{name}: {kind} ran, and {NOT_READ}"

    def _place(self, name: str) -> tuple[int, int]:
        base, _, call = name.partition("#")
        return self._order.get(name, self._order.get(base, 0)), int(call or 0)

    def queries_keys(self) -> QueryKeySample:
        """The queries, keys and values that were kept: four heads a layer, one sequence.

        Raises:
            ProbeError: if the probe was not opened with ``keep=True``, or kept nothing.
        """
        if self._reader.keeper is None:
            raise ProbeError("queries and keys are kept by a probe opened with keep=True")
        order = sorted(self._records.names(), key=self._place)
        try:
            return self._reader.keeper.sample(order)
        except ValueError as error:
            raise ProbeError(str(error)) from error

    def __repr__(self) -> str:
        count = len(list(self._records.names()))
        what = f"{count} layer{'s' * (count != 1)} read" if count else "nothing read yet"
        return f"Probe of {type(self._model).__name__}: {what}; summary(), findings(), report()"

    def __dir__(self) -> list[str]:
        """What users call, without what captures ask a probe."""
        return [name for name in super().__dir__() if name not in _ASKED_BY_CAPTURES]

    def findings(self) -> Any:
        """The heads worth a look first, a list of :class:`~acutance.report.Finding`.

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

        In a notebook the page is shown where the result of a cell is.

        Args:
            path: where to write the page, too.
        """
        from acutance.report.html_page.write import Report

        page = Report.of(self.summary())
        if path is not None:
            page.save(path)
        return page
