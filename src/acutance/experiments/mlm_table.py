"""Masked bytes: trained on 64 at a time, read in windows of up to 1024, with and without log n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.calibration import apply
from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where, untested_row
from acutance.experiments.models import texts
from acutance.experiments.models.fitting import Plan, fit
from acutance.experiments.models.small import Encoder, seeded
from acutance.probing.open_probe import probe
from acutance.report import plot_style
from acutance.scaling import LogN, NoScaling, Scaling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
#: Per cent, of a model of ordinary size: what the source's table has. E − O is largest at 256.
PUBLISHED = {"O": (43.27, 36.53, 23.02, 15.12, 11.54), "E": (43.11, 41.17, 34.04, 20.15, 13.58)}

EQUAL = Claim(
    "equal", "at the training length accuracies differ by no more than 0.02", SOURCE, relation="<="
)
ABOVE = Claim(
    "above", "beyond it log n is on average at least as accurate as none", SOURCE, relation=">="
)
MOST = Claim(
    "most", "and at eight times that length and more it is ahead in most pairs of trainings",
    SOURCE, relation=">=",
)  # fmt: skip
#: Nearer to the training length one pair of trainings says little about another.
FAR = 512
SAME = Claim(
    "same", "a law built into a model and the same law applied to it give the same loss",
    within=1e-4, theorem=True,
)  # fmt: skip
ENTROPY = Claim("entropy", "with log n the entropy grows less with n", SOURCE, relation=">=")


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


def evaluation(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Held-out windows of 1024 bytes: original, masked, and the mask; the same for any n."""
    text = texts.read(texts.files("held out"))
    windows = texts.sample_windows(text, LENGTHS[-1], run.size(6, 48), run.generator)
    return windows, *masked(windows, run.generator)


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
    for whole, part, where in zip(
        *(x.reshape(-1, length).split(4096 // length) for x in (windows, ids, hidden)), strict=True
    ):
        answers, truth = model(part)[where], whole[where]
        right.append(answers.argmax(-1) == truth)
        loss += float(F.cross_entropy(answers, truth, reduction="sum"))
    return torch.cat(right), loss / int(hidden.sum())


def measure(run: Run) -> Sequence[Row]:
    """Accuracy and entropy with and without log n, on the same masked bytes at each length."""
    rows: list[Row] = []
    seeds = [run.seed * 100 + step for step in range(run.size(1, 6))]
    data = evaluation(run)
    right: dict[tuple[str, int], list[Tensor]] = {}
    entropy: dict[tuple[str, int], list[float]] = {}
    for seed in seeds:
        for kind in LAWS:
            model = train(run, kind, seed)
            for n in LENGTHS:
                right.setdefault((kind, n), []).append(read(model, *data, n)[0].double())
                with probe(model, metrics=["entropy"]) as opened, torch.no_grad():
                    model(data[1][:4].reshape(-1, n))
                H = opened.summary().mean("entropy")
                entropy.setdefault((kind, n), []).append(float(H.mean()))
                if kind == "E":
                    rows.append(_applied(model, data, n, seed))
                for layer, head in opened.summary().places:
                    at: Where = {"law": kind, "seed": seed, "n": n, "head": f"{layer}.{head}"}
                    rows.append(untested_row("H of a head, nat", float(H[layer * 4 + head]), at))
    for (kind, n), answers in right.items():
        where: Where = {"law": kind, "n": n}
        rows += [
            untested_row("accuracy", _over_seeds([float(one.mean()) for one in answers]), where),
            untested_row("mean H, nat", _over_seeds(entropy[kind, n]), where),
        ]
    for n in LENGTHS:
        pairs = list(zip(right["E", n], right["O", n], strict=True))
        gains = [mean(mine - theirs) for mine, theirs in pairs]
        for place, (seed, gain) in enumerate(zip(seeds, gains, strict=True)):
            where = {"n": n, "seed": seed}
            rows.append(untested_row("gain in accuracy", gain, where))
            if n == TRAIN_LENGTH:
                if not run.quick:
                    apart = Estimate(abs(gain.value), gain.error)
                    rows.append(EQUAL.row("difference of accuracies", 0.02, apart, where))
                continue
            risen = {
                kind: entropy[kind, n][place] - entropy[kind, TRAIN_LENGTH][place] for kind in LAWS
            }
            rows.append(ENTROPY.row("rise of H, O − E, nat", 0.0, risen["O"] - risen["E"], where))
        # with little training E may still be behind O, whatever its entropy
        if n != TRAIN_LENGTH and not run.quick:
            values = [gain.value for gain in gains]
            rows.append(ABOVE.row("mean gain in accuracy", 0.0, _over_seeds(values), {"n": n}))
            share = sum(value > 0 for value in values) / len(values)
            if n >= FAR:
                rows.append(MOST.row("share of pairs with a gain", 0.5, share, {"n": n}))
            else:
                rows.append(untested_row("share of pairs with a gain", share, {"n": n}))
    return rows


def _applied(model: Encoder, data: tuple[Tensor, Tensor, Tensor], n: int, seed: int) -> Row:
    """Check that a law applied by :func:`acutance.apply` gives the loss of the built-in law.

    Args:
        model: a model with the law built in.
        data: windows, masked windows and mask, as from :func:`evaluation`; two windows are read.
        n: length of the pieces.
        seed: seed of the model, for the record.
    """
    windows, ids, hidden = (one[:2] for one in data)
    _, built_in = read(model, windows, ids, hidden, n)
    bare = Encoder(**_SHAPE)
    bare.load_state_dict(model.state_dict())
    with apply(bare.eval(), LAWS["E"]):
        _, applied = read(bare, windows, ids, hidden, n)
    return SAME.row("loss, nat", built_in, applied, {"n": n, "seed": seed})


def _over_seeds(values: list[float]) -> Estimate:
    """Mean of one value per seed and its standard error, which is 0 for a single seed."""
    return mean(torch.tensor(values)) if len(values) > 1 else Estimate(values[0], 0.0)


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Accuracy and entropy against the length n of the pieces, with and without log n."""
    figure, [left, right] = plot_style.new_figure(
        "Masked bytes: trained on 64 at a time, read in longer windows",
        "O: no scaling. E: log n to the base 512, in training and after. Means over seeds, with "
        "standard errors. The same masked bytes at every n.",
        panels=2,
        theme=theme,
    )
    for kind, curve in zip(LAWS, plot_style.curves(len(LAWS), theme), strict=True):
        for axes, quantity in ((left, "accuracy"), (right, "mean H, nat")):
            own = [r for r in record.rows if r.quantity == quantity and "law" in r.condition]
            own = [r for r in own if r.condition["law"] == kind]
            y, error = [r.measured for r in own], [r.error for r in own]
            plot_style.draw_line(axes, LENGTHS, y, curve)
            plot_style.draw_marks(axes, LENGTHS, y, curve, f"Attention-{kind}", error=error)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    left.set_ylim(bottom=0.0)
    plot_style.label(left, x="window n, bytes", y="accuracy on masked bytes", title="accuracy")
    plot_style.label(right, x="window n, bytes", y="mean entropy of heads, nat", title="entropy")
    plot_style.legend(left, theme, where="lower left")
    return figure


EXPERIMENT = Experiment(
    name="mlm_table",
    title="masked language model, beyond its length",
    prediction="trained at n = 64 both are equally accurate there; read at 128 to 1024 the one "
    "with log n is above the one without, and its entropy grows less",
    claims=(ABOVE, MOST, EQUAL, ENTROPY, SAME),
    full_only=(ABOVE.key, MOST.key, EQUAL.key),
    measure=measure,
    draw=draw,
)
