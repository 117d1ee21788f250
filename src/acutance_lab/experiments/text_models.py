"""Models of text that are trained: the scale of their logits, and reading beyond their length."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance import apply, calibrate, probe, scaling, theory
from acutance.calibration import measure as measure_law
from acutance_lab import texts, trained
from acutance_lab.encoder import Attention, Encoder
from acutance_lab.experiment import Measured, Run, experiment, untested
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import Estimate, at_least, at_most, refuted, theorem
from acutance_lab.sampling import between_seeds, mean
from acutance_lab.trained import next_byte_losses
from acutance_lab.training import Plan, fit, seeded

SU, CALIBRATE = "Su Jianlin, kexue.fm/archives/8823", "acutance.calibrate"
SWAN = "Puvvada et al. (2025), SWAN-GPT, arXiv:2504.08719"

SHORT = 64
LENGTHS = (64, 128, 256, 512, 1024)
MASK, MASKED = 256, 0.15
LAWS: dict[str, scaling.Scaling] = {"O": scaling.NoScaling(), "E": scaling.LogN(base=512.0)}
#: 2 layers of width 64, whose slowest rotation goes round once in the training length.
_SHAPE: dict[str, Any] = {
    "symbols": 257, "outputs": 256, "width": 64, "heads": 4, "hidden": 192, "layers": 2,
    "base": (SHORT / (2 * math.pi)) ** (16 / 14), "norm_first": True,
}  # fmt: skip
#: Nearer to the training length one pair of trainings says little about another.
FAR = 512


def masked(windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace a share of the bytes by the mask symbol; also return True where that was done."""
    hidden = torch.rand(windows.shape, generator=generator) < MASKED
    return windows.masked_fill(hidden, MASK), hidden


def train_encoder(run: Run, kind: str, seed: int) -> Encoder:
    """Train a masked language model on windows of 64 bytes; ``kind`` names its scaling law."""
    text = texts.read(texts.files("training"))

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        windows = texts.sample_windows(text, SHORT, run.size(16, 32), generator)
        ids, hidden = masked(windows, generator)
        return F.cross_entropy(model(ids)[hidden], windows[hidden])

    plan = Plan(f"mlm-{kind}", run.size(150, 1000), 4e-3, seed=seed, warm=20, fall=0.6, decay=0.1)
    make = partial(Encoder, **_SHAPE, law=LAWS[kind])
    return fit(make, loss, plan, **run.saving(f"{plan.name}-{seed}"))


