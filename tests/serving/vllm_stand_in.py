"""A stand-in for vLLM's attention layers: signatures of vLLM 0.32, computed as documented.

An engine runs prompts in chunks and then token by token, several sequences in one pass, through
layers that keep keys and values in blocks of a paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK, HEADS, KEY_HEADS, WIDTH = 16, 4, 2, 16


@dataclass
class Metadata:
    """What an implementation is given of a pass."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True


class Impl:
    """Attention over a paged cache (blocks, H, T, 2E), keys interleaved in pairs of tokens."""

    def __init__(
        self,
        window: Any = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        forgets_window: bool = False,
        block: int = BLOCK,
    ) -> None:
        self.block = block
        self.scale, self.sliding_window, self.logits_soft_cap = WIDTH**-0.5, window, softcap
        self.sinks, self.alibi_slopes, self.forgets_window = sinks, slopes, forgets_window

    def _parts(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (blocks, H, T / 2, E, 2) and values (blocks, H, T, E), as views."""
        key, value = cache.view(len(cache), KEY_HEADS, self.block * 2, WIDTH).chunk(2, dim=2)
        key = key.as_strided(
            (len(cache), KEY_HEADS, self.block // 2, WIDTH, 2),
            (key.stride(0), key.stride(1), 2 * WIDTH, 2, 1),
        )
        return key, value

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        keys, values = self._parts(kv_cache)
        for row, slot in enumerate(slot_mapping.tolist()):
            block, token = divmod(slot, self.block)
            keys[block, :, token // 2, :, token % 2] = key[row]
            values[block, :, token] = value[row]

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Metadata | None, output: Tensor, output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None:
            return output
        keys, values = self._parts(kv_cache)
        keys = keys.permute(0, 1, 2, 4, 3).flatten(2, 3)  # (blocks, H, T, E)
        starts = attn_metadata.query_start_loc.tolist()
        for place, length in enumerate(attn_metadata.seq_lens.tolist()):
            blocks = attn_metadata.block_table[place, : -(-length // self.block)].long()
            k, v = (
                part[blocks].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(2, 0)
                for part in (keys, values)
            )
            rows = slice(starts[place], starts[place + 1])
            q = query[rows].transpose(0, 1)
            at = torch.arange(length - q.shape[1], length).unsqueeze(1)
            distance = at - torch.arange(length)
            output[rows] = self._attend(q.double(), k.double(), v.double(), distance).to(output)
        return output

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, distance: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        if self.alibi_slopes is not None:
            scores = scores - self.alibi_slopes.double()[:, None, None] * distance
        hidden = distance < 0
        window = self.sliding_window
        if isinstance(window, tuple):
            window = window[0] + 1
        if window and not self.forgets_window:
            hidden = hidden | (distance >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].matmul(v).transpose(0, 1)
        return (scores.softmax(-1) @ v).transpose(0, 1)


class Backend:
    @staticmethod
    def get_name() -> str:
        return "STAND_IN"


class Attention:
    """The attributes of vLLM's layer that the reader uses."""

    def __init__(self, name: str, impl: Any, dtype: torch.dtype = torch.float32) -> None:
        self.layer_name, self.impl, self.attn_backend = name, impl, Backend
        self.num_heads, self.num_kv_heads = HEADS, KEY_HEADS
        self.head_size = self.head_size_v = WIDTH
        shape = 64 * BLOCK // impl.block, KEY_HEADS, impl.block, 2 * WIDTH
        self.cache = torch.zeros(shape, dtype=dtype)


class Engine:
    """Runs random queries, keys and values of several sequences through layers.

    Args:
        layers: the layers.
        lengths: of the sequences, in tokens.
        prompts: how many of a sequence's tokens come at once; then one in each pass.
        batch: most sequences that run at the same time.
        latest_first: whether the block that was freed last is used first.
        prefix: number of tokens that later sequences share with the first one, whose keys they
            find in its blocks.
        chunk: most tokens of a prompt in one pass.
        window: blocks outside of this window are freed.
        fused: whether keys are stored by another function than the layer's.
        graphs: whether passes of decoded rows are replayed without a call of the layers' functions.

    Layers whose blocks are smaller than those of the first layer have a cache with other numbers.
    """

    def __init__(
        self, layers: list[Attention], lengths: list[int], prompts: list[int], *, batch: int = 8,
        latest_first: bool = False, prefix: int = 0, chunk: int = 1000, window: int | None = None,
        fused: bool = False, graphs: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.layers, self.lengths, self.prompts = layers, lengths, prompts
        self.inputs = [
            [
                [
                    torch.randn(length, heads, WIDTH, generator=generator) * 2
                    for heads in (HEADS, KEY_HEADS, KEY_HEADS)
                ]
                for length in lengths
            ]
            for _ in layers
        ]
        for layer in self.inputs:
            for sequence in layer[1:]:
                for part, first in zip(sequence, layer[0], strict=True):
                    part[:prefix] = first[:prefix]
        self.free = torch.randperm(64, generator=generator).tolist()
        self.blocks: list[list[int]] = [[] for _ in lengths]
        self.done = [0] * len(lengths)
        self.waiting, self.running = list(range(len(lengths))), list[int]()
        self.computed: list[tuple[int, int]] = []  # sequence and position of each row
        self.batch, self.latest_first, self.prefix = batch, latest_first, prefix
        self.chunk, self.window, self.fused, self.graphs = chunk, window, fused, graphs
        self.replayed = set[tuple[int, int]]()  # rows of replayed passes

    def run(self) -> None:
        """Pass by pass until all sequences have ended."""
        while self.step():
            pass

    def step(self) -> bool:
        """One pass; False if there is nothing to compute."""
        for i in [i for i in self.running if self.done[i] == self.lengths[i]]:
            self.stop(i)
        while self.waiting and len(self.running) < self.batch:
            i = self.waiting.pop(0)
            self.running.append(i)
            if i and self.prefix and self.blocks[0]:
                self.done[i] = self.prefix
                self.blocks[i] = self.blocks[0][: self.prefix // BLOCK]
        if self.running:
            self._pass()
        return bool(self.running)

    def stop(self, i: int, again: bool = False) -> None:
        """End a sequence, or preempt it to compute all its rows again."""
        self.running.remove(i)
        shared = self.prefix // BLOCK if i else 0
        for block in reversed(self.blocks[i][shared:]):
            self._release(block)
        self.blocks[i] = []
        if again:
            self.prompts[i], self.done[i] = self.done[i], 0
            self.waiting.append(i)

    def _release(self, block: int) -> None:
        if block >= 0:
            self.free.insert(0 if self.latest_first else len(self.free), block)

    def _pass(self) -> None:
        done, running = self.done, self.running
        new = [
            min(self.prompts[i] - done[i], self.chunk) if done[i] < self.prompts[i] else 1
            for i in running
        ]
        rows = [
            (i, at)
            for i, count in zip(running, new, strict=True)
            for at in range(done[i], done[i] + count)
        ]
        for i, count in zip(running, new, strict=True):
            out_of_window = max(done[i] - (self.window or 1000) + 1, 0) // BLOCK
            for place in range(out_of_window):
                self._release(self.blocks[i][place])
                self.blocks[i][place] = -1
            while len(self.blocks[i]) * BLOCK < done[i] + count:
                self.blocks[i].append(self.free.pop(0))
        self.computed += rows
        table = torch.zeros(len(running), 8, dtype=torch.int32)
        for place, i in enumerate(running):
            table[place, : len(self.blocks[i])] = torch.tensor(self.blocks[i]).clamp(min=0)
        slots = torch.tensor([self.blocks[i][at // BLOCK] * BLOCK + at % BLOCK for i, at in rows])
        starts = torch.tensor([0, *new]).cumsum(0).int()
        ends = torch.tensor([done[i] + count for i, count in zip(running, new, strict=True)])
        replayed = self.graphs and max(new) == 1
        if replayed:
            self.replayed.update(rows)
        for layer, inputs in zip(self.layers, self.inputs, strict=True):
            query, key, value = (
                torch.stack([inputs[i][part][at] for i, at in rows]) for part in range(3)
            )
            cache, out = layer.cache, torch.empty_like(query)
            store = layer.impl.do_kv_cache_update
            forward, block = layer.impl.forward, layer.impl.block
            if self.fused or replayed:
                store = store.__wrapped__  # type: ignore[attr-defined]
            if replayed:
                forward = forward.__wrapped__  # type: ignore[attr-defined]
            metadata = Metadata(len(rows), starts, ends.int(), table, slots)
            if (parts := BLOCK // block) > 1:
                smaller = (63 - table).unsqueeze(2) * parts + torch.arange(parts, dtype=torch.int32)
                other = (63 - slots // BLOCK) * BLOCK + slots % BLOCK
                metadata = Metadata(len(rows), starts, ends.int(), smaller.flatten(1), other)
            store(layer, key, value, cache, metadata.slot_mapping)
            forward(layer, query, key, value, cache, metadata, output=out)
        for i, count in zip(running, new, strict=True):
            done[i] += count
