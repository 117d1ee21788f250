"""The materialised way: every score of a call in one tensor.

It costs L × S numbers a head: for comparison, and for small calls under a debugger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.kernels.backward import row_coefficients
from acutance.kernels.call import ALL, Gradients, KernelCall, SumGradients, Sums, accumulate_dtype
from acutance.kernels.hidden import all_finite, hides_keys, value_gradient, zeroed
from acutance.kernels.tile_sums import finite
from acutance.masks import Masking, hides
from acutance.rowstats.state import observe_visible

__all__ = ["backward", "forward"]


def forward(call: KernelCall) -> Sums:
    """Output and row sums of softmax attention without dropout, from the full score matrix."""
    sums = _sums(call)
    # an operator's results share no memory
    return Sums(*(part.detach().clone() for part in sums))


def backward(
    grad: SumGradients, sums: Sums, call: KernelCall, wanted: tuple[bool, ...] = ALL
) -> Gradients:
    """What :func:`acutance.kernels.backward.backward` returns, from the full score matrix."""
    query, key, value, masking, rule, *_ = call
    dtype = accumulate_dtype(query.dtype)
    B, H, g, L = masking.batch, masking.heads, masking.group, masking.queries

    def rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(B, H, g, L, *tensor.shape[3:])

    grads = {
        name: None if part is None or not part.numel() else rows(part.to(dtype))
        for name, part in grad._asdict().items()
    }
    shape = (B, H * g, L)  # of sums that are there, also where there are no rows
    given = {
        name: rows(part)
        for name, part in sums._asdict().items()
        if part.numel() or part.shape == shape
    }
    sink = None if rule.sinks is None else rule.sinks.to(dtype).view(1, H, g, 1)
    found = row_coefficients(given, grads, sink)

    def each(part: Tensor | None) -> Tensor | float:
        return 0.0 if part is None else part.unsqueeze(-1)

    s, bend, seen = _scores(call)
    bend = None if bend is None else torch.where(seen, bend, 0.0)
    t = torch.where(seen, s - each(finite(given["m"])), 0.0)
    e = torch.where(seen, torch.exp(t), 0.0)
    inside = each(found.constant) + t * each(found.linear) + t * t * each(found.square)
    inside = inside + e * each(found.weight)
    dv = None
    if value is not None and grads["out"] is not None:
        dO = grads["out"] * each(found.inverse)
        inside = inside + dO @ value.to(dtype).unsqueeze(2).mT
        dv = value_gradient(e, dO, all_finite(dO)).sum(2)
    ds = torch.where(seen, e * inside + t * each(found.slope) + each(found.plain), 0.0)
    if grads["first"] is not None:
        place = given["first_index"].unsqueeze(-1) == torch.arange(masking.keys, device=s.device)
        ds = ds + torch.where(place, each(grads["first"]), 0.0)
    if grads["m"] is not None and masking.keys:
        top = torch.where(seen, s, -torch.inf).argmax(-1, keepdim=True)
        place = seen & (top == torch.arange(masking.keys, device=s.device))
        ds = ds + torch.where(place, each(grads["m"]), 0.0)
    dots = ds if bend is None else ds * bend

    def shared(tensor: Tensor | None, want: bool) -> Tensor | None:
        if tensor is None or not want:
            return None
        size = masking.spread(tensor).shape
        return ds.sum_to_size(size).reshape(tensor.shape).to(tensor.dtype)

    clean_key, clean_query = (zeroed(key), zeroed(query)) if hides_keys(masking) else (key, query)
    dq = (dots @ clean_key.to(dtype).unsqueeze(2)).reshape(query.shape) * rule.scale
    dk = (dots.mT @ rows(clean_query).to(dtype)).sum(2) * rule.scale
    dsinks = None
    if rule.sinks is not None and wanted[5]:
        none = torch.zeros_like(given["Z"])
        dsinks = (none if found.sink is None else found.sink).sum((0, 3)).reshape(-1)
        dsinks = dsinks.to(rule.sinks.dtype)
    if value is not None and wanted[2]:
        dv = torch.zeros_like(value) if dv is None else dv.to(value.dtype)
    return Gradients(
        query=dq.to(query.dtype) if wanted[0] else None,
        key=dk.to(key.dtype) if wanted[1] else None,
        value=dv if wanted[2] else None,
        attn_mask=shared(masking.attn_mask, wanted[3]),
        bias=shared(masking.bias, wanted[4]),
        sinks=dsinks,
    )


def _scores(call: KernelCall) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores (B, H, group, L, S), the softcap's derivative there, and True where a row sees a key.

    The second is None without a softcap.
    """
    query, key, _, masking, rule, *_ = call
    dtype = accumulate_dtype(query.dtype)
    q = query.to(dtype).reshape(masking.batch, masking.heads, masking.group, *query.shape[2:])
    s = (q @ key.to(dtype).unsqueeze(2).mT) * rule.scale
    bend = None
    if rule.softcap is not None:
        share = torch.tanh(s / rule.softcap)
        s, bend = rule.softcap * share, 1.0 - share.square()
    s, seen = _masked(s, masking)
    return s, bend, seen


