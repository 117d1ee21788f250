"""Process sequences in segments; the backward pass recomputes each segment.

A segment fits in cache. It passes a state of fixed size to the next. For the backward pass only
these states are saved, and each segment is recomputed, last to first. Time and memory are O(n): no
operation touches a whole sequence for one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from acutance.compiling import transformed
from acutance.mechanisms.call import cut
from acutance.mechanisms.scan import Sums
from acutance.mechanisms.state import LinearState, Rows

__all__ = ["Part", "Step", "in_segments"]


class Part(NamedTuple):
    """A tensor that is split along one dimension, and its consecutive slices."""

    tensor: Tensor
    dim: int
    slices: list[slice]

    def cut(self) -> tuple[Tensor, ...]:
        """The pieces, split in one operation."""
        return cut(self.tensor, self.slices, self.dim)

    def piece(self, index: int) -> Tensor:
        """One piece, without gradients."""
        part = self.slices[index]
        return self.tensor.narrow(self.dim, part.start, part.stop - part.start)


#: The step of one stretch: its number, log λ, the state before it and its pieces of each sequence,
#: to its rows (or None) and the state after it.
Step = Callable[..., tuple[Rows | None, LinearState]]


def in_segments(
    step: Step,
    parts: Sequence[Part],
    log_decay: Tensor | None,
    state: LinearState,
    *,
    closed: bool,
) -> tuple[Rows | None, LinearState]:
    """Run a step over consecutive segments.

    Args:
        step: called once for each segment, and again in the backward pass.
        parts: the sequences, all split into the same number of pieces.
        log_decay: log λ or None.
        state: state before the first segment.
        closed: whether only parts, decay and state need gradients; a user's function may have
            parameters of its own.

    Returns:
        All rows concatenated (None if the step returns none), and the state after the last segment.
    """
    tensors = [part.tensor for part in parts] + [t for t in state if t.is_floating_point()]
    learns = any(t.requires_grad for t in tensors)
    learns = learns or not closed or (log_decay is not None and log_decay.requires_grad)
    again = learns and torch.is_grad_enabled() and not closed
    if torch.compiler.is_compiling() or transformed() or again:
        return _joined(step, parts, log_decay, state, random=not closed)
    if not (learns and torch.is_grad_enabled()):
        return _in_place(step, parts, log_decay, state, None)
    flat_results = _Segmented.apply(  # type: ignore[no-untyped-call]
        step, [part[1:] for part in parts], log_decay, *state, *(part.tensor for part in parts)
    )
    after = LinearState(*flat_results[:STATE])
    return (_rows(list(flat_results[STATE:])) if len(flat_results) > STATE else None), after


def _in_place(
    step: Step,
    parts: Sequence[Part],
    log_decay: Tensor | None,
    state: LinearState,
    states: list[LinearState] | None,
) -> tuple[Rows | None, LinearState]:
    """Run every segment without gradients, recording the state before each in ``states``."""
    length = _rows_in(parts[0])
    whole: list[Tensor] = []
    start = 0
    for index in range(len(parts[0].slices)):
        if states is not None:
            states.append(state)
        rows, state = step(index, log_decay, state, *(part.piece(index) for part in parts))
        if rows is None:
            continue
        fields, count = _fields(rows), rows.n.shape[1]
        if count == length:
            return rows, state
        if not whole:
            whole = [
                field if dim is None else field.new_empty(_resized(field.shape, dim, length))
                for field, dim in _dims(fields)
            ]
        for target, (field, dim) in zip(whole, _dims(fields), strict=True):
            if dim is not None:
                target.narrow(dim, start, count).copy_(field)
        start += count
    return (_rows(whole) if whole else None), state


def _joined(
    step: Step,
    parts: Sequence[Part],
    log_decay: Tensor | None,
    state: LinearState,
    *,
    random: bool,
) -> tuple[Rows | None, LinearState]:
    """Run every segment by operations that autograd can differentiate any number of times."""
    fields_by_segment: list[list[Tensor]] = []
    for index, pieces in enumerate(zip(*(part.cut() for part in parts), strict=True)):
        if torch.compiler.is_compiling() or transformed():
            rows, state = step(index, log_decay, state, *pieces)
        else:
            rows, state = cast(
                tuple[Rows | None, LinearState],
                checkpoint(
                    step,
                    index,
                    log_decay,
                    state,
                    *pieces,
                    use_reentrant=False,
                    preserve_rng_state=random,
                ),
            )
        if rows is not None:
            fields_by_segment.append(_fields(rows))
    if not fields_by_segment:
        return None, state
    fields = zip(*fields_by_segment, strict=True)
    return _rows(
        [
            field[-1] if dim is None else torch.cat(field, dim)
            for field, (_, dim) in zip(fields, _dims(fields_by_segment[-1]), strict=True)
        ]
    ), state


class _Segmented(torch.autograd.Function):
    """:func:`_in_place` with a backward pass that recomputes each segment."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        cuts: list[tuple[int, list[slice]]],
        log_decay: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the segments in order, storing only the state before each."""
        ctx.set_materialize_grads(False)
        ctx.step, ctx.cuts, ctx.states = step, cuts, []
        ctx.save_for_backward(log_decay, *tensors)
        parts = _parts(tensors[STATE:], cuts)
        rows, after = _in_place(step, parts, log_decay, LinearState(*tensors[:STATE]), ctx.states)
        results = [*after, *([] if rows is None else _fields(rows))]
        inputs = {id(t) for t in tensors}  # without new keys the state is the input itself
        results = [t.clone() if id(t) in inputs or t.numel() == 0 else t for t in results]
        ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        """Recompute the segments from last to first and accumulate their gradients."""
        log_decay, *tensors = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            grads = _differentiable_backward(ctx, log_decay, tensors, upstream)
            return (None, None, *grads)
        sequences = _parts(tensors[STATE:], ctx.cuts)
        targets = [
            _blank(part) if want else None
            for part, want in zip(sequences, needs_grad[STATE:], strict=True)
        ]
        by_state: list[Tensor | None] = list(upstream[:STATE])
        by_decay = None
        end = _rows_in(sequences[0])
        for index in reversed(range(len(ctx.states))):
            with torch.enable_grad():
                decay = None if log_decay is None else _detached_leaf(log_decay)
                state = LinearState(*(_detached_leaf(t) for t in ctx.states[index]))
                pieces = [_detached_leaf(part.piece(index)) for part in sequences]
                rows, after = ctx.step(index, decay, state, *pieces)
            outs, grads = list(after), list(by_state)
            if rows is not None:
                fields, count = _fields(rows), rows.n.shape[1]
                end -= count
                for (field, dim), grad in zip(_dims(fields), upstream[STATE:], strict=True):
                    if dim is not None and grad is not None:
                        outs.append(field)
                        grads.append(grad.narrow(dim, end, count))
            leaves = [*state, *pieces, *([] if decay is None else [decay])]
            grads_of_leaves = _gradients(outs, leaves, grads)
            by_state = grads_of_leaves[:STATE]
            for part, target, grad in zip(
                sequences, targets, grads_of_leaves[STATE:], strict=False
            ):
                if target is not None:
                    place = part._replace(tensor=target).piece(index)
                    if grad is None:
                        place.zero_()
                    else:
                        place.copy_(grad)
            if decay is not None and grads_of_leaves[-1] is not None:
                by_decay = (
                    grads_of_leaves[-1] if by_decay is None else by_decay + grads_of_leaves[-1]
                )
        return (None, None, by_decay, *by_state, *targets)


def _differentiable_backward(
    ctx: Any, log_decay: Tensor | None, tensors: list[Tensor], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the inputs by a differentiable recomputation, for second derivatives."""
    inputs = [log_decay, *tensors]
    parts = _parts(tensors[STATE:], ctx.cuts)
    rows, after = _joined(ctx.step, parts, log_decay, LinearState(*tensors[:STATE]), random=False)
    outs = [*after, *([] if rows is None else _fields(rows))]
    leaves = [t for t in inputs if t is not None]
    gradients = iter(_gradients(outs, leaves, list(upstream), create_graph=True))
    return [None if t is None else next(gradients) for t in inputs]


