"""The weight that each key receives, summed over rows, in memory of O(n).

The output is linear in the values, o_i = Σ_j p_ij v_j, so a gradient of 1 for every row gives
value j the gradient Σ_i p_ij. That is what a kernel's backward pass computes from the rows'
normalisers, a tile at a time. Query heads that share a key head have a component of the value each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from acutance.kernels import dispatch
from acutance.kernels.call import KernelCall, SumGradients, accumulate_dtype


def key_mass(call: KernelCall) -> Tensor:
    """Sums of softmax weights over rows, (B, Hq, S), in the dtype of the row sums.

    Args:
        call: a validated call without values.

    Raises:
        ValueError: if the backend named cannot take the call.
    """
    call = _widened(call)
    call = call._replace(backend=dispatch.choose(call))
    assert call.value is not None
    if not call.masking.queries or not call.value.numel():
        return _by_query_head(call.value)
    sums, _ = dispatch.attend_rows(call._replace(value=None))
    grad = _one_for_each_row(call)
    out = call.query.new_zeros(grad.shape)
    only_out = SumGradients(grad, *[None] * (len(SumGradients._fields) - 1))
    return _by_query_head(dispatch.value_gradients(only_out, sums._replace(out=out), call))


def from_output(call: KernelCall, output: Callable[[KernelCall], Tensor]) -> Tensor:
    """Sums over rows of weights of any kind, (B, Hq, S), in the dtype of the row sums.

    Args:
        call: a validated call without values.
        output: the output (B, Hq, L, Ev) of a call with values, linear in them and differentiable.
    """
    exact = torch.autocast(call.query.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), exact:
        call = _widened(call)
        assert call.value is not None
        value = call.value.requires_grad_()
        (mass,) = torch.autograd.grad(output(call), value, _one_for_each_row(call))
    return _by_query_head(mass)


def _widened(call: KernelCall) -> KernelCall:
    """The call in the dtype of the row sums, with values of 0 of width ``group``."""
    masking, dtype = call.masking, accumulate_dtype(call.query.dtype)
    query, key = call.query.detach().to(dtype), call.key.detach().to(dtype)
    size = (masking.batch, masking.heads, masking.keys, masking.group)
    value = torch.zeros(size, dtype=dtype, device=query.device)
    return call._replace(query=query, key=key, value=value, noise=False, gaps=False)


def _one_for_each_row(call: KernelCall) -> Tensor:
    """Gradient of the output, (B, Hq, L, group): 1 at the query head's index in its group, else 0.

    With it, the gradient of the values is the weight that each key receives.
    """
    masking = call.masking
    each = torch.eye(masking.group, dtype=call.query.dtype, device=call.query.device)
    each = each.repeat(masking.heads, 1)[None, :, None]
    return each.expand(masking.batch, -1, masking.queries, -1)


def _by_query_head(mass: Tensor) -> Tensor:
    """Reshape (B, H, S, group) to (B, Hq, S), with Hq = H · group."""
    return mass.transpose(2, 3).flatten(1, 2)
