"""What to do after an alarm: trainings with a fault, and a remedy from the alarm on.

The alarm is that of :class:`acutance.training.AttentionMonitor`, measured every :data:`BETWEEN`
steps: :class:`~acutance.training.alarms.LogitGrowth` with the limit of the recorded results. Faults
begin after its silence, at step :data:`BEGIN`, and go on to the end. Every remedy continues a copy
of the same training from the step after the alarm, on the same batches, and is judged by the
held-out loss after :data:`STEPS` steps.
"""

from __future__ import annotations

import copy
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
from acutance.training.alarms import LogitGrowth
from benchmarks.instability.decoder import MEANS, Decoder
from benchmarks.instability.report import EARLIER_LIMIT
from benchmarks.instability.runs import BARE, RATE, Run
from benchmarks.instability.training import grow, held_out_loss, loss_of, next_batch, round_

STEPS, BEGIN, BETWEEN, SEEDS = 480, 160, 8, 8
#: Loss of a uniform guess, nats; a training that is worse counts as this.
UNIFORM = math.log(256)
#: Largest logit that QK-clip allows.
TAU = 30.0

FAULTS = {
    "learning rate × 1.0075 a step": Run("slow_rate", growth=1.0075, rate=4 * RATE),
    "learning rate × 1.01 a step": Run("slow_rate", growth=1.01),
    "scale of scores × 1.02 a step": Run("scale_growth", scale_growth=1.02),
    "learning rate × 5, no norm": Run("hot_no_norm", shape=BARE, factor=5.0),
    "weight decay −1, no norm": Run("slow_weight_growth", shape=BARE, decay=-1.0),
    "query and key weights of a head × 1.02 a step": Run("head_growth", head_growth=1.02),
}
#: The same training without a fault.
NO_FAULT = "no fault"


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

    def largest_norm(self, clip: float) -> float:
        """Norm to which gradients are clipped."""
        return clip

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


class GradientClip(Remedy):
    """Gradients clipped to a tenth of the norm that is usual here."""

    def largest_norm(self, clip: float) -> float:
        """A lower norm."""
        return clip / 10


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
    "gradient clipping / 10": GradientClip,
    "QK-clip": Clip,
    "QK-norm": Norm,
    "entropy floor": EntropyFloor,
    "z-loss": Z,
}


class Training:
    """A training that goes on step by step, and can be copied."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(run.seed)
        self.run, self.step, self.finite = run, 0, True
        self.generator = torch.Generator().manual_seed(run.seed + 1)
        self.model = Decoder(run.shape)
        query_key = [w for a in self.model.attention for w in (a.query.weight, a.key.weight)]
        ids = {id(weight) for weight in query_key}
        others = [weight for weight in self.model.parameters() if id(weight) not in ids]
        self.optimizer = torch.optim.AdamW(
            [{"params": query_key}, {"params": others}], betas=(0.9, 0.95)
        )
        self.growth = LogitGrowth()
        self.growth.limit = math.exp(EARLIER_LIMIT)

    def until_alarm(self) -> int | None:
        """Train until the first alarm after the fault's first step; None if there is none."""
        nothing = Remedy(self.model)
        while self.finite and self.step < self.run.steps:
            measured = self.step % BETWEEN == 0
            self.model.record(measured)
            self.advance(nothing)
            self.model.record(False)
            if measured:
                deviation = [
                    a.means[:, MEANS.index("logit_std")].mean() for a in self.model.attention
                ]
                deviations = {str(i): float(x) for i, x in enumerate(deviation)}
                grown = self.growth.update(self.step - 1, deviations)
                if (
                    self.step > self.run.start
                    and max(grown.values(), default=0) > self.growth.limit
                ):
                    return self.step - 1
        return None

    def finish(self, remedy: str) -> float:
        """Train to the end with a remedy from now on; the held-out loss."""
        treatment = REMEDIES[remedy](self.model)
        before = self.generator.get_state()
        treatment.begin(next_batch(self.run, self.generator, self.step))
        self.generator.set_state(before)
        while self.finite and self.step < self.run.steps:
            self.advance(treatment)
        held_out = held_out_loss(self.model, self.run)
        return min(held_out, UNIFORM) if math.isfinite(held_out) else UNIFORM

    def advance(self, treatment: Remedy) -> None:
        """Take one step; ``finite`` becomes False if its loss or gradient is not."""
        run, model, step = self.run, self.model, self.step
        self.step += 1
        rate = run.rate * min(1.0, (step + 1) / run.warmup)
        if step >= run.start:
            rate *= run.factor * run.growth ** (step - run.start)
            grow(model, run)
        for group, one in zip(self.optimizer.param_groups, treatment.rates(rate), strict=True):
            group["lr"] = one
            group["weight_decay"] = run.decay if step >= run.start else 0.1
        tokens = next_batch(run, self.generator, step)
        with treatment.watched():
            loss = loss_of(model, tokens)
        loss = loss + treatment.penalty()
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), treatment.largest_norm(run.clip or 1.0))
        self.finite = math.isfinite(loss.item()) and math.isfinite(norm.item())
        if self.finite:
            self.optimizer.step()
            if step >= run.start:
                round_(model, self.optimizer, run)
            treatment.after()


