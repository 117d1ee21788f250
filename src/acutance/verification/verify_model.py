"""verify: compare each attention call of a model with what its configuration and parameters say."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.windows import evaluating
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import class_name, is_cross, unwrap
from acutance.capture.intercept import follow_results
from acutance.capture.listener import Listener
from acutance.masks import hides
from acutance.probing.causes import differences, find_cause, visible_keys
from acutance.verification.expectation import (
    Comparison,
    Difference,
    Expectation,
    ExpectedCall,
    Pass,
    layer_index,
    windows_of,
)
from acutance.verification.gradients import check_gradients
from acutance.verification.inputs import KINDS, Kind, as_inputs, kinds_for
from acutance.verification.positions import PARTS, Heads, Rotation, unrotated_heads
from acutance.verification.record import Check, Finding, Verification, advice_for, named_layers

#: Largest weight of padding keys: a mask of −10,000 leaves less.
_PADDING = 1e-6
_UNKNOWN_DOCUMENTS = (
    "packed: documents are not checked, since the attention function gets no position_ids"
)
_NOT_COMPARED = "of its softmax only the scores are seen: nothing is compared"
_ONLY_PADDING = "of its softmax only the scores are seen: only padding is compared"


@dataclass(frozen=True)
class Measured:
    """One comparison of one call.

    Attributes:
        check: what was compared: ``"output"``, ``"arguments"``, ``"positions"``, ``"cache"`` or
            ``"gradients"``.
        implementation: the attention implementation.
        inputs: kind of input.
        layer: name of the module.
        heads: number of query heads.
        error: largest relative difference.
        tolerance: tolerance of the row with the largest error over its tolerance.
        difference: what differs; None if nothing does.
    """

    check: str
    implementation: str
    inputs: str
    layer: str
    heads: int
    error: float
    tolerance: float
    difference: Difference | None = None


class Checker:
    """Runs a model on kinds of input, and compares each of its calls with its expectation.

    Args:
        model: the model.
        config: configuration to check against; None for that of each module.

    Attributes:
        measured: the comparisons so far.
        problems: what could not be compared: the reasons, each with its layers.
        left_out: what the configuration states, or was asked for, and was not compared, each with
            the layers that it was left out of.
        notes: other reasons.
        outputs: first tensor of the model's output, by implementation and kind of input.
    """

    def __init__(self, model: torch.nn.Module, config: Any = None) -> None:
        self._model, self._config = model, config
        self._gradients, self._implementation, self._facts = False, "", Pass("")
        self.measured: list[Measured] = []
        self.problems: dict[str, dict[str, None]] = {}
        self.left_out: dict[str, set[str]] = {}
        self.notes: list[str] = []
        self.outputs: dict[tuple[str, str], Tensor] = {}
        self._expected: dict[str, Expectation] = {}
        self._parts: dict[int, dict[str, Tensor]] = {}  # what parts of a module returned
        self._parents: dict[int, list[tuple[int, str]]] = {}
        self._stored: dict[str, Tensor] = {}
        self._shifts: dict[str, Tensor] = {}
        self._seen: dict[tuple[str, int, str], tuple[str, Tensor]] = {}

    @contextmanager
    def comparing(self, implementation: str, gradients: bool) -> Iterator[Listener]:
        """Context in which the model's calls are compared; all parameters require gradients if any.

        Args:
            implementation: the attention implementation that runs.
            gradients: whether gradients are compared too, where it computes them.
        """
        model = self._model
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        if gradients and implementation == "flex_attention" and device == "cpu":
            text = "flex_attention computes no gradients on CPU: only its outputs were compared"
            self.notes.append(text)
            self.left_out["gradients of flex_attention"] = set()
            gradients = False
        self._implementation, self._gradients = implementation, gradients
        self._parents.clear()
        parts = []
        for module in model.modules():
            children = dict(module.named_children())
            if not PARTS.isdisjoint(children):
                for name, part in children.items():
                    self._parents.setdefault(id(part), []).append((id(module), name))
                    parts.append(part)
        frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
        try:
            for parameter in frozen if gradients else ():
                parameter.requires_grad_(True)
            with (
                torch.set_grad_enabled(gradients),
                follow_results(parts, self._on_part),
                Listener(model, self, gradients=gradients) as listener,
            ):
                yield listener
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def read(self, kind: Kind, listener: Listener) -> None:
        """Read one kind of input, and keep the first tensor of the model's output."""
        listener.unread.clear()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")  # the model's own
                torch.manual_seed(0)  # models that draw random numbers draw the same ones
                output = _first_tensor(kind.run(self._run))
        except Exception as error:  # an input or an implementation that is not for this model
            words = " ".join(str(error).split())[:200] or type(error).__name__
            self.notes.append(f"{kind.name} was not read with {self._implementation}: {words}")
            self.left_out[f"{kind.name} with {self._implementation}"] = set()
            return
        self.notes += [f"not read: {line}" for line in listener.unread]
        if unread := {line.partition(": ")[0] for line in listener.unread}:
            self.left_out.setdefault("everything", set()).update(unread)
        facts = self._facts
        if output is not None and facts.real is not None and output.dim() > 2:
            rows = facts.real[:, facts.past :]
            if tuple(rows.shape) == tuple(output.shape[:2]):
                output = output * rows[..., None].to(output)
        if output is not None:
            self.outputs[self._implementation, kind.name] = output

    def _run(self, facts: Pass, arguments: dict[str, Any]) -> Any:
        """Run the model; a pass without a past begins a new text."""
        self._facts = facts
        self._parts.clear()
        if not facts.past:
            self._stored.clear()
            self._shifts.clear()
        return self._model(**arguments)

    def _on_part(self, part: torch.nn.Module, _: Any, __: Any, output: Any) -> None:
        """Record what a part of an attention module returned."""
        if isinstance(output, Tensor):
            for parent, name in self._parents.get(id(part), ()):
                self._parts.setdefault(parent, {})[name] = output.detach()

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Compare whether a softmax by hand hides padding: of its arguments no more is known."""
        facts, shape = self._facts, tuple(scores.shape)
        real = None if is_cross(name) or not facts.is_text else facts.real
        if real is not None and (
            bool(real.all())
            or (shape[0], *shape[2:]) != (len(real), facts.tokens, real.shape[1])
            or (doubt is not None and doubt())
        ):
            real = None
        if real is None:
            if name not in self.problems.get(_ONLY_PADDING, ()):
                self._problem(name, _NOT_COMPARED)
            return
        self.problems.get(_NOT_COMPARED, {}).pop(name, None)
        self._problem(name, _ONLY_PADDING)
        weights = scores.detach().float().softmax(-1)
        ignored = weights.masked_fill(real[:, None, None].to(weights.device), 0.0).sum(-1)
        rows = real[:, None, facts.past :].to(weights.device)
        error = float(torch.where(rows, ignored, 0.0).max())
        difference = None
        if not error <= _PADDING:  # or it is NaN
            text = f"padding keys get up to {error:.2g} of the weight of a real token's row"
            if math.isnan(error):
                text = "the weights of a real token's row are NaN"
            difference = Difference("padding ignored", text)
        self._add("arguments", name, shape[1], error, _PADDING, difference)

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Compare one call."""
        if call.moved or output is None:
            self._problem(call.module, "its output is not known")
            return
        facts = self._facts
        if not facts.promises(call):
            self._problem(call.module, _UNKNOWN_DOCUMENTS)
            return
        expected = self._scaled_before(call, module, self._expectation(call, module))
        if facts.is_text and not call.cross and expected.masks_problem:
            self._problem(call.module, f"masks not checked: {expected.masks_problem}")
        if not facts.is_text and not call.cross and expected.causal is not None:
            self._problem(call.module, "masks not checked: it does not read only token ids")
        meant = ExpectedCall(call, expected, facts)
        found = meant.differences()
        theirs = output()
        found = found or self._against_others(meant)
        with torch.no_grad():
            agrees = self._compare_output(meant, theirs.detach(), module, found)
            self._compare("positions", call, partial(self._rotation, meant, module))
            if not expected.masks_problem:
                self._compare_cache(call, remade=hasattr(module, "expand_kv"))
        if self._gradients and not found and agrees:
            wide, sinks = _widened(meant.ours), getattr(module, "sinks", None)
            with torch.enable_grad():
                gradients = partial(check_gradients, call, wide, theirs, meant.counted, sinks)
                self._compare("gradients", call, gradients)

    def _compare(
        self, check: str, call: AttentionCall, compare: Callable[[], Comparison | None]
    ) -> None:
        """Record a comparison of a call, or the error that says why there is none."""
        try:
            found = compare()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            self._problem(call.module, f"{check} not checked: {error}")
        else:
            if found is not None:
                self._of_call(check, call, *found)

    def _expectation(self, call: AttentionCall, module: Any) -> Expectation:
        """What the configuration says of a module, read once."""
        if call.module not in self._expected:
            config = self._config if self._config is not None else getattr(module, "config", None)
            heads, width = call.query.shape[1], call.query.shape[-1]
            expected = Expectation(module, config, heads, width, layer_index(call.module))
            if expected.causal is False and self._is_masked_causally(call):
                expected.causal = True  # is_causal is about calls without a mask
            self._expected[call.module] = expected
        return self._expected[call.module]

    def _is_masked_causally(self, call: AttentionCall) -> bool:
        """Whether a call's mask hides exactly the later keys."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        if call.attn_mask is None or not self._facts.knows_masks(call) or queries != keys > 1:
            return False
        seen = visible_keys(call)
        return torch.equal(seen, seen.new_ones(queries, keys).tril().expand_as(seen))

    def _against_others(self, meant: ExpectedCall) -> list[Difference]:
        """Whether rows see other keys than with the first implementation that read this input."""
        call = meant.call
        keys = call.key.shape[2]
        chance = torch.Generator().manual_seed(0)
        weights = torch.rand(keys, generator=chance).to(call.query.device)
        signature = meant.seen.float() @ weights
        place = self._facts.inputs, self._facts.past, call.module
        name, first = self._seen.setdefault(place, (self._implementation, signature))
        if name == self._implementation or first.shape[2:] != signature.shape[2:]:
            return []
        apart = (first - signature).abs() > 1e-4 * keys
        if not bool((apart & meant.counted).any()):
            return []
        text = f"rows see other keys than with {name} attention on the same input"
        return [Difference("implementations differ", text)]

    def _scaled_before(
        self, call: AttentionCall, module: Any, expected: Expectation
    ) -> Expectation:
        """The expectation without a scale, where the module's own may be in its queries already."""
        if call.factor != 1.0 or not expected.scale_from.startswith("the module's"):
            return expected
        before = self._before(call, module)
        scale = expected.scale
        if scale is not None and before is not None:
            ratio = float(call.query.detach().norm() / before[0].norm())
            ratio /= 1.0 if expected.rope is None else expected.rope.attention_factor
            if abs(ratio - scale) > 0.01 * scale:
                return expected
        expected = copy(expected)
        expected.scale, expected.folded = None, scale
        return expected

    def _before(self, call: AttentionCall, module: Any) -> Heads | None:
        """Queries and keys of the call's tokens as their projections or norms return them."""
        key = call.key[:, :, -call.query.shape[2] :]
        return unrotated_heads(self._parts.get(id(module), {}), call.query, key)

    def _compare_output(
        self, meant: ExpectedCall, theirs: Tensor, module: torch.nn.Module, found: list[Difference]
    ) -> bool:
        """Whether the model's output agrees with the expected call's, in float64."""
        call, counted = meant.call, meant.counted
        wide = _widened(meant.ours)
        rebuilt, stats = wide.rebuild(False)
        if rebuilt.shape != theirs.shape:
            self._problem(call.module, f"its output has shape {tuple(theirs.shape)}")
            return False
        narrow = meant.ours if found else replace(call, dropout_p=0.0)
        errors, limits = differences(narrow, rebuilt, stats.state.m, theirs, counted)
        error = float(errors.max()) if errors.numel() else 0.0
        worst = int((errors / limits).argmax()) if errors.numel() else 0
        limit = float(limits.flatten()[worst]) if limits.numel() else 0.0
        agrees = bool((errors <= limits).all())
        for difference in found:
            self._of_call("arguments", call, error, limit, difference)
        if not found:
            self._of_call("arguments", call, 0.0, 0.0)
        if agrees:
            self._of_call("output", call, error, limit)
            return True
        given = _widened(replace(call, dropout_p=0.0))
        again, stats = given.rebuild(False)
        errors, limits = differences(call, again, stats.state.m, theirs, counted)
        if found and bool((errors <= limits).all()):
            return False  # it computes what it is given: the arguments are what is wrong
        cause = find_cause(wide, theirs, counted, module)
        if cause is not None:
            for kind in cause.kind.split(" and "):
                self._of_call("output", call, error, limit, Difference(kind, cause.sentence))
        elif not found and call.unknown:
            text = f"output not checked: verify does not know {', '.join(call.unknown)}"
            self._problem(call.module, text)
        elif not found:
            text = "the output differs, and no tested cause explains it"
            self._of_call("output", call, error, limit, Difference("unexplained", text))
        return False

    def _rotation(self, meant: ExpectedCall, module: Any) -> Comparison | None:
        """Compare the rotation of queries and keys with the configuration's; None if it has none.

        Raises:
            ValueError: if they cannot be compared.
        """
        call, expected, facts = meant.call, meant.expected, self._facts
        rope = expected.rope
        if not facts.knows_masks(call) or facts.positions is None:
            if not facts.is_text and not call.cross and (rope or expected.rope_problem):
                raise ValueError("they are not those of token ids")
            return None
        if rope is None:
            if expected.rope_problem:
                raise ValueError(expected.rope_problem)
            return None
        key = call.key[:, :, -call.query.shape[2] :]
        before = self._before(call, module)
        if before is None:
            raise ValueError("its projections are not of a known form")
        if expected.folded is not None:
            halves = before[1].norm() * expected.folded, key.norm() / rope.attention_factor
            both = bool((halves[0] - halves[1]).abs() <= 0.01 * halves[1])
            before = before[0] * expected.folded, before[1] * (expected.folded if both else 1.0)
        rotation = Rotation(expected, facts, before, (call.query, key), meant.counted.any(1))
        found, shift = rotation.compare(self._shifts.get(call.module))
        if shift is not None:
            self._shifts[call.module] = shift
        return found

    def _compare_cache(self, call: AttentionCall, remade: bool) -> None:
        """Compare keys that a cache returns with those that were put into it.

        They are to be equal, but for rounding where keys are ``remade`` from a latent cache.
        """
        facts = self._facts
        if not facts.knows_masks(call):
            return
        tokens = call.query.shape[2]
        before = self._stored.get(call.module)
        key = call.key.detach()
        old, new = key[:, :, :-tokens], key[:, :, -tokens:]
        if facts.past and before is not None and before.shape[:2] == key.shape[:2]:
            real = None if facts.real is None else facts.real[:, : facts.past]
            kept = before[:, :, before.shape[2] - old.shape[2] :]
            apart = (kept - old).abs().amax((1, 3))
            if real is not None:
                apart = apart * real[:, real.shape[1] - old.shape[2] :]
            size = float(before.abs().max())
            error = float(apart.max()) / size if apart.numel() and size else 0.0
            difference = None
            limit = max(1e-6, torch.finfo(key.dtype).eps) if remade else 0.0
            if error > limit:
                text = "the cache returns other keys than the passes before put into it"
                difference = Difference("cache", text)
            self._of_call("cache", call, error, limit, difference)
        past = new if before is None or not facts.past else torch.cat([before, new], 2)
        self._stored[call.module] = past

    def _of_call(self, check: str, call: AttentionCall, *comparison: Any) -> None:
        """Record a comparison of a call: its error, its tolerance, and what differs."""
        self._add(check, call.module, call.query.shape[1], *comparison)

    def _add(self, check: str, *comparison: Any) -> None:
        """Record a comparison: the module, its heads and the other fields of :class:`Measured`."""
        self.measured.append(Measured(check, self._implementation, self._facts.inputs, *comparison))

    def _problem(self, layer: str, text: object) -> None:
        """Note what could not be compared: the output, unless the text says "… not checked"."""
        words = " ".join(str(text).split())
        what, known, _ = words.partition(" not checked: ")
        if words != _UNKNOWN_DOCUMENTS:  # of which no configuration says anything
            self.left_out.setdefault(what if known else "output", set()).add(layer)
        self.problems.setdefault(words[:300], {}).setdefault(layer)

    def problem_notes(self) -> list[str]:
        """What could not be compared, each reason once with its layers."""
        return [
            f"{named_layers(tuple(layers))}: {reason}"
            for reason, layers in self.problems.items()
            if layers
        ]


