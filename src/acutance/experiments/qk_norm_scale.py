"""Query-key normalisation and the scale after it: small decoders trained at several scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where, untested_row
from acutance.experiments.models import texts
from acutance.experiments.models.fitting import Plan, fit
from acutance.experiments.models.small import seeded
from acutance.nn import rotate
from acutance.probing.open_probe import probe
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GEMMA = "huggingface/transformers, issue 45676"
NANOCHAT = "karpathy/nanochat, gpt.py: q and k times 1.2 after RMSNorm"
LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 2, 3
HEAD = WIDTH // HEADS
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
        query, key = (
            rotate(norm(part)) for norm, part in zip(self.norms, (query, key), strict=True)
        )
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
    some = (UNIT, ONE) if run.quick else (0.5, UNIT, SHARPER, 2.0, 4.0, ONE)
    gains = [] if run.quick else [Contender(UNIT, True), Contender(ONE, True)]
    return [*(Contender(one) for one in some), *gains]


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
    first = math.hypot(*(float(one.gradient()) for one in model.layers))

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        return losses(model, texts.sample_windows(text, LENGTH + 1, 16, generator)).mean()

    steps = run.size(4, 300)
    name = f"qk-{contender.deviation:.3g}{'-gains' if contender.gains else ''}-{seed}"
    plan = Plan(
        "qk_norm_scale", steps, 3e-3, seed=seed, warm=steps // 10, fall=0.5, decay=0.1, clip=1.0
    )
    with torch.enable_grad():
        fit(model, loss, plan, keep=run.checkpoint(name), note=run.note)
    with torch.no_grad():
        parts = [losses(model, part).mean(1) for part in held_out.split(32)]
    return Trained(entropy, first, float(torch.cat(parts).mean()))


def between_seeds(values: Sequence[float]) -> Estimate:
    """The mean over trainings, with its standard error from seed to seed."""
    x = torch.tensor(values, dtype=torch.float64)
    return Estimate(float(x.mean()), float(x.std()) / math.sqrt(len(values)))


def measure(run: Run) -> Sequence[Row]:
    """Train every contender from the same seeds, on the same batches."""
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(3000 + run.seed)
    windows = texts.sample_windows(held_out, LENGTH + 1, run.size(32, HELD_OUT), generator)
    seeds = range(100 * run.seed, 100 * run.seed + run.size(3, 4))
    trained = {
        one: [train(run, one, seed, windows, training) for seed in seeds] for one in contenders(run)
    }
    return rows_of(trained)


def rows_of(trained: Mapping[Contender, Sequence[Trained]]) -> list[Row]:
    """For each contender, rows of its loss (relative to 1/√d without gains), entropy, gradient."""
    base = trained[Contender(UNIT)]
    rows: list[Row] = []
    for one, runs in trained.items():
        change = between_seeds([a.loss - b.loss for a, b in zip(runs, base, strict=True)])
        ratio = between_seeds(
            [math.log(a.first / b.first) for a, b in zip(runs, base, strict=True)]
        )
        entropy = between_seeds([each.entropy for each in runs])
        rows += [
            untested_row("loss, nat", between_seeds([each.loss for each in runs]), one.where),
            untested_row("loss less that of 1/√d, nat", change, one.where),
            untested_row("log ratio of first gradients", ratio, one.where),
            untested_row("entropy before training, nat", entropy, one.where),
        ]
        if one == Contender(SHARPER):
            rows.append(SHARPENS.row("loss less that of 1/√d, nat", 0.0, change, one.where))
        elif one == Contender(ONE):
            exact = float(theory.expected_entropy_gauss(LENGTH, ONE))
            rows += [
                ONE_HOT.row("loss less that of 1/√d, nat", 0.0, change, one.where),
                EXPLODES.row("log ratio of first gradients", 0.0, ratio, one.where),
                ENTROPY.row("entropy before training, nat", exact, entropy, one.where),
            ]
        elif one == Contender(ONE, True):
            rows.append(GAIN.row("loss less that of 1/√d, nat", 0.0, change, one.where))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Loss and the first gradient against the deviation of the logits before training."""
    figure, (left, right) = plot_style.new_figure(
        "After QK-norm the scale still matters",
        f"Decoders of bytes trained on windows of {LENGTH}, heads {HEAD} wide, all else the same. "
        "Deviation 1 is the scale 1/√d, 8 is the scale 1. Bars: standard errors between seeds.",
        panels=2,
        theme=theme,
    )
    curves = plot_style.curves(2, theme)
    for axes, quantity in (
        (left, "loss less that of 1/√d, nat"),
        (right, "log ratio of first gradients"),
    ):
        for gains, curve in zip(("none", "trained"), curves, strict=True):
            line = [
                row for row in record.rows
                if row.quantity == quantity and not row.claim and row.condition["gains"] == gains
            ]  # fmt: skip
            x = [float(row.condition["logit_std"]) for row in line]
            y, error = [row.measured for row in line], [row.error for row in line]
            plot_style.draw_line(axes, x, y, curve)
            name = "trained gains" if gains == "trained" else "no gains"
            plot_style.draw_marks(axes, x, y, curve, name, error=error)
        plot_style.reference(axes, theme, y=0.0)
        axes.set_xscale("log", base=2)
        plot_style.legend(axes, theme)
    x_label = "deviation of the logits before training"
    plot_style.label(left, x=x_label, y="held-out loss less that of 1/√d, nat", title="loss")
    plot_style.label(
        right, x=x_label, y="log of the gradient's norm over that of 1/√d",
        title="first gradient of queries and keys",
    )  # fmt: skip
    return figure


EXPERIMENT = Experiment(
    name="qk_norm_scale",
    title="query-key normalisation and the scale after it",
    prediction="with heads 64 wide, scale 1 after QK-norm gives logits of deviation 8 and nearly "
    "one-hot rows; training then ends at a higher loss, which trained gains make up for; 1.44 in "
    "place of 1 costs nothing",
    claims=(EXPLODES, ONE_HOT, SHARPENS, GAIN, ENTROPY),
    measure=measure,
    draw=draw,
    full_only=("one_hot", "sharpens", "gain"),
)
