"""A reversible change of a model, and a law in force on a model that runs as it always does."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acutance.calibration.law import AnyLaw, HeadLaws, Law, by_layer
from acutance.calibration.read_window import (
    Replacement,
    masked_arguments,
    masked_scores,
)
from acutance.capture.attention_call import Carrier
from acutance.capture.find_layers import (
    attention_layers,
    class_name,
    is_cross,
    is_softmax,
    is_windowed_inside,
    uses_interface,
)
from acutance.capture.function_mode import FunctionMode
from acutance.capture.handwritten.tracker import FEWEST, Softmax, Tracker
from acutance.capture.head_axis import could_be_over_keys, fold
from acutance.capture.intercept import Interception, classes_are_library, eager, forget_compiled
from acutance.capture.kernel_functions import calls
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.capture.rotary import Rotary, find_rotary
from acutance.masks import check_masking, hidden_scores, shallow_mask, shows
from acutance.scaling import AnyScaling, visible_keys

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA = "acutance.change/1"


class ApplyError(RuntimeError):
    """A law could not be applied where it should have been."""


class Change:
    """A reversible change of a model, such as a law, whose effect on the loss can be measured.

    A kind of change is a subclass with a ``name`` and a method ``on``.

    Example:
        >>> from contextlib import nullcontext
        >>> class Nothing(Change):
        ...     name = "nothing"
        ...
        ...     def on(self, model):
        ...         return nullcontext()
        >>> Nothing().applied(torch.nn.Linear(2, 2))
        <nothing, applied>
    """

    if TYPE_CHECKING:  # a kind has it as a property or as a field

        @property
        def name(self) -> str:
            """Name of the change in tables, such as ``ssmax`` or ``off:3.0``."""

    @property
    def words(self) -> str:
        """A text that identifies the change: a saved run is resumed only if it is the same."""
        return self.name

    def on(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which the model is changed; leaving it restores the model."""
        raise NotImplementedError

    def applied(self, model: torch.nn.Module) -> Any:
        """The change in force at once, until ``restore()`` or the end of a context."""
        context = self.on(model)
        return context if isinstance(context, AppliedChange) else AppliedChange(self.name, context)

    def check(self, model: torch.nn.Module) -> object:
        """Raise an error if the change cannot be made, as far as that is known without a run."""

    def titled(self, name: str) -> Change:
        """The same change with another name in tables, if its kind has names to choose."""
        return self

    def for_train_length(self, model: torch.nn.Module, train_length: int) -> Change:
        """The same change as computed from another trained length, if it depends on that."""
        return self

    def record(self) -> dict[str, Any]:
        """JSON-serialisable values from which the change can be made again."""
        return {"schema": SCHEMA, "change": self.name}


