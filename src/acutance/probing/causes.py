"""Explain findings of a probe: why a rebuilt output differs, and whether weights are untrained.

A cause is a change of the captured arguments, such as removing the sinks, or a fault that no such
change describes, such as scores rounded to 16 bits, under which the outputs agree. Agreement is
evidence, not proof: two causes may give the same output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides

#: A rounding is the cause if it brings this share of the rows within the tolerance: where two
#: computations round a score differently, its row stays apart.
_MOST_ROWS = 0.9


def likely_cause(
    call: AttentionCall, theirs: Tensor, counted: Tensor, module: torch.nn.Module | None = None
) -> str:
    """Why a call's output differs, as the end of a sentence; empty if no tested change agrees.

    The arguments are those of :func:`find_cause`.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> call = AttentionCall("layer", "", x, x, x, scale=0.1)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> likely_cause(call, theirs, torch.ones(1, 2, 5, dtype=torch.bool))
        'the output agrees if the scale is 0.5, 1/√d: it seems not to use the given 0.1'
    """
    cause = find_cause(call, theirs, counted, module)
    return "" if cause is None else f"the output agrees if {cause.agrees}: {cause.means}"


def find_cause(
    call: AttentionCall, theirs: Tensor, counted: Tensor, module: torch.nn.Module | None = None
) -> Change | Fault | None:
    """Find a change of a call under which its output agrees with the model's.

    Args:
        call: the captured call whose rebuilt output differs.
        theirs: the model's output, (B, Hq, L, Ev).
        counted: boolean (B, Hq, L), True on the rows to compare.
        module: the attention module; values in its attributes and configuration are tried too.

    Returns:
        The first change or fault that agrees; None if none does.
    """
    for change in changes_of(call, module):
        changed = replace(call, **change.arguments)
        try:
            rebuilt, stats = changed.rebuild(False)
            errors, tolerance = differences(changed, rebuilt, stats.state.m, theirs, counted)
        except (ValueError, RuntimeError):  # a change that does not fit this call
            continue
        if bool((errors <= tolerance).all()):
            return change
    for fault in faults_of(call):
        output, largest = fault.output()
        errors = row_errors(output, theirs, counted)
        close = (errors <= call.tolerance(theirs.dtype, largest))[counted]
        if bool(close.all()) or (fault.rounds and float(close.double().mean()) >= _MOST_ROWS):
            return fault
    return None


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
    for dim in (0, 1):
        spread = float(squares.mean(dim).std()) / mean
        if not spread < _MAX_SPREAD * math.sqrt(2 / matrix.shape[dim]):
            return False
    return True
