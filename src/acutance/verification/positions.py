"""Whether queries and keys are rotated as the configuration says, and how else they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.verification.arguments import Difference, Pass
from acutance.verification.expectation import Expectation
from acutance.verification.rope import Rope, rotated

__all__ = ["RotationCheck", "check_rotation", "unrotated_heads"]

_NORMS = ("{}_norm", "{}_layernorm", "{}_layer_norm", "{}_ln", "norm_{}", "ln_{}")
_QUERY, _KEY = ("q", "query"), ("k", "key")
_MAKERS = {
    "query": ("q_proj", "query", "q_lin", "q", "query_proj", "to_q", "wq", "q_b_proj"),
    "key": ("k_proj", "key", "k_lin", "k", "key_proj", "to_k", "wk"),
}
_PACKED = ("query_key_value", "qkv_proj", "Wqkv", "qkv", "wqkv", "in_proj")
#: Relative error of a rotated vector that rounding explains.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class RotationCheck(NamedTuple):
    """How queries and keys were rotated.

    Attributes:
        error: largest relative difference from the configuration's rotation.
        tolerance: largest difference that rounding explains.
        difference: what they differ by; None if they agree.
        problem: why nothing can be said; empty if something can.
    """

    error: float
    tolerance: float
    difference: Difference | None = None
    problem: str = ""


class _Way(NamedTuple):
    """One way to rotate: positions, frequencies, a factor, and the cause if it fits."""

    positions: Tensor
    frequencies: Tensor
    factor: float
    cause: str = ""
    sentence: str = ""
    dtype: torch.dtype | None = None


def check_rotation(
    expected: Expectation,
    facts: Pass,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    counted: Tensor,
) -> RotationCheck:
    """Compare rotated queries and keys with those that the configuration gives.

    Args:
        expected: what the configuration says of the module.
        facts: what is known of the forward pass.
        before: queries (B, Hq, L, E) and keys (B, H, L, E) without positions.
        after: the same as the attention function gets them.
        counted: boolean (B, L), True on real tokens.
    """
    rope, given = expected.rope, facts.positions
    if rope is None or given is None:
        return RotationCheck(0.0, 0.0, problem="no rotary positions to compare with")
    dtype = after[0].dtype
    last = int(given.max()) + 1
    tolerance = _TOLERANCE.get(dtype, 5e-2) + 4 * torch.finfo(torch.float32).eps * last
    layout = _layout(rope, before, after, counted)
    if layout is None:
        return RotationCheck(0.0, tolerance, problem="its rotation is not of a known form")
    ways, errors = list(_ways(expected, rope, facts, given)), []
    for start, interleaved in layout:
        errors.append(_error(ways[0], before, after, counted, start, interleaved))
    error = min(errors)
    if error <= tolerance:
        return RotationCheck(error, tolerance)
    if max(_apart(x, y, counted) for x, y in zip(before, after, strict=True)) <= tolerance:
        return RotationCheck(0.0, tolerance, problem="its queries and keys have no positions")
    for way in ways[1:]:
        for place in layout:
            if _error(way, before, after, counted, *place) <= tolerance:
                if not way.cause:
                    return RotationCheck(0.0, tolerance)
                return RotationCheck(error, tolerance, Difference(way.cause, way.sentence))
    one = _one_only(ways, before, after, counted, layout, tolerance)
    return RotationCheck(error, tolerance, one, "" if one else "its rotation is of no known form")


def _one_only(
    ways: list[_Way],
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    counted: Tensor,
    layout: list[tuple[int, bool]],
    tolerance: float,
) -> Difference | None:
    """A fault of the queries alone, or of the keys alone."""
    for index, name in enumerate(("queries", "keys")):
        other = 1 - index
        for place in layout:
            fits = _error_of(ways[0], before[other], after[other], counted, *place)
            if fits > tolerance:
                continue
            if _apart(before[index], after[index], counted) <= tolerance:
                return Difference("not rotated", f"only the {name} are not rotated")
            for way in ways[1:]:
                if _error_of(way, before[index], after[index], counted, *place) <= tolerance:
                    text = f"{way.sentence} (only in the {name})"
                    return Difference(way.cause or "positions", text)
    return None


def _ways(expected: Expectation, rope: Rope, facts: Pass, given: Tensor) -> Iterator[_Way]:
    """Ways to rotate: first as configured, then with each fault, likeliest first."""
    last = int(given.max()) + 1
    own, factor = rope.frequencies(last), rope.attention_factor
    yield _Way(given, own, factor)
    kind = f"rope_type={rope.kind}"
    plain = rope.plain().frequencies(last)
    if rope.scaled:
        text = f"the rotation has no scaling, but the configuration says {kind}"
        for each in {factor, 1.0}:
            yield _Way(given, plain, each, "RoPE scaling ignored", text)
    if factor != 1.0:
        text = f"queries and keys lack the attention factor {factor:.4g} of {kind}"
        yield _Way(given, own, 1.0, "attention factor lost", text)
        text = f"the attention factor {factor:.4g} of {kind} is applied twice"
        yield _Way(given, own, factor**2, "attention factor twice", text)
    yield from _other_positions(facts, given, own, factor)
    for other in expected.other_ropes:
        text = f"it rotates with the frequencies of another type of layer (theta {other.theta:g})"
        wrong = other.frequencies(last)
        yield _Way(given, wrong, other.attention_factor, "RoPE of another layer type", text)
    for base in (1e4, 1e6, 5e5):
        if base != rope.theta:
            text = f"it rotates with a base of {base:g}, but rope_theta={rope.theta:g}"
            wrong = Rope(rope.kind, base, rope.width, rope.parameters, rope.longest)
            for each in (wrong, wrong.plain()) if rope.scaled else (wrong,):
                yield _Way(given, each.frequencies(last), factor, "wrong RoPE base", text)
    if rope.kind == "longrope":
        text = "it uses the short factors of LongRoPE beyond the trained length, or the reverse"
        for length in (1, 1 << 30):
            yield _Way(given, rope.frequencies(length), factor, "LongRoPE factors swapped", text)
    stretch = rope.parameters.get("factor")
    if rope.scaled and isinstance(stretch, int | float):
        text = f"positions are divided by the factor {stretch:g}, but the configuration says {kind}"
        yield _Way(given, plain / stretch, 1.0, "wrong RoPE scaling", text)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        text = f"positions and frequencies are rounded to {name}"
        yield _Way(given, own, factor, "positions rounded", text, dtype)


def _other_positions(facts: Pass, given: Tensor, own: Tensor, factor: float) -> Iterator[_Way]:
    """Ways with other positions than those given."""
    queries = given.shape[1]
    places = torch.arange(queries, device=given.device)[None] + facts.past
    text = "positions count padding: they are places in the padded batch"
    if facts.documents is not None:
        text = "positions run through packed documents instead of starting anew in each"
    candidates = [(places, "positions", text)]
    if facts.past:
        text = "positions of cached decoding start at 0 in each pass"
        candidates.insert(0, (places - facts.past, "positions", text))
    for step in (1, -1):
        candidates.append((given + step, "positions", f"positions are shifted by {step:+d}"))
        if facts.past:
            text = f"positions of cached decoding are shifted by {step:+d}"
            candidates.append((places + step, "positions", text))
    for positions, cause, text in candidates:
        shift = (positions - given).expand(given.shape)
        harmless = not facts.past and bool((shift == shift[:, :1]).all())
        if bool((shift != 0).any()):  # a shift of a whole text changes no score
            yield _Way(positions, own, factor, "" if harmless else cause, text)


def _layout(
    rope: Rope, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], counted: Tensor
) -> list[tuple[int, bool]] | None:
    """Places of the rotated components and pairings to try; None if lengths change otherwise."""
    width = after[0].shape[-1]
    if rope.width > width or rope.width % 2:
        return None
    starts = sorted({0, width - rope.width})
    for x, y in zip(before, after, strict=True):
        if not _same_lengths(x, y, counted, rope.width, starts):
            return None
    return [(start, interleaved) for start in starts for interleaved in (False, True)]


def _same_lengths(x: Tensor, y: Tensor, counted: Tensor, width: int, starts: list[int]) -> bool:
    """Whether rotated parts have the same lengths up to one factor for all tokens and heads."""
    for start in starts:
        ratios = []
        for part in (x, y):
            piece = part.double()[..., start : start + width].transpose(1, 2)[counted]
            ratios.append(piece.norm(dim=-1))
        good = ratios[0] > 1e-3 * ratios[0].max()
        ratio = (ratios[1] / ratios[0])[good]
        if ratio.numel() and float(ratio.max() - ratio.min()) <= 0.03 * float(ratio.mean()):
            return True
    return False


def _error(
    way: _Way,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    counted: Tensor,
    start: int,
    interleaved: bool,
) -> float:
    """Largest relative difference of queries and keys from a way to rotate them."""
    pairs = zip(before, after, strict=True)
    return max(_error_of(way, x, y, counted, start, interleaved) for x, y in pairs)


def _error_of(
    way: _Way, x: Tensor, y: Tensor, counted: Tensor, start: int, interleaved: bool
) -> float:
    """The same for queries or keys alone."""
    turned = rotated(
        x,
        way.positions.to(x.device),
        way.frequencies,
        factor=way.factor,
        start=start,
        interleaved=interleaved,
        dtype=way.dtype,
    )
    return _apart(turned, y, counted)


def _apart(x: Tensor, y: Tensor, counted: Tensor) -> float:
    """Largest distance of two vectors of a token and head, relative to the longest vector."""
    first, second = (part.double().transpose(1, 2)[counted] for part in (x, y))
    size = float(second.norm(dim=-1).max()) if second.numel() else 0.0
    return float((first - second).norm(dim=-1).max()) / size if size else 0.0


def unrotated_heads(
    outputs: dict[str, Tensor], query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Queries and keys before rotation, from what a module's parts returned; None if unknown.

    Args:
        outputs: last output of each direct part of the attention module, by name.
        query: rotated queries, (B, Hq, L, E).
        key: rotated keys of the same tokens, (B, H, L, E).
    """
    sides = []
    for names, makers, target in ((_QUERY, "query", query), (_KEY, "key", key)):
        normed = [form.format(name) for name in names for form in _NORMS]
        found = next((outputs[name] for name in normed if name in outputs), None)
        if found is None:
            found = next((outputs[name] for name in _MAKERS[makers] if name in outputs), None)
        sides.append(None if found is None else _as_heads(found, target))
    if sides[0] is not None and sides[1] is not None:
        return sides[0], sides[1]
    for name in _PACKED:
        if name in outputs:
            return _unpacked(outputs[name], query, key, by_head=name == "query_key_value")
    return None


