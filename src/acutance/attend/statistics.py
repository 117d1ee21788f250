"""The signature of :func:`row_statistics`: the statistics alone."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from acutance.attend.call import Backend, Options, Score, run
from acutance.kernels import dispatch, fast_path
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling
from acutance.shapes import check_flag, check_inputs
from acutance.weights import Weighting

__all__ = ["row_statistics"]


@overload
def row_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    noise: bool = False,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: str | Score = "scaled_dot",
    weights: Literal["softmax", "softmax_one"] = "softmax",
    scaling: str | AnyScaling | None = None,
    backend: Backend = "auto",
) -> RowStatistics: ...


@overload
def row_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    noise: bool = False,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: str | Score = "scaled_dot",
    weights: str | Weighting,
    scaling: str | AnyScaling | None = None,
    backend: Backend = "auto",
) -> RowStatistics | WeightStatistics: ...


def row_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    noise: bool = False,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: str | Score = "scaled_dot",
    weights: str | Weighting = "softmax",
    scaling: str | AnyScaling | None = None,
    backend: Backend = "auto",
) -> RowStatistics | WeightStatistics:
    """Statistics of each attention row, without computing the output.

    Options are those of :func:`attention`. Values are read only for ``noise_gain``, so they are
    needed only with ``noise=True``.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev), with ``noise=True``.
        attn_mask: see :func:`attention`, as everything below.
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None is the score's own.
        enable_gqa: let Hq be a multiple of H.
        noise: also give ``noise_gain``.
        query_offset: position of query 0 among the keys.
        window: a row at position i sees keys with ``abs(i - j) < window``.
        key_mask: boolean (B, S), True where a key takes part.
        document_ids: a row sees only keys of its own document.
        cu_seqlens: the same as cumulative lengths.
        bias: added to the scores.
        alibi_slopes: (Hq,); adds ``-slope * abs(position - j)``.
        softcap: bounds scaled scores.
        sinks: (Hq,) learned logits in the normaliser.
        score: name, score or function.
        weights: name or weighting.
        scaling: name or law.
        backend: the kernel.

    Returns:
        The statistics, rows (B, Hq, L).

    Raises:
        TypeError: as :func:`attention`.
        ValueError: as :func:`attention`, and if ``noise`` is asked for without values.

    Example:
        One key stands 2 above three others, so it holds e²/(e² + 3) of the weight:

        >>> import acutance
        >>> import torch
        >>> query = torch.tensor([1.0]).view(1, 1, 1, 1)
        >>> key = torch.tensor([2.0, 0.0, 0.0, 0.0]).view(1, 1, 4, 1)
        >>> acutance.row_statistics(query, key).top_weight
        tensor([[[0.7112]]])
    """
    if (
        attn_mask is None
        and key_mask is None
        and document_ids is None
        and cu_seqlens is None
        and bias is None
        and alibi_slopes is None
        and softcap is None
        and sinks is None
        and scaling is None
        and value is None
        and noise is False
        and score == "scaled_dot"
        and weights == "softmax"
        and dispatch.takes_native(backend, query)
    ):
        found = fast_path.attend(
            *(query, key, None, is_causal, scale, enable_gqa, query_offset, window)
        )
        if found is not None:
            return found[1]
    check_flag("noise", noise)
    if noise and value is None:
        raise ValueError("noise=True measures how the output moves and so needs value, got None")
    if value is not None and not noise:
        check_inputs(
            query,
            key,
            value,
            check_flag("enable_gqa", enable_gqa),
            same_width=score == "scaled_dot",
        )
    options = Options(
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        noise=noise,
        dropout_p=0.0,
        query_offset=query_offset,
        window=window,
        key_mask=key_mask,
        document_ids=document_ids,
        cu_seqlens=cu_seqlens,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        score=score,
        weights=weights,
        scaling=scaling,
        backend=backend,
    )
    return run(query, key, value if noise else None, options)[1]
