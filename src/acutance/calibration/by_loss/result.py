"""The result of a fit to the loss: a law, and the derivative of the loss by every factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import t as student
from torch import Tensor

from acutance.calibration.fit.result import Calibration, Numbers
from acutance.calibration.head_laws import HeadLaws
from acutance.files import finite
from acutance.scaling import Window

if TYPE_CHECKING:
    from acutance.report.table import Table

__all__ = ["GateSlope", "HeadSlope", "LossCalibration", "beyond_noise", "significant"]

#: Of the derivatives beyond noise, so many are expected to be 0.
_BY_CHANCE = 0.1


@dataclass(frozen=True)
class HeadSlope:
    """How the loss changes with the factors of one head, to first order.

    Attributes:
        layer: number among the attention layers.
        head: query head.
        module: qualified name of the layer.
        lengths: visible keys n at which there are factors.
        slope: derivative of the mean loss by log λ at each length, without a law, in nats a token:
            0.01 means that a factor of 1.1 adds 0.00095 nat to first order.
        error: its standard error from window to window.
    """

    layer: int
    head: int
    module: str
    lengths: tuple[int, ...]
    slope: Numbers
    error: Numbers


@dataclass(frozen=True)
class GateSlope:
    """How the loss changes if a head computes another output, to first and second order.

    Attributes:
        layer: number among the attention layers.
        head: query head, or key head.
        module: qualified name of the layer.
        slope: for each alternative, derivative of the mean loss by a gate that opens to it, in
            nats a token; negative where the alternative would help.
        error: its standard error from window to window.
        curvature: second-order cost, with the empirical Fisher information as the curvature, in
            nats a token; never negative.
    """

    layer: int
    head: int
    module: str
    slope: Numbers
    error: Numbers
    curvature: Numbers


@dataclass(frozen=True, repr=False)
class LossCalibration(Calibration):
    """The result of :func:`acutance.calibrate` with ``target="loss"``: a law, and what led to it.

    It holds nothing constant, so :attr:`heads` is empty.

    Attributes:
        slopes: for every head, the derivative of the loss by its factors without a law, over the
            fitted and the deciding windows. Heads are chosen by the fitted ones alone.
        factors: for every head in the same order, its factors at the lengths.
        gates: for every head, the derivative of the loss by a gate that opens to each window,
            without any law; empty if no window was to be chosen.
        fitted: windows that the steps read.
        stopped: other windows, which decided how many steps were made.
        delta: mean loss of those with the law that was best on them minus that without.
        error: its standard error.
        choices: the windows that the gates open to; none if no window was to be chosen.
        loss: what was lowered, in words.
        mean_loss: without a law, over the windows that decided, in nats.
    """

    slopes: tuple[HeadSlope, ...] = ()
    factors: tuple[Numbers, ...] = ()
    gates: tuple[GateSlope, ...] = ()
    choices: tuple[Window, ...] = ()
    fitted: int = 0
    stopped: int = 0
    delta: float = 0.0
    error: float = 0.0
    loss: str = ""
    mean_loss: float = 0.0

    @property
    def changed(self) -> int:
        """Heads with a factor other than 1."""
        return sum(any(one != 1.0 for one in row) for row in self.factors)

    @property
    def reads(self) -> tuple[Window | None, ...]:
        """For every head of :attr:`gates`, the window that it reads through; None for all keys."""
        laws = dict(self.layers)
        found: list[Window | None] = []
        for one in self.gates:
            law = laws.get(one.module, HeadLaws())
            found.append(law.window or dict(law.windows).get(one.head))
        return tuple(found)

    @property
    def empty(self) -> bool:
        """Whether no law was found: every head has the factor 1 and reads all its keys."""
        return not self.changed and all(window is None for window in self.reads)

    def table(self) -> Table:
        """The fit as tables and sentences, which ``print`` shows."""
        from acutance.calibration.by_loss.render import table

        return table(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; numbers that are not finite become None."""
        return {
            "schema": "acutance.loss_calibration_report/1",
            "law": self.record(),
            "metric": self.metric,
            "family": self.family,
            "passes": self.passes,
            "loss": self.loss,
            "mean_loss": self.mean_loss,
            "delta": self.delta,
            "error": finite(self.error),
            "windows": {str(length): count for length, count in self.windows.items()},
            "fitted": self.fitted,
            "stopped": self.stopped,
            "skipped": dict(self.skipped),
            "changed": self.changed,
            "heads": [
                finite(asdict(one)) | {"factors": list(row)}
                for one, row in zip(self.slopes, self.factors, strict=True)
            ],
            "choices": [window.to_dict() for window in self.choices],
            "gates": [
                finite(asdict(one)) | {"window": None if window is None else window.to_dict()}
                for one, window in zip(self.gates, self.reads, strict=True)
            ],
        }


def significant(p: Sequence[float] | Tensor, share: float) -> Tensor:
    """Which tests are significant at a false discovery rate (Benjamini and Hochberg).

    Args:
        p: two-sided p-values.
        share: expected fraction of false ones among the significant tests, at most.

    Returns:
        Boolean, shaped as ``p``.

    Example:
        >>> significant([0.001, 0.02, 0.04, 0.9], 0.05).tolist()
        [True, True, False, False]

    Source:
        Benjamini & Hochberg (1995), doi:10.1111/j.2517-6161.1995.tb02031.x.
    """
    values = torch.as_tensor(p, dtype=torch.float64).flatten()
    order = values.argsort()
    bound = share * torch.arange(1, len(values) + 1) / len(values)
    below = (values[order] <= bound).nonzero()
    chosen = torch.zeros(len(values), dtype=torch.bool)
    if len(below):
        chosen[order[: int(below.max()) + 1]] = True
    return chosen.view(torch.as_tensor(p).shape)


def beyond_noise(slope: Tensor, error: Tensor, windows: int) -> Tensor:
    """Which derivatives differ from 0, one in ten of those by chance.

    Args:
        slope: derivatives.
        error: their standard errors, the same shape.
        windows: windows that gave them.

    Returns:
        Boolean, the same shape.

    Example:
        >>> beyond_noise(torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.1]), 8).tolist()
        [True, False]
    """
    quotient = (slope / error).abs().nan_to_num(0.0)
    p = 2 * student.sf(quotient.numpy(), windows - 1)
    return significant(torch.as_tensor(p), _BY_CHANCE)
