"""Which dimensions of scores are heads and keys, and which of a layer's heads this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.capture.find_layers import heads_of
from acutance.capture.handwritten.product_layout import ProductAxes


def could_be_over_keys(scores: Tensor, dim: int, heads: int | None) -> bool:
    """Whether a softmax over dimension ``dim`` could be attention's softmax over keys.

    Keys are the last dimension or, if heads come last, an inner one. Other softmaxes run over image
    channels, the taps of a kernel, or the positions of each feature.

    Example:
        >>> scores = torch.zeros(2, 5, 5, 3)
        >>> (
        ...     could_be_over_keys(scores, -1, None),
        ...     could_be_over_keys(scores, 2, 3),
        ...     could_be_over_keys(scores, 2, 4),
        ... )
        (True, True, False)
    """
    if scores.dim() == 0 or dim in (-1, scores.dim() - 1):
        return scores.dim() > 0
    return scores.dim() == 4 and dim % 4 in (1, 2) and scores.shape[-1] == heads


def heads_at_once(module: torch.nn.Module | None) -> int | None:
    """Number of heads in one softmax of a module: fewer than all in diffusers' sliced attention."""
    heads = heads_of(module)
    size = getattr(getattr(module, "processor", None), "slice_size", None)
    sliced = isinstance(size, int) and heads is not None and size > 0 and heads % size == 0
    return size if sliced else heads


def fold(scores: Tensor, heads: int | None, place: int | None = None, dim: int = -1) -> Tensor:
    """Reshape scores of any rank to (B, H, L, S).

    Three dimensions are (B · H, L, S), or (B, L, S) if the first is not divisible by ``heads``. Of
    four, the second is heads, unless only another one has ``heads`` entries. Of more, heads is the
    one with ``heads`` entries, and the others are folded into the batch.

    Args:
        scores: (..., S); (B, L, S, H) or (B, S, L, H) if ``dim`` is not the last of four.
        heads: number of heads; None if unknown.
        place: index of the head dimension of four-dimensional scores, if it is known.
        dim: dimension of the keys.

    Raises:
        ValueError: if heads cannot be distinguished from other dimensions; with another ``dim``, if
            the second of four has as many entries as the last: it may be linear attention's softmax
            of each feature over the tokens.

    Example:
        >>> [list(fold(torch.zeros(shape), 2).shape) for shape in ((6, 5, 7), (3, 5, 2, 7))]
        [[3, 2, 5, 7], [3, 2, 5, 7]]
        >>> list(fold(torch.zeros(3, 9, 2, 5, 7), 2).shape)
        [27, 2, 5, 7]
        >>> list(fold(torch.zeros(2, 3, 5, 7), 2).shape)  # heads first
        [3, 2, 5, 7]
        >>> list(fold(torch.zeros(2, 5, 7, 3), 3, dim=2).shape)
        [2, 3, 5, 7]
    """
    shape = scores.shape
    if dim not in (-1, scores.dim() - 1):
        if scores.dim() == 4 and shape[1] == shape[-1] > 1 < shape[2] and dim % 4 == 2:
            raise ValueError(
                f"its softmax of {tuple(shape)} is over dimension 2, and both dimension 1 and the "
                "last fit its heads: it may be that of linear attention"
            )
        return scores.movedim(dim, -1).transpose(1, 2)
    if scores.dim() == 3:
        fits = heads is not None and shape[0] % heads == 0
        three: Tensor = scores.unflatten(0, (-1, heads if fits and heads else 1))
        return three
    places = [axis for axis in range(scores.dim() - 1) if shape[axis] == heads]
    if scores.dim() == 4:
        if place is None:
            place = places[0] if len(places) == 1 else 1
        return scores.transpose(1, place)
    if not places:
        raise ValueError(f"it is not known which dimension of its softmax {tuple(shape)} is heads")
    place = 1 if 1 in places else places[-1]
    return scores.movedim(place, -3).flatten(0, -4)


def decide_head_axis(
    shape: Sequence[int], heads: int | None, product: ProductAxes
) -> tuple[int, bool]:
    """Index of the head dimension among four, and whether evidence rather than convention decided.

    Only dimensions that are not queries are considered: first one with ``heads`` entries, then the
    one that the product with the values shows to be heads. Adjacent dimensions of one entry give
    the same rows whichever of them is heads.

    Args:
        shape: shape of the scores, keys last.
        heads: number of heads; None if unknown.
        product: dimensions known from the product with the values.

    Example:
        >>> decide_head_axis((2, 4, 4, 9), 4, ProductAxes(queries=1))
        (2, True)
        >>> decide_head_axis((1, 1, 9, 9), 1, ProductAxes())
        (1, True)
        >>> (
        ...     decide_head_axis((4, 4, 9, 9), 4, ProductAxes()),
        ...     decide_head_axis((3, 5, 9, 9), None, ProductAxes()),
        ... )
        ((1, False), (1, True))
    """
    among = [place for place in range(3) if place != product.queries]
    fitting = [place for place in among if shape[place] == heads]
    choice = fitting or among
    if product.heads is not None and product.heads in choice:
        return product.heads, True
    same = heads == 1 and all(size == 1 for size in shape[choice[0] : choice[-1] + 1])
    return 1 if 1 in choice else choice[-1], same or len(fitting) < 2


