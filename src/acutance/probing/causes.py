"""Explain findings of a probe: why a rebuilt output differs, and whether weights are untrained.

A cause is a change of the captured arguments under which the outputs agree, such as removing the
sinks. Agreement is evidence, not proof: two causes may give the same output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides

__all__ = ["is_untrained", "likely_cause"]


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
_ATTRIBUTES = {
    "window": ("sliding_window", "window_size"),
    "softcap": ("attn_logit_softcapping", "logits_soft_cap", "softcap"),
    "scale": ("scaling", "scale", "softmax_scale"),
    "sinks": ("sinks", "attention_sinks"),
}


def likely_cause(
    call: AttentionCall, theirs: Tensor, counted: Tensor, module: torch.nn.Module | None = None
) -> str:
    """Find a change of a call's arguments under which its output agrees with the model's.

    Args:
        call: the captured call whose rebuilt output differs.
        theirs: the model's output, (B, Hq, L, Ev).
        counted: boolean (B, Hq, L), True on the rows to compare.
        module: the attention module; values in its attributes and configuration are tried too.

    Returns:
        The end of a sentence that names the change; empty if no tested change agrees.

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
            rebuilt, stats = changed.rebuild(False)
            errors, tolerance = differences(changed, rebuilt, stats.state.m, theirs, counted)
        except (ValueError, RuntimeError):  # a change that does not fit this call
            continue
        if bool((errors <= tolerance).all()):
            return f"the output agrees if {agrees}: {means}"
    return ""


_Change = tuple[dict[str, Any], str, str]


