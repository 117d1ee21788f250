"""One training of the catalogue, with every signal recorded."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from acutance_lab import texts
from benchmarks.instability.decoder import Decoder
from benchmarks.instability.runs import Run

#: Attention and weights are recorded every so many steps; the loss and the gradient's norm at each.
EVERY = 4
#: A run ends this many steps after its loss became infinite or stayed far above its least value.
AFTER = 60
#: Nats by which the smoothed loss of a diverged run exceeds its least value so far.
EXCESS = 0.5


@cache
def _text(part: Any) -> Tensor:
    return texts.read(texts.files(part)).long()


def next_batch(run: Run, generator: torch.Generator, step: int) -> Tensor:
    """Tokens (batch, length + 1) of a step; call it for one step after another."""
    length = run.shape.length + 1
    tokens = texts.sample_windows(_text("training"), length, run.batch, generator)
    if run.data == "first":
        tokens[:, 0] = 0
    if run.data == "copy":
        tokens[:, length // 2 :] = tokens[:, : length - length // 2]
    since = step - run.start
    if since < 0:
        return tokens
    if (since % run.bad_every if run.bad_every else since) < run.bad_steps:
        tokens = torch.randint(256, tokens.shape, generator=generator)
    if run.noise_growth:
        noise = torch.rand(tokens.shape, generator=generator) < run.noise_growth * since
        tokens[noise] = torch.randint(256, tokens.shape, generator=generator)[noise]
    if run.repeat_growth:
        repeated = min(run.batch, int(run.repeat_growth * since * run.batch))
        first = torch.Generator().manual_seed(run.seed)
        tokens[:repeated] = texts.sample_windows(_text("training"), length, 1, first)
    return tokens


def spectral_entropy(singular: Tensor) -> Tensor:
    """Entropy of squared singular values as shares of their sum, over its largest value."""
    share = singular.square()
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-30)
    return -torch.xlogy(share, share).sum(-1) / np.log(singular.shape[-1])


class QueryKeyUpdates:
    """Spectral entropy of each head's query-key form and of its first-order change.

    For a head with query weights A and key weights B, (width of a head, width), scores are
    x A' B y. Between two records A and B change by a and b, and the form, to first order, by
    a' B + A' b, of rank at most twice the head's width.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.before = self._weights()

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        heads = self.model.shape.heads
        return [
            tuple(w.weight.detach().unflatten(0, (heads, -1)).clone() for w in (a.query, a.key))
            for a in self.model.attention
        ]

    def __call__(self) -> Tensor:
        """(layers, heads, 3): entropy of the form and of its change, the change's relative norm."""
        now, found = self._weights(), []
        for (old_a, old_b), (a, b) in zip(self.before, now, strict=True):
            form = _product_spectrum(a, b)
            left = torch.cat([a - old_a, old_a], 1)
            change = _product_spectrum(left, torch.cat([old_b, b - old_b], 1))
            relative = change.norm(dim=-1) / form.norm(dim=-1).clamp_min(1e-30)
            found.append(
                torch.stack([spectral_entropy(form), spectral_entropy(change), relative], -1)
            )
        self.before = now
        return torch.stack(found)


def _product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of left' right for (heads, r, width) factors, (heads, r)."""
    first = torch.linalg.qr(left.transpose(-1, -2)).R
    second = torch.linalg.qr(right.transpose(-1, -2)).R
    return torch.linalg.svdvals(first @ second.transpose(-1, -2))


