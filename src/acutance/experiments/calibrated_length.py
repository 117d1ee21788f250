"""Trained models beyond their training length: fixed laws, calibrated ones, and windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.calibration import apply, calibrate
from acutance.calibration import measure as measure_law
from acutance.experiments import mlm_table
from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where, untested_row
from acutance.experiments.models import texts
from acutance.experiments.models.trained import (
    SEEDS,
    TRAIN_LENGTH,
    decoder,
    next_byte_losses,
    train,
)
from acutance.probing.open_probe import probe
from acutance.report import plot_style
from acutance.scaling import ClipLogN, LogN, NoScaling, Scaling, SqrtLogN, SSMax, Window, Yarn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from acutance.calibration.law import AnyLaw

SOURCE = "acutance.calibrate"
CALIBRATED = "calibrated"  # each head's entropy stays what it was
FRACTION = "calibrated H / log n"  # each head's share of log n stays what it was
LOSS = "calibrated loss"  # fitted to the loss itself; decoders only
WINDOWED = "window of {}"  # keys that a row reads, without a temperature; decoders only
BOUND = "times"  # the training length
#: Laws that are not fitted to the model.
FIXED = ("none", "log_n", "clip_log_n", "ssmax", "yarn", "sqrt_log_n")
MEDIAN, LARGEST = (f"{which} of |H / H at 1× − 1|" for which in ("median", "largest"))
LAST = 64  # bytes at the end of a window over which a decoder's loss is taken

HOLDS = Claim(
    "holds", "the calibrated law keeps the median head's entropy within 5 % of that at 1×, on "
    "held-out text", SOURCE, relation="<=",
)  # fmt: skip
# Stated of every head before the first run.
EVERY = Claim(
    "every", "it does so for every head of the decoders", SOURCE, "does not hold", relation="<=",
)  # fmt: skip
LOSES = Claim(
    "loses", "a decoder calibrated to constant entropy loses to no fixed law by more than the "
    "spread over seeds", SOURCE, relation="<=",
)  # fmt: skip
# Expected to hold as well before the first run, which told otherwise.
ENCODERS = Claim(
    "encoders", "a masked encoder calibrated to constant entropy loses to no fixed law by more "
    "than the spread over seeds", SOURCE, "does not hold", relation="<=",
)  # fmt: skip
SHARE = Claim(
    "share", "calibrated to each head's share of log n loses to no fixed law by more than the "
    "spread over seeds", SOURCE, relation="<=",
)  # fmt: skip
HELPS = Claim("helps", "at the longest texts calibrated has less loss than none", SOURCE,
              relation="<=")  # fmt: skip
WINDOW = Claim(
    "window", "for the decoders a window of the training length has less loss than every "
    "temperature, at the longest texts", "acutance.scaling.Window", relation="<=",
)  # fmt: skip
SAME = Claim(
    "same",
    "laws that are 1 up to the training length change nothing there",
    within=1e-5,
    theorem=True,
)


@dataclass(frozen=True)
class Subject:
    """A trained model, how it is calibrated and how it is judged.

    Attributes:
        name: of the kind of model.
        model: the model.
        length: in training.
        calibration: windows that calibration may read, from the text of training.
        held_out: windows that entropies are measured on.
        losses: of the model as it is, at a length, one for each held-out window.
    """

    name: str
    model: torch.nn.Module
    length: int
    calibration: Tensor
    held_out: Tensor
    losses: Callable[[int], Tensor]


def decoder_subject(run: Run, seed: int) -> Subject:
    """The model to test: the bundled decoder for seed 0, else one trained in the same way.

    Its loss is that of the last 64 bytes of each window.
    """
    longest = TRAIN_LENGTH * times(run)[-1]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    if seed in SEEDS:
        model = decoder(seed)
    else:
        with torch.enable_grad():
            model = train(seed, training, keep=run.checkpoint(f"decoder-{seed}"), note=run.note)
    generator = torch.Generator().manual_seed(1000 + run.seed)
    known = texts.sample_windows(training, longest, run.size(12, 64), generator)
    windows = texts.sample_windows(held_out, longest + 1, run.size(32, 64), generator)

    def losses(length: int) -> Tensor:
        parts = windows[:, -(length + 1) :].split(run.size(16, 8))
        return torch.cat([next_byte_losses(model, part)[:, -LAST:].mean(1) for part in parts])

    return Subject(
        "decoder", model, TRAIN_LENGTH, known, windows[: run.size(12, 64), :longest], losses
    )


def encoder_subject(run: Run, seed: int) -> Subject:
    """The masked language model of :mod:`~acutance.experiments.mlm_table` without a scaling law.

    Its loss is that of the masked bytes.
    """
    model = mlm_table.train(run, "O", seed)
    longest = mlm_table.TRAIN_LENGTH * times(run)[-1]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(2000 + run.seed)
    known, _ = mlm_table.masked(
        texts.sample_windows(training, longest, run.size(4, 64), generator), generator
    )
    windows = texts.sample_windows(held_out, longest, run.size(16, 64), generator)
    ids, hidden = mlm_table.masked(windows, generator)

    def losses(length: int) -> Tensor:
        data = zip(windows, ids, hidden, strict=True)
        return torch.tensor([mlm_table.read(model, *one, length)[1] for one in data])

    return Subject(
        "masked encoder", model, mlm_table.TRAIN_LENGTH, known, ids[: run.size(4, 64)], losses
    )


def times(run: Run) -> tuple[int, ...]:
    """The lengths tested, as multiples of the training length."""
    return (1, 2, 4) if run.quick else (1, 2, 4, 8)


def fixed_laws(subject: Subject) -> dict[str, Scaling]:
    """The laws of :data:`FIXED`, by name; ``"none"`` changes nothing.

    They use only the training length, and sqrt_log_n also the standard deviation of the logits.
    """
    length = subject.length
    with probe(subject.model, metrics=["logit_std"]) as opened, torch.no_grad():
        subject.model(subject.calibration[:, :length])
    gamma = float(opened.summary().mean("logit_std").mean())
    return {
        "none": NoScaling(),
        "log_n": LogN(train_length=length),
        "clip_log_n": ClipLogN(train_length=length),
        "ssmax": SSMax(s=1 / math.log(length)),
        "yarn": Yarn(train_length=length),
        "sqrt_log_n": SqrtLogN(train_length=length, gamma=gamma),
    }


@torch.no_grad()
def examine(run: Run, subject: Subject, seed: int) -> tuple[list[Row], dict[str, Tensor]]:
    """Calibrate a model, then measure its entropies and losses under every law and length.

    Decoders also get a law fitted to the loss, and windows of the training length, of 3/4 and of
    1/2 of it. The entropies under a window are not measured: none of its rows sees more keys than
    in training.

    Returns:
        The rows, and by name of the law the losses in nats, (lengths, windows).
    """
    lengths = [subject.length * factor for factor in times(run)]
    if run.note is not None:
        run.note(f"calibrated_length: calibrating {subject.name}, seed {seed}")
    laws: dict[str, AnyLaw] = {**fixed_laws(subject)}
    for name, target in ((CALIBRATED, "entropy"), (FRACTION, "normalized_entropy")):
        laws[name] = calibrate(
            subject.model, [subject.calibration], target=target, lengths=lengths,
            reference=subject.length, passes=run.size(4, 6),
        )  # fmt: skip
    if subject.name == "decoder":
        each = list(subject.calibration.split(1))
        laws[LOSS] = calibrate(subject.model, each, target="loss", lengths=lengths, passes=3)
        for quarters in (4, 3, 2):
            window = Window(subject.length * quarters // 4)
            laws[WINDOWED.format(window.size)] = window
    rows: list[Row] = []
    losses: dict[str, Tensor] = {}
    start: Tensor | None = None
    for name, law in laws.items():
        with apply(subject.model, law):
            losses[name] = torch.stack([subject.losses(length) for length in lengths]).double()
        for at, factor in enumerate(times(run)):
            where: Where = {"model": subject.name, "law": name, "seed": seed, BOUND: factor}
            rows.append(untested_row("loss, nat", mean(losses[name][at]), where))
        if isinstance(law, Window):
            continue
        found = measure_law(subject.model, [subject.held_out], lengths=lengths, law=law)
        H = found.flat()[:, [found.lengths.index(length) for length in lengths]]
        if start is None:
            start = H[:, 0]  # every head's own, at the training length, without a law
        off = (H / start[:, None] - 1).abs()
        for at, factor in enumerate(times(run)):
            where = {"model": subject.name, "law": name, "seed": seed, BOUND: factor}
            middle = untested_row(MEDIAN, float(off[:, at].median()), where)
            if name == CALIBRATED and factor > 1:
                middle = HOLDS.row(MEDIAN, 0.05, middle.measured, where)
            rows += [
                untested_row("mean H, nat", float(H[:, at].mean()), where),
                middle,
                untested_row(LARGEST, float(off[:, at].max()), where),
            ]
    for name in ("clip_log_n", "yarn", CALIBRATED, FRACTION):
        where = {"model": subject.name, "law": name, "seed": seed, BOUND: 1}
        before, after = (float(losses[law][0].mean()) for law in ("none", name))
        rows.append(SAME.row("loss at 1×, nat", before, after, where))
    longest = losses.get(WINDOWED.format(subject.length))
    if longest is not None:
        last = {name: losses[name][-1] for name in laws if not isinstance(laws[name], Window)}
        best = min(last, key=lambda name: float(last[name].mean()))
        where = {"model": subject.name, "law": best, "seed": seed, BOUND: times(run)[-1]}
        difference = mean(longest[-1] - last[best])
        rows.append(WINDOW.row("loss, window − best temperature, nat", 0.0, difference, where))
    return rows, losses


def measure(run: Run) -> Sequence[Row]:
    """Loss and entropy of each kind of model and seed, under each law and at each length."""
    rows: list[Row] = []
    kinds = (decoder_subject,) if run.quick else (decoder_subject, encoder_subject)
    seeds = range(run.size(1, 3))
    for kind in kinds:
        by_seed: list[dict[str, Tensor]] = []
        for step in seeds:
            seed = step if kind is decoder_subject else run.seed * 100 + step
            subject = kind(run, seed)
            found, losses = examine(run, subject, seed)
            rows += found
            by_seed.append(losses)
        for name in by_seed[0]:
            if name in FIXED:
                rows += compared(run, subject.name, name, by_seed)
                rows += compared(run, subject.name, name, by_seed, FRACTION)
    where: Where = {"model": "decoder", "law": CALIBRATED}
    worst = max(
        row.measured
        for row in rows
        if row.quantity == LARGEST and where.items() <= row.condition.items()
    )
    over = {"law": CALIBRATED, "decoders": "all heads, lengths and seeds"}
    return [*rows, EVERY.row(LARGEST, 0.05, worst, over)]


def compared(
    run: Run, kind: str, name: str, by_seed: list[dict[str, Tensor]], fitted: str = CALIBRATED
) -> list[Row]:
    """One row for each length: the loss under a calibrated law less that under the law ``name``.

    Args:
        run: the run.
        kind: name of the kind of model.
        name: of the fixed law.
        by_seed: for each seed the losses by name of law, (lengths, windows).
        fitted: name of the calibrated law.
    """
    rows = []
    for at, factor in enumerate(times(run)):
        differences = [losses[fitted][at] - losses[name][at] for losses in by_seed]
        means = torch.stack([one.mean() for one in differences])
        noise = math.sqrt(sum(mean(one).error ** 2 for one in differences)) / len(means)
        spread = float(means.std()) if len(means) > 1 else 0.0
        where: Where = {"model": kind, "law": name, BOUND: factor}
        difference = Estimate(float(means.mean()), noise)
        entropy = LOSES if kind == "decoder" else ENCODERS
        claim = entropy if fitted == CALIBRATED else SHARE
        rows.append(claim.row(f"loss, {fitted} − this law, nat", spread, difference, where))
        if fitted == CALIBRATED and name == "none" and factor == times(run)[-1]:
            rows.append(HELPS.row("loss, calibrated − none, nat", 0.0, difference, where))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """The decoder's loss and entropy against length, in two panels, a line for each law.

    Windows are in the panel of the loss alone.
    """
    own = [row for row in record.rows if row.condition.get("model") == "decoder"]
    laws = list(dict.fromkeys(str(r.condition["law"]) for r in own if r.quantity == "loss, nat"))
    laws.remove("ssmax")  # with s = 1 / log of the training length it is log_n
    entropies = {r.condition["law"] for r in own if r.quantity == "mean H, nat"}
    figure, [left, right] = plot_style.new_figure(
        "Beyond its training length a window serves a decoder better than every temperature",
        "Means over seeds, on held-out text. Loss: last 64 bytes of a text, the same bytes at "
        "every length, less that without a law. A window's entropy is not measured.",
        panels=2,
        theme=theme,
    )
    longest = max(int(row.condition[BOUND]) for row in own)
    x = [2**step for step in range(int(math.log2(longest)) + 1)]

    def average(quantity: str, law: str, factor: int) -> float:
        values = [
            r.measured for r in own
            if r.quantity == quantity and r.condition["law"] == law and r.condition[BOUND] == factor
        ]  # fmt: skip
        return sum(values) / len(values)

    for law, curve in zip(laws, plot_style.curves(len(laws), theme), strict=True):
        loss = [average("loss, nat", law, f) - average("loss, nat", "none", f) for f in x]
        panels = [(left, loss)]
        if law in entropies:
            panels.append((right, [average("mean H, nat", law, f) for f in x]))
        for axes, y in panels:
            plot_style.draw_line(axes, x, y, curve)
            plot_style.draw_marks(axes, x, y, curve, law)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{factor}×" for factor in x])
    plot_style.label(
        left, x="length, training = 1", y="loss − loss without a law, nat", title="loss"
    )
    plot_style.label(
        right, x="length, training = 1", y="mean entropy of heads, nat", title="entropy"
    )
    left.set_ylim(bottom=1.8 * left.get_ylim()[0])  # room for the legend
    plot_style.legend(left, theme, where="lower center", columns=2)
    return figure


EXPERIMENT = Experiment(
    name="calibrated_length",
    title="temperatures and windows beyond the training length",
    prediction="a factor for each head and length, fitted on text of training, keeps the entropy "
    "of the median head within 5 % of that at the training length, on held-out text up to 8 times "
    "as long, but not that of every head; a decoder's loss under it, and every model's under one "
    "that keeps H / log n, is above that of no fixed law by more than the spread over seeds; but a "
    "window of the training length beats every temperature: a decoder's loss under it is below "
    "that under any law",
    claims=(HOLDS, EVERY, LOSES, ENCODERS, SHARE, HELPS, WINDOW, SAME),
    measure=measure,
    draw=draw,
    needs="transformers",
    full_only=("loses", "encoders", "share", "helps"),
)
