"""Non-finite values at hidden keys, such as NaN in padding, which must not affect any row.

A weight of 0 does not hide a value or a key that is NaN: 0 · NaN is NaN. Kernels multiply without a
check, which costs nothing if everything is finite. If their output is not finite, the functions
here compute it again with hidden values replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from acutance.compiling import transformed
from acutance.kernels.call import KernelCall, Sums, accumulate_dtype
from acutance.masks import Masking


def hides_keys(masking: Masking) -> bool:
    """Whether any mask may hide a key from a row."""
    masks = (masking.attn_mask, masking.bias, masking.key_mask, masking.key_documents)
    return masking.causal or masking.window is not None or any(m is not None for m in masks)


def all_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; on a GPU always True, since a check would wait for it."""
    if tensor.device.type != "cpu":
        return True
    return bool(tensor.sum(dtype=accumulate_dtype(tensor.dtype)).isfinite())


def zeroed(tensor: Tensor) -> Tensor:
    """The tensor with 0 in place of values that are not finite, for products with gradients.

    The gradient of a score is already NaN where a row sees such a key, and 0 where it does not; 0
    times a value that is not finite would be NaN.
    """
    if tensor.device.type == "cpu" and not transformed() and all_finite(tensor):
        return tensor
    return torch.nan_to_num(tensor, 0.0, 0.0, 0.0)


def constant_where_not_finite(rows: Tensor) -> Tensor:
    """The rows (..., E), with rows that contain NaN or infinity detached from the graph.

    So the derivative of, say, their norm is not computed: it would be NaN, also times 0.
    """
    wants = torch.is_grad_enabled() and rows.requires_grad
    if torch.compiler.is_compiling() or not wants:
        return rows
    if not transformed() and all_finite(rows.detach()):  # torch.func does not let a tensor be read
        return rows
    return torch.where(rows.isfinite().all(-1, keepdim=True), rows, rows.detach())


def value_gradient(weights: Tensor, grad: Tensor, finite: bool) -> Tensor:
    """Gradients of values (..., S, Ev) from weights (..., L, S) and rows of gradients (..., L, Ev).

    Args:
        weights: 0 where a row does not see a key.
        grad: gradients of the output, divided by the rows' normalisers.
        finite: whether all of ``grad`` is finite. If not, NaN goes only to keys that the row sees.
    """
    if finite:
        return weights.mT @ grad
    wrong = torch.logical_not(grad.isfinite()).to(grad.dtype)
    reached = (weights > 0).to(grad.dtype).mT @ wrong
    found = weights.mT @ torch.nan_to_num(grad, 0.0, 0.0, 0.0)
    return found.masked_fill(reached > 0, torch.nan)


def only_visible_values(
    forward: Callable[[KernelCall], Sums], sums: Sums, call: KernelCall
) -> Sums:
    """Repeat a forward pass with a non-finite output so that hidden values do not affect it.

    Args:
        forward: the forward pass, called again with other values.
        sums: its results.
        call: its call, with values.

    Returns:
        The sums. In rows that give no weight to a non-finite value, the output (and the moments)
        are those of the finite values alone.
    """
    value, noise = call.value, call.noise
    assert value is not None
    finite = value.isfinite()
    if bool(finite.all()):
        return sums
    clean = forward(call._replace(value=torch.where(finite, value, 0.0)))
    wrong = torch.logical_not(finite).to(value.dtype)
    wrong = forward(call._replace(value=wrong, noise=False)).out
    reached = (wrong != 0).any(-1, keepdim=True)
    return sums._replace(
        out=torch.where(reached, sums.out, clean.out),
        O=clean.O if not noise else torch.where(reached, sums.O, clean.O),
        R1=clean.R1 if not noise else torch.where(reached, sums.R1, clean.R1),
        R2=clean.R2 if not noise else torch.where(reached.squeeze(-1), sums.R2, clean.R2),
    )
