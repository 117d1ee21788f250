"""Check that the queries and keys of a module's scores are the outputs of its projections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from acutance.capture.module_stack import follow_outputs
from acutance.kernels.call import accumulate_dtype
from acutance.training.across_ranks import is_sharded
from acutance.training.projections import HeadSlices, Projections

__all__ = ["Outputs", "agrees", "rotary_width"]

_FAINT = 1e-4  # of the longest vector: shorter ones are left out
_MOST = 8  # outputs that are kept of a projection whose scores were not seen


class Outputs:
    """Records the last few outputs of projection modules.

    Args:
        projections: the modules.
    """

    def __init__(self, projections: Iterable[nn.Module]) -> None:
        self._recorded: dict[nn.Module, deque[Tensor]] = {}
        self._context = ExitStack()
        self._context.enter_context(follow_outputs(projections, self._record))

    def _record(self, module: nn.Module, output: Any) -> None:
        """Forward hook: record a module's output, detached."""
        if is_sharded(output):  # a hook of the module's own makes it local after this
            output = output.to_local()
        if isinstance(output, Tensor):
            self._recorded.setdefault(module, deque(maxlen=_MOST)).append(output.detach())

    def take(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Outputs of a module recorded since :meth:`forget`."""
        return tuple(self._recorded.get(module, ()))

    def left(self) -> set[nn.Module]:
        """Modules that still have recorded outputs."""
        return set(self._recorded)

    def forget(self, modules: Sequence[nn.Module]) -> None:
        """Discard the recorded outputs of these modules."""
        for module in modules:
            self._recorded.pop(module, None)

    def remove(self) -> None:
        """Stop recording."""
        self._context.close()
        self._recorded = {}


def rotary_width(module: nn.Module, width: int) -> int:
    """Number of leading entries of each head that rotary embedding rotates; 0 if it may be all."""
    config: Any = getattr(module, "config", None)
    share = getattr(config, "partial_rotary_factor", None)
    if share is None and isinstance(parameters := getattr(config, "rope_parameters", None), dict):
        share = parameters.get("partial_rotary_factor")  # transformers 5
    rotated = getattr(module, "rotary_ndims", None)
    if not isinstance(rotated, int):
        rotated = int(share * width) if isinstance(share, int | float) else 0
    return rotated if 0 < rotated < width else 0


@torch.no_grad()
def agrees(
    projections: Projections, query: Tensor, key: Tensor, outputs: Outputs, rotary: int = 0
) -> bool | None:
    """Whether queries and keys are the projections' outputs, only rotated and scaled.

    This is checked by norms: rotations keep them, and scales by head and position multiply them,
    while selecting other heads, normalising, clamping or adding a term changes their ratios. Only
    if norms agree does a factor on the weights multiply the scores. The rotated and the other
    entries of a head may have different scales.

    Args:
        projections: the weights of queries and keys.
        query: (B, Hq, L, E), as scored.
        key: (B, H, S, E), as scored.
        outputs: the projections' outputs in the same forward pass.
        rotary: number of leading entries of a head that are rotated; 0 if unknown.

    Returns:
        None if nothing could be compared, or a projection had several outputs and no recorded one
        agrees.
    """
    if not projections.makers:
        return None
    parts = [(projections.makers[0], query, (projections.query[0], *projections.query_alone[:1]))]
    if projections.group == 1 and not projections.query_alone:
        parts.append((projections.makers[1], key, (projections.key[0],)))
    verdicts: list[bool | None] = []
    for maker, scored, slices in parts:
        if scored.shape[1] != projections.heads:
            continue
        recorded = outputs.take(maker)
        cut = slices[0].size if len(slices) > 1 else rotary
        of_outputs = [_proportional(scored, output, slices, cut) for output in recorded]
        if True in of_outputs:
            verdicts.append(True)
        elif len(recorded) == 1:
            verdicts.append(of_outputs[0])
    return False if False in verdicts else True if True in verdicts else None


def _proportional(
    scored: Tensor, output: Tensor, slices: Sequence[HeadSlices], cut: int
) -> bool | None:
    """Whether scored vectors are a rotation or multiple of the output; None if undecidable."""
    batch, _, rows, width = scored.shape
    if output.dim() < 2 or output.shape[:-1].numel() != batch * rows or batch * rows < 2:
        return None
    if output.shape[-1] != slices[0].tensor.shape[slices[0].dim]:
        return None
    together = _fits(scored, output, slices, 0, width)
    if together is not False or not 0 < cut < width or sum(part.size for part in slices) != width:
        return together
    rotated = _fits(scored, output, slices, 0, cut)
    rest = _fits(scored, output, slices, cut, width)
    if False in (rotated, rest):
        return False
    return None if None in (rotated, rest) else True


def _fits(
    scored: Tensor, output: Tensor, slices: Sequence[HeadSlices], first: int, last: int
) -> bool | None:
    """Whether the norms of some entries of all heads agree up to one scale."""
    entries = [
        torch.cat([output.narrow(-1, s.offset(head), s.size) for s in slices], -1)[..., first:last]
        for head in range(scored.shape[1])
    ]
    lengths = torch.stack([_norm(of_head) for of_head in entries], -1)
    expected = _norm(scored[..., first:last]).transpose(1, 2)
    eps = max(torch.finfo(part.dtype).eps for part in (scored, output))
    tolerance = max(1e-3, 4 * eps)
    worst = [
        float(left.abs().max())
        for left, residual in _centred_log_ratios(lengths, expected)
        if residual.numel() and bool(residual.abs().max() > tolerance)  # else any would agree
    ]
    return min(worst) <= tolerance if worst else None


def _norm(vectors: Tensor) -> Tensor:
    """Euclidean norm over the last dimension, float64."""
    wide = accumulate_dtype(vectors.dtype)
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide)
    return norms.double()


def _clear(lengths: Tensor) -> Tensor:
    """Which norms are finite and large enough for a meaningful ratio."""
    finite = lengths.isfinite()
    return finite & (lengths > _FAINT * torch.where(finite, lengths, 0.0).amax())


def _centred_log_ratios(lengths: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Compare norms with expected ones up to a common scale, for both possible orders of tokens.

    Args:
        lengths: vector norms, (..., H), of B·L tokens.
        expected: (B, L, H).

    Yields:
        log(expected / lengths) and log(lengths), each centred so that a common scale cancels. If
        the first is all zeros, the norms agree up to scale.
    """
    batch, rows, heads = expected.shape
    orders = [lengths.reshape(batch, rows, heads)]
    if lengths.dim() == 3 and lengths.shape[:2] == (rows, batch) and batch != 1:
        orders.append(lengths.transpose(0, 1))
    enough = _clear(expected)
    for order in orders:
        good = enough & _clear(order)
        exponents = torch.where(good, order, 1.0).log()
        ratio = torch.where(good, expected, 1.0).log() - exponents
        if batch > 1:  # a factor of each position and head
            valid = good.all(0)
            yield (ratio - ratio.mean(0))[:, valid], (exponents - exponents.mean(0))[:, valid]
        if heads > 1:  # a factor of each token times one of each head
            valid = good.all(-1)
            yield _centred(ratio[valid]), _centred(exponents[valid])
    # a factor of each head, whatever the order of the tokens: windows, or documents in a row
    first, second = (part.reshape(-1, heads).sort(0).values for part in (lengths, expected))
    valid = (_clear(first) & _clear(second)).all(-1)
    exponents = first[valid].log()
    ratio = second[valid].log() - exponents
    yield ratio - ratio.mean(0), exponents - exponents.mean(0)


def _centred(logs: Tensor) -> Tensor:
    """Subtract row and column means."""
    return logs - logs.mean(0) - logs.mean(1, keepdim=True) + logs.mean()
