"""One pass over all windows with a law, in turns, so that it can be interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from acutance.calibration.apply_law import apply
from acutance.calibration.fit.collect import Collector, LayerSums, Target
from acutance.calibration.fit.windows import Turn
from acutance.calibration.law import AnyLaw

__all__ = ["PassSums", "knots_of", "run_pass"]


class PassSums:
    """What a pass has collected so far.

    Attributes:
        done: number of batches included.
        layers: sums of the rows by module name.
        scales: critical scales of sampled rows, (heads, rows), by module name and bin.
        unread: attention that could not be read, with the reason.
        torn: whether an interrupt came while a batch was being added; the sums are then unusable.
    """

    def __init__(self) -> None:
        self.done = 0
        self.layers: dict[str, LayerSums] = {}
        self.scales: dict[tuple[str, int], Tensor] = {}
        self.unread: tuple[str, ...] = ()
        self.torn = False


def knots_of(lengths: Sequence[int], reference: int | None = None) -> tuple[int, ...]:
    """The knots of a calibration: numbers n of visible keys at which factors are fitted.

    They are the lengths of the windows and octaves between them, since a causal model has rows of
    every n.

    Args:
        lengths: lengths of the windows, ascending.
        reference: one of them, which half an octave later is followed by a further knot: beyond
            its training length a model's entropy can rise faster than log n, which a line over a
            whole octave would miss. None adds no such knot.

    Example:
        >>> knots_of([64, 512, 768])
        (64, 128, 256, 512, 768)
        >>> knots_of([64, 128, 256], reference=64)
        (64, 91, 128, 256)
    """
    found = [lengths[0]]
    for length in lengths[1:]:
        while found[-1] * 2 * 2**0.5 < length:
            found.append(found[-1] * 2)
        found.append(length)
    if reference is not None and reference in found[:-1]:
        at, half = found.index(reference) + 1, round(reference * 2**0.5)
        if found[at] > half * 1.2:
            found.insert(at, half)
    return tuple(found)


def run_pass(
    model: torch.nn.Module,
    turns: Sequence[Turn],
    target: Target,
    knots: Sequence[int],
    law: AnyLaw | None,
    *,
    so_far: PassSums,
    windowed: bool = False,
    gaps: bool = False,
    seed: int = 0,
    after: Callable[[PassSums, Turn], None] = lambda *_: None,
) -> PassSums:
    """Run the remaining turns with a law and add their results.

    Args:
        model: any module; it is in evaluation mode meanwhile.
        turns: all turns of the pass.
        target: what is summed.
        knots: lengths of the bins.
        law: in force; None leaves the model as it is.
        so_far: of the turns done; it is added to.
        windowed: also collect, and scale, layers with a sliding window.
        gaps: also sample critical scales.
        seed: of the sample.
        after: called after each turn with what there is and the turn.

    Raises:
        ApplyError: if the law cannot be applied.
        ProbeError: if the model ran no attention that can be read.
    """
    groups = int(max(int(turn.groups.max()) for turn in turns)) + 1
    left = turns[so_far.done :]
    if not left:
        return so_far
    device = next((part.device for part in model.parameters()), None)
    collector = Collector(model, target, knots, groups, windowed=windowed, gaps=gaps, seed=seed)
    for (name, k), scales in so_far.scales.items():
        collector.scales[name, k] = [scales]
    with ExitStack() as context:
        context.enter_context(evaluating(model))
        context.enter_context(torch.no_grad())
        if law is not None:
            context.enter_context(apply(model, law, windowed=windowed))
        context.enter_context(collector)
        for turn in left:
            collector.group, collector.turn = turn.groups, so_far.done
            turn.run(model, device)
            _take(so_far, collector)
            after(so_far, turn)
    return so_far


def _take(so_far: PassSums, collector: Collector) -> None:
    """Add what the collector has collected from one batch.

    Raises:
        ValueError: if a layer has another number of heads than before.
    """
    so_far.torn = True
    for name, found in collector.take().items():
        have = so_far.layers.get(name)
        if have is None:
            so_far.layers[name] = found
        elif have.sums.shape != found.sums.shape:
            raise ValueError(
                f"{name} has {found.sums.shape[2]} heads in this batch, but had "
                f"{have.sums.shape[2]} in earlier ones: the heads must be the same in every batch"
            )
        else:
            have.add(found)
    so_far.scales = {
        place: torch.cat(parts, 1) for place, parts in collector.scales.items() if parts
    }
    so_far.unread = tuple(dict.fromkeys((*so_far.unread, *collector.unread)))
    so_far.done += 1
    so_far.torn = False


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for all modules, restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
