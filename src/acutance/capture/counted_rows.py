"""Which rows of a call count: those of real tokens, among the selected ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.module_stack import Running
from acutance.capture.padding import (
    NO_MASK,
    PaddingMask,
    RealRows,
    by_counts,
    by_key_masks,
    call_sees_padding,
    checked_mask,
    checked_rows,
    scores_see_padding,
)
from acutance.capture.readers.huggingface import is_cross

__all__ = ["CountedRows", "RowReader"]

_Sees = Callable[[Tensor, Tensor], bool]


class CountedRows(NamedTuple):
    """Which rows of a call count.

    Attributes:
        counted: boolean (B, L); None where all do.
        padded: rows that do not, because they are padding.
        excluded: rows that do not, because others were requested.
        source: what told of padding.
        unseen: boolean (B, L), tokens that no row sees, where nothing told of padding.
    """

    counted: Tensor | None = None
    padded: int = 0
    excluded: int = 0
    source: str = ""
    unseen: Tensor | None = None


class RowReader:
    """Decides which rows of a probe's calls count.

    Args:
        thread: what is running.
        attention_mask: a user's mask over tokens, (B, T).
        rows: ``"real"``, ``"all"``, or which rows, boolean (L,) or (B, L).
    """

    def __init__(
        self, thread: Running, attention_mask: Tensor | None = None, rows: Tensor | str = "real"
    ) -> None:
        self._thread = thread
        self.mask: PaddingMask | None = checked_mask(attention_mask)
        self._chosen = checked_rows(rows)
        self._all = isinstance(rows, str) and rows == "all"

    def of(self, call: AttentionCall) -> CountedRows:
        """The rows of a call that count.

        Raises:
            ValueError: if rows were requested that do not fit.
        """
        real = self.real(call)
        batch, _, queries, _ = call.query.shape
        seen = None
        if not (real.source or call.cross) and queries == call.key.shape[2]:
            seen = call.seen_keys()
        return self._counted(real, seen, batch, queries, call.query.device)

    def of_scores(self, scores: Tensor, module: str, n: Tensor, seen: Tensor) -> CountedRows:
        """Which query rows of a score matrix enter the statistics: real, and requested by the user.

        Args:
            scores: (B, H, L, S).
            module: name of the module that computed them.
            n: (B, H, L), number of keys that each row sees.
            seen: boolean (B, S), True for keys that at least one row sees.

        Raises:
            ValueError: if rows were requested that do not fit.
        """
        real = self.real_of_scores(scores, module, n, seen)
        batch, _, queries, keys = scores.shape
        known = real.source or is_cross(module) or queries != keys
        return self._counted(real, None if known else seen, batch, queries, scores.device)

    def real(self, call: AttentionCall) -> RealRows:
        """Which rows of a call are no padding.

        What tells, the first to be believed first: the user; the call's own padding mask; the mask
        over tokens that the innermost module was called with, unless real rows see what it says is
        padding; masks over keys. The masks of cross-attention are about its keys: its queries are
        those of the self-attention that ran before it in the same numbered block.
        """
        batch, _, queries, _ = call.query.shape
        keys, device = call.key.shape[2], call.query.device
        real = self._given(batch, queries, keys, device)
        if real is None and call.real is not None:
            real = RealRows(call.real, "key_padding_mask")
        if real is None:

            def sees(rows: Tensor, among: Tensor) -> bool:
                return call_sees_padding(call, rows, among)

            real = self._around(batch, queries, keys, device, None if call.cross else sees)
            if real is None or real.source == NO_MASK:
                real = by_key_masks(call) or real
        return self._record_rows(call.module, call.cross, real, batch, queries)

    def real_of_scores(self, scores: Tensor, module: str, n: Tensor, seen: Tensor) -> RealRows:
        """Which query rows of a score matrix are not padding, and how that is known.

        Args:
            scores: (B, H, L, S).
            module: name of the module that computed them.
            n: (B, H, L), number of keys that each row sees.
            seen: boolean (B, S), True for keys that at least one row sees.
        """
        batch, _, queries, keys = scores.shape
        cross = is_cross(module)
        real = self._given(batch, queries, keys, scores.device)
        if real is None:

            def sees(rows: Tensor, among: Tensor) -> bool:
                return scores_see_padding(scores, rows, among)

            real = self._around(batch, queries, keys, scores.device, None if cross else sees)
            if (real is None or real.source == NO_MASK) and queries == keys and not cross:
                real = by_counts(n, seen) or real
        return self._record_rows(module, cross, real, batch, queries)

    def _counted(
        self, real: RealRows, seen: Tensor | None, batch: int, queries: int, device: torch.device
    ) -> CountedRows:
        if self._all:
            return CountedRows()
        unseen = None if seen is None else torch.logical_not(seen)
        rows, asked = real.rows, self._chosen
        padded = 0 if rows is None else int(rows.numel() - rows.sum())
        if asked is None:
            return CountedRows(rows, padded, 0, real.source, unseen)
        if asked.shape[1] != queries or asked.shape[0] not in (1, batch):
            raise ValueError(
                f"rows has shape {tuple(asked.shape)}, but its queries are (B, L) = "
                f"{(batch, queries)}"
            )
        asked = asked.to(device).expand(batch, -1)
        rows = asked if rows is None else rows & asked
        excluded = batch * queries - padded - int(rows.sum())
        return CountedRows(rows, padded, excluded, real.source, unseen)

    def _given(self, batch: int, queries: int, keys: int, device: torch.device) -> RealRows | None:
        """The real rows given by the user; None if none were given that fit."""
        mask, around = self.mask, self._thread.masks.innermost
        if mask is None:
            return None
        if around is not None:
            mask = replace(mask, past=around.past)
        rows = mask.rows(batch, queries, keys)
        return None if rows is None else RealRows(rows.to(device), mask.source)

    def _around(
        self, batch: int, queries: int, keys: int, device: torch.device, sees: _Sees | None
    ) -> RealRows | None:
        """The real rows by the mask of the innermost module; None if it has none that fits.

        Args:
            batch: B.
            queries: L.
            keys: S.
            device: of the call.
            sees: whether real rows see padding, given rows and keys; None of cross-attention.
        """
        mask = self._thread.masks.innermost
        if mask is None or mask.real is None:
            return None if mask is None else RealRows(None, mask.source)
        rows = mask.rows(batch, queries, keys)
        if rows is None:
            return None
        rows = rows.to(device)
        among = None if sees is None else mask.keys(rows, keys)
        if among is not None and sees is not None and sees(rows, among.to(device)):
            return None
        return RealRows(rows, mask.source)

    def _record_rows(
        self, module: str, cross: bool, real: RealRows | None, batch: int, queries: int
    ) -> RealRows:
        """Return the real rows, and remember those of self-attention.

        Cross-attention with unknown rows takes those of the attention that ran before it in its
        block.
        """
        if not cross:
            real = RealRows(None, "") if real is None else real
            self._thread.rows = (module, real)
        elif real is None and self._thread.rows is not None:
            before, rows = self._thread.rows
            fits = rows.rows is not None and tuple(rows.rows.shape) == (batch, queries)
            real = rows if fits and _same_block(before, module) else None
        return RealRows(None, "") if real is None else real


def _same_block(left: str, right: str) -> bool:
    """Whether two modules belong to the same numbered block, such as ``decoder.layers.3``."""
    for mine, theirs in zip(left.split("."), right.split("."), strict=False):
        if mine != theirs:
            return False
        if mine.isdigit():
            return True
    return False
