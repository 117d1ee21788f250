"""Arguments: the arguments of one call of a kernel, by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

__all__ = ["Arguments"]

#: Arguments that change how a kernel computes, not what.
_HARMLESS = {
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "return_lse"),
    *("return_attn_probs", "return_softmax_lse", "return_softmax", "return_aux", "zero_tensors"),
    *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "max_q", "max_k", "fa_version"),
    *("out", "out_", "lse", "score_mod_bwd", "block_sparse_tensors_bwd", "backend", "enable_pdl"),
    *("enable_gqa", "qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v"),
    *("quantization_backend", "op", "output_dtype"),
}


class Arguments:
    """The arguments of one call of a kernel, and which of them have been read.

    Args:
        function: name of the function, for messages.
        bound: the arguments of the call, bound to the function's signature.

    Example:
        >>> def kernel(q, softcap=0.0, **options):
        ...     return q
        >>> arguments = Arguments("kernel", inspect.signature(kernel).bind(1, tilt=3))
        >>> arguments["q"], arguments["softcap"], arguments["window"]
        (1, 0.0, None)
        >>> arguments.check()
        Traceback (most recent call last):
            ...
        ValueError: kernel is called with tilt=3, which the probe does not know
    """

    def __init__(self, function: str, bound: inspect.BoundArguments) -> None:
        self.function = function
        self._given: dict[str, Any] = {}
        self._read: set[str] = set()
        parameters = bound.signature.parameters
        for name, value in bound.arguments.items():
            kind = parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                self._given.update(value)
            elif kind is not inspect.Parameter.VAR_POSITIONAL or value:
                self._given[name] = value
        self._defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    def __getitem__(self, name: str) -> Any:
        """An argument, or its default; None if the function has no such parameter."""
        self._read.add(name)
        return self._given.get(name, self._defaults.get(name))

    def tensor(self, name: str) -> Tensor:
        """A tensor argument.

        Raises:
            ValueError: if it is anything but a plain tensor.
        """
        value = self[name]
        if not isinstance(value, Tensor) or value.is_nested:
            kind = "a nested tensor" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{self.function} is called with {name} of type {kind}")
        return value

    def tensors(self, *names: str) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, by their names."""
        query, key, value = map(self.tensor, names)
        return query, key, value

    def optional(self, name: str) -> Tensor | None:
        """A tensor argument, or None.

        Raises:
            ValueError: if it is anything else.
        """
        return None if self[name] is None else self.tensor(name)

    def number(self, name: str) -> float | None:
        """A number, which may be given as a tensor of one element; None if there is none."""
        value = self[name]
        return None if value is None else float(torch.as_tensor(value).reshape(()).item())

    def window(self) -> tuple[int | None, int | None]:
        """The window (left, right), None for no bound, from ``window_size`` or two arguments.

        Raises:
            ValueError: if a side is below −1.
        """
        pair = self["window_size"]
        if pair is None:
            pair = self["window_size_left"], self["window_size_right"]
        if any(side is not None and int(side) < -1 for side in pair):
            raise ValueError(f"{self.function} is called with the window {tuple(pair)}")
        first, second = (None if side is None or int(side) < 0 else int(side) for side in pair)
        return first, second

    def keep(self, *without: str) -> Arguments:
        """These arguments without some, for later: with copies of tensors."""
        for name in without:
            del self._given[name]
        for name, value in self._given.items():
            self._given[name] = value.clone() if isinstance(value, Tensor) else value
        return self

    def ignore(self, *names: str) -> None:
        """Mark arguments as read, because they do not change what is computed."""
        self._read.update(names)

    def check(self) -> None:
        """Check that every argument that is not at its default has been read.

        Raises:
            ValueError: if one has not; the message names the function and the argument.
        """
        for name, value in self._given.items():
            if name in self._read or name in _HARMLESS or value is None:
                continue
            default = self._defaults.get(name)
            if value is default or (type(value) is type(default) and value == default):
                continue
            shown = value if isinstance(value, bool | int | float | str) else type(value).__name__
            raise ValueError(
                f"{self.function} is called with {name}={shown}, which the probe does not know"
            )
