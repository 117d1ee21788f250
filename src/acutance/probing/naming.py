"""What a module of a probed model is called, whatever wraps the model."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["label"]

#: Where wrappers keep the module they wrap: torch.compile, FSDP, checkpoint_wrapper.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_REPLICATED = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def label(model: torch.nn.Module, name: str) -> str:
    """A module's name, the same for a compiled or sharded model as for the model itself.

    Args:
        model: what is probed.
        name: as its ``named_modules`` has it.

    Returns:
        The name without wrappers; for the model itself the name of its class.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> label(torch.nn.DataParallel(model), "module.0"), label(model, "")
        ('0', 'Sequential')
    """
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    if isinstance(model, _REPLICATED) and parts[:1] == ["module"]:
        del parts[0]
    inner: Any = model
    while inner is not None and (isinstance(inner, _REPLICATED) or _wrapped(inner)):
        inner = inner.module if isinstance(inner, _REPLICATED) else _wrapped(inner)
    return ".".join(parts) or type(inner).__name__


def _wrapped(module: torch.nn.Module) -> Any:
    """The module inside a wrapper; None if it is none."""
    return next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)
