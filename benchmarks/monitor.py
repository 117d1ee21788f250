"""What an AttentionMonitor costs a training run.

    python benchmarks/monitor.py --json benchmarks/monitor.json

A small decoder (four layers, eight heads of width 32, one sequence of 256 tokens a batch) trains in
blocks of steps that are watched and blocks that are not, in turn, on one thread and in float32. A
ratio is the processor time of a watched block over that of the plain block beside it; the report
has the median over pairs and the range. Before anything is timed, the losses of a watched run are
checked to be those of a plain one, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from acutance.training import AttentionMonitor

WIDTH, HEADS, LAYERS, TOKENS, BATCH, WORDS = 256, 8, 4, 256, 1, 512
#: name: steps between measurements, steps of a block, pairs of blocks, further options.
RUNS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "every=1": (1, 4, 9, {}),
    "every=10": (10, 20, 5, {}),
    "every=100": (100, 100, 3, {}),
    "every=1, max_rows=64": (1, 4, 9, {"max_rows": 64}),
    "every=1, provide=True": (1, 4, 9, {"provide": True}),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.read(self.norm(self.blocks(x)))


class Run:
    """A training run that goes on block by block."""

    def __init__(self, monitor: AttentionMonitor | None = None) -> None:
        self.model, self.monitor = Decoder(), monitor
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> float:
        tokens = torch.randint(0, WORDS, (BATCH, TOKENS + 1), generator=self.generator)
        if self.monitor is None:
            logits = self.model(tokens[:, :-1])
        else:
            with self.monitor.watch(self.model):
                logits = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step()
        return loss.item()

    def block(self, steps: int) -> float:
        """Processor seconds of so many steps."""
        start = time.process_time()
        for _ in range(steps):
            self.step()
        return time.process_time() - start


def ratios(every: int, steps: int, pairs: int, given: dict[str, Any]) -> list[float]:
    """Watched over plain, pair by pair; which of a pair comes first alternates."""
    plain, watched = Run(), Run(AttentionMonitor(every, **given))
    for _ in range(2):  # the first step is measured whatever `every` says, and is left out
        plain.step()
        watched.step()
    found = []
    for pair in range(pairs):
        first, second = (plain, watched) if pair % 2 else (watched, plain)
        times = {id(first): first.block(steps), id(second): second.block(steps)}
        found.append(times[id(watched)] / times[id(plain)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain, watched = Run(), Run(AttentionMonitor(every=1))
    if [plain.step() for _ in range(3)] != [watched.step() for _ in range(3)]:
        raise SystemExit("a watched run has other losses than a plain one")
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "ratios": {},
    }
    for name, (every, steps, pairs, given) in RUNS.items():
        found = ratios(every, steps, pairs, given)
        middle, low, high = statistics.median(found), min(found), max(found)
        report["ratios"][name] = {"median": middle, "min": low, "max": high, "pairs": pairs}
        print(f"{name:24} {middle:.3f}  ({low:.3f} to {high:.3f}, {pairs} pairs)", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
