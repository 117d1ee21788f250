"""From measured passes to the record of a calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.fit.law_families import FamilyFit, Resemblance, extended_table, resemble
from acutance.calibration.fit.next_factors import Aim, LayerState, status_of
from acutance.calibration.fit.request import Request
from acutance.calibration.fit.result import Calibration, HeadCalibration
from acutance.calibration.identity import Identity
from acutance.calibration.law import Law
from acutance.capture.find_layers import layer_numbers
from acutance.scaling import Scaling

__all__ = ["FittedLayer", "summarise"]


@dataclass(frozen=True)
class FittedLayer:
    """The results of one layer after the last pass.

    Attributes:
        name: of the module.
        aim: what was wanted.
        first: the pass without a law.
        last: the pass under the law.
        predicted: values to be expected under a table, (knots, heads).
        scaling: the law of the last pass, or one for each head.
        family: whether it is a family, not a table.
        scales: critical scales of sampled rows at each knot, (heads, rows) or None.
    """

    name: str
    aim: Aim
    first: LayerState
    last: LayerState
    predicted: Tensor
    scaling: Scaling | dict[int, Scaling]
    family: bool
    scales: Sequence[Tensor | None]


def summarise(
    model: torch.nn.Module,
    request: Request,
    layers: Sequence[FittedLayer],
    windows: Mapping[int, int],
    passes: int,
    skipped: Mapping[str, str],
) -> Calibration:
    """The record of a calibration."""
    numbers = layer_numbers(model, [one.name for one in layers])
    ordered = sorted(layers, key=lambda one: numbers.get(one.name, len(numbers)))
    law: dict[Any, Scaling] = {}
    heads: list[HeadCalibration] = []
    for index, layer in enumerate(ordered):
        errors = _factor_errors(layer)
        like = [_resemblance(layer, errors, h) for h in range(errors.shape[1])]
        if not layer.family:
            knots, factors = layer.first.values.knots, layer.last.factors
            law[layer.name] = extended_table(knots, factors, like, request.limit)
        elif isinstance(layer.scaling, dict):
            law.update({(layer.name, head): one for head, one in layer.scaling.items()})
        else:
            law[layer.name] = layer.scaling
        heads += _heads(numbers.get(layer.name, index), layer, errors, like)
    target = (
        request.target.name if request.value is None else f"{request.target.name}={request.value:g}"
    )
    plain = Law.of(model, law)
    bins = {k for layer in layers for k in layer.first.values.bins}
    return Calibration(
        model=Identity.of(model),
        everywhere=None,
        layers=plain.layers,
        lengths=tuple(request.knots[k] for k in sorted(bins)),
        target=target,
        heads=tuple(heads),
        metric=request.target.name,
        value=request.value,
        reference=request.reference,
        family=request.law,
        passes=passes,
        windows=dict(windows),
        skipped=dict(skipped),
    )


def _factor_errors(layer: FittedLayer) -> Tensor:
    """Standard errors of the factors, (knots, heads): those of the values over their slopes.

    NaN for ``max_logit``: a maximum has no such error.
    """
    values, aim = layer.last.values, layer.aim
    if aim.bound:
        return torch.full_like(layer.last.factors, torch.nan)
    error = values.estimate.error if aim.reference is None else values.difference(aim.reference)
    return layer.last.factors * error / values.slope.abs().clamp(min=1e-9)


def _resemblance(layer: FittedLayer, errors: Tensor, head: int) -> Resemblance:
    """The family that a head's factors resemble, over the lengths at which its target is possible.

    It is "limited" if a factor is at its limit.
    """
    factors, possible = layer.last.factors[:, head], layer.aim.possible[:, head]
    knots = layer.first.values.knots
    if any(row[head] == "limited" for row in status_of(layer.first, layer.last, layer.aim)):
        end = FamilyFit("constant", float(factors[-1]), 0.0, 0.0, 0.0, 2.0)
        return Resemblance("limited", "limited", {"constant": end}, ())
    if bool((factors == 1.0).all()):
        constant = FamilyFit("constant", 1.0, 0.0, 0.0, 0.0, 2.0)
        return Resemblance("constant", "constant", {"constant": constant}, ("constant",))
    chosen = [k for k in range(len(knots)) if bool(possible[k])] or list(range(len(knots)))
    return resemble(
        [knots[k] for k in chosen],
        factors[chosen].tolist(),
        errors[chosen, head].tolist(),
    )


def _heads(
    index: int, layer: FittedLayer, errors: Tensor, like: Sequence[Resemblance]
) -> list[HeadCalibration]:
    """The record of each head of a layer.

    Args:
        index: number of the layer among the attention layers.
        layer: its results.
        errors: standard errors of its factors, (knots, heads).
        like: the family that each head's factors resemble.
    """
    first, last, aim = layer.first, layer.last, layer.aim
    status = status_of(first, last, aim)
    predicted = layer.predicted
    critical = torch.stack(
        [
            torch.full_like(first.factors[0], torch.nan)
            if part is None or part.numel() == 0
            else part.nanmedian(1).values
            for part in layer.scales
        ]
    )
    before_error, after_error = first.values.estimate.error, last.values.estimate.error
    if aim.bound:  # those are of the mean over rows
        before_error = after_error = torch.full_like(before_error, torch.nan)
    columns = {
        "target": aim.wanted,
        "before": first.measured(aim),
        "before_error": before_error,
        "predicted": predicted,
        "after": last.measured(aim),
        "after_error": after_error,
        "factors": last.factors,
        "factor_errors": errors,
        "critical": critical,
        "focus": last.factors / critical,
    }
    found = []
    for h, one in enumerate(like):
        line = one.fits.get("log_n")
        growth = (line.b, line.b_error) if line is not None else (0.0, 0.0)
        if one.name == "limited":
            growth = (math.nan, math.nan)
        numbers: dict[str, Any] = {n: tuple(c[:, h].tolist()) for n, c in columns.items()}
        found.append(
            HeadCalibration(
                layer=index,
                head=h,
                module=layer.name,
                lengths=first.values.knots,
                status=tuple(row[h] for row in status),
                family=one.name,
                candidates=one.candidates,
                family_errors={
                    name: fit.error for name, fit in one.fits.items() if one.name != "limited"
                },
                growth=growth,
                **numbers,
            )
        )
    return found
