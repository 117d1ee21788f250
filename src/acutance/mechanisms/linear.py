r"""Linear attention: weights :math:`a_{ij} = q'_i \cdot k'_j`, computed from sums over keys.

Every form is O(n): one product for rows that see all keys, a chunked scan for causal rows, and a
state of fixed size for decoding. A decay multiplies the weights by :math:`\lambda^{|i - j|}`.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from acutance.mechanisms.call import make_call
from acutance.mechanisms.feature_maps import AnyMap
from acutance.mechanisms.forms import causal, full
from acutance.mechanisms.rows import blockwise
from acutance.mechanisms.state import weight_sums
from acutance.rowstats.weighted import WeightStatistics
from acutance.shapes import check_count, check_flag, check_inputs

__all__ = ["CHUNK", "decay_attention", "linear_attention"]

#: Rows that meet their keys directly in a causal scan.
CHUNK = 128


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    is_causal: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    query_offset: int = 0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: Literal[False] = False,
    rows: Literal["sums", "blockwise"] = "sums",
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor: ...


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    is_causal: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    query_offset: int = 0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: Literal[True],
    rows: Literal["sums", "blockwise"] = "sums",
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, WeightStatistics]: ...


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    is_causal: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    query_offset: int = 0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: bool = False,
    rows: Literal["sums", "blockwise"] = "sums",
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor | tuple[Tensor, WeightStatistics]:
    r"""Linear attention in O(n), with the statistics of its rows.

    .. math::
        o_i = \frac{\sum_j a_{ij} v_j}{\sum_j a_{ij}}, \qquad a_{ij} = \phi(q_i) \cdot \phi(k_j)

    Args:
        query: (B, Hq, L, E), float64, float32, bfloat16 or float16; the last two are summed in
            float32.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        feature_map: φ, a name of :data:`~acutance.mechanisms.FEATURE_MAPS`, a FeatureMap, or any
            function of a tensor (:class:`~acutance.mechanisms.CallableMap`).
        is_causal: row i sees keys j ≤ i + query_offset.
        normalize: divide by the sum of the weights; None to do so if the feature map has no
            negative weights. A row whose weights are all 0 has output 0.
        scale: factor of the weights; it cancels if they are normalised.
        query_offset: position of query 0 among the keys: S − L when decoding with a cache.
        key_mask: boolean (B, S), True where a key takes part.
        enable_gqa: allow Hq to be a multiple of H; consecutive query heads share a key head.
        return_stats: also return the statistics of the weights a.
        rows: "sums" computes statistics from sums over keys, in O(n F²) for F features: sparsity,
            effective keys, collision and the first key's weight, for non-negative weights. Sizes of
            signed weights, entropy and the largest weight are then NaN. "blockwise" gives them all,
            computing rows block by block in O(n²) time and O(n) memory.
        eps: added to the normalising sum.
        chunk: number of rows per chunk of a causal scan.

    Returns:
        (B, Hq, L, Ev) of the query's dtype; with ``return_stats`` also
        :class:`~acutance.rowstats.WeightStatistics`, fields (B, Hq, L). Both are twice
        differentiable.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if shapes do not fit, there is no feature map of this name (the message gives
            the nearest), or signed weights are to be normalised.

    Example:
        Four equal keys share their weight evenly:

        >>> import torch
        >>> query, key = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 4, 2)
        >>> value = torch.arange(4.0).view(1, 1, 4, 1)
        >>> out, stats = linear_attention(query, key, value, return_stats=True)
        >>> out.item(), stats.effective_keys.item(), stats.entropy.item()
        (1.5, 4.0, nan)

    Source:
        Katharopoulos et al. (2020), arXiv:2006.16236; statistics: Su Jianlin, kexue.fm article
        9889.
    """
    return _attend(
        query,
        key,
        value,
        feature_map=feature_map,
        decay=None,
        is_causal=is_causal,
        normalize=normalize,
        scale=scale,
        query_offset=query_offset,
        key_mask=key_mask,
        enable_gqa=enable_gqa,
        return_stats=return_stats,
        rows=rows,
        eps=eps,
        chunk=chunk,
    )


@overload
def decay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: float | Tensor,
    feature_map: AnyMap = "identity",
    is_causal: bool = True,
    normalize: bool | None = None,
    scale: float = 1.0,
    query_offset: int = 0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: Literal[False] = False,
    rows: Literal["sums", "blockwise"] = "sums",
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor: ...


@overload
def decay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: float | Tensor,
    feature_map: AnyMap = "identity",
    is_causal: bool = True,
    normalize: bool | None = None,
    scale: float = 1.0,
    query_offset: int = 0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: Literal[True],
    rows: Literal["sums", "blockwise"] = "sums",
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, WeightStatistics]: ...


def decay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: float | Tensor,
    feature_map: AnyMap = "identity",
    is_causal: bool = True,
    normalize: bool | None = None,
    scale: float = 1.0,
    query_offset: int = 0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: bool = False,
    rows: Literal["sums", "blockwise"] = "sums",
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor | tuple[Tensor, WeightStatistics]:
    r"""Linear attention whose weights decay with distance (retention), in O(n).

    .. math:: a_{ij} = \lambda^{|i - j|} \, \phi(q_i) \cdot \phi(k_j)

    Distances are between positions, so hidden keys count. RetNet's retention is
    ``decay=retnet_decays(Hq), scale=E**-0.5``. With a decay below 1, effective keys stay bounded
    for any length: without content, by :math:`(1 + \lambda)/(1 - \lambda)`.

    Args:
        query: (B, Hq, L, E); this and all that is not explained here as in
            :func:`linear_attention`.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        decay: λ in (0, 1], a number or (Hq,); differentiable.
        feature_map: φ.
        is_causal: row i sees keys j ≤ i + query_offset; otherwise keys on both sides.
        normalize: divide by the sum of the weights; None to do so if they are non-negative.
        scale: factor of the weights.
        query_offset: position of query 0 among the keys.
        key_mask: boolean (B, S), True where a key takes part.
        enable_gqa: allow Hq to be a multiple of H.
        return_stats: also return the statistics of the weights a.
        rows: source of the statistics, "sums" or "blockwise".
        eps: added to the normalising sum.
        chunk: number of rows per chunk of a causal scan.

    Returns:
        As :func:`linear_attention`.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a decay is outside (0, 1], shapes do not fit, or as above.

    Example:
        Without content the weights are 1, λ, λ², …:

        >>> import torch
        >>> ones = torch.ones(1, 1, 100, 1)
        >>> _, stats = decay_attention(
        ...     ones, ones, ones, decay=0.9, feature_map="relu", return_stats=True
        ... )
        >>> stats.effective_keys[0, 0, [0, 9, 99]]
        tensor([ 1.0000,  9.1757, 18.9990])

    Source:
        Sun et al. (2023), arXiv:2307.08621; Qin et al. (2022), arXiv:2210.10340.
    """
    check_inputs(query, key, value, check_flag("enable_gqa", enable_gqa))
    return _attend(
        query,
        key,
        value,
        feature_map=feature_map,
        decay=decay,
        is_causal=is_causal,
        normalize=normalize,
        scale=scale,
        query_offset=query_offset,
        key_mask=key_mask,
        enable_gqa=enable_gqa,
        return_stats=return_stats,
        rows=rows,
        eps=eps,
        chunk=chunk,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap,
    decay: float | Tensor | None,
    is_causal: bool,
    normalize: bool | None,
    scale: float,
    query_offset: int,
    key_mask: Tensor | None,
    enable_gqa: bool,
    return_stats: bool,
    rows: str,
    eps: float,
    chunk: int,
) -> Tensor | tuple[Tensor, WeightStatistics]:
    """Validate the call and compute its output and statistics in the requested form."""
    check_inputs(query, key, value, check_flag("enable_gqa", enable_gqa))
    check_flag("is_causal", is_causal)
    check_count("query_offset", query_offset, -(2**61))
    if rows not in ("sums", "blockwise"):
        raise ValueError(f"rows must be 'sums' or 'blockwise', got {rows!r}")
    call = make_call(
        query,
        key,
        value,
        feature_map=feature_map,
        decay=decay,
        scale=scale,
        key_mask=key_mask,
        chunk=chunk,
        normalize=normalize,
        eps=eps,
        row_start=query_offset,
        key_start=0,
    )
    squares = check_flag("return_stats", return_stats) and rows == "sums"
    row_sums = (causal if is_causal else full)(call, query_offset, squares=squares)
    out = row_sums.sums.values.flatten(1, 2)
    if not return_stats:
        return out
    if squares:
        return out, WeightStatistics(weight_sums(row_sums, call.feature_map.nonnegative))
    return out, WeightStatistics(blockwise(call, is_causal=is_causal, offset=query_offset))
