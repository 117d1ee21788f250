"""Structure of a captured call: where its rows' weight lies, and its sharpest rows in full."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.kernels.call import KernelCall
from acutance.masks import Region
from acutance.probing.settings import ProbeSettings
from acutance.probing.tokens import Reader, SelectedCall, special_ids
from acutance.rowstats.state import has_gaps
from acutance.structure.statistics import Places, blocks, exact, observe_structure, tokens_at
from acutance.summary.cells import Parts
from acutance.summary.readouts.examples import Examples
from acutance.summary.readouts.moments import CallRows

#: Rows of each sequence whose scores are sorted for ``critical_ratio`` if no gap histogram was
#: recorded; the histogram gives it for every row.
CRITICAL_ROWS = 16
_BLANK = "\u2581"  # SentencePiece's sign for a blank


class StructureReader(Reader):
    """Measures where the weight of each row of a probe's calls lies, and keeps the sharpest rows.

    Special tokens are those of the option ``special``, else the tokenizer's, else those that the
    model's configuration names.

    Raises:
        TypeError: if ``special`` contains anything but integers.
    """

    option = "structure"
    needs_tokens = True

    def __init__(self, model: torch.nn.Module, settings: ProbeSettings, *others: Any) -> None:
        super().__init__(model, settings, *others)
        special = settings.special
        if special is None:
            tokenizer_ids = getattr(settings.tokenizer, "all_special_ids", None)
            special = special_ids(model) if tokenizer_ids is None else tokenizer_ids
        self._special = tuple(special)
        if not all(isinstance(token, int) for token in self._special):
            raise TypeError(f"special must contain token ids, got {self._special!r}")

    def read(self, selected: SelectedCall, rows: CallRows) -> CallRows:
        """Measure the structure of a call's rows, and keep those among the sharpest so far.

        With a gap histogram the rows' statistics give ``critical_ratio``.
        """
        call, whole = selected.call, selected.whole
        kernel = kernel_call(call)
        positions = selected.positions
        tokens = query_tokens = special = None
        batch, _, queries, _ = whole.query.shape
        if positions is not None and positions.numel():
            tokens = self.tokens.keys(batch, queries, whole.key.shape[2], selected.last)
        if tokens is not None and positions is not None:
            tokens = tokens.to(call.query.device)
            query_tokens = tokens_at(tokens, positions)
            if self._special:
                special = torch.isin(tokens, torch.tensor(self._special, device=tokens.device))
        has_histogram = has_gaps(rows.stats.state)
        row_step = 0 if has_histogram else max(1, -(-call.query.shape[2] // CRITICAL_ROWS))
        structure = observe_structure(
            kernel, Places(positions, tokens, query_tokens, special, row_step)
        )
        if has_histogram:
            structure = replace(structure, critical_ratio=rows.stats.critical_ratio())
        rows = rows._replace(structure=structure, positions=positions)
        examples = self._sharpest(kernel, rows, tokens) if self.settings.examples else None
        if examples is not None:
            rows = rows._replace(parts=Parts(rows.parts, examples=examples))
        return rows

    def _sharpest(
        self, kernel: KernelCall, rows: CallRows, tokens: Tensor | None
    ) -> Examples | None:
        """The rows of a call that are among the sharpest of their heads so far; None for none.

        Args:
            kernel: the kernel call of the rows.
            rows: their statistics.
            tokens: token ids of the keys, (B, S); None if unknown.
        """
        stats, positions = rows.stats, rows.positions
        heads, queries = rows.counted.shape[1:]
        threshold = torch.full((heads, 1), -sys.float_info.max, dtype=torch.float64)
        earlier = self.records.so_far(rows.layer.module, "examples")
        if isinstance(earlier, Examples) and len(earlier.threshold) == heads:
            threshold = threshold.maximum(earlier.threshold[:, None])
        entropy, n = stats.entropy, stats.state.n
        sharpness = torch.where(rows.counted & (n > 1), stats.information, -torch.inf)
        flat = sharpness.transpose(0, 1).flatten(1)
        best = flat.topk(min(self.settings.examples, flat.shape[1]), dim=1)
        examples = Examples.none(heads, self.settings.examples)
        for head, index in (best.values.cpu() > threshold).nonzero().tolist():
            b, i = divmod(int(best.indices[head, index]), queries)
            weights, last = _weights(kernel, b, head, i)
            ids = torch.full(weights.shape, -1) if tokens is None else tokens[b].cpu()
            examples.put(
                (head, index), weights, ids, last,
                information=float(best.values[head, index]),
                entropy=float(entropy[b, head, i]),
                position=-1 if positions is None else int(positions[b % len(positions), i]),
                n_keys=int(n[b, head, i]),
            )  # fmt: skip
        return examples if bool((examples.n_keys > 0).any()) else None

    def name_tokens(self, parts: Parts) -> None:
        """Give a layer's sharpest rows the texts of their tokens, if a tokenizer is known."""
        tokenizer, examples = self.settings.tokenizer, parts.get("examples")
        if tokenizer is not None and isinstance(examples, Examples):
            parts["examples"] = examples.named(partial(token_text, tokenizer))


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
    scores = call.factor, call.softcap, call.sinks
    return KernelCall(call.query, call.key, None, call.masking(), *scores)


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
            e, Z = (x[0, 0, member, 0].cpu().double() for x in block.exponentials(block.largest()))
            weights[block.start : block.start + len(e)] = e / Z
            last = block.start + int(visible[-1]) if len(visible) else -1
    return weights, last
