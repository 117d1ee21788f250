"""The two public functions: :func:`attention` and :func:`row_statistics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor, is_grad_enabled
from torch.overrides import wrap_torch_function

from acutance.attend.call import AttentionOptions, Backend, Options, Score, run
from acutance.kernels import fast_path
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling
from acutance.shapes import check_flags, check_inputs
from acutance.weights import Weighting

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "row_statistics"]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: Literal[False] = False,
    dropout_p: float = 0.0,
    weights: str | Weighting = "softmax",
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: Literal[True],
    dropout_p: float = 0.0,
    weights: Literal["softmax", "softmax_one"] = "softmax",
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, RowStatistics]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: Literal[True],
    dropout_p: float = 0.0,
    weights: str | Weighting,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, RowStatistics | WeightStatistics]: ...


@wrap_torch_function(lambda query, *_, **__: (query,))  # a probe sees its calls
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_stats: bool = False,
    noise: bool = False,
    gaps: bool = False,
    dropout_p: float = 0.0,
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
) -> Tensor | tuple[Tensor, RowStatistics | WeightStatistics]:
    r"""Scaled dot-product attention with statistics of each row, in O(n) memory.

    .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \mathrm{softmax}_j(s_{ij})

    Other scores, weights and length scalings are options; each has its defaults by name.

    The first arguments mean what they mean in
    :func:`torch.nn.functional.scaled_dot_product_attention`. Scores are ``scale · q·k``, then
    softcapped, then biased, then masked; *n* is always the number of keys a row can see.

    Args:
        query: (B, Hq, L, E), float64, float32, bfloat16 or float16.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        attn_mask: boolean (True takes part) or additive, broadcastable to (B, Hq, L, S). An
            additive value of −inf, or at or below −1e9 (float16: half its minimum), hides its key
            (:func:`acutance.masks.hides`).
        is_causal: row i sees keys j ≤ i + query_offset; at offset 0 aligned top-left, as in SDPA.
        scale: factor of the scores; None is the score's own, 1/√E for scaled dot products.
        enable_gqa: let Hq be a multiple of H, consecutive query heads sharing a key head.
        return_stats: also return the statistics.
        noise: also compute the sums for the metric ``noise_gain`` (a third matrix product).
        gaps: also count each row's keys by the distance of their logit below its maximum, in bins
            of 1/4, for ``keys_50`` to ``keys_99``, ``mass_of_largest`` and ``mass_below``. The
            counts take 256 bytes per row.
        dropout_p: probability of dropping a weight; statistics are of the weights before dropout.
        query_offset: position of query 0 among the keys: S − L when decoding with a cache.
        window: a row at position i sees keys with ``abs(i - j) < window``.
        key_mask: boolean (B, S), True where a key takes part (False on padding).
        document_ids: integers (S,) or (B, S), or a pair for queries and keys; a row sees only keys
            of its own document.
        cu_seqlens: the same as cumulative lengths, from 0 to S.
        bias: added to the scores, broadcastable to (B, Hq, L, S); differentiable.
        alibi_slopes: (Hq,); adds ``-slope * abs(position - j)`` without forming the matrix.
        softcap: c bounds scaled scores as c · tanh(s / c).
        sinks: (Hq,) learned logits that share each row's normaliser without being keys.
        score: a name or a score of :mod:`acutance.scores`, or a function of a block of queries, a
            block of keys and the first key's position.
        weights: a name or a weighting of :mod:`acutance.weights`.
        scaling: a name or a law of :mod:`acutance.scaling`; its factor for the row's number of
            visible keys multiplies the query, after ``score`` has transformed it.
        backend: the kernel: "native" (compiled, CPU), "triton" (CUDA) or "blocked" (plain PyTorch
            anywhere); "auto" is the fastest that supports the call.
            The statistics' attribute ``backend`` says which was used.

    Returns:
        The output (B, Hq, L, Ev) in the query's dtype; with ``return_stats`` also the
        :class:`~acutance.rowstats.RowStatistics`, rows (B, Hq, L), accumulated in float32 at least,
        or for weights that are not softmax the :class:`~acutance.rowstats.WeightStatistics`.
        A row with no visible key has output 0, ``n_keys`` 0, ``lse`` and ``max_logit`` −inf, and
        NaN for the rest.

    Raises:
        TypeError: if a dtype or the type of an option is wrong.
        ValueError: if shapes, masks or numbers do not fit, or the backend named does not support
            the call; the message names the argument and all shapes, or the reason.

    Example:
        >>> import acutance
        >>> import torch
        >>> query = torch.zeros(1, 1, 3, 8)
        >>> out, stats = acutance.attention(query, query, query, is_causal=True, return_stats=True)
        >>> stats.effective_keys
        tensor([[[1., 2., 3.]]])

        Squared ReLU of cosines, scaled by log n:

        >>> law = acutance.scaling.LogN(train_length=2)
        >>> out = acutance.attention(
        ...     query, query, query, score="cosine", weights="relu2", scaling=law
        ... )

    Source:
        Vaswani et al. (2017), arXiv:1706.03762; Milakov & Gimelshein (2018), arXiv:1805.02867.
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
        and noise is False
        and gaps is False
        and type(dropout_p) is float
        and dropout_p == 0.0
        and score == "scaled_dot"
        and weights == "softmax"
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and not (
            is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        )
    ):
        fast = fast_path.attend(
            query, key, value, is_causal, scale, enable_gqa, query_offset, window, backend
        )
        if fast is not None:
            if return_stats is True:
                return fast
            if return_stats is False:
                out: Tensor = fast[0]
                return out
    if value is None:
        raise TypeError("value must be a Tensor, got None; row_statistics needs no values")
    check_flags(
        return_stats=return_stats,
        noise=noise,
        gaps=gaps,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    options = Options(
        attn_mask,
        is_causal,
        {
            "query_offset": query_offset,
            "window": window,
            "key_mask": key_mask,
            "document_ids": document_ids,
            "cu_seqlens": cu_seqlens,
            "bias": bias,
            "alibi_slopes": alibi_slopes,
        },
        scale,
        enable_gqa,
        noise and return_stats,
        gaps and return_stats,
        softcap,
        sinks,
        score,
        weights,
        scaling,
        backend,
        dropout_p,
    )
    out, stats = run(query, key, value, options)
    return (out, stats) if return_stats else out


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
    weights: Literal["softmax", "softmax_one"] = "softmax",
    **options: Unpack[AttentionOptions],
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
    weights: str | Weighting,
    **options: Unpack[AttentionOptions],
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
    gaps: bool = False,
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
        attn_mask: boolean (True takes part) or additive, broadcastable to (B, Hq, L, S).
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None is the score's own.
        enable_gqa: let Hq be a multiple of H.
        noise: also compute the sums for the metric ``noise_gain``.
        gaps: also count keys by their distance below the maximum, for ``keys_50`` to ``keys_99``.
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
        and noise is False
        and gaps is False
        and score == "scaled_dot"
        and weights == "softmax"
        and type(query) is Tensor
        and type(key) is Tensor
        and value is None
        and not (is_grad_enabled() and (query.requires_grad or key.requires_grad))
    ):
        fast = fast_path.attend(
            query, key, None, is_causal, scale, enable_gqa, query_offset, window, backend
        )
        if fast is not None:
            return fast[1]
    check_flags(noise=noise, gaps=gaps, is_causal=is_causal, enable_gqa=enable_gqa)
    if noise and value is None:
        raise ValueError("noise=True needs value to measure how the output changes, got None")
    if value is not None and not noise:
        check_inputs(query, key, value, enable_gqa, same_width=score == "scaled_dot")
    options = Options(
        attn_mask,
        is_causal,
        {
            "query_offset": query_offset,
            "window": window,
            "key_mask": key_mask,
            "document_ids": document_ids,
            "cu_seqlens": cu_seqlens,
            "bias": bias,
            "alibi_slopes": alibi_slopes,
        },
        scale,
        enable_gqa,
        noise,
        gaps,
        softcap,
        sinks,
        score,
        weights,
        scaling,
        backend,
    )
    return run(query, key, value if noise else None, options)[1]
