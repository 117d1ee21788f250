"""Attention and its metrics from their definitions alone, and how far a result may be off.

In float64, every score at once; no code is shared with the library.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

METRICS = (
    "n_keys", "max_logit", "lse", "entropy", "varentropy", "effective_keys", "collision",
    "top_weight", "first_weight", "logit_mean", "logit_std", "sink_mass",
)  # fmt: skip


def truth(mask: Tensor) -> Tensor:
    """Booleans by their bytes: every one that is not 0 is true."""
    return mask.view(torch.uint8) != 0


def hides(mask: Tensor) -> Tensor:
    """What an additive value hides, as documented: −inf, −1e9 in its dtype, float16's lowest."""
    if mask.dtype == torch.float16:
        return mask <= torch.finfo(torch.float16).min / 2
    return mask.double() <= torch.tensor(-1e9, dtype=mask.dtype).double()


def oracle(tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and every metric, from their definitions: float64, every score at once."""
    q, k, v = (x.double() for x in tensors)
    B, Hq, L, E = q.shape
    S, group = k.shape[2], Hq // k.shape[1]
    if "key_mask" in options:  # a hidden key takes no part, whatever it holds
        shown = truth(options["key_mask"])[:, None, :, None]
        k, v = torch.where(shown, k, 0.0), torch.where(shown, v, 0.0)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("scale", E**-0.5)
    s = scale * torch.einsum("bhie,bhje->bhij", q, k)
    size = abs(scale) * torch.einsum("bhie,bhje->bhij", q.detach().abs(), k.detach().abs())
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    seen = torch.ones_like(s, dtype=torch.bool)
    place = torch.arange(L)[:, None] + options.get("query_offset", 0)
    away = place - torch.arange(S)
    added = torch.zeros_like(size)
    for name in ("attn_mask", "bias"):
        mask = options.get(name)
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & truth(mask)
        elif mask is not None:
            seen = seen & ~hides(mask)
            part = torch.where(hides(mask), 0.0, mask.double())
            s, added = s + part, added + part.abs()
    if "alibi_slopes" in options:
        part = options["alibi_slopes"].double()[:, None, None] * away.abs()
        s, added = s - part, added + part
    if options.get("is_causal"):
        seen = seen & (away >= 0)
    if "window" in options:
        seen = seen & (away.abs() < options["window"])
    if "key_mask" in options:
        seen = seen & truth(options["key_mask"])[:, None, None]
    if "document_ids" in options:
        mine, theirs = options["document_ids"]
        seen = seen & (mine[:, :, None] == theirs[:, None])[:, None]
    n = seen.sum(-1)
    some = n > 0
    s = torch.where(seen, s, -math.inf)
    safe = torch.where(some[..., None], s, 0.0) if S else s
    sink = options.get("sinks")
    extra = safe.new_full((B, Hq, L, 1), -math.inf)
    if sink is not None:
        extra = sink.double().view(1, -1, 1, 1).expand(B, Hq, L, 1)
    every = torch.cat([safe, extra], -1)
    if not S:
        every = torch.cat([torch.zeros_like(extra), extra], -1)
    p = torch.softmax(every, -1)
    keys = torch.where(seen, p[..., :S], 0.0)
    logs = torch.where(p > 0, torch.log(torch.where(p > 0, p, 1.0)), 0.0)
    entropy = -(p * logs).sum(-1)
    away2 = torch.where(p > 0, logs + entropy[..., None], 0.0)
    varentropy = (p * away2.square()).sum(-1)
    collision = p.square().sum(-1)
    plain = torch.where(seen, s, 0.0)
    mean = plain.sum(-1) / n.clamp(min=1)
    spread = torch.where(seen, plain - mean[..., None], 0.0).square().sum(-1) / n.clamp(min=1)
    first = keys.gather(-1, seen.byte().argmax(-1, keepdim=True))[..., 0] if S else mean
    lowest = torch.full_like(mean, -math.inf)
    found = {
        "n_keys": n.double(),
        "max_logit": s.amax(-1) if S else lowest,
        "lse": torch.where(some, torch.logsumexp(every, -1), lowest),
        "entropy": entropy,
        "varentropy": varentropy,
        "effective_keys": 1 / collision,
        "collision": collision,
        "top_weight": keys.amax(-1) if S else mean,
        "first_weight": first,
        "logit_mean": mean,
        "logit_std": spread.clamp(min=0).sqrt(),
        "sink_mass": torch.where(p[..., -1] > 0, p[..., -1], 0.0),
    }
    for name in METRICS[3:]:
        found[name] = torch.where(some, found[name], math.nan)
    out = torch.where(some[..., None], keys @ v, 0.0)
    found |= bounds(tensors[0].dtype, E, size + added, seen, plain, every, p, away2, found, v)
    return out, found


def bounds(
    dtype: torch.dtype, width: int, size: Tensor, seen: Tensor, plain: Tensor,
    every: Tensor, p: Tensor, away: Tensor, found: dict[str, Tensor], v: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """How far each result may be off: "±name", of the rows' shape, "±out" of the output's.

    A score is off by δ: its E products and what is added, in the precision u of the sums. Its
    exponential by ε = δ + rounding of the exponent. Sums of n terms add r = (n + 16) u. A metric f
    is off by Σ |∂f/∂s_j| ε, a rounding r of its own terms, and the higher orders, covered by 2.
    """
    u = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    big = torch.where(seen, size, 0.0).flatten(3).sum(-1) * 0
    if size.shape[-1]:
        big = torch.where(seen, size, 0.0).amax(-1)
    top = every.amax(-1).abs().nan_to_num(0.0, posinf=0.0)
    delta = u * ((width + 8) * big + 4 * top)
    H, V = (found[name].nan_to_num(0.0) for name in ("entropy", "varentropy"))
    eps = delta + 8 * u * (1 + H + V.sqrt() + top * (p < 1).any(-1))
    r = u * (every.shape[-1] + 16)
    slope_H = (p * away.abs()).sum(-1)
    slope_V = (p * (away.square() - V[..., None] + 2 * away).abs()).sum(-1)
    n = found["n_keys"]
    level = torch.where(seen, plain, 0.0).abs().flatten(3).sum(-1) / n.clamp(min=1)
    std = found["logit_std"].nan_to_num(0.0)
    rows = {
        "n_keys": torch.zeros_like(n),
        "max_logit": 2 * delta + 4 * u * top,
        "lse": 2 * (eps + r),
        "entropy": 2 * (eps * (slope_H + eps) + r * (1 + H + slope_H)),
        "varentropy": 2 * (eps * (slope_V + eps) + 4 * r * (1 + V + slope_V)),
        "effective_keys": 2 * (4 * eps + 3 * r) * found["effective_keys"].nan_to_num(1.0),
        "collision": 2 * (4 * eps + 3 * r) * found["collision"].nan_to_num(1.0),
        "top_weight": 2 * (2 * eps + r) * found["top_weight"].nan_to_num(1.0) + u,
        "first_weight": 2 * (2 * eps + r) * found["first_weight"].nan_to_num(1.0) + u,
        "logit_mean": 2 * (delta + r * level) + 4 * u * top,
        "logit_std": 2 * (delta + r * (std + level)) + 16 * u * top,
        "sink_mass": 2 * (2 * eps + r) * found["sink_mass"].nan_to_num(1.0) + u,
    }
    keys = torch.where(seen, p[..., : seen.shape[-1]], 0.0)
    weight = keys @ v.detach().abs()
    narrow = torch.finfo(dtype).eps * weight + torch.finfo(dtype).tiny
    out = 2 * (4 * eps + r).unsqueeze(-1) * weight + 2 * narrow
    return {f"±{name}": part.detach() for name, part in {**rows, "out": out}.items()}
