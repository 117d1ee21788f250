"""Scores, weightings and masks of a module, as options of :func:`acutance.attention`.

``nn.MultiheadAttention`` and :func:`~torch.nn.functional.scaled_dot_product_attention` disagree on
the meaning of True in a mask. In what :func:`translate` returns, as in the latter, True marks a key
that takes part.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from acutance import scores
from acutance import weights as weightings
from acutance.attend import Score
from acutance.scores import Additive, AdditiveScore, General, GeneralScore, Location
from acutance.shapes import FLOATS, check_tensor
from acutance.weights import Sink, Weighting

_RECORDS = (General, Additive, Location)


def hold_score(
    score: str | Score, width: int, num_heads: int, num_kv_heads: int, **factory: Any
) -> Score:
    """The score for a name, trainable if it has parameters, or the given score.

    Parameters are created with the device and dtype of ``factory``.

    Raises:
        ValueError: if the name is unknown, or its parameters must be given explicitly.
        TypeError: if it is not a score, or a record whose parameters would not be trained.
    """
    if score == "general":
        return GeneralScore(width, num_heads=num_heads, **factory)
    if score == "additive":
        return AdditiveScore(width, num_heads=num_heads, num_kv_heads=num_kv_heads, **factory)
    for name, part in (vars(score) if isinstance(score, _RECORDS) else {}).items():
        if isinstance(part, nn.Parameter):
            kind = type(score).__name__
            raise TypeError(
                f"score={kind}(...) contains the Parameter {name}, which this module would not "
                f"train: pass the module scores.{kind}Score"
            )
    return scores.get(score)


class HeldWeights(nn.Module):
    """A weighting whose tensors are parameters or buffers of this module.

    Args:
        weights: a name or a weighting. ``"sink"`` trains a sink for each head, initially 0.
        num_heads: number of query heads, Hq.
        factory: device and dtype of new parameters.
    """

    def __init__(self, weights: str | Weighting, num_heads: int, **factory: Any) -> None:
        super().__init__()
        if weights == Sink.name:
            weights = Sink(nn.Parameter(torch.zeros(num_heads, **factory)))
        record = weightings.get(weights)
        self.names = [name for name, part in vars(record).items() if isinstance(part, Tensor)]
        for name in self.names:
            tensor = getattr(record, name)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.record = record

    def forward(self) -> Weighting:
        """The weighting with the current tensors."""
        if not self.names:
            return self.record
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.names}
        return replace(self.record, **tensors)

    def extra_repr(self) -> str:
        """The weighting's name, for ``print``."""
        return repr(self.record.name)


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
    """Raise ValueError unless a padding mask is (B, S)."""
    if tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(
            f"key_padding_mask must have shape (B, S) = ({batch}, {keys}), got "
            f"{tuple(key_padding_mask.shape)}"
        )


def translate(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    size: tuple[int, int, int, int],
    *,
    is_causal: bool,
    extra: int,
) -> dict[str, Tensor | None]:
    """Convert the masks of ``nn.MultiheadAttention``, for keys preceded by ``extra`` further keys.

    ``size`` is (B, Hq, L, S), without those further keys.

    Raises:
        TypeError: if a mask is neither boolean nor floating.
        ValueError: if its shape does not fit.
    """
    batch, _, _, keys = size
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
        mask = _four_dimensional(attn_mask, size)
        mask = torch.logical_not(mask) if boolean else mask
        if extra:
            mask = pad(mask, (extra, 0), value=True) if boolean else pad(mask, (extra, 0))
        if is_causal:  # attention() takes one or the other; a bias goes with both
            if boolean:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
            biases.append(mask)
            mask = None
    bias = functools.reduce(torch.add, biases) if biases else None
    return {"attn_mask": mask, "key_mask": seen, "bias": bias}


def _check_kind(name: str, mask: Tensor) -> torch.dtype:
    """Dtype of a mask; raises TypeError unless it is boolean or floating."""
    dtype = check_tensor(name, mask).dtype
    if dtype != torch.bool and dtype not in FLOATS:
        raise TypeError(
            f"{name} must be boolean (True hides) or floating-point (added to the scores), got "
            f"{dtype}"
        )
    return dtype


def _four_dimensional(mask: Tensor, size: tuple[int, int, int, int]) -> Tensor:
    """Reshape a mask (L, S) or (B·Hq, L, S) to (1, 1, L, S) or (B, Hq, L, S)."""
    batch, heads, queries, keys = size
    if tuple(mask.shape) == (queries, keys):
        return mask[None, None]
    if tuple(mask.shape) == (batch * heads, queries, keys):
        return mask.view(size)
    raise ValueError(
        f"attn_mask must have shape (L, S) = ({queries}, {keys}) or (B·Hq, L, S) = "
        f"({batch * heads}, {queries}, {keys}), got {tuple(mask.shape)}"
    )
