"""Changes of a captured call's arguments that may explain why its output differs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides
from acutance.probing.faults import visible_keys

#: What each argument's absence is called, means, and suggests.
_DROPPED = {
    "sinks": ("sinks dropped", "the sinks are left out", "it seems to drop them"),
    "window": ("window ignored", "the window is left out", "it seems to ignore it"),
    "softcap": ("softcap missing", "the softcap is left out", "it seems to drop it"),
    "bias": ("bias ignored", "the bias is left out", "it seems to ignore it"),
    "key_mask": ("padding ignored", "padding is included", "it seems to ignore its mask"),
    "attn_mask": ("mask ignored", "the mask is left out", "it seems to ignore it"),
    "cu_seqlens": (
        "documents mixed",
        "documents see each other",
        "it seems to ignore their lengths",
    ),
}
#: Where modules and configurations keep what a call may have been made without.
_ATTRIBUTES = {
    "window": ("sliding_window", "window_size"),
    "softcap": ("attn_logit_softcapping", "logits_soft_cap", "softcap"),
    "scale": ("scaling", "scale", "softmax_scale"),
    "sinks": ("sinks", "attention_sinks"),
}


_LARGE = 1 << 20  # pairs of query and key above which only two changes are combined


class Change(NamedTuple):
    """Arguments to replace in a call.

    Attributes:
        arguments: new values by name.
        kind: a short name of the cause, such as ``"sinks dropped"``.
        agrees: the change as a condition: "the sinks are left out".
        means: what it suggests if the outputs then agree.
    """

    arguments: dict[str, Any]
    kind: str
    agrees: str
    means: str


def changes_of(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[Change]:
    """Candidate changes of a call, likeliest first.

    Args:
        call: the call.
        module: the attention module; values in its attributes and configuration are tried too.
    """
    present = [name for name in _DROPPED if getattr(call, name) is not None]
    for name in present:
        yield Change({name: None}, *_DROPPED[name])
    yield from _windows(call)
    yield from _scales(call, module)
    yield from _added(call, module)
    yield from _causal(call)
    yield from _mask_added(call)
    if call.sinks is not None:
        means = "it seems to use sinks that were not loaded"
        zeros = torch.zeros_like(call.sinks)
        yield Change({"sinks": zeros}, "sinks not loaded", "the sinks are 0", means)
        means = "it seems to multiply the sinks by the scale too"
        scaled = call.sinks * call.factor
        yield Change({"sinks": scaled}, "sinks scaled", "the sinks are scaled", means)
    if call.bias is not None and call.bias.is_floating_point():
        means = "it seems to multiply both by the scale"
        scaled = call.bias * call.factor
        yield Change({"bias": scaled}, "bias scaled", "the bias is added before the scale", means)
    yield from _groups(call)
    yield from _several(call, present)


def _several(call: AttentionCall, present: list[str]) -> Iterator[Change]:
    """Changes that leave several arguments out, or also add or remove causality."""
    parts: dict[str, tuple[dict[str, Any], str, str]] = {}
    for name in present:
        kind, agrees, _ = _DROPPED[name]
        parts[name] = {name: None}, kind, agrees
    end = call.key.shape[2] - call.query.shape[2]
    if call.is_causal:
        parts["is_causal"] = {"is_causal": False}, "not causal", "it is not causal"
    elif call.attn_mask is None:
        causal = {"is_causal": True, "query_offset": end}
        parts["is_causal"] = causal, "causal by itself", "it is causal"
    most = 2 if call.query.shape[2] * call.key.shape[2] > _LARGE else len(parts)
    for count in range(2, most + 1):
        for names in itertools.combinations(parts, count):
            arguments = {name: value for part in names for name, value in parts[part][0].items()}
            kind = " and ".join(parts[part][1] for part in names)
            agrees = " and ".join(parts[part][2] for part in names)
            means = "it seems to ignore both" if count == 2 else "it seems to ignore them"
            yield Change(arguments, kind, agrees, means)


def _groups(call: AttentionCall) -> Iterator[Change]:
    """Another assignment of query heads to key heads."""
    group = call.query.shape[1] // call.key.shape[1]
    if group == 1 or call.key.shape[1] == 1:
        return
    kind, means = "heads grouped differently", "it seems to group heads differently"
    in_turn = {name: getattr(call, name).repeat(1, group, 1, 1) for name in ("key", "value")}
    yield Change(in_turn, kind, "query heads are assigned to key heads in turn", means)
    first = {name: getattr(call, name)[:, :1] for name in ("key", "value")}
    yield Change(first, kind, "all query heads use the first key head", means)


def _windows(call: AttentionCall) -> Iterator[Change]:
    """Changes that widen, narrow or remove a window, in ``window`` or in the mask."""
    if call.window is not None:
        for window in (call.window + 1, call.window - 1):
            means = f"it seems to count the window differently from the given {call.window}"
            agrees = f"the window is {window} keys"
            yield Change({"window": window}, "window off by one", agrees, means)
        for window in {call.window // 2, call.window // 2 + 1, 2 * call.window} - {0}:
            agrees = f"the window is {window} keys"
            yield Change({"window": window}, "wrong window", agrees, means)
    mask, queries, keys = call.attn_mask, call.query.shape[2], call.key.shape[2]
    if mask is None or mask.dim() != 4 or mask.shape[-2:] != (queries, keys):
        return
    visible = mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
    places = torch.arange(queries, device=mask.device)[:, None] + (keys - queries)
    distance = places - torch.arange(keys, device=mask.device)
    last = int(torch.where(visible, distance, 0).max())
    if last + 1 >= keys:  # no window: the last row sees the first key
        return
    means = f"it seems to count the window differently from the {last + 1} of its mask"
    for window, changed_mask in (
        (last + 2, visible | (distance == last + 1)),
        (last, visible & (distance < last)),
    ):
        agrees = f"the window is {window} keys"
        yield Change({"attn_mask": changed_mask}, "window off by one", agrees, means)
    agrees, means = "the mask has no window", "it seems to ignore it"
    yield Change({"attn_mask": visible | (distance > last)}, "window ignored", agrees, means)


def _scales(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[Change]:
    """Changes of the scale: 1/√d, 1, 1/d, its square, and values that the module has."""
    width = call.query.shape[-1]
    candidates = [(width**-0.5, ", 1/√d"), (1.0, ""), (1 / width, ", 1/d")]
    candidates.append((call.factor**2, f", {call.factor:.4g} applied twice"))
    hidden = getattr(getattr(module, "config", None), "hidden_size", None)
    if isinstance(hidden, int) and hidden > 0:
        candidates.append((hidden**-0.5, ", 1/√hidden_size"))
    configured = configured_value(module, "scale")
    for factor in (
        configured,
        configured**-0.5 if isinstance(configured, int | float) and configured > 0 else None,
    ):
        if isinstance(factor, int | float):
            candidates.append((float(factor), f", from the module's {configured:g}"))
    for factor, origin in candidates:
        if abs(factor - call.factor) > 1e-6 * abs(call.factor):
            means = f"it seems not to use the given {call.factor:.4g}"
            agrees = f"the scale is {factor:.4g}{origin}"
            yield Change({"scale": factor}, "wrong scale", agrees, means)


def _added(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[Change]:
    """Changes that each add what the module has and the call lacks: sinks, a window or a softcap.

    Each is tried alone, to see whether it explains the model's output.
    """
    for name in ("sinks", "window", "softcap"):
        value = configured_value(module, name) if getattr(call, name) is None else None
        kind = f"{name} not passed"
        if name == "sinks":
            fits = isinstance(value, Tensor) and value.numel() == call.query.shape[1]
            if fits and isinstance(value, Tensor):
                means, changed = "the call does not pass them", value.detach().reshape(-1)
                yield Change({name: changed}, kind, "the module's sinks are included", means)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            cast = {"window": int, "softcap": float}[name]
            agrees = f"the module's {name} of {value:g} is applied"
            yield Change({name: cast(value)}, kind, agrees, "the call does not pass it")


def _mask_added(call: AttentionCall) -> Iterator[Change]:
    """A boolean mask that is added to the scores as numbers."""
    if call.bias is not None or call.query.shape[2] * call.key.shape[2] > _LARGE:
        return
    seen = visible_keys(call)
    if not bool(seen.all()):
        masks: dict[str, Any] = dict.fromkeys(("attn_mask", "key_mask", "window", "cu_seqlens"))
        masks |= {"is_causal": False, "bias": seen.to(call.query.dtype)}
        agrees = "the boolean mask is added to the scores as 0 and 1"
        means = "it adds the boolean mask to the scores instead of hiding keys"
        yield Change(masks, "boolean mask added", agrees, means)


def _causal(call: AttentionCall) -> Iterator[Change]:
    """Changes that add, remove or realign a causal mask."""
    end = call.key.shape[2] - call.query.shape[2]
    if call.is_causal:
        means = "it seems to ignore is_causal"
        yield Change({"is_causal": False}, "not causal", "it is not causal", means)
    elif call.cu_seqlens is None:
        means = "it seems to hide later keys by itself"
        changed: dict[str, Any] = {"is_causal": True, "query_offset": end}
        yield Change(changed, "causal by itself", "it is causal", means)
    if end and (call.is_causal or call.window is not None):
        offset, end_name = (0, "first") if call.query_offset else (end, "last")
        means = f"it seems to count positions from the {end_name} key"
        agrees = f"query 0 is at key {offset}"
        yield Change({"query_offset": offset}, "causal mask shifted", agrees, means)
    if call.attn_mask is not None and not call.is_causal:
        means = "it seems to use only the causal part"
        changed = {"attn_mask": None, "is_causal": True, "query_offset": end}
        yield Change(changed, "mask ignored", "the mask is only causal", means)


def configured_value(module: torch.nn.Module | None, name: str) -> Any:
    """Value of an argument in a module's attributes or its configuration; None if there is none."""
    for holder in (module, getattr(module, "config", None)):
        for attribute in _ATTRIBUTES[name]:
            try:
                value = getattr(holder, attribute, None)
            except RuntimeError:  # layers have values of their own, says the configuration
                continue
            if value is not None:
                return value
    return None
