"""Whether a model's weights are still those of its initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["is_untrained"]

_SIDE = 512  # rows and columns of a matrix that are looked at
_MATRICES = 4
_SPREAD = 3.0  # of the spread that chance gives the mean squares of rows and columns


def is_untrained(model: torch.nn.Module) -> bool:
    """Whether every norm has its initial gain and the first matrices look drawn at random.

    Training moves gains of 1 (or, where 1 is added, of 0) with its first steps. Folding gains into
    the matrices that follow sets them to 1 too, so matrices must also have rows and columns all
    about as long, as independent entries have. A model without norms is never called untrained.

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
        return gains > 0 and all(_drawn(matrix) for matrix in _matrices(model))


def _norms(model: torch.nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Each norm's gain and shift, with the value that it starts from."""
    for module in model.modules():
        if "norm" not in type(module).__name__.lower():
            continue
        own = dict(module.named_parameters(recurse=False))
        weight, bias = own.get("weight"), own.get("bias")
        if weight is not None and weight.ndim == 1 and _readable(weight):
            yield weight, 0.0 if not bool(weight[0]) else 1.0
        if bias is not None and bias.ndim == 1 and _readable(bias):
            yield bias, 0.0


def _matrices(model: torch.nn.Module) -> Iterator[Tensor]:
    """Corners of up to a few weight matrices, without embeddings."""
    count = 0
    for name, parameter in model.named_parameters():
        wide = parameter.ndim == 2 and min(parameter.shape) >= 16 and _readable(parameter)
        if wide and parameter.is_floating_point() and "embed" not in name:
            yield parameter.detach()[:_SIDE, :_SIDE].double()
            count += 1
            if count == _MATRICES:
                return


def _readable(parameter: Tensor) -> bool:
    """Whether the entries are all here: no shard, no placeholder, no empty parameter."""
    plain = type(parameter) in (Tensor, torch.nn.Parameter)
    return plain and not parameter.is_meta and parameter.numel() > 0


def _drawn(matrix: Tensor) -> bool:
    """Whether mean squares of rows and of columns vary no more than for random weights."""
    squares = matrix.square()
    mean = float(squares.mean())
    if not 0 < mean < math.inf:
        return False
    return all(
        float(squares.mean(dim).std()) / mean < _SPREAD * math.sqrt(2 / matrix.shape[dim])
        for dim in (0, 1)
    )
