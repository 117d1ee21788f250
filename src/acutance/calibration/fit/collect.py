"""Row statistics of a model by head and by number of visible keys, in sums that jackknife."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, observe_scores
from acutance.capture.find_layers import windowed_layers
from acutance.capture.listener import Listener, ProbeError
from acutance.masks import Region
from acutance.rowstats import RowStatistics
from acutance.theory import critical_scale

__all__ = ["HELD", "TARGETS", "Collector", "LayerSums", "Target", "critical_scales", "row_scores"]

#: A target is held where the value is within this share of it.
HELD = 0.05
#: Sums kept of each row: one, x = log n, x², the value y, x·y, and dy/dlog λ.
SUMS = 6


@dataclass(frozen=True)
class Target:
    """A metric that a law can hold constant.

    Attributes:
        name: name of the metric.
        unit: unit of its values.
        slope: computes from the statistics of rows, for each row, the derivative of the metric y
            with respect to log λ, λ being the factor on its logits.
        floor: smallest change of the metric that is of interest.
        by_ratio: whether log y is closer to a straight line in λ² than y.
    """

    name: str
    unit: str
    slope: Callable[[RowStatistics], Tensor]
    floor: float
    by_ratio: bool = False

    def limits(self, n: float) -> tuple[float, float]:
        """Smallest and largest possible value of the metric for rows with n keys."""
        return {
            "entropy": (0.0, math.log(n)),
            "normalized_entropy": (0.0, 1.0),
            "effective_keys": (1.0, float(n)),
            "top_weight": (1.0 / n, 1.0),
            "max_logit": (-math.inf, math.inf),
        }[self.name]


def _entropy_slope(stats: RowStatistics) -> Tensor:
    """Derivative of each row's entropy by log λ."""
    return -stats["varentropy"]


def _per_log_n(stats: RowStatistics) -> Tensor:
    """Derivative of each row's entropy over log n by log λ."""
    spread = stats["varentropy"]
    return -spread / stats["n_keys"].clamp(min=2).to(spread.dtype).log()


def _keys_slope(stats: RowStatistics) -> Tensor:
    """Derivative of each row's effective keys by log λ, exact for normally distributed logits."""
    return -2 * stats["varentropy"] * stats["effective_keys"]


def _top_slope(stats: RowStatistics) -> Tensor:
    """Derivative of each row's largest weight by log λ."""
    return stats["top_weight"] * stats["max_gap"]


def _logit_slope(stats: RowStatistics) -> Tensor:
    """Derivative of each row's largest logit by log λ, the logit itself."""
    return stats["max_logit"]


#: What can be held constant. The slope of effective keys is that of normal logits, log N falling
#: twice as fast as H; the others follow from the row's own sums.
TARGETS = {
    one.name: one
    for one in (
        Target("entropy", "nat", _entropy_slope, 0.01),
        Target("normalized_entropy", "1", _per_log_n, 0.002),
        Target("effective_keys", "keys", _keys_slope, 0.02, by_ratio=True),
        Target("top_weight", "1", _top_slope, 0.002, by_ratio=True),
        Target("max_logit", "logit", _logit_slope, 0.0),
    )
}


@dataclass
class LayerSums:
    """Sums over the rows of one layer, by group of windows, bin of n, and head.

    A bin holds the rows whose number n of visible keys is at most a knot and above the previous
    knot, and above half the knot. Groups are parts of the text, for the jackknife.

    Attributes:
        sums: (groups, bins, heads, 6) float64: number of rows and their sums of log n, log² n, y,
            y log n and dy/d log λ, with y the target metric.
        top: largest logit, (groups, bins, heads) float64; −inf without rows. It includes the rows
            below half the knot, which ``sums`` leaves out.
        longest: largest n of a row in each bin, (bins,) int64.
    """

    sums: Tensor
    top: Tensor
    longest: Tensor

    @classmethod
    def none(cls, groups: int, bins: int, heads: int) -> LayerSums:
        """Sums of no rows."""
        return cls(
            torch.zeros(groups, bins, heads, SUMS, dtype=torch.float64),
            torch.full((groups, bins, heads), -torch.inf, dtype=torch.float64),
            torch.zeros(bins, dtype=torch.int64),
        )

    def add(self, other: LayerSums) -> None:
        """Add the sums of other rows to these."""
        self.sums += other.sums
        self.top = torch.maximum(self.top, other.top)
        self.longest = torch.maximum(self.longest, other.longest)


