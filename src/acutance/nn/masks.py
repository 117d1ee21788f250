"""PyTorch's module masks, True where a key is hidden, as :func:`acutance.attention` takes them.

``nn.MultiheadAttention`` and :func:`~torch.nn.functional.scaled_dot_product_attention` disagree on
what True means. Modules here follow the former, the rest of acutance the latter: here they meet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from acutance.shapes import FLOATS, check_tensor

__all__ = ["Masks", "key_mask", "translate"]


class Masks(NamedTuple):
    """Masks in the sense of :func:`acutance.attention`: True for visible keys."""

    attn_mask: Tensor | None
    key_mask: Tensor | None
    bias: Tensor | None


def key_mask(key_padding_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """The inverse of a boolean padding mask: (B, S), True for visible keys.

    Raises:
        TypeError: if it is not boolean.
        ValueError: if it is not (B, S).
    """
    if key_padding_mask is None:
        return None
    if check_tensor("key_padding_mask", key_padding_mask).dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be boolean, True for hidden keys, got {key_padding_mask.dtype}"
        )
    _check_padding(key_padding_mask, batch, keys)
    return torch.logical_not(key_padding_mask)


def _check_padding(key_padding_mask: Tensor, batch: int, keys: int) -> None:
    if tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(
            f"key_padding_mask must have shape (B, S) = ({batch}, {keys}), got "
            f"{tuple(key_padding_mask.shape)}"
        )


def translate(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    is_causal: bool,
    extra: int,
) -> Masks:
    """The masks of ``nn.MultiheadAttention`` for keys preceded by ``extra`` more.

    Raises:
        TypeError: if a mask is neither boolean nor floating.
        ValueError: if its shape does not fit.
    """
    biases = []
    seen = None
    if key_padding_mask is not None:
        if _check_kind("key_padding_mask", key_padding_mask) == torch.bool:
            seen = key_mask(key_padding_mask, batch, keys)
            assert seen is not None
            seen = pad(seen, (extra, 0), value=True) if extra else seen
        else:
            _check_padding(key_padding_mask, batch, keys)
            biases.append(pad(key_padding_mask, (extra, 0)).view(batch, 1, 1, extra + keys))
    mask = None
    if attn_mask is not None:
        boolean = _check_kind("attn_mask", attn_mask) == torch.bool
        mask = _four_dimensional(attn_mask, batch, heads, queries, keys)
        mask = torch.logical_not(mask) if boolean else mask
        if extra:
            mask = pad(mask, (extra, 0), value=True) if boolean else pad(mask, (extra, 0))
        if is_causal:  # attention() takes one or the other; a bias goes with both
            if boolean:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
            biases.append(mask)
            mask = None
    return Masks(mask, seen, _total(biases))


def _check_kind(name: str, mask: Tensor) -> torch.dtype:
    dtype = check_tensor(name, mask).dtype
    if dtype != torch.bool and dtype not in FLOATS:
        raise TypeError(f"{name} must be boolean (True hides) or floating (added), got {dtype}")
    return dtype


def _four_dimensional(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """A mask (L, S) or (B·Hq, L, S) as (1, 1, L, S) or (B, Hq, L, S)."""
    if tuple(mask.shape) == (queries, keys):
        return mask[None, None]
    if tuple(mask.shape) == (batch * heads, queries, keys):
        return mask.view(batch, heads, queries, keys)
    raise ValueError(
        f"attn_mask must have shape (L, S) = ({queries}, {keys}) or (B·Hq, L, S) = "
        f"({batch * heads}, {queries}, {keys}), got {tuple(mask.shape)}"
    )


def _total(biases: list[Tensor]) -> Tensor | None:
    if not biases:
        return None
    total = biases[0]
    for bias in biases[1:]:
        total = total + bias
    return total