class AppliedChange:
    """A change in force on a model until it is removed: what :func:`acutance.apply` returns.

    Args:
        name: of the change, in messages.
        context: in which the model is changed; it is entered at once.

    Attributes:
        calls: number of changed calls by module name; None if they are not counted.
    """

    calls: dict[str, int] | None = None
    #: What it is, in messages.
    _noun = "this law"

    def __init__(self, name: str, context: AbstractContextManager[Any]) -> None:
        self._noun = name
        with ExitStack() as stack:
            stack.enter_context(context)
            #: what removes it; None once that was done
            self._context: ExitStack | None = stack.pop_all()

    def __repr__(self) -> str:
        return f"<{self._noun}, {'removed' if self._context is None else 'applied'}>"

    def restore(self) -> None:
        """Remove the change from the model with all its hooks. Later calls have no effect.

        Warns:
            UserWarning: if nothing ran that it could change.
        """
        try:
            self.__exit__(None, None, None)
        except ApplyError as error:
            warnings.warn(str(error), stacklevel=2)

    def __enter__(self) -> Self:
        if self._context is None:
            raise ApplyError(f"{self._noun} was removed from its model: apply it again")
        return self

    def __exit__(self, *error: Any) -> None:
        """Remove the change; raise ApplyError if nothing ran that it could change."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*error)
            if error[0] is None and self.calls == {}:
                raise ApplyError(self._did_nothing())

    def _did_nothing(self) -> str:
        """The sentence for a change under which no call was changed."""
        return f"{self._noun} changed no call"


def count(query: Tensor, key: Tensor, masks: dict[str, Any]) -> Tensor:
    """Visible keys of each row, (B or 1, Hq or 1, L) of int64.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        masks: the fields of an :class:`AttentionCall` that hide keys; those left out hide none.

    Example:
        >>> query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
        >>> count(query, key, {"is_causal": True, "query_offset": 2})
        tensor([[[3, 4, 5]]])
    """
    queries, keys = query.shape[2], key.shape[2]
    mask: Tensor | None = masks.get("attn_mask")
    causal = bool(masks.get("is_causal"))
    plain = mask is None or not causal
    for name in _OTHER_MASKS:
        plain &= masks.get(name) is None
    if not plain:
        return visible_keys(check_masking(query, key, **masks))
    if mask is not None:
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        seen: Tensor = shows(mask)
        return (seen.expand(-1, -1, -1, keys) if seen.shape[3] == 1 else seen).sum(-1)
    if not causal:
        return torch.full((1, 1, queries), keys, device=query.device)
    position = torch.arange(1, queries + 1, device=query.device)
    return (position + int(masks.get("query_offset") or 0)).clamp(min=0, max=keys)[None, None]


_OTHER_MASKS = ("window", "key_mask", "cu_seqlens", "bias")


def query_factor(
    laws: HeadLaws, n: Tensor, heads: int, dtype: torch.dtype, entropy: Tensor | None = None
) -> Tensor:
    """Factor that multiplies the query of each row, (B or 1, Hq or 1, L).

    Args:
        laws: calibrated laws of the layer's heads.
        n: number of visible keys, (B or 1, Hq or 1, L), before a law's window hides any; this
            function subtracts those that the window hides.
        heads: number of query heads of the call.
        dtype: of the query and the result. Factors of float16 and bfloat16 queries are computed in
            float32 and rounded at the end.
        entropy: of the unscaled rows, (B, Hq, L), if a law needs it.

    Raises:
        ValueError: if a law has parameters or entries for heads that the call does not have.

    Example:
        >>> from acutance import scaling
        >>> laws = HeadLaws(heads=((1, scaling.SSMax(s=1.0)),))
        >>> query_factor(laws, torch.tensor([[[8]]]), 2, torch.float32)[0]
        tensor([[1.0000],
                [2.0794]])
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if laws.scalings and laws.all_windows:
        n = _read(laws, n, heads)
    factors: dict[AnyScaling, Tensor] = {}
    for scaling in laws.scalings:
        if scaling not in factors:
            factor = scaling.factor(n, entropy=entropy, dtype=wide)
            if factor.dim() < 3 or factor.shape[-2] not in (1, heads):
                raise ValueError(
                    f"the scaling has parameters for {factor.shape[-2]} heads, but the call has "
                    f"{heads}"
                )
            factors[scaling] = factor
    if laws.whole is not None:
        return factors[laws.whole].to(dtype)
    by_head = dict(laws.heads)
    if wrong := [head for head in by_head if head >= heads]:
        raise ValueError(f"the law has head {wrong[0]}, but the call has {heads} heads")
    columns = []
    for head in range(heads):
        if head in by_head:
            factor = factors[by_head[head]]
            columns.append(factor[:, head if factor.shape[1] > 1 else 0])
        else:
            columns.append(torch.ones_like(n[:, 0], dtype=wide))
    batch = max(column.shape[0] for column in columns)
    return torch.stack([column.expand(batch, -1) for column in columns], 1).to(dtype)


