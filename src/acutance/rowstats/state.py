"""RowState: sums that describe a row of attention; build them from scores and merge them.

The sums run over the row's visible keys, relative to its largest score. :func:`observe` builds a
state from scores, :func:`merge` joins the states of two sets of keys exactly, and every metric
(:mod:`acutance.rowstats.metrics`) is a function of the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.rowstats import gaps as histogram
from acutance.shapes import check_tensor

#: ``first_index`` of a row that has no visible key.
NO_KEY = torch.iinfo(torch.int64).max
#: Added to ``first_index`` where a part does not say where its keys lie among all keys.
UNPLACED = -(2**62)
#: No distance of logits needs to be told from this one: e^−1000 is 0 in every dtype.
DEEPEST = -1000.0


class RowState(NamedTuple):
    r"""Sums over the visible keys of each row; fields have the rows' shape (...), unless stated.

    With scores :math:`s_j`, maximum :math:`m` and :math:`e_j = e^{s_j - m}`:

    Attributes:
        n: number of visible keys, int64.
        m: :math:`\max_j s_j`, −inf for a row with no visible key.
        Z: :math:`\sum_j e_j`.
        U: :math:`\sum_j e_j (s_j - m)`.
        W: :math:`\sum_j e_j (s_j - m - U/Z)^2`, about the weighted mean, to avoid cancellation.
        Q: :math:`\sum_j e_j^2`.
        mean: unweighted mean of the scores.
        M2: unweighted sum of squared deviations from ``mean``.
        depth: unweighted mean of :math:`m - s_j`, which ``m - mean`` would lose to rounding.
        first: score of the first visible key.
        first_index: position of that key among all keys, int64. For a part observed without
            ``first_key`` it is the position among its own keys minus 2⁶².
        sink: logit of a sink that is in the normaliser but not a key; (..., 0) without one.
        O: :math:`\sum_j e_j v_j`, (..., Ev); like the next two, (..., 0) unless noise metrics were
            requested.
        R1: :math:`\sum_j e_j^2 v_j / Q`, (..., Ev).
        R2: :math:`\sum_j e_j^2 \lVert v_j - R_1 \rVert^2`.
        gaps: (..., 64) int32, number of visible keys by their distance below ``m``
            (:mod:`acutance.rowstats.gaps`); (..., 0) unless requested.

    The maximum inside ``Z, U, W, Q`` is a constant for autograd, and every metric is a function of
    the state for which that gives the exact gradient.
    """

    n: Tensor
    m: Tensor
    Z: Tensor
    U: Tensor
    W: Tensor
    Q: Tensor
    mean: Tensor
    M2: Tensor
    depth: Tensor
    first: Tensor
    first_index: Tensor
    sink: Tensor
    O: Tensor
    R1: Tensor
    R2: Tensor
    gaps: Tensor = torch.empty(0)


def has_noise(state: RowState) -> bool:
    """Whether a state carries the sums of its values, ``O``, ``R1`` and ``R2``."""
    return state.R2.dim() == state.Z.dim()


def has_gaps(state: RowState) -> bool:
    """Whether a state carries the gap histogram."""
    return state.gaps.shape[-1:] == (histogram.BINS,) and state.gaps.dim() == state.Z.dim() + 1


def has_sink(state: RowState) -> bool:
    """Whether a state's normaliser includes a sink."""
    return state.sink.dim() == state.Z.dim()


