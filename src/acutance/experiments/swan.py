"""Position-free global layers beyond the trained length: log n, fitted factors, and a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.calibration import apply, calibrate
from acutance.calibration import measure as measure_law
from acutance.experiments.harness.experiment import Experiment, Run
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where, untested_row
from acutance.experiments.models import hybrid, texts
from acutance.experiments.models.trained import next_byte_losses
from acutance.report import plot_style
from acutance.scaling import ClipLogN, HeadTable, Llama4, LogN, NoScaling, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from acutance.calibration.law import AnyLaw

SWAN = "Puvvada et al. (2025), SWAN-GPT, arXiv:2504.08719"
META = "Meta (2025), Llama 4, in transformers"
NONE, LOG_N, CLIPPED, LLAMA = "none", "log_n", "clip_log_n", "llama4"
ONE = "fitted coefficient"  # 1 + c log(n / T), one c for all heads
ENTROPY, SHARE, LOSS = "calibrated", "calibrated H / log n", "calibrated loss"
WINDOW, HALF = "window of T", "window of T / 2"
HYBRID, ROPE = "position-free", "RoPE"  # the two kinds of model
BOUND = "times"  # the training length T; rows read at most so many keys, and more than half
#: Coefficients c of 1 + c log(n / T) that are tried.
COEFFICIENTS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)

# Before the first run log n and Llama 4's temperature were expected to have less loss than none.
LOG = Claim(
    "log_n", "log n on the position-free layers, clipped at the training length T, has no less "
    "loss beyond T than none", relation=">=",
)  # fmt: skip
FREE = Claim(
    "free", "with it reading more than T keys costs nothing: no more loss than with a window of T",
    f"{SWAN}; the comparison is ours", "does not hold", relation="<=",
)  # fmt: skip
ROBUST = Claim(
    "robust", "without a law the loss grows less than that of the same size with RoPE in all "
    "layers", SWAN, relation="<=", bound=BOUND, sense="from",
)  # fmt: skip
COARSE = Claim(
    "llama4", "Llama 4's temperature, its length set to T, has no less loss beyond T than none",
    META, relation=">=",
)  # fmt: skip
CONSTANT = Claim(
    "entropy", "calibrated to constant entropy, the position-free heads have no more loss than "
    "with log n", "acutance.calibrate", "does not hold", relation="<=",
)  # fmt: skip
FITTED = Claim(
    "loss", "calibrated to the loss, the position-free heads have less loss than with log n",
    "acutance.calibrate", relation="<=", bound=BOUND, sense="from",
)  # fmt: skip
READS = Claim(
    "window", "a window of T on the position-free layers has less loss than every temperature, at "
    "the longest texts", "acutance.scaling.Window", relation="<=",
)  # fmt: skip
SPREADS = Claim(
    "spreads", "without a law the entropy of the position-free heads grows with the text", SWAN,
    relation=">=",
)  # fmt: skip
SAME = Claim("same", "what begins beyond T changes no loss at T", within=1e-5, theorem=True)


@dataclass(frozen=True)
class Texts:
    """The bytes that one run reads.

    Attributes:
        training: text that models are trained on.
        known: windows of it that laws are fitted to, (windows, 16 T).
        held_out: windows of other files, (windows, 16 T + 1).
    """

    training: Tensor
    known: Tensor
    held_out: Tensor


def size(run: Run) -> hybrid.Size:
    """The size of both models."""
    if run.quick:
        return hybrid.Size(length=64, width=64, steps=60, batch=8)
    return hybrid.Size(length=128, width=96, steps=1600, batch=16)


def times(run: Run) -> tuple[int, ...]:
    """The lengths tested, as multiples of the training length."""
    return (1, 2, 4) if run.quick else (1, 2, 4, 8, 16)


def read_texts(run: Run) -> Texts:
    """Windows of the run's seed, the same for all models."""
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(4000 + run.seed)
    longest = size(run).length * times(run)[-1]
    known = texts.sample_windows(training, longest, run.size(6, 30), generator)
    windows = texts.sample_windows(held_out, longest + 1, run.size(32, 64), generator)
    return Texts(training, known, windows)


