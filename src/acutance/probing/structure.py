"""Structure of a captured call: where its rows' weight lies, and its sharpest rows in full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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

__all__ = ["CRITICAL_ROWS", "CallStructure", "StructureReader", "kernel_call", "token_text"]

#: Rows of each sequence whose scores are sorted for ``critical_ratio`` if no gap histogram was
#: recorded; the histogram gives it for every row.
CRITICAL_ROWS = 16
_BLANK = "\u2581"  # SentencePiece's sign for a blank


class CallStructure(NamedTuple):
    """Structure statistics of the rows of one call.

    Attributes:
        statistics: fields of shape (B, H, L).
        positions: (1 or B, L), index of the key at each query's position; None in cross-attention.
    """

    statistics: StructureStatistics
    positions: Tensor | None


def concatenate(parts: list[CallStructure]) -> CallStructure:
    """Concatenate the structure of several calls of one layer along the batch.

    Args:
        parts: with the same heads and number of rows; all or none have positions.
    """
    each = [part.statistics for part in parts]
    octaves = max(one.octaves.shape[-1] for one in each)
    heads = max(one.even.shape[1] for one in each)

    def column(name: str) -> Tensor:
        columns = [getattr(one, name) for one in each]
        if name in ("octaves", "even"):
            columns = [pad(one, (0, octaves - one.shape[-1])) for one in columns]
        if name == "even":
            columns = [one.expand(-1, heads, -1, -1, -1) for one in columns]
        return torch.cat(columns)

    known = [
        part.positions.expand(len(part.statistics.peak), -1)
        for part in parts
        if part.positions is not None
    ]
    statistics = StructureStatistics(**{one.name: column(one.name) for one in fields(each[0])})
    return CallStructure(statistics, torch.cat(known) if known else None)


class StructureReader:
    """Measures where the weight of each row of a probe's calls lies, and keeps the sharpest rows.

    Args:
        model: the probed model; its configuration names the special tokens if neither
            ``tokenizer`` nor ``special`` does.
        tokenizer: any object with ``all_special_ids`` and ``decode``, or None.
        special: ids of special tokens; None for the tokenizer's.
        examples: number of sharpest rows to keep of each head.

    Raises:
        TypeError: if ``special`` contains anything but integers.
    """

    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, special: Iterable[int] | None, examples: int
    ) -> None:
        if special is None:
            tokenizer_ids = getattr(tokenizer, "all_special_ids", None)
            special = special_ids(model) if tokenizer_ids is None else tokenizer_ids
        self._special = tuple(special)
        if not all(isinstance(token, int) for token in self._special):
            raise TypeError(f"special must contain token ids, got {self._special!r}")
        self._word: Callable[[int], str] | None = None
        if tokenizer is not None:
            self._word = lambda token: token_text(tokenizer, token)
        self._n_examples = examples
        self._examples: dict[str, Examples] = {}
        self._lock = threading.Lock()
        self.tokens = Tokens()

    def read(
        self,
        call: AttentionCall,
        whole: AttentionCall,
        stats: RowStatistics,
        places: InputPlaces,
    ) -> tuple[CallStructure, KernelCall, Tensor | None]:
        """Measure the structure of a call's rows.

        Args:
            call: the call restricted to the heads and rows that are read.
            whole: the call with all its rows.
            stats: statistics of the rows; with a gap histogram they give ``critical_ratio``.
            places: positions of the queries and keys.

        Returns:
            The structure, the kernel call of the rows, and the token ids (B, S) of the keys (None
            if unknown); :meth:`keep` takes the last two.
        """
        rows = kernel_call(call)
        positions = places.queries
        tokens = query_tokens = special = None
        batch, _, queries, _ = whole.query.shape
        if positions is not None and positions.numel():
            tokens = self.tokens.keys(batch, queries, whole.key.shape[2], places.last)
        if tokens is not None and positions is not None:
            tokens = tokens.to(call.query.device)
            query_tokens = tokens_at(tokens, positions)
            if self._special:
                special = torch.isin(tokens, torch.tensor(self._special, device=tokens.device))
        has_histogram = has_gaps(stats.state)
        row_step = 0 if has_histogram else max(1, -(-call.query.shape[2] // CRITICAL_ROWS))
        statistics = observe_structure(
            rows, Places(positions, tokens, query_tokens, special, row_step)
        )
        if has_histogram:
            statistics = replace(statistics, critical_ratio=stats.critical_ratio())
        return CallStructure(statistics, positions), rows, tokens

    def keep(
        self,
        module: str,
        rows: KernelCall,
        stats: RowStatistics,
        counted: Tensor,
        positions: Tensor | None,
        tokens: Tensor | None,
    ) -> None:
        """Keep the rows of a call that are among the sharpest of their heads so far.

        Args:
            module: name of the layer.
            rows: the kernel call of the rows.
            stats: their statistics.
            counted: boolean (B, H, L), True on the rows that enter the summary.
            positions: (1 or B, L), index of the key at each query's position; None if unknown.
            tokens: token ids of the keys, (B, S); None if unknown.
        """
        if not self._n_examples:
            return
        heads, queries = counted.shape[1:]
        with self._lock:
            earlier = self._examples.setdefault(module, Examples.none(heads, self._n_examples))
        threshold = earlier.threshold.tolist()
        information, entropy = stats.information, stats.entropy
        sharpness = torch.where(counted & (stats.state.n > 1), information, -torch.inf)
        flat = sharpness.transpose(0, 1).flatten(1)
        best = flat.topk(min(self._n_examples, flat.shape[1]), dim=1)
        new_rows = []
        for head in range(heads):
            for value, flat_index in zip(
                best.values[head].tolist(), best.indices[head].tolist(), strict=True
            ):
                if value == -torch.inf or not value > threshold[head]:
                    continue
                b, i = divmod(flat_index, queries)
                weights, last = _weights(rows, b, head, i)
                position = (
                    -1 if positions is None else int(positions[min(b, len(positions) - 1), i])
                )
                ids = torch.full(weights.shape, -1) if tokens is None else tokens[b].cpu()
                new_rows.append(
                    Row(
                        head=head,
                        information=value,
                        entropy=float(entropy[b, head, i]),
                        position=position,
                        n_keys=int(stats.state.n[b, head, i]),
                        query=int(ids[position]) if 0 <= position < len(ids) else -1,
                        weights=weights,
                        tokens=ids,
                        last=last,
                    )
                )
        if new_rows:
            new_examples = Examples.from_rows(new_rows, heads, self._n_examples)
            with self._lock:
                self._examples[module] = self._examples[module].merge(new_examples)

    def add_examples(self, optional_parts: OptionalParts, layer: Layer) -> OptionalParts:
        """Add a layer's sharpest rows to its optional parts, if examples were requested."""
        if not self._n_examples:
            return optional_parts
        with self._lock:
            examples = self._examples.get(
                layer.module, Examples.none(layer.heads, self._n_examples)
            )
        return replace(
            optional_parts, examples=examples if self._word is None else examples.named(self._word)
        )


def token_text(tokenizer: Any, token: int) -> str:
    """Text of a token id; its name in the vocabulary if it is not a whole character."""
    decoded = str(tokenizer.decode([token])) if hasattr(tokenizer, "decode") else ""
    has_names = hasattr(tokenizer, "convert_ids_to_tokens")
    name = str(tokenizer.convert_ids_to_tokens(token)) if has_names else ""
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
    """Weights of one row over all keys, (S,) float64 on the CPU, and the last key that it sees."""
    masking = rows.masking
    shared, member = divmod(head, masking.group)
    weights = torch.zeros(masking.keys, dtype=torch.float64, device="cpu")
    last = -1
    region = Region(slice(batch, batch + 1), slice(shared, shared + 1), slice(row, row + 1))
    with exact(rows) as exactly:
        for block in blocks(exactly, region):
            visible = (block.scores[0, 0, member, 0] > -torch.inf).nonzero()
            exponentials, total = block.exponentials(block.largest())
            width = exponentials.shape[-1]
            row_weights = (
                exponentials[0, 0, member, 0].cpu().double() / total[0, 0, member, 0].cpu().double()
            )
            weights[block.start : block.start + width] = row_weights
            last = block.start + int(visible[-1]) if len(visible) else -1
    return weights, last
