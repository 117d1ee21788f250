"""Query-key normalisation and the scale after it: small decoders trained at several scales."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance import probe, theory
from acutance.nn import rotate
from acutance_lab import texts
from acutance_lab.experiment import Experiment, Run
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Estimate, Row, Where, untested_row
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


#: One way to scale: the deviation of the logits before training, and whether gains are trained.
Contender = tuple[float, bool]


def contenders(run: Run) -> list[Contender]:
    """The models to compare: several logit deviations without trained gains, two with them."""
    if run.quick:
        return [(UNIT, False), (ONE, False)]
    plain = [(deviation, False) for deviation in (0.5, UNIT, SHARPER, 2.0, 4.0, ONE)]
    return [*plain, (UNIT, True), (ONE, True)]


def train(
    run: Run, contender: Contender, seed: int, held_out: Tensor, text: Tensor
) -> dict[str, float]:
    """Train one decoder; the batches depend on the seed alone.

    Returns:
        "entropy", of the last row of each head before training, mean over windows, in nats;
        "gradient", the norm of that of all query and key projections at the initial weights;
        "loss", on the held-out windows after training, in nats for a byte.
    """
    deviation, gains = contender
    with seeded(seed):
        model = Decoder(deviation, gains=gains)
    batch = held_out[:16]
    last = torch.zeros(16, LENGTH, dtype=torch.bool)
    last[:, -1] = True
    with torch.no_grad(), probe(model, metrics=["entropy"], rows=last) as opened:
        model(batch[:, :-1])
    entropy = float(opened.summary().mean("entropy").mean())
    with torch.enable_grad():
        losses(model, batch).mean().backward()
    gradient = math.hypot(*(layer.gradient() for layer in model.layers))

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        return losses(model, texts.sample_windows(text, LENGTH + 1, 16, generator)).mean()

    steps = run.size(4, 300)
    name = f"qk-{deviation:.3g}{'-gains' if gains else ''}-{seed}"
    plan = Plan(
        "qk_norm_scale", steps, 3e-3, seed=seed, warm=steps // 10, fall=0.5, decay=0.1, clip=1.0
    )
    fit(model, loss, plan, keep=run.checkpoint(name), note=run.note)
    with torch.no_grad():
        parts = [losses(model, batch).mean(1) for batch in held_out.split(32)]
    return {"entropy": entropy, "gradient": gradient, "loss": float(torch.cat(parts).mean())}


def between_seeds(values: Sequence[float]) -> Estimate:
    """The mean over trainings, with its standard error from seed to seed."""
    x = torch.tensor(values, dtype=torch.float64)
    return Estimate(float(x.mean()), float(x.std()) / math.sqrt(len(values)))


def measure(run: Run) -> Iterator[Row]:
    """Train every contender from the same seeds, on the same batches."""
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(3000 + run.seed)
    windows = texts.sample_windows(held_out, LENGTH + 1, run.size(32, HELD_OUT), generator)
    trained = {
        contender: [train(run, contender, seed, windows, training) for seed in run.seeds(3, 4)]
        for contender in contenders(run)
    }
    for contender, runs in trained.items():
        deviation, gains = contender
        pairs = list(zip(runs, trained[UNIT, False], strict=True))
        loss, entropy = (between_seeds([own[key] for own in runs]) for key in ("loss", "entropy"))
        change = between_seeds([own["loss"] - unit["loss"] for own, unit in pairs])
        growth = between_seeds(
            [math.log(own["gradient"] / unit["gradient"]) for own, unit in pairs]
        )
        where: Where = {
            "logit_std": round(deviation, 2), "gains": "trained" if gains else "none"
        }  # fmt: skip
        yield untested_row("loss, nat", loss, where)
        yield untested_row(LESS_UNIT, change, where)
        yield untested_row(GRADIENTS, growth, where)
        yield untested_row("entropy before training, nat", entropy, where)
        if contender == (SHARPER, False):
            yield SHARPENS.row(LESS_UNIT, 0.0, change, where)
        elif contender == (ONE, False):
            exact = float(theory.expected_entropy_gauss(LENGTH, ONE))
            yield ONE_HOT.row(LESS_UNIT, 0.0, change, where)
            yield EXPLODES.row(GRADIENTS, 0.0, growth, where)
            yield ENTROPY.row("entropy before training, nat", exact, entropy, where)
        elif contender == (ONE, True):
            yield GAIN.row(LESS_UNIT, 0.0, change, where)


def _by_gains(quantity: str) -> Lines:
    names = {"none": "no gains", "trained": "trained gains"}
    return Lines("", "logit_std", names, by="gains", quantity=quantity, bars=True)


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
            _DEVIATION, Axis("held-out loss less that of 1/√d, nat"), [_by_gains(LESS_UNIT)],
            "loss", [Level(y=0.0)],
        ),
        Panel(
            _DEVIATION, Axis("log of the gradient's norm over that of 1/√d"),
            [_by_gains(GRADIENTS)],
            "first gradient of queries and keys", [Level(y=0.0)],
        ),
    ),
    full_only=("one_hot", "sharpens", "gain"),
)  # fmt: skip