class Collector:
    """Collects :class:`LayerSums` of every layer while the model runs.

    Args:
        model: any module.
        target: metric to sum.
        knots: lengths, ascending; a row of n keys is in the bin of the first knot that is at least
            n, if n is above half that knot.
        groups: number of groups of windows.
        windowed: also collect layers with a sliding window.
        gaps: also compute the critical scale of some sampled rows.
        seed: seed of that sample.

    Attributes:
        group: group of each window of the next run, (windows,) int64.
        turn: index of that run.
        layers: what was collected, by module name.
        scales: critical scales of sampled rows, (heads, rows), by module name and bin.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        target: Target,
        knots: Sequence[int],
        groups: int,
        *,
        windowed: bool = False,
        gaps: bool = False,
        seed: int = 0,
    ) -> None:
        self._listener = Listener(model, self, listed_errors=(ValueError,))
        self.target, self.knots, self.windowed = target, tuple(knots), windowed
        self.groups = groups
        self.group = torch.zeros(0, dtype=torch.int64)
        self.layers: dict[str, LayerSums] = {}
        self.scales: dict[tuple[str, int], list[Tensor]] = {}
        self.turn = 0
        self._gaps, self._seed = gaps, seed
        self._windowed = windowed_layers(model)
        self._adding = threading.Lock()

    def take(self) -> dict[str, LayerSums]:
        """Return what was collected since the last call, by module name, and start anew."""
        with self._adding:
            found, self.layers = self.layers, {}
        return found

    def __enter__(self) -> Collector:
        self._listener.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._listener.__exit__(kind, *rest)
        if kind is None and not self._listener.calls:
            raise ProbeError(self._listener.nothing_captured())

    @property
    def unread(self) -> list[str]:
        """Attention that could not be read, with the reason."""
        return self._listener.unread

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Add the rows of a call."""
        name = call.module.partition("#")[0]
        real = self._listener.rows.real(call).rows
        if self._leaves_out(name, call.window):
            return
        self._collect(name, call.statistics(False), real, call)

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Add the rows of a hand-written softmax.

        Args:
            scores: (B, H, L, S).
            name: name of the module.
            doubt: returns why the softmax may not be attention's, or None; None needs no check.

        Raises:
            ValueError: with that reason.
        """
        module = name.partition("#")[0]
        if self._leaves_out(module, None):
            return
        why = doubt() if doubt is not None else None
        if why is not None:
            raise ValueError(why)
        stats, seen = observe_scores(scores)
        real = self._listener.rows.real_of_scores(scores, name, stats.state.n, seen)
        self._collect(module, stats, real.rows, None)

    def _leaves_out(self, name: str, window: int | None) -> bool:
        """Whether a call is skipped because its rows see only a window; it is then listed."""
        narrow = self._windowed.get(name, False) or window is not None
        if self.windowed or not narrow:
            return False
        self._listener.unreadable(name, "its rows see only a window (windowed=True fits it too)")
        return True

    def _collect(
        self, name: str, stats: RowStatistics, real: Tensor | None, call: AttentionCall | None
    ) -> None:
        """Add rows to the sums of a layer.

        Args:
            name: name of the module.
            stats: statistics of the rows, (B, H, L).
            real: boolean (B, L), False for padding; None if there is none.
            call: the call; None if only the scores are known.
        """
        n = stats.n_keys
        kept = n > 0 if real is None else (n > 0) & real[:, None, :]
        # a batch of another size (a vision tower's) cannot be distinguished by window
        batch = n.shape[0]
        group = self.group if self.group.shape[0] == batch else torch.zeros(batch).long()
        bins = len(self.knots)
        edges = torch.tensor(self.knots, device=n.device)
        place = torch.bucketize(n, edges)
        lowest = torch.tensor([knot / 2 for knot in (*self.knots, math.inf)], device=n.device)
        seen = kept & (place < bins)  # a bound holds for rows that are shorter too
        kept = seen & (n > lowest[place.clamp(max=bins)])
        values = stats[self.target.name].double()
        slopes = self.target.slope(stats).double()
        kept = kept & values.isfinite()
        heads = n.shape[1]
        found = LayerSums.none(self.groups, bins, heads)
        place_of = group.to(n.device)[:, None, None] * bins + place
        index = torch.where(kept, place_of, self.groups * bins)
        x = n.clamp(min=1).double().log()
        one = torch.ones_like(x)
        parts = (one, x, x * x, values, x * values, slopes)
        flat = index.transpose(0, 1).flatten(1)
        cells = self.groups * bins + 1
        for column, part in enumerate(parts):
            made = torch.where(kept, part, 0.0).transpose(0, 1).flatten(1)
            total = torch.zeros(heads, cells, dtype=torch.float64, device=n.device)
            total.scatter_add_(1, flat, made)
            found.sums[..., column] = _cells(total, self.groups, bins)
        top = torch.full((heads, cells), -torch.inf, dtype=torch.float64, device=n.device)
        logits = torch.where(seen, stats.max_logit.double(), -torch.inf)
        flat = torch.where(seen, place_of, self.groups * bins).transpose(0, 1).flatten(1)
        top.scatter_reduce_(1, flat, logits.transpose(0, 1).flatten(1), "amax")
        found.top = _cells(top, self.groups, bins)
        for k in range(bins):
            rows = kept & (place == k)
            if bool(rows.any()):
                found.longest[k] = int(torch.where(rows, n, 0).max())
        scales = self._sample(name, call, kept, place) if self._gaps and call is not None else {}
        with self._adding:
            self.layers.setdefault(name, LayerSums.none(self.groups, bins, heads)).add(found)
            for k, part in scales.items():
                self.scales.setdefault((name, k), []).append(part)

    def _sample(
        self, name: str, call: AttentionCall, kept: Tensor, place: Tensor
    ) -> dict[int, Tensor]:
        """Critical scales of one row of each window, (heads, windows), by bin; up to 32 a bin."""
        found = {}
        for k in range(len(self.knots)):
            have = sum(part.shape[1] for part in self.scales.get((name, k), ()))
            rows = (kept & (place == k)).all(1).any(0).nonzero().squeeze(1).cpu()
            if have >= _SAMPLED or not rows.numel():
                continue
            drawn = zlib.crc32(f"{self._seed} {self.turn} {name} {k}".encode())
            row = int(rows[drawn % rows.numel()])
            windows = (kept & (place == k))[:, :, row].all(1)
            scales = critical_scales(call, row)[windows.cpu()]
            found[k] = scales[: _SAMPLED - have].T
        return found


_SAMPLED = 32


def _cells(total: Tensor, groups: int, bins: int) -> Tensor:
    """Reshape (heads, groups · bins + 1) to (groups, bins, heads) without the last column."""
    cells: Tensor = total[:, :-1].unflatten(1, (groups, bins))
    return cells.permute(1, 2, 0).cpu()


def row_scores(call: AttentionCall, row: int) -> Tensor:
    """Scores of one row of every sequence and head, in float64.

    Args:
        call: the captured call.
        row: index of the query.

    Returns:
        (B, Hq, keys), −inf where a key is hidden, without keys that none of these rows can see.
    """
    query, key = call.query, call.key
    masking = call.masking()
    batch, heads = slice(0, query.shape[0]), slice(0, key.shape[1])
    region = Region(batch, heads, slice(row, row + 1))
    parts = []
    for tile in masking.tiles(region, max(1, key.shape[2])):
        keys = key[:, :, None, tile.start : tile.stop].double()
        queries = query[:, :, row : row + 1].double().unflatten(1, (masking.heads, masking.group))
        scores = queries @ keys.transpose(-1, -2) * call.factor
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        for bias in tile.biases:
            scores = scores + bias.double()
        if tile.hidden is not None:
            where = slice(tile.hidden.start, tile.hidden.stop)
            hidden = tile.hidden.mask.expand(*scores.shape[:-1], tile.hidden.width)
            scores[..., where] = scores[..., where].masked_fill(hidden, -torch.inf)
        parts.append(scores.flatten(1, 2).squeeze(2))
    return torch.cat(parts, -1) if parts else query.new_zeros(*query.shape[:2], 0).double()


def critical_scales(call: AttentionCall, row: int) -> Tensor:
    r"""Critical scale :math:`\Lambda = \sup_t \log N(t) / t` of one row of every sequence and head.

    N(t) is the number of keys with scores within t of the maximum. A factor above Λ on the scores
    makes the maximum dominate; so at Λ above 1 it does not dominate at the model's present scale.

    Args:
        call: the captured call.
        row: index of the query.

    Returns:
        (B, Hq); inf where two keys tie for the maximum, NaN if no key is visible.

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    scores = row_scores(call, row)
    if scores.shape[-1] == 0:
        return torch.full(scores.shape[:2], torch.nan, dtype=torch.float64)
    return torch.as_tensor(critical_scale(scores.cpu().numpy()), dtype=torch.float64).reshape(
        scores.shape[:2]
    )
