"""A part of a model on the input that its whole gives it: for what has no input of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zoo import inputs


def wholes(config_class: Any) -> Iterator[str]:
    """Model types beside a configuration's whose configuration holds one of its class."""
    from transformers.models.auto import configuration_auto as auto

    folder = config_class.__module__.split(".")[-2]
    for name in auto.CONFIG_MAPPING_NAMES:
        if auto.model_type_to_module_name(name) == folder:
            whole = auto.CONFIG_MAPPING[name]
            if whole is not config_class and _holds(whole, config_class):
                yield name


def called(
    whole: Any, given: dict[str, Any], config_class: Any, classes: list[Any]
) -> tuple[Any, dict[str, Any]] | None:
    """The first module of some classes that a model calls, and on what.

    Args:
        whole: a model.
        given: what it runs on.
        config_class: a configuration's class.
        classes: of models that take it; where there are none, any module that takes it.
    """
    found: list[tuple[Any, dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not found:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            given = dict(bound.arguments)
            for name, parameter in bound.signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    given |= given.pop(name, {})
            if any(isinstance(value, Tensor) for value in given.values()):
                found.append((module, copy.deepcopy(given)))

    with ExitStack() as stack:
        for module in whole.modules():
            ours = isinstance(module, tuple(classes)) if classes else _of(module, config_class)
            if module is not whole and ours:
                hook = module.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
        inputs.run(whole, given)
    return found[0] if found else None


def _holds(whole: Any, part: Any, depth: int = 3) -> bool:
    inside = list((getattr(whole, "sub_configs", None) or {}).values())
    return part in inside or (depth > 0 and any(_holds(one, part, depth - 1) for one in inside))


def _of(module: nn.Module, config_class: Any) -> bool:
    """Whether a module is made from a configuration of a class, or has its name."""
    if type(getattr(module, "config", None)) is config_class:
        return True
    if type(module).__name__.startswith(config_class.__name__.removesuffix("Config")):
        return True
    names = {config_class, config_class.__name__}
    parameters = inspect.signature(type(module).__init__).parameters.values()
    return any(parameter.annotation in names for parameter in parameters)


__all__ = ["called", "wholes"]
