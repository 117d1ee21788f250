"""Structure of a captured call: where its rows' weight lies, and the sharpest of them in full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.kernels.call import KernelCall, Rule
from acutance.masks import Region
from acutance.probing.tokens import InputPlaces, Tokens, special_ids
from acutance.rowstats import RowStatistics
from acutance.rowstats.state import has_gaps
from acutance.structure import StructureStatistics
from acutance.structure.blocks import Places, blocks, exact
from acutance.structure.statistics import observe_structure, tokens_at
from acutance.summary.examples import Examples, Row
from acutance.summary.head_summary import Layer
from acutance.summary.optional_parts import OptionalParts

__all__ = ["CRITICAL_ROWS", "Structured", "StructureReader", "kernel_call", "token_text"]

#: Rows of each sequence of a call whose scores are sorted for ``critical_ratio``, where the gap
#: histogram does not give it for all.
CRITICAL_ROWS = 16
_BLANK = "\u2581"  # how sentence pieces write a blank


class Structured(NamedTuple):
    """Structure statistics of one call's rows.

    Attributes:
        statistics: of rows (B, H, L).
        positions: (B, L) where queries stand among the keys; None where they are of another
            sequence.
    """

    statistics: StructureStatistics
    positions: Tensor | None


class StructureReader:
    """Reads the structure of one probe's calls.

    Args:
        model: what is probed; its configuration names special tokens where nothing else does.
        tokenizer: names special tokens and has words for all; anything with ``all_special_ids``
            and ``decode``.
        special: ids of special tokens.
        examples: sharpest rows to keep of each head.

    Raises:
        TypeError: if special ids are none.
    """

    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, special: Iterable[int] | None, examples: int
    ) -> None:
        if special is None:
            named = getattr(tokenizer, "all_special_ids", None)
            special = special_ids(model) if named is None else named
        self._special = tuple(special)
        if not all(isinstance(each, int) for each in self._special):
            raise TypeError(f"special must contain token ids, got {self._special!r}")
        self._word: Callable[[int], str] | None = None
        if tokenizer is not None:
            self._word = lambda token: token_text(tokenizer, token)
        self._most = examples
        self._examples: dict[str, Examples] = {}
        self._lock = threading.Lock()
        self.tokens = Tokens()

    def read(
        self,
        call: AttentionCall,
        whole: AttentionCall,
        stats: RowStatistics,
        places: InputPlaces,
    ) -> tuple[Structured, KernelCall, Tensor | None]:
        """The structure of a call's rows.

        Args:
            call: of the heads and rows that are read.
            whole: the call before rows were drawn from it.
            stats: of these rows; their gap histogram gives every row's ``critical_ratio``.
            places: where they stand.

        Returns:
            The structure, and what :meth:`keep` needs: the rows, and the tokens of the keys.
        """
        rows = kernel_call(call)
        positions = places.queries
        tokens = asked = special = None
        batch, _, queries, _ = whole.query.shape
        if positions is not None and positions.numel():
            tokens = self.tokens.keys(batch, queries, whole.key.shape[2], places.last)
        if tokens is not None and positions is not None:
            tokens = tokens.to(call.query.device)
            asked = tokens_at(tokens, positions)
            if self._special:
                special = torch.isin(tokens, torch.tensor(self._special, device=tokens.device))
        counted = has_gaps(stats.state)
        every = 0 if counted else max(1, -(-call.query.shape[2] // CRITICAL_ROWS))
        found = observe_structure(rows, Places(positions, tokens, asked, special, every))
        if counted:
            found = replace(found, critical_ratio=stats.critical_ratio())
        return Structured(found, positions), rows, tokens

    def keep(
        self,
        module: str,
        rows: KernelCall,
        stats: RowStatistics,
        kept: Tensor,
        positions: Tensor | None,
        tokens: Tensor | None,
    ) -> None:
        """Keep a call's rows that are among the sharpest of their heads."""
        if not self._most:
            return
        heads, queries = kept.shape[1:]
        with self._lock:
            before = self._examples.setdefault(module, Examples.none(heads, self._most))
        threshold = before.threshold.tolist()
        information, entropy = stats.information, stats.entropy
        sharp = torch.where(kept & (stats.state.n > 1), information, -torch.inf)
        flat = sharp.transpose(0, 1).flatten(1)
        best = flat.topk(min(self._most, flat.shape[1]), dim=1)
        found = []
        for head in range(heads):
            for value, place in zip(
                best.values[head].tolist(), best.indices[head].tolist(), strict=True
            ):
                if value == -torch.inf or not value > threshold[head]:
                    continue
                b, i = divmod(place, queries)
                weights, last = _weights(rows, b, head, i)
                here = -1 if positions is None else int(positions[min(b, len(positions) - 1), i])
                ids = torch.full(weights.shape, -1) if tokens is None else tokens[b].cpu()
                found.append(
                    Row(
                        head=head,
                        information=value,
                        entropy=float(entropy[b, head, i]),
                        position=here,
                        n_keys=int(stats.state.n[b, head, i]),
                        query=int(ids[here]) if 0 <= here < len(ids) else -1,
                        weights=weights,
                        tokens=ids,
                        last=last,
                    )
                )
        if found:
            made = Examples.from_rows(found, heads, self._most)
            with self._lock:
                self._examples[module] = self._examples[module].merge(made)

    def among(self, beside: OptionalParts, layer: Layer) -> OptionalParts:
        """Add a layer's sharpest rows to its optional parts, if examples were requested."""
        if not self._most:
            return beside
        with self._lock:
            found = self._examples.get(layer.module, Examples.none(layer.heads, self._most))
        return replace(beside, examples=found if self._word is None else found.named(self._word))


def token_text(tokenizer: Any, token: int) -> str:
    """Text of a token; its name in the vocabulary if it is not a whole character."""
    decoded = str(tokenizer.decode([token])) if hasattr(tokenizer, "decode") else ""
    named = hasattr(tokenizer, "convert_ids_to_tokens")
    name = str(tokenizer.convert_ids_to_tokens(token)) if named else ""
    if name.startswith(_BLANK) and not decoded.startswith(" "):
        return f" {decoded}"  # decoders of sentence pieces drop the blank that a text begins with
    if decoded and "\ufffd" not in decoded:
        return decoded
    return name or decoded or f"#{token}"


def kernel_call(call: AttentionCall) -> KernelCall:
    """Convert a captured call to the kernel call that the structure pass runs on."""
    rule = Rule(call.factor, call.softcap, call.sinks)
    return KernelCall(call.query, call.key, None, call.masking(), rule)


def _weights(rows: KernelCall, batch: int, head: int, row: int) -> tuple[Tensor, int]:
    """The weights of one row over all keys, (S,) float64 on the CPU, and the last key it sees."""
    masking = rows.masking
    shared, member = divmod(head, masking.group)
    weights = torch.zeros(masking.keys, dtype=torch.float64, device="cpu")
    last = -1
    at = Region(slice(batch, batch + 1), slice(shared, shared + 1), slice(row, row + 1))
    with exact(rows) as exactly:
        for block in blocks(exactly, at):
            seen = (block.scores[0, 0, member, 0] > -torch.inf).nonzero()
            e, Z = block.exponentials(block.largest())
            width = e.shape[-1]
            part = e[0, 0, member, 0].cpu().double() / Z[0, 0, member, 0].cpu().double()
            weights[block.start : block.start + width] = part
            last = block.start + int(seen[-1]) if len(seen) else -1
    return weights, last
