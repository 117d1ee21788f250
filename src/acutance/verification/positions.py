"""Whether queries and keys are rotated as the configuration says, and how else they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.verification.expectation import (
    Comparison,
    Difference,
    Expectation,
    Pass,
    Rope,
)

_NORMS = ("{}_norm", "{}_layernorm", "{}_layer_norm", "{}_ln", "norm_{}", "ln_{}")


def _makers(names: str, projections: str) -> tuple[str, ...]:
    """Names of parts whose output is queries, or keys: norms come before projections."""
    normed = [form.format(name) for name in names.split() for form in _NORMS]
    return (*normed, *projections.split())


#: Parts that make queries, and keys, the last to run first.
_QUERY = _makers("q query", "q_proj query q_lin q query_proj to_q wq q_b_proj")
_KEY = _makers("k key", "k_proj key k_lin k key_proj to_k wk")
_PACKED = ("query_key_value", "qkv_proj", "Wqkv", "qkv", "wqkv", "in_proj")
#: Names of parts that make queries and keys.
PARTS = frozenset((*_QUERY, *_KEY, *_PACKED))
#: Relative error of a rotated vector that rounding explains.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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
    shift: Tensor | None = None,
) -> tuple[Comparison, Tensor | None]:
    """Compare rotated queries and keys with those that the configuration gives.

    Args:
        expected: what the configuration says of the module.
        facts: what is known of the forward pass.
        before: queries (B, Hq, L, E) and keys (B, H, L, E) without positions.
        after: the same as the attention function gets them.
        counted: boolean (B, L), True on real tokens.
        shift: of the positions in earlier passes over these texts, (B, 1); None for none.

    Returns:
        The comparison, and by how much positions are shifted in each text, (B, 1), which changes no
        score if it is the same in later passes; None if they are not.

    Raises:
        ValueError: if nothing can be said.
    """
    rope, given = expected.rope, facts.positions
    if rope is None or given is None:
        raise ValueError("no rotary positions to compare with")
    last = int(given.max()) + 1
    tolerance = _TOLERANCE.get(after[0].dtype, 5e-2) + 4 * torch.finfo(torch.float32).eps * last
    width = after[0].shape[-1]
    ratio = _ratio(rope, before, after, counted)
    if ratio is None or rope.width > width or rope.width % 2:
        raise ValueError("its rotation is not of a known form")
    compared = _Compared(before, after, counted, tolerance)
    if shift is not None:
        way = _Way(given + shift, rope.frequencies(last), rope.attention_factor)
        if (error := compared.error(way, expected.interleaved)) <= tolerance:
            return Comparison(error, tolerance), shift
    untried = _ways(expected, rope, facts, given, width, ratio, counted)
    configured, right = next(untried), expected.interleaved
    error = compared.error(configured, right)
    if error <= tolerance:
        return Comparison(error, tolerance), None
    if right is not None and compared.error(configured, not right) <= tolerance:
        pairs = ("neighbouring components", "components of the two halves")
        text = f"it pairs {pairs[right]}, but this architecture pairs {pairs[not right]}"
        return Comparison(error, tolerance, Difference("wrong pairs", text)), None
    if compared.unmoved(0) and compared.unmoved(1):
        raise ValueError("its queries and keys have no positions")
    ways = list(untried)
    fitting = next((way for way in ways if compared.error(way) <= tolerance), None)
    if fitting is not None and not fitting.cause:
        first = counted.int().argmax(1, keepdim=True)
        moved = (fitting.positions - given).expand(counted.shape).gather(1, first)
        return Comparison(0.0, tolerance), moved
    if fitting is None:
        fault = _one_only(configured, ways, compared)
    else:
        fault = Difference(fitting.cause, fitting.sentence)
    if fault is None:
        raise ValueError("its rotation is of no known form")
    return Comparison(error, tolerance, fault), None


class _Compared(NamedTuple):
    """Queries and keys before and after their rotation.

    Attributes:
        before: without positions, (B, Hq, L, E) and (B, H, L, E).
        after: as the attention function gets them.
        counted: boolean (B, L), True on real tokens.
        tolerance: largest difference that rounding explains.
    """

    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    counted: Tensor
    tolerance: float

    def error(
        self, way: _Way, interleaved: bool | None = None, sides: tuple[int, ...] = (0, 1)
    ) -> float:
        """Largest relative difference from a way, where rotated components begin best.

        Args:
            way: the way.
            interleaved: how components are paired; None tries both.
            sides: 0 for queries, 1 for keys.
        """
        pairs = [(self.before[side], self.after[side]) for side in sides]
        width, least = self.after[0].shape[-1], torch.inf
        for start in sorted({0, width - 2 * way.frequencies.numel()}):
            for adjacent in (False, True) if interleaved is None else (interleaved,):
                turned = [(_rotated(x, way, start, adjacent), y) for x, y in pairs]
                least = min(least, max(_apart(x, y, self.counted) for x, y in turned))
        return least

    def unmoved(self, index: int) -> bool:
        """Whether queries (0) or keys (1) are not rotated."""
        return _apart(self.before[index], self.after[index], self.counted) <= self.tolerance


def _rotated(x: Tensor, way: _Way, start: int, interleaved: bool) -> Tensor:
    """Queries or keys (B, H, L, E) rotated in float64.

    Args:
        x: without positions.
        way: how; positions and frequencies are rounded to its dtype, if it has one.
        start: index of the first rotated component.
        interleaved: whether pairs are adjacent components; else halves are paired.
    """
    frequencies, positions = way.frequencies.to(x.device), way.positions.to(x.device)
    if way.dtype is not None:
        frequencies, positions = frequencies.to(way.dtype), positions.to(way.dtype)
    else:
        positions = positions.double()
    angle = (positions[:, None, :, None] * frequencies).double()
    cos, sin = angle.cos() * way.factor, angle.sin() * way.factor
    width = 2 * frequencies.numel()
    before, turned, after = x.double().split([start, width, x.shape[-1] - start - width], -1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    done = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([before, done, after], -1)


def _one_only(configured: _Way, ways: list[_Way], compared: _Compared) -> Difference | None:
    """A fault of the queries alone, or of the keys alone."""
    for index, name in enumerate(("queries", "keys")):
        if compared.error(configured, sides=(1 - index,)) > compared.tolerance:
            continue
        if compared.unmoved(index):
            return Difference("not rotated", f"the {name} are not rotated")
        for way in ways:
            if compared.error(way, sides=(index,)) <= compared.tolerance:
                text = f"{way.sentence} (only in the {name})"
                return Difference(way.cause or "positions", text)
    return None


def _ways(
    expected: Expectation,
    rope: Rope,
    facts: Pass,
    given: Tensor,
    width: int,
    ratio: float,
    counted: Tensor,
) -> Iterator[_Way]:
    """Ways to rotate: first as configured, then with each fault, likeliest first."""
    last = int(given.max()) + 1
    own, factor = rope.frequencies(last), rope.attention_factor
    yield _Way(given, own, factor)
    kind = f"rope_type={rope.kind}"
    plain = rope.plain().frequencies(last)
    if rope.scaled:
        text = f"the rotation has no scaling, but the configuration says {kind}"
        yield _Way(given, plain, ratio, "RoPE scaling ignored", text)
    if abs(ratio - factor) > 1e-3:
        text = f"queries and keys are multiplied by {ratio:.4g}, but {kind} means {factor:.4g}"
        yield _Way(given, own, ratio, "wrong attention factor", text)
    yield from _other_positions(facts, given, own, factor, counted)
    for other in expected.other_ropes:
        text = f"it rotates with the settings of another type of layer (theta {other.theta:g})"
        wrong = other.frequencies(last)
        yield _Way(given, wrong, other.attention_factor, "RoPE of another layer type", text)
    for base in (1e4, 1e6, 5e5):
        if base != rope.theta:
            text = f"it rotates with a base of {base:g}, but rope_theta={rope.theta:g}"
            based = Rope(rope.kind, base, rope.width, rope.parameters, rope.longest)
            for each in (based, based.plain()) if rope.scaled else (based,):
                yield _Way(given, each.frequencies(last), ratio, "wrong RoPE base", text)
    if rope.width < width:
        whole = Rope(rope.kind, rope.theta, width, rope.parameters, rope.longest)
        text = f"it rotates all {width} components, but partial_rotary_factor means {rope.width}"
        yield _Way(given, whole.frequencies(last), factor, "wrong RoPE width", text)
        text = f"its frequencies are those of {width} rotated components, not of {rope.width}"
        some = whole.frequencies(last)[: rope.width // 2]
        yield _Way(given, some, factor, "wrong RoPE width", text)
    if rope.kind == "longrope":
        text = "it uses the short factors of LongRoPE beyond the trained length, or the reverse"
        for length in (1, 1 << 30):
            yield _Way(given, rope.frequencies(length), factor, "LongRoPE factors swapped", text)
    stretch = rope.parameters.get("factor")
    if rope.scaled and isinstance(stretch, int | float):
        text = f"positions are divided by the factor {stretch:g}, but the configuration says {kind}"
        yield _Way(given, plain / stretch, ratio, "wrong RoPE scaling", text)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        text = f"positions and frequencies are rounded to {name}"
        yield _Way(given, own, factor, "positions rounded", text, dtype)


def _other_positions(
    facts: Pass, given: Tensor, own: Tensor, factor: float, counted: Tensor
) -> Iterator[_Way]:
    """Ways with other positions than those given."""
    queries = given.shape[1]
    places = torch.arange(queries, device=given.device)[None] + facts.past
    text = "positions count padding: they are places in the padded batch"
    candidates = [(places, text)]
    if facts.documents is not None:
        yield _Way(places, own, factor, "position_ids ignored", "it ignores position_ids")
    if facts.past:
        text = "positions of cached decoding start at 0 in each pass"
        candidates.insert(0, (places - facts.past, text))
    for step in (1, -1):
        candidates.append((given + step, f"positions are shifted by {step:+d}"))
        if facts.past:
            text = f"positions of cached decoding are shifted by {step:+d}"
            candidates.append((places + step, text))
    document = _documents(facts, queries, given.device)
    for positions, sentence in candidates:
        shift = (positions - given).expand(given.shape)
        if not bool((shift != 0).any()):
            continue
        # a shift of a whole text changes no score
        starts = document.expand(given.shape)
        if facts.documents is None:
            starts = counted.int().argmax(1, keepdim=True).expand(given.shape)
        same = (shift == shift.gather(1, starts)) | ~counted
        harmless = not facts.past and bool(same.all())
        yield _Way(positions, own, factor, "" if harmless else "positions", sentence)


def _documents(facts: Pass, tokens: int, device: torch.device) -> Tensor:
    """Index of the first token of each token's document, (1, L)."""
    places = torch.arange(tokens, device=device)
    if facts.documents is None:
        return torch.zeros_like(places)[None]
    starts = facts.documents[:-1]
    return starts[torch.bucketize(places, facts.documents[1:].contiguous(), right=True)][None]


