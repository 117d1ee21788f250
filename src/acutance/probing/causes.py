"""Why a rebuilt output differs from the model's: likely causes, each tried on the call itself.

A cause is a change of the captured arguments under which the output agrees, such as a call without
its sinks. What agrees is evidence, not proof: two causes may give the same output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, differences
from acutance.masks import hides

__all__ = ["likely_cause"]

_DROPPED = {
    "sinks": ("the sinks are left out", "it seems to drop them"),
    "window": ("the window is left out", "it seems to ignore it"),
    "softcap": ("the softcap is left out", "it seems to drop it"),
    "bias": ("the bias is left out", "it seems to ignore it"),
    "key_mask": ("padding is included", "it seems to ignore its mask"),
    "attn_mask": ("the mask is left out", "it seems to ignore it"),
    "cu_seqlens": ("documents see each other", "it seems to ignore their lengths"),
}
#: Where modules and configurations keep what a call may have been made without.
_KEPT_IN = {
    "window": ("sliding_window", "window_size"),
    "softcap": ("attn_logit_softcapping", "logits_soft_cap", "softcap"),
    "scale": ("scaling", "scale", "softmax_scale"),
    "sinks": ("sinks", "attention_sinks"),
}


def likely_cause(
    call: AttentionCall, theirs: Tensor, kept: Tensor, module: torch.nn.Module | None = None
) -> str:
    """The end of a sentence that names a change under which a call's output agrees.

    Args:
        call: whose rebuilt output differs.
        theirs: the model's output, (B, Hq, L, Ev).
        kept: boolean (B, Hq, L), rows that count.
        module: whose call it is; its attributes and configuration are tried too.

    Returns:
        Words, empty where nothing that was tried agrees.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> call = AttentionCall("layer", "", x, x, x, scale=0.1)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> likely_cause(call, theirs, torch.ones(1, 2, 5, dtype=torch.bool))
        'the output agrees if the scale is 0.5, 1/√d: it seems not to use the given 0.1'
    """
    for changes, agrees, means in _changes(call, module):
        changed = replace(call, **changes)
        try:
            rebuilt, stats = changed.rebuilt(False)
            errors, tolerance = differences(changed, rebuilt, stats.state.m, theirs, kept)
        except (ValueError, RuntimeError):  # a change that does not fit this call
            continue
        if bool((errors <= tolerance).all()):
            return f"the output agrees if {agrees}: {means}"
    return ""


_Change = tuple[dict[str, Any], str, str]


def _changes(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[_Change]:
    """Changes of a call, the likeliest first, with what they are and what they mean."""
    left_out = [name for name in _DROPPED if getattr(call, name) is not None]
    for name in left_out:
        yield {name: None}, *_DROPPED[name]
    yield from _windows(call)
    yield from _scales(call, module)
    yield from _added(call, module)
    yield from _causal(call)
    if call.bias is not None and call.bias.is_floating_point():
        means = "it seems to multiply both by the scale"
        yield {"bias": call.bias * call.factor}, "the bias is added before the scale", means
    group = call.query.shape[1] // call.key.shape[1]
    if group > 1 and call.key.shape[1] > 1:
        turned = {name: getattr(call, name).repeat(1, group, 1, 1) for name in ("key", "value")}
        yield (
            turned,
            "query heads are assigned to key heads in turn",
            "it seems to group heads differently",
        )
    for names in itertools.combinations(left_out, 2):
        agrees = " and ".join(_DROPPED[name][0] for name in names)
        yield dict.fromkeys(names), agrees, "it seems to ignore both"


def _windows(call: AttentionCall) -> Iterator[_Change]:
    """Windows off by one, in the call's ``window`` or its mask."""
    if call.window is not None:
        for window in (call.window + 1, call.window - 1):
            means = f"it seems to count the window differently from the given {call.window}"
            yield {"window": window}, f"the window is {window} keys", means
    mask, queries, keys = call.attn_mask, call.query.shape[2], call.key.shape[2]
    if mask is None or mask.dim() != 4 or mask.shape[-2:] != (queries, keys):
        return
    seen = mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
    places = torch.arange(queries, device=mask.device)[:, None] + (keys - queries)
    away = places - torch.arange(keys, device=mask.device)
    last = int(torch.where(seen, away, 0).max())
    if last + 1 >= keys:  # no window: the last row sees the first key
        return
    means = f"it seems to count the window differently from the {last + 1} of its mask"
    for window, wider in (
        (last + 2, seen | (away == last + 1)),
        (last, seen & (away < last)),
        (0, seen | (away > last)),
    ):
        what = f"the window is {window} keys" if window else "the mask has no window"
        yield {"attn_mask": wider}, what, means if window else "it seems to ignore it"


def _scales(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[_Change]:
    """Other factors of the scores."""
    width = call.query.shape[-1]
    named = [(width**-0.5, ", 1/√d"), (1.0, ""), (1 / width, ", 1/d")]
    kept = _kept_in(module, "scale")
    for factor in (kept, kept**-0.5 if isinstance(kept, int | float) and kept > 0 else None):
        if isinstance(factor, int | float):
            named.append((float(factor), f", from the module's {kept:g}"))
    for factor, said in named:
        if abs(factor - call.factor) > 1e-6 * abs(call.factor):
            means = f"it seems not to use the given {call.factor:.4g}"
            yield {"scale": factor}, f"the scale is {factor:.4g}{said}", means


def _added(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[_Change]:
    """Sinks, window and softcap that the module has but the call was made without."""
    for name in ("sinks", "window", "softcap"):
        value = _kept_in(module, name) if getattr(call, name) is None else None
        if name == "sinks":
            fits = isinstance(value, Tensor) and value.numel() == call.query.shape[1]
            if fits and isinstance(value, Tensor):
                means = "the call does not pass them"
                yield {name: value.detach().reshape(-1)}, "the module's sinks are included", means
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            kind = {"window": int, "softcap": float}[name]
            means = "the call does not pass it"
            yield {name: kind(value)}, f"the module's {name} of {value:g} is applied", means


def _causal(call: AttentionCall) -> Iterator[_Change]:
    """A causal mask that is not there, that is, or that is aligned to the other end."""
    end = call.key.shape[2] - call.query.shape[2]
    if call.is_causal:
        yield {"is_causal": False}, "it is not causal", "it seems to ignore is_causal"
    elif call.cu_seqlens is None:
        means = "it seems to hide later keys by itself"
        yield {"is_causal": True, "query_offset": end}, "it is causal", means
    if end and (call.is_causal or call.window is not None):
        offset, where = (0, "first") if call.query_offset else (end, "last")
        means = f"it seems to count positions from the {where} key"
        yield {"query_offset": offset}, f"query 0 is at key {offset}", means
    if call.attn_mask is not None and not call.is_causal:
        means = "it seems to use only the causal part"
        changes = {"attn_mask": None, "is_causal": True, "query_offset": end}
        yield changes, "the mask is only causal", means


def _kept_in(module: torch.nn.Module | None, name: str) -> Any:
    """Value of an argument in a module or its configuration; None if there is none."""
    for holder in (module, getattr(module, "config", None)):
        for attribute in _KEPT_IN[name]:
            try:
                value = getattr(holder, attribute, None)
            except RuntimeError:  # layers have values of their own, says the configuration
                continue
            if value is not None:
                return value
    return None
