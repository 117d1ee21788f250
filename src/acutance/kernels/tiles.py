r"""Tiles: how a call is split, how scores are computed, and the running sums of a row of tiles.

A tile is some heads × some query rows × some keys. The query heads that share a key head become
rows of one matrix product, so grouped queries never repeat a key.

A tile leaves a :class:`Part`, moments about its own means. The parts of a row are merged once, when
its last tile is through, and turned into the fields of a row state for many rows at a time: a
tile costs its passes over the scores and little else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.masks import Hidden, Masking, Region, Tile
from acutance.rowstats import gaps as histogram

#: Elements of one tile: a buffer of 2 MiB in float32, which stays in a shared cache.
TILE_ELEMENTS = 1 << 19
#: Query rows of a tile: at least, where position hides keys, and at most.
TILE_ROWS = 128
LEVEL_ROWS = 512


class Buffers:
    """Tile-sized scratch tensors, allocated once per call and reshaped for ragged tiles.

    Views are cached too, since tiles have few different shapes.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._store: dict[str, Tensor] = {}
        self._views: dict[tuple[str | float, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A reusable, uninitialised tensor of that name and shape."""
        if (name, shape) not in self._views:
            count = prod(shape)
            if name not in self._store or self._store[name].numel() < count:
                self._store[name] = self._like.new_empty(count, dtype=self._dtype)
                self._views = {key: view for key, view in self._views.items() if key[0] != name}
            self._views[name, shape] = self._store[name][:count].view(shape)
        return self._views[name, shape]

    def names(self) -> set[str]:
        """Names of the tensors allocated so far."""
        return set(self._store)

    def trim(self) -> None:
        """Drop all views, and tensors larger than a tile."""
        self._views = {}
        limit = 2 * TILE_ELEMENTS
        self._store = {name: part for name, part in self._store.items() if part.numel() <= limit}

    def full(self, value: float, *shape: int) -> Tensor:
        """A constant tensor, which must not be written to."""
        if (value, shape) not in self._views:
            self._views[value, shape] = self._like.new_full(shape, value, dtype=self._dtype)
        return self._views[value, shape]


class _Pool(threading.local):
    """Buffers of this thread that are not in use, by device and dtype."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.device, torch.dtype], Buffers] = {}


_POOL = _Pool()


@contextmanager
def lent_buffers(like: Tensor, dtype: torch.dtype) -> Iterator[Buffers]:
    """Buffers for one call, those of an earlier call if they are free.

    New pages from the operating system would cost a call of 1,024 keys a tenth of its time. Between
    calls each thread holds the memory of a few tiles.
    """
    if like.device.type != "cpu" or torch.is_inference_mode_enabled():
        yield Buffers(like, dtype)  # what is made in inference mode is of no use outside of it
        return
    name = (like.device, dtype)
    buffers = _POOL.free.pop(name, None) or Buffers(torch.empty(0, device=like.device), dtype)
    yield buffers  # those of a call that fails are not used again
    buffers.trim()
    _POOL.free[name] = buffers


class Work(NamedTuple):
    """One block of query rows of some heads, with the keys and values of these heads."""

    region: Region
    blocks: int  # batch × key heads: the matrix products' batch
    fold: tuple[int, int, int, int]  # batch, heads, group, rows
    key: Tensor  # (blocks, S, E)
    value: Tensor | None  # (blocks, S, Ev)


def tile_shape(masking: Masking) -> tuple[int, int]:
    """Query rows and keys of a tile.

    Causal masks and windows get fewer rows, so that fewer hidden scores near the diagonal are
    computed. A tile grows with the number of threads, so that starting them pays off.
    """
    level = LEVEL_ROWS
    span = masking.keys if masking.window is None else 2 * masking.window
    if masking.causal or masking.window is not None:
        level = min(level, max(TILE_ROWS, span // 32))
    rows = max(1, min(masking.queries, level // masking.group))
    width = min(masking.keys, max(256, _elements(masking) // (rows * masking.group)))
    return rows, width


def _elements(masking: Masking) -> int:
    """Number of scores per tile; it grows with the number of threads."""
    threads = min(8, torch.get_num_threads()) if masking.device.type == "cpu" else 32
    return TILE_ELEMENTS * threads


def tile_rows(call: KernelCall) -> Iterator[Work]:
    """Split a call into blocks of query rows, each with enough heads to fill a tile.

    Keys and values that need no copy are sliced separately for every tile row, so that early
    causal rows, which see few keys, combine more heads. Others are copied once for all rows.
    """
    masking, dtype = call.masking, accumulate_dtype(call.query.dtype)
    rows, width = tile_shape(masking)
    starts = range(0, masking.queries, rows)
    if all(_mergeable(t, dtype) for t in (call.key, call.value) if t is not None):
        cut: dict[tuple[int, int, int, int], Work] = {}
        for i in starts:
            row = slice(i, min(i + rows, masking.queries))
            first, last, *_ = masking.band(row.start, row.stop - 1)
            for batch, head in _blocks(masking, rows, min(width, last - first)):
                name = (batch.start, batch.stop, head.start, head.stop)
                if name not in cut:
                    cut[name] = _work(call, Region(batch, head, row), dtype)
                yield _at_rows(cut[name], row)
        return
    for batch, head in _blocks(masking, rows, width):
        whole = _work(call, Region(batch, head, slice(0, rows)), dtype)
        for i in starts:
            yield _at_rows(whole, slice(i, min(i + rows, masking.queries)))


def _at_rows(work: Work, rows: slice) -> Work:
    """The block of the same heads with other query rows."""
    region = Region(work.region.batch, work.region.heads, rows)
    return work._replace(region=region, fold=(*work.fold[:3], rows.stop - rows.start))


def _mergeable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether batch and heads fold into one dimension of a view."""
    batch, heads = tensor.shape[:2]
    folds = batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)
    return folds and tensor.dtype == dtype


def _blocks(masking: Masking, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batches and key heads, each with about as many scores as a tile may have."""
    blocks = max(1, _elements(masking) // (rows * masking.group * max(1, width)))
    heads = max(1, min(masking.heads, blocks))
    batches = max(1, min(masking.batch, blocks // max(1, masking.heads)))
    for b in range(0, masking.batch, batches):
        for h in range(0, masking.heads, heads):
            yield (
                slice(b, min(b + batches, masking.batch)),
                slice(h, min(h + heads, masking.heads)),
            )


def _work(call: KernelCall, region: Region, dtype: torch.dtype) -> Work:
    """The block of query rows of a region, with keys and values in the accumulation dtype."""
    k, v = (
        None if tensor is None else tensor[region.batch, region.heads].to(dtype).flatten(0, 1)
        for tensor in (call.key, call.value)
    )
    fold = (
        region.batch.stop - region.batch.start,
        region.heads.stop - region.heads.start,
        call.masking.group,
        region.rows.stop - region.rows.start,
    )
    assert k is not None
    return Work(region, fold[0] * fold[1], fold, k, v)


def fold_rows(tensor: Tensor, work: Work) -> Tensor:
    """Cut the rows of a block out of (B, H, group, L, …), as (blocks, group × rows, …)."""
    region = work.region
    part = tensor[region.batch, region.heads, :, region.rows]
    return part.reshape(work.blocks, -1, *part.shape[4:])


def tile_scores(
    q: Tensor, work: Work, tile: Tile, softcap: float | None, scratch: Buffers
) -> Tensor:
    """Scores of a tile before masking, (blocks, rows, keys), in the buffer ``scores``.

    With a softcap, its derivative 1 − (s/cap)² is in the buffer ``slope`` for the backward pass.
    """
    shape = (work.blocks, q.shape[1], tile.width)
    s = scratch("scores", *shape)
    torch.bmm(q, columns(work.key, tile).mT, out=s)
    if softcap is not None:
        s.div_(softcap).tanh_()
        slope = scratch("slope", *shape)
        torch.mul(s, s, out=slope).neg_().add_(1.0)
        s.mul_(softcap)
    folded = as_mask_shape(s, work) if tile.alibi is not None or tile.biases else s
    if tile.alibi is not None:
        slopes, distance = tile.alibi
        folded.addcmul_(slopes.to(s.dtype), distance.to(s.dtype), value=-1.0)
    for bias in tile.biases:
        folded.add_(bias.to(s.dtype))
    return s


def columns(rows: Tensor, tile: Tile) -> Tensor:
    """The keys or values of a tile, cut out of (blocks, S, …)."""
    return rows if tile.width == rows.shape[1] else rows[:, tile.start : tile.stop]


def as_mask_shape(s: Tensor, work: Work) -> Tensor:
    """View a tile (blocks, group × rows, keys) as (batch, heads, group, rows, keys), like masks."""
    return s.view(*work.fold, s.shape[-1])


def expand_rows(values: Tensor, work: Work) -> Tensor:
    """Broadcast one value for each row, (…, rows) as in a mask, to (blocks, group × rows)."""
    return values.expand(work.fold).reshape(work.blocks, -1)


def draw_kept(
    shape: tuple[int, ...], dropout_p: float, generator: torch.Generator | None, like: Tensor
) -> Tensor | None:
    """Random dropout factors for the weights of a tile, 0 or 1/(1 − p); None without dropout."""
    if generator is None:
        return None
    draw = torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)
    return (draw >= dropout_p).to(like.dtype).div_(1.0 - dropout_p)


def dropout_generator(call: KernelCall) -> torch.Generator | None:
    """A generator that gives a call the same dropout in the forward and backward pass."""
    if call.dropout_p == 0.0:
        return None
    generator = torch.Generator(device=call.query.device)
    generator.manual_seed(0 if call.seed is None else int(call.seed))
    return generator


def sink_rows(call: KernelCall, work: Work, like: Tensor) -> Tensor | None:
    """The sink logits of a block of query rows, (blocks, rows), or None."""
    if call.sinks is None:
        return None
    heads = call.masking.heads, call.masking.group
    sinks = call.sinks.to(like.dtype).view(heads)[work.region.heads]
    return expand_rows(sinks[None, :, :, None], work)


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
