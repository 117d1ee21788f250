"""The factor of each row under the scalings of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.calibration.law import HeadLaws
from acutance.scaling import AnyScaling

__all__ = ["query_factor"]


def query_factor(
    laws: HeadLaws, n: Tensor, heads: int, dtype: torch.dtype, entropy: Tensor | None = None
) -> Tensor:
    """Factor that multiplies the query of each row, (B or 1, Hq or 1, L).

    Args:
        laws: calibrated laws of the layer's heads.
        n: number of visible keys, (B or 1, Hq or 1, L).
        heads: number of query heads of the call.
        dtype: of the query and the result; the factor is computed in float32, or in float64 for
            float64.
        entropy: of the unscaled rows, (B, Hq, L), if a law needs it.

    Raises:
        ValueError: if a law has parameters or entries for heads that the call does not have.

    Example:
        >>> from acutance import scaling
        >>> laws = HeadLaws(heads=((1, scaling.SSMax(s=1.0)),))
        >>> query_factor(laws, torch.tensor([[[8]]]), 2, torch.float32)[0]
        tensor([[1.0000],
                [2.0794]])
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def of(scaling: AnyScaling) -> Tensor:
        factor = scaling.factor(n, entropy=entropy, dtype=wide)
        if factor.dim() < 3 or factor.shape[-2] not in (1, heads):
            raise ValueError(
                f"the scaling has parameters for {factor.shape[-2]} heads, the call has {heads}"
            )
        return factor

    if laws.whole is not None:
        return of(laws.whole).to(dtype)
    wrong = [head for head, _ in laws.heads if head >= heads]
    if wrong:
        raise ValueError(f"the law has head {wrong[0]}, the call has {heads} heads")
    own = dict(laws.heads)
    made = {scaling: of(scaling) for scaling in set(own.values())}
    columns = []
    for head in range(heads):
        if head not in own:
            columns.append(torch.ones_like(n[:, 0], dtype=wide))
            continue
        factor = made[own[head]]
        columns.append(factor[:, head if factor.shape[1] > 1 else 0])
    batch = max(column.shape[0] for column in columns)
    return torch.stack([c.expand(batch, -1) for c in columns], 1).to(dtype)