def _sums(call: KernelCall) -> Sums:
    """The sums of every row from the whole score matrix."""
    query, _, value, masking, rule, noise, gaps = call
    dtype = accumulate_dtype(query.dtype)
    B, H, g, L = masking.batch, masking.heads, masking.group, masking.queries
    s, _, seen = _scores(call)
    state = observe_visible(s, seen, first_key=0, gaps=gaps)
    none = state.Z.detach().unsqueeze(-1)[..., :0]
    out, O, R1, R2 = (none,) * 4
    if value is not None:
        v = value.to(dtype).unsqueeze(2)
        m = finite(state.m.detach())
        e = torch.where(seen, torch.exp(torch.where(seen, s, 0.0) - m.unsqueeze(-1)), 0.0)
        normaliser = state.Z
        if rule.sinks is not None:
            normaliser = normaliser + torch.exp(rule.sinks.to(dtype).view(1, H, g, 1) - m)
        normaliser = torch.where((state.n > 0) & (normaliser > 0), normaliser, 1.0)
        out = (e @ v) / normaliser.unsqueeze(-1)
        if noise:
            O, R1, R2 = observe_visible(s, seen, v.unsqueeze(3), first_key=0)[-4:-1]
    elif noise:
        R2 = torch.zeros_like(state.Z)
    fields = {**state._asdict(), "out": out.to(query.dtype), "O": O, "R1": R1, "R2": R2}
    return Sums(
        *(fields[name].reshape(B, H * g, L, *fields[name].shape[4:]) for name in Sums._fields)
    )


def _masked(s: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    """Scores (B, H, group, L, S) with masks, biases and ALiBi added, and True for visible keys."""
    L, S = s.shape[-2:]
    position = torch.arange(L, device=s.device).unsqueeze(-1) + masking.offset
    distance = position - torch.arange(S, device=s.device)
    seen = torch.ones_like(s, dtype=torch.bool)
    if masking.alibi_slopes is not None:
        slopes = masking.alibi_slopes.to(s.dtype).view(masking.heads, masking.group, 1, 1)
        s = s - slopes * distance.abs()
    for added in masking.additive:
        hidden = hides(added)
        s = s + torch.where(hidden, 0.0, added).to(s.dtype)
        seen = seen & torch.logical_not(hidden)
    if masking.boolean is not None:
        seen = seen & masking.boolean
    if masking.causal:
        seen = seen & (distance >= 0)
    if masking.window is not None:
        seen = seen & (distance.abs() < masking.window)
    if masking.key_mask is not None:
        seen = seen & masking.key_mask[:, None, None, None]
    if masking.query_documents is not None and masking.key_documents is not None:
        same = masking.query_documents.unsqueeze(-1) == masking.key_documents.unsqueeze(-2)
        seen = seen & same[:, None, None]
    return s, seen
