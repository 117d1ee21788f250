"""What to do after an alarm: trainings with a slow fault, and a remedy from the alarm's step on.

The alarm is that the largest logit of a layer has grown by :data:`GROWTH` in the last quarter of
the training, measured every :data:`EVERY` steps on the training without a remedy. Every training
runs all :data:`STEPS` steps; it is judged by its held-out loss after the last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acutance.training import AttentionWatch, EntropyRegularizer, QKClip, ZLoss
from benchmarks.instability.analysis import growth
from benchmarks.instability.decoder import Decoder
from benchmarks.instability.runs import BARE, RATE, SMALL, Run
from benchmarks.instability.training import EVERY, grow, held_out_loss, loss_of, next_batch, round_

GROWTH = 17.0
STEPS, SEEDS = 360, 5
#: Loss of a uniform guess, nats; a training that is worse counts as this.
UNIFORM = math.log(256)
#: Largest logit that QK-clip allows.
TAU = 30.0

FAULTS = {
    "learning rate × 1.0075 a step": Run(
        "slow_rate", 1.0075, 60, shape=SMALL, growth=1.0075, rate=4 * RATE
    ),
    "scale of scores × 1.02 a step": Run("scale_growth", 1.02, 60, shape=SMALL, scale_growth=1.02),
    "learning rate × 5, no norm": Run("hot_no_norm", 5.0, 60, shape=BARE, factor=5.0),
    "weight decay −1, no norm": Run("slow_weight_growth", -1.0, 60, shape=BARE, decay=-1.0),
}


class Normed(nn.Module):
    """RMS normalisation with a fixed gain: the root mean square at the alarm."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.gain = float(seen.square().mean().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """Normalised vectors."""
        return self.gain * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


class Remedy:
    """Nothing, or what subclasses change from the alarm on."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def begin(self, tokens: Tensor) -> None:
        """Act once, at the alarm."""

    def rates(self, rate: float) -> tuple[float, float]:
        """Learning rates of queries and keys, and of all other weights."""
        return rate, rate

    def watched(self) -> AbstractContextManager[Any]:
        """Context of the forward pass."""
        return nullcontext()

    def penalty(self) -> Tensor | float:
        """What is added to the loss."""
        return 0.0

    def after(self) -> None:
        """Act after the optimiser's step."""


class LowerRate(Remedy):
    """A quarter of the learning rate for all weights."""

    def rates(self, rate: float) -> tuple[float, float]:
        """Lower rates."""
        return rate / 4, rate / 4


class LowerQueryKeyRate(Remedy):
    """A tenth of the learning rate for query and key projections."""

    def rates(self, rate: float) -> tuple[float, float]:
        """Lower rates."""
        return rate / 10, rate


class Clip(Remedy):
    """QK-clip."""

    def begin(self, tokens: Tensor) -> None:
        """Start the remedy."""
        self.clip = QKClip(self.model, tau=TAU)

    def watched(self) -> AbstractContextManager[Any]:
        """Context that reads the rows of the forward pass."""
        return self.clip

    def after(self) -> None:
        """Clip."""
        self.clip.step()


class Norm(Remedy):
    """QK-norm, inserted with the gain that queries and keys have."""

    def begin(self, tokens: Tensor) -> None:
        """Start the remedy."""
        hooks, seen = [], {}
        for attention in self.model.attention:
            for name in ("query", "key"):
                projection = getattr(attention, name)
                hooks.append(
                    projection.register_forward_hook(
                        lambda _, __, out, place=(attention, name): seen.update({place: out})
                    )
                )
        with torch.no_grad():
            self.model(tokens[:, :-1])
        for hook in hooks:
            hook.remove()
        for (attention, name), out in seen.items():
            setattr(attention, f"{name}_norm", Normed(out))


class Penalty(Remedy):
    """A term of the loss that reads the rows of every layer."""

    term: Callable[[AttentionWatch], Tensor]

    def begin(self, tokens: Tensor) -> None:
        """Start the remedy."""
        self.watch = AttentionWatch(self.model)

    def watched(self) -> AbstractContextManager[Any]:
        """Context that reads the rows of the forward pass."""
        return self.watch

    def penalty(self) -> Tensor | float:
        """The term of the rows of this pass."""
        return type(self).term(self.watch)


class EntropyFloor(Penalty):
    """Entropy regulariser with a floor of a quarter of log n."""

    term = EntropyRegularizer(floor=0.25, unit="fraction", weight=0.1)


class Z(Penalty):
    """Z-loss on the rows' logarithmic normaliser."""

    term = ZLoss(weight=1e-3)


