"""Match the layers and heads of two summaries, and warn about what makes them incomparable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from acutance.escapes import ranges
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import Layer
from acutance.summary.state import Run, State, brief


@dataclass(frozen=True)
class Place:
    """One head that both summaries have.

    Attributes:
        layer: index of its layer in the first summary.
        other_layer: index of its layer in the second summary.
        head: its number in the layer.
        module: qualified name of the layer's module in the first summary.
    """

    layer: int
    other_layer: int
    head: int
    module: str


@dataclass(frozen=True)
class Matched:
    """The heads that two summaries share, and what only one of them has.

    Attributes:
        places: the shared heads, in the first summary's order.
        rows: for each side, indices of the shared heads in its arrays, (heads,) int64.
        only: for each side, descriptions of layers, heads and metrics that only it has.
        by_order: True if layers were matched by order, since no module name is shared.
    """

    places: tuple[Place, ...]
    rows: tuple[Tensor, Tensor]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    by_order: bool = False


def match(first: HeadSummary, second: HeadSummary) -> Matched:
    """Match the heads of two summaries by module name and head number, else by layer order.

    Raises:
        ValueError: if no heads can be matched.
    """
    names = [{layer.module: index for index, layer in enumerate(s.layers)} for s in (first, second)]
    pairs = [(index, names[1][name]) for name, index in names[0].items() if name in names[1]]
    by_order = False
    numbers = [[layer.numbers for layer in summary.layers] for summary in (first, second)]
    if not pairs and numbers[0] == numbers[1]:
        pairs, by_order = [(index, index) for index in range(len(first.layers))], True
    starts = [
        list(accumulate((layer.heads for layer in summary.layers), initial=0))
        for summary in (first, second)
    ]
    places, rows = [], ([], [])  # type: tuple[list[Place], tuple[list[int], list[int]]]
    for left, right in pairs:
        theirs = {head: row for row, head in enumerate(second.layers[right].numbers)}
        for row, head in enumerate(first.layers[left].numbers):
            if head in theirs:
                places.append(Place(left, right, head, first.layers[left].module))
                rows[0].append(starts[0][left] + row)
                rows[1].append(starts[1][right] + theirs[head])
    if not places:
        raise ValueError(
            f"the two states have no head in common: one has {_layers_of(first.layers)}, the other "
            f"{_layers_of(second.layers)}"
        )
    return Matched(
        tuple(places),
        (torch.tensor(rows[0]), torch.tensor(rows[1])),
        (
            _only_in_first(first, second, dict(pairs)),
            _only_in_first(second, first, {b: a for a, b in pairs}),
        ),
        by_order,
    )


def _only_in_first(
    first: HeadSummary, second: HeadSummary, pairs: dict[int, int]
) -> tuple[str, ...]:
    """Descriptions of the layers, heads and metrics that only the first summary has."""
    places = []
    for index, layer in enumerate(first.layers):
        if index not in pairs:
            places.append(f"layer {index}, {layer.module} ({ranges(layer.numbers, 'head')})")
            continue
        theirs = set(second.layers[pairs[index]].numbers)
        if heads := [head for head in layer.numbers if head not in theirs]:
            places.append(f"{ranges(heads, 'head')} of layer {index}, {layer.module}")
    metrics = [name for name in first.metrics if name not in second.metrics]
    if metrics:
        places.append(f"the metric{'s' * (len(metrics) > 1)} {', '.join(metrics)}")
    return tuple(places)


def _layers_of(layers: tuple[Layer, ...]) -> str:
    """Number and first names of layers, as text."""
    names = [layer.module for layer in layers]
    text = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} layers ({text})" if names else "no layer"


#: Other facts that a change may be due to, with what they are called.
_SETTINGS = {
    "attention": "attention implementations",
    "dtype": "dtypes",
    "torch": "releases of torch",
    "transformers": "releases of transformers",
    "acutance": "releases of acutance",
}


_ALIKE = 0.01


@dataclass(frozen=True)
class Side:
    """One summary of a diff, with its run if known."""

    summary: HeadSummary
    run: Run | None = None

    @staticmethod
    def from_summary(source: HeadSummary | State) -> Side:
        """Make a side from a summary or a state.

        Raises:
            TypeError: if that is neither a summary nor a state.
        """
        if isinstance(source, State):
            return Side(source.summary, source.run)
        if not isinstance(source, HeadSummary):
            raise TypeError(f"diff needs summaries or states, got {type(source).__name__}")
        return Side(source)

    def fact(self, name: str, setting: str = "") -> Any:
        """A fact about the run: from its settings, else from the summary; None if unknown."""
        if self.run is not None and setting in self.run.settings:
            return self.run.settings[setting]
        return self.summary.about.get(name)


def warnings(
    first: Side, second: Side, matched: Matched, *, equal_n: bool = False
) -> Iterator[str]:
    """Sentences on everything that makes two summaries hard to compare."""
    about = (first.summary.about, second.summary.about)
    kinds = [side.get("architecture", side.get("model")) for side in about]
    if _differ(*kinds):
        yield (
            f"The models are of different kinds, {brief(kinds[0])} and "
            f"{brief(kinds[1])}: heads with the same number need not correspond."
        )
    if matched.by_order:
        yield (
            "No module has the same name in both, so layers are matched by order, which may "
            "be wrong."
        )
    models = [side.fact("model", "model") for side in (first, second)]
    texts = _texts(first, second)
    if texts is not None:
        yield texts
    lengths = (first.fact("window_length", "length"), second.fact("window_length", "length"))
    keys = _mean_keys(first.summary, second.summary, matched)
    if _differ(*lengths) and equal_n:
        yield (
            f"The window lengths differ ({lengths[0]} and {lengths[1]} tokens); rows with the "
            "same number of keys are comparable."
        )
    elif _differ(*lengths):
        yield (
            f"The window lengths differ ({lengths[0]} and {lengths[1]} tokens): entropy, "
            "information and effective keys change with the number of keys even if a head "
            f"does not. Compare normalized_entropy{_equal_n_hint(first, second)}."
        )
    elif keys is not None and not equal_n:
        yield (
            f"Rows see {keys[0]:.4g} and {keys[1]:.4g} keys on average: metrics that depend on "
            "n differ even if a head does not."
        )
    if _differ(*models) and (texts is not None or _differ(*lengths)):
        difference = "text" if texts is not None else "length"
        yield f"Model and {difference} differ, so changes cannot be attributed to one of them."
    for name, label in _SETTINGS.items():
        pair = (first.fact(name), second.fact(name))
        if _differ(*pair):
            yield f"The {label} differ: {brief(pair[0])} and {brief(pair[1])}."
    yield from _shared_windows(first, second)
    for which, side in (("first", first), ("second", second)):
        yield from _problems_of_side(which, side)


def _problems_of_side(order: str, side: Side) -> Iterator[str]:
    """Sentences on problems of one side."""
    layers = side.summary.layers
    wrong = [index for index, layer in enumerate(layers) if layer.status == "mismatch"]
    if wrong:
        yield (
            f"In the {order} state {_layers(wrong)} did not pass verification: do not trust "
            "changes there."
        )
    if side.summary.about.get("complete") is False:
        about = side.summary.about
        done = f"{about.get('windows')} of {about.get('windows_in_all')} windows"
        part = f", shard {about['shard']}" if "shard" in about else ""
        yield f"The {order} state holds {done}{part}."
    if side.summary.unread:
        count = len(side.summary.unread)
        yield f"The {order} state lists {count} piece{'s' * (count > 1)} of attention as unread."


def _texts(first: Side, second: Side) -> str | None:
    """A sentence if the two sides read different texts; None if not, or if unknown."""
    names = (first.fact("text"), second.fact("text"))
    settings = [side.run.settings if side.run is not None else {} for side in (first, second)]
    same_cut = settings[0].get("length") == settings[1].get("length")
    digests = (settings[0].get("text"), settings[1].get("text"))
    if _differ(*names):
        return (
            f"They read different texts, {brief(names[0])} and {brief(names[1])}: part "
            "of each change may be due to the text."
        )
    if same_cut and _differ(*digests):
        return (
            "They read different texts or different tokens of the same text: part of each "
            "change may be due to that."
        )
    return None


def _mean_keys(
    first: HeadSummary, second: HeadSummary, matched: Matched
) -> tuple[float, float] | None:
    """Mean numbers of visible keys of the two sides, if they differ by more than 1 %."""
    if not all("n_keys" in summary.metrics for summary in (first, second)):
        return None
    means = [
        float(summary.mean("n_keys")[rows].nanmean())
        for summary, rows in zip((first, second), matched.rows, strict=True)
    ]
    largest = max(means)
    return (means[0], means[1]) if abs(means[0] - means[1]) > _ALIKE * largest else None


def _equal_n_hint(first: Side, second: Side) -> str:
    """A hint to use ``equal_n``, if rows of a window see different numbers of keys."""
    octaves = [
        side.summary.profile is not None and int((side.summary.profile.rows > 0).any(0).sum())
        for side in (first, second)
    ]
    return ", or rows at equal n (--equal-n)" if min(octaves) > 2 else ""


def _shared_windows(first: Side, second: Side) -> Iterator[str]:
    """A warning where two parts of one run contain the same windows: they are not independent."""
    if (
        first.run is None
        or second.run is None
        or first.run.difference(second.run, "", "") is not None
    ):
        return
    both = sum(
        max(0, min(stop, other_stop) - max(start, other_start))
        for start, stop in first.run.done
        for other_start, other_stop in second.run.done
    )
    if both:
        yield f"Both belong to one run and share {both} windows, which show no change."


def _differ(first: Any, second: Any) -> bool:
    """Whether both values are known and differ."""
    return first is not None and second is not None and first != second


def _layers(indices: list[int]) -> str:
    """Layer indices as text, such as ``layers 0, 3``."""
    text = ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
    return f"layer{'s' * (len(indices) > 1)} {text}"
