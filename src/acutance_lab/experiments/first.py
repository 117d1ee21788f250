"""FIRST: is the first symbol of a string 1? Trained on short strings, asked of long ones."""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.scaling import LogN, NoScaling, Scaling
from acutance_lab.encoder import Block, Encoder
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import Claim, at_least, theorem
from acutance_lab.sampling import mean, statistics
from acutance_lab.training import Plan, fit, seeded

SOURCE = "Chiang & Cholak (2022), arXiv:2202.12172"
TEST = 1000
FAR = 10**12  # exp(f·s₁) of these models is 10⁵ at most, so float32 no longer sees the first symbol
LAWS: dict[str, Scaling] = {"none": NoScaling(), "log n": LogN(base=math.e, n_min=1)}
START = 2  # the symbol before the string, whose output answers; 0 and 1 are the string's


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
    with seeded(seed):  # positions are distinguished as start, first, any other
        model = Encoder(3, 1, width=16, heads=1, hidden=64, layers=2, law=LAWS[law], kinds=3)
    plan = Plan(f"first-{law}-{length}", run.size(400, 500), 1e-3, seed=seed)
    fit(
        model, lambda model, generator: loss(model, strings(8, length, generator)), plan,
        keep=run.checkpoint(f"{plan.name.replace(' ', '')}-{seed}"), note=run.note,
    )  # fmt: skip
    return model


@torch.no_grad()
def answers(model: Encoder, ids: Tensor) -> Tensor:
    """1 for each string (B, n + 1) that the model answers correctly, else 0; (B,) float64."""
    right = [(model(batch)[:, 0, 0] > 0) == (batch[:, 1] == 1) for batch in ids.split(16)]
    return torch.cat(right).double()


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
    answer = model(ids, torch.stack([unit, unit, n - 1 - ones, ones], 1))[:, 0, 0]
    return float(((answer > 0) == (first == 1)).double().mean())


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
    rows = (attention.law.factor(torch.tensor([ids.shape[-1]])) * scores).double()
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


@experiment(
    at_least("order", f"at n = {TEST} scaling by log n is at least as accurate as none", SOURCE),
    Claim("falls", "without it every model is at chance at a million million symbols", SOURCE),
    at_least("keeps", f"with it accuracy at n = {TEST} is 0.95 or more", SOURCE),
    theorem("dilutes", "layer 1 weighs the first symbol exp(f·s₁)/Σ exp(f·s), f = 1 or log n, with "
            "the scores of a short string", within=1e-4),
    figure=[Panel(
        Axis("symbols n", log=True), Axis("accuracy"),
        [Lines("", "n", law + ", trained at {}", by="trained at", quantity="accuracy by counts",
               where={"law": law}, hollow=law == "none", style=0) for law in LAWS],
        levels=[Level(y=0.5, name="chance")],
    )],
)  # fmt: skip
def first(run: Run) -> Iterator[Measured]:
    """Length of strings, FIRST.

    Accuracy of models trained with each law at each length, on strings of 1000 bits and more.

    Predicted: a softmax without scaling weighs the first of n symbols e^s₁/Σe^s, which falls as
    1/n, so from some n on the answer is lost; multiplied by log n the weight stays, and so does the
    answer, at n = 1000 at least.

    Figure: FIRST: what was learned on short strings lasts with log n. Mean accuracy over seeds on
    strings of n symbols. Filled: queries multiplied by log n; hollow: not. Chance is 0.5.
    """
    seeds = run.seeds(2, 5)
    reach = [round(10 ** (step / 2)) for step in range(2, 25)]
    for length in (10,) if run.quick else (10, 30, 100):
        # the same strings for both laws, so that what differs is the law
        tests = {seed: strings(run.size(64, 256), TEST, run.generator) for seed in seeds}
        drawn = {seed: run.normal(32) for seed in seeds}
        right: dict[tuple[str, int], Tensor] = {}
        for law in LAWS:
            by_counts = []
            for seed in seeds:
                model = train(run, law, length, seed)
                right[law, seed] = answers(model, tests[seed])
                by_counts.append([accuracy_by_counts(model, n, drawn[seed]) for n in reach])
                where: dict[str, Any] = {"law": law, "trained at": length, "seed": seed}
                yield from _first_symbol_weight(model, run.generator, where)
                if law == "none":
                    far = by_counts[-1][reach.index(FAR)]
                    yield "falls", "accuracy", 0.5, far, {**where, "n": FAR}
            where = {"law": law, "trained at": length}
            for n, accuracies in zip(reach, torch.tensor(by_counts).T, strict=True):
                yield untested("accuracy by counts", mean(accuracies), {**where, "n": n})
            where["n"] = TEST
            average = mean(torch.stack([right[law, seed].mean() for seed in seeds]))
            yield untested("accuracy", average, where)
            if law == "log n":
                yield "keeps", "mean accuracy", 0.95, average.value, where
        for seed in seeds:
            gain, where = mean(right["log n", seed] - right["none", seed]), {"trained at": length}
            yield "order", "gain in accuracy by log n", 0.0, gain, {**where, "seed": seed}


def _first_symbol_weight(
    model: Encoder, generator: torch.Generator, where: dict[str, Any]
) -> Iterator[Measured]:
    """Compare the first symbol's weight in a long string with one predicted from a short string."""
    short, long = (strings(32, n, generator) for n in (32, TEST))
    _, scores = weight_of_first(model, short)
    weights, _ = weight_of_first(model, long)
    for bit in (0, 1):
        few, many = short[:, 1] == bit, long[:, 1] == bit
        if few.any() and many.any():
            ones = long[many][0, 2:].sum()
            counts = torch.stack([TEST - 1 - ones, ones])
            predicted = diluted(scores[few][:1], short[few][:1], counts, LAWS[where["law"]])
            weight, at = float(weights[many][0]), {**where, "n": TEST, "first": bit}
            yield "dilutes", "weight of the first symbol", predicted, weight, at
