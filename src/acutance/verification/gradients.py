"""Gradients of one attention call against those of its float64 reconstruction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.probing.causes import changes_of, dense_scores, visible_keys
from acutance.verification.expectation import Comparison, Difference

#: Rounding of scores above which a softmax says nothing about gradients.
_LARGEST_ROUNDING = 100.0
#: Relative error of a gradient that rounding explains.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
_ROUNDINGS = 32  # of the products that a gradient is a difference of
_PARTS = {"query": "queries", "key": "keys", "value": "values", "sinks": "sinks"}
_Gradients = dict[str, Tensor]


def check_gradients(
    call: AttentionCall, ours: AttentionCall, output: Tensor, counted: Tensor, sinks: Any
) -> Comparison:
    """Compare the gradients that a model computes in one attention call.

    The output is multiplied by fixed random numbers, 0 on padding, and the sum is differentiated.

    Args:
        call: the captured call, with the graph of its tensors.
        ours: the same call with the expected arguments.
        output: the model's output, (B, Hq, L, Ev), with its graph.
        counted: boolean (B, Hq, L), True on the rows to compare.
        sinks: the module's sinks, whose gradient is compared too; None if it has none.

    Raises:
        ValueError: if the model computes no gradients here, or if its scores are huge.
    """
    parts = {"query": call.query, "key": call.key, "value": call.value}
    if isinstance(sinks, Tensor) and ours.sinks is not None and sinks.requires_grad:
        parts["sinks"] = sinks
    if any(mask is not None and mask.requires_grad for mask in (call.attn_mask, call.bias)):
        raise ValueError("its mask or bias is computed from what is differentiated by")
    largest = call.factor * float(call.query.norm(dim=-1).max() * call.key.norm(dim=-1).max())
    if largest * torch.finfo(output.dtype).eps > _LARGEST_ROUNDING:
        raise ValueError(f"its scores are up to {largest:.0e}, which rounding changes at will")
    if call.key is call.value:
        raise ValueError("its keys and values are one tensor")
    parts = {name: part for name, part in parts.items() if part.requires_grad}
    if not parts or not output.requires_grad:
        text = "no gradient can be computed: its output does not require one"
        if not parts:
            raise ValueError(text)
        return Comparison(1.0, 0.0, Difference("gradient missing", text))
    chance = torch.Generator().manual_seed(0)
    shape = tuple(output.shape)
    weights = torch.randn(shape, generator=chance, dtype=torch.float64).to(output.device)
    weights = weights * counted.unsqueeze(-1)
    theirs = _differentiated(output, parts, weights)
    if not call.source.startswith("transformers"):  # of which some may be copies that were read
        theirs = {name: gradient for name, gradient in theirs.items() if bool(gradient.any())}
        if not theirs:
            raise ValueError("its queries and keys are not those that its output is computed from")
    if "sinks" in theirs:
        theirs["sinks"] = theirs["sinks"].reshape(-1)
    expected = _gradients(ours, weights, tuple(theirs))
    tolerance = _TOLERANCE.get(output.dtype, 0.2)
    rounding = _rounding(ours, weights, output.dtype)
    error = _error(theirs, expected, rounding)
    if error <= tolerance:
        return Comparison(error, tolerance)
    difference = _cause(ours, weights, theirs, expected, tolerance, rounding)
    return Comparison(error, tolerance, difference)


def _leaves(call: AttentionCall, names: tuple[str, ...]) -> dict[str, Any]:
    """Tensors of a call in float64, to differentiate by."""
    return {name: getattr(call, name).detach().double().requires_grad_() for name in names}


def _differentiated(output: Tensor, by: dict[str, Tensor], weights: Tensor) -> _Gradients:
    """Gradients of an output times weights, in float64; 0 where there is none."""
    found: Any = torch.autograd.grad(
        output, list(by.values()), weights.to(output.dtype), retain_graph=True, allow_unused=True
    )
    return {
        name: torch.zeros_like(part, dtype=torch.float64) if grad is None else grad.double()
        for (name, part), grad in zip(by.items(), found, strict=True)
    }


def _gradients(call: AttentionCall, weights: Tensor, names: tuple[str, ...]) -> _Gradients:
    """Gradients of a call's reconstruction in float64."""
    leaves = _leaves(call, names)
    output, _ = replace(call, **leaves).rebuild(False)
    return _differentiated(output, leaves, weights)


