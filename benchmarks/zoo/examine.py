"""One model type: built small, run plain, probed and witnessed, and judged."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from acutance.capture.listener import NO_PRODUCT
from acutance.comparison.timing import cpu_seconds
from acutance.probing import Probe, ProbeError
from acutance.probing.settings import ProbeSettings
from zoo import inputs, parts, small
from zoo.inputs import BATCH, LENGTH, run_fused
from zoo.inputs import run as _run
from zoo.laws import FUSED, Lawful, lawful, line
from zoo.libraries import by_hand, runnable_in
from zoo.maps import alike, gives, maps, row_entropy, same, tensors, tolerance
from zoo.witness import watching

#: Process time in which a model type must build and run, in seconds.
SECONDS = 8.0

#: What can be said of a model type.
VERDICTS: dict[str, str] = {
    "verified": "all attention is read, and each call's output rebuilt",
    "unverified": "all attention is read, some of it from its softmax alone",
    "in part": "some attention is read, some is not",
    "not read": "there is attention and none of it is read",
    "attention-free": "no softmax takes part in a product, and the probe says that it saw nothing",
    "caught": "rows are read wrongly, and verify says so, with the keywords it does not know",
    "wrong": "a number or an output differs from the model's own",
    "not run": "built, but none of the inputs tried is its own",
    "not built": "no small configuration builds it",
}


@dataclass
class Examined:
    """What one model type gave.

    Attributes:
        model_type: its name in transformers.
        verdict: one of :data:`VERDICTS`.
        model: the class that was run.
        inputs: kind of input.
        implementations: attention implementations that were run.
        calls: attention calls that the witness saw.
        read: attention calls that the probe read.
        statuses: calls by status.
        sources: calls by what they were read from.
        unread: what the probe listed as not read.
        missed: modules whose attention the probe neither read nor listed.
        maps: attention maps of the model's own that were compared.
        worst: largest difference of a row's entropy, over its tolerance.
        moved: whether an output changed by as much as a bit.
        notes: what else is worth knowing.
        reason: what is behind the verdict, in a sentence.
        law: what :class:`~zoo.laws.Lawful` found, where attention was read.
        seconds: process time.
    """

    model_type: str
    verdict: str = "not built"
    model: str = ""
    inputs: str = ""
    implementations: list[str] = field(default_factory=list)
    calls: int = 0
    read: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    maps: int = 0
    worst: float = 0.0
    moved: bool = False
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    law: dict[str, Any] | None = None
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Rows(Probe):
    """A probe that also keeps the entropies it reads, with the largest score of each call."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, ProbeSettings(metrics=["entropy", "max_logit"], verify=True))
        self.kept: list[tuple[str, Tensor, float]] = []
        add = self._records.add

        def keep(rows: Any) -> None:
            largest = rows.stats.state.m.abs()
            largest = torch.where(largest.isfinite(), largest, 0.0)
            self.kept.append((rows.layer.module, rows.stats.entropy.double(), float(largest.max())))
            add(rows)

        self._records.add = keep


def examine(model_type: str, library: str = "transformers") -> Examined:
    """Everything about one model type; it does not raise, the reason is in what it returns."""
    start = cpu_seconds()
    examined = Examined(model_type)
    try:
        _examine(examined, library)
    except small.TooLargeError as error:
        examined.reason = str(error)
    if examined.verdict == "not run" and not examined.reason:
        examined.reason = "its signature has a place for none of the inputs"
    examined.seconds = round(cpu_seconds() - start, 2)
    return examined


def _examine(examined: Examined, library: str) -> None:
    if library == "transformers":
        found = runnable(examined.model_type, examined)
    else:
        found = runnable_in(library, examined.model_type, examined)
    if found is None:
        return
    model, config, kind, given = found
    examined.model, examined.inputs = type(model).__name__, kind
    config_of = getattr(model, "config", None)
    first = getattr(config_of, "_attn_implementation", None) or "eager"
    if library != "transformers":
        first, eager = "default", by_hand(model)
    else:
        eager = model if first == "eager" else _eager(model, config)
    findings: list[str] = []
    for name, each in {first: model, **({"eager": eager} if eager is not model else {})}.items():
        if each is None:
            continue
        examined.implementations.append(name)
        for call in _variants(given):
            findings += _judge(examined, each, call, eager, name == first and call is given)
    _conclude(examined, model, findings)
    if examined.read:
        examined.law = asdict(lawful(model, given))


