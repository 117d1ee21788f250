"""Small tasks, trained on short sequences and asked of long ones, with and without log n."""

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance.scaling import AdaptivePoly, AnyScaling, LearnedSSMax, LogN, NoScaling, Scaling
from acutance_lab.encoder import Attention, Encoder
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import GREY, Axis, Curve, Level, Lines, Panel, Points
from acutance_lab.record import Claim, Estimate, Record, at_least, at_most, theorem
from acutance_lab.sampling import mean, statistics
from acutance_lab.training import Plan, fit

CHIANG = "Chiang & Cholak (2022), arXiv:2202.12172"
TEST = 1000
FAR = 10**12  # exp(f·s₁) of these models is 10⁵ at most, so float32 no longer sees the first symbol
LAWS: dict[str, Scaling] = {"none": NoScaling(), "log n": LogN(base=math.e, n_min=1)}
START = 2  # the symbol before the string, whose output answers; 0 and 1 are the string's


def strings(count: int, n: int, generator: torch.Generator) -> Tensor:
    """``count`` strings of a start symbol and n random bits, (count, n + 1) int64."""
    ids = torch.randint(2, (count, n + 1), generator=generator)
    ids[:, 0] = START
    return ids


def train_first(run: Run, law: str, length: int, seed: int) -> Encoder:
    """Train a model of 2 layers, 1 head and width 16 on strings of ``length`` bits.

    Args:
        run: gives the size and the directory of checkpoints.
        law: name of the scaling law in :data:`LAWS` that its attention uses.
        length: n of the training strings.
        seed: of weights and strings.
    """

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        ids = strings(8, length, generator)
        answers = model(ids)[:, 0, 0]
        return F.binary_cross_entropy_with_logits(answers, (ids[:, 1] == 1).to(answers.dtype))

    # positions are distinguished as start, first, any other
    shape: dict[str, Any] = {"width": 16, "heads": 1, "hidden": 64, "layers": 2, "kinds": 3}
    plan = Plan(f"first-{law}-{length}", run.size(400, 500), 1e-3, seed=seed, clip=math.inf)
    make = partial(Encoder, 3, 1, **shape, law=LAWS[law])
    return fit(make, loss, plan, **run.saving(f"{plan.name}-{seed}"))


@torch.no_grad()
def first_answers(model: Encoder, ids: Tensor) -> Tensor:
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
def scores_of_start(model: Encoder, ids: Tensor) -> Tensor:
    """Scores of the start symbol's row in the first layer, (B, n + 1), without the law's factor."""
    attention: Attention = cast("Any", model.layers[0])[0]
    query, key, _ = attention.queries_keys_values(model.embed(ids))
    return (query[:, 0, :1] @ key[:, 0].mT)[:, 0] / math.sqrt(query.shape[-1])


