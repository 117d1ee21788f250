"""Position-free global layers beyond the trained length: log n, fitted factors, and a window."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance import apply, calibrate
from acutance.calibration import measure as measure_law
from acutance.scaling import ClipLogN, HeadTable, Llama4, LogN, NoScaling, Window
from acutance_lab import texts
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.experiments.calibrated_length import BOUND, LOSS, calibrations
from acutance_lab.experiments.calibrated_length import CALIBRATED as ENTROPY
from acutance_lab.experiments.calibrated_length import FRACTION as SHARE
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import Estimate, at_least, at_most, refuted, theorem
from acutance_lab.sampling import difference
from acutance_lab.trained import Size, next_byte_losses, train_hybrid

SWAN = "Puvvada et al. (2025), SWAN-GPT, arXiv:2504.08719"
NONE, LOG_N, CLIPPED, LLAMA = "none", "log_n", "clip_log_n", "llama4"
ONE = "fitted coefficient"  # 1 + c log(n / T), one c for all heads
WINDOW, HALF = "window of T", "window of T / 2"
HYBRID, ROPE = "position-free", "RoPE"  # the two kinds of model


def size(run: Run) -> Size:
    """The size of both models."""
    if run.quick:
        return Size(length=64, width=64, steps=60, batch=8)
    return Size(length=128, width=96, steps=1600, batch=16)


def times(run: Run) -> tuple[int, ...]:
    """The lengths tested, as multiples of the training length."""
    return (1, 2, 4) if run.quick else (1, 2, 4, 8, 16)


@torch.no_grad()
def losses(run: Run, model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Mean loss of rows that read T/2 to T keys, T to 2 T, ...; (lengths, windows)."""
    parts = windows.split(run.size(8, 1))
    by_byte = torch.cat([next_byte_losses(model, batch) for batch in parts]).double()
    ends = [size(run).length * factor for factor in times(run)]
    return torch.stack([by_byte[:, end // 2 : end].mean(1) for end in ends])


def coefficient(run: Run, model: torch.nn.Module, known: Tensor) -> float:
    """The c of 1 + c log(n / T) with the lowest loss beyond T on windows of training text."""
    beyond = {}
    for c in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6):
        with apply(model, growing(run, c)), torch.no_grad():
            by_byte = torch.cat([next_byte_losses(model, batch) for batch in known.split(1)])
        beyond[c] = float(by_byte[:, size(run).length :].mean())
    return min(beyond, key=lambda c: beyond[c])


def growing(run: Run, c: float) -> HeadTable:
    """The factor 1 + c log(n / T) beyond T, and 1 up to it, for all four heads."""
    first, longest = size(run).length, size(run).length * times(run)[-1]
    return HeadTable([[1.0, 1 + c * math.log(longest / first)]] * 4, lengths=[first, longest])


def laws(run: Run, model: torch.nn.Module, known: Tensor) -> dict[str, Any]:
    """What is tried, by name; layers with a window of their own are left alone by all of it."""
    length, some = size(run).length, known[: run.size(6, 12)]
    lengths = [length * factor for factor in times(run)]
    tried: dict[str, Any] = {
        NONE: NoScaling(), LOG_N: LogN(train_length=length), CLIPPED: ClipLogN(train_length=length),
        LLAMA: Llama4(length=length), WINDOW: Window(length), HALF: Window(length // 2),
        ONE: growing(run, coefficient(run, model, some)),
    }  # fmt: skip
    tried |= calibrations(model, some, lengths, passes=run.size(3, 4))
    windows, passes = list(known.split(1)), run.size(2, 6)
    tried[LOSS] = calibrate(model, windows, target="loss", lengths=lengths, passes=passes)
    return tried


def entropies(run: Run, model: torch.nn.Module, windows: Tensor, law: Any) -> list[Estimate]:
    """Mean entropy of the position-free heads at T and at the longest length."""
    ends = [size(run).length, size(run).length * times(run)[-1]]
    under_law = measure_law(model, [windows], lengths=ends, law=law)
    columns = [under_law.lengths.index(length) for length in ends]
    errors = torch.cat([under_law.errors(module).T for module in under_law.modules])[:, columns]
    return [
        Estimate(float(value.mean()), float(error.square().sum().sqrt()) / len(error))
        for value, error in zip(under_law.flat()[:, columns].T, errors.T, strict=True)
    ]


def over_seeds(differences: Sequence[Tensor]) -> Estimate:
    """The mean over seeds and windows, with a standard error of both.

    Args:
        differences: one tensor (windows,) for each seed, of the same windows.
    """
    stacked = torch.stack(list(differences))
    by_window, by_seed = stacked.mean(0), stacked.mean(1)
    error = float(by_window.std()) ** 2 / len(by_window)
    if len(by_seed) > 1:
        error += float(by_seed.std()) ** 2 / len(by_seed)
    return Estimate(float(stacked.mean()), math.sqrt(error))


#: By kind of model and law, for each seed the losses (lengths, windows).
Losses = Mapping[tuple[str, str], Sequence[Tensor]]


def of_all_seeds(factors: Sequence[int], losses: Losses) -> Iterator[Measured]:
    """Losses and their paired differences, by kind of model, law and length.

    Args:
        factors: the lengths, as multiples of the training length.
        losses: by kind of model and law.
    """

    def less(kind: str, law: str, other: str, at: int) -> Estimate:
        """Loss under a law at a length less that under another."""
        pairs = zip(losses[kind, law], losses[kind, other], strict=True)
        return over_seeds([own[at] - others[at] for own, others in pairs])

    for (kind, law), by_seed in losses.items():
        for at, factor in enumerate(factors):
            where = {"model": kind, "law": law, BOUND: factor}
            yield untested("loss, nat", over_seeds([own[at] for own in by_seed]), where)
            yield untested("loss less none, nat", less(kind, law, NONE, at), where)
    for at, factor in enumerate(factors[1:], 1):
        pairs = zip(losses[HYBRID, NONE], losses[ROPE, NONE], strict=False)  # of the first seed
        grown = over_seeds([(a[at] - a[0]) - (b[at] - b[0]) for a, b in pairs])
        where = {"model": HYBRID, "law": NONE, BOUND: factor}
        yield "robust", "growth of the loss, less RoPE's, nat", 0.0, grown, where
        for claim, law, other in (
            ("log_n", CLIPPED, NONE), ("free", CLIPPED, WINDOW), ("llama4", LLAMA, NONE),
            ("entropy", ENTROPY, CLIPPED), ("loss", LOSS, CLIPPED),
        ):  # fmt: skip
            name = "log n" if other == CLIPPED else other
            where = {"model": HYBRID, "law": law, BOUND: factor}
            yield claim, f"loss, less {name}, nat", 0.0, less(HYBRID, law, other, at), where
    last = {
        law: float(torch.stack(list(by_seed))[:, -1].mean())
        for (kind, law), by_seed in losses.items()
        if kind == HYBRID and law not in (WINDOW, HALF)
    }
    best = min(last, key=lambda law: last[law])
    where = {"model": HYBRID, "law": best, BOUND: factors[-1]}
    change = less(HYBRID, WINDOW, best, -1)
    yield "window", "loss, window − best temperature, nat", 0.0, change, where


def _lines(kind: str, quantity: str, names: dict[str, str], marks: str = "means") -> Lines:
    """A curve for each law of a kind of model."""
    return Lines("", BOUND, names, by="law", quantity=quantity, where={"model": kind}, marks=marks)


_SHOWN = {law: law for law in (CLIPPED, LLAMA, ONE, ENTROPY, SHARE, LOSS, WINDOW)}
_READ = Axis(
    "keys read, trained length = 1", log=True,
    ticks={factor: f"{factor}×" for factor in (1, 2, 4, 8, 16)},
)  # fmt: skip


@experiment(
    refuted("free", "with log n, reading more than T keys has no more loss than a window of T",
            f"{SWAN}; the comparison is ours", relation="<="),
    # Before the first run log n and Llama 4's temperature were expected to have less loss.
    at_least("log_n", "log n, clipped at the length T of training, has no less loss than none"),
    at_most("robust", "without a law the loss grows less than with RoPE in all layers", SWAN,
            bound=BOUND, sense="from"),
    at_least("llama4", "Llama 4's temperature, its length set to T, has no less loss than none",
             "Meta (2025), Llama 4, in transformers"),
    refuted("entropy", "calibrated to constant entropy it is no higher than with log n",
            "acutance.calibrate", relation="<="),
    at_most("loss", "calibrated to the loss, it is lower than with log n", "acutance.calibrate",
            bound=BOUND, sense="from"),
    at_most("window", "at the longest texts a window of T beats every temperature",
            "acutance.scaling.Window"),
    at_least("spreads", "without a law the entropy of position-free heads grows with the text",
             SWAN),
    theorem("same", "what begins beyond T changes no loss at T", within=1e-5),
    figure=[
        Panel(_READ, Axis("loss, nat a byte"),
              [_lines(kind, "loss, nat", {NONE: f"{name}, no law", WINDOW: f"{name}, {WINDOW}"})
               for kind, name in ((HYBRID, "position-free"), (ROPE, "RoPE in all layers"))],
              "models"),
        Panel(_READ, Axis("loss less that without a law, nat"),
              [_lines(HYBRID, "loss less none, nat", _SHOWN, "bars")],
              "laws, position-free model", [Level(y=0.0)]),
    ],
    needs="transformers",
    full_only=("log_n", "free", "robust", "llama4", "entropy", "loss", "window"),
)  # fmt: skip
def swan(run: Run) -> Iterator[Measured]:
    """Position-free global layers beyond the trained length.

    The models are trained, laws are fitted to each, and held-out text is read under all of them.
    The model with RoPE throughout is trained with the first seed only.

    Predicted: a model with RoPE in windows and no positions in its global layers loses less beyond
    its trained length T than one with RoPE throughout; log n on the global layers and Llama 4's
    temperature do not lower its loss, factors that hold the entropy constant raise it, and factors
    fitted to the loss are better than log n; a window of T on the global layers is better than
    every temperature.

    Figure: Position-free global layers beyond their trained length. Decoders of bytes; RoPE in
    windows, no positions in global layers. Held-out loss of rows that read at most 1 to 16 times
    the trained length T, and more than half of it. Bars: standard errors over windows and seeds.
    """
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(4000 + run.seed)
    length, longest = size(run).length, times(run)[-1]
    known = texts.sample_windows(training, longest * length, run.size(6, 30), generator)
    windows = texts.sample_windows(held_out, longest * length + 1, run.size(32, 64), generator)
    by_law: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for seed in run.seeds(1, 3):
        for kind in (HYBRID, ROPE) if seed == 100 * run.seed else (HYBRID,):
            free = kind == HYBRID
            model = train_hybrid(
                size(run), seed, training, position_free=free,
                keep=run.checkpoint(f"swan-{'free' if free else 'rope'}-{seed}"), note=run.note,
            )  # fmt: skip
            if run.note is not None:
                run.note(f"swan: laws of {kind}, seed {seed}")
            tried: dict[str, Any] = {
                NONE: NoScaling(), CLIPPED: ClipLogN(train_length=length), WINDOW: Window(length)
            }  # fmt: skip
            if free:
                tried = laws(run, model, known)
            for law, scaling in tried.items():
                with apply(model, scaling):
                    by_law[kind, law].append(losses(run, model, windows))
            for law in (NONE, CLIPPED) if free else ():
                first, last = entropies(run, model, windows[: run.size(6, 12), :-1], tried[law])
                where = {"model": HYBRID, "law": law, "seed": seed, BOUND: longest}
                yield untested("mean H, nat", first, {**where, BOUND: 1})
                yield untested("mean H, nat", last, where)
                if law == NONE:
                    growth = difference(last, first)
                    yield "spreads", "H less that at 1×, nat", 0.0, growth, where
            for law in (CLIPPED, WINDOW, ONE) if free else ():
                where = {"model": HYBRID, "law": law, "seed": seed, BOUND: 1}
                before, after = (float(by_law[HYBRID, name][-1][0].mean()) for name in (NONE, law))
                yield "same", "loss at 1×, nat", before, after, where
    yield from of_all_seeds(times(run), by_law)
