"""Trained models beyond their training length: fixed laws, calibrated ones, and windows."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acutance import apply, calibrate, probe
from acutance.calibration import measure as measure_law
from acutance.scaling import ClipLogN, LogN, NoScaling, SqrtLogN, SSMax, Window, Yarn
from acutance_lab import texts
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.experiments import mlm_table
from acutance_lab.figure import Axis, Curve, Lines, Panel, Points
from acutance_lab.record import Estimate, Record, at_most, refuted, theorem
from acutance_lab.sampling import mean
from acutance_lab.trained import SEEDS, TRAIN_LENGTH, decoder, next_byte_losses, train

SOURCE = "acutance.calibrate"
CALIBRATED = "calibrated"  # each head's entropy stays what it was
FRACTION = "calibrated H / log n"  # each head's share of log n stays what it was
LOSS = "calibrated loss"  # fitted to the loss itself; decoders only
#: Keys that a row reads, without a temperature; decoders only.
WINDOWS = {f"window of {size}": size for size in (128, 96, 64)}
BOUND = "times"  # the training length
#: Laws that are not fitted to the model.
FIXED = ("none", "log_n", "clip_log_n", "ssmax", "yarn", "sqrt_log_n")
MEDIAN, LARGEST = (f"{which} of |H / H at 1× − 1|" for which in ("median", "largest"))
LAST = 64  # bytes at the end of a window over which a decoder's loss is taken


class Subject(NamedTuple):
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


def decoder_subject(run: Run, step: int) -> Subject:
    """The model to test: the bundled decoder for seed 0, else one trained in the same way.

    Its loss is that of the last 64 bytes of each window.
    """
    longest = TRAIN_LENGTH * times(run)[-1]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    if step in SEEDS:
        model = decoder(step)
    else:
        model = train(step, training, keep=run.checkpoint(f"decoder-{step}"), note=run.note)
    generator = torch.Generator().manual_seed(1000 + run.seed)
    known = texts.sample_windows(training, longest, run.size(12, 64), generator)
    windows = texts.sample_windows(held_out, longest + 1, run.size(32, 64), generator)

    def losses(length: int) -> Tensor:
        batches = windows[:, -(length + 1) :].split(run.size(16, 8))
        return torch.cat([next_byte_losses(model, batch)[:, -LAST:].mean(1) for batch in batches])

    measured = windows[: run.size(12, 64), :longest]
    return Subject("decoder", model, TRAIN_LENGTH, known, measured, losses)


def encoder_subject(run: Run, step: int) -> Subject:
    """The masked language model of :mod:`~acutance_lab.experiments.mlm_table` without a law.

    Its loss is that of the masked bytes.
    """
    model = mlm_table.train(run, "O", run.seed * 100 + step)
    longest = mlm_table.TRAIN_LENGTH * times(run)[-1]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(2000 + run.seed)
    known = texts.sample_windows(training, longest, run.size(4, 64), generator)
    known, _ = mlm_table.masked(known, generator)
    windows = texts.sample_windows(held_out, longest, run.size(16, 64), generator)
    ids, hidden = mlm_table.masked(windows, generator)

    def losses(length: int) -> Tensor:
        data = zip(windows, ids, hidden, strict=True)
        return torch.tensor([mlm_table.read(model, *window, length)[1] for window in data])

    measured = ids[: run.size(4, 64)]
    return Subject("masked encoder", model, mlm_table.TRAIN_LENGTH, known, measured, losses)


def times(run: Run) -> tuple[int, ...]:
    """The lengths tested, as multiples of the training length."""
    return (1, 2, 4) if run.quick else (1, 2, 4, 8)


def laws(run: Run, subject: Subject) -> dict[str, Any]:
    """The laws of :data:`FIXED`, and those calibrated to the subject.

    The fixed ones use only the training length, and sqrt_log_n also the standard deviation of the
    logits. A decoder also gets a law fitted to the loss, and windows of the training length, of 3/4
    and of 1/2 of it.
    """
    length, model, known = subject.length, subject.model, subject.calibration
    lengths = [length * factor for factor in times(run)]
    with probe(model, metrics=["logit_std"]) as opened, torch.no_grad():
        model(known[:, :length])
    gamma = float(opened.summary().mean("logit_std").mean())
    fixed = (
        NoScaling(), LogN(train_length=length), ClipLogN(train_length=length),
        SSMax(s=1 / math.log(length)), Yarn(train_length=length),
        SqrtLogN(train_length=length, gamma=gamma),
    )  # fmt: skip
    tried: dict[str, Any] = dict(zip(FIXED, fixed, strict=True))
    tried |= calibrations(model, known, lengths, passes=run.size(4, 6))
    if subject.name == "decoder":
        windows = list(known.split(1))
        tried[LOSS] = calibrate(model, windows, target="loss", lengths=lengths, passes=3)
        tried |= {name: Window(size) for name, size in WINDOWS.items()}
    return tried


def calibrations(
    model: torch.nn.Module, known: Tensor, lengths: list[int], passes: int
) -> dict[str, Any]:
    """Laws that keep each head's entropy, or its share of log n, what it is at the first length."""
    targets = {CALIBRATED: "entropy", FRACTION: "normalized_entropy"}
    return {
        name: calibrate(
            model, [known], target=target, lengths=lengths, reference=lengths[0], passes=passes
        )
        for name, target in targets.items()
    }


