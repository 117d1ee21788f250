"""What a key head's query heads compute if its keys and values are rounded, or not kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acutance.caching.head_plan import value_groups
from acutance.capture.attention_call import AttentionCall

__all__ = ["Dropped", "Rounded", "rounded"]


def rounded(x: Tensor, bits: int, *, along: str, group: int = 32) -> Tensor:
    r"""Round keys or values to :math:`2^b` levels between the least and the largest of each group.

    Args:
        x: (..., S, D).
        bits: b; 16 changes nothing.
        along: ``"tokens"``, where ``group`` tokens share a scale for each channel, or
            ``"channels"``, where ``group`` channels of a token do. A last group may be smaller.
        group: numbers that share a scale.

    Returns:
        The rounded numbers, shaped as ``x``; an error is at most half a step.

    Example:
        >>> rounded(torch.tensor([[0.0, 1.0, 2.4, 3.0]]), 2, along="channels")
        tensor([[0., 1., 2., 3.]])
    """
    if bits == 16:
        return x
    dim = -2 if along == "tokens" else -1
    parts = [_levels(part, 2**bits - 1, dim) for part in x.split(group, dim)]
    return torch.cat(parts, dim)


def _levels(x: Tensor, steps: int, dim: int) -> Tensor:
    """The nearest of steps + 1 evenly spaced levels between the extremes along a dimension."""
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (most - least) / steps
    safe = torch.where(step > 0, step, 1.0)
    return least + ((x - least) / safe).round() * step


@dataclass(frozen=True)
class Rounded:
    """All keys and values rounded, keys by channel and values by token.

    The newest tokens are rounded too, which a cache leaves as they are, so the cost is a little
    too high.

    Attributes:
        key_bits: of keys.
        value_bits: of values.
        group: tokens that share the scale of a key channel, channels that share that of a value; if
            it does not divide the width of values, all of them do.
    """

    key_bits: int = 16
    value_bits: int = 16
    group: int = 32

    @property
    def words(self) -> str:
        """The precisions and the group."""
        return f"keys in {self.key_bits} bits, values in {self.value_bits}, groups of {self.group}"

    def output(self, call: AttentionCall) -> Tensor:
        """The output of a call with rounded keys and values, (B, Hq, L, Ev)."""
        key = rounded(call.key, self.key_bits, along="tokens", group=self.group)
        width = call.value.shape[3]
        channels = width // value_groups(width, self.group)
        value = rounded(call.value, self.value_bits, along="channels", group=channels)
        output: Tensor = replace(call, key=key, value=value).rebuild(False)[0]
        return output


@dataclass(frozen=True)
class Dropped:
    """No keys and values: the output is zero."""

    words = "dropped"

    def output(self, call: AttentionCall) -> Tensor:
        """Zeros, (B, Hq, L, Ev)."""
        return call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])
