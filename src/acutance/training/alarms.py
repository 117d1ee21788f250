"""Alarms: heads whose attention has collapsed, has too large logits, or is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from acutance.diagnose.thresholds import limit
from acutance.shapes import check_number
from acutance.summary.head_summary import HeadSummary

__all__ = ["Alarm", "AttentionWarning", "Kind", "Thresholds", "summed_up"]

Kind = Literal["entropy_collapse", "logit_growth", "not_finite"]
#: Every kind of alarm, in the order in which they are told.
KINDS: tuple[Kind, ...] = ("entropy_collapse", "logit_growth", "not_finite")
#: Metrics that the thresholds are about.
NEEDED = ("normalized_entropy", "max_logit", "lse", "n_keys")
_NAMED = 3


class AttentionWarning(UserWarning):
    """Warning: attention is beyond a threshold, or a monitor cannot read it."""


@dataclass(frozen=True)
class Alarm:
    """One head that is beyond a threshold.

    Attributes:
        kind: "entropy_collapse", "logit_growth" or "not_finite".
        module: qualified name of the layer's module.
        head: number of the head in its layer.
        value: what was measured: mean of H / log n, largest logit, or rows that are no number.
        threshold: what it was held against.
        step: the optimiser step.

    Example:
        >>> print(Alarm("logit_growth", "layers.3.self_attn", 5, 214.2, 100.0, 300))
        head 5 of layers.3.self_attn has a logit of 214.2, above 100
    """

    kind: Kind
    module: str
    head: int
    value: float
    threshold: float
    step: int

    @property
    def place(self) -> tuple[str, str, int]:
        """The key by which repeated alarms are recognised."""
        return self.kind, self.module, self.head

    def __str__(self) -> str:
        head = f"head {self.head} of {self.module}"
        if self.kind == "entropy_collapse":
            return f"{head} has a normalized entropy of {self.value:.2g}, below {self.threshold:g}"
        if self.kind == "logit_growth":
            return f"{head} has a logit of {self.value:.4g}, above {self.threshold:g}"
        return f"{head} has {self.value:.0f} rows whose scores are not finite"


@dataclass(frozen=True)
class Thresholds:
    """The limits that raise an alarm.

    Attributes:
        collapse: lowest mean of H / log n over a head's rows; None holds no head against it.
        growth: highest logit of a head; None holds no head against it.
    """

    collapse: float | None = limit("entropy_collapse")
    growth: float | None = limit("large_logits")

    def __post_init__(self) -> None:
        if self.collapse is not None:
            check_number("collapse", self.collapse, above=0.0)
            if self.collapse >= 1:
                raise ValueError(
                    f"collapse must be a fraction of log n below 1, got {self.collapse!r}"
                )
        if self.growth is not None:
            check_number("growth", self.growth)

    def alarms(self, summary: HeadSummary, step: int) -> tuple[Alarm, ...]:
        """The heads of a summary that are beyond a threshold, layer by layer."""
        return tuple(self._exceeding(summary, step))

    def _exceeding(self, summary: HeadSummary, step: int) -> Iterator[Alarm]:
        """An alarm for each head and threshold that it exceeds."""
        columns = [summary.metrics.index(name) for name in NEEDED]
        counts, means, highs = (
            part[:, columns].tolist()
            for part in (summary.moments.count, summary.moments.mean, summary.moments.high)
        )
        for (index, head), count, mean, high in zip(
            summary.places, counts, means, highs, strict=True
        ):
            where = summary.layers[index].module, head
            # a row counts towards a metric only if that is a finite number, as n always is
            lost = count[3] - min(count[1], count[2])
            if lost > 0:
                yield Alarm("not_finite", *where, float(lost), 0.0, step)
            if self.collapse is not None and count[0] and mean[0] < self.collapse:
                yield Alarm("entropy_collapse", *where, mean[0], self.collapse, step)
            if self.growth is not None and count[1] and high[1] > self.growth:
                yield Alarm("logit_growth", *where, high[1], self.growth, step)


def summed_up(alarms: Sequence[Alarm]) -> str:
    """One sentence for the alarms of one kind in a step; the worst heads are named.

    Example:
        >>> kind = "logit_growth"
        >>> heads = [Alarm(kind, "attn", head, 101.0 + head, 100.0, 7) for head in range(5)]
        >>> print(summed_up(heads))
        attention at step 7, logit growth in 5 heads: head 4 of attn has a logit of 105,
        above 100; head 3 of attn has a logit of 104, above 100; head 2 of attn has a logit
        of 103, above 100; and 2 more
    """
    kind = alarms[0].kind
    sign = 1 if kind == "entropy_collapse" else -1
    worst = sorted(alarms, key=lambda alarm: sign * _ordered(alarm.value))
    heads = "one head" if len(alarms) == 1 else f"{len(alarms)} heads"
    text = "; ".join(map(str, worst[:_NAMED]))
    more = f"; and {len(alarms) - _NAMED} more" if len(alarms) > _NAMED else ""
    label = kind.replace("_", " ")
    return f"attention at step {alarms[0].step}, {label} in {heads}: {text}{more}"


def _ordered(value: float) -> float:
    return math.inf if math.isnan(value) else value
