"""Classes of heads: what a head mostly does, by the thresholds of one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acutance.diagnose.thresholds import THRESHOLDS, limit
from acutance.structure.parts import PEAKS

if TYPE_CHECKING:
    from acutance.summary.head_summary import HeadSummary

__all__ = ["CLASSES", "LEAST_KEYS", "Class", "HeadClass", "classify"]

#: Rows must see so many keys on average: of few keys every head looks sharp, local or even.
LEAST_KEYS = limit("least_keys")
#: How far away counts as near, for "local".
NEAR = int(limit("near"))
#: Weight must also be so many times what even weights would have there.
LIFT = limit("lift")


@dataclass(frozen=True)
class HeadClass:
    """One class that a head is in.

    Attributes:
        name: one of :data:`CLASSES`.
        sentence: what it means, with this head's numbers.
        numbers: the numbers that led to it.
    """

    name: str
    sentence: str
    numbers: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"name": self.name, "sentence": self.sentence, "numbers": dict(self.numbers)}


@dataclass(frozen=True)
class Class:
    """A kind of head.

    Attributes:
        name: what it is called.
        threshold: the number that decides.
        rule: the rule, in words.
        source: where threshold or name are from.
    """

    name: str
    threshold: float
    rule: str
    source: str


#: Every class, with its threshold; a head is in a class if it is beyond the threshold, not at it.
CLASSES: dict[str, Class] = {
    name: Class(name, limit(name), rule, THRESHOLDS[name].source)
    for name, rule in {
        "sink": "mean weight above 0.3 on the first visible key, or on special tokens, and above "
        "twice an even share",
        "local": "mean weight above 0.5 within 7 positions, and above twice what even weights have",
        "previous-token": "mean weight above 0.5 on the position just before",
        "diffuse": "mean normalized entropy above 0.9, and no more than 0.98",
        "sharp": "mean largest weight above 0.5",
        "dead": "mean normalized entropy above 0.98",
        "positional": "largest weight at one and the same relative position, up to 8 away, in more "
        "than 90 % of rows",
    }.items()
}


class _Head:
    """One head's numbers by name, NaN for what was not recorded."""

    def __init__(self, columns: Mapping[str, list[float]], head: int) -> None:
        self._columns, self._head = columns, head

    def mean(self, name: str) -> float:
        return self._columns[name][self._head] if name in self._columns else math.nan


def _columns(summary: HeadSummary) -> dict[str, list[float]]:
    """Every number that a rule reads, by name, for all heads.

    ``near`` and ``even`` are the weight within :data:`NEAR` positions and what even weights have
    there, ``place`` and ``share`` where the largest weight stands most often and how often.
    """
    columns = {name: summary.mean(name).tolist() for name in summary.metrics if name in _READ}
    distances = summary.distances
    if distances is None:
        return columns
    none = distances.rows == 0
    mass, even = distances.within(NEAR)
    most = distances.peaks.max(1)
    share = most.values.double() / distances.rows.clamp(min=1).double()
    found = {"near": mass, "even": even, "place": most.indices.double() - PEAKS, "share": share}
    return columns | {
        name: part.masked_fill(none, math.nan).tolist() for name, part in found.items()
    }


def classify(summary: HeadSummary) -> list[tuple[HeadClass, ...]]:
    """The classes of every head, by :data:`CLASSES`.

    A head may be in several classes, and in none. Classes whose numbers were not recorded are
    never given: ``local``, ``previous-token`` and ``positional`` need a probe with ``structure``.
    Heads of layers whose capture is known to be wrong, or whose rows see fewer than eight keys on
    average, are in none.

    Args:
        summary: any head summary.

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
        averages everything: its entropy is 1.000 of the most it could be over 40 keys
    """
    columns = _columns(summary)
    found: list[tuple[HeadClass, ...]] = []
    for index, (layer, _) in enumerate(summary.places):
        head = _Head(columns, index)
        few = head.mean("n_keys") < LEAST_KEYS
        if summary.layers[layer].status == "mismatch" or few:
            found.append(())
            continue
        each = [_RULES[name](head) for name in CLASSES]
        found.append(tuple(one for one in each if one is not None))
    return found


