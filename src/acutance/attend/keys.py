"""The public function :func:`key_mass`: how much weight each key receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from acutance.attend.call import Options, ScoreOptions, run_key_mass
from acutance.check_masks import MaskOptions
from acutance.shapes import check_flags
from acutance.weights import Weighting

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["key_mass"]


def key_mass(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    weights: str | Weighting = "softmax",
    **options: Unpack[ScoreOptions],
) -> Tensor:
    r"""The weight that each key receives, summed over the rows, in memory of O(n).

    .. math:: M_j = \sum_i p_{ij}

    A second pass over the scores, with the normalisers of :func:`acutance.row_statistics`. The
    keys' masses of a head add up to its number of rows that see a key, less what sinks take. Rows
    are left out, as those of padding are, by a document of their own: ``document_ids``.

    Args:
        query: (B, Hq, L, E); pass the last rows alone, with their ``query_offset``, for what
            recent tokens look at.
        key: (B, H, S, E).
        attn_mask: see :func:`acutance.attention`, as everything below.
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None is the score's own.
        enable_gqa: let Hq be a multiple of H.
        weights: name or weighting. Weights that are not softmax are summed as they are, signs
            included.
        options: ``query_offset``, ``window``, ``key_mask``, ``document_ids``, ``cu_seqlens``,
            ``bias``, ``alibi_slopes``, ``softcap``, ``sinks``, ``score``, ``scaling`` and
            ``backend``.

    Returns:
        (B, Hq, S), float64 for float64 inputs and float32 for others; 0 for a key that no row
        sees. It carries no gradient.

    Raises:
        TypeError: as :func:`acutance.attention`, and for an option of another name.
        ValueError: as :func:`acutance.attention`.

    Example:
        Three causal rows of equal scores: the first key receives 1 + 1/2 + 1/3.

        >>> import acutance
        >>> import torch
        >>> query = torch.zeros(1, 1, 3, 8)
        >>> acutance.key_mass(query, query, is_causal=True)
        tensor([[[1.8333, 0.8333, 0.3333]]])

        The last token is padding; as a document of its own it adds nothing to the others:

        >>> mask = torch.tensor([[1, 1, 0]])
        >>> acutance.key_mass(query, query, is_causal=True, document_ids=mask)
        tensor([[[1.5000, 0.5000, 1.0000]]])

    Source:
        The accumulated attention scores of Zhang et al. (2023), "H2O", arXiv:2306.14048.
    """
    given: dict[str, Any] = {**options}
    unknown = [name for name in given if name not in ScoreOptions.__annotations__]
    if unknown:
        known = ", ".join(ScoreOptions.__annotations__)
        raise TypeError(f"key_mass has no option {unknown[0]!r}: choose from {known}")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    masks = {name: given.pop(name) for name in MaskOptions.__annotations__ if name in given}
    with torch.no_grad():
        asked = Options(
            attn_mask,
            is_causal,
            cast(MaskOptions, masks),
            scale,
            enable_gqa,
            weights=weights,
            **given,
        )
        return run_key_mass(query, key, asked)
