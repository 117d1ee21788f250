"""Rows of linear attention in blocks, for statistics that sums cannot give."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from acutance.compiling import transformed
from acutance.mechanisms.call import NO_ROWS, Call, Piece
from acutance.mechanisms.relative import NOTHING, faded_from, log_faded, representable
from acutance.rowstats.weighted import WeightSums, merge_weights, observe_weights

__all__ = ["blockwise"]

QUERIES, KEYS = 256, 1024


def blockwise(call: Call, *, is_causal: bool, offset: int) -> WeightSums:
    """Sums of explicit rows of weights, (B, Hq, L): O(L S) time, O(L) memory plus one block.

    Args:
        call: the call; its rows, divided by their sums, are distributions if its feature map is
            non-negative.
        is_causal: row i sees keys j ≤ i + offset.
        offset: position of query 0 among the keys.
    """
    distribution = call.feature_map.nonnegative

    def formed(log_decay: Tensor | None, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        features = call.features(piece, log_decay)
        distance = (piece.row_places[:, None] - piece.key_places).to(call.dtype)
        seen = features.visible[:, None, None]
        if is_causal:
            seen = seen & (distance >= 0)
        return features.q @ features.k.transpose(-1, -2), distance, seen

    def largest(piece: Piece) -> tuple[Tensor, Tensor]:
        a, distance, seen = formed(call.log_decay, piece)
        assert call.log_decay is not None
        sizes = log_faded(a, call.log_decay, distance)
        size, column = torch.where(seen.unsqueeze(2), sizes, NOTHING).max(-1)
        return size, (piece.row_places - piece.key_places[column]).abs()

    def block(
        log_decay: Tensor | None,
        unit: tuple[Tensor, Tensor] | None,
        *fields: Tensor | None,
    ) -> WeightSums:
        """Sums of the weights between some queries and some keys, (B, Hq, rows).

        Args:
            log_decay: log λ of each query head, (H, G); None without decay.
            unit: the largest weight of each row: its log and its distance, each (B, H, G, rows).
                Weights are relative to it. None: they are not.
            *fields: those of a :class:`~acutance.mechanisms.call.Piece`, as ``checkpoint`` takes
                tensors and not records.
        """
        piece = Piece(*fields)  # type: ignore[arg-type]
        a, distance, seen = formed(log_decay, piece)
        if log_decay is not None and unit is not None:
            a = a * faded_from(log_decay, distance.abs(), *unit).to(a.dtype)
        elif log_decay is not None:
            a = a * torch.exp(log_decay[:, :, None, None] * distance.abs())
        a = a.flatten(1, 2)
        start = int(piece.key_places[0])
        return observe_weights(a, seen, distribution=distribution, first_key=start)

    parts = [slice(i, min(i + QUERIES, call.rows)) for i in range(0, max(1, call.rows), QUERIES)]
    blocks = [slice(j, min(j + KEYS, call.keys)) for j in range(0, call.keys, KEYS)]
    queries = list(call.pieces(parts, [NO_ROWS] * len(parts)))
    keys = list(call.pieces([NO_ROWS] * len(blocks), blocks))
    block_sums = []
    for part, row in zip(parts, queries, strict=True):
        none = call.query.new_zeros(*row.query.shape[:3], 0, dtype=call.dtype)
        sums = observe_weights(none, distribution=distribution)
        pieces = [
            other._replace(query=row.query, row_places=row.row_places)
            for columns, other in zip(blocks, keys, strict=True)
            if not is_causal or columns.start < part.stop + offset
        ]
        unit = None
        if call.underflows and pieces:
            with torch.no_grad():
                sizes, distances = zip(*(largest(piece) for piece in pieces), strict=True)
                size, best = torch.stack(sizes).max(0)
                unit = (size, torch.stack(distances).gather(0, best[None])[0])
        for piece in pieces:
            blocks_made = (
                checkpoint(block, call.log_decay, unit, *piece, use_reentrant=False)
                if torch.is_grad_enabled() and not transformed()
                else block(call.log_decay, unit, *piece)
            )  # formed again for its gradient rather than kept
            sums = merge_weights(sums, blocks_made)
        block_sums.append(sums if unit is None else _in_units(sums, unit[0]))
    return WeightSums(
        *(
            torch.cat(parts, -1) if parts[0].dim() == 3 else parts[0]  # a field that is not known
            for parts in zip(*block_sums, strict=True)
        )
    )


def _in_units(sums: WeightSums, exponents: Tensor) -> WeightSums:
    """Convert sums of weights (B, H, G, L) that are relative to a unit for each row."""
    unit = representable(exponents, sums.c.dtype).flatten(1, 2)
    return sums._replace(c=sums.c * unit, top=sums.top * unit, first=sums.first * unit)
