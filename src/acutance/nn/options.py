"""Scores and weightings as submodules, so that their parameters are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from acutance import scores
from acutance import weights as weightings
from acutance.scores import (
    Additive,
    AdditiveScore,
    DotScore,
    General,
    GeneralScore,
    Location,
    TileScore,
)
from acutance.weights import Sink, Weighting

__all__ = ["HeldWeights", "Score", "hold_score"]

_RECORDS = (General, Additive, Location)

Score: TypeAlias = DotScore | TileScore | Callable[[Tensor, Tensor, int], Tensor]


def hold_score(
    score: str | Score,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Score:
    """The score for a name, trainable if it has parameters, or the given score.

    Raises:
        ValueError: if the name is unknown, or its parameters cannot be guessed.
        TypeError: if it is not a score, or a record that would hide its parameters from training.
    """
    if score == "general":
        return GeneralScore(width, num_heads=num_heads, device=device, dtype=dtype)
    if score == "additive":
        return AdditiveScore(
            width, num_heads=num_heads, num_kv_heads=num_kv_heads, device=device, dtype=dtype
        )
    for name, part in (vars(score) if isinstance(score, _RECORDS) else {}).items():
        if isinstance(part, nn.Parameter):
            kind = type(score).__name__
            raise TypeError(
                f"score={kind}(...) contains the Parameter {name}, which this module would not "
                f"train: pass the module scores.{kind}Score"
            )
    return scores.get(score)


class HeldWeights(nn.Module):
    """A weighting whose tensors are parameters or buffers of the module.

    Args:
        weights: a name or a weighting. ``"sink"`` trains a sink for each head, from 0.
        num_heads: Hq.
        device, dtype: of the parameters that are created.
    """

    def __init__(
        self,
        weights: str | Weighting,
        num_heads: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if weights == Sink.name:
            weights = Sink(nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)))
        record = weightings.get(weights)
        self.names = [name for name, part in vars(record).items() if isinstance(part, Tensor)]
        for name in self.names:
            tensor = getattr(record, name)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.record = record

    def forward(self) -> Weighting:
        """The weighting with its present tensors."""
        if not self.names:
            return self.record
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.names}
        return replace(self.record, **tensors)

    def extra_repr(self) -> str:
        """The weighting's name, for ``print``."""
        return repr(self.record.name)
