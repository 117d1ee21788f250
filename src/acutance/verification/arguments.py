"""Compare a call's arguments with what the configuration says, and name each difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.readers.huggingface import packed_lengths
from acutance.masks import hides
from acutance.probing.causes import visible_keys
from acutance.verification.expectation import Expectation

_SCALE_TOLERANCE = 1e-5


class Difference(NamedTuple):
    """One difference of a call from its expectation.

    Attributes:
        cause: a short name, such as ``"window off by one"``.
        sentence: what differs.
    """

    cause: str
    sentence: str


class Comparison(NamedTuple):
    """A comparison of a call's gradients, or of its rotated queries and keys, with those expected.

    Attributes:
        error: largest relative difference.
        tolerance: largest difference that rounding explains.
        difference: what they differ by; None if they agree.
        problem: why nothing can be said; empty if something can.
        shift: by how much positions are shifted in each text, (B, 1), which changes no score if it
            is the same in later passes; None if they are not.
    """

    error: float
    tolerance: float
    difference: Difference | None = None
    problem: str = ""
    shift: Tensor | None = None


@dataclass(frozen=True)
class Pass:
    """What is known of one forward pass.

    Attributes:
        inputs: kind of input, such as ``"left padding"``.
        tokens: tokens of the pass, L.
        past: tokens in the cache before them.
        real: boolean (B, past + L), False on padding; None if unknown.
        positions: of the tokens of the pass, (B, L); None if the model was not given any.
        documents: cumulative lengths of packed documents; None for one document in each row.
        is_text: whether every attention of the model reads these tokens, so that masks are known.
        separates: whether the model's code makes its masks from the positions. Otherwise only a
            call that is given them is to tell documents apart, as flash attention does.
    """

    inputs: str
    tokens: int = 0
    past: int = 0
    real: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    is_text: bool = False
    separates: bool = False

    def knows_masks(self, call: AttentionCall) -> bool:
        """Whether the keys that a call's rows see follow from this."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        return (
            self.is_text
            and not call.cross
            and queries == self.tokens
            and queries <= keys <= self.past + self.tokens
            and (self.real is None or len(self.real) == len(call.query))
        )

    def promises(self, call: AttentionCall) -> bool:
        """Whether a call's masks are to tell the documents apart, or there are none."""
        if self.documents is None or self.separates:
            return True
        return packed_lengths(call.positions, call.query, call.key.shape[2]) is not None

    def real_rows(self, call: AttentionCall) -> Tensor | None:
        """Boolean (B, L), False on padding queries; None if all are real."""
        if self.real is None or not self.knows_masks(call):
            return call.real
        return self.real[:, self.past :]

    def real_keys(self, keys: int) -> Tensor | None:
        """Boolean (B, S), False on padding keys; None if all are real."""
        if self.real is None or bool(self.real[:, -keys:].all()):
            return None
        return self.real[:, -keys:]