def _gradients(
    outs: list[Tensor],
    leaves: list[Tensor],
    grads: list[Tensor | None],
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Gradient with respect to each leaf; None for leaves without one."""
    chosen = [
        (out, grad)
        for out, grad in zip(outs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    if not chosen or not learning:
        return [None] * len(leaves)
    computed = iter(
        torch.autograd.grad(
            [out for out, _ in chosen],
            learning,
            [grad for _, grad in chosen],
            allow_unused=True,
            create_graph=create_graph,
        )
    )
    return [next(computed) if leaf.requires_grad else None for leaf in leaves]


#: Tensors of a state: they come first among a step's tensors.
STATE = len(LinearState._fields)


def _detached_leaf(tensor: Tensor) -> Tensor:
    """A new autograd leaf that shares the tensor's memory and, if floating, requires grad."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _blank(part: Part) -> Tensor:
    """Allocate the gradient of a sequence; entries outside all pieces are 0."""
    tensor, dim, slices = part
    gradient = torch.empty_like(tensor)
    first = slices[0].start if slices else 0
    last = slices[-1].stop if slices else 0
    gradient.narrow(dim, 0, first).zero_()
    gradient.narrow(dim, last, tensor.shape[dim] - last).zero_()
    return gradient


def _parts(tensors: Sequence[Tensor], cuts: list[tuple[int, list[slice]]]) -> list[Part]:
    """Each tensor with the slices that cut it."""
    return [Part(tensor, *cut) for tensor, cut in zip(tensors, cuts, strict=True)]


def _rows_in(part: Part) -> int:
    """Number of rows in all slices of a part."""
    return sum(each.stop - each.start for each in part.slices)


def _fields(rows: Rows) -> list[Tensor]:
    """The tensors of a record of rows, as a list."""
    return [*rows.sums, *rows[1:]]


def _rows(fields: list[Tensor]) -> Rows:
    """The record of rows from its list of tensors."""
    return Rows(Sums(*fields[:4]), *fields[4:])


def _dims(fields: list[Tensor]) -> list[tuple[Tensor, int | None]]:
    """Each field with its dimension of rows; None for unknown fields."""
    total = fields[1]
    optional = [-1 if field.shape == total.shape else None for field in fields[2:4]]
    dims: list[int | None] = [-2, -1, *optional, -1, -1, -1]
    return list(zip(fields, dims, strict=True))


def _resized(shape: torch.Size, dim: int, length: int) -> list[int]:
    """A shape with another length in one dimension."""
    sizes = list(shape)
    sizes[dim] = length
    return sizes
