"""Max retrieval: name the class of the largest item, taught on 16 items at most, asked of 1024."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance.scaling import AdaptivePoly, LearnedSSMax, LogN, NoScaling
from acutance.scaling import Scaling as Law
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import GREY, Axis, Curve, Lines, Panel, Points
from acutance_lab.record import Claim, Estimate, Record, at_least, at_most
from acutance_lab.sampling import difference, mean, statistics
from acutance_lab.training import Plan, fit, seeded

SOURCE = "Veličković et al. (2024), arXiv:2410.01104"
CLASSES, TAUGHT, WIDTH = 10, 16, 64
TESTS = (16, 64, 256, 1024)
#: What is trained, and under which law each is tested.
KINDS = {
    "none": "none", "adaptive": "none", "log n after training": "none", "log n": "log n",
    "SSMax": "SSMax",
}  # fmt: skip


class Retriever(nn.Module):
    """A network for each item, one head of attention over all items, and a network on its output.

    Args:
        law: what multiplies the scores.
    """

    def __init__(self, law: Law | LearnedSSMax) -> None:
        super().__init__()
        self.law = law
        self.items = nn.Sequential(
            nn.Linear(1 + CLASSES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.answer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))

    def read(self, items: Tensor, law: Law | LearnedSSMax) -> tuple[Tensor, Tensor]:
        """Scores (B, n), times the law's factor, and logits of the classes (B, classes) of items.

        Items are (B, n, 1 + classes).
        """
        x = self.items(items)
        scores, n = self.key(x) @ self.query / math.sqrt(WIDTH), torch.tensor([items.shape[1]])
        if isinstance(law, AdaptivePoly):
            entropy = statistics(scores).entropy
            scores = scores * law.factor(n.expand(len(scores)), entropy=entropy).unsqueeze(-1)
        else:
            scores = scores * law.factor(n).reshape(-1, 1)
        output = scores.softmax(-1).unsqueeze(1) @ self.value(x)
        return scores, self.answer(output.squeeze(1))

    def forward(self, items: Tensor) -> Tensor:
        """Logits of the classes under the law that the model was built with."""
        return self.read(items, self.law)[1]


def sample(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Items (count, n, 11) with a uniform size and a random class, and the largest item's class."""
    sizes = torch.rand(count, n, 1, generator=generator)
    classes = torch.randint(CLASSES, (count, n), generator=generator)
    items = torch.cat([sizes, F.one_hot(classes, CLASSES).to(sizes.dtype)], -1)
    return items, classes.gather(1, sizes[..., 0].argmax(1, keepdim=True))[:, 0]


def train(run: Run, kind: str, seed: int) -> Retriever:
    """Train a model on 1 to 16 items; ``kind`` names its scaling law, ``seed`` sets its weights."""
    with seeded(seed):
        law = {"none": NoScaling(), "log n": LogN(base=math.e, n_min=2)}.get(kind)
        model = Retriever(LearnedSSMax(1) if law is None else law)
    plan = Plan(
        f"max_retrieval-{kind}", run.size(800, 3000), 2e-3, seed=seed, warm=50, fall=0.5, clip=1.0
    )

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        n = int(torch.randint(1, TAUGHT + 1, (1,), generator=generator))
        items, classes = sample(64, n, generator)
        return F.cross_entropy(model(items), classes)

    keep = run.checkpoint(f"{plan.name.replace(' ', '')}-{seed}")
    fit(model, loss, plan, keep=keep, note=run.note)
    return model


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
    """The model's scores of every class at evenly spaced sizes, (classes · sizes,) float64."""
    size = (torch.arange(sizes) + 0.5) / sizes
    kinds = torch.eye(CLASSES).unsqueeze(1).expand(-1, sizes, -1)
    items = torch.cat([size.expand(CLASSES, -1).unsqueeze(-1), kinds], -1)
    return model.read(items, NoScaling())[0].double().flatten()


def answers(
    model: Retriever, law: Law | LearnedSSMax, items: Tensor, classes: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether each answer under a law is right, 1 or 0, and the entropy of each row; (B,) each."""
    right, H = [], []
    for batch, truth in zip(items.split(64), classes.split(64), strict=True):
        scores, logits = model.read(batch, law)
        right.append((logits.argmax(-1) == truth).double())
        H.append(statistics(scores.double()).entropy)
    return torch.cat(right), torch.cat(H)


def _even_weights(record: Record) -> Iterator[Curve]:
    yield Curve("log n, even weights", Points(TESTS, [math.log(n) for n in TESTS]), style=GREY)


_N = Axis("items n", log=True, ticks={n: str(n) for n in TESTS})


@experiment(
    at_least("order", "trained with log n or SSMax it is no worse than with adaptive temperature"),
    at_least("adapts", "adaptive temperature, on the same weights, is no worse than none", SOURCE),
    at_most("alike", "SSMax and log n differ by no more than 0.05"),
    at_least("falls", "accuracy without scaling falls from 16 items to 1024", SOURCE),
    Claim("spreads", "scores are bounded, so H without scaling grows as log n: from 256 to 1024 by "
          "what independent items give, log 4 in the limit", SOURCE),
    figure=[
        Panel(_N, Axis("accuracy"), [Lines("", "n", "{}", by="law", quantity="accuracy")],
              "accuracy"),
        Panel(_N, Axis("entropy H, nat"),
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
        models = {kind: train(run, kind, seed) for kind in dict.fromkeys(KINDS.values())}
        right: dict[tuple[str, int], Tensor] = {}  # 1 where the answer is right
        entropies: dict[tuple[str, int], Estimate] = {}
        for n in TESTS:
            # of 8192, 4 standard errors of "alike" are 0.02
            items, classes = sample(run.size(768, 8192), n, run.generator)
            for kind, trained in KINDS.items():
                model = models[trained]
                right[kind, n], H = answers(model, after.get(kind, model.law), items, classes)
                entropies[kind, n] = mean(H)
                where: dict[str, Any] = {"law": kind, "seed": seed, "n": n}
                yield untested("accuracy", mean(right[kind, n]), where)
                yield untested("mean H, nat", entropies[kind, n], where)
        grown = difference(entropies["none", 1024], entropies["none", 256])
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
