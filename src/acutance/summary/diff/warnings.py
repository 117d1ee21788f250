"""Why two summaries may not compare: what differs between their models, texts and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from acutance.summary.diff.match_heads import Matched
from acutance.summary.head_summary import HeadSummary
from acutance.summary.state import Run, State

__all__ = ["Side", "warnings"]

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
    """One side of a comparison: a summary, and the run it is of where that is known."""

    summary: HeadSummary
    run: Run | None = None

    @staticmethod
    def of(given: HeadSummary | State) -> Side:
        """A side of what a caller gives.

        Raises:
            TypeError: if that is neither a summary nor a state.
        """
        if isinstance(given, State):
            return Side(given.summary, given.run)
        if not isinstance(given, HeadSummary):
            raise TypeError(f"diff compares summaries or states, got {type(given).__name__}")
        return Side(given)

    def fact(self, name: str, setting: str = "") -> Any:
        """What the run's settings say, else what the summary says about itself; None if neither."""
        if self.run is not None and setting in self.run.settings:
            return self.run.settings[setting]
        return self.summary.about.get(name)


def warnings(one: Side, other: Side, matched: Matched, *, equal_n: bool = False) -> Iterator[str]:
    """A sentence for everything that makes the two harder to compare."""
    about = (one.summary.about, other.summary.about)
    kinds = [side.get("architecture", side.get("model")) for side in about]
    if _differ(*kinds):
        yield (
            f"The models are of different kinds, {_told(kinds[0])} and {_told(kinds[1])}: heads of "
            "the same number need not do the same."
        )
    if matched.by_order:
        yield (
            "No module has the same name in both, so layers are matched by their order, which may "
            "be wrong."
        )
    models, texts = _pair(one, other, "model"), _texts(one, other)
    if texts is not None:
        yield texts
    lengths = (one.fact("window_length", "length"), other.fact("window_length", "length"))
    keys = _keys(one.summary, other.summary, matched)
    if _differ(*lengths) and equal_n:
        yield f"Windows are of {lengths[0]} and {lengths[1]} tokens; rows of as many keys compare."
    elif _differ(*lengths):
        yield (
            f"Windows are of {lengths[0]} and {lengths[1]} tokens: entropy, information and "
            "effective keys change with the number of keys even where a head does not; "
            f"normalized_entropy compares best{_or_equal_n(one, other)}."
        )
    elif keys is not None and not equal_n:
        yield (
            f"Rows see {keys[0]:.4g} and {keys[1]:.4g} keys on average: metrics that depend on n "
            "change with it even where a head does not."
        )
    if _differ(*models) and (texts is not None or _differ(*lengths)):
        what = "text" if texts is not None else "length"
        yield f"Model and {what} differ: a change cannot be put down to one of them."
    for name, label in _SETTINGS.items():
        pair = (one.fact(name), other.fact(name))
        if _differ(*pair):
            yield f"The {label} differ: {_told(pair[0])} and {_told(pair[1])}."
    yield from _shared_windows(one, other)
    for which, side in (("first", one), ("second", other)):
        yield from _own(which, side)


def _own(which: str, side: Side) -> Iterator[str]:
    """What is wrong with one side alone."""
    layers = side.summary.layers
    wrong = [index for index, layer in enumerate(layers) if layer.status == "mismatch"]
    if wrong:
        yield (
            f"In the {which} state {_layers(wrong)} did not pass verification: do not trust "
            "changes there."
        )
    if side.summary.about.get("complete") is False:
        about = side.summary.about
        done = f"{about.get('windows')} of {about.get('windows_in_all')} windows"
        part = f", shard {about['shard']}" if "shard" in about else ""
        yield f"The {which} state holds {done}{part}."
    if side.summary.unread:
        count = len(side.summary.unread)
        yield f"The {which} state lists {count} piece{'s' * (count > 1)} of attention as unread."


def _texts(one: Side, other: Side) -> str | None:
    """Whether they read different texts; None if not, or if nobody knows."""
    names = (one.fact("text"), other.fact("text"))
    settings = [side.run.settings if side.run is not None else {} for side in (one, other)]
    same_cut = settings[0].get("length") == settings[1].get("length")
    digests = (settings[0].get("text"), settings[1].get("text"))
    if _differ(*names):
        return (
            f"They read different texts, {_told(names[0])} and {_told(names[1])}: a part of each "
            "change may be the texts'."
        )
    if same_cut and _differ(*digests):
        return (
            "They read different texts or other tokens of one: a part of each change may be that."
        )
    return None


def _pair(one: Side, other: Side, name: str) -> tuple[Any, Any]:
    return one.fact(name, name), other.fact(name, name)


def _keys(one: HeadSummary, other: HeadSummary, matched: Matched) -> tuple[float, float] | None:
    """The mean numbers of visible keys, if they differ by more than a hundredth."""
    if not all("n_keys" in summary.metrics for summary in (one, other)):
        return None
    means = [
        float(summary.mean("n_keys")[rows].nanmean())
        for summary, rows in zip((one, other), matched.rows, strict=True)
    ]
    largest = max(means)
    return (means[0], means[1]) if abs(means[0] - means[1]) > _ALIKE * largest else None


def _or_equal_n(one: Side, other: Side) -> str:
    """What else helps, where rows of a window see different numbers of keys."""
    octaves = [
        side.summary.profile is not None and int((side.summary.profile.rows > 0).any(0).sum())
        for side in (one, other)
    ]
    return ", or rows at equal n (--equal-n)" if min(octaves) > 2 else ""


def _shared_windows(one: Side, other: Side) -> Iterator[str]:
    """Two parts of one run that hold the same windows are not independent."""
    if one.run is None or other.run is None or one.run.difference(other.run, "", "") is not None:
        return
    both = sum(
        max(0, min(stop, other_stop) - max(start, other_start))
        for start, stop in one.run.done
        for other_start, other_stop in other.run.done
    )
    if both:
        yield (
            f"Both are of one run, and {both} of its windows are in both: what they share shows no "
            "change."
        )


def _differ(one: Any, other: Any) -> bool:
    """Whether both are known and not the same."""
    return one is not None and other is not None and one != other


def _layers(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
    return f"layer{'s' * (len(indices) > 1)} {shown}"


def _told(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
