"""Trace the scores of a hand-written softmax to matrix products and added terms.

A law multiplies only the products. Every operation between them and the softmax (scaling, masks,
reshapes, an added bias) is recorded, so that the scores can be recomputed with all products at
zero.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.handwritten.graph import (
    Fixed,
    LineageError,
    Node,
    Version,
    as_view,
    compose_views,
    operands,
    recompute,
    shares_memory,
    storage_address,
    write_through,
)
from acutance.capture.handwritten.operations import (
    BY_HAND,
    ENDS,
    MOVES,
    PRODUCTS,
    base_name_of,
    handwritten_step,
    is_model_weight,
    is_parameter,
    is_shift,
    mixes_heads,
    name_of,
    narrower,
    not_affine_reason,
    owner_of_keys,
    target_of,
    tensors_of,
    writes,
)
from acutance.capture.handwritten.softmax import version_of

__all__ = ["Lineage", "LineageError"]

_STEPS = 150  # of one tensor, at most: each is a level of recursion, and may copy it
_MEMORY = 16  # times a tensor's size, at most, that is kept alive to make it again
_LEAST = 1 << 24  # bytes that may be kept for any
_LOG = "are divided by their logsumexp"


class Lineage:
    """Tracks which tensors of one thread were computed from matrix products.

    This recognises the scores of hand-written attention.

    Args:
        operands: also keep the operands of each product.
        by_hand: called for a product that uses weights computed without a softmax call.

    Example:
        >>> lineage = Lineage()
        >>> query, key, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 3)
        >>> product = lineage.call(torch.bmm, (query, key.mT), {})
        >>> scores = lineage.call(torch.add, (product, bias), {})
        >>> torch.equal(lineage.without_products(scores), bias.expand(2, 3, 3))
        True
        >>> lineage.without_products(bias) is None
        True
    """

    def __init__(
        self, *, operands: bool = False, by_hand: Callable[[str], None] | None = None
    ) -> None:
        self._operands, self._on_handwritten = operands, by_hand
        self._nodes: dict[int, tuple[weakref.ref[Tensor], Node, Version]] = {}
        self._write_counts: Counter[int] = (
            Counter()
        )  # by memory: inference mode does not count, and
        # what is written through ``tensor.data`` counts there alone

    def clear(self) -> None:
        """Forget all tensors."""
        self._nodes.clear()
        self._write_counts.clear()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function and record how its result depends on products.

        Args:
            func: any function of PyTorch.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        name = name_of(func)
        if name in PRODUCTS and (name != "einsum" or len(list(tensors_of(args, kwargs))) > 1):
            return self._multiply(func, name, args, kwargs)
        if not self._nodes:
            if self._write_counts:
                self._write_counts.clear()
            return func(*args, **kwargs)
        target = target_of(name, args, kwargs)
        node = None
        if any(id(each) in self._nodes for each in tensors_of(args, kwargs)):
            node = self._traced(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if target is not None:
            self._count_write(target)
            if node is None:
                self._nodes.pop(id(target), None)
        if node is not None:
            self._note_result(node, args, kwargs, result)
        return result

    def weights(self, tensor: Tensor) -> None:
        """Register a softmax result: products with it are outputs, not scores."""
        self._mark(tensor, Node(torch.softmax, broken="go through softmax", weights=True))

    def is_active(self, scores: Tensor) -> bool:
        """Whether scores depend on a product of two tensors that both depend on the input."""
        entry = self._nodes.get(id(scores))
        return entry is not None and entry[1].active

    def without_products(self, scores: Tensor) -> Tensor | None:
        """The scores with every product set to zero, same shape; None if they contain no product.

        Raises:
            LineageError: if an operation is not affine in the products, or a tensor was
                overwritten.
        """
        node = self._node_of(scores)
        if node is None or not node.active:
            return None
        with torch._C.DisableTorchFunction():
            try:
                result: Tensor = recompute(node, {}, self._version)
                return result.expand(scores.shape)
            except RuntimeError as error:
                raise LineageError(f"recomputing its scores failed: {error}") from error

    def pairs(self, scores: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Queries (..., L, E) and keys (..., S, E) of each product in the scores.

        Raises:
            ValueError: if they cannot be determined.
        """
        entry = self._nodes.get(id(scores))
        calls = () if entry is None else entry[1].calls
        return tuple(operands(name, args, kwargs) for name, args, kwargs in calls)

    def narrowest(self, scores: Tensor) -> torch.dtype:
        """Of the dtypes that the scores passed through, the one whose lowest number is highest."""
        entry = self._nodes.get(id(scores))
        return scores.dtype if entry is None else narrower(scores.dtype, entry[1].narrow)

    # -- following --------------------------------------------------------------------------------

    def _version(self, tensor: Tensor) -> Version:
        """Counts of writes to a tensor: PyTorch's, and those recorded here by storage."""
        return version_of(tensor), self._write_counts[
            storage_address(tensor)
        ] if self._write_counts else 0

    def _node_of(self, tensor: Tensor) -> Node | None:
        """The node of a tensor, marked broken if the tensor was overwritten; None if untracked."""
        entry = self._nodes.get(id(tensor))
        if entry is None:
            return None
        _, node, version = entry
        if version != self._version(tensor):
            return replace(node, broken="were written to through a view")
        return node

    def _count_write(self, target: Tensor) -> None:
        """Count a write to a tensor's storage."""
        self._write_counts[storage_address(target)] += 1

    def _multiply(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a matrix product and track its result, unless a factor is attention weights."""
        out = kwargs.get("out")
        factors = [each for each in tensors_of(args, kwargs) if each is not out]
        nodes = [self._nodes[id(each)][1] for each in factors if id(each) in self._nodes]
        if self._on_handwritten is not None:
            for each in nodes:
                if each.broken == BY_HAND and each.active:
                    self._on_handwritten(f"its scores {BY_HAND}, without a softmax call")
        node, owner, weights = None, None, any(each.weights for each in nodes)
        if not weights:
            owner = owner_of_keys(name, args if name == "einsum" else factors)
            if owner is not None and mixes_heads(self._nodes.get(id(owner)), name, owner, factors):
                node = self._traced(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if out is not None:
            self._count_write(out)
            self._nodes.pop(id(out), None)
        if weights:
            return result
        if isinstance(result, Tensor) and result.dim() > 2 and result.is_floating_point():
            if node is None:
                node = self._product(name, result, owner, factors, kwargs)
                if self._operands:
                    node = replace(node, calls=(*node.calls, (name, tuple(args), dict(kwargs))))
            self._mark(result, node)
        return result

    def _traced(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Node | None:
        """The node of a call's result; None if it does not depend on products."""
        base_name = base_name_of(name)
        if (
            any(word in base_name for word in ENDS)
            or base_name.endswith("_like")
            or base_name[:4] == "new_"
        ):
            return None
        marked = [node_in for node_in in tensors_of(args, kwargs) if id(node_in) in self._nodes]
        inputs = [self._nodes[id(node_in)][1] for node_in in marked]
        node = Node(
            func,
            writes=writes(name),
            narrow=functools.reduce(narrower, [node_in.narrow for node_in in inputs]),
            active=any(node_in.active for node_in in inputs),
            weights=any(node_in.weights for node_in in inputs),
            calls=tuple({id(call): call for node_in in inputs for call in node_in.calls}.values()),
            steps=1 + max(node_in.steps for node_in in inputs),
            saved_bytes=max(node_in.saved_bytes for node_in in inputs),
        )
        if is_shift(base_name, args, kwargs):
            divisor = "largest" if "max" in base_name else base_name
            return replace(node, shift=True, broken=f"are divided by their {divisor}")
        shifts = [node_in for node_in in inputs if node_in.shift]
        if len(shifts) == len(inputs) and base_name in MOVES:
            return replace(node, shift=True, broken=shifts[0].broken)
        fixed = base_name in ("add", "sub", "subtract")  # a row moved as a whole
        reason = "" if fixed else next((node_in.broken for node_in in shifts), "")
        reason = next(
            (node_in.broken for node_in in inputs if node_in.broken and not node_in.shift), reason
        )
        reason = (
            handwritten_step(base_name, inputs)
            or reason
            or not_affine_reason(base_name, name, args, kwargs, marked)
        )
        if not reason and node.steps > _STEPS:
            reason = f"are computed in more than {_STEPS} steps"
        if reason:
            return replace(node, broken=reason)
        if fixed and any(node_in.broken == _LOG for node_in in shifts):
            node = replace(node, log=True)
        node_args = self._as_nodes(args)
        if node.writes and isinstance(args[0], Tensor):
            entry = self._nodes.get(id(args[0]))
            if entry is None and not node.active:  # a cache that outlives its scores, most likely
                return replace(node, broken="are written into a tensor")
            if entry is None:  # as it is before this writes to it
                node_args = (self._fixed(args[0].clone()), *node_args[1:])
            elif name == "__setitem__" and shares_memory(args[-1], args[0]):
                node_args = (
                    entry[1],
                    *node_args[1:],
                )  # x[i] += y has written to x already, through a view
        fixed_inputs = [
            node_in for node_in in tensors_of(args, kwargs) if id(node_in) not in self._nodes
        ]
        size = sum(node_in.nbytes for node_in in fixed_inputs if not is_parameter(node_in))
        return replace(
            node, args=node_args, kwargs=self._as_nodes(kwargs), saved_bytes=node.saved_bytes + size
        )

    def _product(
        self,
        name: str,
        result: Tensor,
        owner: Tensor | None,
        factors: Sequence[Tensor],
        kwargs: Mapping[str, Any],
    ) -> Node:
        """The node of a product: zeros, or for ``baddbmm`` the added term."""
        shape, dtype, device = result.shape, result.dtype, result.device
        active = not any(map(is_model_weight, factors if owner is None else [owner]))
        beta = kwargs.get("beta", 1)
        if name == "baddbmm" and beta != 0:

            def around(added: Tensor) -> Tensor:
                scaled: Tensor = added * beta
                return scaled.to(dtype).expand(shape).clone()

            added = self._as_nodes(factors[0])
            node = Node(around, (added,), narrow=dtype, active=active)
            if isinstance(added, Node):
                both = active or added.active
                node = replace(node, active=both, calls=added.calls, broken=added.broken)
            return node

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Node(zeros, narrow=dtype, active=active)

    def _note_result(
        self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Track the result of a call, or what it wrote to."""
        if node.writes and isinstance(args[0], Tensor):
            self._note_write(node, args[0])
        elif isinstance(result, Tensor):
            self._note_part(node, args, kwargs, result, None)
        elif isinstance(result, list | tuple):
            for part, tensor in enumerate(result):
                if isinstance(tensor, Tensor):
                    self._note_part(node, args, kwargs, tensor, part)

    def _note_part(
        self,
        node: Node,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensor: Tensor,
        part: int | None,
    ) -> None:
        """Track one result of a call; ``part`` is its index among several, else None."""
        if not tensor.is_floating_point():
            return
        node = replace(node, part=part)
        if node.saved_bytes > max(_MEMORY * tensor.nbytes, _LEAST):
            node = replace(node, args=(), kwargs={}, broken="are computed from too many tensors")
        if args and isinstance(args[0], Tensor) and shares_memory(tensor, args[0]):
            view = as_view(node, args[1:], kwargs)
            entry = self._nodes.get(id(args[0]))
            earlier_bases = () if entry is None else entry[1].bases
            outer_bases = [(base, compose_views(first, view)) for base, first in earlier_bases]
            node = replace(node, bases=((weakref.ref(args[0]), view), *outer_bases))
        self._mark(tensor, node)

    def _note_write(self, node: Node, target: Tensor) -> None:
        """Track what a function wrote to, and the tensors that it is a view of."""
        entry = self._nodes.get(id(target))
        bases = () if entry is None else entry[1].bases
        self._mark(target, replace(node, bases=bases))
        for reference, view in bases:
            base = reference()
            entry = None if base is None else self._nodes.get(id(base))
            if base is None or entry is None or not self._one_behind(entry[2], base):
                continue
            earlier = entry[1]
            calls = {id(call): call for call in (*earlier.calls, *node.calls)}
            base_node = replace(
                node,
                func=functools.partial(write_through, view),
                args=(earlier, node),
                kwargs={},
                broken=node.broken or earlier.broken,
                active=node.active or earlier.active,
                calls=tuple(calls.values()),
                steps=node.steps + 1,
                bases=earlier.bases,
            )
            self._mark(base, base_node)

    def _one_behind(self, version: Version, tensor: Tensor) -> bool:
        """Whether the present write is the only one since the tensor was tracked."""
        now = self._version(tensor)
        return version[1] + 1 == now[1] and now[0] - version[0] in (0, 1)

    def _fixed(self, tensor: Tensor) -> Fixed:
        """Record a tensor that depends on no product."""
        return Fixed(tensor, self._version(tensor))

    def _as_nodes(self, value: Any) -> Any:
        """The arguments of a call, with tensors replaced by :class:`Node` or :class:`Fixed`."""
        if isinstance(value, Tensor):
            node = self._node_of(value)
            return self._fixed(value) if node is None or node.shift else node
        if isinstance(value, Mapping):
            return {name: self._as_nodes(part) for name, part in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._as_nodes(part) for part in value)
        return value

    def _mark(self, tensor: Tensor, node: Node) -> None:
        """Track a tensor by its node until it is freed."""
        key = id(tensor)

        def forget(_: object) -> None:
            self._nodes.pop(key, None)

        self._nodes[key] = (weakref.ref(tensor, forget), node, self._version(tensor))