@torch.no_grad()
def examine(run: Run, subject: Subject, seed: int, losses: dict[str, Tensor]) -> Iterator[Measured]:
    """Calibrate a model, then measure its entropies and losses under every law and length.

    The entropies under a window are not measured: none of its rows sees more keys than in training.

    Args:
        run: the run.
        subject: the model.
        seed: its seed.
        losses: takes, by name of the law, the losses in nats, (lengths, windows).
    """
    lengths = [subject.length * factor for factor in times(run)]
    if run.note is not None:
        run.note(f"calibrated_length: calibrating {subject.name}, seed {seed}")
    start: Tensor | None = None

    def where(law: str, factor: int) -> dict[str, Any]:
        return {"model": subject.name, "law": law, "seed": seed, BOUND: factor}

    for name, law in laws(run, subject).items():
        with apply(subject.model, law):
            losses[name] = torch.stack([subject.losses(length) for length in lengths]).double()
        for factor, loss in zip(times(run), losses[name], strict=True):
            yield untested("loss, nat", mean(loss), where(name, factor))
        if name in WINDOWS:
            continue
        entropies = measure_law(subject.model, [subject.held_out], lengths=lengths, law=law)
        H = entropies.flat()[:, [entropies.lengths.index(length) for length in lengths]]
        if start is None:
            start = H[:, 0]  # every head's own, at the training length, without a law
        for factor, entropy in zip(times(run), H.T, strict=True):
            off, at = (entropy / start - 1).abs(), where(name, factor)
            held = "holds" if name == CALIBRATED and factor != 1 else ""
            yield untested("mean H, nat", float(entropy.mean()), at)
            yield held, MEDIAN, 0.05, float(off.median()), at
            yield untested(LARGEST, float(off.max()), at)
    for name in ("clip_log_n", "yarn", CALIBRATED, FRACTION):
        before, after = (float(losses[law][0].mean()) for law in ("none", name))
        yield "same", "loss at 1×, nat", before, after, where(name, 1)
    if subject.name == "decoder":
        last = {name: loss[-1] for name, loss in losses.items() if name not in WINDOWS}
        best = min(last, key=lambda name: float(last[name].mean()))
        less, at = mean(losses["window of 128"][-1] - last[best]), where(best, times(run)[-1])
        yield "window", "loss, window − best temperature, nat", 0.0, less, at


#: Not ssmax: with s = 1 / log of the length it is log_n.
_SHOWN = {law: law for law in (*FIXED, CALIBRATED, FRACTION, LOSS, *WINDOWS) if law != "ssmax"}


def _lines(quantity: str) -> Lines:
    """The decoder's means over seeds, a curve for each law."""
    return Lines("", BOUND, _SHOWN, by="law", quantity=quantity, where={"model": "decoder"})


def _losses(record: Record) -> Iterator[Curve]:
    none, *others = _lines("loss, nat")(record)
    for curve in (none, *others):
        assert curve.marks is not None
        assert none.marks is not None
        points = Points(curve.marks.x, np.subtract(curve.marks.y, none.marks.y))
        yield Curve(curve.name if curve.name in WINDOWS else "", points, points)


_LENGTH = Axis(
    "length, training = 1", log=True, ticks={factor: f"{factor}×" for factor in (1, 2, 4, 8)}
)


