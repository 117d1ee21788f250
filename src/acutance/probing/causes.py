"""Explain findings of a probe: why a rebuilt output differs, and whether weights are untrained.

A cause is a change of the captured arguments, such as removing the sinks, or a fault that no such
change describes, such as scores rounded to 16 bits, under which the outputs agree. Agreement is
evidence, not proof: two causes may give the same output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides, shows

#: A rounding is the cause if it brings this share of the rows within the tolerance: where two
#: computations round a score differently, its row stays apart.
_MOST_ROWS = 0.9


def find_cause(
    call: AttentionCall, theirs: Tensor, counted: Tensor, module: torch.nn.Module | None = None
) -> Cause | None:
    """Find a change or fault of a call under which its output agrees with the model's.

    Args:
        call: the captured call whose rebuilt output differs.
        theirs: the model's output, (B, Hq, L, Ev).
        counted: boolean (B, Hq, L), True on the rows to compare.
        module: the attention module; values in its attributes and configuration are tried too.

    Returns:
        The first change or fault that agrees; None if none does.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> call = AttentionCall("layer", "", x, x, x, scale=0.1)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> find_cause(call, theirs, torch.ones(1, 2, 5, dtype=torch.bool)).sentence
        'the output agrees if the scale is 0.5, 1/√d: it seems not to use the given 0.1'
    """
    for cause in itertools.chain(changes_of(call, module), faults_of(call)):
        try:
            if cause.faults:
                rebuilt, largest = dense_output(call, **cause.faults)
                errors = row_errors(rebuilt, theirs, counted)
                tolerance = call.tolerance(theirs.dtype, largest)
            else:
                changed = replace(call, **cause.arguments)
                rebuilt, stats = changed.rebuild(False)
                errors, tolerance = differences(changed, rebuilt, stats.state.m, theirs, counted)
        except (ValueError, RuntimeError):  # a change that does not fit this call
            continue
        close = (errors <= tolerance)[counted]
        if bool(close.all()) or (cause.rounds and float(close.double().mean()) >= _MOST_ROWS):
            return cause
    return None


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
_MOST_SCORES = 1 << 26  # of calls that are recomputed whole


class Cause(NamedTuple):
    """What may explain that an output differs.

    Attributes:
        arguments: arguments to replace in the call, by name.
        kind: a short name of the cause, such as ``"sinks dropped"``.
        agrees: the cause as a condition: "the sinks are left out".
        means: what it suggests if the outputs then agree.
        faults: options of :func:`dense_output`, for a fault that no argument describes.
        rounds: whether it rounds, so that some rows may round differently.
    """

    arguments: dict[str, Any]
    kind: str
    agrees: str
    means: str
    faults: Mapping[str, Any] = {}
    rounds: bool = False

    @property
    def sentence(self) -> str:
        """Why the output differs, as the end of a sentence."""
        return f"the output agrees if {self.agrees}: {self.means}"


def changes_of(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[Cause]:
    """Candidate changes of a call, likeliest first.

    Args:
        call: the call.
        module: the attention module; values in its attributes and configuration are tried too.
    """
    dropped = [
        Cause({name: None}, *texts)
        for name, texts in _DROPPED.items()
        if getattr(call, name) is not None
    ]
    yield from dropped
    yield from _windows(call)
    yield from _scales(call, module)
    yield from _added(call, module)
    yield from _causal(call)
    yield from _mask_added(call)
    if call.sinks is not None:
        zeros, scaled = {"sinks": torch.zeros_like(call.sinks)}, {"sinks": call.sinks * call.factor}
        means = "it seems to use sinks that were not loaded"
        yield Cause(zeros, "sinks not loaded", "the sinks are 0", means)
        means = "it seems to multiply the sinks by the scale too"
        yield Cause(scaled, "sinks scaled", "the sinks are scaled", means)
    if call.bias is not None and call.bias.is_floating_point():
        scaled, means = {"bias": call.bias * call.factor}, "it seems to multiply both by the scale"
        yield Cause(scaled, "bias scaled", "the bias is added before the scale", means)
    group = call.query.shape[1] // call.key.shape[1]
    if group > 1 and call.key.shape[1] > 1:
        kind, means = "heads grouped differently", "it seems to group heads differently"
        in_turn = {name: getattr(call, name).repeat(1, group, 1, 1) for name in ("key", "value")}
        yield Cause(in_turn, kind, "query heads are assigned to key heads in turn", means)
        first = {name: getattr(call, name)[:, :1] for name in ("key", "value")}
        yield Cause(first, kind, "all query heads use the first key head", means)
    yield from _several(call, dropped)


def _several(call: AttentionCall, causes: list[Cause]) -> Iterator[Cause]:
    """Several of the ``causes`` at once, or with causality added or removed."""
    if call.is_causal:
        causes = [*causes, Cause({"is_causal": False}, "not causal", "it is not causal", "")]
    elif call.attn_mask is None:
        causal = {"is_causal": True, "query_offset": call.key.shape[2] - call.query.shape[2]}
        causes = [*causes, Cause(causal, "causal by itself", "it is causal", "")]
    most = 2 if call.query.shape[2] * call.key.shape[2] > _LARGE else len(causes)
    for count in range(2, most + 1):
        for several in itertools.combinations(causes, count):
            arguments = dict(itertools.chain(*(cause.arguments.items() for cause in several)))
            kind = " and ".join(cause.kind for cause in several)
            agrees = " and ".join(cause.agrees for cause in several)
            means = "it seems to ignore both" if count == 2 else "it seems to ignore them"
            yield Cause(arguments, kind, agrees, means)


def _windows(call: AttentionCall) -> Iterator[Cause]:
    """Changes that widen, narrow or remove a window, in ``window`` or in the mask."""
    if call.window is not None:
        means = f"it seems to count the window differently from the given {call.window}"
        others = {call.window // 2, call.window // 2 + 1, 2 * call.window} - {0}
        for window in (call.window + 1, call.window - 1, *others):
            kind = "window off by one" if abs(window - call.window) == 1 else "wrong window"
            yield Cause({"window": window}, kind, f"the window is {window} keys", means)
    mask, queries, keys = call.attn_mask, call.query.shape[2], call.key.shape[2]
    if mask is None or mask.dim() != 4 or mask.shape[-2:] != (queries, keys):
        return
    visible = shows(mask)
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
        yield Cause({"attn_mask": changed_mask}, "window off by one", agrees, means)
    agrees, means = "the mask has no window", "it seems to ignore it"
    yield Cause({"attn_mask": visible | (distance > last)}, "window ignored", agrees, means)


def _scales(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[Cause]:
    """Changes of the scale: 1/√d, 1, 1/d, its square, and values that the module has."""
    width = call.query.shape[-1]
    candidates = [(width**-0.5, ", 1/√d"), (1.0, ""), (1 / width, ", 1/d")]
    candidates.append((call.factor**2, f", {call.factor:.4g} applied twice"))
    hidden = getattr(getattr(module, "config", None), "hidden_size", None)
    if isinstance(hidden, int) and hidden > 0:
        candidates.append((hidden**-0.5, ", 1/√hidden_size"))
    configured = configured_value(module, "scale")
    if isinstance(configured, int | float):
        origin = f", from the module's {configured:g}"
        candidates.append((float(configured), origin))
        candidates += [(configured**-0.5, origin)] if configured > 0 else []
    for factor, origin in candidates:
        if abs(factor - call.factor) > 1e-6 * abs(call.factor):
            means = f"it seems not to use the given {call.factor:.4g}"
            agrees = f"the scale is {factor:.4g}{origin}"
            yield Cause({"scale": factor}, "wrong scale", agrees, means)


def _added(call: AttentionCall, module: torch.nn.Module | None) -> Iterator[Cause]:
    """Changes that each add what the module has and the call lacks: sinks, a window or a softcap.

    Each is tried alone, to see whether it explains the model's output.
    """
    for name in ("sinks", "window", "softcap"):
        value = configured_value(module, name) if getattr(call, name) is None else None
        kind = f"{name} not passed"
        if name == "sinks":
            if isinstance(value, Tensor) and value.numel() == call.query.shape[1]:
                means, changed = "the call does not pass them", value.detach().reshape(-1)
                yield Cause({name: changed}, kind, "the module's sinks are included", means)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            cast = {"window": int, "softcap": float}[name]
            agrees = f"the module's {name} of {value:g} is applied"
            yield Cause({name: cast(value)}, kind, agrees, "the call does not pass it")


def _mask_added(call: AttentionCall) -> Iterator[Cause]:
    """A boolean mask that is added to the scores as numbers."""
    if call.bias is not None or call.query.shape[2] * call.key.shape[2] > _LARGE:
        return
    seen = visible_keys(call)
    if not bool(seen.all()):
        masks: dict[str, Any] = dict.fromkeys(("attn_mask", "key_mask", "window", "cu_seqlens"))
        masks |= {"is_causal": False, "bias": seen.to(call.query.dtype)}
        agrees = "the boolean mask is added to the scores as 0 and 1"
        means = "it adds the boolean mask to the scores instead of hiding keys"
        yield Cause(masks, "boolean mask added", agrees, means)


def _causal(call: AttentionCall) -> Iterator[Cause]:
    """Changes that add, remove or realign a causal mask."""
    end = call.key.shape[2] - call.query.shape[2]
    if call.is_causal:
        means = "it seems to ignore is_causal"
        yield Cause({"is_causal": False}, "not causal", "it is not causal", means)
    elif call.cu_seqlens is None:
        means = "it seems to hide later keys by itself"
        changed: dict[str, Any] = {"is_causal": True, "query_offset": end}
        yield Cause(changed, "causal by itself", "it is causal", means)
    if end and (call.is_causal or call.window is not None):
        offset, end_name = (0, "first") if call.query_offset else (end, "last")
        means = f"it seems to count positions from the {end_name} key"
        agrees = f"query 0 is at key {offset}"
        yield Cause({"query_offset": offset}, "causal mask shifted", agrees, means)
    if call.attn_mask is not None and not call.is_causal:
        means = "it seems to use only the causal part"
        changed = {"attn_mask": None, "is_causal": True, "query_offset": end}
        yield Cause(changed, "mask ignored", "the mask is only causal", means)


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


_BASES = "it seems to mix logarithms of base 2 and base e"
#: The argument that a call must have for a fault, the fault as an option of :func:`dense_output`,
#: its kind, the condition, and what it suggests; likeliest first.
_FAULTS: tuple[tuple[str, dict[str, Any], str, str, str], ...] = (
    ("sinks", {"log_factor": 1 / math.log(2)}, "sinks against log2",
        "the sinks are weighed against a log-sum-exp in base 2", _BASES),
    ("sinks", {"log_factor": math.log(2)}, "sinks against log2",
        "the sinks are weighed against a log-sum-exp in base 2 and is taken for base e", _BASES),
    ("query", {"hidden": 0.0}, "hidden keys counted",
        "hidden keys count with a score of 0", "it seems to give hidden keys a score of 0"),
    ("softcap", {"cap_first": True}, "softcap before scale",
        "the softcap is applied before the scale", "it seems to apply the softcap first"),
)  # fmt: skip
_ROUNDED = {"scores": "the scores", "weights": "the weights", "inputs": "queries and keys"}


def faults_of(call: AttentionCall) -> Iterator[Cause]:
    """Candidate faults of a call, likeliest first; none of a call too large to recompute whole."""
    batch, heads, queries, _ = call.query.shape
    if batch * heads * queries * call.key.shape[2] > _MOST_SCORES or call.moved:
        return
    for argument, faults, kind, agrees, means in _FAULTS:
        if getattr(call, argument) is not None:
            yield Cause({}, kind, agrees, means, faults)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for rounded, what in _ROUNDED.items():
            agrees = f"{what} are rounded to {name}"
            means = f"it seems to compute its {rounded} in {name}"
            yield Cause({}, f"{rounded} rounded", agrees, means, {rounded: dtype}, rounds=True)


def visible_keys(call: AttentionCall) -> Tensor:
    """Which keys each row of a call sees, boolean (B, 1 or Hq, L, S).

    Example:
        >>> x = torch.zeros(1, 1, 3, 2)
        >>> visible_keys(AttentionCall("layer", "", x, x, x, is_causal=True, window=2)).int()
        tensor([[[[1, 0, 0],
                  [1, 1, 0],
                  [0, 1, 1]]]], dtype=torch.int32)
    """
    batch, queries, device = len(call.query), call.query.shape[2], call.query.device
    seen = call.seen_by_position(torch.arange(queries, device=device).expand(batch, queries))
    visible = torch.ones(batch, 1, queries, call.key.shape[2], dtype=torch.bool, device=device)
    visible = visible if seen is None else visible & seen
    for mask in (call.attn_mask, call.bias):
        if mask is not None:
            visible = visible & shows(mask)
    return visible if call.key_mask is None else visible & call.key_mask[:, None, None, :]


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
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    if not cap_first:
        scores = scores * call.factor
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if cap_first:
        scores = scores * call.factor
    for mask in (call.bias, call.attn_mask):
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + torch.where(hides(mask), 0.0, mask.double())
    return scores


def dense_output(
    call: AttentionCall,
    *,
    hidden: float = -torch.inf,
    cap_first: bool = False,
    log_factor: float = 1.0,
    inputs: torch.dtype | None = None,
    scores: torch.dtype | None = None,
    weights: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a call in float64 with what is given in place of the right computation.

    Args:
        call: the call.
        hidden: score of the keys that masks hide.
        cap_first: whether the softcap is applied before the scale.
        log_factor: factor of the log-sum-exp that sinks are weighed against.
        inputs: dtype to round queries and keys to; None for none.
        scores: dtype to round scores to; None for none.
        weights: dtype to round weights to; None for none.

    Returns:
        The output (B, Hq, L, Ev) and the largest score of each row (B, Hq, L).
    """
    full = _rounded(dense_scores(call, cap_first=cap_first, inputs=inputs), scores)
    full = full.masked_fill(~visible_keys(call), hidden)
    probabilities = full.softmax(-1)
    if call.sinks is not None:
        beyond = full.logsumexp(-1) * log_factor - call.sinks.double().view(1, -1, 1)
        probabilities = probabilities * torch.sigmoid(beyond).unsqueeze(-1)
    value = call.value.double().repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)
    return _rounded(probabilities.nan_to_num(0.0), weights) @ value, full.amax(-1)


