"""The rules that judge each head once; classes, findings and recommendations read the result.

A rule looks at one head's facts. It returns the numbers by which the head is beyond a threshold, or
None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from acutance.diagnose.thresholds import HeadFacts, Summary, facts, limit

Kind = Literal[
    "sink", "special_sink", "local", "previous-token", "diffuse", "sharp", "dead", "positional",
    "not_finite", "large_logits", "coarse_scores", "entropy_collapse", "dilution",
]  # fmt: skip

LARGE_LOGIT = limit("large_logits")
COARSE_STEP = limit("coarse_scores")
COLLAPSE = limit("entropy_collapse")
SINK = limit("sink")
DEAD = limit("dead")
DIFFUSE = limit("diffuse")
LEAST_KEYS = limit("least_keys")
LIFT = limit("lift")
STEEP = limit("steep")
GROWTH = limit("growth")
OCTAVES = 4  # octaves of n that a slope is fitted to: the largest n and its eighth
FEW_ROWS = int(limit("few_rows"))
_BITS = {"bfloat16": 8, "float16": 11}  # significant bits
#: Heads of these classes have little entropy because of what they do.
_BY_DESIGN = frozenset({"previous-token", "positional", "local"})
#: Rules that also hold for rows of few keys.
_ANY_LENGTH = frozenset({"not_finite", "large_logits", "coarse_scores", "dilution"})


@dataclass(frozen=True)
class Judgement:
    """One rule that a head meets, with its numbers.

    Attributes:
        size: how far beyond the threshold it is; ranks heads of the same kind.
        numbers: numbers for sentences about it.
    """

    size: float
    numbers: Mapping[str, float]


Rule = Callable[[HeadFacts], Judgement | None]


def judge(head: HeadFacts) -> dict[Kind, Judgement]:
    """The rules that one head meets.

    Empty if the layer's capture is known to be wrong. Rules about weights apply only to heads whose
    rows see at least eight keys on average: with fewer, every head looks sharp, local or uniform.
    """
    if head.record.status == "mismatch":
        return {}
    few = head.mean("n_keys") < LEAST_KEYS
    judged: dict[Kind, Judgement] = {}
    for kind, rule in RULES.items():
        if few and kind not in _ANY_LENGTH:
            continue
        if kind == "entropy_collapse" and judged.keys() & _BY_DESIGN:
            continue
        if (judgement := rule(head)) is not None:
            judged[kind] = judgement
    return judged


def judge_heads(summary: Summary) -> list[dict[Kind, Judgement]]:
    """:func:`judge` for every head of a summary, in the order of its arrays."""
    return [judge(head) for head in facts(summary)]


def _above(least: float, metric: str, *others: str, most: float = math.inf) -> Rule:
    """A rule: the mean of a metric is above ``least`` and at most ``most``.

    The judgement has that mean as its value, and the means of ``others`` beside it.
    """

    def rule(head: HeadFacts) -> Judgement | None:
        value = head.mean(metric)
        if not least < value <= most:
            return None
        return Judgement(value, {name: head.mean(name) for name in (metric, *others)})

    return rule


_on_first_key = _above(SINK, "first_weight", "mass_special", "n_keys")


def _sink(head: HeadFacts) -> Judgement | None:
    """An attention sink: most of its weight, and ``LIFT`` uniform shares, is on the first key."""
    judgement = _on_first_key(head)
    if judgement is None or judgement.size < LIFT / head.mean("n_keys"):
        return None
    return judgement


def _local(head: HeadFacts) -> Judgement | None:
    """A local head: most of its weight is on nearby keys.

    Returns:
        The judgement, with that weight as its value. None if it is at most the threshold, unknown,
        or less than ``LIFT`` times what uniform attention would give.
    """
    if not (head.near > limit("local") and head.near > LIFT * head.even):
        return None
    distance = head.mean("attention_distance")
    numbers = {"near": head.near, "even": head.even, "attention_distance": distance}
    return Judgement(head.near, numbers)


def _positional(head: HeadFacts) -> Judgement | None:
    """A positional head: the largest weight is at the same distance from the query in most rows.

    Returns:
        The judgement, with the share of these rows as its value; None if it is low or unknown.
    """
    if not head.peak_share > limit("positional"):
        return None
    return Judgement(head.peak_share, {"position": head.peak, "share": head.peak_share})


def _not_finite(head: HeadFacts) -> Judgement | None:
    """Rows with scores that are not finite.

    Returns:
        The judgement, with the share of these rows as its value; None if there are none.
    """
    rows, not_finite = head.count("n_keys"), head.count("n_keys") - head.count("lse")
    if not_finite <= 0 or not head.has("lse"):
        return None
    numbers = {"rows": float(rows), "not_finite": float(not_finite)}
    return Judgement(not_finite / rows, numbers)


def _large_logits(head: HeadFacts) -> Judgement | None:
    """A logit above ``LARGE_LOGIT``.

    Returns:
        The judgement, with the largest logit as its value; None if none is that large.
    """
    value = head.high("max_logit")
    return Judgement(value, {"max_logit": value}) if value > LARGE_LOGIT else None


def _coarse_scores(head: HeadFacts) -> Judgement | None:
    """Logits so large that neighbouring numbers of their dtype are ``COARSE_STEP`` apart.

    Returns:
        The judgement, with the distance of neighbouring numbers at the largest logit as its value;
        None if it is smaller, or the dtype is unknown.
    """
    value, bits = head.high("max_logit"), _BITS.get(head.dtype)
    if bits is None or not value > 0:
        return None
    step = 2.0 ** (math.floor(math.log2(value)) + 1 - bits)
    if step < COARSE_STEP:
        return None
    return Judgement(step, {"max_logit": value, "step": step})


def _collapse(head: HeadFacts) -> Judgement | None:
    """A collapsed head: its entropy is close to 0.

    Returns:
        The judgement, with log n / entropy as its value, so that worse heads have larger values;
        None for other heads.
    """
    share = head.mean("normalized_entropy")
    if not share < COLLAPSE:
        return None
    numbers = {"normalized_entropy": share, "effective_keys": head.mean("effective_keys")}
    return Judgement(1 / max(share, 1e-12), numbers)


def _dilution(head: HeadFacts) -> Judgement | None:
    """A head whose entropy grows significantly with the number of keys n.

    Returns:
        The judgement, with the slope of entropy against log n as its value. None if the slope is
        not above ``STEEP`` by more than its margin, entropy was not recorded by n, or the head is
        diffuse anyway.
    """
    if head.mean("normalized_entropy") > DIFFUSE:
        return None
    slope = head.entropy_slope(octaves=OCTAVES, least_n=LEAST_KEYS)
    if slope is None or slope.value - slope.margin <= STEEP or slope.high - slope.low <= GROWTH:
        return None
    numbers: dict[str, float] = slope._asdict()
    for end in ("high", "low"):  # measured there: entropy need not follow the line
        entropy, error = head.entropy_at(numbers[f"{end}_n"])
        numbers |= {f"{end}_entropy": entropy, f"{end}_error": error}
    return Judgement(slope.value, numbers)


#: A rule for each kind: first what a head does, then what calls for a change, most urgent first.
RULES: dict[Kind, Rule] = {
    "sink": _sink,
    "special_sink": _above(SINK, "mass_special", "first_weight", "n_keys"),
    "local": _local,
    "previous-token": _above(limit("previous-token"), "mass_previous"),
    "diffuse": _above(DIFFUSE, "normalized_entropy", most=DEAD),
    "sharp": _above(limit("sharp"), "top_weight", "effective_keys"),
    "dead": _above(DEAD, "normalized_entropy", "n_keys"),
    "positional": _positional,
    "not_finite": _not_finite,
    "large_logits": _large_logits,
    "coarse_scores": _coarse_scores,
    "entropy_collapse": _collapse,
    "dilution": _dilution,
}
