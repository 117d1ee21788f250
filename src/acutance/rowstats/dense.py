r"""Reference implementation: every statistic in float64 on the whole score matrix, by definition.

It shares no code with the sums: the mask is one dense boolean matrix, the softmax is computed in
full, and each metric is its textbook formula. It needs L × S numbers per head and is meant for
tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.masks import MaskOptions, shows
from acutance.rowstats.gaussian import expected_entropy

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["dense_statistics"]


def dense_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **masks: Unpack[MaskOptions],
) -> dict[str, Tensor]:
    r"""Metrics of softmax attention rows by definition, from the full matrix in float64.

    These are all of :data:`acutance.METRICS` but ``keys_50`` to ``keys_99``. The options below are
    as in :func:`acutance.attention`, but are not checked. Differentiable unless a visible weight
    underflows to exactly 0.

    Args:
        query: (B, Hq, L, E), any floating dtype, converted to float64.
        key: (B, H, S, E).
        value: (B, H, S, Ev); without it there is no ``noise_gain`` and no ``output``.
        attn_mask: boolean or additive; this and the options below as in :func:`acutance.attention`.
        is_causal: the row of query i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None for 1/√E.
        enable_gqa: allow Hq to be a multiple of H.
        softcap: bound of the scaled scores.
        sinks: (Hq,) logits that are added to the softmax's denominator, without a key.
        masks: ``query_offset``, ``window``, ``key_mask``, ``document_ids``, ``cu_seqlens``,
            ``bias`` and ``alibi_slopes``.

    Returns:
        By name, each metric (B, Hq, L) in float64 (``n_keys`` int64) and, with values, ``output``
        (B, Hq, L, Ev). For a row with no visible key, ``output`` and ``n_keys`` are 0, ``lse`` and
        ``max_logit`` −inf, and all other metrics NaN.

    Example:
        >>> query = torch.zeros(1, 1, 3, 8)
        >>> dense_statistics(query, query, is_causal=True)["effective_keys"]
        tensor([[[1., 2., 3.]]], dtype=torch.float64)
    """
    visible = _visible(query, key, attn_mask, is_causal, **masks)
    bias, slopes = masks.get("bias"), masks.get("alibi_slopes")
    added = [part for part in (attn_mask, bias) if part is not None and part.dtype != torch.bool]
    group = query.shape[1] // max(1, key.shape[1]) if enable_gqa else 1
    s = query.double() @ key.double().repeat_interleave(group, 1).transpose(-1, -2)
    s = s * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        distance = _distance(query, key, masks.get("query_offset", 0)).abs()
        s = s - slopes.double()[:, None, None] * distance
    for part in added:
        s = s + part.double()
    s = s.masked_fill(torch.logical_not(visible), 0.0)  # hidden scores are never looked at

    with_sink = None
    if sinks is not None:
        with_sink = sinks.double()[:, None, None].expand(*s.shape[:-1], 1)
    return _metrics(s, visible, with_sink, value, group)


def _metrics(
    s: Tensor, visible: Tensor, sink: Tensor | None, value: Tensor | None, group: int
) -> dict[str, Tensor]:
    """Every metric from scores (B, Hq, L, S) that are finite, with 0 at hidden keys."""
    count = visible.sum(-1)
    none = count == 0
    n = count.double().masked_fill(none, torch.nan)
    hidden = torch.logical_not(visible)
    outcomes, seen = s.masked_fill(hidden, -torch.inf), visible
    if sink is not None:
        outcomes = torch.cat([outcomes, sink], -1)
        seen = torch.cat([seen, sink != -torch.inf], -1)  # a sink of −inf is none
    # a row without keys gets one outcome, so that its gradient is 0 and not NaN; its results go
    # below
    no_gradient = none.unsqueeze(-1) & (torch.arange(seen.shape[-1], device=s.device) == 0)
    outcomes = torch.where(no_gradient, 0.0, outcomes)
    p = torch.softmax(outcomes, -1)
    log_p = torch.log_softmax(outcomes, -1).masked_fill(torch.logical_not(seen), 0.0)
    lse = torch.logsumexp(outcomes, -1)
    keys_p = p[..., : s.shape[-1]]

    entropy = -torch.xlogy(torch.where(seen, p, 1.0), torch.where(seen, p, 1.0)).sum(-1)
    varentropy = (p * (log_p - (p * log_p).sum(-1, keepdim=True)).square()).sum(-1)
    collision = p.square().sum(-1)
    if s.shape[-1]:
        top = torch.where(none, -torch.inf, s.masked_fill(hidden, -torch.inf).amax(-1))
        first = visible.double().argmax(-1, keepdim=True)  # the earliest of equals
        first_weight = keys_p.gather(-1, first).squeeze(-1)
        top_weight = keys_p.masked_fill(hidden, 0.0).amax(-1)
    else:
        top = torch.full_like(n, -torch.inf)
        first_weight = top_weight = torch.full_like(n, torch.nan)
    mean = s.sum(-1) / n
    deviations = (s - mean.unsqueeze(-1)).masked_fill(hidden, 0.0)
    spread = deviations.square().sum(-1)
    # the slope of √ at 0 is infinite, that of the standard deviation of one key is 0
    std = torch.where(spread > 0, (torch.where(spread > 0, spread, 1.0) / n).sqrt(), spread)
    everything = s if sink is None else torch.cat([s, sink], -1)
    weighted_mean = torch.where(seen, p * everything, 0.0).sum(-1)

    metrics = {
        "n_keys": count,
        "entropy": entropy,
        "normalized_entropy": torch.where(
            count == 1, torch.nan, entropy / torch.where(count == 1, 1.0, n.log())
        ),
        "information": n.log() - entropy,
        "effective_keys": 1 / collision,
        "sparsity": (p.sum(-1) / n) / (collision / n).sqrt(),  # E|a| / √E[a²]
        "collision": collision,
        "top_weight": top_weight,
        "first_weight": first_weight,
        "sink_mass": torch.zeros_like(n) if sink is None else p[..., -1],
        "max_logit": top,
        "lse": lse,
        "logit_mean": mean,
        "logit_std": std,
        "varentropy": varentropy,
        "entropy_slope": -(p * (log_p + entropy.unsqueeze(-1)).square()).sum(-1),
        "mean_field_entropy": n.log() - (top - mean),
        "jensen_gap": lse - n.log() - mean,
        "max_gap": top - weighted_mean,
        "gaussian_entropy": expected_entropy(n, std),
        **_first_versus_rest(s, visible),
        "jacobian_trace": (p * (1 - p)).sum(-1),
    }
    if value is not None:
        v = value.double().repeat_interleave(group, 1)
        output = keys_p @ v
        metrics["noise_gain"] = _noise_gain(keys_p, v, output)
        metrics["output"] = torch.where(none.unsqueeze(-1), 0.0, output)
    otherwise = {"n_keys": 0, "max_logit": -torch.inf, "lse": -torch.inf}
    return {
        name: values
        if name == "output"
        else torch.where(none, otherwise.get(name, torch.nan), values).to(values.dtype)
        for name, values in metrics.items()
    }


def _first_versus_rest(s: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """Metrics that compare the first visible key with the others; NaN for a single key."""
    several = visible.sum(-1) > 1
    safe = torch.where(several.unsqueeze(-1), s, 0.0)
    if not s.shape[-1]:
        nothing = safe.sum(-1) + torch.nan
        return dict.fromkeys(("first_gap", "rest_logit_std", "rest_jensen_gap"), nothing)
    at = visible.double().argmax(-1, keepdim=True)
    others = visible.scatter(-1, at, False)
    shown = torch.where(several.unsqueeze(-1), others, torch.arange(s.shape[-1]) == 0)
    count = shown.sum(-1).double()
    lse = torch.logsumexp(safe.masked_fill(torch.logical_not(shown), -torch.inf), -1)
    mean = safe.masked_fill(torch.logical_not(shown), 0.0).sum(-1) / count
    spread = (safe - mean.unsqueeze(-1)).masked_fill(torch.logical_not(shown), 0.0).square().sum(-1)
    metrics = {
        "first_gap": safe.gather(-1, at).squeeze(-1) - lse,
        "rest_logit_std": torch.where(
            spread > 0, (torch.where(spread > 0, spread, 1.0) / count).sqrt(), spread
        ),
        "rest_jensen_gap": lse - count.log() - mean,
    }
    return {name: torch.where(several, value, torch.nan) for name, value in metrics.items()}


def _noise_gain(p: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """Σ_j p_j² Σ_e (v_je − o_e)² for each row, one query at a time to save memory."""
    rows = [
        (p[:, :, i].square().unsqueeze(-1) * (value - output[:, :, i : i + 1]).square()).sum(
            (-1, -2)
        )
        for i in range(p.shape[2])
    ]
    return torch.stack(rows, -1) if rows else p.new_zeros(p.shape[:3])


def _distance(query: Tensor, key: Tensor, offset: int) -> Tensor:
    """Position of each query minus position of each key, (L, S)."""
    positions = torch.arange(query.shape[2], device=query.device) + offset
    return positions[:, None] - torch.arange(key.shape[2], device=query.device)[None, :]


def _visible(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Boolean (B, Hq, L, S), True where a key is visible; slopes hide none."""
    batch, heads, queries, _ = query.shape
    seen = torch.ones(batch, heads, queries, key.shape[2], dtype=torch.bool, device=query.device)
    before = _distance(query, key, query_offset)
    if is_causal:
        seen = seen & (before >= 0)
    if window is not None:
        seen = seen & (before < window) & (before > -window)
    for part in (attn_mask, bias):
        if part is not None:
            seen = seen & shows(part)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if cu_seqlens is not None:
        lengths = cu_seqlens.long().diff()
        document_ids = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.cpu())
        document_ids = document_ids.to(query.device)
    if document_ids is not None:
        if isinstance(document_ids, tuple):
            rows, columns = document_ids
        else:
            columns = document_ids
            rows = columns[..., query_offset : query_offset + queries]
        same = rows[..., :, None] == columns[..., None, :]
        seen = seen & (same[:, None] if same.dim() == 3 else same)
    return seen
