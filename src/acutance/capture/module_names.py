"""Names of a model's modules, independent of wrappers such as DataParallel or torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

#: Under which name a wrapper, told by its class, holds the module that it wraps.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",  # Lightning
    "PeftModel": "base_model",
    "BaseTuner": "model",  # PEFT's LoraModel and its like
}
#: Bases of the subclass that ``fully_shard`` or ``replicate`` makes of a module's class.
_ADDED = ("FSDPModule", "ReplicateModule")


def once_for_a_class(question: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what a function says of the last 1,024 classes that it was asked about."""
    return functools.lru_cache(maxsize=1024)(question)


def module_name(model: torch.nn.Module, name: str) -> str:
    """A module's name without wrappers: DataParallel, FSDP, torch.compile, checkpoint wrappers.

    Args:
        model: the root that ``name`` starts from.
        name: name of a module or parameter, as from ``named_modules`` or ``named_parameters``.

    Returns:
        Its name in the unwrapped model; for the model itself, the name of its class.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> wrapped = torch.nn.DataParallel(model)
        >>> module_name(wrapped, "module.0.weight"), module_name(wrapped, "")
        ('0.weight', 'Sequential')
    """
    parts: list[str] = []
    module: torch.nn.Module | None = model
    for piece in name.split(".") if name else ():
        if module is None or not _wrapper(type(module)) or piece != _holds(module):
            parts.append(piece)
        module = None if module is None else module._modules.get(piece)
    return ".".join(parts) or class_name(model)


def named_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """All modules with their :func:`module_name`, in model order.

    A wrapper has the same name as the module inside it.
    """
    modules = list(model.named_modules())
    if not any(map(_wrapper, {type(module) for _, module in modules})):
        modules[0] = class_name(model), model
        return modules
    return [(module_name(model, name), module) for name, module in modules]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers such as ``DataParallel``, or the module itself.

    Example:
        >>> unwrap(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
        Linear(in_features=2, out_features=2, bias=True)
    """
    while (inner_name := _holds(module)) is not None:
        inner = module._modules[inner_name]
        assert inner is not None
        module = inner
    return module


def class_name(module: torch.nn.Module) -> str:
    """Class name of the module inside wrappers, as it was before sharding."""
    kind = type(unwrap(module))
    bases = kind.__bases__
    sharded = len(bases) > 1 and bases[0].__name__ in _ADDED
    return bases[1].__name__ if sharded else kind.__name__


def _holds(module: torch.nn.Module) -> str | None:
    """Attribute in which a wrapper stores its module; None if the module is not a wrapper."""
    name = _wrapper(type(module))
    return name if name is not None and module._modules.get(name) is not None else None


@once_for_a_class
def _wrapper(kind: type) -> str | None:
    """Attribute in which a wrapper class stores its module; None for other classes."""
    names = (_WRAPPERS.get(base.__name__) for base in kind.__mro__)
    return next((name for name in names if name is not None), None)