@experiment(
    at_most("holds", "the calibrated law keeps the median head's entropy within 5 % of that at 1×, "
            "on held-out text", SOURCE),
    # Stated of every head before the first run.
    refuted("every", "it does so for every head of the decoders", SOURCE, relation="<="),
    at_most("loses", "a decoder calibrated to constant entropy loses to no fixed law by more than "
            "the spread over seeds", SOURCE),
    # Expected to hold as well before the first run, which told otherwise.
    refuted("encoders", "nor does a masked encoder so calibrated", SOURCE, relation="<="),
    at_most("share", "nor does a model calibrated to each head's share of log n", SOURCE),
    at_most("helps", "at the longest texts calibrated has less loss than none", SOURCE),
    at_most("window", "at the longest texts a decoder loses less with a window of the training "
            "length than with any temperature", "acutance.scaling.Window"),
    theorem("same", "laws that are 1 up to the training length change nothing there", within=1e-5),
    figure=[
        Panel(_LENGTH, Axis("loss − loss without a law, nat"), [_losses], "loss"),
        Panel(_LENGTH, Axis("mean entropy of heads, nat"), [_lines("mean H, nat")], "entropy"),
    ],
    needs="transformers", full_only=("loses", "encoders", "share", "helps"),
)  # fmt: skip
def calibrated_length(run: Run) -> Iterator[Measured]:
    """Temperatures and windows beyond the training length.

    Loss and entropy of each kind of model and seed, under each law and at each length.

    Predicted: a factor for each head and length, fitted on text of training, keeps the entropy of
    the median head within 5 % of that at the training length, on held-out text up to 8 times as
    long, but not that of every head; a decoder's loss under it, and every model's under one that
    keeps H / log n, is above that of no fixed law by more than the spread over seeds; but a window
    of the training length beats every temperature: a decoder's loss under it is below that under
    any law.

    Figure: Beyond its training length a window serves a decoder better than every temperature.
    Means over seeds, on held-out text. Loss: last 64 bytes of a text, the same bytes at every
    length, less that without a law, in the styles that the right panel names. A window's entropy is
    not measured.
    """
    worst = 0.0  # of all heads, lengths and seeds of the decoders
    for kind in (decoder_subject,) if run.quick else (decoder_subject, encoder_subject):
        by_seed: list[dict[str, Tensor]] = []
        for step in range(run.size(1, 3)):
            subject = kind(run, step)
            seed = step if kind is decoder_subject else run.seed * 100 + step
            by_seed.append({})
            for number in examine(run, subject, seed, by_seed[-1]):
                yield number
                _, quantity, _, value, where = number
                if (quantity, where["law"], subject.name) == (LARGEST, CALIBRATED, "decoder"):
                    worst = max(worst, value)
        for name in FIXED:
            yield from compared(run, subject.name, name, by_seed, CALIBRATED)
            yield from compared(run, subject.name, name, by_seed, FRACTION)
    over = {"law": CALIBRATED, "decoders": "all heads, lengths and seeds"}
    yield "every", LARGEST, 0.05, worst, over


def compared(
    run: Run, kind: str, name: str, by_seed: Sequence[dict[str, Tensor]], fitted: str
) -> Iterator[Measured]:
    """At each length the loss under a calibrated law less that under the law ``name``.

    Args:
        run: the run.
        kind: name of the kind of model.
        name: of the fixed law.
        by_seed: for each seed the losses by name of law, (lengths, windows).
        fitted: name of the calibrated law.
    """
    claim = "share" if fitted == FRACTION else "loses" if kind == "decoder" else "encoders"
    for at, factor in enumerate(times(run)):
        less = [mean(losses[fitted][at] - losses[name][at]) for losses in by_seed]
        averages = torch.tensor([change.value for change in less], dtype=torch.float64)
        noise = math.sqrt(sum(change.error**2 for change in less)) / len(less)
        spread = float(averages.std()) if len(less) > 1 else 0.0
        where = {"model": kind, "law": name, BOUND: factor}
        estimate = Estimate(float(averages.mean()), noise)
        yield claim, f"loss, {fitted} − this law, nat", spread, estimate, where
        if fitted == CALIBRATED and name == "none" and factor == times(run)[-1]:
            yield "helps", "loss, calibrated − none, nat", 0.0, estimate, where
