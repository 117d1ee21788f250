"""verify: compare a model's attention with what its configuration and parameters say."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.windows import evaluating
from acutance.capture.find_layers import class_name, unwrap
from acutance.capture.intercept import follow_results
from acutance.capture.listener import Listener
from acutance.verification.arguments import Pass
from acutance.verification.checker import Checker, Measured
from acutance.verification.expectation import windows_of
from acutance.verification.inputs import KINDS, Kind, as_inputs, kinds_for
from acutance.verification.record import (
    Check,
    Finding,
    Verification,
    advice_for,
    named_layers,
)

#: The cause where a model counts positions by itself.
_IGNORED = "position_ids ignored"
#: Short names of transformers' attention implementations.
_SHORT = {"flex": "flex_attention", "flash": "flash_attention_2"}


def verify(
    model: torch.nn.Module,
    inputs: Any,
    *,
    implementations: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
    backward: bool = False,
    configuration: Any = None,
    advance: Callable[[str, str], object] | None = None,
) -> Verification:
    """Compare a model's attention with what its configuration and parameters say, in float64.

    Every attention call is computed again in float64 from the model's own queries, keys and values
    with the scale, window, softcap, sinks, padding, documents and causality that the configuration,
    the parameters and the input determine. The rotation of queries and keys is compared with the
    configuration's ``rope_parameters``. Each difference is traced to its cause where a tested cause
    reproduces it.

    Args:
        model: a model of transformers, or any module whose attention a probe can read. It is put
            into evaluation mode meanwhile.
        inputs: token ids (B, L), or a mapping of the model's arguments. Padding, packing and caches
            are tried on token ids of a model that reads only text.
        implementations: attention implementations of transformers to run, such as ``("eager",
            "sdpa", "flex")``; None for the one that the model has.
        kinds: kinds of input, of :data:`~acutance.verification.inputs.KINDS`; None for all.
        backward: also compare gradients of queries, keys, values and sinks.
        configuration: an object with the attributes of a transformers configuration; None for the
            ``config`` of each attention module.
        advance: called with the implementation and the kind of input before each run.

    Returns:
        What was found: ``ok``, ``complete``, ``findings``, ``checks`` and ``notes``.

    Raises:
        TypeError: if ``inputs`` is neither a tensor nor a mapping.
        ValueError: for an unknown kind of input or implementation, or if no attention was read.

    Example:
        >>> from acutance.reproduce import decoder
        >>> verify(decoder(), torch.arange(24)[None]).ok
        True
    """
    given = as_inputs(inputs)
    unknown = [name for name in kinds or () if name not in KINDS]
    if unknown:
        raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {unknown[0]!r}")
    names = [_SHORT.get(name, name) for name in implementations or ()]
    tried = [kind for kind in kinds_for(model, given) if kinds is None or kind.name in kinds]
    config: Any = getattr(unwrap(model), "config", None)
    own = str(getattr(config, "_attn_implementation", None) or "the model's own")
    checker = Checker(configuration)
    notes: list[str] = []
    outputs: dict[tuple[str, str], Tensor] = {}
    with evaluating(model):
        for name in names or [own]:
            if name != own and (reason := _switch(model, name)):
                notes.append(f"{name} was not run: {reason}")
                checker.left_out[f"{name} attention"] = set()
                continue
            try:
                for cached, group in groupby(tried, key=lambda kind: kind.cached):
                    gradients = backward and not cached
                    gradients = gradients and _has_gradients(model, name, checker, notes)
                    with _checking(model, checker, gradients) as listener:
                        for kind in group:
                            if advance is not None:
                                advance(name, kind.name)
                            output = _read(model, checker, listener, name, kind, notes)
                            if output is not None:
                                outputs[name, kind.name] = output
            finally:
                if name != own:
                    _switch(model, own)
    if not checker.measured:
        reason = "; ".join([*notes, *_problems(checker)][:3])
        raise ValueError(
            f"no attention of {class_name(model)} was read{f': {reason}' if reason else ''}"
        )
    if configuration is not None:
        config = configuration
    ids, widest = given.get("input_ids"), max(windows_of(config), default=0)
    if isinstance(ids, Tensor) and ids.shape[-1] <= widest:
        notes.append(
            f"{ids.shape[-1]} tokens do not reach beyond the sliding window of {widest}: more than "
            f"{widest} are needed to see whether it is applied"
        )
        checker.left_out["sliding window"] = set()
    if _IGNORED in {each.difference.cause for each in checker.measured if each.difference}:
        notes.append("it ignores position_ids: documents that are packed see each other")
    ran = list(dict.fromkeys(each.implementation for each in checker.measured))
    findings, against = _findings(checker.measured), tuple(_against(outputs, ran))
    for check in against:
        if not check.ok and not findings:
            notes.append(
                f"{check.name}: outputs on the input {check.inputs!r} differ by {check.error:.2g}, "
                "although every attention call that was compared agrees: it arises elsewhere"
            )
    about = {"model": class_name(model), "implementations": ran, "backward": backward}
    return Verification(
        findings,
        (*_checks(checker.measured), *against),
        (*dict.fromkeys(notes), *_problems(checker)),
        about,
        tuple(
            f"{what} of {named_layers(tuple(sorted(layers)))}" if layers else what
            for what, layers in checker.left_out.items()
        ),
    )


def _has_gradients(
    model: torch.nn.Module, implementation: str, checker: Checker, notes: list[str]
) -> bool:
    """Whether an implementation computes gradients on the model's device; notes it if not."""
    device = next((part.device.type for part in model.parameters()), "cpu")
    if implementation != "flex_attention" or device != "cpu":
        return True
    notes.append("flex_attention computes no gradients on CPU: only its outputs were compared")
    checker.left_out["gradients of flex_attention"] = set()
    return False


