"""InfoNCE: the contrastive loss, with statistics of the weights on its negatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from acutance.attend import row_statistics
from acutance.rowstats import RowStatistics, merge
from acutance.scaling import newton_step
from acutance.shapes import FLOATS, check_flag, check_number, check_tensor
from acutance.training.across_ranks import gather_rows, ranks
from acutance.training.temperature import clamp_inward

__all__ = ["ContrastiveReport", "InfoNCE", "Temperature"]

Temperature = Literal["fixed", "learned", "log_n", "entropy_target"]
_LARGEST = 1000.0  # of 1/τ: cosines are sharper than anything there


@dataclass(frozen=True)
class ContrastiveReport:
    """Means over the rows of one contrastive loss, over both directions if symmetric.

    Attributes:
        loss: the loss, in nats.
        temperature: τ that was used.
        negatives: number of negatives per row (in the first direction).
        negative_entropy: entropy in nats of the weights among the negatives alone.
        effective_negatives: 1/Σp² of the same weights, the effective number of negatives.
        positive_weight: weight of the positive among all candidates.
        accuracy: share of rows whose positive exceeds every negative, by more than rounding.
    """

    loss: float
    temperature: float
    negatives: int
    negative_entropy: float
    effective_negatives: float
    positive_weight: float
    accuracy: float


class InfoNCE(nn.Module):
    r"""Contrastive loss: each anchor is classified among all positives by cosine over temperature.

    .. math:: \ell = -\frac{1}{B} \sum_i \log
              \frac{e^{s_{ii}}}{\sum_j e^{s_{ij}} + \sum_m e^{s_{im}}}, \qquad
              s_{ij} = \cos(a_i, b_j) / \tau

    j runs over the batch, m over the extra negatives. The sums are computed tile by tile like those
    of attention rows: memory is O(B) instead of B², also in the backward pass. Embeddings narrower
    than float32 are converted to it.

    ==================  ===========================================================================
    ``temperature``     1/τ
    ==================  ===========================================================================
    ``fixed``           1/``tau``
    ``learned``         trained as its logarithm, from 1/``tau``, at most 1/``minimum``
    ``log_n``           ``coefficient`` · log n, n the number of candidates of a row
    ``entropy_target``  after each training forward, one Newton step towards a measured entropy of
    the
                        negatives of ``target`` · log of their number; kept between 0.001 and 1000
    ==================  ===========================================================================

    Args:
        temperature: one of the four.
        tau: τ, or its initial value.
        minimum: lowest τ of ``learned``.
        coefficient: coefficient of ``log_n``.
        target: target of ``entropy_target``, between 0 and 1.
        symmetric: average with the loss in which the two sides are exchanged. Extra negatives are
            used only in the first.
        gather: use the other ranks' positives as negatives too; every rank must have the same
            number of pairs.
        group: process group of ``gather``.

    Attributes:
        report: :class:`ContrastiveReport` of the last forward; None before.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> anchor, positive = torch.randn(2, 64, 32)
        >>> criterion = InfoNCE("fixed", tau=0.1)
        >>> loss = criterion(anchor, anchor + positive)
        >>> report = criterion.report
        >>> print(f"{loss:.2f} {report.negatives} {report.effective_negatives:.0f}")
        0.22 63 12

    Source:
        van den Oord et al. (2018), arXiv:1807.03748; Radford et al. (2021), arXiv:2103.00020
        (symmetric, learned, 1/τ at most 100); Su (2023), https://kexue.fm/archives/9593 (a
        temperature that follows from n).
    """

    log_scale: Tensor

    def __init__(
        self,
        temperature: Temperature = "learned",
        *,
        tau: float = 0.07,
        minimum: float = 0.01,
        coefficient: float = 4.0,
        target: float = 0.5,
        symmetric: bool = False,
        gather: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__()
        if temperature not in get_args(Temperature):
            raise ValueError(
                f"temperature must be one of {', '.join(get_args(Temperature))}, got "
                f"{temperature!r}"
            )
        self.temperature = temperature
        start = -math.log(check_number("tau", tau, above=1 / _LARGEST, including=True))
        self.minimum = check_number("minimum", minimum, above=1 / _LARGEST, including=True)
        if temperature == "learned" and tau < minimum:
            raise ValueError(f"tau must be at least minimum={minimum!r}, got {tau!r}")
        self.coefficient = check_number("coefficient", coefficient, above=0.0)
        self.target = check_number("target", target, above=0.0, below=1.0)
        self.symmetric = check_flag("symmetric", symmetric)
        self.gather = check_flag("gather", gather)
        self.group = group
        self.report: ContrastiveReport | None = None
        if temperature == "learned":
            self.log_scale = nn.Parameter(torch.tensor(start))
        else:
            self.register_buffer("log_scale", torch.tensor(start))

    def scale(self, candidates: int) -> Tensor:
        """1/τ for rows of a given number of candidates; differentiable if learned."""
        if self.temperature == "log_n":
            return (self.coefficient * torch.log(self.log_scale.new_tensor(candidates))).detach()
        if self.temperature == "learned":
            return clamp_inward(self.log_scale, -math.inf, -math.log(self.minimum)).exp()
        return self.log_scale.exp()

    def forward(self, anchor: Tensor, positive: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss, a scalar, in nats.

        Args:
            anchor: (B, d), of any norm. A row of zeros has cosine 0 with all, and no gradient.
            positive: (B, d); row i belongs to anchor i.
            negatives: (M, d), further negatives of every anchor.

        Raises:
            TypeError: if an input is not a floating-point tensor.
            ValueError: if shapes do not fit, or there is no negative at all.
        """
        _check(anchor, positive, negatives)
        with torch.autocast(anchor.device.type, enabled=False):
            first, second = _unit(anchor), _unit(positive)
            extra = None if negatives is None else _unit(negatives)
            group = self.group if self.gather else None
            across = ranks(group)[1] if self.gather else 1
            if across * len(first) + (0 if extra is None else len(extra)) < 2:
                raise ValueError(
                    "a row must have at least one negative: pass two or more pairs, or "
                    f"negatives, got anchor {tuple(anchor.shape)}"
                )
            if self.symmetric and across * len(first) < 2:
                raise ValueError("symmetric needs at least two pairs, got one")
            sides = [self._side(first, second, extra)]
            if self.symmetric:
                sides.append(self._side(second, first, None))
            if self.temperature == "entropy_target" and self.training:
                self._follow([side[2] for side in sides])  # both directions had the same τ
        losses = torch.stack([side[0] for side in sides])
        self._store_report(losses, sides)
        return losses.mean()

    def _side(
        self, query: Tensor, key: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, Tensor, RowStatistics, Tensor]:
        """Loss, scale, statistics of the negatives (1, 1, B) and logits of the positives (B,)."""
        rank, size = ranks(self.group) if self.gather else (0, 1)
        keys = gather_rows(key, self.group) if size > 1 else key
        candidates = len(keys) + (0 if extra is None else len(extra))
        scale = self.scale(candidates).to(query)
        scaled = query * scale
        statistics = _statistics_of_others(scaled, keys, rank * len(query))
        if extra is not None:
            further = row_statistics(scaled[None, None], extra[None, None], scale=1.0)
            statistics = RowStatistics(merge(statistics.state, further.state))
        match = (scaled * key).sum(-1)
        loss = softplus(statistics.lse[0, 0] - match).mean()
        return loss, scale, statistics, match

    @torch.no_grad()
    def _follow(self, sides: list[RowStatistics]) -> None:
        """Move 1/τ by one Newton step towards the target entropy, averaged over rows and ranks.

        ``sides`` are the statistics of the rows of anchors and, if symmetric, of positives.
        """
        parts = [
            (
                statistics.entropy,
                statistics.varentropy,
                statistics.n_keys.to(statistics.entropy.dtype).log(),
            )
            for statistics in sides
        ]
        means = torch.stack([torch.stack([part.mean() for part in side]) for side in parts])
        means = means.detach().mean(0)
        if self.gather and ranks(self.group)[1] > 1:
            torch.distributed.all_reduce(means, group=self.group)
            means /= ranks(self.group)[1]  # the aim's too: extra negatives are each rank's own
        aim = self.target * means[2]
        moved = newton_step(self.log_scale.exp().to(means), means[0], means[1], aim)
        self.log_scale.copy_(moved.clamp(1e-3, _LARGEST).log())

    @torch.no_grad()
    def _store_report(
        self, losses: Tensor, sides: list[tuple[Tensor, Tensor, RowStatistics, Tensor]]
    ) -> None:
        """Store the report of the last call."""

        def mean(parts: list[Tensor]) -> float:
            return float(torch.stack([part.detach().double().mean() for part in parts]).mean())

        self.report = ContrastiveReport(
            loss=mean([losses]),
            temperature=1 / float(sides[0][1].detach()),
            negatives=int(sides[0][2].n_keys[0, 0, 0]),
            negative_entropy=mean([statistics.entropy for _, _, statistics, _ in sides]),
            effective_negatives=mean([statistics.effective_keys for _, _, statistics, _ in sides]),
            positive_weight=mean([torch.sigmoid(m - f.lse[0, 0]) for _, _, f, m in sides]),
            accuracy=mean([m - f.max_logit[0, 0] > _tie(m, s) for _, s, f, m in sides]),
        )

    def extra_repr(self) -> str:
        """The kind of temperature, for ``print``."""
        return f"{self.temperature!r}, symmetric={self.symmetric}, gather={self.gather}"


