"""Findings: the most notable heads of a summary, each with a sentence on what it can mean.

A finding repeats a measurement and names possible meanings; it proves nothing about the model.
Layers whose capture is known to be wrong (status ``mismatch``) yield none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from acutance.diagnose.rules import (
    COLLAPSE,
    DEAD,
    FEW_ROWS,
    LARGE_LOGIT,
    SINK,
    HeadFacts,
    Summary,
    extremes,
)  # fmt: skip
from acutance.diagnose.rules import Kind as Rule
from acutance.diagnose.sentences import crossing
from acutance.diagnose.thresholds import limit

Kind = Literal["sharpest", "most_diffuse", "first_key_sink", "collapsed", "dead", "largest_logit"]

#: The title of what :func:`describe_key_norms` says.
KEY_NORMS = "Key lengths"
#: What each kind of finding is called in reports.
LABELS: dict[Kind, str] = {
    "sharpest": "Sharpest head",
    "most_diffuse": "Most diffuse head",
    "first_key_sink": "Possible sink",
    "collapsed": "Nearly all on one key",
    "dead": "Averages everything",
    "largest_logit": "Largest logit",
}

MOST_NAMED = 3  # heads named for each kind; the last sentence counts the rest


@dataclass(frozen=True)
class Finding:
    """A notable head, described in a sentence.

    Attributes:
        kind: one of :data:`LABELS`.
        layer: index of the layer, in model order.
        head: index of the head in its layer.
        module: qualified name of the layer's module.
        value: the number that selected it: mean normalized entropy ("sharpest", "most_diffuse",
            "collapsed", "dead"; mean entropy or effective keys if that was not recorded), mean
            weight of the first key ("first_key_sink") or the largest maximum logit of any row
            ("largest_logit").
        sentence: what it is and what it can mean.
    """

    kind: Kind
    layer: int
    head: int
    module: str
    value: float
    sentence: str


def findings(summary: Summary) -> list[Finding]:
    """The most notable heads of a summary, by kind.

    The sharpest and the most diffuse head; up to three each of the heads that look like attention
    sinks, collapsed or dead, those furthest beyond their threshold; and the head with the largest
    logit. They use the rules of :func:`recommendations` and the thresholds of
    :data:`acutance.probing.THRESHOLDS`. For an untrained model only the sharpest and the most
    diffuse head are reported.

    Args:
        summary: any head summary.

    Returns:
        Findings in that order; none if no head has rows.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 40, 8)] * 3)
        >>> [(found.kind, found.head) for found in findings(probe.summary())]
        [('sharpest', 0), ('most_diffuse', 1), ('dead', 0), ('dead', 1), ('largest_logit', 0)]
        >>> print(findings(probe.summary())[2].sentence)
        Layer 0 head 0 averages everything: its entropy is 1.000 of its maximum log n (n = 40 keys
        on average). Such a head may be dead, untrained, or averaging by design.
    """
    heads = [head for head in summary.facts if head.record.status != "mismatch"]
    found = _extremes(heads)
    if summary.about.get("untrained") is True:
        return found
    for kind, (rule, describe, rest) in _BEYOND.items():
        hits = [head for head in heads if rule in head.rules]
        ranked = sorted(hits, key=lambda head: -head.rules[rule].size)
        for index, head in enumerate(ranked[:MOST_NAMED]):
            value = next(iter(head.rules[rule].numbers.values()))
            sentence, meaning = describe(head, value)
            if index == 0:
                sentence += f" {meaning}"
            if index == MOST_NAMED - 1 and len(ranked) > MOST_NAMED:
                sentence += f" In all, {len(ranked)} of {len(heads)} heads {rest}."
            found.append(_finding(kind, head, value, sentence))
    return found + _largest_logit(heads)


def describe_key_norms(key_norms: Mapping[str, Any]) -> str:
    """A sentence on how often key norms decide which key has a row's largest weight.

    Example:
        >>> layers = [
        ...     {"module": "a", "mean": 0.1, "heads": [{}] * 4},
        ...     {"module": "b", "mean": 0.3, "heads": [{}] * 4},
        ... ]
        >>> print(describe_key_norms({"tokens": 256, "mean": 0.2, "layers": layers}))
        20% of the rows would have another top key if all keys of a head had the same norm (10% to
        30% by layer, most in b; 8 heads, 256 tokens). In those rows the norm of a key decides, not
        only its direction. Cosine scores and QK-norm use only the direction: see acutance compare
        --from.
    """
    layers = sorted(key_norms["layers"], key=lambda layer: float(layer["mean"]))
    heads = sum(len(layer["heads"]) for layer in layers)
    low, high = (f"{layer['mean']:.0%}" for layer in (layers[0], layers[-1]))
    by_layer = f"{low} to {high} by layer, most in {layers[-1]['module']}; " if low != high else ""
    return (
        f"{key_norms['mean']:.0%} of the rows would have another top key if all keys of a head "
        f"had the same norm ({by_layer}{heads} head{'s' * (heads != 1)}, "
        f"{key_norms['tokens']:,} tokens). In those rows the norm of a key decides, not only "
        "its direction. Cosine scores and QK-norm use only the direction: see acutance "
        "compare --from."
    )


def _extremes(heads: list[HeadFacts]) -> list[Finding]:
    """Findings for the sharpest and the most diffuse head."""
    if (found := extremes(heads)) is None:
        return []
    name, sharpest, diffuse = found
    titles: dict[Kind, tuple[HeadFacts, str]] = {"sharpest": (sharpest, "the sharpest")}
    if diffuse is not sharpest:
        titles["most_diffuse"] = diffuse, "the most diffuse"
    return [
        _finding(kind, head, head.mean[name], _spread(head, title))
        for kind, (head, title) in titles.items()
    ]


def _spread(head: HeadFacts, title: str) -> str:
    """A sentence on how widely a head attends, from the recorded metrics."""
    keys, entropy = head.mean["effective_keys"], head.mean["entropy"]
    share = head.mean["normalized_entropy"]
    most = entropy + head.mean["information"]
    if math.isfinite(keys):
        among = f" of {_number(n)}" if math.isfinite(n := head.mean["n_keys"]) else ""
        text = f"it spreads a row over {_number(keys)} effective keys{among} on average"
        if math.isfinite(entropy):
            of = f" of {most:.2f}" if math.isfinite(most) else ""
            text += f" (entropy {entropy:.2f}{of} nats)"
    elif math.isfinite(share):
        text = f"its rows have {share:.1%} of the maximal entropy on average"
    else:
        text = f"its rows have an entropy of {entropy:.2f} nats on average"
    if keys < limit("few_keys"):
        text += ", close to picking one key"
    elif share > limit("diffuse"):
        text += ", close to uniform weights"
    elif share < limit("part"):
        text += ", a small part of the visible keys"
    return f"{_name(head)} is {title}: {text}."


def _sink(head: HeadFacts, value: float) -> tuple[str, str]:
    """The sentence for an attention-sink head, and what it can mean."""
    n = head.mean["n_keys"]
    even = f" (a uniform share of {_number(n)} keys is {1 / n:.1%})" if n > 1 else ""
    return (
        f"{_name(head)} gives {value:.0%} of its weight to the first visible key on average{even}.",
        "It may be an attention sink, where a head puts weight that it does not need "
        "elsewhere, or the token may really matter (such as [CLS]).",
    )


def _collapsed(head: HeadFacts, value: float) -> tuple[str, str]:
    """The sentence for a collapsed head, and what may cause it."""
    where = ""
    if (first := head.mean["first_weight"]) > 0.5:
        where = f", mostly on the first visible key (weight {first:.2f})"
    keys = head.mean["effective_keys"]
    amounts = f", {keys:.2f} effective keys per row" if math.isfinite(keys) else ""
    return (
        f"{_name(head)} looks collapsed: its entropy is {value:.3f} of its "
        f"maximum log n{amounts}{where}.",
        "Heads that copy one position do this by design. Otherwise the head's logits may have "
        "grown too large, and such rows pass little gradient.",
    )


def _dead(head: HeadFacts, value: float) -> tuple[str, str]:
    """The sentence for a dead head, and what it can mean."""
    n = head.mean["n_keys"]
    of = f" (n = {_number(n)} keys on average)" if math.isfinite(n) else ""
    return (
        f"{_name(head)} averages everything: its entropy is {value:.3f} of its maximum log n{of}.",
        "Such a head may be dead, untrained, or averaging by design.",
    )


#: For each kind the rule that heads meet, what is said of one and can mean, and of all of them.
_BEYOND: dict[Kind, tuple[Rule, Callable[[HeadFacts, float], tuple[str, str]], str]] = {
    "first_key_sink": (
        "sink", _sink, f"give the first visible key more than {SINK:.0%} of their weight"
    ),
    "collapsed": (
        "entropy_collapse", _collapsed, f"have less than {COLLAPSE:g} of the maximal entropy"
    ),
    "dead": ("dead", _dead, f"have more than {DEAD:g} of the maximal entropy"),
}  # fmt: skip


def _largest_logit(heads: list[HeadFacts]) -> list[Finding]:
    """The finding for the head with the largest logit; empty if none was recorded."""
    measured = [head for head in heads if math.isfinite(head.high["max_logit"])]
    if not measured:
        return []
    head = max(measured, key=lambda head: head.high["max_logit"])
    value, typical = head.high["max_logit"], head.mean["max_logit"]
    text = (
        f"{_name(head)} has the largest attention logit, {_number(value)}; the mean of its "
        f"rows' largest logits is {_number(typical)}."
    )
    if "coarse_scores" in head.rules:
        step = head.rules["coarse_scores"].numbers["step"]
        off = math.expm1(step / 2)
        change = f"{off:.0%}" if off < 1 else f"a factor of {off + 1:.2g}"
        text += (
            f" Scores of this size in {head.dtype} have a resolution of {step:g}, so rounding "
            f"can change a weight by {change}."
        )
    if "large_logits" in head.rules:
        text += (
            f" It is above {LARGE_LOGIT:g}; logits that grow this large during training are an "
            "early sign of instability."
        )
    if not head.rules.keys() & {"large_logits", "coarse_scores"}:
        text += " This size is not a problem; during training, watch whether it grows."
    return [_finding("largest_logit", head, value, text)]


def _name(head: HeadFacts) -> str:
    """Layer and head as the beginning of a sentence."""
    return f"Layer {head.layer}{crossing(head.record.module)} head {head.head}"


def _finding(kind: Kind, head: HeadFacts, value: float, sentence: str) -> Finding:
    """A finding on a head, with a caveat about few rows or an unverified capture."""
    if (rows := head.record.rows) < FEW_ROWS:
        sentence += " Only 1 row was read." if rows == 1 else f" Only {rows} rows were read."
    if head.record.status == "unverified":
        sentence += " Captured only from a softmax, so not verified."
    return Finding(kind, head.layer, head.head, head.record.module, value, sentence)


def _number(value: float) -> str:
    """A number with three significant digits, without an exponent below a million."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:,.0f}"
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(decimals, 1 if abs(value) >= 1 else 4)}f}"
