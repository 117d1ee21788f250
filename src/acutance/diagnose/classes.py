"""CLASSES: the classes of heads, each with a rule and a sentence with the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from acutance.diagnose.rules import Judgement, Kind
from acutance.diagnose.thresholds import NEAR, THRESHOLDS, Summary, limit


@dataclass(frozen=True)
class HeadClass:
    """One class that a head belongs to.

    Attributes:
        name: one of :data:`CLASSES`.
        sentence: what it means, with this head's numbers.
        numbers: the numbers that led to it.
    """

    name: str
    sentence: str
    numbers: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Class:
    """A class of attention heads and the rule that defines it.

    Attributes:
        name: name of the class.
        threshold: value from which the rule applies.
        rule: the rule, in words.
        source: reference for the threshold or the name.
    """

    name: str
    threshold: float
    rule: str
    source: str


#: Every class, with its threshold; a head is in a class if it is beyond the threshold, not at it.
CLASSES: dict[str, Class] = {
    name: Class(name, limit(name), rule, THRESHOLDS[name].source)
    for name, rule in {
        "sink": (
            "mean weight above 0.3 on the first visible key and above twice a uniform share, "
            "or above 0.3 on special tokens"
        ),
        "local": (
            "mean weight above 0.5 within 7 positions, and above twice that of uniform weights"
        ),
        "previous-token": "mean weight above 0.5 on the previous position",
        "diffuse": "mean normalized entropy above 0.9, and no more than 0.98",
        "sharp": "mean largest weight above 0.5",
        "dead": "mean normalized entropy above 0.98",
        "positional": (
            "largest weight at the same relative position, up to 8 away, in more than 90 % of rows"
        ),
    }.items()
}


def classify(summary: Summary) -> list[tuple[HeadClass, ...]]:
    """The classes of every head, by :data:`CLASSES`.

    A head may be in several classes or in none. ``local``, ``previous-token`` and ``positional``
    need a probe with ``structure``. Heads are in no class if their layer's capture is known to be
    wrong or their rows see fewer than eight keys on average.

    Args:
        summary: any :class:`acutance.HeadSummary`.

    Returns:
        For each head, in the order of :attr:`HeadSummary.places`, its classes in the order of the
        table.

    Example:
        Zero scores spread every row evenly:

        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer, structure=True) as probe:
        ...     _ = layer(*[torch.zeros(1, 40, 8)] * 3)
        >>> [[found.name for found in head] for head in acutance.classify(probe.summary())]
        [['dead'], ['dead']]
        >>> print(acutance.classify(probe.summary())[0][0].sentence)
        averages everything: its entropy is 1.000 of its maximum log n (n = 40 keys on average)
    """
    return [tuple(_classes(judged)) for judged in summary.judgements]


def _classes(judged: Mapping[Kind, Judgement]) -> Iterator[HeadClass]:
    """The classes of one head, from the rules that it meets."""
    for kind, (name, write) in _SENTENCES.items():
        if kind in judged and not (kind == "special_sink" and "sink" in judged):
            numbers = judged[kind].numbers
            known = {key: value for key, value in numbers.items() if math.isfinite(value)}
            yield HeadClass(name, write(judged[kind]), known)


def _says(text: str) -> Callable[[Judgement], str]:
    """A sentence with the number by which a head is beyond its threshold in the place of {}."""
    return lambda judgement: text.format(judgement.size)


def _local(judgement: Judgement) -> str:
    """Sentence for a head that attends to nearby keys."""
    near, even = judgement.numbers["near"], judgement.numbers["even"]
    return (
        f"has {near:.0%} of its weight within {NEAR} positions, where uniform weights have "
        f"{even:.0%}"
    )


def _dead(judgement: Judgement) -> str:
    """Sentence for a head that averages all keys."""
    n = judgement.numbers["n_keys"]
    over = f" (n = {n:.0f} keys on average)" if math.isfinite(n) else ""
    share = judgement.numbers["normalized_entropy"]
    return f"averages everything: its entropy is {share:.3f} of its maximum log n{over}"


def _positional(judgement: Judgement) -> str:
    """Sentence for a head whose largest weight is at a fixed relative position."""
    place = int(judgement.numbers["position"])
    away = abs(place)
    where = {0: "at its own position", -1: "one position back", 1: "one position ahead"}.get(
        place, f"{away} positions {'back' if place < 0 else 'ahead'}"
    )
    share = judgement.numbers["share"]
    return f"attends to a fixed position: the largest weight is {where} in {share:.0%} of its rows"


#: The class of each kind of judgement and its sentence, in the order of the table.
_SENTENCES: dict[Kind, tuple[str, Callable[[Judgement], str]]] = {
    "sink": ("sink", _says("puts {:.0%} of its weight on the first visible key")),
    "special_sink": ("sink", _says("puts {:.0%} of its weight on special tokens")),
    "local": ("local", _local),
    "previous-token": ("previous-token", _says("puts {:.0%} of its weight on the previous token")),
    "diffuse": (
        "diffuse",
        _says("spreads its weight widely: its entropy is {:.3f} of its maximum log n"),
    ),
    "sharp": ("sharp", _says("picks one key: the largest weight of a row is {:.2f} on average")),
    "dead": ("dead", _dead),
    "positional": ("positional", _positional),
}
