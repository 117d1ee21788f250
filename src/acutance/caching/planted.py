"""How much of what was planted in its context a model repeats, with a plan's cache or all of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from acutance.caching.plan import CachePlan
from acutance.calibration.windows import evaluating
from acutance.shapes import check_count, check_number

#: Depths at which spans are planted, as shares of the context.
DEPTHS = (0.02, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Planted:
    """Windows with planted spans, which are repeated at the end.

    Attributes:
        tokens: (windows, L).
        context: tokens before the repetitions.
        scored: (depths, scored), positions of the tokens that are to be repeated.
        depths: where the spans are, as shares of the context.
    """

    tokens: Tensor
    context: int
    scored: Tensor
    depths: tuple[float, ...]

    def accuracy(self, logits: Tensor) -> Tensor:
        """Share of the scored tokens with the largest logit, (windows, depths) float64.

        Args:
            logits: (windows, L - context + 1, V), from that of the last token of the context on.
        """
        best = logits.argmax(-1).to(self.tokens.device)
        right = best[:, self.scored - self.context] == self.tokens[:, self.scored]
        return right.double().mean(-1)


@dataclass(frozen=True)
class Recall:
    """The result of :func:`recall`.

    Attributes:
        depths: where the spans were, as shares of the context.
        by_window: accuracy, (windows, depths).
    """

    depths: tuple[float, ...]
    by_window: Tensor

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Accuracy at each depth, a mean over windows."""
        return tuple(self.by_window.mean(0).tolist())

    @property
    def mean(self) -> float:
        """Accuracy over all windows and depths."""
        return float(self.by_window.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean, from window to window; NaN for one."""
        means = self.by_window.mean(1)
        return float(means.std() / math.sqrt(len(means))) if len(means) > 1 else math.nan


def plant(
    windows: Tensor,
    *,
    depths: Sequence[float] = DEPTHS,
    length: int = 24,
    shown: int = 8,
    seed: int = 0,
) -> Planted:
    """Plant a span of random tokens at each depth of each window, and repeat all spans at the end.

    Every span replaces tokens of the window, and the repetitions its last tokens, in random order.
    Tokens of spans are drawn from all windows.

    Args:
        windows: tokens (windows, L).
        depths: where spans are, from 0, the start of the context, to 1, its end.
        length: tokens of a span.
        shown: first tokens of a repetition, which say which span it is; the rest is scored.
        seed: of the spans and of the order of the repetitions.

    Raises:
        TypeError: if a number or ``windows`` is not of integers.
        ValueError: if a number is out of range, or the windows are too short.

    Example:
        >>> planted = plant(torch.arange(200).view(2, 100), depths=[0.0, 1.0], length=10, shown=4)
        >>> planted.context, planted.scored.shape
        (80, torch.Size([2, 6]))
        >>> first = planted.tokens[0, :10]
        >>> bool((planted.tokens[0, planted.scored[0]] == first[4:]).all())
        True
    """
    if windows.dim() != 2 or windows.is_floating_point():
        raise TypeError(
            f"windows must be integer tokens (windows, L), got {tuple(windows.shape)} of "
            f"{windows.dtype}"
        )
    check_count("length", length, 2)
    if not 1 <= check_count("shown", shown, 1) < length:
        raise ValueError(f"shown must be below length, got shown={shown} and length={length}")
    for depth in depths:
        check_number("depths", depth, above=0.0, including=True)
        if depth > 1:
            raise ValueError(f"depths must be at most 1, got {depth!r}")
    context = windows.shape[1] - length * len(depths)
    starts = [round(depth * (context - length)) for depth in depths]
    ordered = sorted([*starts, context])
    if not starts or any(b - a < length for a, b in pairwise(ordered)):
        raise ValueError(
            f"{len(depths)} spans of {length} tokens and their repetitions do not fit into windows "
            f"of {windows.shape[1]} tokens at depths {tuple(depths)}"
        )
    generator = torch.Generator().manual_seed(seed)
    count = len(depths)
    drawn = torch.randint(windows.numel(), (len(windows), count, length), generator=generator)
    spans = windows.flatten().cpu()[drawn].to(windows.device)
    order = torch.randperm(count, generator=generator).tolist()
    tokens, scored = windows.clone(), torch.empty(count, length - shown, dtype=torch.int64)
    for place, index in enumerate(order):
        at = context + place * length
        tokens[:, starts[index] : starts[index] + length] = spans[:, index]
        tokens[:, at : at + length] = spans[:, index]
        scored[index] = torch.arange(at + shown, at + length)
    return Planted(tokens, context, scored, tuple(depths))


def recall(
    model: torch.nn.Module,
    windows: Tensor,
    plan: CachePlan | None = None,
    *,
    depths: Sequence[float] = DEPTHS,
    length: int = 24,
    shown: int = 8,
    seed: int = 0,
) -> Recall:
    """Measure how often a model repeats spans that were planted in its context.

    See :func:`plant`. A scored token counts if it has the largest logit. The tokens before it are
    the right ones, and the spans are random, so that it can be known only from the context.

    Args:
        model: a causal language model of transformers with its head.
        windows: tokens (windows, L), read one window at a time.
        plan: what the cache keeps; None for all.
        depths: where spans are, from 0 to 1.
        length: tokens of a span.
        shown: first tokens of a repetition that are not scored.
        seed: of the spans and of the order of the repetitions.

    Raises:
        PlanError: if the plan is for another model.
        TypeError: as :func:`plant`.
        ValueError: as :func:`plant`.

    Example:
        >>> from acutance.reproduce import decoder, texts
        >>> code = texts.read(texts.files("held out")).long()
        >>> result = recall(decoder(), code[:512].view(2, 256), depths=[0.2, 0.6])
        >>> result.by_window.shape, 0 <= result.mean <= 1
        (torch.Size([2, 2]), True)
    """
    planted = plant(windows, depths=depths, length=length, shown=shown, seed=seed)
    inner: Any = model
    last = planted.tokens.shape[1] - planted.context + 1
    few = "logits_to_keep" in inspect.signature(inner.forward).parameters
    options = {"logits_to_keep": last} if few else {}
    rows = []
    with evaluating(model), torch.no_grad():
        for tokens in planted.tokens.split(1):
            with nullcontext() if plan is None else plan.on(model):
                logits = inner(input_ids=tokens, use_cache=plan is not None, **options).logits
            one = Planted(tokens, planted.context, planted.scored, planted.depths)
            rows.append(one.accuracy(logits[:, -last:]).cpu())
    return Recall(planted.depths, torch.cat(rows))
