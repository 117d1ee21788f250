"""Heads switched off as a change: what a model loses without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from acutance.calibration.apply_law import ApplyError, Change
from acutance.calibration.law import check_head
from acutance.capture.find_layers import attention_layers, choose_layers, class_name, uses_interface
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall

__all__ = ["HeadsOff"]


@dataclass(frozen=True)
class HeadsOff(Change):
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
        places = [
            str(layer) if heads is None else f"{layer}.{head}"
            for layer, heads in self.heads.items()
            for head in ([0] if heads is None else heads)
        ]
        return f"off:{','.join(places)}"

    @classmethod
    def named(cls, text: str) -> HeadsOff:
        """The heads of a text ``3.0,3.2,5``, where 5 are all heads of a layer.

        Raises:
            ValueError: if a part has another form, or a layer is named whole and by its heads.

        Example:
            >>> HeadsOff.named("3.0,3.2,5").heads
            {3: [0, 2], 5: None}
        """
        heads: dict[int | str, Sequence[int] | None] = {}
        for place in text.split(","):
            layer, dot, head = place.strip().partition(".")
            if not layer.isdecimal() or (dot and not head.isdecimal()):
                raise ValueError(f"law: heads must be LAYER.HEAD, as in off:3.0,3.2, got {place!r}")
            before = heads.get(int(layer), [])
            if int(layer) in heads and (before is None or not dot):
                raise ValueError(f"law: off:{text} names both layer {layer} and single heads of it")
            heads[int(layer)] = [*(before or []), int(head)] if dot else None
        return cls(heads)

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Zero the heads' outputs in every call of transformers' attention interface.

        Raises:
            ApplyError: if a layer does not use it, or at the end none of them ran.
            ValueError: if there is no such layer or head.
        """
        switched, ran = self.check(model), False

        def silence(call: InterfaceCall, run: Callable[[], Any]) -> Any:
            nonlocal ran
            result, module = run(), id(call.module)
            if module not in switched:
                return result
            ran = True
            output = call.output(result).clone()
            chosen = switched[module]
            heads = range(output.shape[1]) if chosen is None else chosen
            if (most := max(heads)) >= output.shape[1]:
                last = output.shape[1] - 1
                raise ValueError(f"there is no head {most}: the layer has heads 0 to {last}")
            output[:, list(heads)] = 0.0
            output = output.transpose(1, 2)
            return (output, *result[1:]) if isinstance(result, tuple) else output

        with huggingface.intercept(silence):
            yield
        if not ran:
            raise ApplyError(f"{self.name} changed no call of {class_name(model)}: it did not run")

    def check(self, model: torch.nn.Module) -> dict[int, Sequence[int] | None]:
        """The heads of each layer by the ``id`` of its module; raises as :meth:`on`."""
        layers = attention_layers(model)
        switched: dict[int, Sequence[int] | None] = {}
        for layer, heads in self.heads.items():
            for name in choose_layers(model, layer, "layer"):
                module = layers.get(name)
                if module is None or not uses_interface(module):
                    raise ApplyError(
                        f"heads of {name} cannot be switched off: {class_name(model)} does not run "
                        "it through transformers' attention interface"
                    )
                if heads is not None and not heads:
                    raise ValueError(f"heads of {name} must be numbers, or None for all, got none")
                for head in heads or ():
                    check_head(name, module, head)
                switched[id(module)] = heads
        return switched
