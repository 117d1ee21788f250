"""The tensors that multiply a projection's outputs: its weight and bias, or those of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from acutance.training.across_ranks import is_sharded

__all__ = ["scaled_tensors"]


def scaled_tensors(
    name: str, module: Any, local: bool = False
) -> Iterator[tuple[Tensor, int, bool]]:
    """Tensors whose entries along a dimension multiply a projection's outputs.

    Args:
        name: name of the projection, for messages.
        module: the projection: a linear layer, transformers' Conv1D, or one with adapters of PEFT.
        local: of tensors that are distributed, yield this rank's part.

    Yields:
        Each tensor with the dimension, and whether it lies under an adapter.

    Raises:
        ValueError: if the outputs are not multiplied by entries of parameters.

    Example:
        >>> linear = nn.Linear(3, 2)
        >>> [(tuple(tensor.shape), dim) for tensor, dim, _ in scaled_tensors("linear", linear)]
        [((2, 3), 0), ((2,), 0)]
    """
    if hasattr(module, "parametrizations"):
        raise ValueError(f"{name} is computed by a parametrization: remove it before clipping")
    if isinstance(module._modules.get("base_layer"), nn.Module):
        yield from _adapted(name, module, local)
        return
    # a weight that is no parameter is made from others at each forward (weight_norm, FSDP)
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{name} ({type(module).__name__}) has no floating-point weight matrix that could be "
            "scaled"
        )
    # transformers' Conv1D is (in, out); fully_shard makes a subclass
    yield (
        _part(weight, local),
        int(any(k.__name__ == "Conv1D" for k in type(module).__mro__)),
        False,
    )
    if isinstance(bias := getattr(module, "bias", None), Tensor):
        yield _part(bias, local), 0, False


def _part(tensor: Tensor, local: bool) -> Tensor:
    """This rank's part of a distributed tensor, if ``local``."""
    part: Tensor = tensor.to_local() if local and is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def _adapted(name: str, module: Any, local: bool) -> Iterator[tuple[Tensor, int, bool]]:
    """Tensors of a projection with adapters of PEFT: W + s·B·A, or m·(W + s·B·A) / norm (DoRA).

    W and B are scaled in LoRA, m in DoRA, the bias in both.
    """
    expanding = module._modules.get("lora_B")
    variants = {type(each).__name__ for each in getattr(module, "lora_variant", {}).values()}
    known = variants <= {"DoraLinearVariant", "NoneType"}
    if not isinstance(expanding, nn.ModuleDict) or not known or not len(expanding):
        kinds = ", ".join(sorted(variants - {"NoneType"})) or type(module).__name__
        raise ValueError(f"{name} has an adapter other than LoRA and DoRA ({kinds})")
    magnitudes = module._modules.get("lora_magnitude_vector") or {}
    if len(magnitudes) and (len(magnitudes) != len(expanding) or module.merged):
        raise ValueError(f"{name} has DoRA adapters that are merged, or LoRA ones beside them")
    for tensor, dim, _ in scaled_tensors(name, module.base_layer, local):
        if not len(magnitudes) or tensor.dim() == 1:  # DoRA divides by the weights' norm
            yield tensor, dim, True
    adapters: Any = magnitudes or expanding
    for adapter in adapters.values():
        yield _part(adapter.weight, local), 0, False
        if isinstance(bias := getattr(adapter, "bias", None), Tensor):
            yield _part(bias, local), 0, False