def _widened(call: AttentionCall) -> AttentionCall:
    """The call with its tensors in float64."""
    names = ("query", "key", "value", "sinks", "bias", "attn_mask")
    wide: dict[str, Any] = {}
    for name in names:
        part = getattr(call, name)
        if isinstance(part, Tensor) and part.is_floating_point():
            wide[name] = part.detach().double()
            if name in ("bias", "attn_mask"):
                wide[name] = torch.where(hides(part.detach()), -torch.inf, wide[name])
    return replace(call, **wide)


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
    checker = Checker(model, configuration)
    notes = checker.notes
    with evaluating(model):
        for name in names or [own]:
            if name != own and (reason := _switch(model, name)):
                notes.append(f"{name} was not run: {reason}")
                checker.left_out[f"{name} attention"] = set()
                continue
            try:
                for cached, group in groupby(tried, key=lambda kind: kind.cached):
                    with checker.comparing(name, backward and not cached) as listener:
                        for kind in group:
                            if advance is not None:
                                advance(name, kind.name)
                            checker.read(kind, listener)
            finally:
                if name != own:
                    _switch(model, own)
    if not checker.measured:
        reason = "; ".join([*notes, *checker.problem_notes()][:3])
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
    findings, against = _findings(checker.measured), tuple(_against(checker.outputs, ran))
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
        (*dict.fromkeys(notes), *checker.problem_notes()),
        about,
        tuple(
            f"{what} of {named_layers(tuple(sorted(layers)))}" if layers else what
            for what, layers in checker.left_out.items()
        ),
    )


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
    findings = []
    for cause, group in groups.items():
        if group:
            worst = max(group, key=lambda each: each.error)
            assert worst.difference is not None
            layers, implementations, inputs = (
                tuple(dict.fromkeys(getattr(each, name) for each in group))
                for name in ("layer", "implementation", "inputs")
            )
            size, why = (worst.error, worst.tolerance), worst.difference.sentence
            advice = advice_for(cause)
            findings.append(Finding(cause, layers, implementations, inputs, *size, why, advice))
    return tuple(sorted(findings, key=lambda finding: -finding.error))


def _checks(measured: Sequence[Measured]) -> Iterator[Check]:
    """One check for each kind of comparison, implementation and kind of input."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.check, each.implementation, each.inputs), []).append(each)
    for names, group in groups.items():
        worst = max(group, key=lambda each: (each.difference is not None, each.error))
        heads, ok = {each.layer: each.heads for each in group}, worst.difference is None
        yield Check(*names, len(heads), sum(heads.values()), worst.error, worst.tolerance, ok)


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
