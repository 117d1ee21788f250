"""Masked bytes: trained on 64 at a time, read in windows of up to 1024, with and without log n."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance import apply, probe
from acutance.scaling import LogN, NoScaling, Scaling
from acutance_lab import texts
from acutance_lab.encoder import Encoder
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import Axis, Lines, Panel
from acutance_lab.record import Estimate, at_least, at_most, theorem
from acutance_lab.sampling import between_seeds, mean
from acutance_lab.training import Plan, fit, seeded

SOURCE = "Su Jianlin, kexue.fm/archives/8823"
TRAIN_LENGTH = 64
LENGTHS = (64, 128, 256, 512, 1024)
MASK, SHARE = 256, 0.15
LAWS: dict[str, Scaling] = {"O": NoScaling(), "E": LogN(base=512.0)}
#: 2 layers of width 64, whose slowest rotation goes round once in the training length.
_SHAPE: dict[str, Any] = {
    "symbols": 257, "outputs": 256, "width": 64, "heads": 4, "hidden": 192, "layers": 2,
    "base": (TRAIN_LENGTH / (2 * math.pi)) ** (16 / 14), "norm_first": True,
}  # fmt: skip
#: Nearer to the training length one pair of trainings says little about another.
FAR = 512


def masked(windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace a share of the bytes by the mask symbol; also return True where that was done."""
    hidden = torch.rand(windows.shape, generator=generator) < SHARE
    return windows.masked_fill(hidden, MASK), hidden