REMEDIES: dict[str, type[Remedy]] = {
    "none": Remedy,
    "learning rate / 4": LowerRate,
    "learning rate of queries and keys / 10": LowerQueryKeyRate,
    "QK-clip": Clip,
    "QK-norm": Norm,
    "entropy floor": EntropyFloor,
    "z-loss": Z,
}


def train(run: Run, remedy: str, start: int) -> dict[str, Any]:
    """Train, with the remedy from step ``start`` on; largest logits are measured without one."""
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed + 1)
    model = Decoder(run.shape)
    query_key = [w for a in model.attention for w in (a.query.weight, a.key.weight)]
    ids = {id(weight) for weight in query_key}
    others = [weight for weight in model.parameters() if id(weight) not in ids]
    optimizer = torch.optim.AdamW([{"params": query_key}, {"params": others}], betas=(0.9, 0.95))
    treatment = REMEDIES[remedy](model)
    largest: list[list[float]] = []
    for step in range(run.steps):
        treated = step >= start
        rate = run.rate * min(1.0, (step + 1) / run.warmup)
        if step >= run.start:
            rate *= run.factor * run.growth ** (step - run.start)
            grow(model, run)
        tokens = next_batch(run, generator, step)
        if step == start:
            treatment.begin(tokens)
        rates = treatment.rates(rate) if treated else (rate, rate)
        for group, one in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = one
            group["weight_decay"] = run.decay if step >= run.start else 0.1
        recording = remedy == "none" and step % EVERY == 0
        model.record(recording)
        with treatment.watched() if treated else nullcontext():
            loss = loss_of(model, tokens)
        if treated:
            loss = loss + treatment.penalty()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), run.clip or torch.inf)
        if recording:
            largest.append([float(a.largest[:, 0].max()) for a in model.attention])
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            break
        optimizer.step()
        if step >= run.start:
            round_(model, optimizer, run)
        if treated:
            treatment.after()
    held_out = held_out_loss(model, run)
    held_out = min(held_out, UNIFORM) if math.isfinite(held_out) else UNIFORM
    return {"held_out": held_out, "steps": step + 1, "largest": largest}


def alarm_step(run: Run, largest: list[list[float]]) -> int | None:
    """The step of the first alarm after the fault's first."""
    score = growth(np.array(largest)).max(1)
    steps = EVERY * np.arange(len(score))
    beyond = steps[(score > GROWTH) & (steps >= run.start)]
    return int(beyond[0]) if len(beyond) else None


def run_all(path: Path) -> None:
    """Run what the file does not have yet, one JSON line for each training."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {(one["fault"], one["seed"], one["remedy"]): one for one in map(json.loads, lines)}
    for fault, plain in FAULTS.items():
        for seed in range(SEEDS):
            run = replace(plain, seed=3000 + seed, steps=STEPS, batch=8)
            start: int | None = None
            for remedy in REMEDIES:
                if (fault, seed, remedy) not in done:
                    if remedy != "none" and start is None:
                        break  # no alarm, so no remedy
                    result = train(run, remedy, run.steps if start is None else start)
                    one = {"fault": fault, "seed": seed, "remedy": remedy}
                    one |= {"held_out": round(result["held_out"], 4), "steps": result["steps"]}
                    if remedy == "none":
                        one["alarm"] = alarm_step(run, result["largest"])
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(one) + "\n")
                    print(one, flush=True)
                    done[fault, seed, remedy] = one
                start = done[fault, seed, "none"]["alarm"]


def table(path: Path) -> str:
    """Held-out loss by fault and remedy: mean and standard error over seeds, and the difference.

    The difference is that of the same seeds with and without the remedy.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = ["| fault | remedy | held-out loss | difference | trainings |", "|---|---|---|---|---|"]
    for fault in FAULTS:
        plain = {o["seed"]: o for o in lines if o["fault"] == fault and o["remedy"] == "none"}
        for remedy in REMEDIES:
            of = {o["seed"]: o for o in lines if o["fault"] == fault and o["remedy"] == remedy}
            if not of:
                continue
            losses = np.array([one["held_out"] for one in of.values()])
            gain = np.array([one["held_out"] - plain[seed]["held_out"] for seed, one in of.items()])
            rows.append(
                f"| {fault} | {remedy} | {_mean(losses)} | "
                f"{'' if remedy == 'none' else _mean(gain)} | {len(of)} |"
            )
    return "\n".join(rows)


def _mean(values: np.ndarray) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{values.mean():.2f} ± {error:.2f}"