def outcomes(run: Run) -> dict[str, Any]:
    """The step of the alarm, and the held-out loss without the fault and with each remedy."""
    losses = {NO_FAULT: Training(replace(run, start=run.steps)).finish("none")}
    training = Training(run)
    alarm = training.until_alarm()
    for remedy in REMEDIES if alarm is not None else ["none"]:
        losses[remedy] = copy.deepcopy(training).finish(remedy)
    return {"alarm": alarm, "held_out": {name: round(loss, 4) for name, loss in losses.items()}}


def run_all(path: Path) -> None:
    """Run the faults and seeds that the file does not have yet, one JSON line for each."""
    done = {(one["fault"], one["seed"]) for one in read(path)} if path.exists() else set()
    for seed in range(SEEDS):
        for fault, plain in FAULTS.items():
            if (fault, seed) not in done:
                run = replace(plain, start=BEGIN, seed=3000 + seed, steps=STEPS, batch=8)
                one = {"fault": fault, "seed": seed} | outcomes(run)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one, ensure_ascii=False) + "\n")
                print(one, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of outcomes."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(path: Path) -> str:
    """Held-out loss without a remedy by fault, and differences from it by remedy.

    Each is a mean with its standard error over seeds; differences are those of the same seed.
    """
    found = read(path)
    of = {fault: [one for one in found if one["fault"] == fault] for fault in FAULTS}
    of = {fault: lines for fault, lines in of.items() if lines}
    rows = {name: [name] for name in ("held-out loss", NO_FAULT, *REMEDIES)}
    ends = {"trainings": ["trainings"], "alarm": ["median step of the alarm"]}
    for lines in of.values():
        rows["held-out loss"].append(_mean([one["held_out"]["none"] for one in lines]))
        for name in (NO_FAULT, *REMEDIES):
            pairs = [one["held_out"] for one in lines if name in one["held_out"]]
            rows[name].append(_mean([losses[name] - losses["none"] for losses in pairs]))
        steps = [one["alarm"] for one in lines if one["alarm"] is not None]
        ends["trainings"].append(str(len(lines)))
        ends["alarm"].append(f"{np.median(steps):.0f} ({len(steps)})" if steps else "none")
    del rows["none"]
    head = [["", *of], ["---"] * (1 + len(of))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *rows.values(), *ends.values()))


def _mean(values: list[float]) -> str:
    """Mean and standard error; empty without values."""
    if not values:
        return ""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{np.mean(values):.2f} ± {error:.2f}".replace("-0.00", "0.00").replace("-", "−")
