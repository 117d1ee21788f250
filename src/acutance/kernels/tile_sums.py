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

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
#: Hidden scores are clamped here, so that weight × score is 0 and never 0 · −inf. Visible ones in
#: the same block pass through the clamp too: it lies below any of them; its square is finite.
FLOOR = -1e18
#: Index of the first visible key of a row that has none.
NO_KEY = torch.iinfo(torch.int64).max
#: Scores below this leave the mean of a float32 tile exact enough to take its deviations from.
MODERATE = 64.0
#: Maxima that lie no further above the means, in nats, of tiles at least so wide: distances from
#: the means are then as exact as those from the maxima, and cost two passes less.
REACH, LONG = 8.0, 256
#: Smallest number that sums are divided by.
TINY = torch.finfo(torch.float32).tiny
#: Tiles of a row that wait to be merged.
PENDING = 32


def finite(m: Tensor) -> Tensor:
    """The maximum, or 0 for a row that has seen no key, so that it can be subtracted."""
    return torch.where(m == -torch.inf, 0.0, m)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A sum divided by its weight, 0 if both are 0 (an empty block)."""
    return numerator / denominator.clamp(min=TINY)


def inverse_normaliser(Z: Tensor, m: Tensor, sink: Tensor | None) -> Tensor:
    """1 / (Z + e^(sink − m)); 0 for a row with nothing to attend to."""
    whole = Z if sink is None else Z + torch.exp(sink - finite(m))
    return torch.where(whole == 0, 0.0, 1.0 / whole)


def _erase(values: Tensor, hidden: Hidden | None, work: Work) -> None:
    """Set ``values`` (blocks, rows, keys) of a tile to 0 at its hidden keys, in place."""
    if hidden is not None:
        hidden.erase(as_mask_shape(values, work))


class Part(NamedTuple):
    """Sums over the keys of one tile, or of several; every field (blocks, rows).

    ``t`` are the scores' distances from ``reference`` in units of log 2, ``e`` = 2^t.
    """

    n: Tensor  #: visible keys
    mean: Tensor  #: plain mean of the scores
    reference: Tensor  #: a tile's mean, or its maximum
    m: Tensor  #: maximum
    offset: Tensor  #: plain mean of t
    Z: Tensor  #: Σ e
    norm: Tensor  #: √Σ e²
    average: Tensor  #: weighted mean of t
    W: Tensor  #: Σ e (t − average)²
    spread: Tensor  #: √Σ (t − offset)²
    first: Tensor  #: score of the first visible key; 0 without one


class ValueSums(NamedTuple):
    """Weighted sums of values over the keys of one tile, or of several, (blocks, rows, Ev)."""

    O: Tensor  #: Σ e v, with dropout
    whole: Tensor | None  #: Σ e v without it, where dropout and the noise metrics are requested
    R1: Tensor | None  #: Σ e² (v − centre)
    R2: Tensor | None  #: Σ e² ‖v − centre‖²


def _unit(log2: float) -> float:
    """Factor from scores to nats: log 2 if scores are in units of log 2 (``log2`` is 1), else 1."""
    return LN2 if log2 == 1.0 else 1.0


def _about_maximum(part: Part, m: Tensor, log2: float | Tensor) -> tuple[Part, Tensor]:
    """The same sums with weights e = exp(s − m) for another reference ``m``, the row's maximum.

    Returns:
        The sums, and the factor exp(old reference − m) by which the weights changed.
    """
    drop = (part.reference - finite(m)).clamp_(FLOOR, 0.0).mul_(log2)
    decay = torch.exp2(drop)
    moved = part._replace(
        reference=m,
        m=m,
        offset=part.offset + drop,
        Z=part.Z * decay,
        norm=part.norm * decay,
        average=part.average + drop,
        W=part.W * decay,
    )
    return moved, decay


def _merged(tiles: list[Part], log2: float) -> tuple[Part, Tensor]:
    """Merge the sums of a row's tiles into the sums of the row.

    Args:
        tiles: sums of each tile, (blocks, rows).
        log2: factor that turns scores into units of log 2, as in :func:`_unit`.

    Returns:
        The merged sums, and the factor exp(m_tile − m) that rescales each tile's weights to the
        row's maximum, (tiles, blocks, rows).
    """
    parts = Part(*(torch.stack(field) for field in zip(*tiles, strict=True)))
    parts, decay = _about_maximum(parts, parts.m.amax(0), log2)
    whole, count = parts.Z.sum(0), parts.n.sum(0)
    seen = count.clamp(min=1.0)
    average = ratio((parts.Z * parts.average).sum(0), whole)
    offset = (parts.n * parts.offset).sum(0) / seen
    apart = parts.spread.square() + parts.n * (parts.offset - offset).square()
    part = Part(
        n=count,
        mean=(parts.n * parts.mean).sum(0) / seen,
        reference=parts.m,
        m=parts.m,
        offset=offset,
        Z=whole,
        norm=torch.linalg.vector_norm(parts.norm, dim=0),
        average=average,
        W=(parts.W + parts.Z * (parts.average - average).square()).sum(0),
        spread=apart.sum(0).sqrt_(),
        first=parts.first[-1],
    )
    return part, decay


def row_fields(part: Part, log2: float) -> tuple[dict[str, Tensor], Tensor]:
    """Fields of a row state, in natural units, and the factor of sums about the reference.

    Args:
        part: the sums of all rows.
        log2: what turns their scores into units of log 2.
    """
    part, decay = _about_maximum(part, part.m, log2)
    average, unit = part.average * LN2, _unit(log2)
    # a visible score of −inf has no weight, and weight times score is not a number
    known = torch.where(part.mean == -torch.inf, torch.nan, 0.0)
    row = {
        "n": part.n,
        "m": part.m * unit,
        "Z": part.Z,
        "U": average * part.Z + known,
        "W": part.W.clamp(min=0.0) * LN2**2 + known,
        "Q": part.norm.square(),
        "mean": part.mean * unit,
        "M2": part.spread.square() * LN2**2 + known,
        "depth": torch.where(part.n == 0, 0.0, part.offset * -LN2),
        "first": part.first * unit,
    }
    return row, decay


class _Anywhere:
    """Stand-in for :class:`Part` whose fields are None, so that ``out=`` allocates new tensors."""

    mean = m = Z = norm = average = W = spread = None


class Running:
    """The running sums of one block of query rows, to which tiles of keys are added."""

    def __init__(
        self,
        like: Tensor,
        log2: float,
        gaps: bool,
        count: bool,
        rows: Part | None,
        out: Tensor | None,
    ) -> None:
        """Begin a block of query rows.

        Args:
            like: (blocks, rows, …), its queries.
            log2: factor from a score to units of log 2.
            gaps: also count keys by their distance below the maximum.
            count: also count keys by integers, where the floating ``Part.n`` is not exact.
            rows: tensors to write the sums into if there is only one tile.
            out: tensor for its sums of values in that case.
        """
        self._like, self._log2, self.rows, self.out = like, log2, rows, out
        self.unit = _unit(log2)
        self._parts: list[Part] = []
        self.first: Tensor | None = None
        self.first_index: Tensor | int = NO_KEY
        self._found = False
        self._values: list[ValueSums] = []
        self.count = like.new_zeros(like.shape[:2], dtype=torch.int64) if count else None
        self._gaps = gaps
        self.gaps: Tensor | None = None
        self._m: Tensor | None = None  # the maximum so far, and its bin, that ``gaps`` is about
        self._top: Tensor | None = None

    def finish(self, about_maximum: bool) -> tuple[Part, ValueSums | None]:
        """The sums over all tiles; those of a row without a tile are empty.

        Args:
            about_maximum: whether the maximum must be the reference of a single tile too.
        """
        if not self._parts:
            zero = self._like.new_zeros(self._like.shape[:2])
            part = Part(*[zero] * len(Part._fields))
            return part._replace(m=torch.full_like(zero, -torch.inf)), None
        if len(self._parts) > 1 or about_maximum:
            self._merge()
        return self._parts[0], self._values[0] if self._values else None

    def _merge(self) -> None:
        """Merge the sums of all tiles so far into the sums of one tile."""
        part, decay = _merged(self._parts, self._log2)
        self._parts = [part]
        if self._values:
            decay = decay.unsqueeze(-1)
            squared = decay.square()
            O, whole, R1, R2 = zip(*self._values, strict=True)
            self._values = [
                ValueSums(
                    _decayed(O, decay),
                    None if whole[0] is None else _decayed(whole, decay),
                    None if R1[0] is None else _decayed(R1, squared),
                    None if R2[0] is None else _decayed(R2, squared),
                )
            ]

    def observe(
        self,
        s: Tensor,
        work: Work,
        tile: Tile,
        scratch: Buffers,
        keep: Tensor | None,
        centre: Tensor | None,
    ) -> None:
        """Add the sums over one tile of keys; its scores ``s`` are overwritten.

        Args:
            s: scores before masks, (blocks, rows, keys).
            work: the block of query rows, with its keys and values.
            tile: which keys, with their biases and hidden keys.
            scratch: buffers for intermediate tensors.
            keep: dropout factors of the weights, or None.
            centre: point from which values are measured for the noise sums, or None.
        """
        self._first(s, work, tile)
        hidden = tile.hidden
        # columns that nothing is hidden in leave no row without a key
        populated = hidden is None or hidden.width < tile.width
        bounded = self._log2 == 1.0  # then no score is infinite, and hiding takes fewer steps
        into = _Anywhere if self.rows is None else self.rows
        if hidden is None:
            n = scratch.full(tile.width, *s.shape[:2])
            mean = torch.sum(s, -1, out=into.mean).div_(n)
        else:
            n = expand_rows(hidden.visible(tile.width, s.dtype), work)
            folded = as_mask_shape(s, work)
            if bounded:
                hidden.erase(folded)
            else:
                hidden.blank(folded)
            mean = torch.sum(s, -1, out=into.mean).div_(n if populated else n.clamp(min=1.0))
            hidden.bury(folded, FLOOR if bounded and populated else -torch.inf)
        m = torch.amax(s, -1, out=into.m)
        if self.count is not None:
            self.count += n.to(torch.int64)
        if self._gaps:
            self._count_gaps(s, m, scratch)
        near = self._near(m, mean, tile)
        reference = mean if near else m if populated and bounded else finite(m)
        t = s.sub_(reference.unsqueeze(-1))
        if self._log2 != 1.0:
            t.mul_(self._log2)
        if hidden is not None and not (bounded and populated):
            folded[..., hidden.start : hidden.stop].clamp_(min=FLOOR)
        e = torch.exp2(t, out=scratch("weights", *t.shape))
        if work.value is not None:
            self._values.append(_weigh(e, columns(work.value, tile), keep, centre, self.out))
        Z = torch.sum(e, -1, out=into.Z)
        norm = torch.linalg.vector_norm(e, dim=-1, out=into.norm)
        e.mul_(t)
        U = e.sum(-1)
        average = torch.div(U, Z if populated else Z.clamp(min=TINY), out=into.average)
        if near:  # what is subtracted is of the order of what is left
            offset = scratch.full(0.0, *Z.shape)
            _erase(t, hidden, work)
            spread = torch.linalg.vector_norm(t, dim=-1, out=into.spread)
            W = torch.sum(e.mul_(t), -1, out=into.W).addcmul_(U, average, value=-1.0)
        else:
            offset = (mean - reference).mul_(self._log2)
            t.sub_(average.unsqueeze(-1))
            W = torch.sum(e.mul_(t), -1, out=into.W)
            t.sub_((offset - average).unsqueeze(-1))
            _erase(t, hidden, work)
            spread = torch.linalg.vector_norm(t, dim=-1, out=into.spread)
        assert self.first is not None
        part = Part(n, mean, reference, m, offset, Z, norm, average, W, spread, self.first)
        if self.rows is not None:
            self.rows.n.copy_(n)
            self.rows.reference.copy_(reference)
            self.rows.first.copy_(self.first)
            if not near:  # it is 0 at first
                self.rows.offset.copy_(offset)
            part = self.rows
        self._parts.append(part)
        if len(self._parts) == PENDING:
            self._merge()

    def _near(self, m: Tensor, mean: Tensor, tile: Tile) -> bool:
        """Whether scores of a tile may be measured from their mean and not from the maximum ``m``.

        Only for wide tiles on the CPU, where the difference is small enough for exponentials.
        """
        if tile.width < LONG or m.device.type != "cpu":
            return False
        if float((m - mean).max()) * self.unit > REACH:
            return False
        return self._log2 == 1.0 or float(m.abs().max()) <= MODERATE

    def _count_gaps(self, s: Tensor, m: Tensor, scratch: Buffers) -> None:
        """Count a tile's keys by their distance below the maximum so far."""
        steps = self.unit / histogram.WIDTH
        self._m = m if self._m is None else torch.maximum(self._m, m)
        top = torch.floor(self._m * steps)
        room = torch.mul(s, steps, out=scratch("gaps", *s.shape))
        found = histogram.fold(room, top)
        if self.gaps is not None and self._top is not None:
            found = found + histogram.aligned(self.gaps, self._top, top)
        self.gaps, self._top = found, top

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


def _decayed(tiles: tuple[Tensor, ...], decay: Tensor) -> Tensor:
    """Sum over tiles of each tile's tensor times its decay factor."""
    return torch.stack(tiles).mul_(decay).sum(0)


def _weigh(
    e: Tensor, value: Tensor, keep: Tensor | None, centre: Tensor | None, out: Tensor | None
) -> ValueSums:
    """Sums of a tile's values weighted by ``e``; with ``centre``, also those for noise metrics."""
    O = torch.bmm(e if keep is None else e * keep, value, out=out)
    if centre is None:
        return ValueSums(O, None, None, None)
    squared, v = e * e, value - centre
    return ValueSums(
        O,
        None if keep is None else torch.bmm(e, value),
        torch.bmm(squared, v),
        torch.bmm(squared, v.square().sum(-1, keepdim=True)),
    )