def _ratio(
    rope: Rope, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], counted: Tensor
) -> float | None:
    """By what rotated components are multiplied; None if it is not the same for all tokens."""
    width = after[0].shape[-1]
    for size in (rope.width, width):
        for start in sorted({0, width - size} if size <= width else ()):
            pairs = zip(before, after, strict=True)
            ratios = [_ratio_of(x, y, counted, slice(start, start + size)) for x, y in pairs]
            known = [ratio for ratio in ratios if ratio is not None]
            if len(known) == 2:
                return known[0]
    return None


def _ratio_of(x: Tensor, y: Tensor, counted: Tensor, part: slice) -> float | None:
    """Ratio of the lengths of rotated and other vectors; None if it varies."""
    lengths = [z.double()[..., part].transpose(1, 2)[counted].norm(dim=-1) for z in (x, y)]
    if not lengths[0].numel():
        return None
    good = lengths[0] > 1e-3 * lengths[0].max()
    ratio = (lengths[1] / lengths[0])[good]
    steady = ratio.numel() and float(ratio.max() - ratio.min()) <= 0.03 * float(ratio.mean())
    return float(ratio.mean()) if steady else None


def _apart(x: Tensor, y: Tensor, counted: Tensor) -> float:
    """Largest distance of two vectors of a token and head, relative to the longest vector."""
    first, second = x.double().transpose(1, 2)[counted], y.double().transpose(1, 2)[counted]
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
    for names, target in ((_QUERY, query), (_KEY, key)):
        found = [outputs[name] for name in names if name in outputs]
        sides.append(_as_heads(found[0], target) if found else None)
    if sides[0] is not None and sides[1] is not None:
        return sides[0], sides[1]
    for name in _PACKED:
        if name in outputs:
            return _unpacked(outputs[name], query, key, by_head=name == "query_key_value")
    return None


def _as_heads(found: Tensor, target: Tensor) -> Tensor | None:
    """An output of a projection or a norm, shaped as queries or keys; None if it does not fit."""
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
