"""A trained language model against length: entropy head by head, and laws put on it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from acutance import attention
from acutance.calibration import apply, calibrate
from acutance.scaling import InfoScale, LogN
from acutance.scores import Cosine, ScaleInvariant
from acutance_lab import language, texts
from acutance_lab.experiment import Experiment, Run, mean
from acutance_lab.figure import Axis, Curve, Level, Page, Panel, Points, measured
from acutance_lab.record import Claim, Record, Row, Where, untested_row, values
from acutance_lab.trained import TRAIN_LENGTH

ENTROPY = "Su Jianlin, kexue.fm/archives/8823"
INFO = "Li et al. (2025), arXiv:2501.08570"
COSINE = 32.0  # a scale of the authors'
LAST = 64  # tokens at the end of a window, over which loss beyond the training length is measured
EARLY = 512  # tokens at the start of a window
LESS_NONE = "loss less none, nat"

GROWS = Claim("grows", "no head's entropy falls as n grows", ENTROPY, relation=">=")
UNIT = Claim(
    "unit", "a head's entropy is log n less a constant", ENTROPY, "does not hold", within=0.03
)
BEYOND = Claim(
    "beyond", "InfoScale lowers the loss beyond the training length", INFO, relation="<="
)
LOG_N = Claim(
    "log_n", "beyond the training length InfoScale has no more loss than log n (the comparison is "
    "ours)", INFO, "does not hold", relation="<=",
)  # fmt: skip
COSTS = Claim(
    "costs", "log n and InfoScale, 1 at the trained context, cost loss at the start of a text",
    relation=">=",
)  # fmt: skip
AFTER = Claim(
    "after", "cosine and scale-invariant scores cost loss in a model that was trained without",
    relation=">=",
)  # fmt: skip
CALIBRATED = Claim(
    "calibrated", "calibrated to constant entropy, the model has a higher loss inside its own "
    "context", "acutance.calibrate", relation=">=",
)  # fmt: skip

Change = Callable[[torch.nn.Module], AbstractContextManager[Any]]
#: Names of :func:`changes`.
LAWS, SCORES = ("log_n", "info_scale"), ("cos_scale", "scale_invariant")


def changes(context: int, width: int) -> dict[str, Change]:
    """The compared changes by name: laws applied to a model, or other scores put into it.

    Args:
        context: tokens that the model was trained on, where a law's factor is 1.
        width: dimensions of a head.

    Returns:
        For each name, a function that takes the model and returns a context in which it is changed.
    """

    def by(score: Callable[[float], Cosine | ScaleInvariant]) -> Change:
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            changed = score(scale)
            return attention(query, key, value, is_causal=True, enable_gqa=True, score=changed)

        return lambda model: language.attending(model, attend)

    return {
        "none": lambda model: nullcontext(),
        "log_n": lambda model: apply(model, LogN(train_length=context)),
        "info_scale": lambda model: apply(model, InfoScale(train_length=context, width=width)),
        "cos_scale": by(lambda scale: Cosine(temperature=1 / COSINE)),
        "scale_invariant": by(lambda scale: ScaleInvariant(scale=scale)),
    }


def paired(
    reader: language.Reader, names: Sequence[str], context: int, length: int
) -> dict[str, Tensor]:
    """Next-token losses of one model under several changes, on the same windows of text.

    Args:
        reader: the model and its windows.
        names: which of :func:`changes`, beside ``"none"``, the unchanged model.
        context: tokens that the model was trained on.
        length: tokens of each window that are read.

    Returns:
        By name, losses in nats, (windows, length − 1).
    """
    width = reader.config.hidden_size // reader.config.num_attention_heads
    losses = {}
    for name, change in changes(context, width).items():
        if name == "none" or name in names:
            with change(reader.model):
                losses[name] = torch.stack([reader.losses(ids[:length]) for ids in reader.windows])
    return losses


def slopes(entropy: Tensor, least: int) -> Tensor:
    """Least-squares slope of entropy against log n over rows of at least so many keys.

    Args:
        entropy: (..., n) of causal rows.
        least: keys of the first row that counts.

    Example:
        >>> slopes(torch.arange(1, 101).log() - 0.5, 10)
        tensor(1., dtype=torch.float64)
    """
    n = torch.arange(least, entropy.shape[-1] + 1, dtype=torch.float64)
    x = n.log() - n.log().mean()
    return (x * entropy[..., least - 1 :].double()).sum(-1) / x.square().sum()


def measure(run: Run) -> Iterator[Row]:
    """Rows on the entropy of each head against log n, then on the loss under each law."""
    yield from _of_entropy(run)
    yield from _of_losses(run)
    yield from _of_calibration(run)


def _of_entropy(run: Run) -> Iterator[Row]:
    """Rows with the slope of each head's entropy against log n, compared with 0 and 1."""
    subject = language.measured(run)
    length, heads = subject.reader.windows.shape[1], subject.reader.heads[1]
    by_head = slopes(subject.rows["entropy"], length // 8)
    for head, slope in enumerate(by_head.T):
        where: Where = {"layer": head // heads, "head": head % heads}
        yield GROWS.row("dH/d log n", 0.0, mean(slope), where)
        yield UNIT.row("dH/d log n", 1.0, mean(slope), where)
    model: Where = {"model": subject.reader.name}
    growing = mean((by_head > 0).double().mean(1))
    yield untested_row("share of heads that grow", growing, model)
    yield untested_row("median slope", float(by_head.mean(0).median()), model)


def _of_losses(run: Run) -> Iterator[Row]:
    """Rows comparing the loss under each law with that of the unchanged model.

    The bundled decoder is measured within and beyond its training length, SmolLM2 only within.
    """
    length = TRAIN_LENGTH * run.size(4, 8)
    small = language.small_reader(run, windows=run.size(32, 64), length=length + 1)
    far = paired(small, LAWS, TRAIN_LENGTH, length + 1)
    none, log_n, info = (far[name][:, -LAST:].mean(1) for name in ("none", *LAWS))
    where: Where = {"model": small.name, "n": length}
    yield BEYOND.row(LESS_NONE, 0.0, mean(info - none), where)
    yield LOG_N.row("loss less log n, nat", 0.0, mean(info - log_n), where)
    yield untested_row("loss of log n less none, nat", mean(log_n - none), where)
    yield untested_row("loss of none, nat", mean(none), where)
    near = paired(small, SCORES, TRAIN_LENGTH, TRAIN_LENGTH + 1)
    yield from _within(small.name, near, TRAIN_LENGTH)
    if not run.quick:
        large = language.reader(run, windows=6, length=2048)
        context = large.config.max_position_embeddings
        yield from _within(large.name, paired(large, LAWS + SCORES, context, 2048), EARLY)


def _within(model: str, losses: dict[str, Tensor], early: int) -> Iterator[Row]:
    """Rows on the loss within the training length.

    Args:
        model: its name.
        losses: by name of the change, (windows, length − 1), in nats.
        early: tokens at the start of a window on which the claims are tested.
    """
    for name, loss in losses.items():
        if name == "none":
            continue
        change = loss - losses["none"]
        where: Where = {"model": model, "law": name, "from": 0, "to": early}
        claim = AFTER if name in SCORES else COSTS
        yield claim.row(LESS_NONE, 0.0, mean(change[:, :early].mean(1)), where)
        yield from _by_position(model, name, change)


def _by_position(model: str, name: str, change: Tensor) -> Iterator[Row]:
    """Rows with the mean change of the loss (windows, length − 1) in each octave of position."""
    start, length = 0, change.shape[1]
    while start < length:
        stop = min(max(2 * start, 32), length)
        where: Where = {"model": model, "law": name, "from": start, "to": stop}
        cost = mean(change[:, start:stop].mean(1))
        yield untested_row("change by position, nat", cost, where)
        start = stop


def _of_calibration(run: Run) -> Iterator[Row]:
    """Rows on the loss inside the context under a law that keeps each head's entropy constant.

    The law has the factor 1 up to an eighth of the length that is read. It is fitted to other
    windows: of the decoder's training files, and for SmolLM2 every other window of the text.
    """
    length = run.size(TRAIN_LENGTH, 2048)
    if run.quick:
        reader = language.small_reader(run, windows=128, length=length + 1)
        generator = torch.Generator().manual_seed(1000 + run.seed)
        training = texts.read(texts.files("training"))
        known, windows = texts.sample_windows(training, length, 64, generator), reader.windows
    else:
        reader = language.reader(run, windows=16, length=length)
        known, windows = reader.windows[::2], reader.windows[1::2]
    law = calibrate(
        reader.model, list(known.split(run.size(64, 1))),
        lengths=[length // 8, length // 4, length // 2, length], passes=3,
    )  # fmt: skip
    before = torch.stack([reader.losses(ids) for ids in windows])
    with apply(reader.model, law):
        change = torch.stack([reader.losses(ids) for ids in windows]) - before
    where: Where = {"model": reader.name, "law": "calibrated", "from": 0, "to": length}
    late = where | {"from": length // 2}
    yield CALIBRATED.row(LESS_NONE, 0.0, mean(change.mean(1)), where)
    yield CALIBRATED.row(LESS_NONE, 0.0, mean(change[:, length // 2 :].mean(1)), late)
    yield untested_row("loss of none, nat", mean(before.mean(1)), where)
    yield from _by_position(reader.name, "calibrated", change)


def _slopes(record: Record) -> Iterator[Curve]:
    rows = record.of("grows") or record.untested("dH/d log n")[::2]
    yield Curve("a head", marks=measured(rows, "layer"))


def _model(record: Record) -> str:
    """The model of the right panel: the larger one, where there are two."""
    return str(record.untested("change by position, nat")[-1].condition["model"])


def _changes(record: Record) -> Iterator[Curve]:
    rows = record.untested("change by position, nat", model=_model(record))
    for name in values(rows, "law"):
        line = [row for row in rows if row.condition["law"] == name]
        middle = [(float(row.condition["from"]) + float(row.condition["to"])) / 2 for row in line]
        points = Points(middle, [row.measured for row in line], [row.error for row in line])
        yield Curve(name, points, points)


def _symmetric(axes: Any, record: Record, theme: Any) -> None:
    axes.set_yscale("symlog", linthresh=0.1)


EXPERIMENT = Experiment(
    "real_lengths", "a trained language model against length",
    "entropy grows with n in most heads, by less than log n; InfoScale, which grows as "
    "√log n, helps beyond the training length less than log n; inside the context no law helps, "
    "not even one that keeps each head's entropy constant, and scores that a model was not "
    "trained with cost loss",
    (GROWS, UNIT, BEYOND, LOG_N, COSTS, AFTER, CALIBRATED), measure,
    Page(
        "Entropy against length, and laws put on a trained model",
        lambda record: "Left: slope of each head's entropy against log n; 1 is log n less a "
        f"constant. Right: loss of {_model(record)} under a law less that without, by position in "
        "the text; bars are standard errors.",
        Panel(
            Axis("layer"), Axis("dH / d log n"), [_slopes], "head by head",
            [Level(y=0.0), Level(y=1.0, name="log n less a constant")],
        ),
        Panel(
            Axis("position", log=True), Axis("change of the loss, nat"), [_changes], "laws",
            [Level(y=0.0)], also=_symmetric,
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE, full_only=("grows", "unit", "costs"),
)  # fmt: skip
