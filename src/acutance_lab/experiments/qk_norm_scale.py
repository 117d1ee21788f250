"""Query-key normalisation and the scale after it: small decoders trained at several scales."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance import probe, theory
from acutance.nn import rotate
from acutance_lab import texts
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import at_least, at_most, refuted
from acutance_lab.sampling import between_seeds
from acutance_lab.training import Plan, fit, seeded

GEMMA = "huggingface/transformers, issue 45676"
LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 2, 3
HEAD = WIDTH // HEADS
LESS_UNIT, GRADIENTS = "loss less that of 1/√d, nat", "log ratio of first gradients"
ENTROPY = "entropy before training, nat"
UNIT, SHARPER, ONE = 1.0, 1.44, math.sqrt(HEAD)  # scale 1/√d, nanochat's, and 1


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
QUICK: tuple[Contender, ...] = ((UNIT, False), (ONE, False))
CONTENDERS: tuple[Contender, ...] = (
    *((deviation, False) for deviation in (0.5, UNIT, SHARPER, 2.0, 4.0, ONE)),
    (UNIT, True), (ONE, True),
)  # fmt: skip


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
    inputs = [layer.inputs.weight for layer in model.layers]
    slopes = torch.autograd.grad(losses(model, batch).mean(), inputs)
    gradient = math.hypot(*(float(slope[: 2 * WIDTH].norm()) for slope in slopes))

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


def _by_gains(quantity: str) -> Lines:
    names = {"none": "no gains", "trained": "trained gains"}
    return Lines("", "logit_std", names, by="gains", quantity=quantity, marks="bars")


_DEVIATION = Axis(
    "deviation of the logits before training", log=True, ticks=(0.5, 1, 1.44, 2, 4, 8)
)


@experiment(
    at_least("explodes",
             "scale 1 makes the first gradient of queries and keys larger than 1/√d does", GEMMA),
    at_least("one_hot", "after QK-norm, scale 1 ends at a higher loss than 1/√d", GEMMA),
    at_most("sharpens", "a logit deviation of 1.44 has no more loss than 1",
            "karpathy/nanochat, gpt.py: q and k times 1.2 after RMSNorm"),
    at_most("gain", "trained gains make up for scale 1: no more loss than 1/√d without gains"),
    refuted("entropy", "scale 1 starts at the entropy of normal logits of deviation √d", GEMMA,
            within=0.05),
    figure=[
        Panel(_DEVIATION, Axis("held-out loss less that of 1/√d, nat"), [_by_gains(LESS_UNIT)],
              "loss", [Level(y=0.0)]),
        Panel(_DEVIATION, Axis("log of the gradient's norm over that of 1/√d"),
              [_by_gains(GRADIENTS)], "first gradient of queries and keys", [Level(y=0.0)]),
    ],
    full_only=("one_hot", "sharpens", "gain"),
)  # fmt: skip
def qk_norm_scale(run: Run) -> Iterator[Measured]:
    """Query-key normalisation and the scale after it.

    Every contender is trained from the same seeds, on the same batches.

    Predicted: with heads 64 wide, scale 1 after QK-norm gives logits of deviation 8 and nearly
    one-hot rows; training then ends at a higher loss, which trained gains make up for; 1.44 in
    place of 1 costs nothing.

    Figure: After QK-norm the scale still matters. Decoders of bytes trained on windows of 128,
    heads 64 wide, all else the same. Deviation 1 is the scale 1/√d, 8 is the scale 1. Bars:
    standard errors between seeds.
    """
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(3000 + run.seed)
    windows = texts.sample_windows(held_out, LENGTH + 1, run.size(32, 128), generator)
    trained = {
        contender: [train(run, contender, seed, windows, training) for seed in run.seeds(3, 4)]
        for contender in (QUICK if run.quick else CONTENDERS)
    }
    unit = trained[UNIT, False]
    for (deviation, gains), models in trained.items():
        pairs = list(zip(models, unit, strict=True))
        loss, entropy = (between_seeds([own[key] for own in models]) for key in ("loss", "entropy"))
        change = between_seeds([a["loss"] - b["loss"] for a, b in pairs])
        growth = between_seeds([math.log(a["gradient"] / b["gradient"]) for a, b in pairs])
        where = {"logit_std": round(deviation, 2), "gains": "trained" if gains else "none"}
        yield untested("loss, nat", loss, where)
        yield untested(LESS_UNIT, change, where)
        yield untested(GRADIENTS, growth, where)
        yield untested(ENTROPY, entropy, where)
        if (deviation, gains) == (SHARPER, False):
            yield "sharpens", LESS_UNIT, 0.0, change, where
        elif (deviation, gains) == (ONE, False):
            yield "one_hot", LESS_UNIT, 0.0, change, where
            yield "explodes", GRADIENTS, 0.0, growth, where
            exact = theory.expected_entropy_gauss(LENGTH, ONE)
            yield "entropy", ENTROPY, exact, entropy, where
        elif (deviation, gains) == (ONE, True):
            yield "gain", LESS_UNIT, 0.0, change, where
