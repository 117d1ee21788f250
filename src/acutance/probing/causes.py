"""Explain findings of a probe: why a rebuilt output differs, and whether weights are untrained.

A cause is a change of the captured arguments, or a fault of the computation, under which the
outputs agree, such as removing the sinks. Agreement is evidence, not proof: two causes may give the
same output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.probing.changed_arguments import changes_of
from acutance.probing.faults import faults_of

#: A rounding is the cause if it brings this share of the rows within the tolerance: where two
#: computations round a score differently, its row stays apart.
_MOST_ROWS = 0.9


class Cause(NamedTuple):
    """Why an output differs from the one recomputed.

    Attributes:
        kind: a short name, such as ``"sinks dropped"``.
        agrees: the condition under which the outputs agree, such as "the sinks are left out".
        means: what that suggests, such as "it seems to drop them".
    """

    kind: str
    agrees: str
    means: str


def likely_cause(
    call: AttentionCall, theirs: Tensor, counted: Tensor, module: torch.nn.Module | None = None
) -> str:
    """Why a call's output differs, as the end of a sentence; empty if no tested change agrees.

    The arguments are those of :func:`find_cause`.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> call = AttentionCall("layer", "", x, x, x, scale=0.1)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> likely_cause(call, theirs, torch.ones(1, 2, 5, dtype=torch.bool))
        'the output agrees if the scale is 0.5, 1/√d: it seems not to use the given 0.1'
    """
    cause = find_cause(call, theirs, counted, module)
    return "" if cause is None else f"the output agrees if {cause.agrees}: {cause.means}"


def find_cause(
    call: AttentionCall, theirs: Tensor, counted: Tensor, module: torch.nn.Module | None = None
) -> Cause | None:
    """Find a change of a call under which its output agrees with the model's.

    Args:
        call: the captured call whose rebuilt output differs.
        theirs: the model's output, (B, Hq, L, Ev).
        counted: boolean (B, Hq, L), True on the rows to compare.
        module: the attention module; values in its attributes and configuration are tried too.

    Returns:
        The first change that agrees; None if none does.
    """
    for change in changes_of(call, module):
        changed = replace(call, **change.arguments)
        try:
            rebuilt, stats = changed.rebuild(False)
            errors, tolerance = differences(changed, rebuilt, stats.state.m, theirs, counted)
        except (ValueError, RuntimeError):  # a change that does not fit this call
            continue
        if bool((errors <= tolerance).all()):
            return Cause(change.kind, change.agrees, change.means)
    for fault in faults_of(call):
        output, largest = fault.output()
        errors = row_errors(output, theirs, counted)
        close = (errors <= call.tolerance(theirs.dtype, largest))[counted]
        if bool(close.all()) or (fault.rounds and float(close.double().mean()) >= _MOST_ROWS):
            return Cause(fault.kind, fault.agrees, fault.means)
    return None


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
    """The first 512 rows and columns of the first four weight matrices, without embeddings."""
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


def relative_error(rebuilt: Tensor, output: Tensor, counted: Tensor) -> float:
    """Largest of :func:`row_errors`; 0 if there are no rows."""
    errors = row_errors(rebuilt, output, counted)
    return float(errors.max()) if errors.numel() else 0.0


def row_errors(rebuilt: Tensor, output: Tensor, counted: Tensor) -> Tensor:
    """Largest difference of two outputs in each row, relative to the largest entry of ``output``.

    Args:
        rebuilt: (B, Hq, L, Ev).
        output: the model's output, same shape.
        counted: boolean (B, Hq, L), True on the rows to compare.

    Returns:
        (B, Hq, L): 0 in rows that are not compared, infinity where a difference is NaN.
    """
    rows = counted.unsqueeze(-1)
    theirs = torch.where(rows, output.detach().double(), 0.0)
    ours = torch.where(rows, rebuilt.detach().double(), 0.0)
    if theirs.numel() == 0:
        return theirs.new_zeros(counted.shape)
    size = theirs.abs().max()
    difference = (ours - theirs).abs().amax(-1)
    ratio = difference / size if size > 0 else difference
    return ratio.masked_fill(difference.isnan(), math.inf)


def differences(
    call: AttentionCall, rebuilt: Tensor, largest: Tensor, theirs: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors of a call's rebuilt output rows, and the largest errors that rounding can explain.

    Args:
        call: the captured call.
        rebuilt: its rebuilt output, (B, Hq, L, Ev).
        largest: largest score of each row, (B, Hq, L).
        theirs: the model's output, same shape as ``rebuilt``.
        counted: boolean (B, Hq, L), True on the rows to compare.

    Returns:
        Two tensors (B, Hq, L), relative to the largest entry of the output.
    """
    errors = row_errors(rebuilt, theirs, counted)
    tolerance = call.tolerance(theirs.dtype, largest)
    if bool((errors > tolerance).any()) and (eager := call.as_eager()) is not None:
        errors = errors.minimum(row_errors(eager, theirs, counted))
    return errors, tolerance
