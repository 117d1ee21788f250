"""Checker: compares every attention call of a forward pass with what the configuration says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import is_cross
from acutance.masks import hides
from acutance.probing.causes import differences, find_cause, visible_keys
from acutance.verification.arguments import (
    Difference,
    Pass,
    argument_differences,
    counted_rows,
    expected_call,
)
from acutance.verification.expectation import Expectation, expectation_of, layer_index
from acutance.verification.gradients import check_gradients
from acutance.verification.positions import (
    PARTS,
    check_rotation,
    unrotated_heads,
)

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
    """Receives the calls of a listener and compares each with its expectation.

    Args:
        config: configuration to check against; None for that of each module.

    Attributes:
        gradients: whether gradients of the present run are compared.
        implementation: name of the attention implementation that runs.
        facts: what is known of the forward pass that runs.
        measured: the comparisons so far.
        problems: what could not be compared, and why.
        left_out: what the configuration states, or was asked for, and was not compared, each with
            the layers that it was left out of.
    """

    def __init__(self, config: Any = None) -> None:
        self._config = config
        self.gradients = False
        self.implementation = ""
        self.facts = Pass("")
        self.measured: list[Measured] = []
        self.problems: dict[str, None] = {}
        self.left_out: dict[str, set[str]] = {}
        self._expected: dict[str, Expectation] = {}
        self._outputs: dict[int, dict[str, Tensor]] = {}
        self._parents: dict[int, list[tuple[int, str]]] = {}
        self._stored: dict[str, Tensor] = {}
        self._shifts: dict[str, Tensor] = {}
        self._seen: dict[tuple[str, int, str], tuple[str, Tensor]] = {}

    def begin(self, implementation: str, facts: Pass) -> None:
        """Set what is known of the next forward pass; one without a past begins a new text."""
        self.implementation, self.facts = implementation, facts
        self._outputs.clear()
        if not facts.past:
            self._stored.clear()
            self._shifts.clear()

    def parts(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Modules whose outputs are to be passed to :meth:`on_part`."""
        self._parents.clear()
        parts = []
        for module in model.modules():
            children = dict(module.named_children())
            if not PARTS.isdisjoint(children):
                for name, part in children.items():
                    self._parents.setdefault(id(part), []).append((id(module), name))
                    parts.append(part)
        return parts

    def on_part(self, part: torch.nn.Module, _: Any, __: Any, output: Any) -> None:
        """Record what a part of an attention module returned."""
        if isinstance(output, Tensor):
            for parent, name in self._parents.get(id(part), ()):
                self._outputs.setdefault(parent, {})[name] = output.detach()

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Compare whether a softmax by hand hides padding: of its arguments no more is known."""
        facts, shape = self.facts, tuple(scores.shape)
        real = None if is_cross(name) or not facts.is_text else facts.real
        if real is not None and (
            bool(real.all())
            or (shape[0], *shape[2:]) != (len(real), facts.tokens, real.shape[1])
            or (doubt is not None and doubt())
        ):
            real = None
        if real is None:
            if f"{name}\n{_ONLY_PADDING}" not in self.problems:
                self._problem(name, _NOT_COMPARED)
            return
        self.problems.pop(f"{name}\n{_NOT_COMPARED}", None)
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
        self._record("arguments", name, shape[1], error, _PADDING, difference)

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Compare one call."""
        if call.moved or output is None:
            self._problem(call.module, "its output is not known")
            return
        facts = self.facts
        if not facts.promises(call):
            self._problem(call.module, _UNKNOWN_DOCUMENTS)
            return
        expected = self._scaled_before(call, module, self._expectation(call, module))
        if facts.is_text and not call.cross and not expected.masks:
            self._problem(call.module, f"masks not checked: {expected.masks_problem}")
        if not facts.is_text and not call.cross and expected.causal is not None:
            self._problem(call.module, "masks not checked: it does not read only token ids")
        ours = expected_call(call, expected, facts)
        seen, wanted = visible_keys(call), visible_keys(ours)
        counted = counted_rows(wanted, call, facts)
        found = argument_differences(call, ours, expected, seen, wanted, counted)
        theirs = output()
        found = found or self._against_others(call, seen, counted)
        with torch.no_grad():
            self._compare_output(call, ours, theirs.detach(), counted, module, found)
            self._compare_rotation(call, expected, module, counted)
            if expected.masks:
                self._compare_cache(call, remade=hasattr(module, "expand_kv"))
        if self.gradients and not found and not self._last_failed("output"):
            self._compare_gradients(call, ours, theirs, counted, module)

    def _expectation(self, call: AttentionCall, module: Any) -> Expectation:
        """What the configuration says of a module, read once."""
        if call.module not in self._expected:
            config = self._config if self._config is not None else getattr(module, "config", None)
            heads, width = call.query.shape[1], call.query.shape[-1]
            index = layer_index(call.module)
            expected = expectation_of(module, config, heads, width, index)
            if expected.causal is False and self._is_masked_causally(call):
                expected = replace(expected, causal=True)  # is_causal is about calls without a mask
            self._expected[call.module] = expected
        return self._expected[call.module]

    def _is_masked_causally(self, call: AttentionCall) -> bool:
        """Whether a call's mask hides exactly the later keys."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        if call.attn_mask is None or not self.facts.knows_masks(call) or queries != keys > 1:
            return False
        seen = visible_keys(call)
        return torch.equal(seen, seen.new_ones(queries, keys).tril().expand_as(seen))

    def _against_others(
        self, call: AttentionCall, seen: Tensor, counted: Tensor
    ) -> list[Difference]:
        """Whether rows see other keys than with the first implementation that read this input."""
        keys = call.key.shape[2]
        chance = torch.Generator().manual_seed(0)
        weights = torch.rand(keys, generator=chance).to(call.query.device)
        signature = seen.float() @ weights
        place = self.facts.inputs, self.facts.past, call.module
        name, first = self._seen.setdefault(place, (self.implementation, signature))
        if name == self.implementation or first.shape[2:] != signature.shape[2:]:
            return []
        apart = (first - signature).abs() > 1e-4 * keys
        if not bool((apart & counted).any()):
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
        return replace(expected, scale=None, folded=scale)

    def _before(self, call: AttentionCall, module: Any) -> tuple[Tensor, Tensor] | None:
        """Queries and keys of the call's tokens as their projections or norms return them."""
        key = call.key[:, :, -call.query.shape[2] :]
        return unrotated_heads(self._outputs.get(id(module), {}), call.query, key)

    def _compare_output(
        self,
        call: AttentionCall,
        ours: AttentionCall,
        theirs: Tensor,
        counted: Tensor,
        module: torch.nn.Module,
        found: list[Difference],
    ) -> None:
        """Compare the model's output with the expected call's, in float64."""
        wide = _widened(ours)
        rebuilt, stats = wide.rebuild(False)
        if rebuilt.shape != theirs.shape:
            self._problem(call.module, f"its output has shape {tuple(theirs.shape)}")
            return
        narrow = ours if found else replace(call, dropout_p=0.0)
        errors, limits = differences(narrow, rebuilt, stats.state.m, theirs, counted)
        error = float(errors.max()) if errors.numel() else 0.0
        worst = int((errors / limits).argmax()) if errors.numel() else 0
        limit = float(limits.flatten()[worst]) if limits.numel() else 0.0
        agrees = bool((errors <= limits).all())
        for difference in found:
            self._add("arguments", call, error, limit, difference)
        if not found:
            self._add("arguments", call, 0.0, 0.0)
        if agrees:
            self._add("output", call, error, limit)
            return
        given = _widened(replace(call, dropout_p=0.0))
        again, stats = given.rebuild(False)
        errors, limits = differences(call, again, stats.state.m, theirs, counted)
        if found and bool((errors <= limits).all()):
            return  # it computes what it is given: the arguments are what is wrong
        cause = find_cause(wide, theirs, counted, module)
        if cause is not None:
            text = f"the output agrees if {cause.agrees}: {cause.means}"
            for kind in cause.kind.split(" and "):
                self._add("output", call, error, limit, Difference(kind, text))
        elif not found and call.unknown:
            text = f"output not checked: verify does not know {', '.join(call.unknown)}"
            self._problem(call.module, text)
        elif not found:
            text = "the output differs, and no tested cause explains it"
            self._add("output", call, error, limit, Difference("unexplained", text))

    def _compare_rotation(
        self, call: AttentionCall, expected: Expectation, module: Any, counted: Tensor
    ) -> None:
        """Compare the rotation of queries and keys with the configuration's."""
        facts = self.facts
        if not facts.knows_masks(call) or facts.positions is None:
            if not facts.is_text and not call.cross and (expected.rope or expected.rope_problem):
                self._problem(call.module, "positions not checked: they are not those of token ids")
            return
        if expected.rope is None:
            if expected.rope_problem:
                self._problem(call.module, f"positions not checked: {expected.rope_problem}")
            return
        key = call.key[:, :, -call.query.shape[2] :]
        before = self._before(call, module)
        if before is None:
            text = "positions not checked: its projections are not of a known form"
            self._problem(call.module, text)
            return
        rows = counted.any(1)
        if expected.folded is not None:
            halves = before[1].norm() * expected.folded, key.norm() / expected.rope.attention_factor
            both = bool((halves[0] - halves[1]).abs() <= 0.01 * halves[1])
            before = before[0] * expected.folded, before[1] * (expected.folded if both else 1.0)
        shift = self._shifts.get(call.module)
        found = check_rotation(expected, facts, before, (call.query, key), rows, shift)
        if found.shift is not None:
            self._shifts[call.module] = found.shift
        if found.problem:
            self._problem(call.module, f"positions not checked: {found.problem}")
        else:
            self._add("positions", call, found.error, found.tolerance, found.difference)

    def _compare_cache(self, call: AttentionCall, remade: bool) -> None:
        """Compare keys that a cache returns with those that were put into it.

        They are to be equal, but for rounding where keys are ``remade`` from a latent cache.
        """
        facts = self.facts
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
            self._add("cache", call, error, limit, difference)
        past = new if before is None or not facts.past else torch.cat([before, new], 2)
        self._stored[call.module] = past

    def _compare_gradients(
        self,
        call: AttentionCall,
        ours: AttentionCall,
        theirs: Tensor,
        counted: Tensor,
        module: torch.nn.Module,
    ) -> None:
        """Compare gradients of the call."""
        try:
            with torch.enable_grad():
                sinks = getattr(module, "sinks", None)
                found = check_gradients(call, _widened(ours), theirs, counted, sinks)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            self._problem(call.module, f"gradients not checked: {error}")
            return
        self._add("gradients", call, found.error, found.tolerance, found.difference)

    def _last_failed(self, check: str) -> bool:
        """Whether the last comparison of this kind found a difference."""
        return next(
            (m.difference is not None for m in reversed(self.measured) if m.check == check), True
        )

    def _add(
        self,
        check: str,
        call: AttentionCall,
        error: float,
        tolerance: float,
        difference: Difference | None = None,
    ) -> None:
        """Record a comparison of a call."""
        self._record(check, call.module, call.query.shape[1], error, tolerance, difference)

    def _record(self, check: str, *measured: Any) -> None:
        """Record a comparison: the module, its heads and the other fields of :class:`Measured`."""
        self.measured.append(Measured(check, self.implementation, self.facts.inputs, *measured))

    def _problem(self, layer: str, text: object) -> None:
        """Note what could not be compared: the output, unless the text says "… not checked"."""
        words = " ".join(str(text).split())
        what, known, _ = words.partition(" not checked: ")
        if words != _UNKNOWN_DOCUMENTS:  # of which no configuration says anything
            self.left_out.setdefault(what if known else "output", set()).add(layer)
        self.problems.setdefault(f"{layer}\n{words[:300]}")


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