@contextmanager
def _checking(model: torch.nn.Module, checker: Checker, gradients: bool) -> Iterator[Listener]:
    """Context in which a checker gets the model's calls; all parameters require gradients if any.

    Args:
        model: the model.
        checker: compares the calls.
        gradients: whether it compares gradients too.
    """
    checker.gradients = gradients
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen if gradients else ():
            parameter.requires_grad_(True)
        with (
            torch.set_grad_enabled(gradients),
            follow_results(checker.parts(model), checker.on_part),
            Listener(model, checker, gradients=gradients) as listener,
        ):
            yield listener
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _read(
    model: torch.nn.Module,
    checker: Checker,
    listener: Listener,
    implementation: str,
    kind: Kind,
    notes: list[str],
) -> Tensor | None:
    """Read one kind of input with one implementation; the first tensor of the model's output."""

    def read(facts: Pass, arguments: dict[str, Any]) -> Any:
        checker.begin(implementation, facts)
        return model(**arguments)

    listener.unread.clear()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # the model's own
            torch.manual_seed(0)  # models that draw random numbers draw the same ones
            output = kind.run(read)
    except Exception as error:  # an input or an implementation that is not for this model
        words = " ".join(str(error).split())[:200] or type(error).__name__
        notes.append(f"{kind.name} was not read with {implementation}: {words}")
        checker.left_out[f"{kind.name} with {implementation}"] = set()
        return None
    notes += [f"not read: {line}" for line in listener.unread]
    if unread := {line.partition(": ")[0] for line in listener.unread}:
        checker.left_out.setdefault("everything", set()).update(unread)
    found, facts = _first_tensor(output), checker.facts
    if found is not None and facts.real is not None and found.dim() > 2:
        rows = facts.real[:, facts.past :]
        if tuple(rows.shape) == tuple(found.shape[:2]):
            found = found * rows[..., None].to(found)
    return found


def _switch(model: Any, name: str) -> str:
    """Switch a model to another attention implementation; why not, or an empty text."""
    switch = getattr(unwrap(model), "set_attn_implementation", None)
    if switch is None:
        return f"{class_name(model)} has no set_attn_implementation"
    try:
        switch(name)
    except Exception as error:
        return " ".join(str(error).split())[:160]
    return ""


def _first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor of a model's output."""
    if isinstance(output, Tensor):
        return output.detach() if output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for part in output if isinstance(output, tuple | list) else ():
        found = _first_tensor(part)
        if found is not None:
            return found
    return None


def _findings(measured: Sequence[Measured]) -> tuple[Finding, ...]:
    """One finding for each cause: where it was seen, and the sentence of its largest error."""
    groups: dict[str, list[Measured]] = {}
    for each in measured:
        if each.difference is not None:
            groups.setdefault(each.difference.cause, []).append(each)
    if _IGNORED in groups:  # then packed documents see each other, and nothing promised otherwise
        del groups[_IGNORED]
        mixed = [each for each in groups.get("documents mixed", ()) if each.inputs != "packed"]
        groups["documents mixed"] = mixed
    found = []
    for cause, group in groups.items():
        if not group:
            continue
        worst = max(group, key=lambda each: each.error)
        assert worst.difference is not None
        found.append(
            Finding(
                cause,
                tuple(dict.fromkeys(each.layer for each in group)),
                tuple(dict.fromkeys(each.implementation for each in group)),
                tuple(dict.fromkeys(each.inputs for each in group)),
                worst.error,
                worst.tolerance,
                worst.difference.sentence,
                advice_for(cause),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.error))


def _checks(measured: Sequence[Measured]) -> Iterator[Check]:
    """One check for each kind of comparison, implementation and kind of input."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.implementation, each.inputs, each.check), []).append(each)
    for (implementation, inputs, name), group in groups.items():
        worst = max(group, key=lambda each: (each.difference is not None, each.error))
        heads = {each.layer: each.heads for each in group}
        yield Check(
            name,
            implementation,
            inputs,
            len(heads),
            sum(heads.values()),
            worst.error,
            worst.tolerance,
            worst.difference is None,
        )


def _against(outputs: Mapping[tuple[str, str], Tensor], names: Sequence[str]) -> Iterator[Check]:
    """Final outputs of each implementation against those of the first."""
    for name in names[1:]:
        for (other, inputs), output in outputs.items():
            first = outputs.get((names[0], inputs))
            if other != name or first is None or first.shape != output.shape:
                continue
            size = float(first.double().abs().max())
            error = float((first.double() - output.double()).abs().max()) / max(size, 1e-30)
            wide = output.dtype in (torch.float32, torch.float64)
            limit = 1e-3 if wide else 0.1
            label = f"{name} against {names[0]}"
            yield Check(label, name, inputs, 0, 0, error, limit, error <= limit)


def _problems(checker: Checker) -> list[str]:
    """What could not be compared, each reason once with its layers."""
    reasons: dict[str, list[str]] = {}
    for problem in checker.problems:
        layer, _, reason = problem.partition("\n")
        reasons.setdefault(reason, []).append(layer)
    return [f"{named_layers(tuple(layers))}: {reason}" for reason, layers in reasons.items()]
