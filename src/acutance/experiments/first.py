"""FIRST: is the first symbol of a string 1? Trained on short strings, asked of long ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.experiments.harness.experiment import Experiment, Run, mean, statistics
from acutance.experiments.harness.record import Claim, Record, Row, Where, untested_row
from acutance.experiments.models.fitting import Plan, fit
from acutance.experiments.models.small import Block, Encoder, seeded
from acutance.report import plot_style
from acutance.scaling import LogN, NoScaling, Scaling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Chiang & Cholak (2022), arXiv:2202.12172"
TEST = 1000
FAR = 10**12  # exp(f·s₁) of these models is 10⁵ at most, so float32 no longer sees the first symbol
LAWS: dict[str, Scaling] = {"none": NoScaling(), "log n": LogN(base=math.e, n_min=1)}
START = 2  # the symbol before the string, whose output answers; 0 and 1 are the string's

ORDER = Claim(
    "order", f"at n = {TEST} scaling by log n is at least as accurate as none", SOURCE,
    relation=">=",
)  # fmt: skip
FALLS = Claim(
    "falls", "without it every model is at chance at a million million symbols", SOURCE,
)  # fmt: skip
KEEPS = Claim("keeps", f"with it accuracy at n = {TEST} is 0.95 or more", SOURCE, relation=">=")
DILUTES = Claim(
    "dilutes", "layer 1 weighs the first symbol exp(f·s₁)/Σ exp(f·s), f = 1 or log n, "
    "with the scores of a short string", within=1e-4, theorem=True,
)  # fmt: skip


def strings(count: int, n: int, generator: torch.Generator) -> Tensor:
    """``count`` strings of a start symbol and n random bits, (count, n + 1) int64."""
    ids = torch.randint(2, (count, n + 1), generator=generator)
    ids[:, 0] = START
    return ids


def loss(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the model's answers to "is the first bit 1?", in nats."""
    answers = model(ids)[:, 0, 0]
    return F.binary_cross_entropy_with_logits(answers, (ids[:, 1] == 1).to(answers.dtype))


def train(run: Run, law: str, length: int, seed: int) -> Encoder:
    """Train a model of 2 layers, 1 head and width 16 on strings of ``length`` bits.

    Args:
        run: gives the size and the directory of checkpoints.
        law: name of the scaling law in :data:`LAWS` that its attention uses.
        length: n of the training strings.
        seed: of weights and strings.
    """
    with seeded(seed):
        model = Encoder(
            3, 1, width=16, heads=1, hidden=64, layers=2, law=LAWS[law], kinds=3
        )  # positions are distinguished as start, first, any other
    plan = Plan(f"first-{law}-{length}", run.size(400, 500), 1e-3, seed=seed)
    fit(
        model, lambda model, generator: loss(model, strings(8, length, generator)), plan,
        keep=run.checkpoint(f"{plan.name.replace(' ', '')}-{seed}"), note=run.note,
    )  # fmt: skip
    return model


@torch.no_grad()
def answers(model: Encoder, ids: Tensor) -> Tensor:
    """1 for each string (B, n + 1) that the model answers correctly, else 0; (B,) float64."""
    parts = [(model(part)[:, 0, 0] > 0) == (part[:, 1] == 1) for part in ids.split(16)]
    return torch.cat(parts).double()


@torch.no_grad()
def accuracy_by_counts(model: Encoder, n: int, drawn: Tensor) -> float:
    """Share of strings of n bits that the model answers correctly, for n of any size.

    The model sees only four kinds of tokens: start, first bit, other 0, other 1. So each string is
    replaced by one token of each kind, with its number of occurrences.

    Args:
        model: the model.
        n: bits of a string.
        drawn: (pairs,), standard normal numbers that set how many of the other bits are 1, as a
            normal approximation of the binomial distribution. Each makes two strings, with first
            bit 0 and 1, so a model that does not see the first bit scores exactly one half.
    """
    first = torch.arange(2).repeat(len(drawn))
    spread = math.sqrt(n - 1) / 2 * drawn.repeat_interleave(2)
    ones = ((n - 1) / 2 + spread).round().clamp(1, n - 2)
    ids = torch.tensor([[START, 0, 0, 1]]).repeat(len(first), 1)
    ids[:, 1] = first
    unit = torch.ones_like(ones)
    found = model(ids, torch.stack([unit, unit, n - 1 - ones, ones], 1))[:, 0, 0]
    return float(((found > 0) == (first == 1)).double().mean())


