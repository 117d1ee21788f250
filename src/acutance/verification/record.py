"""What a verification found: checks, findings and their sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from acutance.escapes import ranges
from acutance.report.screen import Wrapped
from acutance.report.table import Cell, Column, Table

_COLUMNS = ("arguments", "output", "positions", "cache", "gradients")


@dataclass(frozen=True)
class Finding:
    """Attention that differs from what the configuration says.

    Attributes:
        cause: a short name, such as ``"sinks dropped"``; ``"unexplained"`` if no tested cause
            reproduces the difference.
        layers: names of the modules, in model order.
        implementations: attention implementations in which it was seen.
        inputs: kinds of input on which it was seen.
        error: largest difference, relative to the largest entry of what is compared; infinity for
            NaN.
        tolerance: largest difference that rounding can explain.
        sentence: what differs, and under which change it agrees.
        advice: what to do about it.
    """

    cause: str
    layers: tuple[str, ...]
    implementations: tuple[str, ...]
    inputs: tuple[str, ...]
    error: float
    tolerance: float
    sentence: str
    advice: str

    def __str__(self) -> str:
        where = named_layers(self.layers)
        ways = f"{', '.join(self.implementations)}; {', '.join(self.inputs)}"
        size = f"error {self.error:.2g}, tolerance {self.tolerance:.1g}"
        return f"{where}: {self.sentence} ({size}; {ways}). {self.advice}"


@dataclass(frozen=True)
class Check:
    """One comparison, over all layers that it could be made for.

    Attributes:
        name: what was compared: ``"output"``, ``"arguments"``, ``"positions"``, ``"cache"``,
            ``"gradients"``, or two implementations.
        implementation: the attention implementation.
        inputs: kind of input.
        layers: number of layers that were compared.
        heads: number of query heads that were compared.
        error: largest difference, as in :class:`Finding`.
        tolerance: the tolerance of the row that came closest to it, or went furthest beyond it.
        ok: whether every difference is within its tolerance.
    """

    name: str
    implementation: str
    inputs: str
    layers: int
    heads: int
    error: float
    tolerance: float
    ok: bool


@dataclass(frozen=True, repr=False)
class Verification:
    """What :func:`acutance.verify` found.

    Attributes:
        findings: differences from the configuration, one for each cause; empty if there are none.
        checks: the comparisons that were made.
        notes: what was not checked, and why.
        about: the model, the implementations and the versions.
        left_out: what the configuration states, or was asked for, and was not compared.

    Example:
        >>> check = Check("output", "sdpa", "plain", 6, 72, 2e-7, 1e-4, ok=True)
        >>> found = Verification((), (check,), (), {"model": "tiny"})
        >>> found.ok, str(found).splitlines()[0]
        (True, 'tiny: 1 check on 6 layers (output), no difference from the configuration')
        >>> found = Verification((), (check,), (), {"model": "tiny"}, ("masks of encoder.0",))
        >>> print(found.complete, found)
        False tiny: 1 check on 6 layers (output), no difference in these; not compared: masks of
        encoder.0
    """

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Verification of {self.headline}>"

    @property
    def ok(self) -> bool:
        """Whether there is no finding in what was compared."""
        return not self.findings

    @property
    def complete(self) -> bool:
        """Whether nothing that the configuration states was left out."""
        return not self.left_out

    @property
    def headline(self) -> str:
        """The result in a line: what was compared, what was found, and what was left out."""
        layers = max((check.layers for check in self.checks), default=0)
        made = len(self.checks)
        checks = f"{made} {'check' if made == 1 else 'checks'} on {layers} layers"
        count = len(self.findings)
        compared = dict.fromkeys(each.name for each in self.checks if " against " not in each.name)
        found = f"no difference {'from the configuration' if self.complete else 'in these'}"
        if count:
            found = f"{count} {'finding' if count == 1 else 'findings'}"
        if not self.complete:
            found += f"; not compared: {', '.join(self.left_out)}"
        return f"{self.about.get('model', 'model')}: {checks} ({', '.join(compared)}), {found}"

    def table(self) -> Table:
        """The checks by implementation and kind of input, findings, and what was left out.

        A cell is the largest difference of its checks, relative to the largest entry compared; of
        arguments, whether they are those of the configuration.
        """
        names = [name for name in _COLUMNS if any(check.name == name for check in self.checks)]
        rows: dict[tuple[str, str], dict[str, Check]] = {}
        for check in self.checks:
            if check.name in _COLUMNS:
                rows.setdefault((check.implementation, check.inputs), {})[check.name] = check
        said = [Wrapped(line, bullet="   ") for line in _against(self.checks)]
        for number, finding in enumerate(self.findings, 1):
            said.append(Wrapped(str(finding), "red", bullet=f" {number}. "))
        said += [Wrapped(note, "dim", bullet=" • ") for note in self.notes]
        kinds = (Column(name, "name") for name in ("implementation", "input"))
        return Table(
            self.headline,
            [*kinds, *map(Column, ("layers", "heads", *names))],
            [
                (
                    *kind,
                    max(check.layers for check in checks.values()),
                    max(check.heads for check in checks.values()),
                    *(_cell(checks.get(name)) for name in names),
                )
                for kind, checks in rows.items()
            ],
            said,
            keys=2,
            style=f"bold {'red' if not self.ok else 'green' if self.complete else 'yellow'}",
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and text."""
        return {
            "schema": "acutance.verification/1",
            "ok": self.ok,
            "complete": self.complete,
            "left_out": list(self.left_out),
            "about": dict(self.about),
            "checks": [asdict(check) for check in self.checks],
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"- {finding}" for finding in self.findings]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def named_layers(names: tuple[str, ...]) -> str:
    """Names of layers in few words: numbered ones of one kind as a range.

    Example:
        >>> named_layers(("model.layers.0.self_attn", "model.layers.1.self_attn"))
        'model.layers.0–1.self_attn'
        >>> named_layers(("encoder", "decoder.2"))
        'encoder, decoder.2'
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is None:
            groups.setdefault((name, ""), [])
            continue
        key = ".".join(parts[:place]), ".".join(parts[place + 1 :])
        groups.setdefault(key, []).append(int(parts[place]))
    words = []
    for (before, after), numbers in groups.items():
        if not numbers:
            words.append(before)
            continue
        middle = ranges(sorted(set(numbers)), comma=",")
        words.append(".".join(part for part in (before, middle, after) if part))
    return ", ".join(words)


def _cell(check: Check | None) -> Cell:
    """The worst difference of a comparison; of arguments, whether there is one."""
    if check is None:
        return Cell("–", "dim")
    if check.name in ("arguments", "cache") and check.ok:
        return Cell("same")
    words = "not a number" if math.isinf(check.error) else f"{check.error:.1e}"
    return Cell(words, "" if check.ok else "bold red")


def _against(checks: Sequence[Check]) -> Iterator[str]:
    """The largest difference of the model's output between implementations, one line each."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        if check.name not in _COLUMNS:
            groups.setdefault(check.name, []).append(check)
    for name, group in groups.items():
        worst = max(group, key=lambda check: check.error)
        yield (
            f"{name}: the model's outputs differ by at most {worst.error:.1e} of their size "
            f"(tolerance {worst.tolerance:.1g}; {worst.inputs})"
        )


