"""The running sums of a tile row: what is kept of a row between one tile of keys and the next."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.kernels.tiles import Buffers, Work, per_row, unfold
from acutance.masks import Hidden, Tile

__all__ = ["FLOOR", "LOG2E", "NO_KEY", "Running", "finite", "inverse_normaliser", "ratio"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
#: Hidden scores are clamped here, so that weight × score is 0 and never 0 · −inf. Visible ones in
#: the same block pass through the clamp too: it lies below any of them; its square is finite.
FLOOR = -1e18
#: Index of the first visible key of a row that has none.
NO_KEY = torch.iinfo(torch.int64).max


def finite(m: Tensor) -> Tensor:
    """A maximum that can be subtracted: 0 for a row that has seen no key."""
    return torch.where(m == -torch.inf, 0.0, m)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient of a sum by its weight, 0 where both are 0 (a block that holds nothing)."""
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise inner product of contiguous (blocks, rows, keys) tensors.

    As a batched matrix product it needs no temporary, but only long rows, laid out exactly so,
    reach the fast path of the matrix library (0.09 ns an element was measured, against 0.17 for a
    product and a sum, and 0.8 for other layouts).
    """
    if left.shape[-1] < 512:
        return torch.mul(left, right).sum(-1)
    rows = torch.bmm(left.flatten(0, 1).unsqueeze(1), right.flatten(0, 1).unsqueeze(1).mT)
    return rows.view(left.shape[:2])


def inverse_normaliser(Z: Tensor, m: Tensor, sink: Tensor | None) -> Tensor:
    """1 / (Z + e^(sink − m)); 0 for a row with nothing to attend to."""
    if sink is not None:
        return 1.0 / (Z + torch.exp(sink - m))
    return torch.where(Z == 0, 0.0, 1.0 / Z)


class Running:
    """The running sums of one tile row, each (blocks, rows)."""

    def __init__(self, like: Tensor, value_width: int, noise: bool) -> None:
        zero = like.new_zeros(like.shape[:2])
        self.m = torch.full_like(zero, -torch.inf)
        self.Z, self.U, self.W, self.Q = zero, zero, zero, zero
        self.n, self.mean, self.M2, self.depth = zero, zero, zero, zero
        self.first, self.found = zero, False
        self.first_index = torch.full_like(zero, NO_KEY, dtype=torch.int64)
        self.O = like.new_zeros(*like.shape[:2], value_width)
        self.R1 = torch.zeros_like(self.O) if noise else self.O[..., :0]
        self.R2 = zero
        self.whole: Tensor | None = None  # O before dropout, where the noise sums need it
        self.fresh = True

    def observe(
        self,
        s: Tensor,
        work: Work,
        tile: Tile,
        scratch: Buffers,
        keep: Tensor | None,
        centre: Tensor | None,
    ) -> None:
        """Add a tile, given its scores; they are overwritten."""
        self._first(s, work, tile)
        hidden, folded = tile.hidden, unfold(s, work)
        count = tile.count()
        if hidden is None or isinstance(count, int):
            n = torch.full_like(self.n, tile.width)
            mean = s.sum(-1).div_(tile.width)
        else:
            n = per_row(count, work).to(s.dtype)
            hidden.blank(folded)
            mean = s.sum(-1).div_(n.clamp(min=1.0))
            hidden.bury(folded, -torch.inf)
        m = s.amax(-1) if self.fresh else torch.maximum(self.m, s.amax(-1))
        shift = m if hidden is None else finite(m)
        t = s.sub_(shift.unsqueeze(-1)).mul_(LOG2E)
        if hidden is not None:
            folded[..., hidden.start : hidden.stop].clamp_(min=FLOOR)
        e = torch.exp2(t, out=scratch("weights", *t.shape))
        self._decay(shift)
        self._values(e, work, tile, keep, centre)
        Z, Q = e.sum(-1), torch.linalg.vector_norm(e, dim=-1).square_()
        # moments about the tile's own means, in units of log 2; each step readies t for the next
        average = ratio(row_dot(e, t), Z)
        t.sub_(average.unsqueeze(-1))
        W = row_dot(e.mul_(t), t) * LN2**2
        if hidden is not None:
            hidden.erase(folded)
        offset, M2 = self._spread(t, n, (mean - shift) * LOG2E - average, shift, hidden, folded)
        self._weighted(Z, average * LN2, W, Q)
        self._plain(n, mean, (average + offset) * -LN2, M2 * LN2**2)
        self.m, self.fresh = m, False

    def _spread(
        self,
        t: Tensor,
        n: Tensor,
        offset: Tensor,
        shift: Tensor,
        hidden: Hidden | None,
        folded: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Plain mean and squared deviations of ``t``, of which ``offset`` is nearly the mean.

        Scores of ordinary size leave the mean exact enough, and where the mean is no further out
        than three deviations the square sum can be corrected for it. Only the other tiles pay for
        another pass or two; a device that would have to be waited for always does.
        """
        waits, size = t.device.type != "cpu", shift.abs()
        # a row that holds no number takes no part, so that it changes no other row's path
        if waits or bool(((size >= 64.0) & (size != torch.inf)).any()):
            offset = t.sum(-1).div_(n.clamp(min=1.0))
        squares = torch.linalg.vector_norm(t, dim=-1).square_()
        excess = n * offset.square()
        if not waits and not bool((excess > 0.9 * squares).any()):
            return offset, squares - excess
        t.sub_(offset.unsqueeze(-1))
        if hidden is not None:
            hidden.erase(folded)
        return offset, torch.linalg.vector_norm(t, dim=-1).square_()

    def _first(self, s: Tensor, work: Work, tile: Tile) -> None:
        """Keep the score and index of each row's first visible key."""
        if self.found:
            return
        first = tile.first()
        if first is None and self.fresh:
            self.first, self.found = s[..., 0].clone(), True
            self.first_index = torch.full_like(self.first_index, tile.start)
            return
        if first is None:
            score, index = s[..., 0], torch.full_like(self.first_index, tile.start)
        else:
            column, seen = (per_row(part, work) for part in first)
            score = s.gather(-1, column.unsqueeze(-1)).squeeze(-1)
            index = torch.where(seen, column + tile.start, NO_KEY)
        new = index < self.first_index
        self.first = torch.where(new, score, self.first)
        self.first_index = torch.minimum(index, self.first_index)
        self.found = first is None or bool((self.first_index != NO_KEY).all())

    def _decay(self, shift: Tensor) -> None:
        """Rescale the sums to a maximum that has risen."""
        if self.fresh:
            return
        drop = (self.m - shift).clamp_(min=FLOOR)
        decay = torch.exp(drop)
        self.depth = torch.where(self.n == 0, 0.0, self.depth - drop)
        self.U = (self.U + drop * self.Z) * decay
        self.Z, self.W = self.Z * decay, self.W * decay
        self.Q = self.Q * decay.square()
        self.O.mul_(decay.unsqueeze(-1))
        if self.whole is not None:
            self.whole.mul_(decay.unsqueeze(-1))
        if self.R1.shape[-1]:
            self.R1.mul_(decay.square().unsqueeze(-1))
            self.R2 = self.R2 * decay.square()

    def _values(
        self, e: Tensor, work: Work, tile: Tile, keep: Tensor | None, centre: Tensor | None
    ) -> None:
        """Add Σ e v (with dropout where given) and, about ``centre``, the sums of e² v."""
        if work.value is None:
            return
        value = work.value[:, tile.start : tile.stop]
        if centre is not None:
            squared = e * e
            v = value - centre
            self.R1.baddbmm_(squared, v)
            self.R2 = self.R2 + torch.bmm(squared, v.square().sum(-1, keepdim=True)).squeeze(-1)
            if keep is not None:
                self.whole = torch.zeros_like(self.O) if self.whole is None else self.whole
                self.whole.baddbmm_(e, value)
        self.O.baddbmm_(e if keep is None else e * keep, value)

    def _weighted(self, Z: Tensor, average: Tensor, W: Tensor, Q: Tensor) -> None:
        """Add a tile's weighted sums, given its weighted mean."""
        if self.fresh:
            self.Z, self.U, self.W, self.Q = Z, average * Z, W, Q
            return
        total = self.Z + Z
        step = average - ratio(self.U, self.Z)
        self.W = self.W + W + step.square() * (self.Z * ratio(Z, total))
        self.Z, self.U, self.Q = total, self.U + average * Z, self.Q + Q

    def _plain(self, n: Tensor, mean: Tensor, depth: Tensor, M2: Tensor) -> None:
        """Add a tile's count, means and squared deviations (Chan's merge)."""
        if self.fresh:
            self.n, self.mean, self.depth, self.M2 = n, mean, depth, M2
            return
        total = self.n + n
        share = n / total.clamp(min=1.0)
        step = depth - self.depth  # between means, told from the maximum: exact at large logits
        self.M2 = self.M2 + M2 + step.square() * (self.n * share)
        self.mean = self.mean + (mean - self.mean) * share
        self.depth = self.depth + step * share
        self.n = total
