"""CLASSES: the classes of heads, each with a rule and a sentence with the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from acutance.diagnose.rules import Judgement, Kind, Summary
from acutance.diagnose.thresholds import NEAR, THRESHOLDS, limit


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


#: The class of each kind of judgement and its sentence, in the order of the table.
_SENTENCES: dict[Kind, tuple[str, str]] = {
    "sink": ("sink", "puts {size:.0%} of its weight on the first visible key"),
    "special_sink": ("sink", "puts {size:.0%} of its weight on special tokens"),
    "local": (
        "local",
        f"has {{near:.0%}} of its weight within {NEAR} positions, where uniform weights have "
        "{even:.0%}",
    ),
    "previous-token": ("previous-token", "puts {size:.0%} of its weight on the previous token"),
    "diffuse": (
        "diffuse",
        "spreads its weight widely: its entropy is {size:.3f} of its maximum log n",
    ),
    "sharp": ("sharp", "picks one key: the largest weight of a row is {size:.2f} on average"),
    "dead": ("dead", "averages everything: its entropy is {size:.3f} of its maximum log n{over}"),
    "positional": (
        "positional",
        "attends to a fixed position: the largest weight is {where} in {share:.0%} of its rows",
    ),
}


def _classes(judged: Mapping[Kind, Judgement]) -> Iterator[HeadClass]:
    """The classes of one head, from the rules that it meets."""
    for kind, (name, sentence) in _SENTENCES.items():
        if kind not in judged or (kind == "special_sink" and "sink" in judged):
            continue
        numbers = {k: number for k, number in judged[kind].numbers.items() if math.isfinite(number)}
        over = f" (n = {numbers['n_keys']:.0f} keys on average)" if "n_keys" in numbers else ""
        where = _position(int(numbers.get("position", 0)))
        words = sentence.format(size=judged[kind].size, over=over, where=where, **numbers)
        yield HeadClass(name, words, numbers)


def _position(away: int) -> str:
    """A position relative to a query, in words."""
    near = {0: "at its own position", -1: "one position back", 1: "one position ahead"}
    return near.get(away, f"{abs(away)} positions {'back' if away < 0 else 'ahead'}")
