"""What an AttentionMonitor costs a training run.

    python -m benchmarks.monitor --json benchmarks/monitor.json

A small decoder (four layers, eight heads of width 32, one sequence of 256 tokens a batch) trains on
one thread in float32, watched and plain runs in turn, step by step. Of each kind of step (plain,
measured, watched but not due) the report has the median processor time, in units of a plain step,
and what follows for every=N: one measured step and N − 1 that are not due, over N plain ones.
Before anything is timed, the losses of a watched run are checked to be those of a plain one, bit
for bit. With ``--trainer``, transformers' Trainer trains a Llama of the same sizes instead, with
and without the callback in turn. With ``--sizes``, the default monitor is timed on the decoders of
:data:`SIZES`, where every second step of one run is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from acutance.comparison.timing import cpu_seconds
from acutance.corpus.load_model import load_model
from acutance.training import AttentionMonitor
from benchmarks.cpu.machine import processor
from benchmarks.instability.decoder import Decoder as LaboratoryDecoder
from benchmarks.instability.runs import DEEP, SMALL, WIDE

WIDTH, HEADS, LAYERS, TOKENS, BATCH, WORDS = 256, 8, 4, 256, 1, 512
ROUNDS, EVERY = 40, (1, 8, 100)
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
    """A training run that goes on step by step, on random tokens."""

    def __init__(
        self,
        monitor: AttentionMonitor | None = None,
        model: nn.Module | None = None,
        words: int = WORDS,
        shape: tuple[int, int] = (BATCH, TOKENS),
    ) -> None:
        self.model, self.monitor = Decoder() if model is None else model, monitor
        self.words, self.shape = words, (shape[0], shape[1] + 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> float:
        tokens = torch.randint(0, self.words, self.shape, generator=self.generator)
        with nullcontext() if self.monitor is None else self.monitor.watch(self.model):
            logits = self.model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
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


class Size(NamedTuple):
    """A model to train, and how often."""

    model: Callable[[], nn.Module]
    words: int
    shape: tuple[int, int]
    rounds: int


#: By name: the decoders of the laboratory of failing trainings, the one above, and SmolLM2.
SIZES = {
    "2 layers of width 64, 16 x 64 tokens": Size(
        lambda: LaboratoryDecoder(SMALL), 256, (16, SMALL.length), 60
    ),
    "4 layers of width 64, 16 x 64 tokens": Size(
        lambda: LaboratoryDecoder(DEEP), 256, (16, DEEP.length), 60
    ),
    "2 layers of width 128, 16 x 64 tokens": Size(
        lambda: LaboratoryDecoder(WIDE), 256, (16, WIDE.length), 60
    ),
    "4 layers of width 256, 1 x 256 tokens": Size(Decoder, WORDS, (BATCH, TOKENS), 60),
    "SmolLM2-135M, 1 x 512 tokens": Size(
        lambda: load_model("smollm2", dtype=torch.float32, head=True).model.train(),
        49152, (1, 512), 5,
    ),
}  # fmt: skip


def of_size(size: Size) -> dict[str, float]:
    """Median seconds of a step, and the ratio of a measured step to its two neighbours."""
    run = Run(AttentionMonitor(every=2), size.model(), size.words, size.shape)
    for _ in range(3):
        run.step()  # the third is not measured
    times = [run.timed() for _ in range(2 * size.rounds)]  # measured, plain, measured, ...
    middle = statistics.median(times[1::2])
    measured = statistics.median(times[::2]) / middle
    return {"seconds": middle, "measured": measured, "every 8": (measured + 7) / 8}


class StepTimes:
    """A callback that records the processor seconds of a Trainer's steps, logging included."""

    def __init__(self) -> None:
        self.start = 0.0
        self.seconds: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.start = cpu_seconds()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        now = cpu_seconds()
        self.seconds[state.global_step] = now - self.start
        self.start = now


def trainer_run(monitor: AttentionMonitor | None, steps: int) -> tuple[dict[int, float], list[Any]]:
    """Processor seconds by step and the losses of a Trainer's run."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=HEADS, **sizes))
    rows = torch.randint(0, WORDS, (steps, TOKENS), generator=torch.Generator().manual_seed(1))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH,
                logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[*([] if monitor is None else [monitor]), times],
        )  # fmt: skip
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return times.seconds, losses


def trainer_report() -> dict[str, Any]:
    """Ratios of steps of a Trainer with the default settings, by ``every``."""
    steps = 21
    times: dict[str, list[float]] = {"plain": [], "measured": [], "not due": []}
    for round_number in range(9):
        plain, losses = trainer_run(None, steps)
        watched, same = trainer_run(AttentionMonitor(every=2), steps)
        if losses != same:
            raise SystemExit("a Trainer with the monitor has other losses than one without")
        if not round_number:
            continue  # everything is imported and allocated
        for step in range(4, steps + 1):
            times["plain"].append(plain[step])
            times["not due" if step % 2 else "measured"].append(watched[step])
    middle = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    measured, idle = (middle[kind] / middle["plain"] for kind in ("measured", "not due"))
    every = {str(n): (measured + (n - 1) * idle) / n for n in EVERY}
    return {"seconds": middle["plain"], "measured": measured, "not due": idle, "every": every}


def sizes_report() -> dict[str, Any]:
    """:func:`of_size` for each size."""
    return {name: of_size(size) for name, size in SIZES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trainer", action="store_true", help="time transformers' Trainer")
    parser.add_argument("--sizes", action="store_true", help="time decoders of several sizes")
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.trainer or arguments.sizes:
        name = "trainer" if arguments.trainer else "sizes"
        found = trainer_report() if arguments.trainer else sizes_report()
        print(json.dumps(found, indent=1))
        if arguments.json is not None:
            whole = json.loads(arguments.json.read_text(encoding="utf-8"))
            whole[name] = found
            arguments.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        return
    plain, watched = Run(), Run(AttentionMonitor(every=1))
    if [plain.step() for _ in range(3)] != [watched.step() for _ in range(3)]:
        raise SystemExit("a watched run has other losses than a plain one")
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "processor": processor(),
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
