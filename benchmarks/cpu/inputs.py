"""The tensors of a case, and its masks in the forms that contenders take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu.cases import Case


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Attributes:
        case: what they were made for.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, E).
        key_mask: (B, S), True where a key is real, or None if all are.
        attn_mask: (L, S), boolean or additive, or None.
    """

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.case.groups_of > 1

    @property
    def scale(self) -> float:
        """Factor of the scores, 1/√E."""
        return float(self.case.width**-0.5)

    @property
    def options(self) -> dict[str, Any]:
        """The case as :func:`acutance.attention` takes it; what it does not ask for is left out."""
        given = {
            "attn_mask": self.attn_mask,
            "is_causal": self.case.causal or None,
            "enable_gqa": self.grouped or None,
            "window": self.case.window,
            "key_mask": self.key_mask,
        }
        return {name: value for name, value in given.items() if value is not None}

    @cached_property
    def sdpa_options(self) -> dict[str, Any]:
        """The case as SDPA takes it: a window, which it does not know, is a boolean mask."""
        given: dict[str, Any] = {"enable_gqa": True} if self.grouped else {}
        if self.case.window is not None:
            mask = self.visible(torch.arange(self.case.queries))
            return given | {"attn_mask": None if mask is None else mask.contiguous()}
        if self.case.causal:
            given["is_causal"] = True
        if self.key_mask is not None:
            given["attn_mask"] = self.key_mask[:, None, None, :]
        if self.attn_mask is not None:
            given["attn_mask"] = self.attn_mask
        return given

    def visible(self, rows: Tensor) -> Tensor | None:
        """Which keys some rows see: boolean (B or 1, 1, rows, S); None for all.

        An additive mask, which hides nothing here, is not in it.
        """
        case, found = self.case, None
        if case.causal:
            before = rows[:, None] - torch.arange(case.keys)
            found = before >= 0
            if case.window is not None:
                found &= before < case.window
            found = found[None, None]
        if self.key_mask is not None:
            real = self.key_mask[:, None, None, :]
            found = real if found is None else found & real
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            chosen = self.attn_mask.index_select(0, rows)[None, None]
            found = chosen if found is None else found & chosen
        return found

    def added(self, rows: Tensor) -> Tensor | None:
        """What is added to the scores of some rows, (1, 1, rows, S), or None."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        return self.attn_mask.index_select(0, rows)[None, None]

    @cached_property
    def additive(self) -> Tensor | None:
        """Every mask as one that is added, in the query's dtype; eager models make it once."""
        rows = torch.arange(self.case.queries)
        seen, added = self.visible(rows), self.added(rows)
        if seen is None:
            return added
        lowest = torch.finfo(self.query.dtype).min
        zeros = torch.zeros(seen.shape, dtype=self.query.dtype)
        return zeros.masked_fill_(seen.logical_not(), lowest)


def make_inputs(case: Case, *, seed: int = 0) -> Inputs:
    """Standard normal tensors for a case, the same for the same seed; leaves of its gradients."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, case.dtype)

    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, heads, length, case.width)
        made = torch.randn(shape, generator=generator, dtype=dtype)
        return made.requires_grad_(case.backward)

    query = normal(case.heads, case.queries)
    key, value = (normal(case.key_heads or case.heads, case.keys) for _ in range(2))
    key_mask = attn_mask = None
    if case.mask == "padding":
        key_mask = torch.arange(case.keys) < torch.tensor(case.lengths)[:, None]
    elif case.mask:
        attn_mask = torch.randn(case.queries, case.keys, generator=generator, dtype=dtype)
        if case.mask == "boolean":
            attn_mask = attn_mask > 0
            attn_mask[:, 0] = True  # SDPA and the formulas differ on rows that see nothing
    return Inputs(case, query, key, value, key_mask, attn_mask)
