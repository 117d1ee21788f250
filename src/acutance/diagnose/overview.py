"""An overview of all heads in a few lines, however many heads there are.

At most ten findings and five pieces of advice, one line each: classes of heads with their numbers
and layers, the extremes, the head that differs most from the others. :func:`findings` and
:func:`recommendations` give full sentences.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from acutance.diagnose.classes import CLASSES, classify
from acutance.diagnose.recommendations import (
    KINDS,
    Recommendation,
    no_recommendation,
    recommendations,
)
from acutance.diagnose.rules import HeadFacts, Summary, extremes

MOST_FINDINGS, MOST_ADVICE = 10, 5
#: Heads or layers that a line names one by one.
_NAMED = 4
#: Deviations (1.48 times the median one) from the median at which a head counts as unusual.
_UNUSUAL = 5.0
_COMPARED = ("max_logit", "logit_std", "attention_distance", "normalized_entropy")
#: Each kind of recommendation, and what to do about it, in a few words.
_IN_BRIEF = {
    "mismatch": ("captured incorrectly", "do not trust its numbers"),
    "not_finite": ("scores not finite", "find the inf or NaN"),
    "large_logits": ("large logits", "monitor them in training"),
    "coarse_scores": ("coarse scores", "keep them in float32"),
    "entropy_collapse": ("collapsed", "nothing, unless it is new"),
    "dilution": ("dilution with length", "not a fault in itself"),
    "sink": ("first token", "keep it in a KV cache"),
    "dead": ("dead", "judge the loss without"),
}
#: What else to do about heads of an encoder, which has no cache, and often no loss to judge.
_IN_ENCODERS = {"sink": "not a fault in itself", "dead": "try your task without"}


def overview(summary: Summary) -> list[str]:
    """What a summary shows, in at most ten short sentences, most important first.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 40, 8)] * 3)
        >>> overview(probe.summary())
        ['dead: 2 of 2 heads: L0 H0, L0 H1',
        'sharpest: L0 H0, 40 effective keys of 40; most diffuse: L0 H1, 40']
    """
    heads = [head for head in summary.facts if head.record.status != "mismatch"]
    if not heads:
        return []
    trained = summary.about.get("untrained") is not True
    lines = _kinds(summary, heads) if trained else []
    if (found := extremes(heads)) is not None:
        name, low, high = found
        n = low.mean["n_keys"]
        known = math.isfinite(n) and math.isfinite(low.mean["effective_keys"])
        keys = f"{_spread(low, name)} of {n:,.0f}" if known else _spread(low, name)
        rest = "" if high is low else f"; most diffuse: {_place(high)}, {_keys(high, name)}"
        lines.append(f"sharpest: {_place(low)}, {keys}{rest}")
    if trained and (hit := [head for head in heads if "entropy_collapse" in head.rules]):
        more = f" and {len(hit) - _NAMED:,} more" if len(hit) > _NAMED else ""
        lines.append(f"collapsed: {', '.join(map(_place, hit[:_NAMED]))}{more}")
    if trained:
        lines += _unusual(heads)
    return lines[:MOST_FINDINGS]


def advice_in_brief(summary: Summary) -> list[str]:
    """What to do, most urgent first, at most five lines; one line if there is nothing to do."""
    by_kind: dict[str, list[Recommendation]] = defaultdict(list)
    encoding = {head.layer for head in summary.facts if head.sees_all}
    for each in recommendations(summary):
        by_kind[each.kind].append(each)
    lines = []
    for kind in KINDS:
        if same := by_kind.get(kind):
            most = max(same, key=lambda each: abs(each.numbers.get("size", 0.0)))
            heads = sum(len(each.heads) for each in same)
            many = f"{_counted(heads, 'head')} in " if heads else ""
            where = f"layer {most.layer}" if len(same) == 1 else _counted(len(same), "layer")
            first = f" (L{most.layer} most)" if len(same) > 1 else ""
            name, action = _IN_BRIEF[kind]
            if all(each.layer in encoding for each in same):
                action = _IN_ENCODERS.get(kind, action)
            lines.append(f"{name}: {many}{where}{first}; {action}")
    return lines[:MOST_ADVICE] or [no_recommendation(summary)]


def _kinds(summary: Summary, heads: Sequence[HeadFacts]) -> list[str]:
    """A line for each class that has heads, the largest first."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, classes in zip(summary.places, classify(summary), strict=True):
        for head_class in classes:
            places[head_class.name].append(place)
    lines = []
    for name in sorted(places, key=lambda name: (-len(places[name]), list(CLASSES).index(name))):
        those = places[name]
        share = f"{name}: {len(those):,} of {_counted(len(heads), 'head')}"
        lines.append(f"{share}: {_where(those)}")
    return lines


def _where(places: Sequence[tuple[int, int]]) -> str:
    """Where heads are: each of a few, else how many by layer, or the layers with most."""
    by_layer = Counter(layer for layer, _ in places)
    if len(places) <= _NAMED:
        return ", ".join(f"L{layer} H{head}" for layer, head in places)
    if len(by_layer) == 1:
        return f"all in layer {places[0][0]}"
    if len(by_layer) <= _NAMED:
        return ", ".join(f"{heads} in layer {layer}" for layer, heads in sorted(by_layer.items()))
    ranked = sorted(by_layer, key=lambda layer: (-by_layer[layer], layer))[:3]
    most = ", ".join(map(str, sorted(ranked)))
    return f"layers {min(by_layer)}–{max(by_layer)}, most in {most}"


def _unusual(heads: Sequence[HeadFacts]) -> list[str]:
    """The heads furthest from the median of all heads, in median absolute deviations, by metric."""
    ranked = []
    for name in _COMPARED:
        known = [(head.mean[name], head) for head in heads if math.isfinite(head.mean[name])]
        if len(known) < 8:
            continue
        middle = median(value for value, _ in known)
        spread = 1.4826 * median(abs(value - middle) for value, _ in known)
        value, head = max(known, key=lambda pair: abs(pair[0] - middle))
        off = abs(value - middle) / spread if spread > 0 else 0.0
        if off > _UNUSUAL:
            ranked.append((off, name, head, value, middle))
    ranked.sort(key=lambda row: -row[0])
    return [
        f"unusual: {_place(head)}, {name} {value:.3g} (heads' median {middle:.3g}, "
        f"{off:.0f} deviations away)"
        for off, name, head, value, middle in ranked[:2]
    ]


def _spread(head: HeadFacts, name: str) -> str:
    """A head's effective keys, or another metric, with its unit."""
    known = math.isfinite(head.mean["effective_keys"])
    return f"{_keys(head, name)} {'effective keys' if known else name.replace('_', ' ')}"


def _keys(head: HeadFacts, name: str) -> str:
    """A head's effective keys, or another metric if they were not recorded."""
    value = head.mean["effective_keys"]
    if not math.isfinite(value):
        return f"{head.mean[name]:.2f}"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _place(head: HeadFacts) -> str:
    """Layer and head in short form, ``L5 H3``."""
    return f"L{head.layer} H{head.head}"


def _counted(count: int, noun: str) -> str:
    """A number with a noun in singular or plural."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
