"""Run a model under a plan: every pass gets a planned cache, every attention call reads it."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from acutance.caching.head_plan import HeadPlan, value_groups
from acutance.caching.stores import Attend, Store, is_range, some, store_for
from acutance.calibration.apply_law import AppliedChange, ApplyError
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import (
    CACHE_ARGUMENTS,
    cache_argument,
    class_name,
    named_modules,
    unwrap,
)
from acutance.capture.intercept import Running, eager, forget_compiled, module_of_method
from acutance.capture.kernel_functions import calls
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.kernels import ragged
from acutance.kernels.ragged import HeldHeads
from acutance.masks import hides

#: Plans that are in force: without one, nothing reads a planned cache.
_IN_FORCE: list[AppliedPlan] = []


class _Pending(threading.local):
    """The layer, and its new keys, that this thread's next attention call reads."""

    layer: PlannedLayer | None = None
    key: Tensor | None = None


_PENDING = _Pending()


class PlannedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer, by groups of heads that keep the same.

    Args:
        group: tokens, or channels, that share a scale.
        residual: newest tokens that are not quantised.
    """

    is_sliding = False

    def __init__(self, group: int, residual: int) -> None:
        super().__init__()
        self._group, self._residual = group, residual
        self._length = 0  # tokens with padding
        self._batch = 0
        self._kind: torch.dtype | None = None  # of what is stored
        self._places: dict[HeadPlan, list[int]] = {}  # key heads of each group
        self._stores: list[dict[HeadPlan, Store]] = []  # one, or one for each sequence

    # -- what transformers asks -------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values alone: the attention call that follows stores them.

        Raises:
            ApplyError: if no plan is applied that makes attention read the cache.
        """
        if not _IN_FORCE or _PENDING.layer is not None:
            _PENDING.layer = _PENDING.key = None
            raise ApplyError(
                "a PlannedCache is read only while its plan is applied: run the model inside "
                "acutance.apply(model, plan)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._length += key_states.shape[2]
        _PENDING.layer, _PENDING.key = self, key_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens that were stored, with padding and those forgotten since."""
        return self._length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Keys that the mask of a pass covers, and the first one's index, 0."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        return self._length + count, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def reset(self) -> None:
        """Forget everything."""
        self._stores, self._length, self.is_initialized = [], 0, False

    def crop(self, *_: Any) -> None:
        """Raises ValueError: what was forgotten cannot be brought back."""
        raise ValueError("a PlannedCache cannot be cropped: its heads have forgotten keys")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of these indices, in this order."""
        if not self._stores:
            return
        if len(self._stores) == 1:
            self._select([(0, indices.to(self.device))])
        else:
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._select([(int(index), first) for index in indices])
        self._batch = len(indices)

    def offload(self) -> None:
        """Raises ValueError: a planned cache stays where the model is."""
        raise ValueError("a PlannedCache cannot be offloaded")

    def prefetch(self) -> None:
        """Nothing."""

    # -- attention --------------------------------------------------------------------------------

    def attend(
        self,
        heads: Sequence[HeadPlan],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        """Store new tokens, and return the output of their rows.

        Args:
            heads: what each key head keeps.
            query: (B, Hq, L, E).
            key: (B, H, L, E), of the new tokens.
            value: (B, H, L, Ev).
            real: (B, L), whether a new token is no padding; None if all are.
            attend: computes attention.

        Returns:
            (B, Hq, L, Ev), zero for padding.
        """
        self._prepare(heads, key, real)
        if query.shape[2] == 1 and real is None:
            output = self._decoded(query, key, value, attend)
            if output is not None:
                return output
        if len(self._stores) == 1 and real is None:
            return self._by_groups(self._stores[0], query, key, value, attend)
        output = query.new_zeros((*query.shape[:3], value.shape[3]))
        for index, (stores, tensors) in enumerate(self._by_sequence(query, key, value)):
            tokens: Any = slice(None) if real is None else real[index].nonzero()[:, 0]
            if real is None or len(tokens):
                q, k, v = (tensor[:, :, tokens] for tensor in tensors)
                output[index : index + 1, :, tokens] = self._by_groups(stores, q, k, v, attend)
        return output

    def _by_sequence(
        self, *tensors: Tensor
    ) -> Iterator[tuple[dict[HeadPlan, Store], Sequence[Tensor]]]:
        """The stores with their sequences of tensors (B, ...)."""
        if len(self._stores) == 1:
            yield self._stores[0], tensors
            return
        for index, stores in enumerate(self._stores):
            yield stores, [tensor[index : index + 1] for tensor in tensors]

    def _by_groups(
        self,
        stores: dict[HeadPlan, Store],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Attend,
    ) -> Tensor:
        """The output of all heads, group by group."""
        if len(stores) == 1:
            return next(iter(stores.values())).attend(query, key, value, attend)
        shape = (key.shape[1], query.shape[1] // key.shape[1])
        output = query.new_empty((*query.shape[:3], value.shape[3]))
        by_head, queries = output.unflatten(1, shape), query.unflatten(1, shape)
        for plan, store in stores.items():
            index = self._places[plan]
            group = some(queries, index).flatten(1, 2)
            result = store.attend(group, some(key, index), some(value, index), attend)
            at = slice(index[0], index[-1] + 1) if is_range(index) else index
            by_head[:, at] = result.unflatten(1, (len(index), shape[1]))
        return output

    def add(self, heads: Sequence[HeadPlan], key: Tensor, value: Tensor) -> None:
        """Store new tokens, none of them padding, that no row reads now.

        Args:
            heads: what each key head keeps.
            key: (B, H, L, E).
            value: (B, H, L, Ev).
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._length += key.shape[2]
        self._prepare(heads, key, None)
        for stores, (k, v) in self._by_sequence(key, value):
            for plan, store in stores.items():
                store.add(some(k, self._places[plan]), some(v, self._places[plan]))

    def held(self, *new: Tensor) -> list[list[HeldHeads]]:
        """What heads hold of each sequence, in one entry if none has padding.

        It is valid until the next token is stored.

        Args:
            new: keys and values (B, H, 1, D) that :meth:`Store.admit` adds first.
        """
        held: list[list[HeldHeads]] = []
        for stores, tensors in self._by_sequence(*new):
            held.append([])
            for plan, store in stores.items():
                index = self._places[plan]
                stored = store.admit(tensors[0], tensors[1], index) if new else store.held()
                if stored is not None:
                    held[-1].append(HeldHeads(index, *stored))
        return held

    def _prepare(self, heads: Sequence[HeadPlan], key: Tensor, real: Tensor | None) -> None:
        """Make the stores: one for all sequences, or one for each where there is padding."""
        if self._stores and len(key) != self._batch:
            raise ValueError(
                f"the cache holds {self._batch} sequences, but new keys are {tuple(key.shape)}"
            )
        if not self._stores:
            self._batch, self._kind = len(key), key.dtype
            self._places = {plan: [] for plan in heads}
            for head, plan in enumerate(heads):
                self._places[plan].append(head)
            self._stores = [
                {plan: store_for(plan, self._group, self._residual) for plan in self._places}
                for _ in range(1 if real is None else len(key))
            ]
        elif real is not None and len(self._stores) == 1 and len(key) > 1:
            indices = torch.arange(len(key), device=key.device)
            self._select([(0, index[None]) for index in indices])

    def _decoded(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor | None:
        """:meth:`attend` for one token of each sequence, in one call of the native kernel.

        None, with nothing stored, if that does not support the call.
        """
        width = value.shape[3]
        channels = width // value_groups(width, self._group)
        if (
            attend.softcap
            or attend.dropout
            or not self._kind == query.dtype == key.dtype == value.dtype
            or not ragged.supports(query, width, self._group, channels)
        ):
            return None
        scale = query.shape[3] ** -0.5 if attend.scale is None else attend.scale
        return ragged.attend(
            query, key, value, self.held(key, value), scale=scale, tokens=self._group,
            channels=channels,
        )  # fmt: skip

    def _select(self, picks: Sequence[tuple[int, Tensor]]) -> None:
        """Replace the stores by copies: for each number of one, these sequences of it."""
        with torch.inference_mode(False), torch.no_grad():  # they are written to later
            self._stores = [
                {plan: store.select(indices) for plan, store in self._stores[number].items()}
                for number, indices in picks
            ]

    def real_counts(self, batch: int) -> list[int]:
        """Stored tokens of each sequence, without padding."""
        counts = [next(iter(stores.values())).n for stores in self._stores] or [0]
        return counts * (batch if len(counts) == 1 else 1)

    def tensors(self) -> list[Tensor]:
        """All tensors that hold keys and values."""
        stores = (store for stores in self._stores for store in stores.values())
        return [tensor for store in stores for tensor in store.tensors()]


class PlannedCache(Cache):  # type: ignore[misc]
    """transformers' cache that holds what a plan keeps.

    :func:`acutance.apply` gives one to every forward pass and every ``generate`` that has no cache
    yet. To continue from it later, pass the cache in its output on as usual. Keys are stored
    after RoPE. Gradients do not reach keys of earlier passes.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        count = len(plan.layers)
        super().__init__(layers=[PlannedLayer(plan.group, plan.residual) for _ in range(count)])

    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())


class AppliedPlan(AppliedChange):
    """A plan applied to a model: what :func:`acutance.apply` returns for a :class:`CachePlan`.

    Attributes:
        plan: the plan, with the layer names of this model.
        calls: attention calls that ran under it, by module name.
    """

    _noun = "this plan"

    def __init__(self, model: torch.nn.Module, plan: Any) -> None:
        self.plan = plan
        self.calls: dict[str, int] = {}
        self._model = model
        self._names = {id(module): name for name, module in named_modules(model)}
        self._running = Running()
        self._mask: tuple[weakref.ref[Tensor], Tensor | None] | None = None  # the last one read
        self._searched = None if plan.search is None else int(plan.search["n"])
        with ExitStack() as context:
            context.callback(forget_compiled)
            context.enter_context(eager())
            for module in unwrap(model).modules():
                if getattr(module, "config", None) is None:
                    continue
                names = list(inspect.signature(type(module).forward).parameters)[1:]  # not self
                argument = cache_argument(names)
                if argument is not None and "input_ids" in names:  # it makes a cache if it has none
                    give = functools.partial(self._give_cache, names, argument)
                    hook = module.register_forward_pre_hook(give, with_kwargs=True)
                    context.callback(hook.remove)
            context.enter_context(huggingface.intercept(self._on_call))
            context.enter_context(calls.intercept(self._on_kernel_call))
            _IN_FORCE.append(self)
            context.callback(_IN_FORCE.remove, self)
            forget_compiled()
            self._context = context.pop_all()

    def _did_nothing(self) -> str:
        """The sentence for a plan under which the model did not run."""
        return f"the plan changed no call of {class_name(self._model)}: it did not run"

    # -- the cache of a pass ----------------------------------------------------------------------

    def _give_cache(
        self,
        names: list[str],
        declared: str,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the empty cache of a pass by a planned one, before a model's forward method.

        Args:
            names: of the method's parameters.
            declared: of its cache.
            module: the model.
            args: of the call.
            kwargs: of the call.
        """
        _PENDING.layer = _PENDING.key = None  # of a pass that was interrupted
        given = dict(zip(names, args, strict=False)) | kwargs
        held = (name for name in CACHE_ARGUMENTS if given.get(name) is not None)
        argument = next(held, declared)
        cache = given.get(argument)
        self._warn_of_length(given, cache)
        if isinstance(cache, PlannedCache):
            if cache.plan is not self.plan and cache.plan != self.plan:
                raise ApplyError(f"{argument} is the cache of another plan")
            return None
        if cache is None:
            config: Any = module.config
            use = given.get("use_cache")
            if not (getattr(config, "use_cache", False) if use is None else use):
                return None
        elif type(cache).__name__ != "DynamicCache" or cache.get_seq_length():
            what = f"{type(cache).__name__} with {cache.get_seq_length()} tokens"
            raise ApplyError(
                f"{argument} must be a cache of this plan, an empty DynamicCache or None, got a "
                f"{what}"
            )
        position, planned = names.index(declared), PlannedCache(self.plan)
        if position < len(args):
            return (*args[:position], planned, *args[position + 1 :]), kwargs
        return args, {**kwargs, argument: planned}

    def _warn_of_length(self, given: dict[str, Any], cache: Any) -> None:
        """Warn once of a text that is longer than the windows that the plan was searched on."""
        ids, embedded = given.get("input_ids"), given.get("inputs_embeds")
        new = ids if embedded is None else embedded
        if self._searched is None or not isinstance(new, Tensor) or new.dim() < 2:
            return
        tokens = new.shape[1] + (cache.get_seq_length() if isinstance(cache, PlannedCache) else 0)
        if tokens > self._searched:
            warnings.warn(
                f"the plan was searched on windows of {self._searched} tokens, and the text has "
                f"{tokens}: what it drops there was not measured; search on longer windows",
                stacklevel=2,
            )
            self._searched = None

    def _on_kernel_call(self, call: calls.FunctionCall, run: Callable[[], Any]) -> Any:
        """Raise ApplyError for a kernel that the model calls without transformers' interface."""
        name = None if self._running.depth else module_of_method(self._names)
        if name is None:
            return run()
        reason = call.refusal("it has no cache of the plan")
        raise ApplyError(f"the plan cannot be applied to {name}: {reason}")

    # -- calls of transformers' interface ---------------------------------------------------------

    def _on_call(self, call: InterfaceCall, run: Callable[[], Any]) -> Any:
        """Run a call of transformers' interface under the plan.

        Raises:
            ApplyError: if it cannot run under the plan.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        name = self._names.get(id(call.module))
        if name is not None:
            try:
                layer = self._layer(name, call, query, key)
                counts = layer.real_counts(query.shape[0])
                real = None if mask is None else self._real_tokens(mask, query, counts)
                given = call.kwargs
                softcap, dropout = given.get("softcap") or None, float(given.get("dropout") or 0.0)
                attend = functools.partial(
                    layer.attend, self.plan.layers[name], key=key, value=value, real=real,
                    attend=Attend(given.get("scaling"), softcap, dropout),
                )  # fmt: skip
                call.replace(PlannedCall(attend))
            except ValueError as error:
                raise ApplyError(f"the plan cannot be applied to {name}: {error}") from error
            self.calls[name] = self.calls.get(name, 0) + 1
        with self._running:  # whatever kernel it calls
            return run()

    def _layer(self, name: str, call: InterfaceCall, query: Tensor, key: Tensor) -> PlannedLayer:
        """The cache that a call reads, an empty one if it has all of its keys.

        Raises:
            ValueError: if the call has what a planned cache does not compute.
        """
        if name not in self.plan.layers:
            raise ValueError("the plan has no such layer")
        layer, stored, given = _PENDING.layer, _PENDING.key, call.kwargs
        _PENDING.layer = _PENDING.key = None
        if layer is not None and stored is not key:
            raise ValueError(
                "its keys are changed after they enter the cache, which a cache plan cannot follow"
            )
        if given.get("position_bias") is not None or given.get("s_aux") is not None:
            raise ValueError("its scores have a bias or learned sinks")
        if given.get("cache") is not None or given.get("sliding_window") is not None:
            raise ValueError("it has a sliding window or a paged cache of its own")
        if call.mask is None and query.shape[2] > 1:
            causal = given.get("is_causal")
            causal = getattr(call.module, "is_causal", True) if causal is None else causal
            if call.kind == "eager" or not causal:
                raise ValueError("it is not causal")
        if layer is None:
            if query.shape[2] != key.shape[2]:
                raise ValueError("its earlier keys are not in a planned cache")
            layer = PlannedLayer(self.plan.group, self.plan.residual)
        shape = self.plan.shapes[name]
        if (key.shape[1], key.shape[3]) != (shape.heads, shape.key_width):
            raise ValueError(
                f"the plan has {shape.heads} key heads of width {shape.key_width}, but its keys "
                f"are {tuple(key.shape)}"
            )
        return layer

    def _real_tokens(self, mask: Any, query: Tensor, counts: list[int]) -> Tensor | None:
        """:func:`real_tokens`, read once for all layers of a pass, which share their mask."""
        if not isinstance(mask, Tensor):
            raise ValueError(f"its mask is a {type(mask).__name__}: use sdpa or eager attention")
        last = self._mask  # read once: another thread may replace it
        if last is None or last[0]() is not mask:
            self._mask = last = weakref.ref(mask), real_tokens(mask, query, counts)
        return last[1]


class PlannedCall(NamedTuple):
    """What computes a call of transformers' interface under a plan, in place of its function.

    Attributes:
        attend: the output (B, Hq, L, Ev) for queries (B, Hq, L, E).
    """

    attend: Callable[[Tensor], Tensor]

    def run(self, call: InterfaceCall) -> tuple[Tensor, None]:
        """The output (B, L, Hq, Ev) and None for the weights."""
        with torch._C.DisableTorchFunction():
            output = self.attend(call.query)
        return output.transpose(1, 2).contiguous(), None

    def read(self, name: str) -> AttentionCall:
        """Raises ValueError: heads read different keys, some of them rounded."""
        raise ValueError("it runs under a cache plan, whose heads read different keys")


def real_tokens(mask: Tensor, query: Tensor, counts: list[int]) -> Tensor | None:
    """Which new tokens are no padding, (B, L); None if all are.

    Args:
        mask: of the call.
        query: (B, Hq, L, E).
        counts: earlier tokens of each sequence that are no padding.

    Raises:
        ValueError: if the mask hides keys by more than causality and padding.
    """
    batch, new = query.shape[0], query.shape[2]
    if mask.dim() == 2:
        real = mask[:, -new:].bool()
        return None if bool(real.all()) else real
    hidden = torch.logical_not(mask) if mask.dtype == torch.bool else hides(mask)
    if mask.dtype != torch.bool and bool((mask.masked_fill(hidden, 0.0) != 0).any()):
        raise ValueError(
            "its mask adds values other than 0 and -inf to the scores, which a cache plan cannot do"
        )
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"its mask has shape {tuple(mask.shape)}, not (B, 1, L, S)")
    seen = torch.logical_not(hidden[:, 0]).expand(batch, new, -1)
    now = seen[:, :, -new:]
    real = now.diagonal(dim1=1, dim2=2)
    rows = torch.arange(new, device=mask.device)
    expected = real[:, None, :] & (rows <= rows[:, None])
    earlier = seen[:, :, :-new].sum(-1) == torch.tensor(counts, device=mask.device)[:, None]
    fits = (now == expected).all(-1) & earlier
    if not bool((fits | torch.logical_not(real)).all()):
        raise ValueError("its mask hides keys by more than causality and padding")
    return None if bool(real.all()) else real