def _changes(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[_Change]:
    """Candidate changes, likeliest first: arguments to replace, the condition, and its meaning."""
    present = [name for name in _DROPPED if getattr(call, name) is not None]
    for name in present:
        yield {name: None}, *_DROPPED[name]
    yield from _windows(call)
    yield from _scales(call, module)
    yield from _added(call, module)
    yield from _causal(call)
    if call.bias is not None and call.bias.is_floating_point():
        meaning = "it seems to multiply both by the scale"
        yield {"bias": call.bias * call.factor}, "the bias is added before the scale", meaning
    group = call.query.shape[1] // call.key.shape[1]
    if group > 1 and call.key.shape[1] > 1:
        interleaved = {
            name: getattr(call, name).repeat(1, group, 1, 1) for name in ("key", "value")
        }
        yield (
            interleaved,
            "query heads are assigned to key heads in turn",
            "it seems to group heads differently",
        )
    for names in itertools.combinations(present, 2):
        agrees = " and ".join(_DROPPED[name][0] for name in names)
        yield dict.fromkeys(names), agrees, "it seems to ignore both"


def _windows(call: AttentionCall) -> Iterator[_Change]:
    """Changes that widen, narrow or remove a window, in ``window`` or in the mask."""
    if call.window is not None:
        for window in (call.window + 1, call.window - 1):
            meaning = f"it seems to count the window differently from the given {call.window}"
            yield {"window": window}, f"the window is {window} keys", meaning
    mask, queries, keys = call.attn_mask, call.query.shape[2], call.key.shape[2]
    if mask is None or mask.dim() != 4 or mask.shape[-2:] != (queries, keys):
        return
    visible = mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
    places = torch.arange(queries, device=mask.device)[:, None] + (keys - queries)
    distance = places - torch.arange(keys, device=mask.device)
    last = int(torch.where(visible, distance, 0).max())
    if last + 1 >= keys:  # no window: the last row sees the first key
        return
    meaning = f"it seems to count the window differently from the {last + 1} of its mask"
    for window, changed_mask in (
        (last + 2, visible | (distance == last + 1)),
        (last, visible & (distance < last)),
        (0, visible | (distance > last)),
    ):
        condition = f"the window is {window} keys" if window else "the mask has no window"
        yield {"attn_mask": changed_mask}, condition, meaning if window else "it seems to ignore it"


def _scales(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[_Change]:
    """Changes of the score scale: 1/√d, 1, 1/d, and values from the module or its configuration."""
    width = call.query.shape[-1]
    candidates = [(width**-0.5, ", 1/√d"), (1.0, ""), (1 / width, ", 1/d")]
    counted = _configured_value(module, "scale")
    for factor in (
        counted,
        counted**-0.5 if isinstance(counted, int | float) and counted > 0 else None,
    ):
        if isinstance(factor, int | float):
            candidates.append((float(factor), f", from the module's {counted:g}"))
    for factor, origin in candidates:
        if abs(factor - call.factor) > 1e-6 * abs(call.factor):
            meaning = f"it seems not to use the given {call.factor:.4g}"
            yield {"scale": factor}, f"the scale is {factor:.4g}{origin}", meaning


def _added(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[_Change]:
    """Changes that each add what the module has and the call lacks: sinks, a window or a softcap.

    Each is tried alone, to see whether it explains the model's output.
    """
    for name in ("sinks", "window", "softcap"):
        value = _configured_value(module, name) if getattr(call, name) is None else None
        if name == "sinks":
            fits = isinstance(value, Tensor) and value.numel() == call.query.shape[1]
            if fits and isinstance(value, Tensor):
                meaning = "the call does not pass them"
                yield {name: value.detach().reshape(-1)}, "the module's sinks are included", meaning
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            kind = {"window": int, "softcap": float}[name]
            meaning = "the call does not pass it"
            yield {name: kind(value)}, f"the module's {name} of {value:g} is applied", meaning


def _causal(call: AttentionCall) -> Iterator[_Change]:
    """Changes that add, remove or realign a causal mask."""
    end = call.key.shape[2] - call.query.shape[2]
    if call.is_causal:
        yield {"is_causal": False}, "it is not causal", "it seems to ignore is_causal"
    elif call.cu_seqlens is None:
        meaning = "it seems to hide later keys by itself"
        yield {"is_causal": True, "query_offset": end}, "it is causal", meaning
    if end and (call.is_causal or call.window is not None):
        offset, end_name = (0, "first") if call.query_offset else (end, "last")
        meaning = f"it seems to count positions from the {end_name} key"
        yield {"query_offset": offset}, f"query 0 is at key {offset}", meaning
    if call.attn_mask is not None and not call.is_causal:
        meaning = "it seems to use only the causal part"
        changes = {"attn_mask": None, "is_causal": True, "query_offset": end}
        yield changes, "the mask is only causal", meaning


def _configured_value(module: torch.nn.Module | None, name: str) -> Any:
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


_SIDE = 512  # only the first rows and columns of a matrix are tested
_MATRICES = 4  # number of matrices tested
#: Largest standard deviation of rows' mean squares, in units of that of independent normal entries.
_MAX_SPREAD = 3.0


def is_untrained(model: torch.nn.Module) -> bool:
    """Whether every norm layer has its initial gain and the first matrices look random.

    Training changes the initial gains of 1 (0 in layers that add 1) within a few steps. Gains may
    also be 1 because they were folded into the next matrices, so the rows and the columns of the
    first matrices must have nearly equal mean squares too, as independent entries have. A model
    without norm layers is never called untrained.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 128)
        >>> is_untrained(layer)
        True
        >>> with torch.no_grad():
        ...     _ = layer.norm1.weight.mul_(1.01)
        >>> is_untrained(layer)
        False
    """
    gains = 0
    with torch.no_grad():
        for gain, start in _norms(model):
            if not bool((gain == start).all()):
                return False
            gains += 1
        return gains > 0 and all(_looks_random(matrix) for matrix in _matrices(model))


def _norms(model: torch.nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Gain and shift of each norm layer, with their initial values."""
    for module in model.modules():
        if "norm" not in type(module).__name__.lower():
            continue
        parameters = dict(module.named_parameters(recurse=False))
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is not None and weight.ndim == 1 and _readable(weight):
            yield weight, 0.0 if not bool(weight[0]) else 1.0
        if bias is not None and bias.ndim == 1 and _readable(bias):
            yield bias, 0.0


def _matrices(model: torch.nn.Module) -> Iterator[Tensor]:
    """The first 512 rows and columns of the first four weight matrices, without embeddings."""
    count = 0
    for name, parameter in model.named_parameters():
        wide = parameter.ndim == 2 and min(parameter.shape) >= 16 and _readable(parameter)
        if wide and parameter.is_floating_point() and "embed" not in name:
            yield parameter.detach()[:_SIDE, :_SIDE].double()
            count += 1
            if count == _MATRICES:
                return


def _readable(parameter: Tensor) -> bool:
    """Whether a parameter is a plain, non-empty tensor: no shard and not on the meta device."""
    is_plain = type(parameter) in (Tensor, torch.nn.Parameter)
    return is_plain and not parameter.is_meta and parameter.numel() > 0


def _looks_random(matrix: Tensor) -> bool:
    """Whether mean squares of rows, and of columns, vary no more than for random entries."""
    squares = matrix.square()
    mean = float(squares.mean())
    if not 0 < mean < math.inf:
        return False
    return all(
        float(squares.mean(dim).std()) / mean < _MAX_SPREAD * math.sqrt(2 / matrix.shape[dim])
        for dim in (0, 1)
    )


def relative_error(rebuilt: Tensor, output: Tensor, counted: Tensor) -> float:
    """Largest of :func:`row_errors`; 0 if there are no rows."""
    errors = row_errors(rebuilt, output, counted)
    return float(errors.max()) if errors.numel() else 0.0


def row_errors(rebuilt: Tensor, output: Tensor, counted: Tensor) -> Tensor:
    """Largest difference of two outputs in each row, relative to the largest entry of ``output``.

    Args:
        rebuilt: (B, Hq, L, Ev).
        output: the model's output, same shape.
        counted: boolean (B, Hq, L), True on the rows to compare.

    Returns:
        (B, Hq, L): 0 in rows that are not compared, infinity where a difference is NaN.
    """
    rows = counted.unsqueeze(-1)
    theirs = torch.where(rows, output.detach().double(), 0.0)
    ours = torch.where(rows, rebuilt.detach().double(), 0.0)
    if theirs.numel() == 0:
        return theirs.new_zeros(counted.shape)
    size = theirs.abs().max()
    difference = (ours - theirs).abs().amax(-1)
    ratio = difference / size if size > 0 else difference
    return ratio.masked_fill(difference.isnan(), math.inf)


def differences(
    call: AttentionCall, rebuilt: Tensor, largest: Tensor, theirs: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors of a call's rebuilt output rows, and the largest errors that rounding can explain.

    Args:
        call: the captured call.
        rebuilt: its rebuilt output, (B, Hq, L, Ev).
        largest: largest score of each row, (B, Hq, L).
        theirs: the model's output, same shape as ``rebuilt``.
        counted: boolean (B, Hq, L), True on the rows to compare.

    Returns:
        Two tensors (B, Hq, L), relative to the largest entry of the output.
    """
    errors = row_errors(rebuilt, theirs, counted)
    tolerance = call.tolerance(theirs.dtype, largest)
    if bool((errors > tolerance).any()) and (eager := call.as_eager()) is not None:
        errors = errors.minimum(row_errors(eager, theirs, counted))
    return errors, tolerance
