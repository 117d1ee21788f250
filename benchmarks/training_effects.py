"""What each tool of acutance.training does to a small run, for better or worse.

    python benchmarks/training_effects.py --json benchmarks/training_effects.json

Two tasks, each with three seeds, on one thread, in float32:

* recall: 24 items of a key and a value, and one query that names a key; a two-layer transformer of
  width 64 gives the value. It is trained at a rate at which its logits grow, and tested at 24 and
  at 96 items. "gentle" runs train at a rate at which they stay small.
* contrast: two noisy views of 8 hidden numbers, two small networks, 256 pairs a batch; tested by
  finding each pair among 1024.

The report has mean and standard deviation over seeds of every number.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from acutance import training
from acutance.nn import MultiheadAttention

WIDTH, HEADS, LAYERS, KEYS, VALUES, ITEMS = 64, 4, 2, 256, 16, 24
RATE, BATCH, TAU, FLOOR = 1e-2, 48, 20.0, 1.0
GENTLE_RATE, TIGHT_TAU = 3e-3, 10.0  # where logits stay small, and a threshold under what they need


class Recall(nn.Module):
    """A transformer that looks up values by key."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Embedding(KEYS, WIDTH)
        self.values = nn.Embedding(VALUES + 1, WIDTH)  # the last one asks
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.read = nn.Linear(WIDTH, VALUES)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        x = self.keys(keys) + self.values(values)
        for block in self.blocks:
            x = block(x)
        return self.read(x[:, -1])


def recall_batch(size: int, items: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Keys and values (size, items + 1), the last of them asking, and the answers (size,)."""
    keys = torch.rand(size, KEYS, generator=generator).argsort(1)[:, :items]
    values = torch.randint(VALUES, (size, items), generator=generator)
    asked = torch.randint(items, (size, 1), generator=generator)
    ask = torch.full((size, 1), VALUES)
    answers = values.gather(1, asked)[:, 0]
    return torch.cat([keys, keys.gather(1, asked)], 1), torch.cat([values, ask], 1), answers


def prepare(model: Recall, name: str) -> None:
    """What a tool changes before training."""
    for block in model.blocks:
        attend = block.self_attn
        if name == "sigma_reparam":
            training.sigma_reparam(attend, "in_proj_weight")
        elif name == "temperature":
            law = training.ClampedTemperature(HEADS, minimum=0.25, maximum=2.0)
            block.self_attn = MultiheadAttention(WIDTH, HEADS, batch_first=True, scaling=law)
            block.self_attn.load_state_dict(attend.state_dict(), strict=False)
        elif name == "initial_scale":
            d = WIDTH // HEADS
            factor = training.initial_scale(d, ITEMS + 1, 2.0) * d**0.5
            with torch.no_grad():  # components of q and k start with variance 1/2, not 1
                attend.in_proj_weight[:WIDTH].mul_(2 * factor)


def run_recall(name: str, seed: int, steps: int) -> dict[str, float]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    gentle, name = name.startswith("gentle"), name.removeprefix("gentle_")
    rate, tau = (GENTLE_RATE, TIGHT_TAU) if gentle else (RATE, TAU)
    model = Recall()
    prepare(model, name)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    clip = training.QKClip(model, tau)
    watch = training.AttentionWatch(model)
    penalty: Callable[..., Tensor] | None = {
        "entropy_floor": training.EntropyRegularizer(floor=FLOOR, weight=0.1),
        "z_loss": training.ZLoss(1e-3),
    }.get(name)
    losses = []
    for _ in range(steps):
        keys, values, answers = recall_batch(BATCH, ITEMS, generator)
        with ExitStack() as contexts:
            if name == "qk_clip":
                contexts.enter_context(clip)
            if penalty is not None:
                contexts.enter_context(watch)
            loss = cross_entropy(model(keys, values), answers)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss if penalty is None else loss + penalty(watch)).backward()
        optimizer.step()
        if name == "qk_clip":
            clip.step()
    model.train(False)
    found = {"final_loss": statistics.mean(losses[-20:])}
    for items in (ITEMS, 4 * ITEMS):
        keys, values, answers = recall_batch(512, items, generator)
        watch = training.AttentionWatch(model, gradients=False, products=True)
        with watch, torch.no_grad():
            right = model(keys, values).argmax(-1) == answers
        found[f"accuracy_{items}"] = float(right.float().mean())
        stats = [rows.statistics for rows in watch.rows]
        found[f"max_logit_{items}"] = max(float(part.max_logit.max()) for part in stats)
        found[f"entropy_{items}"] = statistics.mean(float(part.entropy.mean()) for part in stats)
    return found


CONTRAST = {
    "fixed 0.07": {"temperature": "fixed", "tau": 0.07},
    "fixed 1": {"temperature": "fixed", "tau": 1.0},
    "learned": {"temperature": "learned", "tau": 0.07},
    "log_n": {"temperature": "log_n"},
    "entropy_target": {"temperature": "entropy_target", "target": 0.5},
}


def run_contrast(name: str, seed: int, steps: int) -> dict[str, float]:
    torch.manual_seed(seed)
    views = [torch.randn(8, 32) for _ in range(2)]
    towers = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)
    )

    def pairs(size: int) -> list[Tensor]:
        hidden = torch.randn(size, 8)
        seen = (torch.tanh(hidden @ view) + 0.5 * torch.randn(size, 32) for view in views)
        return [tower(x) for tower, x in zip(towers, seen, strict=True)]

    criterion = training.InfoNCE(**CONTRAST[name], symmetric=True)
    optimizer = torch.optim.Adam([*towers.parameters(), *criterion.parameters()], 2e-3)
    for _ in range(steps):
        loss = criterion(*pairs(256))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report = criterion.report
    assert report is not None
    with torch.no_grad():
        left, right = (nn.functional.normalize(side, dim=-1) for side in pairs(1024))
        found = (left @ right.T).argmax(1) == torch.arange(1024)
    return {
        "retrieval_1024": float(found.float().mean()),
        "temperature": report.temperature,
        "negative_entropy": report.negative_entropy,
        "effective_negatives": report.effective_negatives,
    }


def over_seeds(
    run: Callable[[str, int, int], dict[str, float]], name: str, seeds: int, steps: int
) -> dict[str, dict[str, float]]:
    runs = [run(name, seed, steps) for seed in range(seeds)]
    table = {}
    for key in runs[0]:
        values = [found[key] for found in runs]
        spread = statistics.stdev(values) if seeds > 1 else 0.0
        table[key] = {"mean": statistics.mean(values), "spread": spread}
        print(f"{name:16} {key:20} {table[key]['mean']:9.4f} ± {spread:.4f}", flush=True)
    return table


RECALL = (
    "plain",
    "qk_clip",
    "entropy_floor",
    "z_loss",
    "sigma_reparam",
    "temperature",
    "initial_scale",
    "gentle_plain",
    "gentle_qk_clip",
)


def main() -> None:
    """Run every tool, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--only", nargs="*", help="names of tools and temperatures")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, object] = {
        "about": {"seeds": options.seeds, "steps": options.steps, "torch": torch.__version__},
        "recall": {},
        "contrast": {},
    }
    for kind, run, names in (
        ("contrast", run_contrast, CONTRAST),
        ("recall", run_recall, RECALL),
    ):
        for name in names:
            if not options.only or name in options.only:
                report[kind][name] = over_seeds(run, name, options.seeds, options.steps)  # type: ignore[index]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
