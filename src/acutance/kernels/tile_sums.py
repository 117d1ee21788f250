"""The running sums of a row of tiles, from one tile of keys to the next.

A tile leaves a :class:`Part`, moments about its own means. The parts of a row are merged once, when
its last tile is through, and turned into the fields of a row state for many rows at a time: a
tile costs its passes over the scores and little else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.tiles import Buffers, Work, as_mask_shape, columns, expand_rows
from acutance.masks import Hidden, Tile
from acutance.rowstats import gaps as histogram

__all__ = [
    "FLOOR",
    "LOG2E",
    "MODERATE",
    "NO_KEY",
    "Part",
    "Running",
    "finite",
    "inverse_normaliser",
    "ratio",
    "row_fields",
]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
#: Hidden scores are clamped here, so that weight × score is 0 and never 0 · −inf. Visible ones in
#: the same block pass through the clamp too: it lies below any of them; its square is finite.
FLOOR = -1e18
#: Index of the first visible key of a row that has none.
NO_KEY = torch.iinfo(torch.int64).max
#: Scores below this leave the mean of a float32 tile exact enough to take its deviations from.
MODERATE = 64.0


def finite(m: Tensor) -> Tensor:
    """The maximum, or 0 for a row that has seen no key, so that it can be subtracted."""
    return torch.where(m == -torch.inf, 0.0, m)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A sum divided by its weight, 0 if both are 0 (an empty block)."""
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise inner product of contiguous (blocks, rows, keys) tensors.

    As a batched matrix product it needs no temporary, but only long rows, laid out exactly so,
    reach the fast path of the matrix library (0.13 ns an element was measured, against 0.15 for a
    product and a sum, and 0.8 for other layouts).
    """
    blocks, rows, keys = left.shape
    if keys < 512:
        return torch.mul(left, right).sum(-1)
    return torch.bmm(left.view(-1, 1, keys), right.view(-1, 1, keys).mT).view(blocks, rows)


def inverse_normaliser(Z: Tensor, m: Tensor, sink: Tensor | None) -> Tensor:
    """1 / (Z + e^(sink − m)); 0 for a row with nothing to attend to."""
    whole = Z if sink is None else Z + torch.exp(sink - finite(m))
    return torch.where(whole == 0, 0.0, 1.0 / whole)


def moderate(largest: Tensor) -> bool:
    """Whether maxima are of ordinary size; one that is no number does not count."""
    size = largest.abs()
    return not bool(((size >= MODERATE) & (size != torch.inf)).any())


def _erase(values: Tensor, hidden: Hidden | None, work: Work) -> None:
    """Zero what a tile hides."""
    if hidden is not None:
        hidden.erase(as_mask_shape(values, work))


class Part(NamedTuple):
    """Sums over the keys of one tile, or of several; every field (blocks, rows).

    ``t`` are the scores' distances from ``m`` in units of log 2, ``e`` = 2^t.
    """

    n: Tensor  #: visible keys
    total: Tensor  #: Σ s
    m: Tensor  #: maximum of this tile and of those before it
    Z: Tensor  #: Σ e
    norm: Tensor  #: √Σ e²
    average: Tensor  #: weighted mean of t
    W: Tensor  #: Σ e (t − average)²
    offset: Tensor  #: plain mean of t, less ``average``
    M2: Tensor  #: squared deviations of t from its plain mean


def _merged(parts: list[Part], log2: float) -> Part:
    """Merge the parts of a row's tiles, in order, into one."""
    if len(parts) == 1:
        return parts[0]
    n, total, m, Z, norm, average, W, offset, M2 = (
        torch.stack(field) for field in zip(*parts, strict=True)
    )
    # a maximum only rises: what a tile without a key calls its maximum takes no part
    drop = (finite(m) - finite(m[-1])).clamp_(FLOOR, 0.0).mul_(log2)
    decay = torch.exp2(drop)
    Z, W = Z * decay, W * decay
    mean = average + offset + drop
    average = average + drop
    whole, count = Z.sum(0), n.sum(0)
    centre = ratio((Z * average).sum(0), whole)
    middle = (n * mean).sum(0) / count.clamp(min=1.0)
    return Part(
        n=count,
        total=total.sum(0),
        m=m[-1],
        Z=whole,
        norm=torch.linalg.vector_norm(norm * decay, dim=0),
        average=centre,
        W=(W + Z * (average - centre).square()).sum(0),
        offset=middle - centre,
        M2=(M2 + n * (mean - middle).square()).sum(0),
    )


