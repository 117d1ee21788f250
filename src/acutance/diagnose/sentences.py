"""Sentences of a diagnosis, and what low and high values of each metric mean in plain words.

The formula, unit and source of a metric are in :data:`acutance.METRICS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from acutance.diagnose.rules import LARGE_LOGIT, HeadFacts, Kind

Certainty = Literal["measured", "fitted", "suspected"]


class Advice(NamedTuple):
    """What is said of heads beyond a threshold; :func:`advice` fills in what stands in braces.

    Attributes:
        reason: what is unusual.
        advice: how to find out what it means, or a remedy that costs nothing.
        certainty: how sure it is.
    """

    reason: str
    advice: str
    certainty: Certainty


#: What is said of the heads of each kind of recommendation.
ADVICE: dict[Kind, Advice] = {
    "not_finite": Advice(
        "{worst[not_finite]:,.0f} of {worst[rows]:,.0f} rows have scores that are not finite",
        "find where inf or NaN comes from, for example an overflow of float16 or a mask that hides "
        "whole rows",
        "measured",
    ),
    "large_logits": Advice(
        f"the largest logit is {{max_logit:,.0f}}, above {LARGE_LOGIT:g}",
        "if training continues, monitor the logits with acutance.training.AttentionMonitor, since "
        "training can become unstable if they keep growing",
        "measured",
    ),
    "coarse_scores": Advice(
        "logits reach {max_logit:,.0f}, where {dtype} has a resolution of {worst[step]:g}",
        "compute scores and softmax in float32, as fused kernels do",
        "suspected",
    ),
    "entropy_collapse": Advice(
        "entropy is {normalized_entropy:.3f} of its maximum log n, {effective_keys:.2f} effective "
        "keys per row",
        "a head may pick a single token by design: {without} it",
        "suspected",
    ),
    "dilution": Advice(
        "entropy grows as {value:.2f} log n (± {largest_error:.2f}): {which} has "
        "{worst[low_entropy]:.2f} nats (± {worst[low_error]:.1g}) at n ≈ {worst[low_n]:,.0f} and "
        "{worst[high_entropy]:.2f} nats at n ≈ {worst[high_n]:,.0f}",
        "this is not a fault in itself, and a law that keeps entropy constant can raise the loss: "
        "measure a law {with_what} before you use it",
        "fitted",
    ),
    "sink": Advice(
        "{first_weight:.0%} of the weight is on the first visible key",
        "this token may be an attention sink, which the weights alone do not prove: {of_sinks}",
        "measured",
    ),
    "dead": Advice(
        "entropy is {normalized_entropy:.3f} of its maximum log n{over}",
        "check whether {they_contribute} anything: {without} {them}",
        "suspected",
    ),
}
#: Phrases about heads of an encoder, which has no cache, and often no loss; and about all others.
_OF_ENCODERS = {
    "without": 'acutance.apply(model, "off:LAYER.HEAD") runs your own task without',
    "with_what": "on your own task",
    "of_sinks": "a head can rest on it where nothing else fits, which is not a fault",
}
_OF_OTHERS = {
    "without": "acutance judge --law off:LAYER.HEAD measures the loss without",
    "with_what": "with acutance judge",
    "of_sinks": "keep it when truncating a cache or sliding a window (it takes one entry of the "
    "cache)",
}


class _Range:
    """A number of several heads: its range as text, or once if both ends print the same."""

    def __init__(self, values: Sequence[float]) -> None:
        self.ends = min(values), max(values)

    def __format__(self, form: str) -> str:
        low, high = (format(end, form) for end in self.ends)
        return low if low == high else f"{low} to {high}"


def advice(kind: Kind, beyond: Sequence[HeadFacts]) -> Advice:
    """The :data:`ADVICE` on heads of one layer that are beyond the same threshold, in numbers."""
    head = max(beyond, key=lambda head: head.rules[kind].size)
    worst, judgements = head.rules[kind].numbers, [head.rules[kind].numbers for head in beyond]
    words: dict[str, Any] = {
        name: _Range([numbers[name] for numbers in judgements]) for name in worst
    }
    words |= _OF_ENCODERS if head.sees_all else _OF_OTHERS
    n, alone = worst.get("n_keys", math.nan), len(beyond) == 1
    words |= {
        "worst": worst,
        "dtype": head.dtype,
        "over": f" (n = {n:,.0f} keys on average)" if math.isfinite(n) else "",
        "largest_error": max(numbers.get("error", 0.0) for numbers in judgements),
        "which": "it" if alone else f"layer {head.layer} head {head.head}",
        "they_contribute": "the head contributes" if alone else "the heads contribute",
        "them": "it" if alone else "them",
    }
    said = ADVICE[kind]
    return Advice(said.reason.format(**words), said.advice.format(**words), said.certainty)


class MetricWords(NamedTuple):
    """A metric's group, and what a low and a high value mean."""

    group: str
    low: str
    high: str


