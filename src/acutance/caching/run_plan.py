"""Run a model under a plan: every pass gets a planned cache, every attention call reads it."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.caching.head_plan import HeadPlan, Plan
from acutance.caching.planned_cache import (
    PlannedCache,
    PlannedLayer,
    forget_pending,
    reading,
    take_pending,
)
from acutance.caching.stores import Attend
from acutance.calibration.apply_law import AppliedChange, ApplyError
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import class_name, named_modules, unwrap
from acutance.capture.intercept import Running, eager, forget_compiled, module_of_method
from acutance.capture.kernel_functions import calls
from acutance.capture.model_cache import CACHE_ARGUMENTS, cache_argument
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall, base_name
from acutance.masks import hides


class AppliedPlan(AppliedChange):
    """A plan applied to a model: what :func:`acutance.apply` returns for a :class:`CachePlan`.

    Attributes:
        plan: the plan, with the layer names of this model.
        calls: attention calls that ran under it, by module name.
    """

    _noun = "this plan"

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
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
            context.enter_context(reading())
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
        forget_pending()
        given = dict(zip(names, args, strict=False)) | kwargs
        argument, cache = declared, None
        for name in CACHE_ARGUMENTS:
            if cache is None and given.get(name) is not None:
                argument, cache = name, given[name]
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
        place, planned = names.index(declared), PlannedCache(self.plan)
        if place < len(args):
            return (*args[:place], planned, *args[place + 1 :]), kwargs
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

    def mute(self) -> AbstractContextManager[None]:
        """Context of a call that runs under the plan, whatever kernel it calls."""
        return self._running.mute

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
        module, query, key, value, mask = call.positional()
        name = self._names.get(id(module))
        if name is not None:
            try:
                layer = self._layer(name, call, query, key)
                counts = layer.real_counts(query.shape[0])
                real = None if mask is None else self._real_tokens(mask, query, counts)
                given = call.kwargs
                softcap, dropout = given.get("softcap") or None, float(given.get("dropout") or 0.0)
                attend = Attend(given.get("scaling"), softcap, dropout)
                call.replace(PlannedCall(layer, self.plan.layers[name], key, value, real, attend))
            except ValueError as error:
                raise ApplyError(f"the plan cannot be applied to {name}: {error}") from error
            self.calls[name] = self.calls.get(name, 0) + 1
        with self.mute():
            return run()

    def _layer(self, name: str, call: InterfaceCall, query: Tensor, key: Tensor) -> PlannedLayer:
        """The cache that a call reads, an empty one if it has all of its keys.

        Raises:
            ValueError: if the call has what a planned cache does not compute.
        """
        if name not in self.plan.layers:
            raise ValueError("the plan has no such layer")
        layer, given = take_pending(key), call.kwargs
        if given.get("position_bias") is not None or given.get("s_aux") is not None:
            raise ValueError("its scores have a bias or learned sinks")
        if given.get("cache") is not None or given.get("sliding_window") is not None:
            raise ValueError("it has a sliding window or a paged cache of its own")
        if call["attention_mask"] is None and query.shape[2] > 1:
            causal = given.get("is_causal")
            causal = getattr(call["module"], "is_causal", True) if causal is None else causal
            if base_name(call.implementation) == "eager" or not causal:
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
        layer: the cache.
        heads: what each key head keeps.
        key: new keys, (B, H, L, E).
        value: new values, (B, H, L, Ev).
        real: which new tokens are no padding, (B, L); None if all are.
        attend: computes attention.
    """

    layer: PlannedLayer
    heads: tuple[HeadPlan, ...]
    key: Tensor
    value: Tensor
    real: Tensor | None
    attend: Attend

    def run(self, call: InterfaceCall) -> tuple[Tensor, None]:
        """The output (B, L, Hq, Ev) and None for the weights."""
        query = call.positional()[1]
        with torch._C.DisableTorchFunction():
            output = self.layer.attend(
                self.heads, query, self.key, self.value, self.real, self.attend
            )
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
