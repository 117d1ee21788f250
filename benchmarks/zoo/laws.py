"""One model type under a law: at a factor of 1 nothing moves, at 1.5 what a larger query gives.

The reference of the second has no part of :func:`acutance.apply` in it: the weights that make the
queries are multiplied instead, and the model runs plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import acutance
from acutance.calibration.apply_law import ApplyError
from acutance.capture.find_layers import module_name as label
from acutance.scaling import HeadTable
from zoo.inputs import run
from zoo.larger import larger, normalises, ways
from zoo.maps import same, tensors

#: Where an output differs in its last digits between a plain and a probed run.
FUSED = "without PyTorch's fused inference, which a probe turns off, its outputs are rounded anew"

#: Applies a factor to a model.
MakeLaw = Callable[[Any, float], acutance.Applied]
FACTOR = 1.5
AGREES = 1e-3  # of what the law moves: a wrong slice or a missed layer is off by as much as moves
ROUNDING = 1e-14  # of an output's largest entry
ROUNDING_32 = 1e-6  # likewise, of a model that does not run in float64
SPREAD = 1e-6  # nats: rows as near to none, or to the most, do not change with a factor


@dataclass
class Lawful:
    """What one model type gave under a law.

    Attributes:
        calls: attention calls that the law scaled.
        read: modules whose attention a probe read.
        reached: of these, those that the law scaled.
        moved_at_1: whether a factor of 1 changed an output by as much as a bit.
        moved: largest change of an output at a factor of 1.5, over the output's largest entry.
        reference: as large a difference from the model with larger weights; None: not compared.
        by: what was made larger: what makes the queries, or the keys.
        dtype: of the model, for these two.
        left: why it was not compared.
        refused: why the law was refused.
        failed: why there is nothing of all this.
    """

    calls: int = 0
    read: int = 0
    reached: int = 0
    moved_at_1: bool = False
    moved: float = 0.0
    reference: float | None = None
    by: str = ""
    dtype: str = ""
    left: str = ""
    refused: str = ""
    failed: str = ""

    @property
    def agrees(self) -> bool:
        """Whether there is a reference, and what the law moved is what the reference moved."""
        return self.reference is not None and self.reference <= AGREES * self.moved

    @property
    def fault(self) -> str:
        """What is wrong, in a sentence; empty for a law that holds or is refused."""
        if self.refused or self.failed:
            return self.failed
        if self.moved_at_1:
            return "a factor of 1 moves an output"
        if self.reached < self.read:
            return f"{self.read - self.reached} of {self.read} modules are not scaled"
        if not self.moved and not self.left:
            return f"a factor of {FACTOR} moves no output"
        if self.reference is not None and not self.agrees:
            return f"off by {self.reference:.1e} where {self.moved:.1e} moves"
        return ""


def lawful(model: Any, given: dict[str, Any], law: MakeLaw | None = None) -> Lawful:
    """A model under factors of 1 and 1.5; it does not raise, and leaves the model in float64."""
    found, law = Lawful(), law or _law
    try:
        heads = _at_one(found, model, given, law)
        if not found.refused:
            _at_factor(found, model, given, heads, law)
    except Exception as error:
        found.failed = line(error)
    return found


def _at_one(found: Lawful, model: Any, given: dict[str, Any], law: MakeLaw) -> dict[str, int]:
    """The same bits as without; number of heads by module that was scaled."""
    plain = run(model, given)
    with acutance.probe(model, metrics=["entropy", "information"]) as probe:
        run(model, given)
    heads = {one.module.partition("#")[0]: one.heads for one in probe.summary().layers}
    found.read = len(heads)
    spread, focus = (probe.summary().mean(name).nan_to_num() for name in ("entropy", "information"))
    if bool(((spread < SPREAD) | (focus.abs() < SPREAD)).all()):
        found.left = "each of its rows has all its weight on one key, or the same on all"
    try:
        with law(model, 1.0) as applied:
            found.moved_at_1 = not same(plain, run(model, given))
    except ApplyError as error:
        found.refused = str(error)
        return {}
    found.calls = sum(applied.calls.values())
    for name in heads:  # a module that only multiplies is read in its own name, not its parent's
        found.reached += name in applied.calls or name.rpartition(".")[0] in applied.calls
    return {name: heads.get(name, 0) for name in applied.calls}


def _at_factor(
    found: Lawful, model: Any, given: dict[str, Any], heads: dict[str, int], law: MakeLaw
) -> None:
    """What larger queries give, or larger keys where a query has another use."""
    given, plain = _widest(model, given)
    found.dtype = next(str(part.dtype)[6:] for part in tensors(plain) if part.is_floating_point())
    with law(model, FACTOR):
        scaled = run(model, given)
    found.moved = _difference(scaled, plain)
    if found.moved < (ROUNDING if found.dtype == "float64" else ROUNDING_32):
        before = _inside(model, given, heads)
        with law(model, FACTOR):
            inside = _difference(_inside(model, given, heads), before)
        if inside > ROUNDING:
            found.left = f"its attention moves by {inside:.1e}, and its outputs do not"
        elif found.moved:
            found.left = "its outputs move by rounding alone"
        return
    if found.left:
        return
    found.left = "what makes its queries is not known"
    for by, parts in ways(model, heads):
        with larger(parts, FACTOR):
            output = run(model, given)
        difference = _difference(scaled, output)
        if found.reference is None or difference < found.reference:
            found.reference, found.by, found.left = difference, by, ""
        if found.agrees:
            return
        with larger(parts, FACTOR * (1 + 4e-16)):
            rounding = _difference(output, run(model, given))
        if difference < 100 * rounding:
            found.left = f"rounding alone makes a difference of {rounding:.1e}"
            break
    if normalises(model, heads):
        found.left = "queries and keys are normalised where they are multiplied"
    if found.left:
        found.reference, found.by = None, ""


def _law(model: Any, factor: float) -> acutance.Applied:
    return acutance.apply(model, HeadTable([factor]), windowed=True)


def _inside(model: Any, given: dict[str, Any], names: Iterable[str]) -> list[Any]:
    """What some modules give while the model runs."""
    modules = {label(model, name): module for name, module in model.named_modules()}
    outputs: list[Any] = []
    with ExitStack() as stack:
        for name in names:
            hook = modules[name].register_forward_hook(lambda _, __, out: outputs.append(out))
            stack.callback(hook.remove)
        run(model, given)
    return outputs


def _widest(model: Any, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """In float64, where the model runs in it: its input, and what it gives."""
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    try:
        plain = run(model.double(), wide)
        if not any(bool(part.isnan().any()) for part in tensors(plain)):
            return wide, plain
    except Exception:  # it makes float32 of its own, or its mask's value is none of float64
        pass
    return given, run(model.float(), given)


def _difference(left: Any, right: Any) -> float:
    """Largest difference of two outputs, over the largest finite entry of each tensor."""
    worst = 0.0
    for a, b in zip(tensors(left), tensors(right), strict=True):
        if not a.is_floating_point() or not b.numel():
            continue
        if a.shape != b.shape:
            return 1.0  # of another length, which the model itself chooses
        size = float(torch.where(b.isfinite(), b, 0.0).abs().max())
        difference = float(torch.where(a == b, 0.0, a - b).abs().nan_to_num(math.inf).max())
        worst = max(worst, difference / max(size, 1e-30))
    return worst


def line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


__all__ = ["AGREES", "FACTOR", "FUSED", "Lawful", "lawful", "line"]
