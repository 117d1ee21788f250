"""Scalings: factors on the query that depend on the number of visible keys of each row.

A scaling is a small record. It is named (``scaling="ssmax"``) or, with parameters of its own, given
(``scaling=LogN(train_length=512)``); the ``Learned`` ones are modules and train. Each has
``factor(n)``, n the visible keys of every row (:func:`visible_keys`), and :func:`apply_scaling`
multiplies it into the query, in the query's dtype.

A :class:`Window` is no factor: it says which keys a row reads, and at which distance.

Apply a scaling after query-key normalisation, which would undo it, and leave layers with a sliding
window alone: their rows see no more keys in a longer text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from acutance.escapes import check_name
from acutance.scaling import laws, window
from acutance.scaling.laws import *
from acutance.scaling.laws import arguments, required
from acutance.scaling.window import *
from acutance.shapes import check_tensor

__all__ = [
    "SCALINGS",
    "AnyScaling",
    "apply_scaling",
    "from_dict",
    "get",
    *laws.__all__,
    *window.__all__,
]

#: A constant record or a trained module; both have ``factor``.
AnyScaling: TypeAlias = Scaling | LearnedScaling

#: Every scaling by its name.
SCALINGS: dict[str, type[Scaling]] = {
    kind.name: kind
    for kind in (
        NoScaling, LogN, ClipLogN, SSMax, Yarn, Llama4, Mistral3, SqrtLogN, InfoScale, CosineLogN,
        CosScale, Critical, EntropyTarget, AdaptivePoly, ASEntmax, HeadTable,
    )
}  # fmt: skip


def get(scaling: str | AnyScaling | None) -> AnyScaling:
    """A scaling by name or as it is; None for no scaling.

    Raises:
        ValueError: if the name is unknown, naming the nearest, or it needs parameters.
        TypeError: if it is neither a name nor a scaling.

    Example:
        >>> get("ssmax")
        SSMax(s=0.43, bias=0.0)
    """
    if scaling is None:
        return NoScaling()
    if isinstance(scaling, Scaling | LearnedScaling):
        return scaling
    if not isinstance(scaling, str):
        raise TypeError(f"scaling must be a name or a Scaling, got {type(scaling).__name__}")
    kind = _named(scaling)
    lacks = " or ".join(kind.either) or " and ".join(required(kind))
    if lacks:
        raise ValueError(
            f"scaling={scaling!r} needs parameters: pass scaling.{kind.__name__}(...) with {lacks}"
        )
    return kind()


def from_dict(record: Mapping[str, Any]) -> Scaling:
    """Inverse of :meth:`Scaling.to_dict`.

    Raises:
        ValueError: if the name or a parameter is unknown, or one is missing or out of range.
        TypeError: if a parameter is of the wrong type.

    Example:
        >>> from_dict({"name": "clip_log_n", "train_length": 8192})
        ClipLogN(train_length=8192)
    """
    if "name" not in record:
        raise ValueError(
            f"a scaling's record must have a name, got {', '.join(record) or 'nothing'}"
        )
    kind = _named(record["name"])
    return kind(**arguments(kind, record))


def apply_scaling(
    query: Tensor,
    scaling: str | AnyScaling | None,
    n: Tensor,
    positions: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
) -> Tensor:
    """Multiply each row's factor into the query, in the query's dtype.

    Call it after query-key normalisation and rotary embedding, on the query alone.

    Args:
        query: (B, Hq, L, E).
        scaling: a name, a record or a learned module.
        n: visible keys of each row, broadcastable to (B, Hq, L): from :func:`visible_keys`.
        positions: position of each row's token, from 0, broadcastable to (B, Hq, L); None is n − 1.
        entropy: measured entropy of each unscaled row, for ``adaptive_poly``.

    Returns:
        The query, scaled; the factor is computed in float32 (float64 for a float64 query) and
        rounded to the query's dtype before it multiplies.

    Raises:
        ValueError: if n or the heads of the scaling do not fit the query.

    Example:
        >>> query = torch.ones(1, 1, 3, 2)
        >>> n = torch.tensor([[[1, 512, 4096]]])
        >>> apply_scaling(query, LogN(train_length=512), n)[..., 0]
        tensor([[[0.4444, 1.0000, 1.3333]]])
    """
    law = get(scaling)
    if check_tensor("query", query).dim() != 4:
        raise ValueError(f"query must have shape (B, Hq, L, E), got {tuple(query.shape)}")
    rows = tuple(query.shape[:3])
    for name, value in {"n": n, "positions": positions, "entropy": entropy}.items():
        if value is not None and not _fits(check_tensor(name, value), rows):
            raise ValueError(
                f"{name} must broadcast to (B, Hq, L) = {rows}, got {tuple(value.shape)} "
                f"(query {tuple(query.shape)})"
            )
    if isinstance(law, NoScaling):
        return query
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    factor = law.factor(n, positions, entropy=entropy, dtype=dtype)
    if not _fits(factor, rows):
        raise ValueError(
            f"the scaling's factors must broadcast to (B, Hq, L) = {rows}, got "
            f"{tuple(factor.shape)}: it has parameters for "
            f"{factor.shape[-2] if factor.dim() > 1 else 1} heads (query {tuple(query.shape)})"
        )
    return query * factor.to(query.dtype).unsqueeze(-1)


def _fits(tensor: Tensor, rows: tuple[int, ...]) -> bool:
    """Whether a tensor can be broadcast to rows of this shape without enlarging it."""
    if tensor.dim() > len(rows):
        return False
    pairs = zip(reversed(tensor.shape), reversed(rows), strict=False)
    return all(size in (1, full) for size, full in pairs)


def _named(name: object) -> type[Scaling]:
    """The scaling class of a name; raises ValueError with the nearest name if there is none."""
    if not isinstance(name, str):
        raise TypeError(f"a scaling's name must be text, got {type(name).__name__}")
    if name not in SCALINGS:
        check_name("scaling", name, SCALINGS)
    return SCALINGS[name]
