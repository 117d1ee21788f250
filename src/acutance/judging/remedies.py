"""What a model can be judged under: a law, RoPE settings, heads switched off."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from acutance.caching.import_plan import ForeignPlan, read_foreign
from acutance.caching.plan import CachePlan, holds_plan
from acutance.calibration.apply_law import ApplyError, apply
from acutance.calibration.law import AnyLaw, Law, by_layer, check_head
from acutance.calibration.named_law import joined_parts, named_law
from acutance.capture.find_layers import attention_layers, uses_interface
from acutance.capture.layer_choice import choose_layers
from acutance.capture.module_names import class_name
from acutance.capture.readers import huggingface
from acutance.capture.readers.interface_call import InterfaceCall
from acutance.judging.rope import RopeRemedy, named_rope, with_train_length
from acutance.scaling import Window
from acutance.shapes import check_count

if TYPE_CHECKING:
    from acutance.caching.run_plan import AppliedPlan

__all__ = ["HeadsOff", "LawRemedy", "PlanRemedy", "Remedy"]


@runtime_checkable
class Remedy(Protocol):
    """A reversible change of a model, such as a law, whose effect on the loss can be measured."""

    @property
    def name(self) -> str:
        """Name of the change in tables, such as ``ssmax`` or ``off:3.0``."""

    @property
    def words(self) -> str:
        """A text that identifies the change: a saved run is resumed only if it is the same."""

    def applied(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which the model is changed; leaving it restores the model."""


@dataclass(frozen=True)
class LawRemedy:
    """A law of scalings and windows as a remedy, see :func:`acutance.apply`."""

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

    def applied(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which the law is applied; leaving it raises ApplyError if no call changed."""
        return apply(model, self.law, windowed=self.windowed)

    def check(self, model: torch.nn.Module) -> None:
        """Raise ValueError if the model has no such layer or head, or the law is another's."""
        by_layer(model, self.law)


@dataclass(frozen=True)
class PlanRemedy:
    """A plan for the key-value cache as a remedy with a name of its own."""

    name: str
    plan: CachePlan | ForeignPlan

    @property
    def words(self) -> str:
        """The digest of the plan."""
        return self.plan.words

    def applied(self, model: torch.nn.Module) -> AppliedPlan:
        """Context in which the model runs under the plan."""
        return self.plan.applied(model)


@dataclass(frozen=True)
class HeadsOff:
    """Heads whose output is zero: what the model loses without them.

    Attributes:
        heads: layers, each with its heads; None is all of them.

    Example:
        >>> HeadsOff({3: [0, 2], 5: None}).name
        'off:3.0,3.2,5'
    """

    heads: Mapping[int | str, Sequence[int] | None]

    @property
    def name(self) -> str:
        """``off:`` and the heads, as the command line accepts it."""
        parts = [
            str(layer) if some is None else f"{layer}.{head}"
            for layer, some in self.heads.items()
            for head in (some if some is not None else [0])
        ]
        return f"off:{','.join(parts)}"

    @property
    def words(self) -> str:
        """The same as :attr:`name`."""
        return self.name

    @contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[None]:
        """Zero the heads' outputs in every call of transformers' attention interface.

        Raises:
            ApplyError: if a layer does not use it, or none of them ran.
            ValueError: if there is no such layer or head.
        """
        switched, calls = self._modules(model), 0

        def silence(call: InterfaceCall, run: Callable[[], Any]) -> Any:
            nonlocal calls
            result = run()
            if id(call["module"]) not in switched:
                return result
            calls += 1
            output = _without(call.output(result), switched[id(call["module"])])
            output = output.transpose(1, 2)
            return (output, *result[1:]) if isinstance(result, tuple) else output

        with huggingface.intercept(silence):
            yield
        if not calls:
            raise ApplyError(f"{self.name} changed no call of {class_name(model)}: it did not run")

    def _modules(self, model: torch.nn.Module) -> dict[int, Sequence[int] | None]:
        """The heads of each layer by the ``id`` of its module; raises as :meth:`applied`."""
        layers = attention_layers(model)
        found: dict[int, Sequence[int] | None] = {}
        for layer, heads in self.heads.items():
            for name in choose_layers(model, layer, "layer"):
                module = layers.get(name)
                if module is None or not uses_interface(module):
                    raise ApplyError(
                        f"heads of {name} cannot be switched off: {class_name(model)} does not run "
                        "it through transformers' attention interface"
                    )
                for head in heads or ():
                    check_head(name, module, head)
                found[id(module)] = heads
        return found

    def check(self, model: torch.nn.Module) -> None:
        """Raise the errors of :meth:`applied` that need no run of the model."""
        self._modules(model)


def _without(output: torch.Tensor, heads: Sequence[int] | None) -> torch.Tensor:
    """An output (B, Hq, L, Ev) with zeros for some heads, or for all."""
    if heads is None:
        return torch.zeros_like(output)
    if (most := max(heads)) >= output.shape[1]:
        raise ValueError(f"there is no head {most}: the layer has heads 0 to {output.shape[1] - 1}")
    output = output.clone()
    output[:, list(heads)] = 0.0
    return output


def named_remedy(text: str) -> LawRemedy | PlanRemedy | HeadsOff | RopeRemedy:
    """The change to a model that a text names: a file, a law, RoPE settings, or heads off.

    A file holds a law or a plan for the cache; ``duo_attention:DIR`` and ``layer_types:FILE`` are
    plans of other tools, see :func:`acutance.caching.import_plan`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if nothing has that name, or a number in it is wrong.

    Example:
        >>> named_remedy("log_n:train_length=512").law
        LogN(train_length=512, base=None, n_min=16)
        >>> named_remedy("off:3.0,3.2").heads
        {3: [0, 2]}
        >>> named_remedy("rope:yarn,factor=2").kind
        'yarn'
    """
    if os.path.exists(text):
        if holds_plan(text):
            return PlanRemedy(text, CachePlan.load(text))
        return LawRemedy(text, named_law(text))
    parts = joined_parts(text)
    alone = [part for part in parts if part.partition(":")[0] in ("off", "rope")]
    if alone and len(parts) > 1:
        raise ValueError(
            f"law: {alone[0]} cannot be joined to another law by +, got {text!r}. Only a scaling "
            "and a window can be"
        )
    if alone:
        kind, _, rest = text.partition(":")
        return HeadsOff(_heads(rest)) if kind == "off" else named_rope(rest)
    if (foreign := read_foreign(text)) is not None:
        return PlanRemedy(text, foreign)
    return LawRemedy(text, named_law(text))


def _heads(text: str) -> dict[int | str, Sequence[int] | None]:
    """Parse ``3.0,3.2,5`` to the heads of each layer, None for all heads of a layer."""
    found: dict[int | str, Sequence[int] | None] = {}
    for part in text.split(","):
        layer, dot, head = part.strip().partition(".")
        if not layer.isdecimal() or (dot and not head.isdecimal()):
            raise ValueError(f"law: heads must be LAYER.HEAD, as in off:3.0,3.2, got {part!r}")
        before = found.get(int(layer), [])
        if int(layer) in found and (before is None or not dot):
            raise ValueError(f"law: off:{text} names both layer {layer} and single heads of it")
        found[int(layer)] = [*(before or []), int(head)] if dot else None
    return found


def as_remedies(laws: Any) -> list[Remedy]:
    """Convert the ``laws`` of :func:`acutance.judge` to remedies with different names.

    Args:
        laws: a law, a list of laws, or a mapping from names to laws.

    Raises:
        TypeError: if something is not a law.
        ValueError: if there is none, or two have one name.
    """
    if isinstance(laws, Mapping) and all(isinstance(name, str) for name in laws):
        pairs = list(laws.items())
    elif isinstance(laws, list | tuple) and not _is_pair(laws):
        pairs = [("", one) for one in laws]
    else:
        pairs = [("", laws)]
    remedies = [_remedy(name, one) for name, one in pairs]
    if not remedies:
        raise ValueError("laws must contain at least one law, got none")
    names = [one.name for one in remedies]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"laws must have different names, got {twice!r} twice")
    return remedies


