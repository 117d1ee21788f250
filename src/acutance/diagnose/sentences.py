"""Sentences of a diagnosis, and what low and high values of each metric mean in plain words.

The formula, unit and source of a metric are in :data:`acutance.METRICS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from acutance.diagnose.rules import LARGE_LOGIT, Judgement
from acutance.diagnose.thresholds import HeadFacts

Certainty = Literal["measured", "fitted", "suspected"]


#: The reason, the advice and the certainty.
Sentence = tuple[str, str, Certainty]


#: Heads of one layer that are beyond the same threshold.
_Beyond = Sequence[tuple[HeadFacts, Judgement]]


def _from_to(beyond: _Beyond, name: str, form: str) -> str:
    """A number's range over heads as text; a single number if both ends print the same."""
    values = [judgement.numbers[name] for _, judgement in beyond]
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _without(head: HeadFacts, them: str) -> str:
    """How to measure what heads contribute: a loss needs a model that predicts tokens."""
    if head.sees_all:
        return f'acutance.apply(model, "off:LAYER.HEAD") runs your own task without {them}'
    return f"acutance judge --law off:LAYER.HEAD measures the loss without {them}"


def _describe_not_finite(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads with scores that are not finite."""
    rows, not_finite = worst.numbers["rows"], worst.numbers["not_finite"]
    return (
        f"{not_finite:,.0f} of {rows:,.0f} rows have scores that are not finite",
        "find where inf or NaN comes from, for example an overflow of float16 or a mask that hides "
        "whole rows",
        "measured",
    )


def _describe_large(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads with large logits."""
    return (
        f"the largest logit is {_from_to(beyond, 'max_logit', ',.0f')}, above {LARGE_LOGIT:g}",
        "if training continues, monitor the logits with acutance.training.AttentionMonitor, since "
        "training can become unstable if they keep growing",
        "measured",
    )


def _describe_coarse(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads whose dtype resolves their logits coarsely."""
    return (
        f"logits reach {_from_to(beyond, 'max_logit', ',.0f')}, where {head.dtype} has a "
        f"resolution of {worst.numbers['step']:g}",
        "compute scores and softmax in float32, as fused kernels do",
        "suspected",
    )


def _describe_collapse(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads with collapsed entropy."""
    return (
        f"entropy is {_from_to(beyond, 'normalized_entropy', '.3f')} of its maximum log n, "
        f"{_from_to(beyond, 'effective_keys', '.2f')} effective keys per row",
        f"a head may pick a single token by design: {_without(head, 'it')}",
        "suspected",
    )


def _describe_dilution(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads whose entropy grows with n."""
    low_n, high_n = (f"{worst.numbers[name]:,.0f}" for name in ("low_n", "high_n"))
    low, off, high = (worst.numbers[name] for name in ("low_entropy", "low_error", "high_entropy"))
    who = "it" if len(beyond) == 1 else f"layer {head.layer} head {head.head}"
    error = max(judgement.numbers["error"] for _, judgement in beyond)
    return (
        f"entropy grows as {_from_to(beyond, 'value', '.2f')} log n (± {error:.2f}): "
        f"{who} has {low:.2f} nats (± {off:.1g}) at n ≈ {low_n} and "
        f"{high:.2f} nats at n ≈ {high_n}",
        "this is not a fault in itself, and a law that keeps entropy constant can raise the loss: "
        f"measure a law {'on your own task' if head.sees_all else 'with acutance judge'} before "
        "you use it",
        "fitted",
    )


def _describe_sink(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads that attend to the first key."""
    keep = "a head can rest on it where nothing else fits, which is not a fault"
    if not head.sees_all:
        keep = (
            "keep it when truncating a cache or sliding a window (it takes one entry of the cache)"
        )
    return (
        f"{_from_to(beyond, 'first_weight', '.0%')} of the weight is on the first visible key",
        f"this token may be an attention sink, which the weights alone do not prove: {keep}",
        "measured",
    )


def _describe_dead(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Sentence:
    """Reason, advice and certainty for heads that average all keys."""
    n = worst.numbers["n_keys"]
    over = f" (n = {n:,.0f} keys on average)" if math.isfinite(n) else ""
    they, them = (
        ("the head contributes", "it") if len(beyond) == 1 else ("the heads contribute", "them")
    )
    return (
        f"entropy is {_from_to(beyond, 'normalized_entropy', '.3f')} of its maximum log n{over}",
        f"check whether {they} anything: {_without(head, them)}",
        "suspected",
    )


#: The sentence of each kind of recommendation about heads.
SENTENCES: dict[str, Callable[[_Beyond, HeadFacts, Judgement], Sentence]] = {
    "not_finite": _describe_not_finite,
    "large_logits": _describe_large,
    "coarse_scores": _describe_coarse,
    "entropy_collapse": _describe_collapse,
    "dilution": _describe_dilution,
    "sink": _describe_sink,
    "dead": _describe_dead,
}


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
