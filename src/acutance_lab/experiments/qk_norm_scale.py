"""Query-key normalisation and the scale after it: small decoders trained at several scales."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance import probe, theory
from acutance.nn import rotate
from acutance_lab import texts
from acutance_lab.experiment import Experiment, Run
from acutance_lab.figure import Axis, Curve, Level, Page, Panel, measured
from acutance_lab.record import Claim, Estimate, Record, Row, Where, untested_row
from acutance_lab.training import Plan, fit, seeded

GEMMA = "huggingface/transformers, issue 45676"
NANOCHAT = "karpathy/nanochat, gpt.py: q and k times 1.2 after RMSNorm"
LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 2, 3
HEAD = WIDTH // HEADS
LESS_UNIT, GRADIENTS = "loss less that of 1/√d, nat", "log ratio of first gradients"
UNIT, SHARPER, ONE = 1.0, 1.44, math.sqrt(HEAD)  # scale 1/√d, nanochat's, and 1
HELD_OUT = 128  # windows that every model is evaluated on

ENTROPY = Claim(
    "entropy", "before training, scale 1 after QK-norm has the entropy of normal logits of "
    "deviation √d", GEMMA, "does not hold", within=0.05,
)  # fmt: skip
ONE_HOT = Claim(
    "one_hot", "a decoder trained with scale 1 after QK-norm has a higher loss than with 1/√d",
    GEMMA, relation=">=",
)  # fmt: skip
EXPLODES = Claim(
    "explodes", "with scale 1 the first gradient of the query and key projections is larger than "
    "with 1/√d", GEMMA, relation=">=",
)  # fmt: skip
SHARPENS = Claim(
    "sharpens", "a logit deviation of 1.44 has no more loss than 1", NANOCHAT, relation="<="
)
GAIN = Claim(
    "gain", "trained gains after the normalisation make up for scale 1: no more loss than 1/√d "
    "without gains", relation="<=",
)  # fmt: skip


class Attention(nn.Module):
    """Causal attention on queries and keys of root mean square 1.

    Args:
        deviation: of the logits of queries and keys in random directions: the scale times √d.
        gains: whether the normalisations have trained gains, which start at 1.
    """

    def __init__(self, deviation: float, *, gains: bool) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(
            [nn.RMSNorm(HEAD, eps=1e-6, elementwise_affine=gains) for _ in range(2)]
        )
        self.scale = deviation / math.sqrt(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, width) to (B, n, width)."""
        batch, n, _ = x.shape
        query, key, value = self.inputs(x).view(batch, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        query, key = (rotate(norm(x)) for norm, x in zip(self.norms, (query, key), strict=True))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return self.output(out.transpose(1, 2).reshape(batch, n, WIDTH))  # type: ignore[no-any-return]

    def gradient(self) -> float:
        """Norm of the gradient of the query and key projections."""
        gradient = self.inputs.weight.grad
        assert gradient is not None
        return float(gradient[: 2 * WIDTH].norm())


class Decoder(nn.Module):
    """A pre-norm decoder of bytes with tied embeddings.

    Args:
        deviation, gains: of :class:`Attention`.
    """

    def __init__(self, deviation: float, *, gains: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = [Attention(deviation, gains=gains) for _ in range(LAYERS)]
        self.attention = nn.ModuleList(self.layers)
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte (B, n, 256), from bytes (B, n)."""
        x = _norm(self.embedding(ids))
        for attention, network in zip(self.layers, self.networks, strict=True):
            x = x + attention(_norm(x))
            x = x + network(_norm(x))
        return F.linear(_norm(x), self.embedding.weight)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), eps=1e-6)


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Negative log probability of each byte after the first, in nats: (B, L + 1) to (B, L)."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


class Contender(NamedTuple):
    """One way to scale.

    Attributes:
        deviation: of the logits before training.
        gains: whether the normalisations have trained gains.
    """

    deviation: float
    gains: bool = False

    @property
    def where(self) -> Where:
        """The condition of this model's rows in the record."""
        return {"logit_std": round(self.deviation, 2), "gains": "trained" if self.gains else "none"}


class Trained(NamedTuple):
    """What one training shows.

    Attributes:
        entropy: of the last row of each head before training, mean over windows, in nats.
        first: norm of the gradient of all query and key projections at the initial weights.
        loss: on the held-out windows after training, in nats for a byte.
    """

    entropy: float
    first: float
    loss: float


def contenders(run: Run) -> list[Contender]:
    """The models to compare: several logit deviations without trained gains, two with them."""
    deviations = (UNIT, ONE) if run.quick else (0.5, UNIT, SHARPER, 2.0, 4.0, ONE)
    gains = [] if run.quick else [Contender(UNIT, True), Contender(ONE, True)]
    return [*map(Contender, deviations), *gains]


def train(run: Run, contender: Contender, seed: int, held_out: Tensor, text: Tensor) -> Trained:
    """Train one decoder; the batches depend on the seed alone."""
    with seeded(seed):
        model = Decoder(contender.deviation, gains=contender.gains)
    batch = held_out[:16]
    last = torch.zeros(16, LENGTH, dtype=torch.bool)
    last[:, -1] = True
    with torch.no_grad(), probe(model, metrics=["entropy"], rows=last) as opened:
        model(batch[:, :-1])
    entropy = float(opened.summary().mean("entropy").mean())
    with torch.enable_grad():
        losses(model, batch).mean().backward()
    first = math.hypot(*(layer.gradient() for layer in model.layers))

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        return losses(model, texts.sample_windows(text, LENGTH + 1, 16, generator)).mean()

    steps = run.size(4, 300)
    name = f"qk-{contender.deviation:.3g}{'-gains' if contender.gains else ''}-{seed}"
    plan = Plan(
        "qk_norm_scale", steps, 3e-3, seed=seed, warm=steps // 10, fall=0.5, decay=0.1, clip=1.0
    )
    fit(model, loss, plan, keep=run.checkpoint(name), note=run.note)
    with torch.no_grad():
        parts = [losses(model, part).mean(1) for part in held_out.split(32)]
    return Trained(entropy, first, float(torch.cat(parts).mean()))


def between_seeds(values: Sequence[float]) -> Estimate:
    """The mean over trainings, with its standard error from seed to seed."""
    x = torch.tensor(values, dtype=torch.float64)
    return Estimate(float(x.mean()), float(x.std()) / math.sqrt(len(values)))


def measure(run: Run) -> Iterator[Row]:
    """Train every contender from the same seeds, on the same batches."""
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(3000 + run.seed)
    windows = texts.sample_windows(held_out, LENGTH + 1, run.size(32, HELD_OUT), generator)
    yield from rows_of(
        {
            contender: [train(run, contender, seed, windows, training) for seed in run.seeds(3, 4)]
            for contender in contenders(run)
        }
    )


def rows_of(trained: Mapping[Contender, Sequence[Trained]]) -> Iterator[Row]:
    """For each contender, rows of its loss (relative to 1/√d without gains), entropy, gradient."""
    for contender, runs in trained.items():
        pairs = list(zip(runs, trained[Contender(UNIT)], strict=True))
        change = between_seeds([own.loss - unit.loss for own, unit in pairs])
        growth = between_seeds([math.log(own.first / unit.first) for own, unit in pairs])
        entropy = between_seeds([own.entropy for own in runs])
        where = contender.where
        yield untested_row("loss, nat", between_seeds([own.loss for own in runs]), where)
        yield untested_row(LESS_UNIT, change, where)
        yield untested_row(GRADIENTS, growth, where)
        yield untested_row("entropy before training, nat", entropy, where)
        if contender == Contender(SHARPER):
            yield SHARPENS.row(LESS_UNIT, 0.0, change, where)
        elif contender == Contender(ONE):
            exact = float(theory.expected_entropy_gauss(LENGTH, ONE))
            yield ONE_HOT.row(LESS_UNIT, 0.0, change, where)
            yield EXPLODES.row(GRADIENTS, 0.0, growth, where)
            yield ENTROPY.row("entropy before training, nat", exact, entropy, where)
        elif contender == Contender(ONE, True):
            yield GAIN.row(LESS_UNIT, 0.0, change, where)


def _by_gains(quantity: str) -> Callable[[Record], Iterator[Curve]]:
    def curves(record: Record) -> Iterator[Curve]:
        for name, gains in (("no gains", "none"), ("trained gains", "trained")):
            points = measured(record.untested(quantity, gains=gains), "logit_std", bars=True)
            yield Curve(name, points, points)

    return curves


_DEVIATION = Axis(
    "deviation of the logits before training", log=True, ticks=(0.5, 1, 1.44, 2, 4, 8)
)
EXPERIMENT = Experiment(
    "qk_norm_scale", "query-key normalisation and the scale after it",
    "with heads 64 wide, scale 1 after QK-norm gives logits of deviation 8 and nearly "
    "one-hot rows; training then ends at a higher loss, which trained gains make up for; 1.44 in "
    "place of 1 costs nothing",
    (EXPLODES, ONE_HOT, SHARPENS, GAIN, ENTROPY), measure,
    Page(
        "After QK-norm the scale still matters",
        f"Decoders of bytes trained on windows of {LENGTH}, heads {HEAD} wide, all else the same. "
        "Deviation 1 is the scale 1/√d, 8 is the scale 1. Bars: standard errors between seeds.",
        Panel(
            _DEVIATION, Axis("held-out loss less that of 1/√d, nat"), _by_gains(LESS_UNIT), "loss",
            [Level(y=0.0)],
        ),
        Panel(
            _DEVIATION, Axis("log of the gradient's norm over that of 1/√d"), _by_gains(GRADIENTS),
            "first gradient of queries and keys", [Level(y=0.0)],
        ),
    ),
    full_only=("one_hot", "sharpens", "gain"),
)  # fmt: skip