#: What to do about a cause.
_ADVICE = {
    "sinks": "Use an attention function that takes the sinks (s_aux in transformers), or merge "
    "them with its log-sum-exp.",
    "wrong sinks": "Pass the module's sinks parameter, and check that the checkpoint loaded it.",
    "window": "Hide keys at key <= query - sliding_window in the layers that have a window.",
    "softcap": "Apply softcap * tanh(scores / softcap) after the scale, or use an implementation "
    "that does.",
    "scale": "Pass the scale of the configuration to the attention function.",
    "bias": "Add the bias after the scale, before the softmax.",
    "padding": "Pass attention_mask with 1 on real tokens, and hide the keys where it is 0.",
    "hidden keys": "Give hidden keys a score of minus infinity, not 0.",
    "boolean mask": "Turn a boolean mask into scores before it is added: 0 for visible keys, minus "
    "infinity for hidden ones.",
    "mask": "Compare the mask that the attention function gets with the one of eager attention.",
    "documents": "Pass position_ids, starting anew in each document, to the function that makes "
    "the masks, and no attention_mask; or use flash attention, which reads them itself.",
    "not causal": "Pass is_causal=True or a causal mask.",
    "causal by mistake": "Pass is_causal=False where no mask is passed.",
    "implementations differ": "Compare the masks that the model makes for each implementation.",
    "mask inverted": "In a boolean mask of scaled_dot_product_attention, True marks visible keys.",
    "causal": "Align the last query with the last key: query i sees keys up to i + S - L.",
    "heads": "Repeat key heads with repeat_interleave: query head h uses key head h // group.",
    "RoPE": "Compute the frequencies from the rope_parameters of this layer's type.",
    "wrong RoPE": "Compute the frequencies from the rope_parameters of this layer's type.",
    "LongRoPE": "Choose the factors by the length of the text.",
    "wrong attention factor": "Multiply cos and sin by the attention factor of rope_parameters, "
    "once.",
    "positions rounded": "Compute positions, frequencies and their cos and sin in float32.",
    "positions": "Count only real tokens: position_ids = attention_mask.cumsum(-1) - 1, continued "
    "while decoding.",
    "not rotated": "Rotate both queries and keys.",
    "wrong pairs": "Pair the components as the checkpoint was trained: halves, or neighbours.",
    "scores": "Compute the scores in float32, also under autocast.",
    "weights": "Compute the softmax and its product with the values in float32.",
    "inputs": "Check autocast: queries and keys are rounded before the product.",
    "cache": "Check what the cache stores, and that it crops only what the window hides.",
    "gradient of lse": "Use an attention function whose log-sum-exp is differentiable, such as "
    "flex_attention, or do not train with this one.",
    "gradient": "Compare with eager attention, whose gradients autograd computes.",
    "backward": "Compare with eager attention, whose gradients autograd computes.",
}
_OTHERWISE = "Compare with eager attention, and look at the arguments of this layer's call."


def advice_for(cause: str) -> str:
    """What to do about a cause, by the longest entry that it begins or ends with.

    Example:
        >>> advice_for("window off by one")
        'Hide keys at key <= query - sliding_window in the layers that have a window.'
        >>> advice_for("unexplained")[:12]
        'Compare with'
    """
    fits = [
        name for name in _ADVICE if cause.startswith(name) or cause.endswith(name.partition(" ")[0])
    ]
    begins = [name for name in fits if cause.startswith(name)] or fits
    return _ADVICE[max(begins, key=len)] if begins else _OTHERWISE
