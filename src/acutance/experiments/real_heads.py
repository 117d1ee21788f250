"""Heads of trained models: their entropy from two, three and four numbers of their logits."""

from __future__ import annotations

import importlib.util
import math
import pydoc_data.topics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acutance.corpus import load_model
from acutance.corpus import texts as corpus
from acutance.experiments.harness.experiment import Experiment, Run
from acutance.experiments.harness.record import Claim, Record, Row, Where, untested_row
from acutance.experiments.models import texts
from acutance.experiments.models.trained import decoder
from acutance.probing.open_probe import probe
from acutance.report import plot_style
from acutance.summary.head_summary import HeadSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = (
    "entropy", "gaussian_entropy", "mean_field_entropy", "jensen_gap", "max_gap", "logit_std",
    "n_keys", "information", "first_gap", "rest_logit_std", "rest_jensen_gap",
)  # fmt: skip
BOUND = "logit_std"

GAUSS = Claim(
    "gauss", "a head's entropy is that of Gaussian logits with its n and standard deviation",
    expected="holds only where", within=0.03, bound=BOUND,
)  # fmt: skip
FOUR = Claim(
    "four", "a head's entropy follows from gap of the first key, its deviation over rows, and "
    "deviation and Jensen gap of the other logits", expected="holds only where", within=0.05,
    bound=BOUND,
)  # fmt: skip
FLOOR = Claim("floor", "H ≥ log n − (s_max − s̄)", relation=">=", rounding=1e-4, theorem=True)
IDENTITY = Claim("identity", "H = log n − (s_max − s̄) + J + G", within=1e-3, theorem=True)


@dataclass(frozen=True)
class Subject:
    """A model and the texts on which its heads are measured."""

    name: str
    model: torch.nn.Module
    batches: Sequence[dict[str, Tensor]]


