"""Rows of a trained language model cut to their largest keys, and bounded by their mean field."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from acutance_lab import language
from acutance_lab.experiment import Experiment, Run, mean
from acutance_lab.figure import GREY, Axis, Curve, Level, Page, Panel, Points, measured
from acutance_lab.record import Claim, Record, Row, Where, untested_row

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
    "floor", "in every row H ≥ log n − (s_max − s̄)", relation=">=", rounding=1e-4, theorem=True
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


def measure(run: Run) -> Iterator[Row]:
    """For each head of a model: keys that hold 99 % of the weight, entropy and its lower bound.

    Numbers are means over the rows of the second half of each window, or of its last row only.
    """
    subject = language.measured(run)
    n, heads = subject.reader.windows.shape[1], subject.reader.heads[1]
    late = torch.arange(n) >= n // 2
    counts = torch.arange(1, n + 1, dtype=torch.float64)

    def by_head(values: Tensor) -> Tensor:
        """Mean over the rows of the second half of each window, (windows, heads)."""
        return values[..., late].double().mean(-1)

    needed, rule = (
        by_head(subject.rows["keys_99"] / counts),
        by_head(gaussian_share(subject.rows[BOUND])),
    )
    entropy, field = subject.rows["entropy"].double(), subject.rows["mean_field_entropy"].double()
    margin = entropy - field
    least = margin[..., late].amin((0, 2))
    shown = {"H": by_head(entropy), "bound": by_head(field)}
    shown |= {gap: by_head(subject.rows[gap]) for gap in ("jensen_gap", "max_gap")}
    model: Where = {"model": subject.reader.name}
    for head in range(needed.shape[1]):
        spread = float(by_head(subject.rows[BOUND])[:, head].mean())
        where = model | {"head": f"{head // heads}.{head % heads}", BOUND: spread}
        off = mean(needed[:, head] - rule[:, head])  # of the same rows
        keys = off._replace(value=mean(needed[:, head]).value)
        yield RULE.row("k/n", float(rule[:, head].mean()), keys, where)
        yield FLOOR.row("least H − bound, nat", 0.0, float(least[head]), where)
        for name, numbers in shown.items():
            yield untested_row(f"mean {name}, nat", float(numbers.mean(0)[head]), where)
    enough, above = (mean(holds.double().mean(1)) for holds in (rule >= needed, by_head(field) > 0))
    yield ENOUGH.row("share of heads", 0.95, enough, model)
    yield TIGHT.row("share of heads", 0.5, above, model)
    yield untested_row("rows below the bound", int((margin < -FLOOR.rounding).sum()), model)
    yield untested_row("rows", margin.numel(), model)
    yield untested_row("median of the rule's k over k", float((rule / needed).median()), model)
    for kept, largest in subject.largest.items():
        if kept >= n:
            continue
        where = {**model, "k": kept}
        tv, kl = (float(subject.last[kept, what].mean()) for what in ("tv", "kl"))
        quantity = "total variation, last rows"
        yield CERTIFICATE.row(quantity, kl, tv, where)
        yield COUNTED.row(quantity, tv, float(1 - largest[..., -1].mean()), where)
        middle = float(by_head(1 - largest).mean(0).median())
        yield untested_row("total variation, median head", middle, where)
    exact = float(subject.exact_keys.double().mean())
    counted = float(subject.rows["keys_99"][..., -1].mean())
    yield KEYS.row("keys of 99 %, last rows", exact, counted, model)


def _keys(record: Record) -> Iterator[Curve]:
    heads = measured([row for row in record.rows if row.quantity == "k/n"], BOUND)
    smooth = torch.linspace(min(heads.x), max(heads.x), 100)
    yield Curve("Gaussian rule", Points(smooth.numpy(), gaussian_share(smooth).numpy()), style=0)
    yield Curve("a head", marks=heads, style=0)


def _bounds(record: Record) -> Iterator[Curve]:
    bounds, H = (
        [row.measured for row in record.untested(f"mean {name}, nat")] for name in ("bound", "H")
    )
    yield Curve("a head", marks=Points(bounds, H))
    ends = [min(bounds), max(H)]
    yield Curve("equal", Points(ends, ends), style=GREY)


EXPERIMENT = Experiment(
    "real_topk", "top-k certificates and the mean-field bound on trained heads",
    "what dropping keys costs follows exactly from their weight; how many keys carry "
    "99 % follows from σ alone where logits are nearly Gaussian, which few heads are; the "
    "mean-field bound holds in every row and is below 0 in most",
    (RULE, ENOUGH, CERTIFICATE, COUNTED, KEYS, FLOOR, TIGHT), measure,
    Page(
        "Keys that hold 99 % of a row, and the mean-field bound, head by head",
        "Each mark is a head: mean over the rows of the second half of the windows. On the line "
        "prediction and measurement agree.",
        Panel(
            Axis("deviation of the logits"), Axis("k/n for 99 %", log=True), [_keys], "keys needed"
        ),
        Panel(
            Axis("log n − (s_max − s̄), nat"), Axis("H, nat"), [_bounds], "mean-field bound",
            [Level(x=0.0)],
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE, full_only=("rule", "tight"),
)  # fmt: skip
