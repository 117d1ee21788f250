"""Which rows of a call enter the statistics: real tokens, among the rows a user selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.intercept import Running
from acutance.capture.padding import (
    NO_MASK,
    PaddingMask,
    RealRows,
    call_sees_padding,
    checked_mask,
    checked_rows,
    real_rows_from_counts,
    real_rows_from_key_masks,
    scores_see_padding,
)
from acutance.capture.readers.interface_call import is_cross

_Sees = Callable[[Tensor, Tensor], bool]


class CountedRows(NamedTuple):
    """Which rows of a call enter the statistics, and how many do not.

    Attributes:
        counted: boolean (B, L); None if all rows count.
        padded: number of rows left out as padding.
        excluded: number of rows left out because the user selected others.
        source: where the padding is known from.
        unseen: boolean (B, L), tokens that no row sees, if no source says what is padding.
    """

    counted: Tensor | None = None
    padded: int = 0
    excluded: int = 0
    source: str = ""
    unseen: Tensor | None = None


class RowReader:
    """Decides which rows of captured calls enter the statistics.

    Args:
        thread: the modules that are running.
        attention_mask: a user's mask over tokens, (B, T).
        rows: ``"real"``, ``"all"``, or boolean (L,) or (B, L).
    """

    def __init__(
        self, thread: Running, attention_mask: Tensor | None = None, rows: Tensor | str = "real"
    ) -> None:
        self._thread = thread
        self.mask: PaddingMask | None = checked_mask(attention_mask)
        self._chosen = checked_rows(rows)
        self._all = isinstance(rows, str) and rows == "all"

    def rows_of_call(self, call: AttentionCall) -> CountedRows:
        """Which rows of a call count.

        Raises:
            ValueError: if the user's selection of rows has another shape.
        """
        real = self.real(call)
        batch, _, queries, _ = call.query.shape
        seen = None
        if not (real.source or call.cross) and queries == call.key.shape[2]:
            seen = call.seen_keys()
        if self._all and call.packed and real.rows is not None:  # no rows of the model's tensors
            return CountedRows(real.rows, int((~real.rows).sum()), 0, real.source)
        return self._counted(real, seen, batch, queries, call.query.device)

    def rows_of_scores(self, scores: Tensor, module: str, n: Tensor, seen: Tensor) -> CountedRows:
        """Which rows of a score matrix count.

        Args:
            scores: (B, H, L, S).
            module: name of the module that computed them.
            n: (B, H, L), number of keys that each row sees.
            seen: boolean (B, S), True for keys that at least one row sees.

        Raises:
            ValueError: if the user's selection of rows has another shape.
        """
        real = self.real_of_scores(scores, module, n, seen)
        batch, _, queries, keys = scores.shape
        padding_known = real.source or is_cross(module) or queries != keys
        return self._counted(real, None if padding_known else seen, batch, queries, scores.device)

    def real(self, call: AttentionCall) -> RealRows:
        """Which rows of a call are not padding.

        The first source that applies decides: the user's mask; the call's own padding mask; the
        token mask that the innermost running module was called with, unless real rows see tokens it
        calls padding; masks over keys. Masks of cross-attention concern its keys; its queries are
        those of the self-attention that ran before it in the same numbered block.
        """
        batch, _, queries, _ = call.query.shape
        keys, device = call.key.shape[2], call.query.device
        if call.packed:
            return self._record_rows(
                call.module, call.cross, self._rows_of_packed(call), batch, queries
            )
        real = self._rows_from_user(batch, queries, keys, device)
        if real is None and call.real is not None:
            real = RealRows(call.real, "key_padding_mask")
        if real is None:

            def sees(rows: Tensor, real_keys: Tensor) -> bool:
                return call_sees_padding(call, rows, real_keys)

            real = self._rows_from_module(
                batch, queries, keys, device, None if call.cross else sees
            )
            if real is None or real.source == NO_MASK:
                real = real_rows_from_key_masks(call) or real
        return self._record_rows(call.module, call.cross, real, batch, queries)

    def real_of_scores(self, scores: Tensor, module: str, n: Tensor, seen: Tensor) -> RealRows:
        """Which rows of a score matrix are not padding; arguments as for :meth:`rows_of_scores`."""
        batch, _, queries, keys = scores.shape
        cross = is_cross(module)
        real = self._rows_from_user(batch, queries, keys, scores.device)
        if real is None:

            def sees(rows: Tensor, real_keys: Tensor) -> bool:
                return scores_see_padding(scores, rows, real_keys)

            real = self._rows_from_module(
                batch, queries, keys, scores.device, None if cross else sees
            )
            if (real is None or real.source == NO_MASK) and queries == keys and not cross:
                real = real_rows_from_counts(n, seen) or real
        return self._record_rows(module, cross, real, batch, queries)

    def _counted(
        self, real: RealRows, seen: Tensor | None, batch: int, queries: int, device: torch.device
    ) -> CountedRows:
        """Combine real rows with the user's selection.

        Args:
            real: which rows are not padding.
            seen: boolean (B, S), keys that any row sees; None if padding is known otherwise.
            batch: number of sequences, B.
            queries: queries per sequence, L.
            device: device of the call.

        Raises:
            ValueError: if the selection has another shape than (B, L).
        """
        if self._all:
            return CountedRows()
        unseen = None if seen is None else torch.logical_not(seen)
        rows, requested = real.rows, self._chosen
        padded = 0 if rows is None else int(rows.numel() - rows.sum())
        if requested is None:
            return CountedRows(rows, padded, 0, real.source, unseen)
        if requested.shape[1] != queries or requested.shape[0] not in (1, batch):
            raise ValueError(
                f"rows has shape {tuple(requested.shape)}, but its queries are (B, L) = "
                f"{(batch, queries)}"
            )
        requested = requested.to(device).expand(batch, -1)
        rows = requested if rows is None else rows & requested
        excluded = batch * queries - padded - int(rows.sum())
        return CountedRows(rows, padded, excluded, real.source, unseen)

    def _rows_of_packed(self, call: AttentionCall) -> RealRows:
        """Real rows of packed sequences: by the user's mask only if it is over the same tokens."""
        if call.real is not None:
            return RealRows(call.real, "cu_seqlens")
        mask = None if self.mask is None else self.mask.real
        if mask is not None and mask.shape == (1, call.query.shape[2]):
            return RealRows(mask.to(call.query.device), "attention_mask")
        return RealRows(None, "cu_seqlens")

    def _rows_from_user(
        self, batch: int, queries: int, keys: int, device: torch.device
    ) -> RealRows | None:
        """Real rows by the user's mask; None if there is none of this size."""
        mask, module_mask = self.mask, self._thread.masks.innermost
        if mask is None:
            return None
        if module_mask is not None:
            mask = replace(mask, past=module_mask.past)
        rows = mask.rows(batch, queries, keys)
        return None if rows is None else RealRows(rows.to(device), mask.source)

    def _rows_from_module(
        self, batch: int, queries: int, keys: int, device: torch.device, sees: _Sees | None
    ) -> RealRows | None:
        """Real rows by the token mask of the innermost running module; None if none fits.

        Args:
            batch: number of sequences, B.
            queries: queries per sequence, L.
            keys: keys per sequence, S.
            device: device of the call.
            sees: returns whether real rows see padding, given rows and keys; None for
                cross-attention.
        """
        mask = self._thread.masks.innermost
        if mask is None or mask.real is None:
            return None if mask is None else RealRows(None, mask.source)
        rows = mask.rows(batch, queries, keys)
        if rows is None:
            return None
        rows = rows.to(device)
        real_keys = None if sees is None else mask.keys(rows, keys)
        if real_keys is not None and sees is not None and sees(rows, real_keys.to(device)):
            return None
        return RealRows(rows, mask.source)

    def _record_rows(
        self, module: str, cross: bool, real: RealRows | None, batch: int, queries: int
    ) -> RealRows:
        """Which rows of a call are real, not padding; of self-attention they are also remembered.

        Cross-attention whose real rows are unknown has those of the self-attention before it in the
        same block.

        Args:
            module: name of the module that made the call.
            cross: whether it is cross-attention.
            real: the real rows as known so far; None if unknown.
            batch: number of sequences.
            queries: number of queries.

        Returns:
            The real rows; ``RealRows(None, "")``, which counts every row, if they are unknown.
        """
        if not cross:
            real = RealRows(None, "") if real is None else real
            self._thread.rows = (module, real)
        elif real is None and self._thread.rows is not None:
            previous_module, rows = self._thread.rows
            fits = rows.rows is not None and tuple(rows.rows.shape) == (batch, queries)
            real = rows if fits and _same_block(previous_module, module) else None
        return RealRows(None, "") if real is None else real


def _same_block(left: str, right: str) -> bool:
    """Whether two modules belong to the same numbered block, such as ``decoder.layers.3``."""
    for mine, theirs in zip(left.split("."), right.split("."), strict=False):
        if mine != theirs:
            return False
        if mine.isdigit():
            return True
    return False