#: By group, what a low and a high value of each metric mean.
_WORDS: dict[str, dict[str, tuple[str, str]]] = {
    "Sharpness": {
        "normalized_entropy": ("sharp: all on one token", "diffuse: spread evenly"),
        "entropy": ("sharp: few tokens", "diffuse: many tokens"),
        "effective_keys": ("as if looking at one token", "as if looking at many"),
        **{
            f"keys_{share}": (f"few tokens hold {share} %", f"many tokens hold {share} %")
            for share in (50, 90, 95, 99)
        },
        "top_weight": ("no token stands out", "one token has most"),
        "information": ("uniform weights", "one key selected"),
        "sparsity": ("sparse: few tokens", "not sparse: many tokens"),
        "collision": ("diffuse: many tokens", "sharp: few tokens"),
    },
    "Where it looks": {
        "first_weight": ("none on the first token", "most on the first token"),
        "sink_mass": ("none on the sink", "most on the sink"),
        "attention_distance": ("nearby tokens", "distant tokens"),
        "mass_self": ("not on itself", "on itself"),
        "mass_previous": ("not on the previous token", "on the previous token"),
        "mass_same": (
            "not on other occurrences of its token", "on other occurrences of its token"
        ),
        "mass_special": ("none on special tokens", "all on special tokens"),
    },
    "Scores": {
        "critical_ratio": (
            "several large logits share the weight", "the largest logit has most weight"
        ),
        "max_logit": ("small scores", "large scores"),
        "lse": ("small scores", "large scores"),
        "logit_mean": ("low on average", "high on average"),
        "logit_std": ("all scores similar", "scores far apart"),
        "varentropy": ("scale hardly changes entropy", "scale changes entropy strongly"),
        "entropy_slope": (
            "a larger scale lowers entropy strongly", "scale hardly changes entropy"
        ),
        "first_gap": ("little weight on the first token", "most weight on the first token"),
        "rest_logit_std": ("other scores similar", "other scores far apart"),
        "rest_jensen_gap": ("no score stands out", "a few scores stand out"),
    },
    "Predicted": {
        "gaussian_entropy": ("sharp expected", "diffuse expected"),
        "mean_field_entropy": ("low lower bound on entropy", "high lower bound on entropy"),
        "jensen_gap": ("tight bound on entropy", "loose bound on entropy"),
        "max_gap": ("tight bound on entropy", "loose bound on entropy"),
    },
    "Gradient and noise": {
        "jacobian_trace": ("little gradient passes", "gradient passes"),
        "noise_gain": ("noise averages out", "noise passes through"),
    },
    "Rows": {"n_keys": ("few tokens visible", "many tokens visible")},
}  # fmt: skip

#: Groups in the order in which lists show them.
GROUPS = tuple(_WORDS)
METRIC_WORDS = {
    name: MetricWords(group, *words)
    for group, metrics in _WORDS.items()
    for name, words in metrics.items()
}


def metric_words(name: str) -> MetricWords:
    """What low and high values of a metric mean; "low" and "high" for an unknown metric.

    Example:
        >>> metric_words("entropy").high
        'diffuse: many tokens'
        >>> metric_words("something_new")
        MetricWords(group='Where it looks', low='low', high='high')
    """
    return METRIC_WORDS.get(name, MetricWords("Where it looks", "low", "high"))


_CROSS = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


def crossing(module: str) -> str:
    """A suffix for cross-attention layers, recognised by the module's name; else empty.

    Example:
        >>> crossing("decoder.block.0.layer.1.EncDecAttention"), crossing("encoder.layer.0.attn")
        (' (cross-attention)', '')
    """
    return " (cross-attention)" if _CROSS.search(module) else ""
