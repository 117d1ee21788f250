"""Recommendations: what to change about a model's attention, why, and how certain that is.

Each repeats what was measured, says what would help and never more than the measurement holds: a
growth is told only where a fitted slope is beyond its standard error, and what may be by design is
called suspected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from acutance.probing import HeadSummary, classify
from acutance.probing.slopes import Slope, fit_slope

__all__ = ["KINDS", "NOTHING", "Recommendation", "in_words", "recommendations"]

Certainty = Literal["measured", "fitted", "suspected"]
Kind = Literal[
    "mismatch",
    "not_finite",
    "large_logits",
    "coarse_scores",
    "entropy_collapse",
    "dilution",
    "sink",
    "dead",
]

#: Every kind, most urgent first, and what it is called.
KINDS: dict[Kind, str] = {
    "mismatch": "Not read rightly",
    "not_finite": "Scores that are no numbers",
    "large_logits": "Large logits",
    "coarse_scores": "Scores too large for their precision",
    "entropy_collapse": "Entropy has collapsed",
    "dilution": "Dilutes as texts get longer",
    "sink": "Attention sink",
    "dead": "Averages everything",
}
#: Shown where there is nothing to recommend.
NOTHING = "Nothing to change: no head is beyond a threshold that calls for it."

LARGE_LOGIT = 100.0  # where QK-Clip clips by default: Kimi Team (2025), arXiv:2507.20534
COARSE_STEP = 0.5  # steps between scores that change a weight by a quarter, when rounded
COLLAPSE = 0.05  # of the entropy log n; Zhai et al. (2023), arXiv:2303.06296, on collapse
SINK = 0.3  # weight on the first key: Gu et al. (2024), arXiv:2410.10781
DEAD = 0.98  # of the entropy log n
DIFFUSE = 0.9  # of the entropy log n: heads above it spread widely by nature, at any length
LEAST_KEYS = 8.0
STEEP = 0.25  # nats for each e-fold of n, of which a slope must surely be above
GROWTH = 0.5  # nats between the ends of what was fitted, at least
OCTAVES = 4  # octaves of n that a slope is fitted to: the largest n and its eighth
THIN = 0.25  # of the rows of the octave before, that the last needs
FEW_ROWS = 30
_NAMED = 3  # layers named of a kind, in words
_BITS = {"bfloat16": 8, "float16": 11}  # significant bits
_BY_DESIGN = {"previous-token", "positional", "local"}


@dataclass(frozen=True)
class Recommendation:
    """Something to change about heads of one layer.

    Attributes:
        kind: one of :data:`KINDS`.
        layer: index of the layer, in model order.
        heads: numbers of the heads; empty where it is about the whole layer.
        module: qualified name of the layer's module.
        reason: what was found.
        numbers: the numbers it was found by, of the head furthest beyond the threshold.
        advice: what to do.
        certainty: "measured", "fitted" (a slope with its standard error), or "suspected" (what is
            measured can be by design).
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
        """The layer and its heads, as a sentence begins."""
        if not self.heads:
            return f"Layer {self.layer}"
        which = ", ".join(map(str, self.heads))
        return f"Layer {self.layer} head{'s' * (len(self.heads) > 1)} {which}"

    @property
    def sentence(self) -> str:
        """Everything in words."""
        return f"{self.place}: {self.reason}; {self.advice}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kind": self.kind,
            "layer": self.layer,
            "heads": list(self.heads),
            "module": self.module,
            "reason": self.reason,
            "numbers": dict(self.numbers),
            "advice": self.advice,
            "certainty": self.certainty,
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class _Hit:
    """A head that is beyond a threshold, and by which numbers; ``size`` ranks them."""

    head: int
    size: float
    numbers: dict[str, float]


def recommendations(summary: HeadSummary) -> list[Recommendation]:
    """What to change, most urgent first, one for each kind and layer.

    Args:
        summary: any head summary; growth with n needs one of this version, with rows of at least
            three octaves of n, of two sequences each.

    Returns:
        The recommendations; none where no head is beyond a threshold. The thresholds are the
        constants of this module.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 40, 8)] * 3)
        >>> print(recommendations(probe.summary())[0].sentence)
        Layer 0 heads 0, 1: entropy is 1.000 of the most it could be over 40 keys; look whether
        they do anything: without them the model may be as good, or their training stalled.
    """
    found: list[Recommendation] = []
    heads = _Heads(summary)
    for kind, rule in _RULES.items():
        start = 0
        for index, layer in enumerate(summary.layers):
            rows = range(start, start + layer.heads)
            start += layer.heads
            if (layer.status == "mismatch") != (kind == "mismatch") or not layer.rows:
                continue
            if kind == "mismatch":
                found.append(_mismatch(index, layer.module, layer.error))
                continue
            hits = [hit for row in rows if (hit := rule(heads, row)) is not None]
            if hits:
                found.append(_told(kind, heads, index, hits))
    return found