def train(run: Run, kind: str, seed: int) -> Encoder:
    """Train a masked language model on windows of 64 bytes; ``kind`` names its scaling law."""
    with seeded(seed):
        model = Encoder(**_SHAPE, law=LAWS[kind])
    text = texts.read(texts.files("training"))

    def loss(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
        windows = texts.sample_windows(text, TRAIN_LENGTH, run.size(16, 32), generator)
        ids, hidden = masked(windows, generator)
        return F.cross_entropy(model(ids)[hidden], windows[hidden])

    plan = Plan(
        f"mlm-{kind}", run.size(150, 1000), 4e-3, seed=seed, warm=20, fall=0.6, decay=0.1, clip=1.0
    )
    fit(model, loss, plan, keep=run.checkpoint(f"{plan.name}-{seed}"), note=run.note)
    return model


@torch.no_grad()
def read(
    model: torch.nn.Module, windows: Tensor, ids: Tensor, hidden: Tensor, length: int
) -> tuple[Tensor, float]:
    """Let the model predict masked bytes, with windows cut into pieces of ``length`` bytes.

    Args:
        model: the model.
        windows: original bytes (windows, n).
        ids: the same with masked bytes.
        hidden: True where a byte is masked.
        length: of the pieces; it divides n.

    Returns:
        Whether each masked byte is predicted correctly, (masked bytes,), and their mean loss in
        nats.
    """
    right, loss = [], 0.0
    pieces = (x.reshape(-1, length).split(4096 // length) for x in (windows, ids, hidden))
    for original, shown, where in zip(*pieces, strict=True):
        answers, truth = model(shown)[where], original[where]
        right.append(answers.argmax(-1) == truth)
        loss += float(F.cross_entropy(answers, truth, reduction="sum"))
    return torch.cat(right), loss / int(hidden.sum())


_NAMES = {kind: f"Attention-{kind}" for kind in LAWS}
_N = Axis("window n, bytes", log=True, ticks={n: str(n) for n in LENGTHS})


@experiment(
    at_least("above", "beyond its length log n is on average at least as accurate as none", SOURCE),
    at_least("most", "from 8 times that length on it is ahead in most pairs", SOURCE),
    at_most("equal", "at that length accuracies differ by no more than 0.02", SOURCE),
    at_least("entropy", "with log n the entropy grows less with n", SOURCE),
    theorem("same", "a law built into a model and the same law applied give the same loss",
            within=1e-4),
    figure=[
        Panel(_N, Axis("accuracy on masked bytes", limits=(0.0, None)),
              [Lines("", "n", _NAMES, by="law", quantity="accuracy", marks="bars")], "accuracy"),
        Panel(_N, Axis("mean entropy of heads, nat"),
              [Lines("", "n", _NAMES, by="law", quantity="mean H, nat", marks="bars")], "entropy"),
    ],
    full_only=("above", "most", "equal"),
)  # fmt: skip
def mlm_table(run: Run) -> Iterator[Measured]:
    """Masked language model, beyond its length.

    Accuracy and entropy with and without log n, on the same masked bytes at each length.

    Predicted: trained at n = 64 both are equally accurate there; read at 128 to 1024 the one with
    log n is above the one without, and its entropy grows less.

    Figure: Masked bytes: trained on 64 at a time, read in longer windows. O: no scaling. E: log n
    to the base 512, in training and after. Means over seeds, with standard errors. The same masked
    bytes at every n.
    """
    seeds, text = run.seeds(1, 6), texts.read(texts.files("held out"))
    windows = texts.sample_windows(text, LENGTHS[-1], run.size(6, 48), run.generator)
    data = (windows, *masked(windows, run.generator))
    # for each seed: whether each answer is right, and the mean entropy
    right: dict[tuple[str, int], list[Tensor]] = {(k, n): [] for k in LAWS for n in LENGTHS}
    entropy: dict[tuple[str, int], list[float]] = {(k, n): [] for k in LAWS for n in LENGTHS}
    for seed in seeds:
        for kind in LAWS:
            model = train(run, kind, seed)
            bare = Encoder(**_SHAPE)
            bare.load_state_dict(model.state_dict())
            for n in LENGTHS:
                right[kind, n].append(read(model, *data, n)[0].double())
                with probe(model, metrics=["entropy"]) as opened, torch.no_grad():
                    model(data[1][:4].reshape(-1, n))
                summary = opened.summary()
                H = summary.mean("entropy")
                entropy[kind, n].append(float(H.mean()))
                where: dict[str, Any] = {"seed": seed, "n": n}
                if kind == "E":
                    windows, ids, hidden = (tensor[:2] for tensor in data)
                    _, built_in = read(model, windows, ids, hidden, n)
                    with apply(bare.eval(), LAWS["E"]):
                        _, applied = read(bare, windows, ids, hidden, n)
                    yield "same", "loss, nat", built_in, applied, where
                for at, (layer, head) in enumerate(summary.places):
                    place = {"law": kind, **where, "head": f"{layer}.{head}"}
                    yield untested("H of a head, nat", float(H[at]), place)
    for (kind, n), answers in right.items():
        where = {"law": kind, "n": n}
        accuracy = between_seeds([float(answer.mean()) for answer in answers])
        yield untested("accuracy", accuracy, where)
        yield untested("mean H, nat", between_seeds(entropy[kind, n]), where)
    for n in LENGTHS:
        pairs = zip(right["E", n], right["O", n], strict=True)
        gains = [mean(mine - theirs) for mine, theirs in pairs]
        for at, (seed, gain) in enumerate(zip(seeds, gains, strict=True)):
            where = {"n": n, "seed": seed}
            yield untested("gain in accuracy", gain, where)
            if n > TRAIN_LENGTH:
                O, E = (entropy[kind, n][at] - entropy[kind, TRAIN_LENGTH][at] for kind in "OE")
                yield "entropy", "rise of H, O − E, nat", 0.0, O - E, where
            elif not run.quick:
                apart = Estimate(abs(gain.value), gain.error)
                yield "equal", "difference of accuracies", 0.02, apart, where
        # with little training E may still be behind O, whatever its entropy
        if n > TRAIN_LENGTH and not run.quick:
            gained = [gain.value for gain in gains]
            yield "above", "mean gain in accuracy", 0.0, between_seeds(gained), {"n": n}
            share = sum(gain > 0 for gain in gained) / len(gained)
            yield "most" if n >= FAR else "", "share of pairs with a gain", 0.5, share, {"n": n}