def _read(laws: HeadLaws, n: Tensor, heads: int) -> Tensor:
    """Number of keys that each row reads, of its n visible ones: those in the window of its head.

    It is all n for a head without a window. Shaped as ``n``, or (B or 1, heads, L) if windows
    differ between heads.
    """
    if laws.window is not None:
        return laws.window.keys_read(n)
    if not laws.windows:
        return n
    columns = n.expand(-1, heads, -1).unbind(1)
    windows = laws.windows_by_head(heads)
    pairs = zip(windows, columns, strict=True)
    return torch.stack([n if window is None else window.keys_read(n) for window, n in pairs], 1)


def scaled_scores(scores: Tensor, laws: HeadLaws, heads: int | None, narrow: torch.dtype) -> Tensor:
    """Scores multiplied by a law's factor of each row; those of hidden keys stay as they are.

    Args:
        scores: what a softmax over the last dimension is about to take, two dimensions or more.
        laws: of the layer.
        heads: how many there are, None if unknown.
        narrow: a key is hidden by a score that hides in this dtype.

    Raises:
        ValueError: if heads cannot be determined, or a law is for others.

    Example:
        >>> from acutance import scaling
        >>> scores = torch.tensor([[[4.0, 1.0], [2.0, -torch.inf]]])
        >>> scaled_scores(scores, HeadLaws(scaling.HeadTable([2.0])), 1, torch.float32)
        tensor([[[8., 2.],
                 [4., -inf]]])
    """
    if scores.dim() == 2:  # rows of one query each
        return scaled_scores(scores[:, None], laws, heads, narrow).squeeze(1)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    with torch._C.DisableTorchFunction():
        hidden = hidden_scores(scores, narrow)
        with torch.no_grad():
            seen = torch.logical_not(hidden).sum(-1, keepdim=True)
            n = fold(seen, heads).squeeze(-1)
            entropy = None
            if laws.needs_entropy:
                weights = scores.detach().to(wide).masked_fill(hidden, -torch.inf).softmax(-1)
                of_rows = torch.special.entr(weights).sum(-1, keepdim=True).nan_to_num()
                entropy = fold(of_rows, heads).squeeze(-1)
            places = torch.arange(seen.numel(), device=scores.device)
            order = fold(places.view(seen.shape), heads).flatten()
            row = torch.empty_like(order)
            row[order] = places  # where each row of the scores lies among the folded ones
        factor = query_factor(laws, n, n.shape[1], wide, entropy).expand(n.shape)
        factor = factor.flatten()[row].view(seen.shape)  # (..., L, 1)
    # seen by what is around this: another law follows these to the softmax too
    products = scores.masked_fill(hidden, 0.0).to(factor.dtype)
    return scores + (products * (factor - 1)).to(scores.dtype)