def in_words(found: Sequence[Recommendation]) -> list[str]:
    """A few sentences for a terminal: three layers of each kind, an advice once, others counted.

    Args:
        found: what :func:`recommendations` gave.

    Returns:
        At least one sentence: :data:`NOTHING` where there is nothing.
    """
    if not found:
        return [NOTHING]
    sentences = []
    for kind in KINDS:
        same = [each for each in found if each.kind == kind]
        named = sorted(sorted(same, key=_weight)[-_NAMED:], key=lambda each: each.layer)
        said = ""
        for each in named:
            again = each.advice == said
            sentences.append(f"{each.place}: {each.reason}." if again else each.sentence)
            said = each.advice
        if rest := [each for each in same if each not in named]:
            heads = sum(len(each.heads) for each in rest)
            layers = f"{len(rest)} more layer{'s' * (len(rest) > 1)}"
            what = f"{heads} heads of {layers}" if heads else layers
            sentences[-1] += f" The same goes for {what}."
    return sentences


def _weight(found: Recommendation) -> float:
    return abs(found.numbers.get("size", 0.0))


class _Heads:
    """Numbers of all heads by name, NaN for what was not recorded."""

    def __init__(self, summary: HeadSummary) -> None:
        self.summary = summary
        self._names = {name: column for column, name in enumerate(summary.metrics)}
        self._moments = summary.moments
        self.classes = [{one.name for one in each} for each in classify(summary)]
        self.dtype = str(summary.about.get("dtype", "")).removeprefix("torch.")

    def mean(self, name: str, row: int) -> float:
        return self._of(name, row, self._moments.mean[row])

    def high(self, name: str, row: int) -> float:
        return self._of(name, row, self._moments.high[row])

    def count(self, name: str, row: int) -> int:
        column = self._names.get(name)
        return 0 if column is None else int(self._moments.count[row, column])

    def _of(self, name: str, row: int, values: Any) -> float:
        column = self._names.get(name)
        if column is None or not int(self._moments.count[row, column]):
            return math.nan
        return float(values[column])

    def many_keys(self, row: int) -> bool:
        return not self.mean("n_keys", row) < LEAST_KEYS

    def growth(self, row: int) -> Slope | None:
        """The slope of the entropy against log n, over the largest octaves."""
        column, profile = self._names.get("entropy"), self.summary.profile
        if column is None or profile is None:
            return None
        used = (profile.groups[row, column] > 1).nonzero().flatten().tolist()
        count = profile.count[row, column].tolist()
        while len(used) > 1 and count[used[-1]] < THIN * count[used[-2]]:
            used.pop()  # the last row of a text of 1024 tokens is alone in its octave
        if not used:
            return None
        least, most = 2.0 ** (used[-1] - OCTAVES + 1), 2.0 ** (used[-1] + 1) - 1
        return fit_slope(profile, row, column, least_n=max(least, LEAST_KEYS), most_n=most)


def _not_finite(heads: _Heads, row: int) -> _Hit | None:
    lost = heads.count("n_keys", row) - heads.count("lse", row)
    if lost <= 0 or "lse" not in heads.summary.metrics:
        return None
    rows = float(heads.count("n_keys", row))
    return _Hit(row, lost / rows, {"rows": rows, "not_finite": float(lost)})


def _large_logits(heads: _Heads, row: int) -> _Hit | None:
    value = heads.high("max_logit", row)
    return _Hit(row, value, {"max_logit": value}) if value > LARGE_LOGIT else None


def _coarse_scores(heads: _Heads, row: int) -> _Hit | None:
    value, bits = heads.high("max_logit", row), _BITS.get(heads.dtype)
    if bits is None or not value > 0:
        return None
    step = 2.0 ** (math.floor(math.log2(value)) + 1 - bits)
    return _Hit(row, step, {"max_logit": value, "step": step}) if step >= COARSE_STEP else None


def _collapse(heads: _Heads, row: int) -> _Hit | None:
    share = heads.mean("normalized_entropy", row)
    if not share < COLLAPSE or not heads.many_keys(row) or heads.classes[row] & _BY_DESIGN:
        return None
    keys = heads.mean("effective_keys", row)
    return _Hit(row, 1 / max(share, 1e-12), {"normalized_entropy": share, "effective_keys": keys})


def _dilution(heads: _Heads, row: int) -> _Hit | None:
    found = heads.growth(row)
    if found is None or heads.mean("normalized_entropy", row) > DIFFUSE:
        return None
    if found.value - found.margin <= STEEP or found.high - found.low <= GROWTH:
        return None
    drop_error = found.error * math.log(found.high_n / found.low_n)
    return _Hit(row, found.value, {**found._asdict(), "drop_error": drop_error})


def _sink(heads: _Heads, row: int) -> _Hit | None:
    value, n = heads.mean("first_weight", row), heads.mean("n_keys", row)
    if not value > SINK or not heads.many_keys(row) or value < 2 / n:
        return None
    return _Hit(row, value, {"first_weight": value, "n_keys": n})


