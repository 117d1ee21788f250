"""What an AttentionMonitor costs a training run.

    python benchmarks/monitor.py --json benchmarks/monitor.json

A small decoder (four layers, eight heads of width 32, one sequence of 256 tokens a batch) trains on
one thread in float32, watched and plain runs in turn, step by step. Of each kind of step (plain,
measured, watched but not due) the report has the median processor time, in units of a plain step,
and what follows for every=N: one measured step and N − 1 that are not due, over N plain ones.
Before anything is timed, the losses of a watched run are checked to be those of a plain one, bit
for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from acutance.comparison.measured import cpu_seconds
from acutance.training import AttentionMonitor

WIDTH, HEADS, LAYERS, TOKENS, BATCH, WORDS = 256, 8, 4, 256, 1, 512
ROUNDS, EVERY = 40, (1, 10, 100)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "max_rows=64": {"max_rows": 64},
    "provide=True": {"provide": True},
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
    """A training run that goes on step by step."""

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

    def timed(self) -> float:
        """Processor seconds of one step."""
        start = cpu_seconds()
        self.step()
        return cpu_seconds() - start


def medians(given: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a plain step, a measured one, and a watched one that is not due."""
    plain, watched = Run(), Run(AttentionMonitor(2, **given))
    for _ in range(3):
        plain.step()
        watched.step()
    times: dict[str, list[float]] = {"plain": [], "measured": [], "not due": []}
    for _ in range(ROUNDS):
        for kind in ("measured", "not due"):  # steps 4, 5, 6, ... of the watched run
            times["plain"].append(plain.timed())
            times[kind].append(watched.timed())
    return {kind: statistics.median(found) for kind, found in times.items()}


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
        "rounds": ROUNDS,
        "options": {},
    }
    for name, given in OPTIONS.items():
        found = medians(given)
        measured, idle = (found[kind] / found["plain"] for kind in ("measured", "not due"))
        every = {str(n): (measured + (n - 1) * idle) / n for n in EVERY}
        report["options"][name] = {"measured": measured, "not due": idle, "every": every}
        told = ", ".join(f"every={n} {ratio:.3f}" for n, ratio in every.items())
        print(f"{name:14} measured {measured:.3f}, not due {idle:.3f}: {told}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