@experiment(
    at_least("order", f"at n = {TEST} scaling by log n is at least as accurate as none", CHIANG),
    Claim("falls", "without it every model is at chance at a million million symbols", CHIANG),
    at_least("keeps", f"with it accuracy at n = {TEST} is 0.95 or more", CHIANG),
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
                model = train_first(run, law, length, seed)
                right[law, seed] = first_answers(model, tests[seed])
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
    """Compare the first symbol's weight in a long string with one predicted from a short string.

    The other bits of the long string have the mean scores that 0 and 1 have in the short one.
    """
    short, long = (strings(32, n, generator) for n in (32, TEST))
    few, many = (scores_of_start(model, ids) for ids in (short, long))
    factor = LAWS[where["law"]].factor(torch.tensor([TEST + 1]))
    for first in sorted({*short[:, 1].tolist()} & {*long[:, 1].tolist()}):
        at, there = (int((ids[:, 1] == first).nonzero()[0]) for ids in (short, long))
        others = [few[at, 2:][short[at, 2:] == bit].mean() for bit in (0, 1)]
        counts = [1, 1, *((long[there, 2:] == bit).sum() for bit in (0, 1))]
        row = factor.double() * torch.stack([few[at, 0], few[at, 1], *others]).double()
        predicted = (row + torch.tensor(counts).double().log()).softmax(0)[1]
        measured = (factor * many[there]).double().softmax(0)[1]
        condition = {**where, "n": TEST, "first": first}
        yield "dilutes", "weight of the first symbol", predicted, measured, condition


VELICKOVIC = "Veličković et al. (2024), arXiv:2410.01104"
CLASSES, TAUGHT, WIDTH = 10, 16, 64
TESTS = (16, 64, 256, 1024)
#: What is trained; in between, laws that are put on the model trained without one.
KINDS = ("none", "adaptive", "log n after training", "log n", "SSMax")


class Retriever(nn.Module):
    """A network for each item, one head of attention over all items, and a network on its output.

    Args:
        law: what multiplies the scores.
    """

    def __init__(self, law: AnyScaling) -> None:
        super().__init__()
        self.law = law
        self.items = nn.Sequential(
            nn.Linear(1 + CLASSES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.answer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled scores (B, n) and logits of the classes (B, classes) of items (B, n, 11)."""
        x = self.items(items)
        scores, n = self.key(x) @ self.query / math.sqrt(WIDTH), torch.tensor([items.shape[1]])
        if isinstance(self.law, AdaptivePoly):
            entropy = statistics(scores).entropy
            factor = self.law.factor(n.expand(len(scores)), entropy=entropy)
        else:
            factor = self.law.factor(n)
        scores = scores * factor.reshape(-1, 1)
        output = scores.softmax(-1).unsqueeze(1) @ self.value(x)
        return scores, self.answer(output.squeeze(1))


def sample(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Items (count, n, 11) with a uniform size and a random class, and the largest item's class."""
    sizes = torch.rand(count, n, 1, generator=generator)
    classes = torch.randint(CLASSES, (count, n), generator=generator)
    items = torch.cat([sizes, F.one_hot(classes, CLASSES).to(sizes.dtype)], -1)
    return items, classes.gather(1, sizes[..., 0].argmax(1, keepdim=True))[:, 0]


def train_retriever(run: Run, kind: str, seed: int) -> Retriever:
    """Train a model on 1 to 16 items; ``kind`` names its scaling law, ``seed`` sets its weights."""
    laws: dict[str, AnyScaling] = {"none": NoScaling(), "log n": LogN(base=math.e, n_min=2)}
    make = partial(Retriever, laws.get(kind) or LearnedSSMax(1))

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        n = int(torch.randint(1, TAUGHT + 1, (1,), generator=generator))
        items, classes = sample(64, n, generator)
        return F.cross_entropy(model(items)[1], classes)

    plan = Plan(f"max_retrieval-{kind}", run.size(800, 3000), 2e-3, seed=seed, warm=50, fall=0.5)
    return fit(make, loss, plan, **run.saving(f"{plan.name}-{seed}"))


def expected_entropy(scores: Tensor, n: int) -> float:
    """Mean entropy in nat of a row of n independent items.

    With w = e^s, S the sum of n of them and φ(t) = E e^(−tw), it is E log S − E[Σ w s/S], where
    E log S = ∫ (e^(−t) − φ(t)^n) dt/t and E[Σ w s/S] = n ∫ E[w s e^(−tw)] φ(t)^(n−1) dt.

    Args:
        scores: equally likely scores of one item, (items,) float64.
        n: number of items in the row.
    """
    logits = scores - scores.max()
    w, u = logits.exp(), torch.linspace(-25, 25, 1001, dtype=torch.float64)  # u = log t
    damped = torch.exp(-u.exp()[:, None] * w)
    phi, psi = damped.mean(1), (damped * w * logits).mean(1)
    held = n * psi * phi ** (n - 1) * u.exp()
    return float(torch.trapezoid(torch.exp(-u.exp()) - phi**n - held, u))


def scores_of_items(model: Retriever, sizes: int = 2000) -> Tensor:
    """A model's scores of every class at evenly spaced sizes, (classes · sizes,) float64."""
    size = (torch.arange(sizes) + 0.5) / sizes
    kinds = torch.eye(CLASSES).unsqueeze(1).expand(-1, sizes, -1)
    items = torch.cat([size.expand(CLASSES, -1).unsqueeze(-1), kinds], -1)
    scores: Tensor = model(items)[0]
    return scores.double().flatten()


def answers(model: Retriever, items: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each answer is right, 1 or 0, and the entropy of each row; (B,) each."""
    right, H = [], []
    for batch, truth in zip(items.split(64), classes.split(64), strict=True):
        scores, logits = model(batch)
        right.append((logits.argmax(-1) == truth).double())
        H.append(statistics(scores.double()).entropy)
    return torch.cat(right), torch.cat(H)


def _even_weights(record: Record) -> Iterator[Curve]:
    yield Curve("log n, even weights", Points(TESTS, [math.log(n) for n in TESTS]), style=GREY)


_ITEMS = Axis("items n", log=True, ticks={n: str(n) for n in TESTS})


@experiment(
    at_least("order", "trained with log n or SSMax, a model is at least as accurate as one trained "
             "without scaling is with adaptive temperature"),
    at_least("adapts", "adaptive temperature makes a trained model no less accurate", VELICKOVIC),
    at_most("alike", "the accuracies with SSMax and with log n differ by at most 0.05"),
    at_least("falls", "accuracy without scaling falls from 16 items to 1024", VELICKOVIC),
    Claim("spreads", "scores are bounded, so H without scaling grows as log n: from 256 to 1024 by "
          "what independent items give, log 4 in the limit", VELICKOVIC),
    figure=[
        Panel(_ITEMS, Axis("accuracy"), [Lines("", "n", "{}", by="law", quantity="accuracy")],
              "accuracy"),
        Panel(_ITEMS, Axis("entropy H, nat"),
              [Lines("", "n", by="law", quantity="mean H, nat"), _even_weights], "entropy"),
    ],
    full_only=("alike",),
)  # fmt: skip
@torch.no_grad()
def max_retrieval(run: Run) -> Iterator[Measured]:
    """The largest of many items.

    Accuracy and entropy of models trained with each law, for up to 64 times the trained n.

    Predicted: scores of bounded items spread over n: without scaling H grows from 256 items to 1024
    by what independent items give, some log 4, and accuracy falls; adaptive temperature helps some,
    training with a factor of log n or with SSMax more, both alike.

    Figure: Taught on 16 items at most, the largest of many is found with a scale that grows. Means
    over seeds. Adaptive temperature and 'log n after training' are put on the model trained without
    scaling.
    """
    after = {"adaptive": AdaptivePoly(), "log n after training": LogN(train_length=16, n_min=16)}
    for seed in run.seeds(1, 3):
        models = {kind: train_retriever(run, kind, seed) for kind in KINDS if kind not in after}
        for kind, law in after.items():
            models[kind] = copy.copy(models["none"])
            models[kind].law = law
        right: dict[tuple[str, int], Tensor] = {}  # 1 where the answer is right
        entropies: dict[tuple[str, int], Estimate] = {}
        for n in TESTS:
            # of 8192, 4 standard errors of "alike" are 0.02
            items, classes = sample(run.size(768, 8192), n, run.generator)
            for kind in KINDS:
                right[kind, n], H = answers(models[kind], items, classes)
                entropies[kind, n] = mean(H)
                where: dict[str, Any] = {"law": kind, "seed": seed, "n": n}
                yield untested("accuracy", mean(right[kind, n]), where)
                yield untested("mean H, nat", entropies[kind, n], where)
        grown = entropies["none", 1024] - entropies["none", 256]
        scores = scores_of_items(models["none"])
        expected = expected_entropy(scores, 1024) - expected_entropy(scores, 256)
        yield "spreads", "H at 1024 − H at 256, nat", expected, grown, {"seed": seed}
        lost = float((right["none", 16] - right["none", 1024]).mean())
        yield "falls", "accuracy at 16 − accuracy at 1024", 0.1, lost, {"seed": seed}
        for n in (256, 1024):
            where = {"seed": seed, "n": n}
            gain = mean(right["adaptive", n] - right["none", n])
            yield "adapts", "accuracy, adaptive − none", 0.0, gain, where
            for kind in ("log n", "SSMax"):
                gain = mean(right[kind, n] - right["adaptive", n])
                yield "order", "accuracy − that of adaptive", 0.0, gain, {**where, "law": kind}
            apart = mean(right["SSMax", n] - right["log n", n])
            apart = apart._replace(value=abs(apart.value))
            yield "alike", "accuracy, |SSMax − log n|", 0.05, apart, where
