"""Whether queries and keys are rotated as the configuration says, and how else they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.capture.rotary import rotated
from acutance.verification.expectation import Comparison, Difference, Expectation, Pass

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

#: Queries (B, Hq, L, E) and keys (B, H, L, E).
Heads: TypeAlias = tuple[Tensor, Tensor]


class _Way(NamedTuple):
    """One way to rotate: positions, frequencies, a factor, and the cause if it fits."""

    positions: Tensor
    frequencies: Tensor
    factor: float
    cause: str = ""
    sentence: str = ""
    dtype: torch.dtype | None = None


class Rotation:
    """Queries and keys before and after their rotation, beside what the configuration says of it.

    Args:
        expected: what the configuration says of the module.
        facts: what is known of the forward pass.
        before: queries (B, Hq, L, E) and keys (B, H, L, E) without positions.
        after: the same as the attention function gets them.
        counted: boolean (B, L), True on real tokens.

    Raises:
        ValueError: if nothing can be said.
    """

    def __init__(
        self, expected: Expectation, facts: Pass, before: Heads, after: Heads, counted: Tensor
    ) -> None:
        rope, given = expected.rope, facts.positions
        if rope is None or given is None:
            raise ValueError("no rotary positions to compare with")
        self._expected, self._facts, self._rope, self._given = expected, facts, rope, given
        self._before, self._after, self._counted = before, after, counted
        self._width, self._last = after[0].shape[-1], int(given.max()) + 1
        rounding = _TOLERANCE.get(after[0].dtype, 5e-2)
        self._tolerance = rounding + 4 * torch.finfo(torch.float32).eps * self._last
        ratio = self._measured_ratio()
        if ratio is None or rope.width > self._width or rope.width % 2:
            raise ValueError("its rotation is not of a known form")
        self._ratio, self._factor = ratio, rope.attention_factor
        self._frequencies = rope.frequencies(self._last)

    def compare(self, shift: Tensor | None = None) -> tuple[Comparison, Tensor | None]:
        """Compare rotated queries and keys with those that the configuration gives.

        Args:
            shift: of the positions in earlier passes over these texts, (B, 1); None for none.

        Returns:
            The comparison, and by how much positions are shifted in each text, (B, 1), which
            changes no score if it is the same in later passes; None if they are not.

        Raises:
            ValueError: if nothing can be said.
        """
        tolerance, right = self._tolerance, self._expected.interleaved
        if shift is not None:
            way = _Way(self._given + shift, self._frequencies, self._factor)
            if (error := self._error(way, right)) <= tolerance:
                return Comparison(error, tolerance), shift
        configured = _Way(self._given, self._frequencies, self._factor)
        error = self._error(configured, right)
        if error <= tolerance:
            return Comparison(error, tolerance), None
        if right is not None and self._error(configured, not right) <= tolerance:
            pairs = ("neighbouring components", "components of the two halves")
            text = f"it pairs {pairs[right]}, but this architecture pairs {pairs[not right]}"
            return Comparison(error, tolerance, Difference("wrong pairs", text)), None
        if self._unmoved(0) and self._unmoved(1):
            raise ValueError("its queries and keys have no positions")
        ways = list(self._faults())
        fitting = next((way for way in ways if self._error(way) <= tolerance), None)
        if fitting is not None and not fitting.cause:
            first = self._counted.int().argmax(1, keepdim=True)
            moved = (fitting.positions - self._given).expand(self._counted.shape).gather(1, first)
            return Comparison(0.0, tolerance), moved
        if fitting is None:
            fault = self._of_one_side(configured, ways)
        else:
            fault = Difference(fitting.cause, fitting.sentence)
        if fault is None:
            raise ValueError("its rotation is of no known form")
        return Comparison(error, tolerance, fault), None

    def _error(
        self, way: _Way, interleaved: bool | None = None, sides: tuple[int, ...] = (0, 1)
    ) -> float:
        """Largest relative difference from a way, where rotated components begin best.

        Args:
            way: the way.
            interleaved: how components are paired; None tries both.
            sides: 0 for queries, 1 for keys.
        """
        pairs = [(self._before[side].double(), self._after[side]) for side in sides]
        device = pairs[0][0].device
        frequencies, positions = way.frequencies.to(device), way.positions.to(device)
        if way.dtype is not None:
            frequencies = frequencies.to(way.dtype)
        positions = positions.to(way.dtype or torch.float64)
        angle = (positions[:, None, :, None] * frequencies).double()
        cos, sin = angle.cos() * way.factor, angle.sin() * way.factor
        least = torch.inf
        for start in sorted({0, self._width - 2 * way.frequencies.numel()}):
            for adjacent in (False, True) if interleaved is None else (interleaved,):
                apart = [
                    _apart(rotated(x, cos, sin, start, interleaved=adjacent), y, self._counted)
                    for x, y in pairs
                ]
                least = min(least, max(apart))
        return least

    def _unmoved(self, side: int) -> bool:
        """Whether queries (0) or keys (1) are not rotated."""
        apart = _apart(self._before[side], self._after[side], self._counted)
        return apart <= self._tolerance

    def _of_one_side(self, configured: _Way, ways: list[_Way]) -> Difference | None:
        """A fault of the queries alone, or of the keys alone."""
        for side, name in enumerate(("queries", "keys")):
            if self._error(configured, sides=(1 - side,)) > self._tolerance:
                continue
            if self._unmoved(side):
                return Difference("not rotated", f"the {name} are not rotated")
            for way in ways:
                if self._error(way, sides=(side,)) <= self._tolerance:
                    text = f"{way.sentence} (only in the {name})"
                    return Difference(way.cause or "positions", text)
        return None

    def _faults(self) -> Iterator[_Way]:
        """Ways to rotate, each with a fault, likeliest first."""
        rope, given, width, last = self._rope, self._given, self._width, self._last
        own, factor, ratio = self._frequencies, self._factor, self._ratio
        kind = f"rope_type={rope.kind}"
        plain = rope.plain().frequencies(last)
        if rope.scaled:
            text = f"the rotation has no scaling, but the configuration says {kind}"
            yield _Way(given, plain, ratio, "RoPE scaling ignored", text)
        if abs(ratio - factor) > 1e-3:
            text = f"queries and keys are multiplied by {ratio:.4g}, but {kind} means {factor:.4g}"
            yield _Way(given, own, ratio, "wrong attention factor", text)
        yield from self._other_positions()
        for other in self._expected.other_ropes:
            text = f"it rotates with the settings of another type of layer (theta {other.theta:g})"
            wrong = other.frequencies(last)
            yield _Way(given, wrong, other.attention_factor, "RoPE of another layer type", text)
        for base in (1e4, 1e6, 5e5):
            if base != rope.theta:
                text = f"it rotates with a base of {base:g}, but rope_theta={rope.theta:g}"
                based = replace(rope, theta=base)
                for tried in (based, based.plain()) if rope.scaled else (based,):
                    yield _Way(given, tried.frequencies(last), ratio, "wrong RoPE base", text)
        if rope.width < width:
            whole = replace(rope, width=width).frequencies(last)
            text = (
                f"it rotates all {width} components, but partial_rotary_factor means {rope.width}"
            )
            yield _Way(given, whole, factor, "wrong RoPE width", text)
            text = f"its frequencies are those of {width} rotated components, not of {rope.width}"
            yield _Way(given, whole[: rope.width // 2], factor, "wrong RoPE width", text)
        if rope.kind == "longrope":
            text = "it uses the short factors of LongRoPE beyond the trained length, or the reverse"
            for length in (1, 1 << 30):
                swapped = rope.frequencies(length)
                yield _Way(given, swapped, factor, "LongRoPE factors swapped", text)
        stretch = rope.parameters.get("factor")
        if rope.scaled and isinstance(stretch, int | float):
            text = f"positions are divided by the factor {stretch:g}, but the configuration says "
            yield _Way(given, plain / stretch, ratio, "wrong RoPE scaling", text + kind)
        for dtype in (torch.bfloat16, torch.float16):
            text = f"positions and frequencies are rounded to {str(dtype).removeprefix('torch.')}"
            yield _Way(given, own, factor, "positions rounded", text, dtype)

    def _other_positions(self) -> Iterator[_Way]:
        """Ways with other positions than those given."""
        facts, given = self._facts, self._given
        places = torch.arange(given.shape[1], device=given.device)[None]
        starts = self._counted.int().argmax(1, keepdim=True)
        if facts.documents is not None:  # the first token of each token's document
            ends = facts.documents[1:].contiguous()
            starts = facts.documents[:-1][torch.bucketize(places, ends, right=True)]
            text = "it ignores position_ids"
            yield _Way(
                places + facts.past, self._frequencies, self._factor, "position_ids ignored", text
            )
        candidates = [
            (places + facts.past, "positions count padding: they are places in the padded batch")
        ]
        if facts.past:
            candidates.insert(0, (places, "positions of cached decoding start at 0 in each pass"))
        for step in (1, -1):
            candidates.append((given + step, f"positions are shifted by {step:+d}"))
            if facts.past:
                text = f"positions of cached decoding are shifted by {step:+d}"
                candidates.append((places + facts.past + step, text))
        for positions, sentence in candidates:
            shift = (positions - given).expand(given.shape)
            if bool((shift != 0).any()):
                # a shift of a whole text changes no score
                same = (shift == shift.gather(1, starts.expand(len(shift), -1))) | ~self._counted
                harmless = not facts.past and bool(same.all())
                cause = "" if harmless else "positions"
                yield _Way(positions, self._frequencies, self._factor, cause, sentence)

    def _measured_ratio(self) -> float | None:
        """By what rotated components are multiplied; None if it is not the same for all tokens."""
        for size in (self._rope.width, self._width):
            for start in sorted({0, self._width - size} if size <= self._width else ()):
                chosen = slice(start, start + size)
                pairs = zip(self._before, self._after, strict=True)
                ratios = [_ratio_of(x, y, self._counted, chosen) for x, y in pairs]
                if None not in ratios:
                    return ratios[0]
        return None


def _ratio_of(x: Tensor, y: Tensor, counted: Tensor, chosen: slice) -> float | None:
    """Ratio of the lengths of rotated and other vectors; None if it varies."""
    before, after = (z.double()[..., chosen].transpose(1, 2)[counted].norm(dim=-1) for z in (x, y))
    if not before.numel():
        return None
    ratio = (after / before)[before > 1e-3 * before.max()]
    steady = ratio.numel() and float(ratio.max() - ratio.min()) <= 0.03 * float(ratio.mean())
    return float(ratio.mean()) if steady else None


def _apart(x: Tensor, y: Tensor, counted: Tensor) -> float:
    """Largest distance of two vectors of a token and head, relative to the longest vector."""
    first, second = x.double().transpose(1, 2)[counted], y.double().transpose(1, 2)[counted]
    size = float(second.norm(dim=-1).max()) if second.numel() else 0.0
    return float((first - second).norm(dim=-1).max()) / size if size else 0.0


def unrotated_heads(outputs: dict[str, Tensor], query: Tensor, key: Tensor) -> Heads | None:
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
    if found.dim() == 4 and found.shape[1] == heads and heads != tokens:
        return found.reshape(target.shape)
    return found.reshape(batch, tokens, heads, width).transpose(1, 2)


def _unpacked(found: Tensor, query: Tensor, key: Tensor, *, by_head: bool) -> Heads | None:
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