@torch.no_grad()
def predict(model: nn.Module, data: Sequence[Tensor], length: int) -> tuple[Tensor, float]:
    """Let the model predict masked bytes, with windows cut into pieces of ``length`` bytes.

    Args:
        model: the model.
        data: original bytes, the same with masked bytes, and True where a byte is masked; (windows,
            n) each.
        length: of the pieces; it divides n.

    Returns:
        Whether each masked byte is predicted correctly, (masked bytes,), and their mean loss in
        nats.
    """
    right, loss = [], 0.0
    pieces = (tensor.reshape(-1, length).split(4096 // length) for tensor in data)
    for original, ids, hidden in zip(*pieces, strict=True):
        answers, truth = model(ids)[hidden], original[hidden]
        right.append(answers.argmax(-1) == truth)
        loss += float(F.cross_entropy(answers, truth, reduction="sum"))
    correct = torch.cat(right)
    return correct, loss / len(correct)


_NAMES = {kind: f"Attention-{kind}" for kind in LAWS}
_WINDOW_LENGTH = Axis("window n, bytes", log=True, ticks={n: str(n) for n in LENGTHS})


@experiment(
    at_least("above", "in windows longer than in training, a model with log n is on average at "
             "least as accurate as one without", SU),
    at_least("most", "from 8 times the training length on, it is more accurate in most pairs", SU),
    at_most("equal", "at the training length their accuracies differ by at most 0.02", SU),
    at_least("entropy", "with log n the entropy grows less with the window than without", SU),
    theorem("same", "a law gives the same loss built into a model and applied to it", within=1e-4),
    figure=[
        Panel(_WINDOW_LENGTH, Axis("accuracy on masked bytes", limits=(0.0, None)),
              [Lines("", "n", _NAMES, by="law", quantity="accuracy", marks="bars")], "accuracy"),
        Panel(_WINDOW_LENGTH, Axis("mean entropy of heads, nat"),
              [Lines("", "n", _NAMES, by="law", quantity="mean H, nat", marks="bars")], "entropy"),
    ],
    full_only=("above", "most", "equal"),
)  # fmt: skip
def mlm_table(run: Run) -> Iterator[Measured]:
    """Masked language model, beyond its length.

    Accuracy and entropy with and without log n, on the same masked bytes at each length.

    Predicted: trained at n = 64 both are equally accurate there; read at 128 to 1024 the one with
    log n is above the one without, and its entropy grows less.

    Figure: Masked bytes: trained on 64 at a time, read in longer windows. O: no scaling. E: log n
    to the base 512, in training and after. Means over seeds, with standard errors. The same masked
    bytes at every n.
    """
    seeds, text = run.seeds(1, 6), texts.read(texts.files("held out"))
    windows = texts.sample_windows(text, LENGTHS[-1], run.size(6, 48), run.generator)
    data = (windows, *masked(windows, run.generator))
    # for each seed: whether each answer is right, and the mean entropy
    right: dict[tuple[str, int], list[Tensor]] = {(k, n): [] for k in LAWS for n in LENGTHS}
    entropy: dict[tuple[str, int], list[float]] = {(k, n): [] for k in LAWS for n in LENGTHS}
    for seed in seeds:
        for kind in LAWS:
            model = train_encoder(run, kind, seed)
            bare = Encoder(**_SHAPE).eval()
            bare.load_state_dict(model.state_dict())
            for n in LENGTHS:
                right[kind, n].append(predict(model, data, n)[0].double())
                with probe(model, metrics=["entropy"]) as opened, torch.no_grad():
                    model(data[1][:4].reshape(-1, n))
                summary = opened.summary()
                H = summary.mean("entropy")
                entropy[kind, n].append(float(H.mean()))
                where: dict[str, Any] = {"seed": seed, "n": n}
                if kind == "E":
                    some = [tensor[:2] for tensor in data]
                    with apply(bare, LAWS["E"]):
                        _, applied = predict(bare, some, n)
                    yield "same", "loss, nat", predict(model, some, n)[1], applied, where
                for (layer, head), value in zip(summary.places, H.tolist(), strict=True):
                    place = {"law": kind, **where, "head": f"{layer}.{head}"}
                    yield untested("H of a head, nat", value, place)
    for (kind, n), answers in right.items():
        where = {"law": kind, "n": n}
        yield untested("accuracy", between_seeds([float(x.mean()) for x in answers]), where)
        yield untested("mean H, nat", between_seeds(entropy[kind, n]), where)
    for n in LENGTHS:
        gains = [mean(E - O) for E, O in zip(right["E", n], right["O", n], strict=True)]
        for at, (seed, gain) in enumerate(zip(seeds, gains, strict=True)):
            where = {"n": n, "seed": seed}
            yield untested("gain in accuracy", gain, where)
            if n > SHORT:
                O, E = (entropy[kind, n][at] - entropy[kind, SHORT][at] for kind in "OE")
                yield "entropy", "rise of H, O − E, nat", 0.0, O - E, where
            elif not run.quick:
                apart = Estimate(abs(gain.value), gain.error)
                yield "equal", "difference of accuracies", 0.02, apart, where
        # with little training E may still be behind O, whatever its entropy
        if n > SHORT and not run.quick:
            gained = [gain.value for gain in gains]
            yield "above", "mean gain in accuracy", 0.0, between_seeds(gained), {"n": n}
            share = sum(gain > 0 for gain in gained) / len(gained)
            yield "most" if n >= FAR else "", "share of pairs with a gain", 0.5, share, {"n": n}


GEMMA = "huggingface/transformers, issue 45676"
READ, WIDTH, QK_HEADS, LAYERS = 128, 128, 2, 3
HEAD = WIDTH // QK_HEADS
LESS_UNIT, GRADIENTS = "loss less that of 1/√d, nat", "log ratio of first gradients"
BEFORE = "entropy before training, nat"
UNIT, SHARPER, ONE = 1.0, 1.44, math.sqrt(HEAD)  # scale 1/√d, nanochat's, and 1


class Decoder(nn.Module):
    """A pre-norm decoder of bytes with tied embeddings, and normalised queries and keys.

    Args:
        deviation: of the logits of queries and keys in random directions: the scale times √d.
        gains: whether the normalisations have trained gains, which start at 1.
    """

    def __init__(self, deviation: float, *, gains: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        how: dict[str, Any] = {
            "base": 10000.0, "bias": False, "is_causal": True, "scale": deviation / math.sqrt(HEAD),
            "norm": partial(nn.RMSNorm, HEAD, eps=1e-6, elementwise_affine=gains),
        }  # fmt: skip
        self.attention = nn.ModuleList(Attention(WIDTH, QK_HEADS, **how) for _ in range(LAYERS))
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next byte (B, n, 256), from bytes (B, n)."""
        x = _norm(self.embedding(input_ids))
        for attention, network in zip(self.attention, self.networks, strict=True):
            x = x + attention(_norm(x))
            x = x + network(_norm(x))
        return F.linear(_norm(x), self.embedding.weight)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), eps=1e-6)


#: Ways to scale: the deviation of the logits before training, and whether gains are trained.
QUICK = ((UNIT, False), (ONE, False))
CONTENDERS = (
    *((deviation, False) for deviation in (0.5, UNIT, SHARPER, 2.0, 4.0, ONE)),
    (UNIT, True), (ONE, True),
)  # fmt: skip
#: The claim on a loss less that of 1/√d.
CLAIMS = {(SHARPER, False): "sharpens", (ONE, False): "one_hot", (ONE, True): "gain"}


def train_scaled(
    run: Run, contender: tuple[float, bool], seed: int, held_out: Tensor, text: Tensor
) -> dict[str, float]:
    """Train one decoder; the batches depend on the seed alone.

    Returns:
        "entropy", of the last row of each head before training, mean over windows, in nats;
        "gradient", the norm of that of all query and key projections at the initial weights;
        "loss", on the held-out windows after training, in nats for a byte.
    """
    deviation, gains = contender
    steps, saved = run.size(4, 300), f"qk-{deviation:.3g}{'-gains' if gains else ''}-{seed}"
    plan = Plan("qk_norm_scale", steps, 3e-3, seed=seed, warm=steps // 10, fall=0.5, decay=0.1)

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        return next_byte_losses(model, texts.sample_windows(text, READ + 1, 16, generator)).mean()

    make = partial(Decoder, deviation, gains=gains)
    with seeded(seed):
        model = make()
    batch = held_out[:16]
    last = torch.zeros(16, READ, dtype=torch.bool)
    last[:, -1] = True
    with torch.no_grad(), probe(model, metrics=["entropy"], rows=last) as opened:
        model(batch[:, :-1])
    entropy = float(opened.summary().mean("entropy").mean())
    inputs = [cast("Attention", layer).inputs.weight for layer in model.attention]
    slopes = torch.autograd.grad(next_byte_losses(model, batch).mean(), inputs)
    gradient = math.hypot(*(float(slope[: 2 * WIDTH].norm()) for slope in slopes))
    model = fit(make, loss, plan, **run.saving(saved))
    with torch.no_grad():
        after = next_byte_losses(model, held_out, 32).mean(1)
    return {"entropy": entropy, "gradient": gradient, "loss": float(after.mean())}


def _by_gains(quantity: str) -> Lines:
    names = {"none": "no gains", "trained": "trained gains"}
    return Lines("", "logit_std", names, by="gains", quantity=quantity, marks="bars")


_DEVIATION = Axis("logits' deviation before training", log=True, ticks=(0.5, 1, 1.44, 2, 4, 8))


@experiment(
    at_least("explodes", "after QK-norm, scale 1 gives a larger first gradient of the query and "
             "key projections than 1/√d", GEMMA),
    at_least("one_hot", "trained with scale 1 a model ends at a higher loss than with 1/√d", GEMMA),
    at_most("sharpens", "logits of standard deviation 1.44 in place of 1 do not raise the loss",
            "karpathy/nanochat, gpt.py: q and k times 1.2 after RMSNorm"),
    at_most("gain", "with trained gains, scale 1 ends at no higher loss than 1/√d without gains"),
    refuted("entropy", "before training, scale 1 gives the entropy of normal logits of standard "
            "deviation √d", GEMMA, within=0.05),
    figure=[
        Panel(_DEVIATION, Axis("held-out loss less that of 1/√d, nat"), [_by_gains(LESS_UNIT)],
              "loss", [Level(y=0.0)]),
        Panel(_DEVIATION, Axis("log of the gradient's norm over that of 1/√d"),
              [_by_gains(GRADIENTS)], "first gradient of queries and keys", [Level(y=0.0)]),
    ],
    full_only=("one_hot", "sharpens", "gain"),
)  # fmt: skip
def qk_norm_scale(run: Run) -> Iterator[Measured]:
    """Query-key normalisation and the scale after it.

    Every contender is trained from the same seeds, on the same batches.

    Predicted: with heads 64 wide, scale 1 after QK-norm gives logits of deviation 8 and nearly
    one-hot rows; training then ends at a higher loss, which trained gains make up for; 1.44 in
    place of 1 costs nothing.

    Figure: After QK-norm the scale still matters. Decoders of bytes trained on windows of 128,
    heads 64 wide, all else the same. Deviation 1 is the scale 1/√d, 8 is the scale 1. Bars:
    standard errors between seeds.
    """
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(3000 + run.seed)
    windows = texts.sample_windows(held_out, READ + 1, run.size(32, 128), generator)
    results = {
        how: [train_scaled(run, how, seed, windows, training) for seed in run.seeds(3, 4)]
        for how in (QUICK if run.quick else CONTENDERS)
    }
    unit = results[UNIT, False]
    for (deviation, gains), models in results.items():
        pairs = list(zip(models, unit, strict=True))
        loss, entropy = (between_seeds([own[key] for own in models]) for key in ("loss", "entropy"))
        change = between_seeds([a["loss"] - b["loss"] for a, b in pairs])
        growth = between_seeds([math.log(a["gradient"] / b["gradient"]) for a, b in pairs])
        where = {"logit_std": round(deviation, 2), "gains": "trained" if gains else "none"}
        rows = {"loss, nat": loss, LESS_UNIT: change, GRADIENTS: growth, BEFORE: entropy}
        yield from (untested(quantity, value, where) for quantity, value in rows.items())
        if (deviation, gains) in CLAIMS:
            yield CLAIMS[deviation, gains], LESS_UNIT, 0.0, change, where
        if (deviation, gains) == (ONE, False):
            yield "explodes", GRADIENTS, 0.0, growth, where
            exact = theory.expected_entropy_gauss(READ, ONE)
            yield "entropy", BEFORE, exact, entropy, where


NONE, CLIPPED, LLAMA = "none", "clip_log_n", "llama4"
#: Laws that are not fitted to the model, in calibrated_length.
FIXED = (NONE, "log_n", CLIPPED, "ssmax", "yarn", "sqrt_log_n")
ENTROPY = "calibrated"  # each head's entropy stays what it was
SHARE = "calibrated H / log n"  # each head's share of log n stays what it was
LOSS = "calibrated loss"  # fitted to the loss itself; decoders only
COEFFICIENT = "fitted coefficient"  # 1 + c log(n / T), one c for all heads
#: Keys that a row reads, without a temperature; decoders only. T is the training length.
WINDOWS = {f"window of {size}": scaling.Window(size) for size in (128, 96, 64)}
WINDOW, HALF = "window of T", "window of T / 2"
DECODER, ENCODER, HYBRID, ROPE = "decoder", "masked encoder", "position-free", "RoPE"
BOUND = "times"  # the training length
MEDIAN, LARGEST = (f"{which} of |H / H at 1× − 1|" for which in ("median", "largest"))


class Subject(NamedTuple):
    """A trained model, how it is calibrated and how it is judged.

    Attributes:
        kind: of model.
        seed: of the model.
        model: the model.
        lengths: that are read; the first is that of training.
        known: windows that calibration may read, from the text of training.
        held_out: windows that entropies are measured on.
        losses: of the model as it is, (lengths, windows).
    """

    kind: str
    seed: int
    model: nn.Module
    lengths: list[int]
    known: Tensor
    held_out: Tensor
    losses: Callable[[], Tensor]

    def at(self, law: str, index: int) -> dict[str, Any]:
        """The condition of a row: this model under a law at one of the lengths."""
        times = self.lengths[index] // self.lengths[0]
        return {"model": self.kind, "law": law, "seed": self.seed, BOUND: times}

    def entropies(self, law: Any, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Mean entropy of each head on held-out text, and its standard error; (heads, lengths)."""
        under_law = measure_law(self.model, [self.held_out], lengths=lengths, law=law)
        columns = [under_law.lengths.index(length) for length in lengths]
        errors = torch.cat([under_law.errors(module).T for module in under_law.modules])
        return under_law.flat()[:, columns], errors[:, columns]

    def fitted(self, *, windows: int, passes: int, to_loss: int) -> dict[str, Any]:
        """Laws with factors for each head and length.

        Args:
            windows: how many windows the entropies are fitted to.
            passes: over them.
            to_loss: passes of the law that is fitted to the loss; 0 fits none.
        """
        fitted_to = partial(calibrate, self.model, lengths=self.lengths)
        entropies = partial(fitted_to, [self.known[:windows]], reference=self.lengths[0])
        laws: dict[str, Any] = {
            ENTROPY: entropies(target="entropy", passes=passes),
            SHARE: entropies(target="normalized_entropy", passes=passes),
        }
        if to_loss:
            laws[LOSS] = fitted_to(self.known.split(1), target="loss", passes=to_loss)
        return laws


#: By kind of model and law, for each seed the losses (lengths, windows).
Losses = dict[tuple[str, str], list[Tensor]]


def read(run: Run, subject: Subject, laws: Mapping[str, Any], losses: Losses) -> None:
    """Add the losses of a model under each law."""
    if run.note is not None:
        run.note(f"{run.name}: laws of {subject.kind}, seed {subject.seed}")
    for law, change in laws.items():
        with apply(subject.model, change):
            losses[subject.kind, law].append(subject.losses().double())


def paired(losses: Losses, kind: str, law: str, other: str, index: int) -> list[Tensor]:
    """For each seed the loss of each window under a law less that under another, at a length."""
    pairs = zip(losses[kind, law], losses[kind, other], strict=True)
    return [own[index] - others[index] for own, others in pairs]


def _by_law(kind: str, quantity: str, names: Mapping[str, str], marks: str = "means") -> Lines:
    """A curve for each law of a kind of model."""
    return Lines("", BOUND, names, by="law", quantity=quantity, where={"model": kind}, marks=marks)


_LENGTH = Axis("length, training = 1", log=True, ticks={2**k: f"{2**k}×" for k in range(5)})


def decoder_subject(run: Run, step: int) -> Subject:
    """The bundled decoder for seed 0, else one trained in the same way.

    Its loss is that of the last 64 bytes of each window.
    """
    lengths = [trained.TRAIN_LENGTH * 2**k for k in range(run.size(3, 4))]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    if step in trained.SEEDS:
        model: nn.Module = trained.decoder(step)
    else:
        shape, saving = trained.configuration(), run.saving(f"decoder-{step}")
        model = trained.train("decoder", shape, step, training, **saving)
    generator = torch.Generator().manual_seed(1000 + run.seed)
    known = texts.sample_windows(training, lengths[-1], run.size(12, 64), generator)
    windows = texts.sample_windows(held_out, lengths[-1] + 1, run.size(32, 64), generator)

    def losses() -> Tensor:
        ends = (windows[:, -(length + 1) :] for length in lengths)
        by_byte = [next_byte_losses(model, end, run.size(16, 8)) for end in ends]
        return torch.stack([losses[:, -64:].mean(1) for losses in by_byte])

    some = windows[: run.size(12, 64), : lengths[-1]]
    return Subject(DECODER, step, model, lengths, known, some, losses)


def encoder_subject(run: Run, step: int) -> Subject:
    """The masked language model of :obj:`mlm_table` without a law.

    Its loss is that of the masked bytes.
    """
    seed = run.seed * 100 + step
    model = train_encoder(run, "O", seed)
    lengths = [SHORT * 2**k for k in range(run.size(3, 4))]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(2000 + run.seed)
    known = texts.sample_windows(training, lengths[-1], run.size(4, 64), generator)
    known, _ = masked(known, generator)
    windows = texts.sample_windows(held_out, lengths[-1], run.size(16, 64), generator)
    ids, hidden = masked(windows, generator)
    data = list(zip(windows, ids, hidden, strict=True))

    def losses() -> Tensor:
        by_length = [[predict(model, window, n)[1] for window in data] for n in lengths]
        return torch.tensor(by_length)

    return Subject(ENCODER, seed, model, lengths, known, ids[: run.size(4, 64)], losses)


def laws_of_any(run: Run, subject: Subject) -> dict[str, Any]:
    """The laws of :data:`FIXED`, and those fitted to the subject.

    The fixed ones use only the training length, and sqrt_log_n also the standard deviation of the
    logits. A decoder also gets a law fitted to the loss, and windows of the training length, of 3/4
    and of 1/2 of it.
    """
    length, is_decoder = subject.lengths[0], subject.kind == DECODER
    with probe(subject.model, metrics=["logit_std"]) as opened:
        subject.model(subject.known[:, :length])
    gamma = float(opened.summary().mean("logit_std").mean())
    fixed = (
        scaling.NoScaling(), scaling.LogN(train_length=length),
        scaling.ClipLogN(train_length=length), scaling.SSMax(s=1 / math.log(length)),
        scaling.Yarn(train_length=length), scaling.SqrtLogN(train_length=length, gamma=gamma),
    )  # fmt: skip
    fitted = subject.fitted(windows=64, passes=run.size(4, 6), to_loss=3 if is_decoder else 0)
    return {**dict(zip(FIXED, fixed, strict=True)), **fitted, **(WINDOWS if is_decoder else {})}


def examine(run: Run, subject: Subject, losses: Losses) -> Iterator[Measured]:
    """Measure the losses and entropies of a model under every law and at every length.

    The entropies under a window are not measured: none of its rows sees more keys than in training.

    Args:
        run: the run.
        subject: the model.
        losses: takes the losses.
    """
    laws = laws_of_any(run, subject)
    read(run, subject, laws, losses)
    by_law = {law: losses[subject.kind, law][-1] for law in laws}
    for law, loss in by_law.items():
        for index, values in enumerate(loss):
            yield untested("loss, nat", mean(values), subject.at(law, index))
        if law in WINDOWS:
            continue
        H, _ = subject.entropies(laws[law], subject.lengths)
        if law == NONE:
            start = H[:, 0]  # every head's own, at the training length
        for index, entropy in enumerate(H.T):
            off, where = (entropy / start - 1).abs(), subject.at(law, index)
            yield untested("mean H, nat", float(entropy.mean()), where)
            held = "holds" if law == ENTROPY and index else ""
            yield held, MEDIAN, 0.05, float(off.median()), where
            yield untested(LARGEST, float(off.max()), where)
    for law in (CLIPPED, "yarn", ENTROPY, SHARE):
        before, after = (by_law[name][0].mean() for name in (NONE, law))
        yield "same", "loss at 1×, nat", before, after, subject.at(law, 0)
    if subject.kind == DECODER:
        last = {law: float(loss[-1].mean()) for law, loss in by_law.items() if law not in WINDOWS}
        best = min(last, key=last.__getitem__)
        less = mean(by_law["window of 128"][-1] - by_law[best][-1])
        yield "window", "loss, window − best temperature, nat", 0.0, less, subject.at(best, -1)


#: Not ssmax: with s = 1 / log of the length it is log_n.
_SHOWN = {law: law for law in (*FIXED, ENTROPY, SHARE, LOSS, *WINDOWS) if law != "ssmax"}
#: In the panel of losses, where only windows are named: the other panel names temperatures.
_MARKED = dict.fromkeys(_SHOWN, "") | {law: law for law in WINDOWS}


@experiment(
    at_most("holds", "a law calibrated to constant entropy keeps the median head's entropy within "
            "5 % of that at the training length, on longer held-out text", CALIBRATE),
    # Stated of every head before the first run.
    refuted("every", "it does so for every head of the decoders", CALIBRATE, relation="<="),
    at_most("loses", "a decoder's loss under this law is at most one standard deviation over seeds "
            "above that under each fixed law", CALIBRATE),
    # Expected to hold as well before the first run, which told otherwise.
    refuted("encoders", "a masked encoder's loss under this law is at most one standard deviation "
            "over seeds above that under each fixed law", CALIBRATE, relation="<="),
    at_most("share", "if the share of log n is held constant instead, the loss of either model is "
            "at most one standard deviation over seeds above that under each fixed law", CALIBRATE),
    at_most("helps", "at the longest texts a law of constant entropy lowers the loss", CALIBRATE),
    at_most("window", "at the longest texts a decoder's loss is lower with a window of the "
            "training length than with any temperature", "acutance.scaling.Window"),
    theorem("same", "laws that are 1 up to the training length do not change the loss there",
            within=1e-5),
    figure=[
        Panel(_LENGTH, Axis("loss, nat a byte"), [_by_law(DECODER, "loss, nat", _MARKED)], "loss"),
        Panel(_LENGTH, Axis("mean entropy of heads, nat"),
              [_by_law(DECODER, "mean H, nat", _SHOWN)], "entropy"),
    ],
    needs="transformers", full_only=("loses", "encoders", "share", "helps"),
)  # fmt: skip
@torch.no_grad()
def calibrated_length(run: Run) -> Iterator[Measured]:
    """Temperatures and windows beyond the training length.

    Loss and entropy of each kind of model and seed, under each law and at each length.

    Predicted: a factor for each head and length, fitted on text of training, keeps the entropy of
    the median head within 5 % of that at the training length, on held-out text up to 8 times as
    long, but not that of every head; a decoder's loss under it, and every model's under one that
    keeps H / log n, is above that of no fixed law by more than the spread over seeds; but a window
    of the training length beats every temperature: a decoder's loss under it is below that under
    any law.

    Figure: Beyond its training length a window serves a decoder better than every temperature.
    Means over seeds, on held-out text. Loss: last 64 bytes of a text, the same bytes at every
    length; the right panel names the temperatures. A window's entropy is not measured.
    """
    losses: Losses = defaultdict(list)
    numbers: list[Measured] = []
    for make in (decoder_subject,) if run.quick else (decoder_subject, encoder_subject):
        for step in range(run.size(1, 3)):
            numbers += examine(run, make(run, step), losses)
    yield from numbers
    for kind in dict.fromkeys(kind for kind, _ in losses):
        for law in FIXED:
            yield from compared(losses, kind, law, ENTROPY)
            yield from compared(losses, kind, law, SHARE)
    worst = max(
        value for _, quantity, _, value, where in numbers
        if (quantity, where["law"], where["model"]) == (LARGEST, ENTROPY, DECODER)
    )  # fmt: skip
    over = {"law": ENTROPY, "decoders": "all heads, lengths and seeds"}
    yield "every", LARGEST, 0.05, worst, over


def compared(losses: Losses, kind: str, law: str, fitted: str) -> Iterator[Measured]:
    """At each length the loss of a kind of model under a fitted law less that under a fixed one."""
    claim = "share" if fitted == SHARE else "loses" if kind == DECODER else "encoders"
    last = len(losses[kind, law][0]) - 1
    for index in range(last + 1):
        less = [mean(change) for change in paired(losses, kind, fitted, law, index)]
        seeds = between_seeds([change.value for change in less])
        noise = math.hypot(*(change.error for change in less)) / len(less)
        spread, estimate = seeds.error * math.sqrt(len(less)), Estimate(seeds.value, noise)
        where = {"model": kind, "law": law, BOUND: 2**index}
        yield claim, f"loss, {fitted} − this law, nat", spread, estimate, where
        if (fitted, law, index) == (ENTROPY, NONE, last):
            yield "helps", "loss, calibrated − none, nat", 0.0, estimate, where


def hybrid_subject(run: Run, kind: str, seed: int) -> Subject:
    """A decoder with position-free global layers, or one with RoPE and all keys in every layer.

    Its losses are those of rows that read T/2 to T keys, T to 2 T, ..., of one long text.
    """
    length, free = run.size(64, 128), kind == HYBRID
    lengths = [length * 2**k for k in range(run.size(3, 5))]
    training, held_out = (texts.read(texts.files(part)) for part in ("training", "held out"))
    generator = torch.Generator().manual_seed(4000 + run.seed)
    known = texts.sample_windows(training, lengths[-1], run.size(6, 30), generator)
    windows = texts.sample_windows(held_out, lengths[-1] + 1, run.size(32, 64), generator)
    model = trained.train(
        "hybrid", trained.hybrid_configuration(length, run.size(64, 96), position_free=free), seed,
        training, length=length, steps=run.size(60, 1600), batch=run.size(8, 16),
        **run.saving(f"swan-{'free' if free else 'rope'}-{seed}"),
    )  # fmt: skip

    def losses() -> Tensor:
        by_byte = next_byte_losses(model, windows, run.size(8, 1)).double()
        return torch.stack([by_byte[:, end // 2 : end].mean(1) for end in lengths])

    return Subject(kind, seed, model, lengths, known, windows[: run.size(6, 12), :-1], losses)


def growing(lengths: Sequence[int], c: float) -> scaling.HeadTable:
    """The factor 1 + c log(n / T) beyond T, and 1 up to it, for all four heads."""
    first, last = lengths[0], lengths[-1]
    return scaling.HeadTable([[1.0, 1 + c * math.log(last / first)]] * 4, lengths=[first, last])


def laws_of_global_layers(run: Run, subject: Subject) -> dict[str, Any]:
    """What is tried, by name; layers with a window of their own are left alone by all of it."""
    length, some = subject.lengths[0], run.size(6, 12)
    laws: dict[str, Any] = {
        NONE: scaling.NoScaling(), "log_n": scaling.LogN(train_length=length),
        CLIPPED: scaling.ClipLogN(train_length=length), LLAMA: scaling.Llama4(length=length),
        WINDOW: scaling.Window(length), HALF: scaling.Window(length // 2),
    }  # fmt: skip
    if subject.kind == ROPE:
        return {law: laws[law] for law in (NONE, CLIPPED, WINDOW)}

    def beyond(c: float) -> float:
        """The loss beyond T on windows of training text under the factor 1 + c log(n / T)."""
        with apply(subject.model, growing(subject.lengths, c)):
            by_byte = next_byte_losses(subject.model, subject.known[:some], 1)
        return float(by_byte[:, length:].mean())

    best = min((0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6), key=beyond)
    laws[COEFFICIENT] = growing(subject.lengths, best)
    return laws | subject.fitted(windows=some, passes=run.size(3, 4), to_loss=run.size(2, 6))


def over_seeds(differences: Sequence[Tensor]) -> Estimate:
    """The mean over seeds and windows, with a standard error of both.

    Args:
        differences: one tensor (windows,) for each seed, of the same windows.
    """
    stacked = torch.stack(list(differences))
    by_window, by_seed = mean(stacked.mean(0)), between_seeds(stacked.mean(1).tolist())
    return Estimate(by_seed.value, math.hypot(by_window.error, by_seed.error))


def of_all_seeds(losses: Losses) -> Iterator[Measured]:
    """Losses of swan and their paired differences, by kind of model, law and length."""
    for (kind, law), by_seed in losses.items():
        for index in range(len(by_seed[0])):
            where = {"model": kind, "law": law, BOUND: 2**index}
            change = over_seeds(paired(losses, kind, law, NONE, index))
            yield untested("loss, nat", over_seeds([own[index] for own in by_seed]), where)
            yield untested("loss less none, nat", change, where)
    free, rope = losses[HYBRID, NONE], losses[ROPE, NONE][0]
    last = len(rope) - 1
    for index in range(1, last + 1):
        grown = (free[0][index] - free[0][0]) - (rope[index] - rope[0])  # of the first seed
        where = {"model": HYBRID, "law": NONE, BOUND: 2**index}
        yield "robust", "growth of the loss, less RoPE's, nat", 0.0, over_seeds([grown]), where
        for claim, law, other in (
            ("log_n", CLIPPED, NONE), ("free", CLIPPED, WINDOW), ("llama4", LLAMA, NONE),
            ("entropy", ENTROPY, CLIPPED), ("loss", LOSS, CLIPPED),
        ):  # fmt: skip
            change = over_seeds(paired(losses, HYBRID, law, other, index))
            name = "log n" if other == CLIPPED else other
            yield claim, f"loss, less {name}, nat", 0.0, change, {**where, "law": law}
    mean_at_last = {
        law: float(torch.stack(by_seed)[:, -1].mean())
        for (kind, law), by_seed in losses.items()
        if kind == HYBRID and law not in (WINDOW, HALF)
    }
    best = min(mean_at_last, key=mean_at_last.__getitem__)
    change = over_seeds(paired(losses, HYBRID, WINDOW, best, last))
    where = {"model": HYBRID, "law": best, BOUND: 2**last}
    yield "window", "loss, window − best temperature, nat", 0.0, change, where


_CHANGED = {law: law for law in (CLIPPED, LLAMA, COEFFICIENT, ENTROPY, SHARE, LOSS, WINDOW)}


@experiment(
    refuted("free", "with log n on the global layers, reading more than T keys gives no higher "
            "loss than a window of T keys", f"{SWAN}; the comparison is ours", relation="<="),
    # Before the first run log n and Llama 4's temperature were expected to have less loss.
    at_least("log_n", "log n, clipped at the training length T, does not lower the loss"),
    at_most("robust", "without a law the loss grows less than with RoPE in all layers", SWAN,
            bound=BOUND, sense="from"),
    at_least("llama4", "Llama 4's temperature, its length set to T, does not lower the loss",
             "Meta (2025), Llama 4, in transformers"),
    refuted("entropy", "a law calibrated to constant entropy gives no higher loss than log n",
            CALIBRATE, relation="<="),
    at_most("loss", "a law calibrated to the loss gives a lower loss than log n", CALIBRATE,
            bound=BOUND, sense="from"),
    at_most("window", "at the longest texts a window of T keys gives a lower loss than every "
            "temperature", "acutance.scaling.Window"),
    at_least("spreads", "without a law the entropy of position-free heads grows with n", SWAN),
    theorem("same", "laws that begin beyond T do not change the loss at T", within=1e-5),
    figure=[
        Panel(_LENGTH, Axis("loss, nat a byte"),
              [_by_law(kind, "loss, nat", {NONE: f"{name}, no law", WINDOW: f"{name}, {WINDOW}"})
               for kind, name in ((HYBRID, "position-free"), (ROPE, "RoPE in all layers"))],
              "models"),
        Panel(_LENGTH, Axis("loss less that without a law, nat"),
              [_by_law(HYBRID, "loss less none, nat", _CHANGED, "bars")],
              "laws, position-free model", [Level(y=0.0)]),
    ],
    needs="transformers",
    full_only=("log_n", "free", "robust", "llama4", "entropy", "loss", "window"),
)  # fmt: skip
@torch.no_grad()
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
    losses: Losses = defaultdict(list)
    seeds = run.seeds(1, 3)
    for kind, seed in [*((HYBRID, seed) for seed in seeds), (ROPE, seeds[0])]:
        subject = hybrid_subject(run, kind, seed)
        laws = laws_of_global_layers(run, subject)
        read(run, subject, laws, losses)
        if kind == ROPE:
            continue
        for law in (NONE, CLIPPED):
            H, errors = subject.entropies(laws[law], [subject.lengths[0], subject.lengths[-1]])
            noise = errors.square().sum(0).sqrt() / len(errors)
            first, last = map(Estimate, H.mean(0).tolist(), noise.tolist())
            where = subject.at(law, -1)
            yield untested("mean H, nat", first, subject.at(law, 0))
            yield untested("mean H, nat", last, where)
            if law == NONE:
                yield "spreads", "H less that at 1×, nat", 0.0, last - first, where
        for law in (CLIPPED, WINDOW, COEFFICIENT):
            before, after = (losses[kind, name][-1][0].mean() for name in (NONE, law))
            yield "same", "loss at 1×, nat", before, after, subject.at(law, 0)
    yield from of_all_seeds(losses)