def expected_call(call: AttentionCall, expected: Expectation, facts: Pass) -> AttentionCall:
    """The call as configuration and parameters say that it should be.

    Masks stay those of the call where the configuration does not determine them.

    Args:
        call: the captured call.
        expected: what the configuration says of its module.
        facts: what is known of the forward pass.
    """
    changes: dict[str, Any] = {"dropout_p": 0.0, "unknown": ()}
    if expected.scale is not None:
        changes["scale"] = expected.scale
    if expected.softcap is not None:
        changes["softcap"] = expected.softcap
    if expected.sinks is not None:
        changes["sinks"] = expected.sinks
    if expected.masks and facts.knows_masks(call):
        keys = call.key.shape[2]
        changes |= {
            "attn_mask": None,
            "is_causal": bool(expected.causal),
            "query_offset": keys - call.query.shape[2],
            "window": expected.window,
            "key_mask": facts.real_keys(keys),
            "cu_seqlens": facts.documents,
        }
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            added = torch.where(hides(mask), 0.0, mask)
            if bool((added != 0).any()):  # ALiBi or another bias, with the mask in one tensor
                changes["bias"] = added if call.bias is None else added + call.bias
    ours = replace(call, **changes)
    if expected.window is not None and expected.causal is False and ours.window is not None:
        halved = (ours.window // 2 + 1,) if expected.window_of_both_sides else ()
        for size in (ours.window + 1, *halved):
            other = replace(ours, window=size)
            if torch.equal(*torch.broadcast_tensors(visible_keys(call), visible_keys(other))):
                return other
    return ours


def counted_rows(wanted: Tensor, call: AttentionCall, facts: Pass) -> Tensor:
    """Rows to compare, boolean (B, Hq, L): real tokens that see a key.

    Args:
        wanted: the keys that each row is to see, (B, 1 or Hq, L, S).
        call: the captured call.
        facts: what is known of the forward pass.
    """
    counted = wanted.any(-1).expand(-1, call.query.shape[1], -1)
    real = facts.real_rows(call)
    return counted if real is None else counted & real[:, None, :].to(counted.device)


def argument_differences(
    call: AttentionCall,
    ours: AttentionCall,
    expected: Expectation,
    seen: Tensor,
    wanted: Tensor,
    counted: Tensor,
) -> list[Difference]:
    """Differences of a captured call's arguments from those expected.

    Args:
        call: the captured call.
        ours: the same call with the expected arguments.
        expected: what the configuration says of its module.
        seen: the keys that each of its rows sees, (B, 1 or Hq, L, S).
        wanted: those that it is to see, likewise.
        counted: the rows to compare, from :func:`counted_rows`.
    """
    found = [*_scores(call, expected), *_heads(call, expected)]
    rows = counted[:, :1] if max(seen.shape[1], wanted.shape[1]) == 1 else counted
    if bool(((seen != wanted) & rows.unsqueeze(-1)).any()):
        found += _masks(seen, wanted, rows, ours, expected)
    return found


def _scores(call: AttentionCall, expected: Expectation) -> Iterator[Difference]:
    """Differences in what scores are computed from."""
    if expected.scale is not None:
        difference = abs(call.factor - expected.scale)
        if difference > _SCALE_TOLERANCE * expected.scale:
            yield Difference(
                "wrong scale",
                f"scores are scaled by {call.factor:.4g}, but {expected.scale_from} means "
                f"{expected.scale:.4g}",
            )
    cap = expected.softcap
    if cap is not None and call.softcap is None:
        text = f"scores are not capped, but attn_logit_softcapping={cap:g}"
        yield Difference("softcap missing", text)
    elif cap is not None and call.softcap is not None and abs(cap - call.softcap) > 1e-6 * cap:
        text = f"scores are capped at {call.softcap:g}, but attn_logit_softcapping={cap:g}"
        yield Difference("wrong softcap", text)
    if expected.sinks is None:
        return
    if call.sinks is None:
        text = "the sinks do not reach the attention function: rows sum to 1 without them"
        yield Difference("sinks dropped", text)
    elif not torch.allclose(call.sinks.double(), expected.sinks.double(), 1e-2, 1e-2):
        text = "the attention function gets other sinks than the module's parameter"
        yield Difference("wrong sinks", text)


def _heads(call: AttentionCall, expected: Expectation) -> Iterator[Difference]:
    """Key heads that were repeated in another order than query heads are grouped."""
    heads, given = call.query.shape[1], call.key.shape[1]
    wanted = expected.key_heads
    if not isinstance(wanted, int) or not 1 < wanted < given or given != heads or heads % wanted:
        return
    group, key = heads // wanted, call.key
    if torch.equal(key, key[:, ::group].repeat_interleave(group, 1)):
        return
    if torch.equal(key, key[:, :wanted].repeat(1, group, 1, 1)):
        text = (
            f"the {wanted} key heads are repeated in turn (0, 1, …, 0, 1, …), but query heads "
            f"0–{group - 1} share key head 0"
        )
        yield Difference("heads grouped differently", text)


def _masks(
    seen: Tensor, wanted: Tensor, rows: Tensor, ours: AttentionCall, expected: Expectation
) -> list[Difference]:
    """Name what distinguishes the keys that rows see from those that they are to see.

    Args:
        seen: keys that are visible in the captured call, (B, 1 or Hq, L, S).
        wanted: keys that should be, same shape or broadcastable.
        rows: rows to compare, (B, 1 or Hq, L).
        ours: the expected call.
        expected: what the configuration says of the module.
    """
    queries, keys = ours.query.shape[2], ours.key.shape[2]
    device = seen.device
    places = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = (places - torch.arange(keys, device=device)).expand(seen.shape)
    extra = seen & ~wanted & rows.unsqueeze(-1)
    missing = wanted & ~seen & rows.unsqueeze(-1)
    found: list[Difference] = []
    if not bool((seen == wanted)[(rows.unsqueeze(-1) & (distance != 0)).expand_as(seen)].any()):
        return [Difference("mask inverted", "rows see exactly the keys that should be hidden")]
    if ours.key_mask is not None:
        padding = ~ours.key_mask[:, None, None, :] & extra
        if bool(padding.any()):
            extra = extra & ~padding
            found.append(_padding(padding, missing, ours.key_mask))
            missing = missing & False if found[-1].cause == "padding mask wrong" else missing
    if ours.cu_seqlens is not None:
        ends = ours.cu_seqlens[1:].contiguous()
        document = torch.bucketize(torch.arange(keys, device=ends.device), ends, right=True)
        mixed = extra & (document[keys - queries :, None] != document)
        if bool(mixed.any()):
            extra = extra & ~mixed
            text = "tokens of packed documents see tokens of other documents"
            found.append(Difference("documents mixed", text))
    later = extra & (distance < 0)
    if bool(later.any()):
        extra = extra & ~later
        ahead = int(-distance[later].min())
        kind = "causal mask shifted" if ahead == 1 and keys > 2 else "not causal"
        text = f"rows see keys up to {ahead} {'token' if ahead == 1 else 'tokens'} ahead"
        found.append(Difference(kind, text))
    if bool(extra.any()):
        found.append(_wider(extra, seen & rows.unsqueeze(-1), distance, expected))
    behind = missing & (distance < 0)
    if bool(behind.any()) and not bool((seen & (distance < 0) & rows.unsqueeze(-1)).any()):
        missing = missing & ~behind
        text = "later keys are hidden, but the module is not causal"
        found.append(Difference("causal by mistake", text))
    if bool(missing.any()):
        found.append(_narrower(missing, seen & rows.unsqueeze(-1), distance, expected, queries))
    return found


def _padding(padding: Tensor, missing: Tensor, real: Tensor) -> Difference:
    """Name visible padding: a mask that is not applied, or one made for other tokens.

    Args:
        padding: visible padding keys, (B, 1 or Hq, L, S).
        missing: hidden keys that should be visible, same shape.
        real: real keys, (B, S).
    """
    if bool(missing.any()):
        text = "padding is visible and real tokens are hidden: the mask marks the wrong tokens"
        return Difference("padding mask wrong", text)
    seen = int(padding.any(2).any(1).sum())
    text = f"{seen} of {int((~real).sum())} padding keys are visible to real tokens"
    return Difference("padding ignored", text)


def _wider(extra: Tensor, seen: Tensor, distance: Tensor, expected: Expectation) -> Difference:
    """Name earlier keys that are visible beyond the window."""
    size = expected.window
    if size is None:
        pairs = f"{int(extra.sum())} pairs of query and key are visible that should be hidden"
        return Difference("mask wrong", pairs)
    reach = int(distance[seen].max()) + 1
    if reach == size + 1:
        text = f"rows see {reach} keys, but {expected.window_from} means {size}"
        return Difference("window off by one", text)
    text = f"rows see up to {reach} keys, but {expected.window_from}"
    return Difference("window ignored", text)


def _narrower(
    missing: Tensor, seen: Tensor, distance: Tensor, expected: Expectation, queries: int
) -> Difference:
    """Name keys that are hidden and should be visible."""
    if expected.causal is False:
        distance = distance.abs()
    nearest = int(distance[missing].min())
    reach = int(distance[seen].max()) + 1 if bool(seen.any()) else 0
    if nearest == 0 and not bool((seen & (distance == 0)).any()):
        return Difference("causal mask shifted", "no row sees its own token")
    if reach and nearest >= reach:
        size = expected.window
        if size is not None and reach == size - 1:
            text = f"rows see {reach} keys, but {expected.window_from} means {size}"
            return Difference("window off by one", text)
        text = f"rows see {reach} keys at most, but the configuration says {expected.window_from}"
        return Difference("window on the wrong layer" if size is None else "wrong window", text)
    keys = distance.shape[-1]
    if keys > queries and bool(seen[..., 0, :].any()) and not bool(seen[..., 0, 1:].any()):
        text = f"row 0 of {queries} sees only the first of {keys} keys: rows are aligned with it"
        return Difference("causal mask shifted", text)
    text = f"{int(missing.sum())} pairs of query and key are hidden that should be visible"
    return Difference("mask wrong", text)