def subjects(run: Run) -> Iterable[Subject]:
    """The decoder of this package and, where it is installed, the demo's sentence encoder."""
    text = texts.read(texts.files("held out"))
    ids = texts.sample_windows(text, run.size(128, 512), run.size(4, 16), run.generator)
    yield Subject("decoder", decoder(), [{"input_ids": part} for part in ids.split(4)])
    if importlib.util.find_spec(load_model.DEFAULT_PACKAGE) is None:
        return
    encoder = load_model.load(None)
    pieces = corpus.windows([corpus.bundled()], encoder.tokenizer, run.size(128, 256))
    pieces = pieces[: run.size(2, 8)]
    batches = corpus.batches(pieces, 4, encoder.pad)
    inputs = [{"input_ids": one.input_ids, "attention_mask": one.attention_mask} for one in batches]
    yield Subject("MiniLM-L6", encoder.model, inputs)
    if run.quick or importlib.util.find_spec(load_model.DECODER_PACKAGE) is None:
        return
    language_model = load_model.load(load_model.DECODER, head=False)
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    tokens = language_model.tokenizer(topics, return_tensors="pt").input_ids
    windows = tokens[:, : 2048 * (tokens.shape[1] // 2048)].view(-1, 1, 2048)[-8:-6]
    yield Subject("SmolLM2-135M", language_model.model, [{"input_ids": one} for one in windows])


@torch.no_grad()
def summary(subject: Subject) -> HeadSummary:
    """Probe the model on all its texts; the mean of each metric over rows, for each head."""
    with probe(subject.model, noise=True) as opened:
        for batch in subject.batches:
            subject.model(**batch)
    return opened.summary()


def r_squared(predicted: Tensor, measured: Tensor) -> float:
    """Share of the variance over heads that a prediction explains.

    1 at best, below 0 if it is worse than the mean.

    Example:
        >>> r_squared(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
        0.5
    """
    miss = (measured - predicted).square().sum()
    return float(1 - miss / (measured - measured.mean()).square().sum())


def measure(run: Run) -> Sequence[Row]:
    """Compare each head's mean entropy with predictions from two, three and four of its numbers."""
    rows: list[Row] = []
    for subject in subjects(run):
        found = summary(subject)
        means = {name: found.mean(name) for name in found.metrics}
        H, gauss, floor = (
            means[name] for name in ("entropy", "gaussian_entropy", "mean_field_entropy")
        )
        for at, (layer, head) in enumerate(found.places):
            where: Where = {
                "model": subject.name,
                "head": f"{layer}.{head}",
                BOUND: float(means["logit_std"][at]),
                "n": float(means["n_keys"][at]),
            }
            whole = float(floor[at] + means["jensen_gap"][at] + means["max_gap"][at])
            rows += [
                GAUSS.row("mean H, nat", float(gauss[at]), float(H[at]), where),
                FLOOR.row("mean H, nat", float(floor[at]), float(H[at]), where),
                IDENTITY.row("mean H, nat", whole, float(H[at]), where),
            ]
        heads = found.predict()
        for at, (layer, head) in enumerate(found.places):
            n, four = float(heads.n[at]), float(heads.predicted["entropy"][at])
            if math.isfinite(four):
                spread = float(means["logit_std"][at])
                place: Where = {"model": subject.name, "head": f"{layer}.{head}"}
                place |= {BOUND: spread, "n": n}
                measured = float(heads.measured["entropy"][at])
                rows.append(FOUR.row("mean H at n, nat", four, measured, place))
        model: Where = {"model": subject.name, "heads": len(H)}
        rows += [
            untested_row("R² over heads, Gaussian", r_squared(gauss, H), model),
            untested_row("R² over heads, from four numbers", heads.r_squared(), model),
            untested_row("R² over heads, of log n − (s_max − s̄)", r_squared(floor, H), model),
        ]
    return rows


def deviating(record: Record, least: float = 0.25) -> list[tuple[str, str, float]]:
    """Heads whose entropy is at least so many nats from the Gaussian prediction.

    Returns:
        (model, "layer.head", measured − predicted), furthest first.
    """
    off = [
        (str(row.condition["model"]), str(row.condition["head"]), row.measured - row.predicted)
        for row in record.of("gauss")
    ]
    return sorted((one for one in off if abs(one[2]) >= least), key=lambda one: -abs(one[2]))


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Measured against predicted entropy of each head, from two numbers and from four."""
    figure, panels = plot_style.new_figure(
        "Entropy of trained heads from two numbers of their logits, and from four",
        "Each mark is a head: mean over rows. On the line prediction and measurement agree. Named: "
        "those furthest off.",
        panels=2,
        theme=theme,
    )
    names = list(dict.fromkeys(str(row.condition["model"]) for row in record.of("gauss")))
    parts = (
        ("gauss", "from n and standard deviation, Gaussian"),
        ("four", "from n, gap of the first key and its deviation,\ndeviation and Jensen gap"),
    )
    options: dict[str, Any] = {"size": 9.5, "color": theme.ink, "textcoords": "axes fraction"}
    options["arrowprops"] = {"arrowstyle": "-", "color": theme.muted, "shrinkB": 3.0}
    for axes, (claim, title) in zip(panels, parts, strict=True):
        every: list[float] = []
        for name, curve in zip(names, plot_style.curves(len(names), theme), strict=True):
            own = record.of(claim, model=name)
            x, y = [row.predicted for row in own], [row.measured for row in own]
            every += x + y
            plot_style.draw_marks(axes, x, y, curve, name)
        low, high = min(every) - 0.3, max(every) + 0.3
        axes.plot([low, high], [low, high], color=theme.muted, linewidth=1.1, label="equal")
        axes.set_xlim(low, high)
        plot_style.label(axes, x="predicted H, nat", y="measured H, nat", title=title)
    places = {(row.condition["model"], row.condition["head"]): row for row in record.of("gauss")}
    named = [(places[one[:2]], one[1]) for one in deviating(record)[:3]]
    for at, (row, head) in enumerate(sorted(named, key=lambda one: -one[0].measured)):
        point = (row.predicted, row.measured)
        panels[0].annotate(head, point, (0.92, 0.42 - 0.09 * at), **options)
    plot_style.legend(panels[0], theme, where="upper left")
    return figure


EXPERIMENT = Experiment(
    name="real_heads",
    title="heads of trained models",
    prediction="H of a head is E H of Gaussian logits with its n and standard deviation while "
    "that is small, and farther from it the larger it is; log n − (s_max − s̄) is a lower bound, "
    "too low by exactly J + G; with a sink and a skew, four numbers give it",
    claims=(GAUSS, FOUR, FLOOR, IDENTITY),
    measure=measure,
    draw=draw,
    needs="transformers",
)
