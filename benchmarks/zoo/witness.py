"""A witness of attention that shares nothing with the probe: it watches PyTorch's operators.

Attention is what a fused operator of attention computes, or a softmax whose result takes part in a
matrix product over the dimension that was normalised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FUSED = (
    "scaled_dot_product_attention",  # as a whole in inference mode
    "_scaled_dot_product",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "flex_attention",
)
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax"}
_PRODUCTS = {"bmm", "baddbmm", "matmul"}  # two dimensions are a linear layer


@dataclass
class Seen:
    """One softmax, or one fused call.

    Attributes:
        module: qualified name of the module that ran it.
        kind: the operator.
        shape: of the weights, or of the query.
        used: whether it is attention.
    """

    module: str
    kind: str
    shape: tuple[int, ...]
    used: bool

    @property
    def single(self) -> bool:
        """Whether it is a softmax over one key, whose weight is 1."""
        return self.kind in _SOFTMAX and self.shape[-1] == 1


@dataclass
class Witness(TorchDispatchMode):
    """What ran inside :func:`watching`.

    Attributes:
        seen: all softmaxes and fused calls.
    """

    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._stack: list[str] = []
        self._weights: dict[int, tuple[Seen, Tensor]] = {}

    @property
    def attention(self) -> Counter[str]:
        """Number of attention calls by module, without those over a single key."""
        return Counter(one.module for one in self.seen if one.used and not one.single)

    @property
    def single(self) -> Counter[str]:
        """Number of attention calls over a single key: a probe may read them, and need not."""
        return Counter(one.module for one in self.seen if one.used and one.single)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name.startswith(_FUSED):
            self._note(name, tuple(tensors[0].shape), True)
        elif name in _SOFTMAX and isinstance(result, Tensor):
            rank, dim = result.dim(), args[1] if len(args) > 1 else -1
            if rank > 2 and dim % rank == rank - 1:
                one = self._note(name, tuple(result.shape), False)
                self._weights[_place(result)] = (one, result)
        else:
            known = [(t, self._weights[_place(t)][0]) for t in tensors if self._holds(t)]
            for tensor, one in known:
                if name in _PRODUCTS:
                    one.used |= _contracts(tensors, tensor)
                elif name == "mul" and _gates(tensors, tensor):
                    continue
                elif isinstance(result, Tensor) and 2 * result.numel() >= _size(one):
                    self._weights[_place(result)] = (one, result)  # a copy, a slice without a sink
        return result

    def _holds(self, tensor: Tensor) -> bool:
        return _place(tensor) in self._weights

    def _note(self, kind: str, shape: tuple[int, ...], used: bool) -> Seen:
        one = Seen(self._stack[-1] if self._stack else "", kind, shape, used)
        self.seen.append(one)
        return one


def _contracts(tensors: list[Tensor], weights: Tensor) -> bool:
    """Whether a product sums over the last dimension of the weights, as they are or transposed."""
    left, right = tensors[-2:]
    if weights is left:
        return weights.stride(-1) == 1
    return weights is right and weights.stride(-2) == 1


def _gates(tensors: list[Tensor], weights: Tensor) -> bool:
    """Whether weights multiply values, which makes them a gate, and not a mask."""
    return any(
        other.numel() >= weights.numel() and bool(((other < 0) | (other > 1)).any())
        for other in tensors
        if other is not weights
    )


def _size(one: Seen) -> int:
    return int(torch.Size(one.shape).numel())


def _place(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return id(tensor)


@contextmanager
def watching(model: torch.nn.Module) -> Iterator[Witness]:
    """Watch a model's operators, and know which module runs each."""
    witness = Witness()
    handles = []
    for name, module in model.named_modules():
        label = name or type(model).__name__
        handles.append(
            module.register_forward_pre_hook(lambda *_, label=label: witness._stack.append(label))
        )
        handles.append(
            module.register_forward_hook(lambda *_: witness._stack.pop() and None, always_call=True)
        )
    try:
        with witness:
            yield witness
    finally:
        for handle in handles:
            handle.remove()
