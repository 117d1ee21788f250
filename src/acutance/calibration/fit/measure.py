"""A target by head and number of visible keys, under any law: what a law does on other text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.calibration.fit.estimates import LayerValues
from acutance.calibration.fit.passes import PassSums, knots_of, run_pass
from acutance.calibration.fit.request import (
    check_positions,
    check_reference,
    check_target,
    check_windows,
)
from acutance.calibration.fit.windows import AnyBatches, batches_by_length, check_lengths, cut
from acutance.calibration.law import AnyLaw
from acutance.capture.find_layers import layer_numbers

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """The result of :func:`measure`.

    Attributes:
        metric: what was measured.
        lengths: numbers n of visible keys at which it is reported.
        layers: by module name, in model order.
        bins: of :attr:`lengths`, in the sums of the layers.
    """

    metric: str
    lengths: tuple[int, ...]
    layers: dict[str, LayerValues]
    bins: tuple[int, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers' names, in model order."""
        return tuple(self.layers)

    def values(self, module: str) -> Tensor:
        """Value for each of :attr:`lengths` and each head; NaN where no row was so long."""
        layer = self.layers[module]
        return self._spread(layer, layer.top if self.metric == "max_logit" else layer.value)

    def errors(self, module: str) -> Tensor:
        """Standard errors over parts of the text, likewise; NaN for ``max_logit``."""
        layer = self.layers[module]
        error = layer.estimate.error
        if self.metric == "max_logit":
            error = torch.full_like(error, torch.nan)
        return self._spread(layer, error)

    def flat(self) -> Tensor:
        """Values of all heads of all layers in model order, (heads, lengths)."""
        return torch.cat([self.values(module).T for module in self.layers])

    def _spread(self, layer: LayerValues, found: Tensor) -> Tensor:
        """Values (knots, heads) at a layer's lengths, in rows of all lengths; NaN at the others."""
        whole = found.new_full((len(self.lengths), found.shape[1]), torch.nan)
        whole[[self.bins.index(k) for k in layer.bins]] = found
        return whole


def measure(
    model: torch.nn.Module,
    batches: AnyBatches,
    *,
    target: str = "entropy",
    lengths: Sequence[int] | None = None,
    reference: int | None = None,
    law: AnyLaw | None = None,
    windowed: bool = False,
) -> Measured:
    """Measure a target at several n, on windows of several lengths, under a law or none.

    Rows count as in :func:`acutance.calibrate`, so that a law can be judged on text that it was not
    fitted to, and laws against each other.

    Args:
        model: any module; it is in evaluation mode meanwhile.
        batches: as in :func:`acutance.calibrate`.
        target: likewise.
        lengths: likewise.
        reference: likewise, one of them; rows beyond it are read in the same parts as there.
        law: in force, as in :func:`acutance.apply`; None leaves the model as it is.
        windowed: also measure, and scale, layers with a sliding window.

    Raises:
        ValueError: as :func:`acutance.calibrate` does.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> found = measure(model, [torch.zeros(4, 64, 8)], lengths=[16, 64])
        >>> found.values("self_attn").exp()
        tensor([[16., 16.],
                [64., 64.]], dtype=torch.float64)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    kind, found = check_target(target), batches_by_length(batches)
    places = check_lengths(lengths, found)
    check_positions(model, places)
    turns = cut(found, places)
    check_windows(turns, places)
    knots = knots_of(places, check_reference(reference, places))
    sums = run_pass(model, turns, kind, knots, law, so_far=PassSums(), windowed=windowed)
    numbers = layer_numbers(model, sums.layers)
    names = sorted(sums.layers, key=lambda name: numbers.get(name, len(numbers)))
    layers = {name: LayerValues.of(sums.layers[name]) for name in names}
    bins = tuple(sorted({k for one in layers.values() for k in one.bins}))
    return Measured(kind.name, tuple(knots[k] for k in bins), layers, bins)