def _dead(heads: _Heads, row: int) -> _Hit | None:
    share, n = heads.mean("normalized_entropy", row), heads.mean("n_keys", row)
    if not share > DEAD or not heads.many_keys(row):
        return None
    return _Hit(row, share, {"normalized_entropy": share, "n_keys": n})


_RULES: dict[Kind, Callable[[_Heads, int], _Hit | None]] = {
    "mismatch": lambda *_: None,
    "not_finite": _not_finite,
    "large_logits": _large_logits,
    "coarse_scores": _coarse_scores,
    "entropy_collapse": _collapse,
    "dilution": _dilution,
    "sink": _sink,
    "dead": _dead,
}


def _mismatch(layer: int, module: str, error: float | None) -> Recommendation:
    off = "" if error is None else f" by {error:.2g} of it"
    return Recommendation(
        "mismatch",
        layer,
        (),
        module,
        f"the output rebuilt from what was captured differs from the model's{off}",
        {} if error is None else {"error": error},
        "do not trust this layer's numbers, and report what its attention does",
        "measured",
    )


def _told(kind: Kind, heads: _Heads, layer: int, hits: list[_Hit]) -> Recommendation:
    """The recommendation for one layer's heads."""
    record = heads.summary.layers[layer]
    worst = max(hits, key=lambda hit: hit.size)
    reason, advice, certainty = _WORDS[kind](heads, hits, worst)
    if record.rows < FEW_ROWS and certainty == "measured" and kind != "not_finite":
        certainty = "suspected"
        reason += f" (in {record.rows} row{'s' * (record.rows != 1)} only)"
    places = heads.summary.places
    numbers = {name: value for name, value in worst.numbers.items() if math.isfinite(value)}
    return Recommendation(
        kind,
        layer,
        tuple(places[hit.head][1] for hit in hits),
        record.module,
        reason,
        {"size": worst.size, **numbers},
        advice,
        certainty,
    )


_Words = tuple[str, str, Certainty]


def _range(hits: Sequence[_Hit], name: str, form: str) -> str:
    """The smallest and largest of a number, or the one that they round to."""
    values = [hit.numbers[name] for hit in hits]
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _say_not_finite(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
    rows, lost = worst.numbers["rows"], worst.numbers["not_finite"]
    return (
        f"the scores of {lost:,.0f} of {rows:,.0f} rows are not finite",
        "find where infinities or NaN enter: an overflow of narrow floats, or a mask that hides "
        "whole rows",
        "measured",
    )


def _say_large(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
    return (
        f"the largest logit is {_range(hits, 'max_logit', ',.0f')}, above {LARGE_LOGIT:g}",
        f"if the model is still trained, clip with acutance.training.QKClip at {LARGE_LOGIT:g}, "
        "since growth of this size comes before instability",
        "measured",
    )


def _say_coarse(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
    return (
        f"logits reach {_range(hits, 'max_logit', ',.0f')}, where {heads.dtype} has steps of "
        f"{worst.numbers['step']:g}",
        "keep the scores and their softmax in float32 (fused kernels do), or clip the logits",
        "suspected",
    )


def _say_collapse(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
    return (
        f"entropy is {_range(hits, 'normalized_entropy', '.3f')} of what it could be, "
        f"{_range(hits, 'effective_keys', '.2f')} effective keys in a row",
        "if they are not meant to pick one token, train with acutance.training's "
        "EntropyRegularizer or SigmaReparam, or lower their scale with acutance calibrate",
        "suspected",
    )


def _say_dilution(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
    low_n, high_n = (f"{worst.numbers[name]:,.0f}" for name in ("low_n", "high_n"))
    low, high, off = (worst.numbers[name] for name in ("low", "high", "drop_error"))
    error = max(hit.numbers["error"] for hit in hits)
    which = "it" if len(hits) == 1 else f"head {heads.summary.places[worst.head][1]}"
    return (
        f"entropy grows as {_range(hits, 'value', '.2f')} log n (± {error:.2f}) from n ≈ {low_n} "
        f"to {high_n}",
        f"run acutance calibrate: at n ≈ {high_n} it is expected to bring {which} from {high:.1f} "
        f"to {low:.1f} nats (± {off:.1g}), its entropy at n ≈ {low_n}; whether the model gains by "
        "it, held-out loss must tell",
        "fitted",
    )


def _say_sink(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
    return (
        f"{_range(hits, 'first_weight', '.0%')} of the weight lies on the first visible key",
        "keep that token if a cache is cut or a window slides; when training anew, a learned sink "
        "or softmax_one takes its place",
        "measured",
    )


def _say_dead(heads: _Heads, hits: list[_Hit], worst: _Hit) -> _Words:
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


_WORDS: dict[Kind, Callable[[_Heads, list[_Hit], _Hit], _Words]] = {
    "not_finite": _say_not_finite,
    "large_logits": _say_large,
    "coarse_scores": _say_coarse,
    "entropy_collapse": _say_collapse,
    "dilution": _say_dilution,
    "sink": _say_sink,
    "dead": _say_dead,
}