def under_laws(model_type: str) -> dict[str, Any]:
    """The law of a model type alone, as a record, without judging anew how it is read."""
    start = cpu_seconds()
    found = runnable(model_type, Examined(model_type))
    law = Lawful(failed="it did not run") if found is None else lawful(found[0], found[3])
    return {**asdict(law), "seconds": round(cpu_seconds() - start, 2)}


def runnable(model_type: str, examined: Examined) -> tuple[Any, Any, str, dict[str, Any]] | None:
    """The first small model that runs on some input, or the part of another that it is."""
    for found in running(model_type, examined):
        return found
    config_class, reason = small.config_class_of(model_type), examined.reason
    classes = small.classes_of(model_type, config_class)
    for whole in parts.wholes(config_class):
        for model, _, kind, given in running(whole, Examined(whole)):
            with contextlib.suppress(Exception):
                part = parts.called(model, given, config_class, classes)
                if part is not None and gives(inputs.run(*part)):
                    examined.verdict, examined.reason = "not run", ""
                    module, given = part
                    return module, None, f"{kind}, as a part of {whole}", given
    examined.reason = reason
    return None


def running(model_type: str, examined: Examined) -> Iterator[tuple[Any, Any, str, dict[str, Any]]]:
    """Small models of a model type, each on the inputs that it runs on."""
    config_class = small.config_class_of(model_type)
    classes = small.classes_of(model_type, config_class)
    if not classes:
        examined.reason = "no class of a model takes its configuration"
        return
    tried = cpu_seconds()
    for make in small.configurations(config_class):
        for model_class in classes[:3]:
            if cpu_seconds() - tried > SECONDS:
                return
            try:
                config = make()
                model = small.build(model_class, config, None)
            except Exception as error:
                if examined.verdict == "not built" and not examined.reason:
                    examined.reason = line(error)
                continue
            examined.verdict = "not run"
            ran = False
            for kind, given in inputs.candidates(model):
                try:
                    output = _run(model, given)
                except Exception as error:
                    if not ran and not examined.reason.startswith("on "):
                        examined.reason = f"on {kind}: {line(error)}"
                    continue
                if any(bool(part.isnan().any()) for part in itertools.islice(tensors(output), 1)):
                    examined.reason = f"on {kind}: its output is not a number"
                elif gives(output):
                    ran, examined.reason = True, ""
                    yield model, config, kind, given
            if ran:
                return


def _eager(model: Any, config: Any) -> Any:
    """The same model with eager attention; None if there is no such thing."""
    try:
        if config is not None:
            return small.build(type(model), copy.deepcopy(config), "eager")
        part = copy.deepcopy(model)  # of another model, whose weights it shares no more
        part.set_attn_implementation("eager")
        return part
    except Exception:
        return None