def _statistics_of_others(query: Tensor, key: Tensor, offset: int) -> RowStatistics:
    """Statistics of row i over all keys except ``offset + i``, (1, 1, B).

    Earlier keys form a causal row, and later keys one in reversed order; the two merge exactly.
    Subtracting one key from the sums over all would cancel if it has most of the weight.
    """
    before = row_statistics(
        query[None, None], key[None, None], is_causal=True, scale=1.0, query_offset=offset - 1
    )
    behind = row_statistics(
        query.flip(0)[None, None],
        key.flip(0)[None, None],
        is_causal=True,
        scale=1.0,
        query_offset=len(key) - offset - len(query) - 1,
    )
    turned = type(behind.state)(*(part.flip(2) for part in behind.state))
    return RowStatistics(merge(before.state, turned))


def _unit(rows: Tensor) -> Tensor:
    """Normalise rows to norm 1; rows of zeros stay zero, without gradient."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    largest = wide.detach().abs().amax(-1, keepdim=True)  # squares of 1e25 would overflow
    nonzero = largest > 0
    return normalize(wide * nonzero / torch.where(nonzero, largest, 1.0), dim=-1)


def _tie(match: Tensor, scale: Tensor) -> Tensor:
    """Largest difference of logits that rounding can produce."""
    return 8 * torch.finfo(match.dtype).eps * scale


def _check(anchor: Tensor, positive: Tensor, negatives: Tensor | None) -> None:
    """Check dtypes, devices and shapes of the embeddings."""
    arguments = {"anchor": anchor, "positive": positive}
    if negatives is not None:
        arguments["negatives"] = negatives
    for name, part in arguments.items():
        if check_tensor(name, part).dtype not in FLOATS:
            raise TypeError(f"{name} must be a floating-point tensor, got {part.dtype}")
        if part.dim() != 2 or part.shape[1] != anchor.shape[-1] or part.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape (rows, d) with the same d as anchor "
                f"{tuple(anchor.shape)}, got {tuple(part.shape)}"
            )
        if part.dtype != anchor.dtype or part.device != anchor.device:
            raise TypeError(
                f"{name} must have the dtype and device of anchor, {anchor.dtype} on "
                f"{anchor.device}, got {part.dtype} on {part.device}"
            )
    if len(anchor) != len(positive) or len(anchor) == 0:
        raise ValueError(
            "anchor and positive must contain at least one pair, got anchor "
            f"{tuple(anchor.shape)}, positive {tuple(positive.shape)}"
        )