def _sink(head: _Head) -> HeadClass | None:
    limit, n = CLASSES["sink"].threshold, head.mean("n_keys")
    first, special = head.mean("first_weight"), head.mean("mass_special")
    numbers = {"first_weight": first, "mass_special": special, "n_keys": n}
    if first > limit and not first < LIFT / n:
        return _of("sink", f"puts {first:.0%} of its weight on the first key it sees", numbers)
    if special > limit:
        return _of("sink", f"puts {special:.0%} of its weight on special tokens", numbers)
    return None


def _local(head: _Head) -> HeadClass | None:
    mass, even = head.mean("near"), head.mean("even")
    if not (mass > CLASSES["local"].threshold and mass > LIFT * even):
        return None
    text = f"keeps {mass:.0%} of its weight within {NEAR} positions, where even weights have "
    numbers = {"near": mass, "even": even, "attention_distance": head.mean("attention_distance")}
    return _of("local", f"{text}{even:.0%}", numbers)


def _previous(head: _Head) -> HeadClass | None:
    mass = head.mean("mass_previous")
    if not mass > CLASSES["previous-token"].threshold:
        return None
    text = f"puts {mass:.0%} of its weight on the token just before"
    return _of("previous-token", text, {"mass_previous": mass})


def _diffuse(head: _Head) -> HeadClass | None:
    share = head.mean("normalized_entropy")
    if not CLASSES["diffuse"].threshold < share <= CLASSES["dead"].threshold:
        return None
    text = f"spreads its weight widely: its entropy is {share:.3f} of the most it could be"
    return _of("diffuse", text, {"normalized_entropy": share})


def _sharp(head: _Head) -> HeadClass | None:
    top = head.mean("top_weight")
    if not top > CLASSES["sharp"].threshold:
        return None
    keys = head.mean("effective_keys")
    text = f"picks one key: the largest weight of a row is {top:.2f} on average"
    return _of("sharp", text, {"top_weight": top, "effective_keys": keys})


def _dead(head: _Head) -> HeadClass | None:
    share, n = head.mean("normalized_entropy"), head.mean("n_keys")
    if not share > CLASSES["dead"].threshold:
        return None
    over = f" over {n:.0f} keys" if math.isfinite(n) else ""
    text = f"averages everything: its entropy is {share:.3f} of the most it could be{over}"
    return _of("dead", text, {"normalized_entropy": share, "n_keys": n})


def _positional(head: _Head) -> HeadClass | None:
    share = head.mean("share")
    if not share > CLASSES["positional"].threshold:
        return None
    place = int(head.mean("place"))
    away = abs(place)
    where = {0: "at its own position", -1: "one position back", 1: "one position ahead"}.get(
        place, f"{away} positions {'back' if place < 0 else 'ahead'}"
    )
    text = f"looks {where}: there stands the largest weight of {share:.0%} of its rows"
    return _of("positional", text, {"position": float(place), "share": share})


def _of(name: str, sentence: str, numbers: dict[str, float]) -> HeadClass:
    known = {key: value for key, value in numbers.items() if math.isfinite(value)}
    return HeadClass(name, sentence, known)


_RULES: dict[str, Callable[[_Head], HeadClass | None]] = {
    "sink": _sink,
    "local": _local,
    "previous-token": _previous,
    "diffuse": _diffuse,
    "sharp": _sharp,
    "dead": _dead,
    "positional": _positional,
}
_READ = {
    "n_keys", "first_weight", "mass_special", "attention_distance", "mass_previous",
    "normalized_entropy", "top_weight", "effective_keys",
}  # fmt: skip
