"""The queries and keys of the matrix products that scores are computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["einsum_terms", "operands", "match_scores"]

_DOTS = "0123456789"  # labels that no einsum has


def operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, as queries (..., L, E) and keys (..., S, E).

    Args:
        name: name of the function.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: if they cannot be determined.

    Example:
        >>> import torch
        >>> query, key = torch.zeros(2, 5, 3, 4), torch.zeros(2, 7, 3, 4)
        >>> pair = operands("einsum", ("blhe,bshe->bhls", query, key), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
        >>> pair = operands("einsum", ("...ie,...je->...ij", query.mT, torch.zeros(2, 5, 7, 3)), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 5, 4, 3), (2, 5, 7, 3)]
        >>> pair = operands("matmul", (torch.zeros(2, 5, 4), torch.zeros(2, 4, 7)), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 5, 4), (2, 7, 4)]
    """
    args = [*args, *kwargs.values()]
    if name == "einsum":
        return _einsum_operands(args)
    if name == "baddbmm":
        args = [*args, *(kwargs[key] for key in ("batch1", "batch2") if key in kwargs)][1:]
    if name == "__rmatmul__":
        args = args[1::-1]
    pair = [each for each in args if isinstance(each, Tensor)]
    if len(pair) != 2 or min(each.dim() for each in pair) < 2:
        raise ValueError(f"the factors of its {name} are not known")
    return pair[0], pair[1].transpose(-1, -2)


def einsum_terms(args: Sequence[Any]) -> tuple[list[str], list[Any], str] | None:
    """Labels of an einsum's two factors, the factors, and the labels of its result.

    None if it does not have two factors, or its formula has no arrow.

    Example:
        >>> import torch
        >>> einsum_terms(("...ij,...jd->...id", torch.zeros(2, 5, 3), torch.zeros(2, 3, 4)))[0]
        ['9ij', '9jd']
    """
    terms, arrow, out = str(args[0]).replace(" ", "").partition("->")
    names = terms.split(",")
    pair = list(args[1]) if isinstance(args[1], list | tuple) else list(args[1:])
    if not arrow or len(names) != 2 or len(pair) != 2:
        return None
    if "..." in terms:  # as many labels, the same from the right, as the dots stand for
        dots = [
            part.dim() - len(name.replace("...", ""))
            for part, name in zip(pair, names, strict=True)
        ]
        names = [
            name.replace("...", _DOTS[-n:] if n else "")
            for n, name in zip(dots, names, strict=True)
        ]
        out = out.replace("...", _DOTS[-max(dots) :] if max(dots) else "")
    if "." in "".join(names) or any(
        part.dim() != len(name) for part, name in zip(pair, names, strict=True)
    ):
        return None
    return names, pair, out


def _einsum_operands(args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Queries (..., L, E) and keys (..., S, E) of an einsum."""
    unknown = f"it is not known which factor of its einsum is the queries: {args[0]!r:.60}"
    terms = einsum_terms(args)
    if terms is None:
        raise ValueError(unknown)
    names, pair, out = terms
    shared = [label for label in names[0] if label in names[1]]
    over, batch = ([x for x in shared if (x in out) == kept] for kept in (False, True))
    own = [[label for label in name if label not in shared] for name in names]
    if len(over) != 1 or any(len(labels) != 1 or labels[0] not in out for labels in own):
        raise ValueError(unknown)
    turned = [
        part.permute([name.index(label) for label in (*batch, *labels, *over)])
        for part, name, labels in zip(pair, names, own, strict=True)
    ]
    first = out.index(own[0][0]) < out.index(own[1][0])  # keys come after queries
    return (turned[0], turned[1]) if first else (turned[1], turned[0])


def match_scores(pair: tuple[Tensor, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape factors to (B, Hq, L, E) and (B, H, S, E), for scores (B, Hq, L, S).

    Raises:
        ValueError: if they do not have the sizes of the scores.

    Example:
        >>> import torch
        >>> pair = torch.zeros(6, 5, 4), torch.zeros(6, 7, 4)
        >>> [tuple(part.shape) for part in match_scores(pair, torch.zeros(2, 3, 5, 7))]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
    """
    batch, heads, rows, keys = scores.shape
    found = []
    for part, length in zip(pair, (rows, keys), strict=True):
        three = part.dim() == 3 and part.shape[0] == batch * heads
        four = part.unflatten(0, (batch, heads)) if three else part
        if four.dim() != 4 or four.shape[0] != batch or four.shape[2] != length:
            raise ValueError(
                f"its scores have shape {tuple(scores.shape)}, but a factor of their product "
                f"has {tuple(part.shape)}"
            )
        found.append(four)
    if found[0].shape[1] != heads or heads % found[1].shape[1]:
        raise ValueError(f"its product has {found[0].shape[1]} heads of queries, expected {heads}")
    return found[0], found[1]