def warn_of_shallow_mask(name: str, scores: Tensor, narrow: torch.dtype) -> None:
    """Warn if keys seem hidden by a number that does not count as hiding, such as −1e4.

    Args:
        name: of the module.
        scores: (..., S).
        narrow: as for :func:`scaled_scores`.

    Example:
        >>> scores = torch.tensor([[0.0, -1e4, -1e4], [0.0, 0.0, -1e4]])
        >>> warn_of_shallow_mask("attn", scores * 1e6, scores.dtype)  # −1e10 hides
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error")
        ...     warn_of_shallow_mask("attn", scores, scores.dtype)
        Traceback (most recent call last):
            ...
        UserWarning: attn hides keys with a number above -1e9, ...
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            shallow = shallow_mask(scores, dtype=narrow) is not None
        except RuntimeError:  # under vmap, which has no numbers to ask
            return
    if shallow:
        warnings.warn(
            f"{name} hides keys with a number above -1e9, which the law counts as visible keys, so "
            "its n is too large; mask with -inf or torch.finfo(dtype).min",
            stacklevel=3,
        )


def factor_of_call(
    laws: HeadLaws, query: Tensor, key: Tensor, masks: dict[str, Any], read: Callable[[], Any]
) -> Tensor:
    """:func:`query_factor` of a call, (B or 1, Hq or 1, L, 1).

    Args:
        laws: of the layer.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        masks: as for :func:`count`.
        read: returns the :class:`AttentionCall`, of whose rows the entropy may be needed.
    """
    n, entropy = count(query, key, masks), None
    if laws.needs_entropy:
        call = read()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            entropy = call.statistics(False).entropy
    return query_factor(laws, n, query.shape[1], query.dtype, entropy).unsqueeze(-1)


_MOST_KNOWN = 8  # factors that a thread remembers


class KnownFactors(threading.local):
    """Values that a thread computed from masks, for later layers with the same masks."""

    def __init__(self) -> None:
        #: by situation, what is known; its mask, held so that no other gets its identity; and what
        #: was in the mask, where writing to it leaves no trace
        self.known: dict[tuple[Any, ...], tuple[Any, Tensor | None, Tensor | None]] = {}

    def get(self, situation: tuple[Any, ...]) -> Any:
        """The value of a :func:`situation_of`; None if there is none or its mask changed."""
        value, mask, before = self.known.get(situation, (None, None, None))
        if mask is not None and before is not None and not torch.equal(mask, before):
            return None
        return value

    def put(self, situation: tuple[Any, ...], mask: Tensor | None, value: Any) -> None:
        """Store the value of a situation that has this mask."""
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        before = mask.clone() if mask is not None and mask.is_inference() else None
        self.known[situation] = value, mask, before

    def forget_masks(self) -> None:
        """Drop references to the masks of a pass."""
        for situation, (_, mask, _) in list(self.known.items()):
            if mask is not None:
                del self.known[situation]


def situation_of(laws: HeadLaws, call: InterfaceCall) -> tuple[Any, ...] | None:
    """Everything that the factors of a call depend on, as a dictionary key; None if undecidable.

    It is undecidable with a cache object, packed documents, vmap, tensor subclasses, or a mask on
    a GPU in inference mode, whose comparison would make the host wait.
    """
    query, mask, given = call.query, call.mask, call.kwargs
    if type(query) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
        return None
    if given.get("cache") is not None or given.get("cu_seq_lens_k") is not None:
        return None
    written = None
    if mask is not None:
        if type(mask) is not Tensor or (mask.is_inference() and mask.device.type != "cpu"):
            return None
        written = id(mask), None if mask.is_inference() else mask._version
    return (
        id(laws),
        call.implementation,
        query.shape,
        call.key.shape[2],
        query.dtype,
        query.device,
        written,
        given.get("is_causal"),
        getattr(call.module, "is_causal", None),
        given.get("sliding_window"),
        torch.is_inference_mode_enabled(),
    )


@dataclass(frozen=True)
class Plan:
    """What a law does to the calls of one module.

    Attributes:
        name: name of the attention module: the parent if the module itself is only a softmax.
        laws: scalings and windows of its heads; None if the law does not change it.
        windowed: whether the layer has a sliding window of its own.
    """

    name: str
    laws: HeadLaws | None
    windowed: bool


_HINT = "; to exclude it, give the law by layer; to scale it, use F.scaled_dot_product_attention"
_NO_PRODUCT = "its scores are not a product of queries and keys"
_WRITTEN_OUT = (
    "its weights were computed without a softmax call, as those that are exponentiated and divided "
    "by their sum"
)
_UNUSED = ", and no matrix product uses its softmax over keys"
_WINDOWED = "its rows see only a window (windowed=True scales it)"
_CROSS = "its rows have no distance from their keys: it is cross-attention"


def apply(model: torch.nn.Module, law: Any, *, windowed: bool = False) -> Applied:
    """Apply a law to a model: :func:`acutance.apply` for everything but files and names of windows.

    Args:
        model: any module whose attention a law reaches.
        law: a scaling or its name, a window, a pair of both, a mapping from layer or (layer, head)
            to these, a :class:`Law`, or another :class:`~acutance.judging.Change`.
        windowed: also scale layers with a sliding window of the model's.

    Returns:
        What is in force at once and until ``restore()``, or as a context manager until it ends.

    Raises:
        TypeError: if ``model`` is not a module or ``law`` no law.
        ValueError: if a scaling, layer or head does not exist, the law is another model's, or its
            windows move keys and the model's positions are not rotary.

    Example:
        >>> from acutance import scaling
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 64, 8)
        >>> with apply(model, scaling.LogN(train_length=16)) as applied:
        ...     _ = model(x, x, x)
        >>> applied.calls
        {'MultiheadAttention': 1}
    """
    if isinstance(law, Change):
        applied: Applied = law.applied(model)
        return applied
    return Applied(model, law, windowed=windowed)


@dataclass(frozen=True)
class LawChange(Change):
    """A law of scalings and windows as a change with a name, see :func:`acutance.apply`."""

    name: str
    law: AnyLaw
    windowed: bool = False

    @property
    def words(self) -> str:
        """The law as text, or the digest of a law file."""
        windowed = ", windowed" if self.windowed else ""
        if not isinstance(self.law, Law):
            return f"{self.law}{windowed}"
        record = json.dumps(self.law.record(), sort_keys=True)
        return f"law {hashlib.sha256(record.encode()).hexdigest()[:16]}{windowed}"

    def on(self, model: torch.nn.Module) -> Applied:
        """Context in which the law is applied; leaving it raises ApplyError if no call changed."""
        return Applied(model, self.law, windowed=self.windowed)

    def check(self, model: torch.nn.Module) -> None:
        """Raise ValueError if the model has no such layer or head, or the law is another's."""
        by_layer(model, self.law)

    def titled(self, name: str) -> LawChange:
        """The same law under another name."""
        return replace(self, name=name)

    def record(self) -> dict[str, Any]:
        """The record of a law for one model, or the name of one for any.

        Raises:
            ValueError: if it also scales windowed layers, for which the file of a law has no field.
        """
        if not isinstance(self.law, Law):
            return super().record()
        if self.windowed:
            raise ValueError(f"{self.name} has no file: the file of a law has no windowed=True")
        return self.law.record()


