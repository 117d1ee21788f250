"""Mean and covariance of the key features of linear attention: of their law, or of the keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from acutance.comparison.inputs import Gaussian, Inputs
from acutance.mechanisms.entry import Linear, Sizes
from acutance.mechanisms.feature_maps import CosFormer, FeatureMap, feature_map

__all__ = ["feature_moments"]

#: Feature maps that take each component by itself.
_COMPONENTWISE = ("elu1", "relu", "relu2", "exp")
_DRAWS = 1 << 15
_GRID = 20_001


def feature_moments(form: Linear, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Features of the queries, and mean and covariance of those of the keys, head by head.

    For Gaussian keys the moments are those of the law: by an integral for maps of single
    components, by draws of other keys for the rest. Features that depend on the key's place, and
    keys of a model, have the moments of the keys themselves, with which sparsity is an identity.

    Returns:
        (heads, rows, F), (heads, F), (heads, F, F), float64; and whether they are of the keys.
    """
    heads, group = inputs.query.shape[1], inputs.query.shape[1] // inputs.key.shape[1]
    sizes = Sizes(heads, inputs.key.shape[1], inputs.n, inputs.key.shape[3])
    chosen = feature_map(form.feature_map(sizes))
    places = torch.arange(inputs.n)
    q = chosen(inputs.query.double(), places[inputs.offset :]).flatten(0, 1)
    if inputs.law is not None and not isinstance(chosen, CosFormer):
        mean, covariance = _of_law(chosen, inputs.law, inputs.key.shape[3])
        count = q.shape[0]
        return q, mean.expand(count, -1), covariance.expand(count, -1, -1), False
    key = inputs.key.double().repeat_interleave(group, 1).flatten(0, 1)
    mean, covariance = _of_keys(chosen(key, places))
    return q, mean, covariance, True


def _of_law(chosen: FeatureMap, law: Gaussian, width: int) -> tuple[Tensor, Tensor]:
    nowhere = torch.zeros(1, dtype=torch.int64)
    if chosen.name in _COMPONENTWISE:
        z = torch.linspace(-12, 12, _GRID, dtype=torch.float64)
        mass = torch.exp(-z.square() / 2) * ((z[1] - z[0]) / math.sqrt(2 * math.pi))
        x = chosen((law.key_mean + law.key_std * z)[:, None, None], nowhere)[:, 0, 0]
        mean = (mass * x).sum()
        variance = (mass * (x - mean).square()).sum()
        return mean.expand(width), variance * torch.eye(width, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(_DRAWS, width, generator=draw, dtype=torch.float64)
    return _of_keys(chosen(law.key_mean + law.key_std * z, nowhere))


def _of_keys(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance over the keys of (..., keys, F), divided by their number."""
    mean = features.mean(-2)
    away = features - mean.unsqueeze(-2)
    return mean, away.mT @ away / features.shape[-2]
