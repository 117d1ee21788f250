"""Detect a model whose weights are still at their random initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["is_untrained"]

_SIDE = 512  # only the first rows and columns of a matrix are tested
_MATRICES = 4  # number of matrices tested
#: Largest standard deviation of rows' mean squares, in units of that of independent normal entries.
_MAX_SPREAD = 3.0


def is_untrained(model: torch.nn.Module) -> bool:
    """Whether every norm layer has its initial gain and the first matrices look random.

    Training changes the initial gains of 1 (0 in layers that add 1) within a few steps. Gains may
    also be 1 because they were folded into the next matrices, so the rows and the columns of the
    first matrices must have nearly equal mean squares too, as independent entries have. A model
    without norm layers is never called untrained.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 128)
        >>> is_untrained(layer)
        True
        >>> with torch.no_grad():
        ...     _ = layer.norm1.weight.mul_(1.01)
        >>> is_untrained(layer)
        False
    """
    gains = 0
    with torch.no_grad():
        for gain, start in _norms(model):
            if not bool((gain == start).all()):
                return False
            gains += 1
        return gains > 0 and all(_looks_random(matrix) for matrix in _matrices(model))


def _norms(model: torch.nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Gain and shift of each norm layer, with their initial values."""
    for module in model.modules():
        if "norm" not in type(module).__name__.lower():
            continue
        parameters = dict(module.named_parameters(recurse=False))
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is not None and weight.ndim == 1 and _readable(weight):
            yield weight, 0.0 if not bool(weight[0]) else 1.0
        if bias is not None and bias.ndim == 1 and _readable(bias):
            yield bias, 0.0


def _matrices(model: torch.nn.Module) -> Iterator[Tensor]:
    """Top-left corners of the first weight matrices, embeddings excluded."""
    count = 0
    for name, parameter in model.named_parameters():
        wide = parameter.ndim == 2 and min(parameter.shape) >= 16 and _readable(parameter)
        if wide and parameter.is_floating_point() and "embed" not in name:
            yield parameter.detach()[:_SIDE, :_SIDE].double()
            count += 1
            if count == _MATRICES:
                return


def _readable(parameter: Tensor) -> bool:
    """Whether a parameter is a plain, non-empty tensor: no shard and not on the meta device."""
    is_plain = type(parameter) in (Tensor, torch.nn.Parameter)
    return is_plain and not parameter.is_meta and parameter.numel() > 0


def _looks_random(matrix: Tensor) -> bool:
    """Whether mean squares of rows, and of columns, vary no more than for random entries."""
    squares = matrix.square()
    mean = float(squares.mean())
    if not 0 < mean < math.inf:
        return False
    return all(
        float(squares.mean(dim).std()) / mean < _MAX_SPREAD * math.sqrt(2 / matrix.shape[dim])
        for dim in (0, 1)
    )
