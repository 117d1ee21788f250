"""The result of a calibration: a law, with the measurements of each head."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from acutance.calibration.fit.measure import TARGETS
from acutance.calibration.law import Law
from acutance.files import as_json, finite, write_text

if TYPE_CHECKING:
    from acutance.report.table import Table

__all__ = ["HELD", "STATUSES", "Calibration", "HeadCalibration"]

#: A target is held where the value is within this share of it.
HELD = 0.05
#: What each status of a length means.
STATUSES = {
    "held": "within 5 % of the target with the law",
    "missed": "more than 5 % from the target with the law",
    "kept": "unchanged: without a law its difference from the target is insignificant or below 1 %",
    "impossible": "the target cannot be reached with this number of keys",
    "limited": "the factor is at its limit and the target is not reached",
}
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class HeadCalibration:
    """One head: numbers at each of its lengths.

    Attributes:
        layer: number among the attention layers.
        head: query head.
        module: qualified name of the layer.
        lengths: visible keys n.
        target: what was wanted.
        before: what rows of n keys have without a law.
        before_error: its standard error over parts of the text.
        predicted: what was to be expected under the law, before it was measured.
        after: what was measured under the law.
        after_error: its standard error.
        factors: of the law.
        factor_errors: their standard errors, by the measured slope.
        status: one of :data:`STATUSES`.
        family: the growth of the factors: ``constant``, ``sqrt_log_n``, ``log_n``, ``n``,
            ``undecided``, or ``limited`` where a factor is at its limit.
        candidates: families that cannot be distinguished from the best.
        family_errors: relative error of the factors under each family, root mean square.
        growth: increase of the factor per unit of log n, with its standard error; NaN where there
            is one length, or a factor is at its limit.
    """

    layer: int
    head: int
    module: str
    lengths: tuple[int, ...]
    target: Numbers
    before: Numbers
    before_error: Numbers
    predicted: Numbers
    after: Numbers
    after_error: Numbers
    factors: Numbers
    factor_errors: Numbers
    status: tuple[str, ...]
    family: str
    candidates: tuple[str, ...]
    family_errors: Mapping[str, float]
    growth: tuple[float, float]


@dataclass(frozen=True, repr=False)
class Calibration(Law):
    """The result of :func:`acutance.calibrate`: a law to apply and save, with its measurements.

    :meth:`Law.save` writes the law alone, :meth:`to_json` everything.

    Attributes:
        heads: every head that was fitted, in model order.
        metric: what was held constant.
        value: the wanted value; None where it is each head's own at the reference.
        reference: length whose value is kept, or at which short rows' factors end.
        family: the law that was requested.
        passes: measurements made.
        windows: length and number of windows measured.
        skipped: module name and why it was not fitted.
    """

    heads: tuple[HeadCalibration, ...] = ()
    metric: str = "entropy"
    value: float | None = None
    reference: int = 0
    family: str = "table"
    passes: int = 0
    windows: Mapping[int, int] = field(default_factory=dict, hash=False)
    skipped: Mapping[str, str] = field(default_factory=dict, hash=False)

    def counts(self) -> dict[str, int]:
        """How many (head, length) pairs have each status.

        The reference length is left out where its own value is the target.
        """
        counts = dict.fromkeys(STATUSES, 0)
        for head in self.heads:
            for n, status in zip(head.lengths, head.status, strict=True):
                if self.value is not None or n != self.reference or len(head.lengths) == 1:
                    counts[status] += 1
        return counts

    def size(self, target: float) -> float:
        """The number that a distance from a target is divided by.

        It is the target, or for targets near 0 a size at which 5 % is of no interest (0.2 nats for
        entropy).
        """
        return max(abs(target), TARGETS[self.metric].floor / HELD)

    def worst(self, *, law: bool = True) -> float:
        """Largest relative distance from the target, over heads and lengths that can reach it.

        The distance is divided by :meth:`size` of the target.

        Args:
            law: measure under the law; False for the model without it.
        """
        distances = [
            abs(value - target) / self.size(target)
            for head in self.heads
            for value, target, status in zip(
                head.after if law else head.before, head.target, head.status, strict=True
            )
            if status != "impossible"
        ]
        return max(distances, default=0.0)

    def table(self) -> Table:
        """The calibration as a table and sentences, which ``print`` shows."""
        from acutance.calibration.render import table

        return table(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; numbers that are not finite become None."""
        return {
            "schema": "acutance.calibration_report/1",
            "law": self.record(),
            "metric": self.metric,
            "value": self.value,
            "reference": self.reference,
            "family": self.family,
            "passes": self.passes,
            "windows": {str(length): count for length, count in self.windows.items()},
            "skipped": dict(self.skipped),
            "statuses": STATUSES,
            "beyond": BEYOND,
            "counts": self.counts(),
            "heads": [finite(asdict(one)) for one in self.heads],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict`, whole or not at all."""
        write_text(path, as_json(self.to_dict(), indent=1) + "\n")


#: What a table does where nothing was measured.
BEYOND = (
    "beyond the longest calibrated length each head's factor is extrapolated by its fitted "
    "family, without measurement; rows shorter than the shortest length use its factor"
)