def _as_heads(found: Tensor, target: Tensor) -> Tensor | None:
    """An output of a projection or a norm in the shape of queries or keys; None if it does not fit."""
    batch, heads, tokens, width = target.shape
    if found.numel() != target.numel():
        return None
    if tuple(found.shape) == tuple(target.shape) and heads != tokens:
        return found
    if found.dim() == 4 and found.shape[1] == heads and heads != tokens:
        return found.reshape(target.shape)
    return found.reshape(batch, tokens, heads, width).transpose(1, 2)


def _unpacked(
    found: Tensor, query: Tensor, key: Tensor, *, by_head: bool
) -> tuple[Tensor, Tensor] | None:
    """Queries and keys in the output of one projection for queries, keys and values."""
    batch, heads, tokens, width = query.shape
    groups = key.shape[1]
    if found.numel() != batch * tokens * (heads + 2 * groups) * width:
        return None
    found = found.reshape(batch, tokens, -1)
    if by_head:
        each = found.reshape(batch, tokens, groups, heads // groups + 2, width)
        queries = each[..., :-2, :].reshape(batch, tokens, heads, width)
        return queries.transpose(1, 2), each[..., -2, :].transpose(1, 2)
    parts = found.reshape(batch, tokens, heads + 2 * groups, width).transpose(1, 2)
    return parts[:, :heads], parts[:, heads : heads + groups]


def direct_parts(module: Any) -> dict[int, str]:
    """Names of a module's direct parts, by identity."""
    return {id(part): name for name, part in module.named_children()}
