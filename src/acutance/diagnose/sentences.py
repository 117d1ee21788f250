"""What a recommendation says: the reason, the advice, and how certain it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from acutance.diagnose.facts import HeadFacts
from acutance.diagnose.rules import LARGE_LOGIT, Judgement

__all__ = ["WORDS", "Certainty", "Words", "ranges"]

Certainty = Literal["measured", "fitted", "suspected"]
#: The reason, the advice and the certainty.
Words = tuple[str, str, Certainty]


#: Heads of one layer that are beyond the same threshold.
_Beyond = Sequence[tuple[HeadFacts, Judgement]]


def ranges(indices: list[int], noun: str) -> str:
    """Ascending indices in words.

    Example:
        >>> ranges([3], "layer"), ranges([0, 1, 2, 5], "layer")
        ('layer 3', 'layers 0–2, 5')
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"{noun}{'s' * (len(indices) > 1)} {', '.join(spans)}"


def _range(beyond: _Beyond, name: str, form: str) -> str:
    """The smallest and largest of a number, or the one that they round to."""
    values = [judgement.numbers[name] for _, judgement in beyond]
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _say_not_finite(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    rows, lost = worst.numbers["rows"], worst.numbers["not_finite"]
    return (
        f"the scores of {lost:,.0f} of {rows:,.0f} rows are not finite",
        "find where infinities or NaN enter: an overflow of narrow floats, or a mask that hides "
        "whole rows",
        "measured",
    )


def _say_large(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    return (
        f"the largest logit is {_range(beyond, 'max_logit', ',.0f')}, above {LARGE_LOGIT:g}",
        f"if the model is still trained, clip with acutance.training.QKClip at {LARGE_LOGIT:g}, "
        "since growth of this size comes before instability",
        "measured",
    )


def _say_coarse(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    return (
        f"logits reach {_range(beyond, 'max_logit', ',.0f')}, where {head.dtype} has steps of "
        f"{worst.numbers['step']:g}",
        "keep the scores and their softmax in float32 (fused kernels do), or clip the logits",
        "suspected",
    )


def _say_collapse(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    return (
        f"entropy is {_range(beyond, 'normalized_entropy', '.3f')} of what it could be, "
        f"{_range(beyond, 'effective_keys', '.2f')} effective keys in a row",
        "if they are not meant to pick one token, train with acutance.training's "
        "EntropyRegularizer or SigmaReparam, or lower their scale with acutance calibrate",
        "suspected",
    )


def _say_dilution(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    low_n, high_n = (f"{worst.numbers[name]:,.0f}" for name in ("low_n", "high_n"))
    low, off, high = (worst.numbers[name] for name in ("low_entropy", "low_error", "high_entropy"))
    error = max(judgement.numbers["error"] for _, judgement in beyond)
    return (
        f"entropy grows as {_range(beyond, 'value', '.2f')} log n (± {error:.2f}) from n ≈ {low_n} "
        f"to {high_n}",
        f"run acutance calibrate, which aims to give layer {head.layer} head {head.head} at n ≈ "
        f"{high_n} the {low:.2f} nats (± {off:.1g}) that it has at n ≈ {low_n}, in place of "
        f"{high:.2f}; whether the model gains by it, held-out loss must tell",
        "fitted",
    )


def _say_sink(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    return (
        f"{_range(beyond, 'first_weight', '.0%')} of the weight lies on the first visible key",
        "keep that token if a cache is cut or a window slides; when training anew, a learned sink "
        "or softmax_one can take its place, if a sink is what it is: weights do not tell",
        "measured",
    )


def _say_dead(beyond: _Beyond, head: HeadFacts, worst: Judgement) -> Words:
    n = worst.numbers["n_keys"]
    over = f" over {n:,.0f} keys" if math.isfinite(n) else ""
    they, their = ("it does", "its") if len(beyond) == 1 else ("they do", "their")
    them = "it" if len(beyond) == 1 else "them"
    return (
        f"entropy is {_range(beyond, 'normalized_entropy', '.3f')} of the most it could be{over}",
        f"look whether {they} anything: without {them} the model may be as good, or {their} "
        "training stalled",
        "suspected",
    )


#: What is said of one layer's heads, for each kind that is of heads.
WORDS: dict[str, Callable[[_Beyond, HeadFacts, Judgement], Words]] = {
    "not_finite": _say_not_finite,
    "large_logits": _say_large,
    "coarse_scores": _say_coarse,
    "entropy_collapse": _say_collapse,
    "dilution": _say_dilution,
    "sink": _say_sink,
    "dead": _say_dead,
}