@torch.no_grad()
def weight_of_first(model: Encoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the start symbol to the first bit, in the first layer.

    Returns:
        The weight on the first bit (B,), and all scores of that row (B, n + 1) without the law's
        factor.
    """
    attention = cast("Block", model.blocks[0]).attention
    query, key, _ = attention.queries_keys_values(model.embed(ids))
    scores = (query[:, 0, :1] @ key[:, 0].mT)[:, 0] / math.sqrt(query.shape[-1])
    factor = attention.law.factor(torch.tensor([ids.shape[-1]]))
    rows = (factor * scores).double()
    return (rows[:, 1] - statistics(rows).lse).exp(), scores


def diluted(scores: Tensor, ids: Tensor, counts: Tensor, law: Scaling) -> Tensor:
    """Predict the first bit's weight in a long string from the scores of a short one.

    Args:
        scores: of the answering row of short strings, (B, n + 1), without the law's factor.
        ids: the short strings, (B, n + 1).
        counts: (2,), how many of the other bits of the long string are 0 and 1.
        law: scales the scores.

    Returns:
        The weight, (B,).
    """
    factor = law.factor(torch.tensor([int(counts.sum()) + 2])).double()
    kinds = [scores[:, 2:][ids[:, 2:] == bit].mean().double() for bit in (0, 1)]
    scores = scores.double()
    rows = torch.stack([scores[:, 0], scores[:, 1], *(kind.expand(len(ids)) for kind in kinds)], 1)
    many = torch.cat([torch.ones(2), counts.float()]).double()
    return (factor * rows + many.log()).softmax(1)[:, 1]


def measure(run: Run) -> Sequence[Row]:
    """Accuracy of models trained with each law at each length, on strings of 1000 bits and more."""
    rows, generator = [], run.generator
    lengths = (10,) if run.quick else (10, 30, 100)
    seeds = [run.seed * 100 + step for step in range(run.size(2, 5))]
    reach = [round(10 ** (step / 2)) for step in range(2, 25)]
    for length in lengths:
        # the same strings for both laws, so that what differs is the law
        tests = {seed: strings(run.size(64, 256), TEST, generator) for seed in seeds}
        drawn = {seed: run.normal(32) for seed in seeds}
        found: dict[tuple[str, int], Tensor] = {}
        for law in LAWS:
            curves = []
            for seed in seeds:
                model = train(run, law, length, seed)
                found[law, seed] = answers(model, tests[seed])
                curves.append([accuracy_by_counts(model, n, drawn[seed]) for n in reach])
                where: Where = {"law": law, "trained at": length, "seed": seed}
                rows += _first_symbol_weight(model, generator, where)
                if law == "none":
                    far = where | {"n": FAR}
                    rows.append(FALLS.row("accuracy", 0.5, curves[-1][reach.index(FAR)], far))
            for n, values in zip(reach, torch.tensor(curves).T, strict=True):
                at: Where = {"law": law, "trained at": length, "n": n}
                rows.append(untested_row("accuracy by counts", mean(values), at))
            at = {"law": law, "trained at": length, "n": TEST}
            average = mean(torch.stack([found[law, seed].mean() for seed in seeds]))
            rows.append(untested_row("accuracy", average, at))
            if law == "log n":
                rows.append(KEEPS.row("mean accuracy", 0.95, average.value, at))
        for seed in seeds:
            gain = mean(found["log n", seed] - found["none", seed])
            at = {"trained at": length, "seed": seed}
            rows.append(ORDER.row("gain in accuracy by log n", 0.0, gain, at))
    return rows


def _first_symbol_weight(model: Encoder, generator: torch.Generator, where: Where) -> list[Row]:
    """Compare the first symbol's weight in a long string with one predicted from a short string."""
    rows = []
    short, long = (strings(32, n, generator) for n in (32, TEST))
    _, scores = weight_of_first(model, short)
    weights, _ = weight_of_first(model, long)
    law = LAWS[str(where["law"])]
    for bit in (0, 1):
        one, same = short[short[:, 1] == bit][:1], long[:, 1] == bit
        if not len(one) or not same.any():
            continue
        ones = long[same][:1, 2:].sum()
        counts = torch.stack([TEST - 1 - ones, ones])
        predicted = diluted(scores[short[:, 1] == bit][:1], one, counts, law)
        at = where | {"n": TEST, "first": bit}
        quantity = "weight of the first symbol"
        rows.append(DILUTES.row(quantity, float(predicted), float(weights[same][0]), at))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Accuracy at FIRST against the length n of the strings, with log n and without a law."""
    own = [row for row in record.rows if row.quantity.startswith("accuracy by")]
    lengths = list(dict.fromkeys(int(row.condition["trained at"]) for row in own))
    figure, [axes] = plot_style.new_figure(
        "FIRST: what was learned on short strings lasts with log n",
        "Mean accuracy over seeds on strings of n symbols. Filled: queries "
        "multiplied by log n; hollow: not. Chance is 0.5.",
        theme=theme,
    )
    for length, curve in zip(lengths, plot_style.curves(len(lengths), theme), strict=True):
        for law, hollow in (("none", True), ("log n", False)):
            line = [r for r in own if r.condition["trained at"] == length]
            line = [r for r in line if r.condition["law"] == law]
            x, y = [r.condition["n"] for r in line], [r.measured for r in line]
            plot_style.draw_line(axes, x, y, curve)
            plot_style.draw_marks(axes, x, y, curve, f"{law}, trained at {length}", hollow=hollow)
    plot_style.reference(axes, theme, y=0.5, name="chance")
    axes.set_xscale("log")
    axes.set_ylim(0.42, 1.04)
    plot_style.label(axes, x="symbols n", y="accuracy")
    plot_style.legend(axes, theme, where="center right")
    return figure


EXPERIMENT = Experiment(
    name="first",
    title="length of strings, FIRST",
    prediction="a softmax without scaling weighs the first of n symbols e^s₁/Σe^s, which falls "
    "as 1/n, so from some n on the answer is lost; multiplied by log n the weight stays, and so "
    f"does the answer, at n = {TEST} at least",
    claims=(ORDER, FALLS, KEEPS, DILUTES),
    measure=measure,
    draw=draw,
)