@torch.no_grad()
def losses(run: Run, model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Mean loss of rows that read T/2 to T keys, T to 2 T, ...; (lengths, windows)."""
    parts = windows.split(run.size(8, 1))
    each = torch.cat([next_byte_losses(model, part) for part in parts]).double()
    ends = [size(run).length * factor for factor in times(run)]
    return torch.stack([each[:, end // 2 : end].mean(1) for end in ends])


def coefficient(run: Run, model: torch.nn.Module, known: Tensor) -> float:
    """The c of 1 + c log(n / T) with the lowest loss beyond T on windows of training text."""
    found = {}
    for one in (0.0, *COEFFICIENTS):
        with apply(model, growing(run, one)), torch.no_grad():
            parts = [
                next_byte_losses(model, part)[:, size(run).length :] for part in known.split(1)
            ]
        found[one] = float(torch.cat(parts).mean())
    return min(found, key=lambda one: found[one])


def growing(run: Run, c: float) -> HeadTable:
    """The factor 1 + c log(n / T) beyond T, and 1 up to it, for all four heads."""
    first, longest = size(run).length, size(run).length * times(run)[-1]
    return HeadTable([[1.0, 1 + c * math.log(longest / first)]] * 4, lengths=[first, longest])


def laws(run: Run, model: torch.nn.Module, known: Tensor) -> dict[str, AnyLaw]:
    """What is tried, by name; layers with a window of their own are left alone by all of it."""
    length = size(run).length
    lengths = [length * factor for factor in times(run)]
    found: dict[str, AnyLaw] = {
        NONE: NoScaling(),
        LOG_N: LogN(train_length=length),
        CLIPPED: ClipLogN(train_length=length),
        LLAMA: Llama4(length=length),
        WINDOW: Window(length),
        HALF: Window(length // 2),
        ONE: growing(run, coefficient(run, model, known[: run.size(6, 12)])),
    }
    for name, target in ((ENTROPY, "entropy"), (SHARE, "normalized_entropy")):
        found[name] = calibrate(
            model, [known[: run.size(6, 12)]], target=target, lengths=lengths, reference=length,
            passes=run.size(3, 4),
        )  # fmt: skip
    found[LOSS] = calibrate(
        model, list(known.split(1)), target="loss", lengths=lengths, passes=run.size(2, 6)
    )
    return found


def entropies(run: Run, model: torch.nn.Module, windows: Tensor, law: AnyLaw) -> list[Estimate]:
    """Mean entropy of the position-free heads at T and at the longest length."""
    ends = [size(run).length, size(run).length * times(run)[-1]]
    found = measure_law(model, [windows], lengths=ends, law=law)
    columns = [found.lengths.index(length) for length in ends]
    errors = torch.cat([found.errors(module).T for module in found.modules])[:, columns]
    return [
        Estimate(float(value.mean()), float(error.square().sum().sqrt()) / len(error))
        for value, error in zip(found.flat()[:, columns].T, errors.T, strict=True)
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


def measure(run: Run) -> Sequence[Row]:
    """Train the models, fit the laws to each, and read held-out text under all of them.

    The model with RoPE throughout is trained with the first seed only.
    """
    read = read_texts(run)
    rows: list[Row] = []
    found: dict[tuple[str, str], list[Tensor]] = {}
    for step in range(run.size(1, 3)):
        seed = 100 * run.seed + step
        for kind in (HYBRID, ROPE)[: 1 if step else 2]:  # RoPE throughout: the first seed
            free = kind == HYBRID
            name = f"swan-{'free' if free else 'rope'}-{seed}"
            with torch.enable_grad():
                model = hybrid.train(
                    size(run), seed, read.training, position_free=free, keep=run.checkpoint(name),
                    note=run.note,
                )  # fmt: skip
            if run.note is not None:
                run.note(f"swan: laws of {kind}, seed {seed}")
            tried: dict[str, AnyLaw] = {
                NONE: NoScaling(), CLIPPED: ClipLogN(train_length=size(run).length),
                WINDOW: Window(size(run).length),
            }  # fmt: skip
            if free:
                tried = laws(run, model, read.known)
            for law, scaling in tried.items():
                with apply(model, scaling):
                    found.setdefault((kind, law), []).append(losses(run, model, read.held_out))
            if free:
                rows += of_one_seed(run, model, seed, tried, read, found)
    return [*rows, *rows_of(times(run), found)]


def of_one_seed(
    run: Run,
    model: torch.nn.Module,
    seed: int,
    tried: Mapping[str, AnyLaw],
    read: Texts,
    found: Mapping[tuple[str, str], Sequence[Tensor]],
) -> list[Row]:
    """Rows of one model with position-free layers: entropies, and losses that may not change."""
    rows: list[Row] = []
    windows = read.held_out[: run.size(6, 12), :-1]
    for law in (NONE, CLIPPED):
        first, last = entropies(run, model, windows, tried[law])
        where: Where = {"model": HYBRID, "law": law, "seed": seed}
        for factor, one in ((1, first), (times(run)[-1], last)):
            rows.append(untested_row("mean H, nat", one, where | {BOUND: factor}))
        if law == NONE:
            growth = Estimate(last.value - first.value, math.hypot(last.error, first.error))
            longest = where | {BOUND: times(run)[-1]}
            rows.append(SPREADS.row("H less that at 1×, nat", 0.0, growth, longest))
    for law in (CLIPPED, WINDOW, ONE):
        where = {"model": HYBRID, "law": law, "seed": seed, BOUND: 1}
        before, after = (float(found[HYBRID, one][-1][0].mean()) for one in (NONE, law))
        rows.append(SAME.row("loss at 1×, nat", before, after, where))
    return rows


def rows_of(factors: Sequence[int], found: Mapping[tuple[str, str], Sequence[Tensor]]) -> list[Row]:
    """Losses and their paired differences, by kind of model, law and length.

    Args:
        factors: the lengths, as multiples of the training length.
        found: by kind and law, for each seed the losses (lengths, windows).
    """
    rows: list[Row] = []

    def less(one: tuple[str, str], other: tuple[str, str], at: int) -> Estimate:
        """Loss of ``one`` at a length less that of ``other``."""
        return over_seeds([a[at] - b[at] for a, b in zip(found[one], found[other], strict=True)])

    for (kind, law), by_seed in found.items():
        for at, factor in enumerate(factors):
            where: Where = {"model": kind, "law": law, BOUND: factor}
            rows += [
                untested_row("loss, nat", over_seeds([one[at] for one in by_seed]), where),
                untested_row("loss less none, nat", less((kind, law), (kind, NONE), at), where),
            ]
    clipped, none = (HYBRID, CLIPPED), (HYBRID, NONE)

    def row(claim: Claim, quantity: str, law: str, difference: Estimate, factor: int) -> Row:
        return claim.row(quantity, 0.0, difference, {"model": HYBRID, "law": law, BOUND: factor})

    for at, factor in enumerate(factors):
        if factor == 1:
            continue
        grown = over_seeds([
            (a[at] - a[0]) - (b[at] - b[0])
            for a, b in zip(found[none], found[ROPE, NONE], strict=False)  # of the first seed
        ])  # fmt: skip
        change = {law: less((HYBRID, law), none, at) for law in (CLIPPED, LLAMA)}
        beyond = {law: less((HYBRID, law), clipped, at) for law in (ENTROPY, LOSS)}
        rows += [
            row(LOG, "loss, less none, nat", CLIPPED, change[CLIPPED], factor),
            row(
                FREE,
                "loss, less window of T, nat",
                CLIPPED,
                less(clipped, (HYBRID, WINDOW), at),
                factor,
            ),
            row(ROBUST, "growth of the loss, less RoPE's, nat", NONE, grown, factor),
            row(COARSE, "loss, less none, nat", LLAMA, change[LLAMA], factor),
            row(CONSTANT, "loss, less log n, nat", ENTROPY, beyond[ENTROPY], factor),
            row(FITTED, "loss, less log n, nat", LOSS, beyond[LOSS], factor),
        ]
    temperatures = [law for kind, law in found if kind == HYBRID and law not in (WINDOW, HALF)]
    best = min(
        temperatures,
        key=lambda law: float(torch.stack(list(found[HYBRID, law]))[:, -1].mean()),
    )
    difference = less((HYBRID, WINDOW), (HYBRID, best), -1)
    return [
        *rows,
        row(READS, "loss, window − best temperature, nat", best, difference, factors[-1]),
    ]


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Loss against length: of both models with the simplest remedies, and of all laws less none."""
    figure, (left, right) = plot_style.new_figure(
        "Position-free global layers beyond their trained length",
        "Decoders of bytes; RoPE in windows, no positions in global layers. Held-out loss of rows "
        "that read at most 1 to 16 times the trained length T, and more than half of it. Bars: "
        "standard errors over windows and seeds.",
        panels=2,
        theme=theme,
    )
    factors = sorted({int(row.condition[BOUND]) for row in record.rows})

    def line(quantity: str, kind: str, law: str) -> tuple[list[float], list[float]]:
        own = {
            row.condition[BOUND]: row for row in record.rows
            if row.quantity == quantity and not row.claim
            and row.condition["model"] == kind and row.condition["law"] == law
        }  # fmt: skip
        return [own[f].measured for f in factors], [own[f].error for f in factors]

    names = {HYBRID: "position-free", ROPE: "RoPE in all layers"}
    shown = [(kind, law) for kind in names for law in (NONE, WINDOW)]
    for (kind, law), curve in zip(shown, plot_style.curves(len(shown), theme), strict=True):
        y, _ = line("loss, nat", kind, law)
        plot_style.draw_line(left, factors, y, curve)
        name = f"{names[kind]}, {law.replace('none', 'no law')}"
        plot_style.draw_marks(left, factors, y, curve, name)
    all_laws = [CLIPPED, LLAMA, ONE, ENTROPY, SHARE, LOSS, WINDOW]
    for law, curve in zip(all_laws, plot_style.curves(len(all_laws), theme), strict=True):
        y, error = line("loss less none, nat", HYBRID, law)
        plot_style.draw_line(right, factors, y, curve)
        plot_style.draw_marks(right, factors, y, curve, law, error=error)
    plot_style.reference(right, theme, y=0.0)
    for axes, where in ((left, "center right"), (right, "lower left")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(factors, [f"{factor}×" for factor in factors])
        plot_style.legend(axes, theme, where=where)
    x_label = "keys read, trained length = 1"
    plot_style.label(left, x=x_label, y="loss, nat a byte", title="models")
    plot_style.label(
        right, x=x_label, y="loss less that without a law, nat", title="laws, position-free model"
    )
    return figure


EXPERIMENT = Experiment(
    name="swan",
    title="position-free global layers beyond the trained length",
    prediction="a model with RoPE in windows and no positions in its global layers loses less "
    "beyond its trained length T than one with RoPE throughout; log n on the global layers and "
    "Llama 4's temperature do not lower its loss, factors that hold the entropy constant raise it, "
    "and factors fitted to the loss are better than log n; a window of T on the global layers is "
    "better than every temperature",
    claims=(FREE, LOG, ROBUST, COARSE, CONSTANT, FITTED, READS, SPREADS, SAME),
    measure=measure,
    draw=draw,
    needs="transformers",
    full_only=("log_n", "free", "robust", "llama4", "entropy", "loss", "window"),
)