def _rounded(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor rounded to a dtype and widened again; itself for None."""
    return values if dtype is None else values.to(dtype).to(values.dtype)


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
        for module in model.modules():
            if "norm" not in type(module).__name__.lower():
                continue
            for name, gain in module.named_parameters(recurse=False):
                if name not in ("weight", "bias") or gain.ndim != 1 or not _readable(gain):
                    continue
                start = 1.0 if name == "weight" and bool(gain[0]) else 0.0
                if not bool((gain == start).all()):
                    return False
                gains += 1
        matrices = [
            matrix
            for name, matrix in model.named_parameters()
            if matrix.ndim == 2 and min(matrix.shape) >= 16 and "embed" not in name
            if matrix.is_floating_point() and _readable(matrix)
        ]
        return gains > 0 and all(map(_looks_random, matrices[:_MATRICES]))


def _readable(parameter: Tensor) -> bool:
    """Whether a parameter is a plain, non-empty tensor: no shard and not on the meta device."""
    is_plain = type(parameter) in (Tensor, torch.nn.Parameter)
    return is_plain and not parameter.is_meta and parameter.numel() > 0


def _looks_random(matrix: Tensor) -> bool:
    """Whether mean squares of rows, and of columns, vary no more than for random entries.

    Only the first 512 of both are looked at.
    """
    squares = matrix.detach()[:_SIDE, :_SIDE].double().square()
    mean = float(squares.mean())
    if not 0 < mean < math.inf:
        return False
    for dim in (0, 1):
        spread = float(squares.mean(dim).std()) / mean
        if not spread < _MAX_SPREAD * math.sqrt(2 / squares.shape[dim]):
            return False
    return True
