"""Whether a module's projections make the queries and keys that its scores were made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from acutance.training.projections import NAMES, HeadSlices, Projections

__all__ = ["Outputs", "agrees"]

_FAINT = 1e-4  # of the longest vector: shorter ones are left out


class Outputs:
    """Keeps the last output of every module that has the name of a projection, until removed."""

    def __init__(self, model: nn.Module) -> None:
        self._last: dict[nn.Module, Tensor] = {}
        self._hooks = [
            part.register_forward_hook(self._keep)
            for name, part in model.named_modules()
            if name.rpartition(".")[2] in NAMES
        ]

    def _keep(self, module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor):
            self._last[module] = output.detach()

    def take(self, module: nn.Module) -> Tensor | None:
        """The last output of a module."""
        return self._last.get(module)

    def forget(self, modules: Sequence[nn.Module]) -> None:
        """Let outputs go."""
        for module in modules:
            self._last.pop(module, None)

    def remove(self) -> None:
        """Keep nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._last = [], {}


@torch.no_grad()
def agrees(found: Projections, query: Tensor, key: Tensor, outputs: Outputs) -> bool | None:
    """Whether the scored vectors are as long as those that the slices of the outputs hold.

    A rotation leaves lengths as they are, a scale by head and position multiplies them; slices of
    other heads, a normalisation, a clamp or something added do not. Only then does a factor on
    the weights multiply the scores by as much.

    Args:
        found: where queries and keys are made.
        query: (B, Hq, L, E), as they were scored.
        key: (B, H, S, E).
        outputs: of the projections, in the same forward.

    Returns:
        None where nothing could be compared.
    """
    if not found.makers:
        return None
    parts = [(found.makers[0], query, (found.query[0], *found.query_alone[:1]))]
    if found.group == 1 and not found.query_alone:
        parts.append((found.makers[1], key, (found.key[0],)))
    verdicts = []
    for maker, scored, slices in parts:
        output = outputs.take(maker)
        if output is not None and scored.shape[1] == found.heads:
            verdicts.append(_proportional(scored, output, slices))
    if False in verdicts:
        return False
    return True if True in verdicts else None


def _proportional(scored: Tensor, output: Tensor, slices: Sequence[HeadSlices]) -> bool | None:
    batch, heads, rows, _ = scored.shape
    if output.dim() < 2 or output.shape[:-1].numel() != batch * rows or batch * rows < 2:
        return None
    ends = slices[0].tensor.shape[slices[0].dim]
    if output.shape[-1] != ends:
        return None
    made = torch.stack([_length(output, slices, head) for head in range(heads)], -1)
    wanted = torch.linalg.vector_norm(scored, dim=-1, dtype=_wide(scored)).transpose(1, 2).double()
    eps = max(torch.finfo(part.dtype).eps for part in (scored, output))
    worst = [part for part in _residuals(made.double(), wanted) if len(part)]
    if not worst:
        return None
    return any(bool(part.abs().max() <= max(1e-3, 4 * eps)) for part in worst)


def _length(output: Tensor, slices: Sequence[HeadSlices], head: int) -> Tensor:
    parts = [
        torch.linalg.vector_norm(
            output.narrow(-1, part.offset(head), part.size), dim=-1, dtype=_wide(output)
        )
        for part in slices
    ]
    return torch.stack(parts).square().sum(0).sqrt()


def _wide(part: Tensor) -> torch.dtype:
    return torch.float64 if part.dtype == torch.float64 else torch.float32


def _residuals(made: Tensor, wanted: Tensor) -> Iterator[Tensor]:
    """What is left of the logarithms of ratios after what a scale may explain.

    Args:
        made: (..., H), of as many tokens.
        wanted: (B, L, H).
    """
    batch, rows, heads = wanted.shape
    orders = [made.reshape(batch, rows, heads)]
    if made.dim() == 3 and made.shape[:2] == (rows, batch) and batch != 1:
        orders.append(made.transpose(0, 1))
    enough = wanted > _FAINT * wanted.amax()
    for order in orders:
        good = enough & (order > _FAINT * order.amax())
        ratio = torch.where(good, wanted / order, 1.0).log()
        if batch > 1:  # a factor of each position and head
            yield (ratio - ratio.mean(0))[:, good.all(0)]
        if heads > 1:  # a factor of each token times one of each head
            kept = ratio[good.all(-1)]
            if len(kept) > 1:
                yield kept - kept.mean(0) - kept.mean(1, keepdim=True) + kept.mean()
    # a factor of each head, whatever the order of the tokens: windows, or documents in a row
    first, second = (part.reshape(-1, heads).sort(0).values for part in (made, wanted))
    good = ((first > _FAINT * first.amax()) & (second > _FAINT * second.amax())).all(-1)
    ratio = (second[good] / first[good]).log()
    if len(ratio) > 1:
        yield ratio - ratio.mean(0)