def projected_heads(module: torch.nn.Module | None, shape: Sequence[int], width: int) -> int | None:
    """Number of heads of values of this width, from the linear layers that produce them.

    None unless exactly one of the first three dimensions of ``shape`` equals such a number.

    Example:
        >>> module = torch.nn.ModuleDict({"v": torch.nn.Linear(6, 12)})
        >>> projected_heads(module, (3, 2, 5, 5), 4), projected_heads(module, (3, 2, 5, 5), 3)
        (3, None)
    """
    if module is None or width == 0 or len(shape) != 4:
        return None
    children = module.children()
    widths = {child.out_features for child in children if isinstance(child, torch.nn.Linear)}
    fitting = [size for size in shape[:3] if size > 1 and {size * width, 3 * size * width} & widths]
    return fitting[0] if len(fitting) == 1 else None


class HeadAxes:
    """Which of four dimensions of the scores is heads, for each module, learned from its calls.

    Example:
        >>> places = HeadAxes()
        >>> places.place("attn", None, (4, 4, 9, 9), 4, ProductAxes())
        1
        >>> [why[:37] for _, why in places.undecided()]
        ['its softmax of (4, 4, 9, 9) fits its ']
    """

    def __init__(self) -> None:
        self._decided: dict[str, int] = {}
        self._undecided: dict[str, tuple[int, str]] = {}

    def place(
        self,
        name: str,
        module: torch.nn.Module | None,
        shape: Sequence[int],
        heads: int | None,
        product: ProductAxes,
    ) -> int:
        """Index of the head dimension, by the head count, the product, or calls of other sizes.

        Readings that a later call contradicts, or that no call decides, are listed as undecided.

        Args:
            name: name of the module.
            module: the module, whose projections give the number of heads if ``heads`` is None.
            shape: shape of the scores, keys last.
            heads: number of heads; None if unknown.
            product: dimensions known from the product with the values.
        """
        heads = projected_heads(module, shape, product.width) if heads is None else heads
        place, decided = decide_head_axis(shape, heads, product)
        if decided:
            self._decided[name] = place
            if name in self._undecided and self._undecided[name][0] == place:
                del self._undecided[name]
            return place
        known = self._decided.get(name)
        if known is not None and shape[known] == heads:
            return known
        self._undecided.setdefault(
            name,
            (
                place,
                f"its softmax of {tuple(shape)} fits its {heads} heads in more than one way: "
                f"the {('first', 'second', 'third')[place]} dimension was assumed to be "
                "heads, which a call with another batch size or length would confirm",
            ),
        )
        return place

    def undecided(self) -> list[tuple[str, str]]:
        """Names of modules whose head dimension is uncertain, with the reason; clears the list."""
        undecided = [(name, reason) for name, (_, reason) in self._undecided.items()]
        self._undecided.clear()
        return undecided


def first_head(module: torch.nn.Module | None, query: Tensor) -> int:
    """Number, in its layer, of the first head that this tensor-parallel rank computes.

    It follows from a query projection whose weight is a DTensor sharded by rows.

    Args:
        module: the attention module, with its projections.
        query: (B, Hq, L, E).

    Returns:
        0 if heads are not split over ranks, or if that cannot be told.

    Example:
        >>> first_head(torch.nn.Linear(8, 8), torch.zeros(1, 2, 3, 4))
        0
    """
    if module is None:
        return 0
    from torch.distributed.tensor import DTensor

    heads, width = query.shape[1], query.shape[3]
    for weight in module.parameters():
        if not isinstance(weight, DTensor) or weight.dim() != 2:
            continue
        start = _first_row(weight)
        if start is not None and weight.to_local().shape[0] == heads * width:
            return start // width
    return 0


def _first_row(weight: Any) -> int | None:
    """First row of a sharded matrix that this rank holds; None if it is not sharded by rows."""
    place = weight.device_mesh.get_coordinate()
    if place is None:
        return None
    start, length, shared = 0, weight.shape[0], False
    for dim, placement in enumerate(weight.placements):
        if placement.is_shard(0) and weight.device_mesh.size(dim) > 1:
            chunk = -(-length // weight.device_mesh.size(dim))  # as torch.chunk
            start += place[dim] * chunk
            length = max(0, min(chunk, length - place[dim] * chunk))
            shared = True
    return start if shared else None
