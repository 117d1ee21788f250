"""Faults of an attention's computation that no change of its arguments describes.

Such as scores rounded to 16 bits, or sinks that meet a log-sum-exp in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides

_MOST_SCORES = 1 << 26  # of calls that are recomputed whole
_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Fault(NamedTuple):
    """A computation with one fault.

    Attributes:
        output: returns its output (B, Hq, L, Ev) and the largest score of each row (B, Hq, L).
        kind: a short name of the cause, such as ``"scores rounded"``.
        agrees: the fault as a condition: "the scores are rounded to bfloat16".
        means: what it suggests if the outputs then agree.
        rounds: whether it rounds, so that some rows may round differently.
    """

    output: Callable[[], tuple[Tensor, Tensor]]
    kind: str
    agrees: str
    means: str
    rounds: bool = False


def faults_of(call: AttentionCall) -> Iterator[Fault]:
    """Candidate faults of a call, likeliest first; none of a call too large to recompute whole."""
    batch, heads, queries, _ = call.query.shape
    if batch * heads * queries * call.key.shape[2] > _MOST_SCORES or call.moved:
        return
    if call.sinks is not None:
        for base, factor in (("2", 1 / math.log(2)), ("2 and is taken for base e", math.log(2))):
            means = "it seems to mix logarithms of base 2 and base e"
            agrees = f"the sinks are weighed against a log-sum-exp in base {base}"
            yield Fault(_sinks_against(call, factor), "sinks against log2", agrees, means)
    means = "it seems to give hidden keys a score of 0"
    agrees = "hidden keys count with a score of 0"
    yield Fault(_with(call, hidden=0.0), "hidden keys counted", agrees, means)
    if call.softcap is not None:
        means = "it seems to apply the softcap first"
        agrees = "the softcap is applied before the scale"
        yield Fault(_with(call, cap_first=True), "softcap before scale", agrees, means)
    for dtype, name in _NARROW.items():
        for part, words in (
            ("scores", "the scores are"),
            ("weights", "the weights are"),
            ("inputs", "queries and keys are"),
        ):
            means = f"it seems to compute its {part} in {name}"
            kind, agrees = f"{part} rounded", f"{words} rounded to {name}"
            narrow: dict[str, Any] = {part: dtype}
            yield Fault(_with(call, **narrow), kind, agrees, means, rounds=True)


def visible_keys(call: AttentionCall) -> Tensor:
    """Which keys each row of a call sees, boolean (B, 1 or Hq, L, S).

    Example:
        >>> x = torch.zeros(1, 1, 3, 2)
        >>> visible_keys(AttentionCall("layer", "", x, x, x, is_causal=True, window=2)).int()
        tensor([[[[1, 0, 0],
                  [1, 1, 0],
                  [0, 1, 1]]]], dtype=torch.int32)
    """
    batch, queries, keys = len(call.query), call.query.shape[2], call.key.shape[2]
    device = call.query.device
    rows = torch.arange(queries, device=device).expand(batch, queries)
    seen = call.seen_by_position(rows)
    visible = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=device)
    visible = visible if seen is None else visible & seen
    for mask in (call.attn_mask, call.bias):
        if mask is not None:
            visible = visible & (
                mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
            )
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, None, :]
    return visible


def dense_scores(
    call: AttentionCall, *, cap_first: bool = False, inputs: torch.dtype | None = None
) -> Tensor:
    """Scores of a call in float64 with masks' biases, (B, Hq, L, S), before keys are hidden.

    Args:
        call: the call.
        cap_first: whether the softcap is applied before the scale.
        inputs: dtype to round queries and keys to; None for none.
    """
    query, key = (_rounded(part.double(), inputs) for part in (call.query, call.key))
    products = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    factor, cap = call.factor, call.softcap
    if cap is not None and cap_first:
        scores = cap * torch.tanh(products / cap) * factor
    else:
        scores = products * factor
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
    for mask in (call.bias, call.attn_mask):
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + torch.where(hides(mask), 0.0, mask.double())
    return scores


def _with(
    call: AttentionCall,
    *,
    hidden: float = -torch.inf,
    cap_first: bool = False,
    inputs: torch.dtype | None = None,
    scores: torch.dtype | None = None,
    weights: torch.dtype | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that computes the call with what is given in place of the right computation.

    Args:
        call: the call.
        hidden: score of the keys that masks hide.
        cap_first: whether the softcap is applied before the scale.
        inputs: dtype to round queries and keys to; None for none.
        scores: dtype to round scores to; None for none.
        weights: dtype to round weights to; None for none.
    """

    def output() -> tuple[Tensor, Tensor]:
        full = _rounded(dense_scores(call, cap_first=cap_first, inputs=inputs), scores)
        full = full.masked_fill(~visible_keys(call), hidden)
        joined = _with_sinks(call, full)
        probabilities = joined.softmax(-1).nan_to_num(0.0)[..., : full.shape[-1]]
        group = call.query.shape[1] // call.value.shape[1]
        value = call.value.double().repeat_interleave(group, 1)
        return _rounded(probabilities, weights) @ value, full.amax(-1)

    return output


def _sinks_against(call: AttentionCall, factor: float) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that weighs the sinks against the log-sum-exp times a factor."""

    def output() -> tuple[Tensor, Tensor]:
        scores = dense_scores(call).masked_fill(~visible_keys(call), -torch.inf)
        assert call.sinks is not None
        share = torch.sigmoid(scores.logsumexp(-1) * factor - call.sinks.double().view(1, -1, 1))
        group = call.query.shape[1] // call.value.shape[1]
        value = call.value.double().repeat_interleave(group, 1)
        return (scores.softmax(-1).nan_to_num(0.0) @ value) * share.unsqueeze(-1), scores.amax(-1)

    return output


def _with_sinks(call: AttentionCall, scores: Tensor) -> Tensor:
    """Scores with the sinks as one more key."""
    if call.sinks is None:
        return scores
    sinks = call.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1)


def _rounded(part: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor rounded to a dtype and widened again; itself for None."""
    return part if dtype is None else part.to(dtype).to(part.dtype)
