"""Recommendations: what is unusual about a model's attention, and how to find out what it means.

Attention statistics do not show how a change would affect the loss, so the advice says how to
measure that (:func:`acutance.judge`, or the user's own task in an encoder), or names a change that
costs nothing. Growth is reported only if a fitted slope is significant, and a finding that may be
intended is marked as suspected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from acutance.diagnose.rules import FEW_ROWS, HeadFacts, Summary
from acutance.diagnose.rules import Kind as Rule
from acutance.diagnose.sentences import ADVICE, Certainty, advice, crossing
from acutance.escapes import ranges

Kind: TypeAlias = Rule | Literal["mismatch"]
#: Every kind, most urgent first, and what it is called.
KINDS: dict[Kind, str] = {
    "mismatch": "Captured incorrectly",
    "not_finite": "Non-finite scores",
    "large_logits": "Large logits",
    "coarse_scores": "Scores too large for their precision",
    "entropy_collapse": "Hardly any entropy",
    "dilution": "Entropy grows with length",
    "sink": "Large weight on the first token",
    "dead": "Averages everything",
}
#: Shown where there is nothing to recommend.
NOTHING = "No head exceeds a threshold."

#: Shown in its place where the model is untrained.
UNTRAINED = "Untrained model: load trained weights before diagnosing its heads."

_OF_ANY_WEIGHTS = {"mismatch", "not_finite"}  # reported of an untrained model too
_NAMED = 3  # layers named of a kind, in words


@dataclass(frozen=True)
class Recommendation:
    """Something unusual about heads of one layer.

    Attributes:
        kind: one of :data:`KINDS`.
        layer: index of the layer, in model order.
        heads: numbers of the heads; empty for the whole layer.
        module: qualified name of the layer's module.
        reason: what is unusual.
        numbers: the numbers of the head furthest beyond the threshold.
        advice: how to find out what it means, or a remedy that costs nothing.
        certainty: "measured", "fitted" (a slope with its standard error), or "suspected" (may be by
            design).
    """

    kind: Kind
    layer: int
    heads: tuple[int, ...]
    module: str
    reason: str
    numbers: Mapping[str, float]
    advice: str
    certainty: Certainty

    @property
    def place(self) -> str:
        """The layer and its heads, as the beginning of a sentence."""
        layer = f"Layer {self.layer}{crossing(self.module)}"
        if not self.heads:
            return layer
        return f"{layer} {ranges(sorted(self.heads), 'head')}"

    @property
    def sentence(self) -> str:
        """Place, reason, advice and certainty in one text."""
        return f"{self.place}: {self.reason}; {self.advice}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "heads": list(self.heads), "sentence": self.sentence}


def recommendations(summary: Summary) -> list[Recommendation]:
    """What is unusual about a summary, most urgent first, one for each kind and layer.

    Args:
        summary: any head summary. Growth with n is reported only if its profile has rows in at
            least three octaves of n, each from two sequences or more.

    Returns:
        The recommendations; none if no head is beyond a threshold of
        :data:`acutance.probing.THRESHOLDS`. For an untrained model only capture errors and scores
        that are not finite are reported.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 40, 8)] * 3)
        >>> print(recommendations(probe.summary())[0].sentence)
        Layer 0 heads 0–1: entropy is 1.000 of its maximum log n (n = 40 keys on average); check
        whether the heads contribute anything: acutance.apply(model, "off:LAYER.HEAD") runs your
        own task without them.
    """
    recommended = []
    heads: list[list[HeadFacts]] = [[] for _ in summary.layers]
    for head in summary.facts:
        heads[head.layer].append(head)
    untrained = summary.about.get("untrained") is True
    for kind in KINDS:
        if untrained and kind not in _OF_ANY_WEIGHTS:
            continue
        for index, layer in enumerate(summary.layers):
            if not layer.rows:
                continue
            if kind == "mismatch":
                if layer.status == "mismatch":
                    recommended.append(_mismatch(index, layer.module, layer.error))
            elif beyond := [head for head in heads[index] if kind in head.rules]:
                recommended.append(_recommendation(kind, beyond))
    return recommended


def head_reasons(summary: Summary) -> list[dict[str, str]]:
    """The reason of each kind of recommendation for every head, in that head's own numbers."""
    return [
        {kind: advice(kind, [head]).reason for kind in ADVICE if kind in head.rules}
        for head in summary.facts
    ]


def no_recommendation(summary: Summary) -> str:
    """The sentence to show if nothing is recommended."""
    return UNTRAINED if summary.about.get("untrained") is True else NOTHING


def in_words(recommended: Sequence[Recommendation], nothing: str = NOTHING) -> list[str]:
    """Recommendations for a terminal: at most three layers of each kind, each advice once.

    Args:
        recommended: result of :func:`recommendations`.
        nothing: sentence for an empty list, see :func:`no_recommendation`.

    Returns:
        At least one sentence.
    """
    if not recommended:
        return [nothing]
    sentences = []
    for kind in KINDS:
        same = [each for each in recommended if each.kind == kind]
        named = sorted(sorted(same, key=_weight)[-_NAMED:], key=lambda each: each.layer)
        last_advice = ""
        for each in named:
            again = each.advice == last_advice
            sentences.append(f"{each.place}: {each.reason}." if again else each.sentence)
            last_advice = each.advice
        if rest := [each for each in same if each not in named]:
            heads = sum(len(each.heads) for each in rest)
            layers = f"{len(rest)} more layer{'s' * (len(rest) > 1)}"
            subject = f"{heads} heads of {layers}" if heads else layers
            sentences[-1] += f" The same is found in {subject}."
    return sentences


def _weight(recommendation: Recommendation) -> float:
    """How far a recommendation's head is beyond its threshold."""
    return abs(recommendation.numbers.get("size", 0.0))


def _mismatch(layer: int, module: str, error: float | None) -> Recommendation:
    """The recommendation for a layer whose recomputed output differs."""
    off = "" if error is None else f" by a relative error of {error:.2g}"
    reason = f"the output recomputed from the captured arguments differs from the model's{off}"
    numbers = {} if error is None else {"error": error}
    remedy = (
        "do not use this layer's numbers, and open an issue that shows how the layer computes "
        "attention"
    )
    return Recommendation("mismatch", layer, (), module, reason, numbers, remedy, "measured")


def _recommendation(kind: Rule, beyond: list[HeadFacts]) -> Recommendation:
    """The recommendation for heads of one layer."""
    head = max(beyond, key=lambda head: head.rules[kind].size)
    record, worst = head.record, head.rules[kind]
    reason, remedy, certainty = advice(kind, beyond)
    if record.rows < FEW_ROWS and certainty == "measured" and kind != "not_finite":
        certainty = "suspected"
        reason += f" (in {record.rows} row{'s' * (record.rows != 1)} only)"
    finite = {name: value for name, value in worst.numbers.items() if math.isfinite(value)}
    heads, numbers = tuple(head.head for head in beyond), {"size": worst.size, **finite}
    return Recommendation(
        kind, head.layer, heads, record.module, reason, numbers, remedy, certainty
    )
