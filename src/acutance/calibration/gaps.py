"""The critical scale of single rows of a captured call, on the scores that the model has."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import Region
from acutance.theory import critical_scale

__all__ = ["critical_scales", "row_scores"]


def row_scores(call: AttentionCall, row: int) -> Tensor:
    """Scores of one row of every window and head, −inf where a key is hidden; float64.

    Args:
        call: as it was captured.
        row: which query, from 0.

    Returns:
        (B, Hq, keys) of the keys that any of these rows can see.
    """
    query, key = call.query, call.key
    masking = call.masking()
    batch, heads = slice(0, query.shape[0]), slice(0, key.shape[1])
    region = Region(batch, heads, slice(row, row + 1))
    parts = []
    for tile in masking.tiles(region, max(1, key.shape[2])):
        keys = key[:, :, None, tile.start : tile.stop].double()
        queries = query[:, :, row : row + 1].double().unflatten(1, (masking.heads, masking.group))
        scores = queries @ keys.transpose(-1, -2) * call.factor
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        for bias in tile.biases:
            scores = scores + bias.double()
        if tile.hidden is not None:
            where = slice(tile.hidden.start, tile.hidden.stop)
            hidden = tile.hidden.mask.expand(*scores.shape[:-1], tile.hidden.width)
            scores[..., where] = scores[..., where].masked_fill(hidden, -torch.inf)
        parts.append(scores.flatten(1, 2).squeeze(2))
    return torch.cat(parts, -1) if parts else query.new_zeros(*query.shape[:2], 0).double()


def critical_scales(call: AttentionCall, row: int) -> Tensor:
    r""":math:`\Lambda = \sup_t \log N(t) / t` of one row of every window and head, (B, Hq).

    In units of the call's own scores: above 1 the maximum does not stand alone at the scale that
    the model has, and a factor of Λ would make it. Infinite where two keys tie for the maximum.

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    scores = row_scores(call, row)
    if scores.shape[-1] == 0:
        return torch.full(scores.shape[:2], torch.nan, dtype=torch.float64)
    return torch.as_tensor(critical_scale(scores.cpu().numpy()), dtype=torch.float64).reshape(
        scores.shape[:2]
    )