def train(run: Run) -> dict[str, np.ndarray]:
    """Train and return the record: arrays by name."""
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed + 1)
    model = Decoder(run.shape)
    optimizer = torch.optim.AdamW(
        model.parameters(), run.rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    updates = QueryKeyUpdates(model)
    every: dict[str, list[Any]] = {"loss": [], "grad_norm": []}
    some: dict[str, list[Any]] = {
        "step": [], "means": [], "largest": [], "sampled": [], "spectral": [],
        "curvature": [],
    }  # fmt: skip
    least, smooth, above = np.inf, None, 0
    for step in range(run.steps):
        if step == run.start:
            model.set_fault(run.fault)
            for group in optimizer.param_groups:  # AdamW takes no negative decay
                group.update(betas=run.betas, eps=run.eps, weight_decay=run.decay)
        rate = run.rate * min(1.0, (step + 1) / run.warmup if run.warmup else 1.0)
        if run.cosine:
            rate *= 0.5 + 0.5 * math.cos(math.pi * step / run.steps)
        if step >= run.start:
            if not run.fault_steps or step < run.start + run.fault_steps:
                rate *= run.factor
            rate *= run.growth ** (step - run.start)
            grow(model, run)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = next_batch(run, generator, step)
        recording = step % EVERY == 0
        model.record(recording)
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip or torch.inf)
        every["loss"].append(loss.item())
        every["grad_norm"].append(norm.item())
        if not (np.isfinite(loss.item()) and np.isfinite(norm.item())):
            break
        old = [p.detach().clone() for p in model.parameters()] if recording else []
        optimizer.step()
        if step >= run.start:
            round_(model, optimizer, run)
        if recording:
            model.record(False)
            some["step"].append(step)
            some["means"].append(torch.stack([a.means for a in model.attention]).numpy())
            some["largest"].append(torch.stack([a.largest for a in model.attention]).numpy())
            some["sampled"].append(torch.stack([a.sampled for a in model.attention]).numpy())
            some["spectral"].append(updates().numpy())
            some["curvature"].append(_curvature(model, tokens, loss.item(), old, norm, run.clip))
        smooth = loss.item() if smooth is None else 0.8 * smooth + 0.2 * loss.item()
        least = min(least, smooth)
        above = above + 1 if smooth > least + EXCESS else 0
        if above > AFTER:
            break
    record = {name: np.array(values, np.float32) for name, values in (every | some).items()}
    record["held_out"] = np.array(held_out_loss(model, run), np.float32)
    return record


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    """Mean loss of predicting each next token."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def grow(model: Decoder, run: Run) -> None:
    """Multiply the weights of head 0, the values and outputs of layer 0, or every scale."""
    for attention in model.attention:
        attention.temperature /= run.scale_growth
    attention = model.attention[0]
    if run.head_growth != 1.0:
        for weight in (attention.query.weight, attention.key.weight):
            weight[: attention.head_width] *= run.head_growth
    if run.value_growth != 1.0:
        for weight in (attention.value.weight, attention.out.weight):
            weight *= run.value_growth


@torch.no_grad()
def round_(model: Decoder, optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Round the weights or Adam's second moments to bfloat16."""
    for weight in model.parameters():
        if run.rounded == "weights":
            weight.copy_(weight.bfloat16())
        if run.rounded == "moments":
            square = optimizer.state[weight]["exp_avg_sq"]
            square.copy_(square.bfloat16())


@torch.no_grad()
def _curvature(
    model: Decoder, tokens: Tensor, loss: float, old: list[Tensor], norm: Tensor, clip: float | None
) -> float:
    """Second derivative of this batch's loss along the update: 2 (L(w + u) - L(w) - g·u) / |u|²."""
    undo = max(1.0, norm.item() / clip) if clip else 1.0
    slope, size = 0.0, 0.0
    for weight, before in zip(model.parameters(), old, strict=True):
        update = weight - before
        if weight.grad is not None:
            slope += undo * float((weight.grad * update).sum())
        size += float(update.square().sum())
    return 2 * (loss_of(model, tokens).item() - loss - slope) / max(size, 1e-30)


@torch.no_grad()
def held_out_loss(model: Decoder, run: Run) -> float:
    """Loss on 64 windows of text that is not trained on, under the run's attention."""
    generator = torch.Generator().manual_seed(0)
    model.record(False)
    length = run.shape.length + 1
    tokens = texts.sample_windows(_text("held out"), length, 64, generator)
    return loss_of(model, tokens).item()


def path_of(run: Run, folder: Path) -> Path:
    """The file of a run's record."""
    return folder / f"{run.key}.npz"


def record_of(run: Run, folder: Path) -> dict[str, np.ndarray]:
    """The run's record, from the folder if it is there; else trained and written."""
    path = path_of(run, folder)
    if path.exists():
        with np.load(path) as stored:
            return {name: stored[name] for name in stored.files}
    record = train(run)
    description = np.frombuffer(json.dumps(asdict(run)).encode(), np.uint8)
    handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(handle, "wb") as file:
        np.savez_compressed(file, run=description, **record)
    os.replace(part, path)
    return record