def for_train_length(
    model: torch.nn.Module, remedies: Sequence[Remedy], train_length: int | None
) -> list[Remedy]:
    """The remedies, with RoPE settings computed from a stated trained length.

    Args:
        model: the model.
        remedies: as from :func:`as_remedies`.
        train_length: tokens of the windows that it was trained on; None is the configuration's.
    """
    if train_length is not None:
        check_count("train_length", train_length, 2)
    return [
        with_train_length(model, one, train_length) if isinstance(one, RopeRemedy) else one
        for one in remedies
    ]


def check_fit(model: torch.nn.Module, remedies: Sequence[Remedy]) -> None:
    """Refuse remedies that do not fit the model before it runs, such as heads that it lacks.

    Raises:
        ApplyError: if a remedy cannot change the model.
        ValueError: if there is no such layer or head, or a RoPE type or parameter is wrong.
    """
    for one in remedies:
        if isinstance(one, LawRemedy | HeadsOff | RopeRemedy):
            one.check(model)


def _is_pair(laws: Any) -> bool:
    """Whether a sequence is one law, a scaling with its window, rather than two laws."""
    one = isinstance(laws, tuple) and len(laws) == 2
    return one and isinstance(laws[1], Window) and not isinstance(laws[0], Window)


def _remedy(name: str, one: Any) -> Remedy:
    """One law, name, file or remedy as a remedy with the given name."""
    if isinstance(one, str):
        one = named_remedy(one)
        name = name if isinstance(one, LawRemedy | PlanRemedy) else ""
    if isinstance(one, CachePlan):
        return PlanRemedy(name or one.name, one)
    if isinstance(one, LawRemedy | PlanRemedy) and name:
        return replace(one, name=name)
    if isinstance(one, Remedy):
        return one
    return LawRemedy(name or (f"law ({one.target})" if isinstance(one, Law) else str(one)), one)