def _unit(log2: float) -> float:
    """Factor that converts a score to natural units: 1 if no factor was folded into it."""
    return LN2 if log2 == 1.0 else 1.0


def row_fields(stacked: Tensor, log2: float) -> dict[str, Tensor]:
    """Fields of a row state, in natural units.

    Args:
        stacked: the fields of :class:`Part` and, last, the scores of the first visible keys.
        log2: what turns their scores into units of log 2.
    """
    part, first = Part(*stacked[:-1]), stacked[-1]
    average, unit = part.average * LN2, _unit(log2)
    # a visible score of −inf has no weight, and weight times score is no number
    known = torch.where(part.total == -torch.inf, torch.nan, 0.0)
    return {
        "n": part.n,
        "m": part.m * unit,
        "Z": part.Z.clone(),
        "U": average * part.Z + known,
        "W": part.W * LN2**2 + known,
        "Q": part.norm.square(),
        "mean": part.total * unit / part.n.clamp(min=1.0),
        "M2": part.M2 * LN2**2 + known,
        "depth": torch.where(part.n == 0, 0.0, (part.average + part.offset) * -LN2),
        "first": first * unit,
    }


class Running:
    """One tile row on its way through the keys."""

    def __init__(self, like: Tensor, moderate: bool, log2: float, gaps: bool = False) -> None:
        """Begin a row.

        Args:
            like: (blocks, rows, …), the row's queries.
            moderate: no score of this call exceeds :data:`MODERATE`.
            log2: what turns a score into units of log 2.
            gaps: also count keys by their distance below the maximum.
        """
        self._like, self._moderate, self._log2 = like, moderate, log2
        self.unit = _unit(log2)
        self._parts: list[Part] = []
        self.first: Tensor | None = None
        self.first_index: Tensor | int = NO_KEY
        self._found = False
        self.O: Tensor | None = None
        self.R1: Tensor | None = None
        self.R2: Tensor | None = None
        self._gaps = gaps
        self.gaps: Tensor | None = None
        self.top: Tensor | None = None  # the bin of the maximum that ``gaps`` is about
        self.whole: Tensor | None = None  # O before dropout, where the noise sums need it

    def part(self) -> Part:
        """The sums over all tiles; those of a row without a tile are empty."""
        if self._parts:
            return _merged(self._parts, self._log2)
        zero = self._like.new_zeros(self._like.shape[:2])
        return Part(*[zero] * len(Part._fields))._replace(m=torch.full_like(zero, -torch.inf))

    def count(self) -> Tensor:
        """Number of keys each row has seen so far, (blocks, rows); exact, unlike ``part().n``."""
        if not self._parts:
            return torch.zeros(self._like.shape[:2], dtype=torch.int64, device=self._like.device)
        counts = torch.stack([part.n for part in self._parts])
        return counts.sum(0, dtype=torch.float64).to(torch.int64)

    def observe(
        self,
        s: Tensor,
        work: Work,
        tile: Tile,
        scratch: Buffers,
        keep: Tensor | None,
        centre: Tensor | None,
    ) -> None:
        """Add a tile of scores, which are overwritten."""
        self._first(s, work, tile)
        hidden = tile.hidden
        # columns that nothing is hidden in leave no row without a key
        populated = hidden is None or hidden.width < tile.width
        bounded = self._log2 == 1.0  # then no score is infinite, and hiding takes fewer steps
        if hidden is None:
            n = scratch.full(tile.width, *s.shape[:2])
            total = s.sum(-1)
        else:
            n = expand_rows(hidden.visible(tile.width, s.dtype), work)
            folded = as_mask_shape(s, work)
            if bounded:
                hidden.erase(folded)
            else:
                hidden.blank(folded)
            total = s.sum(-1)
            hidden.bury(folded, FLOOR if bounded and populated else -torch.inf)
        m = s.amax(-1)
        if self._parts:
            m = torch.maximum(self._parts[-1].m, m)
        if self._gaps:
            self._count_gaps(s, m, scratch)
        shift = m if populated and bounded else finite(m)
        t = s.sub_(shift.unsqueeze(-1))
        if self._log2 != 1.0:
            t.mul_(self._log2)
        if hidden is not None and not (bounded and populated):
            folded[..., hidden.start : hidden.stop].clamp_(min=FLOOR)
        e = torch.exp2(t, out=scratch("weights", *t.shape))
        self._add_values(e, shift, work, tile, keep, centre)
        Z, norm = e.sum(-1), torch.linalg.vector_norm(e, dim=-1)
        # moments about the tile's own means, in units of log 2
        average = ratio(row_dot(e, t), Z)
        t.sub_(average.unsqueeze(-1))
        W = row_dot(e.mul_(t), t)
        mean = total / (n if populated else n.clamp(min=1.0))
        offset = mean.sub_(shift).mul_(self._log2).sub_(average)
        offset, M2 = self._spread(t, n, offset, shift, hidden, work)
        self._parts.append(Part(n, total, m, Z, norm, average, W, offset, M2))

    def _count_gaps(self, s: Tensor, m: Tensor, scratch: Buffers) -> None:
        """Count a tile's keys by their distance below the maximum so far."""
        steps = self.unit / histogram.WIDTH
        top = torch.floor(m * steps)
        room = torch.mul(s, steps, out=scratch("gaps", *s.shape))
        found = histogram.fold(room, top)
        if self.gaps is not None and self.top is not None:
            found = found + histogram.aligned(self.gaps, self.top, top)
        self.gaps, self.top = found, top

    def _spread(
        self,
        t: Tensor,
        n: Tensor,
        offset: Tensor,
        shift: Tensor,
        hidden: Hidden | None,
        work: Work,
    ) -> tuple[Tensor, Tensor]:
        """Plain mean and squared deviations of ``t``, whose mean is close to ``offset``.

        Scores of ordinary size leave the mean exact enough, and where the mean is no further out
        than three deviations the square sum can be corrected for it. Only the other tiles pay for
        another pass or two; a device that would have to be waited for always does.
        """
        waits = t.device.type != "cpu"
        _erase(t, hidden, work)
        if waits or not (self._moderate or moderate(shift)):
            offset = t.sum(-1).div_(n.clamp(min=1.0))
        squares = torch.linalg.vector_norm(t, dim=-1).square_()
        corrected = torch.addcmul(squares, offset, n * offset, value=-1.0)
        if not waits and not bool((corrected < 0.1 * squares).any()):
            return offset, corrected
        t.sub_(offset.unsqueeze(-1))
        _erase(t, hidden, work)
        return offset, torch.linalg.vector_norm(t, dim=-1).square_()

    def _first(self, s: Tensor, work: Work, tile: Tile) -> None:
        """Store the score and index of each row's first visible key."""
        if self._found:
            return
        first = tile.first()
        if first is None and self.first is None:
            self.first, self.first_index, self._found = s[..., 0].clone(), tile.start, True
            return
        if first is None:
            score, index = s[..., 0], torch.full(s.shape[:2], tile.start, device=s.device)
        else:
            column, seen = (expand_rows(part, work) for part in first)
            score = torch.where(seen, s.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
            index = torch.where(seen, column + tile.start, NO_KEY)
        if self.first is not None and isinstance(self.first_index, Tensor):
            score = torch.where(index < self.first_index, score, self.first)
            index = torch.minimum(index, self.first_index)
        self.first, self.first_index = score, index
        self._found = first is None or bool((index != NO_KEY).all())

    def _add_values(
        self,
        e: Tensor,
        shift: Tensor,
        work: Work,
        tile: Tile,
        keep: Tensor | None,
        centre: Tensor | None,
    ) -> None:
        """Add a tile's Σ e v, with dropout if ``keep`` is given.

        If ``centre`` is given, also add Σ e² (v - centre) and Σ e² ‖v - centre‖².
        """
        if work.value is None:
            return
        decay = None
        if self._parts:
            drop = (finite(self._parts[-1].m) - shift).clamp_(FLOOR, 0.0)
            decay = torch.exp2(drop.mul_(self._log2)).unsqueeze(-1)
        value = columns(work.value, tile)
        self.O = _add(self.O, decay, e if keep is None else e * keep, value)
        if centre is None:
            return
        if keep is not None:
            self.whole = _add(self.whole, decay, e, value)
        decay = None if decay is None else decay.square()
        squared, v = e * e, value - centre
        self.R1 = _add(self.R1, decay, squared, v)
        self.R2 = _add(self.R2, decay, squared, v.square().sum(-1, keepdim=True))


def _add(sums: Tensor | None, decay: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """Decay what was summed before, and add the weighted sum of a tile's values."""
    if sums is None or decay is None:
        return torch.bmm(weights, values)
    return sums.mul_(decay).baddbmm_(weights, values)