def _variants(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield given
    mask = given.get("attention_mask")
    if "input_ids" in given and isinstance(mask, Tensor) and tuple(mask.shape) == (BATCH, LENGTH):
        yield {name: value for name, value in given.items() if name != "attention_mask"}
        padded = mask.clone()
        padded[1, -4:] = 0
        yield given | {"attention_mask": padded}


def _judge(
    examined: Examined, model: Any, given: dict[str, Any], eager: Any, counted: bool
) -> list[str]:
    """Run one model on one input every way; what is wrong, in sentences."""
    try:
        plain = _run(model, given)
    except Exception:
        return []  # this variant is not for this model
    if not same(plain, _run(model, given)):
        return ["its output is another each time it runs"]
    with watching(model) as witness:
        _run(model, given)
    probe, wrong = Rows(model), []
    try:
        with probe:
            probed = _run(model, given)
    except ProbeError:
        probed = plain
    if not same(plain, probed):
        examined.moved = True
        wrong.append("the output is another while it is probed")
    if counted:
        wrong += _against_fused(examined, plain, run_fused(model, given))
    layers = probe.summary().layers if probe.kept else ()
    for layer in layers:
        if layer.status == "mismatch":
            doubts = [line for line in probe.unread if line.startswith(f"{layer.module}:")]
            wrong.append("; ".join(doubts) or f"{layer.module}: its output cannot be rebuilt")
    seen, read = witness.attention, {}
    for layer in layers:
        name = layer.module.partition("#")[0]
        read[name] = read.get(name, 0) + layer.calls
    listed = [line.partition(":")[0].partition("#")[0] for line in probe.unread]
    missed = []
    if seen.total() > sum(read.values()):
        missed = [
            f"{name} ({count})"
            for name, count in seen.items()
            if read.get(name, 0) < count and name not in listed
        ]
    if counted:
        examined.calls, examined.read = seen.total(), sum(read.values())
        for layer in layers:
            examined.statuses[layer.status] = examined.statuses.get(layer.status, 0) + layer.calls
            if layer.source not in examined.sources:
                examined.sources.append(layer.source)
    gates = [line for line in probe.unread if NO_PRODUCT in line]
    if gates and not any("no product" in note for note in examined.notes):
        examined.notes.append(f"{len(gates)} softmaxes that no product takes, the probe lists them")
    examined.unread += [line for line in probe.unread if line not in [*gates, *examined.unread]]
    examined.missed += [name for name in missed if name not in examined.missed]
    made = seen + witness.single
    if sum(read.values()) > made.total():
        wrong.append(
            f"{sum(read.values())} calls were read where the model made {made.total()}: "
            f"{', '.join(n for n in read if read[n] > made.get(n, 0))[:200]}"
        )
    return wrong + _against_maps(examined, probe, model, eager, given, plain, bool(missed))


def _against_fused(examined: Examined, plain: Any, fused: Any) -> list[str]:
    """Note where PyTorch's fused inference rounds otherwise; more than that is wrong."""
    if same(plain, fused):
        return []
    if not alike(plain, fused):
        return ["without PyTorch's fused inference, which a probe turns off, its output is another"]
    examined.notes.append(FUSED)
    return []


def _against_maps(
    examined: Examined,
    probe: Rows,
    model: Any,
    eager: Any,
    given: dict[str, Any],
    plain: Any,
    partial: bool,
) -> list[str]:
    """Compare rows with the maps that the eager model returns."""
    try:
        output = _run(eager, given, output_attentions=True)
    except Exception:
        return []
    wrong, mask = [], given.get("attention_mask")
    if model is not eager and not alike(plain, _run(eager, given)):
        note = f"{model.config._attn_implementation} computes something else than eager"
        if note not in examined.notes:
            examined.notes.append(note)
        return []
    sinks = any("sinks" in name for name, _ in eager.named_parameters())
    for name, weights in maps(output):
        if sinks and bool((weights.sum(-1) > 1.0 - 1e-5).all()):
            note = "its maps leave its sinks out and are not compared"
            examined.notes += [note] if note not in examined.notes else []
            continue
        total = weights.sum(-1)
        if not sinks and bool(((total > 1e-6) & (total < 0.999)).any()):
            note = "some of its maps are parts of one softmax, rows below one, and not compared"
            examined.notes += [note] if note not in examined.notes else []
            continue
        rows, counts = row_entropy(weights)
        if isinstance(mask, Tensor) and tuple(mask.shape) == (rows.shape[0], rows.shape[2]):
            counts = counts & mask.bool()[:, None, :]
        errors = []
        for module, entropy, largest in probe.kept:
            if entropy.shape == rows.shape:
                both = counts & entropy.isfinite()
                difference = torch.where(both, entropy - rows, 0.0).abs().max()
                errors.append((float(difference) / tolerance(largest, weights.shape[-1]), module))
        if not errors:
            continue  # nothing of this shape was read: the witness says whether that is a loss
        error, module = min(errors)
        if error > 1.0 and partial:
            continue  # it may be that of a call that was not read
        examined.maps += 1
        examined.worst = max(examined.worst, round(error, 3))
        if error > 1.0:
            wrong.append(f"{name}: entropies differ from the model's own maps ({module})")
    return wrong


def _conclude(examined: Examined, model: Any, findings: list[str]) -> None:
    findings = list(dict.fromkeys(findings))
    if findings:
        examined.verdict, examined.reason = "wrong", "; ".join(findings)[:600]
        said = ("do not trust its rows", "after the softmax")  # by the probe, with a mismatch
        if all(any(words in finding for words in said) for finding in findings):
            examined.verdict = "caught"
        if all("another each time" in finding for finding in findings):
            examined.verdict = "not run"
    elif examined.missed or examined.unread:
        examined.verdict = "in part" if examined.read else "not read"
        examined.reason = "; ".join([*examined.unread, *examined.missed])[:600]
    elif not examined.calls and not examined.read:
        examined.verdict = "attention-free"
        names = sorted({type(m).__name__ for m in model.modules() if "Atten" in type(m).__name__})
        examined.reason = f"has {', '.join(names[:4])}" if names else ""
    elif set(examined.statuses) <= {"verified"}:
        examined.verdict, examined.reason = "verified", ""
    else:
        examined.verdict, examined.reason = "unverified", ""


__all__ = ["VERDICTS", "Examined", "examine", "runnable", "under_laws"]
