"""What a recommendation says: the reason, the advice, and how certain it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from acutance.diagnose.rules import LARGE_LOGIT, Heads, Hit, Kind

__all__ = ["WORDS", "Certainty", "Words"]

Certainty = Literal["measured", "fitted", "suspected"]
#: The reason, the advice and the certainty.
Words = tuple[str, str, Certainty]


def _range(hits: Sequence[Hit], name: str, form: str) -> str:
    """The smallest and largest of a number, or the one that they round to."""
    values = [hit.numbers[name] for hit in hits]
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _say_not_finite(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    rows, lost = worst.numbers["rows"], worst.numbers["not_finite"]
    return (
        f"the scores of {lost:,.0f} of {rows:,.0f} rows are not finite",
        "find where infinities or NaN enter: an overflow of narrow floats, or a mask that hides "
        "whole rows",
        "measured",
    )


def _say_large(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    return (
        f"the largest logit is {_range(hits, 'max_logit', ',.0f')}, above {LARGE_LOGIT:g}",
        f"if the model is still trained, clip with acutance.training.QKClip at {LARGE_LOGIT:g}, "
        "since growth of this size comes before instability",
        "measured",
    )


def _say_coarse(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    return (
        f"logits reach {_range(hits, 'max_logit', ',.0f')}, where {heads.dtype} has steps of "
        f"{worst.numbers['step']:g}",
        "keep the scores and their softmax in float32 (fused kernels do), or clip the logits",
        "suspected",
    )


def _say_collapse(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    return (
        f"entropy is {_range(hits, 'normalized_entropy', '.3f')} of what it could be, "
        f"{_range(hits, 'effective_keys', '.2f')} effective keys in a row",
        "if they are not meant to pick one token, train with acutance.training's "
        "EntropyRegularizer or SigmaReparam, or lower their scale with acutance calibrate",
        "suspected",
    )


def _say_dilution(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    low_n, high_n = (f"{worst.numbers[name]:,.0f}" for name in ("low_n", "high_n"))
    low, off, high = (worst.numbers[name] for name in ("low_entropy", "low_error", "high_entropy"))
    error = max(hit.numbers["error"] for hit in hits)
    layer, head = heads.summary.places[worst.head]
    return (
        f"entropy grows as {_range(hits, 'value', '.2f')} log n (± {error:.2f}) from n ≈ {low_n} "
        f"to {high_n}",
        f"run acutance calibrate, which aims to give layer {layer} head {head} at n ≈ {high_n} the "
        f"{low:.2f} nats (± {off:.1g}) that it has at n ≈ {low_n}, in place of {high:.2f}; whether "
        "the model gains by it, held-out loss must tell",
        "fitted",
    )


def _say_sink(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    return (
        f"{_range(hits, 'first_weight', '.0%')} of the weight lies on the first visible key",
        "keep that token if a cache is cut or a window slides; when training anew, a learned sink "
        "or softmax_one can take its place, if a sink is what it is: weights do not tell",
        "measured",
    )


def _say_dead(heads: Heads, hits: list[Hit], worst: Hit) -> Words:
    n = worst.numbers["n_keys"]
    over = f" over {n:,.0f} keys" if math.isfinite(n) else ""
    they, their = ("it does", "its") if len(hits) == 1 else ("they do", "their")
    them = "it" if len(hits) == 1 else "them"
    return (
        f"entropy is {_range(hits, 'normalized_entropy', '.3f')} of the most it could be{over}",
        f"look whether {they} anything: without {them} the model may be as good, or {their} "
        "training stalled",
        "suspected",
    )


#: What is said of one layer's heads, for each kind that is of heads.
WORDS: dict[Kind, Callable[[Heads, list[Hit], Hit], Words]] = {
    "not_finite": _say_not_finite,
    "large_logits": _say_large,
    "coarse_scores": _say_coarse,
    "entropy_collapse": _say_collapse,
    "dilution": _say_dilution,
    "sink": _say_sink,
    "dead": _say_dead,
}
