"""The common interface of all kernels: a validated call, its row sums and their gradients.

Rows are (B, Hq, L); a kernel's ``forward(call)`` gives :class:`Sums`, and its
``backward(grad, sums, call, wanted)`` gives :class:`Gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.masks import Masking
from acutance.weights import Softmax, Weighting

#: Scores (b, Hq, l, s) of queries (b, Hq, l, E) with keys (b, H, s, E) that begin at a position.
ScoreTile = Callable[[Tensor, Tensor, int], Tensor]


class KernelCall(NamedTuple):
    """A validated call of attention, from the user's arguments to what kernels read.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, H, S, E), in the query's dtype.
        value: (B, H, S, Ev), or None for the statistics alone.
        masking: which keys each row sees, and what is added to its scores.
        scale: factor of the scores.
        softcap: bounds the scaled scores as c · tanh(s / c).
        sinks: (Hq,) logits in the normaliser.
        dropout_p: probability of dropping a weight; statistics are of the weights before dropout.
        seed: tensor with one integer, the seed of the dropout.
        noise: also sum e² v and e² ‖v‖² (a third matrix product).
        gaps: also count keys by their distance below the row's maximum.
        backend: name of the kernel, or "auto".
        weighting: how scores become weights. Kernels other than whole rows compute softmax.
        score: function that computes the scores of a block of whole rows, before the scale; None
            is the dot product.
        row_scale: another factor of the scores of each row, (B, Hq, L, 1), of whole rows.
        dtype: of the output; None is the query's.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    masking: Masking
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    noise: bool = False
    gaps: bool = False
    backend: str = "auto"
    weighting: Weighting = Softmax()
    score: ScoreTile | None = None
    row_scale: Tensor | None = None
    dtype: torch.dtype | None = None


class Sums(NamedTuple):
    """The output and the sums of :class:`acutance.rowstats.RowState`.

    Fields are (B, Hq, L), in float32 or float64; ``out``, in the query's dtype, and the values'
    moments ``O`` and ``R1`` are (B, Hq, L, Ev); ``gaps`` is (B, Hq, L, 64) int32. Fields that were
    not requested have no element.
    """

    out: Tensor
    n: Tensor
    m: Tensor
    Z: Tensor
    U: Tensor
    W: Tensor
    Q: Tensor
    mean: Tensor
    M2: Tensor
    depth: Tensor
    first: Tensor
    first_index: Tensor
    O: Tensor
    R1: Tensor
    R2: Tensor
    gaps: Tensor


class SumGradients(NamedTuple):
    """Gradient of the loss by each differentiable sum, in its shape; None where it is 0."""

    out: Tensor | None
    m: Tensor | None
    Z: Tensor | None
    U: Tensor | None
    W: Tensor | None
    Q: Tensor | None
    mean: Tensor | None
    M2: Tensor | None
    depth: Tensor | None
    first: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the inputs, in their dtypes; None for those not requested."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    attn_mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


#: ``wanted`` of a backward pass: whether each field of :class:`Gradients` is to be computed.
ALL = (True,) * len(Gradients._fields)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row sums for inputs of a dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