def _dense_gradients(
    call: AttentionCall, weights: Tensor, names: tuple[str, ...], fault: str
) -> _Gradients:
    """Gradients of a dense reconstruction in which one derivative is missing.

    Args:
        call: the call.
        weights: what the output is multiplied by.
        names: tensors to differentiate by.
        fault: ``"lse"`` for no derivative of the log-sum-exp that the sinks meet, ``"softcap"`` for
            none of the softcap.
    """
    leaves = _leaves(call, names)
    changed = replace(call, **leaves)
    scores = dense_scores(changed)
    if fault == "softcap":
        bare = dense_scores(replace(changed, softcap=None))
        scores = bare + (scores - bare).detach()
    scores = scores.masked_fill(~visible_keys(call), -torch.inf)
    group = changed.query.shape[1] // changed.value.shape[1]
    seen = visible_keys(call).any(-1, keepdim=True)
    probabilities = torch.where(seen, scores, 0.0).softmax(-1)
    output = probabilities @ changed.value.double().repeat_interleave(group, 1)
    if changed.sinks is not None:
        lse = scores.logsumexp(-1)
        lse = lse.detach() if fault == "lse" else lse
        output = output * torch.sigmoid(lse - changed.sinks.double().view(1, -1, 1)).unsqueeze(-1)
    return _differentiated(torch.where(seen, output, 0.0), leaves, weights)


def _cause(
    ours: AttentionCall,
    weights: Tensor,
    theirs: _Gradients,
    expected: _Gradients,
    tolerance: float,
    rounding: Mapping[str, float],
) -> Difference:
    """Name what makes gradients differ."""
    names = tuple(theirs)
    for fault, stated, text in (
        ("lse", ours.sinks, "no gradient flows through the log-sum-exp"),
        ("softcap", ours.softcap, "the derivative of the softcap is missing"),
    ):
        if stated is not None:
            dense = _dense_gradients(ours, weights, names, fault)
            if _error(theirs, dense, rounding) <= tolerance:
                return Difference(f"gradient of {fault} missing", f"gradients agree if {text}")
    apart = [n for n in names if _error_of(theirs[n], expected[n], rounding[n]) > tolerance]
    which = " and ".join(_PARTS[name] for name in apart)
    if apart and not any(bool(theirs[name].any()) for name in apart):
        return Difference("gradient missing", f"the {which} get no gradient")
    for change in changes_of(ours, None):
        if {"key", "value", "sinks"} & set(change.arguments):
            continue
        try:
            changed = _gradients(replace(ours, **change.arguments), weights, names)
        except (ValueError, RuntimeError):
            continue
        if _error(theirs, changed, rounding) <= tolerance:
            text = f"gradients agree if in the backward pass {change.agrees}"
            return Difference(f"backward: {change.kind}", text)
    return _ratios(ours, theirs, expected, apart, tolerance) or Difference(
        "gradient unexplained", f"gradients of {which} differ"
    )


def _ratios(
    ours: AttentionCall, theirs: _Gradients, expected: _Gradients, apart: list[str], limit: float
) -> Difference | None:
    """Gradients that are a multiple of the expected ones, or lack the sum over a group's heads."""
    group = ours.query.shape[1] // ours.key.shape[1]
    factors = {}
    for name in apart:
        size = float((expected[name] ** 2).sum())
        factor = float((theirs[name] * expected[name]).sum()) / size if size else 0.0
        if not factor or _error_of(theirs[name] / factor, expected[name]) > limit:
            return None
        factors[name] = factor
    for name, factor in factors.items():
        if name in ("key", "value") and group > 1 and abs(factor * group - 1) < 0.01:
            text = f"gradients of {_PARTS[name]} are averaged over the {group} heads of a group"
            return Difference("gradient of groups averaged", f"{text} instead of summed")
    if not factors:
        return None
    words = ", ".join(f"{_PARTS[name]} {factor:.3g}" for name, factor in factors.items())
    if all(abs(factor * ours.factor - 1) < 0.01 for factor in factors.values()):
        return Difference("backward: wrong scale", "the scale is missing in the backward pass")
    text = f"gradients are the expected ones times a factor ({words})"
    return Difference("gradient scaled", text)


def _error(theirs: _Gradients, expected: _Gradients, rounding: Mapping[str, float]) -> float:
    """Largest of :func:`_error_of` over the tensors."""
    return max(_error_of(theirs[name], expected[name], rounding[name]) for name in theirs)


def _error_of(theirs: Tensor, expected: Tensor, rounding: float = 0.0) -> float:
    """Largest difference beyond rounding, relative to the largest entry expected."""
    if not expected.numel():
        return 0.0
    size = float(expected.abs().max())
    difference = float((theirs - expected).abs().max())
    if difference != difference:
        return torch.inf
    beyond = max(difference - rounding, 0.0)
    return beyond / size if size else beyond


def _rounding(call: AttentionCall, weights: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Absolute error of each gradient that rounding explains where derivatives cancel.

    A derivative of a weight is a difference of products of ``weights`` and values, which is 0 where
    one key has all weight, up to the rounding of the products.
    """
    eps = _ROUNDINGS * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps

    def longest(part: Tensor) -> float:
        return float(part.double().norm(dim=-1).max()) if part.numel() else 0.0

    product = eps * longest(weights) * longest(call.value)
    rows = math.sqrt(call.query.shape[2] * call.query.shape[1] / call.key.shape[1])
    factor = abs(call.factor)
    return {
        "query": product * factor * longest(call.key),
        "key": product * factor * longest(call.query) * rows,
        "value": eps * longest(weights) * rows,
        "sinks": product * math.sqrt(call.query.shape[2] * len(call.query)),
    }