class Applied(Interception, AppliedChange):
    """A law applied to a model: what :func:`apply` returns.

    Attributes:
        calls: number of scaled calls by module name; a compiled module counts once.
        skipped: why calls were not scaled, by module name.
    """

    def __init__(self, model: torch.nn.Module, law: AnyLaw, *, windowed: bool = False) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        super().__init__(model)
        self.calls: dict[str, int] = {}
        self.skipped: dict[str, str] = {}
        self._windowed, self._law = windowed, law
        self._factors = KnownFactors()
        self._plans: dict[str, Plan] = {}
        self.read_names()
        self._elsewhere, self._layers = by_layer(model, law)
        self._has_windows = self._elsewhere is not None and bool(self._elsewhere.all_windows)
        for laws in self._layers.values():
            self._has_windows |= bool(laws.all_windows)
        self._asking: set[str] = set()
        moving = []
        known = attention_layers(model)
        for name, module in known.items():
            if uses_interface(module):
                self._asking.add(name)
                plan = self._plan_of(name)  # made before a compiler traces what asks for it
                if self._has_windows and plan.laws and plan.laws.moves and not plan.windowed:
                    moving.append(module)
        self._rotary: dict[torch.nn.Module, Rotary] = {}
        if moving:
            self._rotary.update(zip(moving, find_rotary(model, moving), strict=True))
        # whether compiled modules run compiled, with the law in their graphs: all attention asks
        # the interface, by the code of libraries or as a pass of all modules showed. Windows
        # choose their calls by what a mask holds
        self._traces = bool(known) and len(known) == len(self._asking)
        self._traces &= not self._has_windows and classes_are_library(model)
        kinds = {type(module).__name__ for module in model.modules()}
        self._compiled = "OptimizedModule" in kinds and not self._has_windows
        self._uncompiled = ExitStack()
        self._context = None
        with ExitStack() as context:
            context.callback(self._leave_model)
            context.callback(forget_compiled)
            context.enter_context(self._uncompiled)
            if not self._traces:
                self._run_uncompiled()
            context.enter_context(self.opened(named=True))
            context.enter_context(huggingface.intercept(self._on_interface_call))
            forget_compiled()
            self._context = context.pop_all()

    def _run_uncompiled(self) -> None:
        """Run compiled modules uncompiled, and change kernels that are called as functions.

        These are not replaced while a compiler traces: it remembers a function's parameters.
        """
        self._uncompiled.enter_context(eager())
        self._uncompiled.enter_context(calls.intercept(self.on_function_call))

    def _did_nothing(self) -> str:
        """The sentence for a law under which no call was scaled, with the first reason."""
        model = class_name(self.model)
        if self.skipped:
            name, why = next(iter(self.skipped.items()))
            return f"the law scaled no call of {model}: {len(self.skipped)} layers, {name}: {why}"
        return (
            f"the law scaled no call of {model}: it did not run, or has no attention with "
            "visible queries and keys"
        )

    @property
    def law(self) -> Law:
        """The law as a record that can be saved."""
        return Law.of(self.model, self._law)

    # -- what transformers' interface asks --------------------------------------------------------

    def _plan_of(self, full: str) -> Plan:
        """The plan of the module with this name, made at first use."""
        if (known := self._plans.get(full)) is not None:
            return known
        module, name = self.modules[full], full
        if is_softmax(module):
            name = full.rpartition(".")[0] or class_name(self.model)
            module = self.modules.get(name, module)
        above = name.rpartition(".")[0] or class_name(self.model)
        windowed = is_windowed_inside(module, self.modules.get(above))
        around = name  # or the closest module around it that has a law of its own
        while around and around not in self._layers:
            around = around.rpartition(".")[0]
        laws = self._layers.get(around) or self._elsewhere
        plan = self._plans[full] = Plan(name, laws, windowed)
        return plan

    def _on_interface_call(self, call: InterfaceCall, run: Callable[[], Any]) -> Any:
        """Run a call of transformers' interface with its query scaled, or through windows.

        Raises:
            ApplyError: if the law does not fit the call.
        """
        compiling = torch.compiler.is_compiling()
        if (name := self.name_of(call.module)) is not None:
            if not compiling:
                self.note_interface(call.module)
            plan = self._plans.get(name) or self._plan_of(name)
            laws = plan.laws
            sliding = plan.windowed or call.kwargs.get("sliding_window") is not None
            if laws is not None and sliding and not self._windowed:
                self.skip(plan.name)
            elif laws is not None:
                self._change(call, plan.name, laws, sliding)
        if compiling:
            return run()
        with self.thread:
            return run()

    def _change(self, call: InterfaceCall, name: str, laws: HeadLaws, sliding: bool) -> None:
        """Scale the query of a call, and have its rows read through the windows of their heads."""
        situation = None if torch.compiler.is_compiling() else situation_of(laws, call)
        instead = None
        try:
            if laws.scalings:
                reusable = situation if laws.by_count else None
                factor = None if reusable is None else self._factors.get(reusable)
                if factor is None:
                    read = functools.partial(call.read, name)
                    factor = factor_of_call(laws, call.query, call.key, call.masks(), read)
                    if reusable is not None:
                        self._factors.put(reusable, call.mask, factor)
                call.query = call.query * factor
            self._count(name)
            if self._has_windows and laws.all_windows:
                instead = self._window(call, name, laws, situation, sliding)
        except ValueError as error:
            raise self.unreachable(name, str(error)) from error
        if instead is not None:
            call.replace(instead)

    def _window(
        self,
        call: InterfaceCall,
        name: str,
        laws: HeadLaws,
        situation: tuple[Any, ...] | None,
        sliding: bool,
    ) -> Replacement | None:
        """What computes a call through the windows of its heads; None for cross-attention."""
        if is_cross(name, call.module):
            self.skip(name, _CROSS)
            return None
        if sliding:
            raise ValueError("it has a sliding window of its own")
        same = None
        if situation is not None and call.kwargs.get("position_bias") is None:
            same = "keys", *situation[1:]  # whatever the law
        known = None if same is None else self._factors.get(same)
        rotary = self._rotary.get(call.module)
        instead = Replacement(call, name, laws, rotary, self.unreachable, known)
        if same is not None and known is None:
            self._factors.put(same, call.mask, instead.call.keys)
        return instead

    def muted(self) -> bool:
        """Whether calls are left unscaled: inside a scaled call, or after the law was removed."""
        return self.thread.depth > 0 or self._context is None

    def note_attention(self) -> None:
        """Note that the model calls a function that is or may be attention."""
        self.note_function()
        if self._traces:
            self._traces = False
            self._run_uncompiled()

    def unreachable(self, name: str, reason: str) -> ApplyError:
        """The error to raise when the law cannot change the attention of the module ``name``."""
        return ApplyError(f"the law cannot be applied to {name}: {reason}")

    # -- what attention by plain PyTorch functions asks: SDPA, nn.MultiheadAttention, softmaxes ----

    def plan_to_change(self) -> Plan | None:
        """The plan of the innermost module that this thread runs; None if its attention stays."""
        name = self.running() if self.thread.stack else None
        plan = None if name is None else self._plan_of(name)
        if plan is None or plan.laws is None or self._holds(plan.name):
            return None
        if plan.windowed and not self._windowed:
            self.skip(plan.name)
            return None
        return plan

    def _holds(self, name: str) -> bool:
        """Whether a submodule uses transformers' interface and the module itself does not.

        A compiled module reports no running submodules, so functions that seem to be called by the
        module itself are then the submodule's, which the interface scales already.
        """
        if not self._traces:
            return False
        start = "" if name == class_name(self.model) else f"{name}."
        return any(one.startswith(start) and one != name for one in self._asking)

    def on_function_call(self, call: Carrier, run: Callable[[], Any]) -> Any:
        """Run a call of a function that computes attention with its queries scaled.

        Raises:
            ApplyError: if it cannot be changed, or does not fit the law.
        """
        self.on_function()
        if self.muted() or not self.thread.stack:
            return run()
        self.note_attention()
        plan = self.plan_to_change()
        if plan is not None and plan.laws is not None:
            laws = plan.laws
            try:
                if call.unchangeable is not None:
                    raise ValueError(call.unchangeable)
                with self.mute(), torch._C.DisableTorchFunction():
                    read = call.read(plan.name)
                    factor = factor_of_call(laws, read.query, read.key, read.masks, lambda: read)
                    if laws.all_windows:
                        if call.sdpa is None:
                            raise ValueError("a law's windows cannot be passed to it")
                        given = call.sdpa.arguments
                        call.sdpa.arguments = masked_arguments(laws, read, given)
                call.scale_queries(factor)
            except ValueError as error:
                raise self.unreachable(plan.name, call.refusal(str(error))) from error
            self._count(plan.name)
        with self.mute():
            return run()

    # -- softmaxes in the model's own code --------------------------------------------------------

    def on_softmax(self, softmax: Softmax, tracker: Tracker) -> Tensor:
        """Run a softmax with the products in its scores scaled.

        A softmax whose scores cannot be scaled is watched: using it as attention raises.
        """
        self.note_attention()
        scores, dim, plan = softmax.base, softmax.dim, self.plan_to_change()
        if scores is None:
            return softmax.compute()
        known = tracker.of(scores)
        active = known is not None and known.active
        dense = scores.layout is torch.strided and not scores.is_nested
        rank = scores.dim() >= (2 if active else FEWEST)
        if not (rank and scores.is_floating_point() and dense and scores.numel() > 0):
            return softmax.compute()
        heads = None if plan is None else self.heads_running()
        changed, reason = None, ""
        if plan is not None and (active or could_be_over_keys(scores, dim, heads)):
            if dim not in (-1, scores.dim() - 1):
                reason = f"its softmax is over dimension {dim} of {tuple(scores.shape)}"
            elif known is None or not known.active:
                reason = _NO_PRODUCT
            elif known.problem:
                reason = f"its scores {known.problem}"
            else:
                changed = self._changed_scores(plan, scores, heads, known.narrow)
        result = softmax.compute(changed)
        tracker.mark_weights(result)
        if plan is not None and reason:
            softmax.module, softmax.unreadable_reason = plan.name, reason
            tracker.add(softmax, result)
        return result

    def _changed_scores(
        self, plan: Plan, scores: Tensor, heads: int | None, narrow: torch.dtype
    ) -> Tensor:
        """The scores of a hand-written softmax over the last dimension as the law changes them.

        Args:
            plan: of the attention module.
            scores: input of the softmax, products of queries and keys with nothing but masks added.
            heads: how many there are, None if unknown.
            narrow: dtype whose most negative numbers count as hiding a key.

        Raises:
            ApplyError: if the law cannot be applied to them.
        """
        assert plan.laws is not None
        changed = scores
        try:
            if plan.laws.scalings:
                changed = scaled_scores(scores, plan.laws, heads, narrow)
            if plan.laws.all_windows:
                changed = masked_scores(plan.laws, changed, heads, narrow)
        except ValueError as error:
            raise self.unreachable(plan.name, str(error)) from error
        if plan.name not in self.calls:
            warn_of_shallow_mask(plan.name, scores, narrow)
        self._count(plan.name)
        return changed

    def on_written_out(self) -> None:
        """Raise for weights computed without a softmax call that a matrix product uses."""
        if (plan := self.plan_to_change()) is not None:
            raise self.unreachable(plan.name, _WRITTEN_OUT + _HINT)

    def on_product(self, softmax: Softmax, _: Callable[[], str | None]) -> None:
        """Raise for a matrix product with the softmax of scores that could not be scaled."""
        raise self.unreachable(softmax.module, softmax.unreadable_reason + _HINT)

    def on_unused(self, softmax: Softmax) -> None:
        """Note a softmax that no product used: it may still be attention."""
        self.skip(softmax.module, f"{softmax.unreadable_reason}{_UNUSED}")

    def on_functions_end(self, tracker: Tracker) -> None:
        """Note softmaxes that no product used."""
        tracker.finish()

    # -- bookkeeping ------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        """Count a scaled call of module ``name``; one being traced, only if it has no count yet."""
        if name not in self.calls or not torch.compiler.is_compiling():
            self.calls[name] = self.calls.get(name, 0) + 1

    def skip(self, name: str, why: str = _WINDOWED) -> None:
        """Note why the calls of a module are not scaled; the first reason counts."""
        self.skipped.setdefault(name, why)

    def new_mode(self) -> FunctionMode:
        """The mode that changes what this thread's functions compute."""
        return FunctionMode(self, looks=False, scores=True)

    def on_enter(
        self, module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Follow no functions in a compiled module: the compiler would trace that too."""
        if type(module).__name__ == "OptimizedModule" and self._traces:
            self.pause_functions(1)

    def on_leave(self, module: torch.nn.Module) -> None:
        """Follow functions again after a compiled module."""
        if type(module).__name__ == "OptimizedModule" and self.thread.paused:
            self.pause_functions(-1)

    def on_end(self) -> None:
        """Trace compiled modules from now on, if the pass showed that all attention allows it."""
        self._factors.forget_masks()
        if self._compiled and not self._traces and self.seen_by_interface:
            self._traces = True
            self._uncompiled.close()

    def _leave_model(self) -> None:
        """Reset what this thread holds about a pass; an interrupt may have left modules running."""
        self.thread.stack.clear()
        self._factors.known.clear()