def empty(
    rows: tuple[int, ...],
    value_width: int | None = None,
    *,
    gaps: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> RowState:
    """The state of rows with no key: the identity of :func:`merge`.

    Args:
        rows: shape of the rows.
        value_width: Ev, to merge with a state that carries values.
        gaps: whether it is to be merged with a state that has a gap histogram.
        dtype: floating dtype of the sums.
        device: device of the sums.

    Example:
        >>> state = observe(torch.tensor([[0.5, 2.0]]))
        >>> merged = merge(empty((1,)), state)
        >>> bool((merged.Z == state.Z).all()), merged.n.tolist()
        (True, [2])
    """
    zero = torch.zeros(rows, dtype=dtype, device=device)
    count = torch.zeros(rows, dtype=torch.int64, device=device)
    sums = dict.fromkeys(("Z", "U", "W", "Q", "mean", "M2", "depth", "first"), zero)
    m, index = torch.full_like(zero, -torch.inf), torch.full_like(count, NO_KEY)
    state = RowState(n=count, m=m, first_index=index, **_absent(zero), **sums)
    if gaps:
        state = state._replace(gaps=count.new_zeros((*rows, histogram.BINS), dtype=torch.int32))
    if value_width is None:
        return state
    wide = zero.new_zeros(*rows, value_width)
    return state._replace(O=wide, R1=wide, R2=zero)


def _absent(rows: Tensor) -> dict[str, Tensor]:
    """Empty tensors (..., 0) for the fields that a state may lack; ``vmap`` accepts them."""
    none = rows.detach().unsqueeze(-1)[..., :0]
    return dict.fromkeys(("sink", "O", "R1", "R2"), none) | {"gaps": histogram.absent(rows)}


def observe(
    scores: Tensor,
    mask: Tensor | None = None,
    value: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    first_key: int | None = None,
    gaps: bool = False,
) -> RowState:
    r"""The state of rows of explicit scores: one block of keys, or all of them.

    Args:
        scores: (..., S), after scale and bias. −inf hides a key (in :func:`acutance.attention` only
            masks do). float16 and bfloat16 are converted to float32.
        mask: boolean, broadcastable to ``scores``; True where the key takes part.
        value: (..., S, Ev), to carry the output and the noise sums too.
        sink: sink logits, broadcastable to the rows.
        first_key: position of column 0 among all keys, whether or not that key is hidden. Required
            for ``first_weight`` if blocks are merged out of order.
        gaps: also count keys by their distance below the maximum.

    Returns:
        The rows' state, shape ``scores.shape[:-1]``.

    Raises:
        TypeError: if scores, mask, value or sink are not tensors.

    Example:
        >>> state = observe(torch.tensor([0.0, 0.0, -torch.inf]))
        >>> state.n.item(), state.Z.item()
        (2, 2.0)
    """
    s = check_tensor("scores", scores)
    for name, tensor in (("mask", mask), ("value", value), ("sink", sink)):
        if tensor is not None:
            check_tensor(name, tensor)
    seen = s != -torch.inf
    if mask is not None:
        seen = seen & mask
    return observe_visible(s, seen, value, sink=sink, first_key=first_key, gaps=gaps)


def observe_visible(
    scores: Tensor,
    seen: Tensor,
    value: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    first_key: int | None = None,
    gaps: bool = False,
    exponentials: bool = True,
) -> RowState:
    """:func:`observe` with the visible keys as a boolean of the scores' full shape.

    A visible score of −inf (a product that overflowed) has weight 0; sums of e·s are NaN then.
    Without ``exponentials``, for weights other than softmax, their sums are NaN.
    """
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    s = scores.to(dtype)
    if s.shape[-1] == 0:
        width = None if value is None else value.shape[-1]
        state = empty(tuple(s.shape[:-1]), width, gaps=gaps, dtype=dtype, device=s.device)
        return state if sink is None else state._replace(sink=sink.to(dtype).expand_as(state.Z))
    hidden = torch.logical_not(seen)
    n = seen.sum(-1)
    m = s.masked_fill(hidden, -torch.inf).amax(-1)
    t = (s - _finite(m.detach()).unsqueeze(-1)).masked_fill(hidden, 0.0)
    if exponentials:
        e = torch.exp(t).masked_fill(hidden, 0.0)
        Z, U = e.sum(-1), (e * t).sum(-1)
        centre = ratio(U, Z).unsqueeze(-1)
    else:
        Z = U = W = Q = torch.where(n == 0, 0.0, torch.nan).to(dtype)
    plain = s.masked_fill(hidden, 0.0)
    mean = plain.sum(-1) / n.clamp(min=1)
    depth = -t.sum(-1) / n.clamp(min=1)
    away = (t + depth.unsqueeze(-1)).masked_fill(hidden, 0.0)
    if exponentials:
        W, Q = (e * (t - centre).square()).sum(-1), e.square().sum(-1)
    column = seen.to(torch.uint8).argmax(-1)
    first = plain.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    first_index = torch.where(n > 0, column + place_of(first_key), NO_KEY)
    M2 = away.square().sum(-1)
    state = RowState(n, m, Z, U, W, Q, mean, M2, depth, first, first_index, **_absent(Z))
    if sink is not None:
        state = state._replace(sink=sink.to(dtype).expand_as(Z))
    if gaps:
        state = state._replace(gaps=histogram.count(s, hidden, histogram.edge(m)))
    if value is None:
        return state
    v = value.to(dtype)
    squared = e.square().unsqueeze(-1)
    R1 = ratio((squared * v).sum(-2), squared.sum(-2))
    spread = (v - R1.unsqueeze(-2)).square().sum(-1)
    return state._replace(O=(e.unsqueeze(-1) * v).sum(-2), R1=R1, R2=(e.square() * spread).sum(-1))


def place_of(first_key: int | None) -> int:
    """Offset from a column to its ``first_index``."""
    return UNPLACED if first_key is None else first_key


def without_place(state: Any) -> Any:
    """A state whose position among all keys is unknown; ``state`` has a field ``first_index``."""
    index = state.first_index
    known = (index >= 0) & (index != NO_KEY)
    return state._replace(first_index=index + torch.where(known, UNPLACED, 0))


def joined_first(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the first of all keys is in the right part, and its index, from each ``first_index``.

    If neither part knows its position, the left one's keys come first; if one does, the other is
    assumed to begin at key 0.
    """
    a, b = (torch.where(index < 0, index - UNPLACED, index) for index in (left, right))
    loose = (left < 0) & (right < 0)
    later = torch.logical_not(loose) & (b < a)
    mixed = ((left < 0) != (right < 0)) & (left != NO_KEY) & (right != NO_KEY)
    return later, torch.where(mixed, torch.minimum(a, b), torch.where(later, right, left))


def merge(left: RowState, right: RowState) -> RowState:
    """The state of two disjoint sets of keys of the same rows, exactly.

    Associative, with :func:`empty` as identity, and commutative if both parts know the positions of
    their keys: ``first`` then follows the smaller ``first_index``. If neither does (blocks observed
    without ``first_key``), ``left``'s keys come before ``right``'s; if one does, the other is
    assumed to begin at 0.

    Args:
        left: one set of keys.
        right: the other; its rows broadcast against ``left``'s. A state counts its keys from 0; to
            merge calls on two blocks of keys use :meth:`RowStatistics.merge
            <acutance.rowstats.RowStatistics.merge>`.

    Returns:
        The joint state. Values' sums and the gap histogram are kept only if both carry them.

    Raises:
        TypeError: if one is not a :class:`RowState`.

    Example:
        Scores split anywhere give the state of the whole row:

        >>> s = torch.tensor([0.3, -1.0, 2.0, 0.5])
        >>> whole = observe(s)
        >>> parts = merge(observe(s[:1]), observe(s[1:], first_key=1))
        >>> all(torch.allclose(a, b) for a, b in zip(whole[:10], parts[:10]))
        True

    Source:
        Milakov & Gimelshein (2018), arXiv:1805.02867, for the running (m, Z) pair; Chan, Golub &
        LeVeque (1983), The American Statistician 37:242, for means and squared deviations.
    """
    check_state(left, RowState, "merge", "state")
    check_state(right, RowState, "merge", "state")
    m = torch.maximum(left.m, right.m)
    reference = _finite(m.detach())
    a, b = _shift(left, reference), _shift(right, reference)
    Z = a.Z + b.Z
    # means before weights shrink: a quotient of what has shrunk, or its gradient, may be 0 by 0
    gap = _middle(left, reference) - _middle(right, reference)
    n = left.n + right.n
    count = left.n.to(Z.dtype)  # a quotient of integers would be float32 whatever the sums are
    share = right.n.to(Z.dtype) / n.clamp(min=1)
    step = b.depth - a.depth  # between the two means, as distances from the maximum
    later, first_index = joined_first(left.first_index, right.first_index)
    absent = _absent(Z)
    absent["sink"] = left.sink if has_sink(left) else right.sink
    if has_sink(left) and has_sink(right):  # equal, which is not checked
        absent["sink"] = torch.maximum(left.sink, right.sink)
    W = a.W + b.W + gap.square() * a.Z * ratio(b.Z, Z)
    mean = left.mean + (right.mean - left.mean) * share
    M2 = left.M2 + right.M2 + step.square() * count * share
    depth, first = a.depth + step * share, torch.where(later, right.first, left.first)
    sums = (Z, a.U + b.U, W, a.Q + b.Q)
    state = RowState(n, m, *sums, mean, M2, depth, first, first_index, **absent)
    if has_gaps(left) and has_gaps(right):
        top = histogram.edge(m.detach())
        gaps = [
            histogram.aligned(part.gaps, histogram.edge(part.m.detach()), top)
            for part in (left, right)
        ]
        state = state._replace(gaps=torch.stack(gaps).sum(0, dtype=torch.int32))
    if not (has_noise(a) and has_noise(b)):
        return state
    part = ratio(b.Q, state.Q)
    between = b.R1 - a.R1
    R2 = a.R2 + b.R2 + between.square().sum(-1) * a.Q * part
    return state._replace(O=a.O + b.O, R1=a.R1 + between * part.unsqueeze(-1), R2=R2)


def _finite(m: Tensor) -> Tensor:
    """The maximum, or the lowest finite number in rows without one."""
    return m.clamp(min=torch.finfo(m.dtype).min)


def check_state(part: object, kind: type, function: str, attribute: str) -> None:
    """Raise TypeError unless ``part`` is of the record type that a merge function needs."""
    if not isinstance(part, kind):
        advice = f": pass its .{attribute}" if hasattr(part, attribute) else ""
        raise TypeError(f"{function} needs two {kind.__name__}, got {type(part).__name__}{advice}")


def _middle(state: RowState, reference: Tensor) -> Tensor:
    """Weighted mean of a part's scores relative to the reference, at least −:data:`DEEPEST`."""
    drop = torch.where(state.Z == 0, 0.0, (state.m.detach() - reference).clamp(min=DEEPEST))
    return ratio(state.U, state.Z) + drop


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient that is 0, with gradient 0, where the denominator is 0."""
    none = denominator == 0
    return torch.where(none, 0.0, numerator / torch.where(none, 1.0, denominator))


def _shift(state: RowState, reference: Tensor) -> RowState:
    """The state's sums relative to a reference at or above its own maximum."""
    empty_rows = state.Z == 0
    drop = torch.where(empty_rows, 0.0, state.m.detach() - reference)
    decay = torch.exp(drop)
    shifted = state._replace(
        Z=state.Z * decay,
        U=torch.where(decay == 0, 0.0, (state.U + drop * state.Z) * decay),
        W=state.W * decay,
        Q=state.Q * decay.square(),
        depth=torch.where(empty_rows, 0.0, state.depth - drop),
    )
    if not has_noise(state):
        return shifted
    return shifted._replace(O=state.O * decay.unsqueeze(-1), R2=state.R2 * decay.square())
