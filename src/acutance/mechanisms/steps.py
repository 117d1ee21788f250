"""Linear attention step by step, with a state of fixed size."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from acutance.mechanisms.call import make_call
from acutance.mechanisms.feature_maps import AnyMap
from acutance.mechanisms.forms import onwards, remembered
from acutance.mechanisms.linear import CHUNK
from acutance.mechanisms.state import LinearState, begin, in_units, keeps_squares, weight_sums
from acutance.rowstats.weighted import WeightStatistics
from acutance.shapes import check_flag, check_inputs, describe

__all__ = ["linear_state", "linear_step"]


def linear_state(
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    decay: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    statistics: bool = False,
) -> LinearState:
    """The state after a prompt's keys, from which :func:`linear_step` continues.

    Args:
        key: (B, H, S, E); S may be 0, for the state before any key.
        value: (B, H, S, Ev).
        feature_map: as in the following steps.
        decay: as in the following steps; (Hq,) if query heads share key heads.
        key_mask: boolean (B, S), True where a key takes part.
        statistics: also store the sums for later rows' statistics, F × F numbers per head.

    Returns:
        The state, in float64 for float64 keys and float32 otherwise.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if shapes do not fit, or a decay is outside (0, 1].

    Example:
        >>> import torch
        >>> key, value = torch.rand(1, 2, 10, 4), torch.rand(1, 2, 10, 3)
        >>> state = linear_state(key, value)
        >>> state.values.shape, state.n.tolist()
        (torch.Size([1, 2, 1, 4, 3]), [10])
    """
    check_inputs(key, key, value, False)
    heads = decay.numel() if isinstance(decay, Tensor) and decay.dim() else key.shape[1]
    if key.shape[1] and heads % key.shape[1]:
        raise ValueError(
            "decay must have one number for each query head, a multiple of the key heads "
            f"H={key.shape[1]}, got {heads}"
        )
    call = make_call(
        key[:, :, :0].repeat_interleave(heads // max(1, key.shape[1]), 1),
        key,
        value,
        feature_map=feature_map,
        decay=decay,
        scale=1.0,
        key_mask=key_mask,
        chunk=CHUNK,
        normalize=None,
        eps=0.0,
        row_start=0,
        key_start=0,
    )
    state = begin(
        call.empty_features(), check_flag("statistics", statistics), in_units=call.in_units
    )
    return remembered(call, state, call.keys, call.keys)


@overload
def linear_step(
    state: LinearState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    decay: float | Tensor | None = None,
    normalize: bool | None = None,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: Literal[False] = False,
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, LinearState]: ...


@overload
def linear_step(
    state: LinearState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    decay: float | Tensor | None = None,
    normalize: bool | None = None,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: Literal[True],
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, LinearState, WeightStatistics]: ...


def linear_step(
    state: LinearState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap = "elu1",
    decay: float | Tensor | None = None,
    normalize: bool | None = None,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    return_stats: bool = False,
    eps: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, LinearState] | tuple[Tensor, LinearState, WeightStatistics]:
    """Causal linear attention of new tokens, continuing a state.

    Prompts in pieces and single tokens give the same outputs as one causal call.

    Args:
        state: from :func:`linear_state` or the previous step, with the same feature map and decay.
        query: (B, Hq, L, E), L new tokens.
        key: (B, H, L, E), of the same tokens.
        value: (B, H, L, Ev).
        feature_map: this and the options below as in :func:`linear_attention`.
        decay: λ, as in :func:`decay_attention`; None for no decay.
        normalize: divide by the sum of the weights; None to do so if they are non-negative.
        scale: factor of the weights.
        key_mask: boolean (B, L), True where a new key takes part.
        enable_gqa: allow Hq to be a multiple of H.
        return_stats: also return the statistics of the new rows; needs a state with
            ``statistics=True``.
        eps: added to the normalising sum.
        chunk: number of rows per chunk of a causal scan.

    Returns:
        Output (B, Hq, L, Ev), the new state and, with ``return_stats``, the statistics.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if shapes do not fit each other or the state.

    Example:
        >>> import torch
        >>> from acutance.mechanisms import linear_attention
        >>> q, k, v = torch.randn(3, 1, 2, 6, 4).unbind(0)
        >>> state = linear_state(k[:, :, :5], v[:, :, :5])
        >>> out, state = linear_step(state, q[:, :, 5:], k[:, :, 5:], v[:, :, 5:])
        >>> torch.allclose(out, linear_attention(q, k, v, is_causal=True)[:, :, 5:], atol=1e-6)
        True
    """
    check_inputs(query, key, value, check_flag("enable_gqa", enable_gqa))
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"a step must have a key for each query: query has L={query.shape[2]}, key has "
            f"S={key.shape[2]} ({describe(query=query, key=key)})"
        )
    if check_flag("return_stats", return_stats) and not keeps_squares(state):
        raise ValueError(
            "return_stats needs sums of squares: create the state with linear_state(..., "
            "statistics=True)"
        )
    place = int(state.position)
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
        row_start=place,
        key_start=place,
    )
    fresh = begin(call.empty_features(), keeps_squares(state))
    for name in ("values", "keys", "squares", "n"):
        had, needed = getattr(state, name), getattr(fresh, name)
        if had.shape != needed.shape or had.dtype != needed.dtype:
            raise ValueError(
                f"the state has different heads, widths, feature map or decay: its {name} are "
                f"{had.dtype} {tuple(had.shape)}, these tokens need {needed.dtype} "
                f"{tuple(needed.shape)}"
            )
    found, after = onwards(call, in_units(state) if call.in_units else state)
    out = found.sums.values.flatten(1, 2)
    if not return_stats:
        return out, after
    return out, after, WeightStatistics(weight_sums(found, call.feature_map.nonnegative))
